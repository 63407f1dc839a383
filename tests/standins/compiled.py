"""Stand-ins for libraries in C, compiled by the test that loads them, so that calls pass through the same binary interface."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


def shared_library(folder: Path, source: str, **defined: object) -> str:
    """Compile `source`, with these macros, to a library; its path."""
    file, library = folder / "standin.c", folder / "standin.so"
    file.write_text(source)
    macros = [f"-D{name}={value}" for name, value in defined.items()]
    try:
        subprocess.run(["cc", "-shared", "-fPIC", *macros, "-o", library, file], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no C compiler on this machine")
    return str(library)
