"""Makes `.venv` beside pyproject.toml, for `make env`; does nothing when it is already what is asked for.

A stamp in `.venv` says which Python, which folder and which pyproject.toml and constraints.txt it was made from. Another
Python or a moved folder means a new environment; other dependencies mean one pip run over the one that is there. The
stamp is written last, so an install that was cut short is taken up again. Standard library only, and syntax that Python
3.6 reads, so that an old Python can still say that it is too old.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
VENV = HERE / ".venv"
OLDEST = (3, 11)


def main() -> int:
    if sys.version_info < OLDEST:
        have = ".".join(str(part) for part in sys.version_info[:3])
        sys.stderr.write(
            f"Lifecycle Kit needs Python 3.11 or newer, and {sys.executable} is {have}."
            " Name another: make env PYTHON=python3.12\n"
        )
        return 1
    identity = f"Python {sys.version_info[0]}.{sys.version_info[1]} in {HERE}\n"
    listed = b"".join((HERE / name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))
    dependencies = hashlib.sha256(listed).hexdigest() + "\n"
    made, ready = VENV / ".made", VENV / ".ready"
    if text(made) == identity and text(ready) == dependencies:
        return 0
    if VENV.is_symlink():  # to make it anew would empty what somebody else uses
        sys.stderr.write(
            f"{VENV} is a link to {VENV.resolve()}, which was not made for this folder. Remove the link, then run make env again.\n"
        )
        return 1
    if text(made) != identity:
        subprocess.check_call([sys.executable, "-m", "venv", "--clear", str(VENV)])
        made.write_text(identity)
    pip = [str(VENV / "bin" / "python"), "-m", "pip"]
    subprocess.check_call([*pip, "install", "-c", "constraints.txt", "-e", ".[dev]"], cwd=str(HERE))
    ready.write_text(dependencies)
    return 0


def text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(f"make env stopped: {' '.join(error.cmd)} ended with {error.returncode}.")
