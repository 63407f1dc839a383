"""The kit's version, as it was installed or as its checkout says, and where its notebooks, docs and data are.

Ranks of another environment reach the kit by its path.
"""

from __future__ import annotations

from pathlib import Path


def kit_version() -> str:
    import re
    from importlib.metadata import PackageNotFoundError, version  # slow enough to notice in `kit --help`

    try:
        return version("lifecycle-kit")
    except PackageNotFoundError:
        project = Path(__file__).resolve().parents[1] / "pyproject.toml"
        line = re.search(r'^version = "(.+)"$', project.read_text(), re.MULTILINE) if project.exists() else None
        return line[1] if line else "0+unknown"


def shipped(name: str) -> Path:
    """`notebooks`, `docs` or `data`: beside the code in a checkout, else where a wheel put them."""
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file():
        return checkout / name
    import sys
    from importlib.metadata import PackageNotFoundError, files

    try:
        known = files("lifecycle-kit") or []
    except PackageNotFoundError:
        known = []
    readme = [Path(str(file.locate())) for file in known if file.as_posix().endswith("share/lifecycle-kit/README.md")]
    home = readme[0].resolve().parent if readme else Path(sys.prefix) / "share" / "lifecycle-kit"
    return home / name
