"""Creates or updates `.venv` beside pyproject.toml, for `make env`.

Two stamps in `.venv` record its Python and folder, and the hash of pyproject.toml and constraints.txt. If Python or folder
changed, the environment is created anew; if dependencies changed, pip runs in the existing one. The second stamp is written
last, so an interrupted install continues. The syntax is that of Python 3.6, so that an old Python can report that it is too old.
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
    if VENV.is_symlink():  # creating it anew would empty an environment that others use
        sys.stderr.write(
            f"{VENV} is a link to {VENV.resolve()}, which was not made for this folder. Remove the link, then run make env again.\n"
        )
        return 1
    if text(made) != identity:
        subprocess.check_call([sys.executable, "-m", "venv", "--clear", str(VENV)])
        made.write_text(identity)
    pip = [str(VENV / "bin" / "python"), "-m", "pip"]
    subprocess.check_call([*pip, "install", "-c", "constraints.txt", "-e", ".[dev,hf]"], cwd=str(HERE))
    ready.write_text(dependencies)
    return 0


def text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(f"make env stopped: {' '.join(error.cmd)} ended with {error.returncode}.")
