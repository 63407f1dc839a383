# PYTHON_ARGCOMPLETE_OK
"""`python -m kit` runs `kit`."""

import sys


def main() -> int:
    try:
        from kit.cli import main as run_command

        return run_command()
    except KeyboardInterrupt:  # while modules load; later ones are answered by the command
        print("kit: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
