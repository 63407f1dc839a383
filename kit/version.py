"""The kit's own version: as it was installed, else as its checkout says. Ranks of another environment reach the kit by its path."""

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
