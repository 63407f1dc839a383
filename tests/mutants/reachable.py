"""The sources that a lab can reach: a result of its mutants holds as long as none of them changes."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.mutants.mutant import ROOT

RUNS_IT = ROOT / "kit" / "public.py"
# They decide nothing about a new run: what draws, and what reads runs of older versions.
LEFT_OUT = tuple(ROOT / "kit" / name for name in ("draw", "view", "results/old.py"))


def digest(lab: str) -> str:
    hashed = hashlib.sha256()
    for path in sources(lab):
        hashed.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return hashed.hexdigest()[:12]


@cache
def sources(lab: str) -> list[Path]:
    """The files of the lab and of what runs it, with all that they import or name in a string, such as "kit.world.agentside"."""
    reached: set[Path] = set()
    waiting = [RUNS_IT, *(ROOT / "kit" / "labs" / lab).rglob("*.py")]
    while waiting:
        path = waiting.pop()
        if path not in reached and not any(map(path.is_relative_to, LEFT_OUT)):
            reached.add(path)
            waiting += [file for name in named(path) for file in files_of(name)]
    return sorted(reached)


def named(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.Constant(value=str(text)) if text.startswith("kit."):
                yield text.partition(":")[0]


def files_of(name: str) -> Iterator[Path]:
    """The module of a name, and the packages that are imported before it."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1 if parts[0] == "kit" else 1):
        path = ROOT.joinpath(*parts[:count])
        yield from (file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file())
