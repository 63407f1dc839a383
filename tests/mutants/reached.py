"""Which statements of a file a run reaches: an instrumented copy of the file notes each one in a folder beside it, in every process."""

from __future__ import annotations

import ast
import os
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "build" / "reached"  # of the copy in which this file lies
NAME = "_kit_reached"
_noted: set[str] = set()

Lines = set[tuple[str, int]]


def note(file: str, line: int) -> None:
    place = f"{file}:{line}"
    if place not in _noted:
        _noted.add(place)
        with (FOLDER / str(os.getpid())).open("a") as notes:
            notes.write(place + "\n")


def noted(folder: Path) -> Lines:
    """Return all places noted there so far, and forget them."""
    lines = set()
    for notes in folder.iterdir():
        for place in notes.read_text().split():
            file, _, line = place.rpartition(":")
            lines.add((file, int(line)))
        notes.unlink()
    return lines


def instrumented(source: str, file: str) -> str:
    """Put a note before each statement in a function; every other statement runs at the import."""
    tree = ast.parse(source)
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        annotate(function, file)
    future = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    after = tree.body.index(future[-1]) + 1 if future else 0
    tree.body[after:after] = ast.parse(f"from tests.mutants.reached import note as {NAME}").body
    return ast.unparse(ast.fix_missing_locations(tree))


def annotate(node: ast.AST, file: str) -> None:
    """Annotate the blocks of one function; functions in it have their turn as well."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
            setattr(node, name, with_notes(block, file))
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        annotate(part, file)


def with_notes(block: list[ast.stmt], file: str) -> list[ast.stmt]:
    result: list[ast.stmt] = []
    for statement in block:
        result += [*ast.parse(f"{NAME}({file!r}, {statement.lineno})").body, statement]
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
            annotate(statement, file)
    return result


def statement_of(source: str, line: int) -> int:
    """Return the first line of the innermost statement of a function that holds a line, or 0 where no function does."""
    place = 0
    for function in [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]:
        if not function.body[0].lineno <= line <= (function.end_lineno or 0):
            continue
        inside = [
            node
            for node in ast.walk(function)
            if isinstance(node, ast.stmt) and node is not function and node.lineno <= line <= (node.end_lineno or 0)
        ]
        place = max([place, *(node.lineno for node in inside)])
    return place
