"""Which statements of a file a run or a test reaches: an instrumented copy of the file notes each one in a folder beside it, in every
process.
"""

from __future__ import annotations

import ast
import mmap
import os
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "build" / "reached"  # of the copy in which this file lies
NAME = "_kit_reached"
_noted: set[tuple[int, str, int]] = set()

Lines = set[tuple[str, int]]


class Turn:
    """The turn of a run or a test, which all processes read: what they note belongs to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "turn").open("a+b") as file:
            file.truncate(16)
            self.numbers = memoryview(mmap.mmap(file.fileno(), 16)).cast("Q")  # this one, and the last that began

    @property
    def now(self) -> int:
        return self.numbers[0]

    @now.setter
    def now(self, number: int) -> None:
        self.numbers[0] = number

    def begin(self) -> int:
        self.numbers[1] += 1
        self.now = self.numbers[1]
        return self.now

    def noted(self, number: int) -> Lines:
        """Return all places that were noted in a turn."""
        lines = set()
        for notes in self.folder.glob(f"{number}-*"):
            for place in notes.read_text().split():
                file, _, line = place.rpartition(":")
                lines.add((file, int(line)))
        return lines


TURN = Turn(FOLDER)


def note(file: str, line: int) -> None:
    place = (TURN.now, file, line)
    if place not in _noted:
        _noted.add(place)
        with (FOLDER / f"{place[0]}-{os.getpid()}").open("a") as notes:
            notes.write(f"{file}:{line}\n")


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
    for function in functions(ast.parse(source)):
        if not function.body[0].lineno <= line <= (function.end_lineno or 0):
            continue
        inside = [
            node
            for node in ast.walk(function)
            if isinstance(node, ast.stmt) and node is not function and node.lineno <= line <= (node.end_lineno or 0)
        ]
        place = max([place, *(node.lineno for node in inside)])
    return place


def functions(tree: ast.AST) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def statements(function: ast.FunctionDef) -> set[int]:
    """The first lines of a function's statements."""
    return {node.lineno for part in function.body for node in ast.walk(part) if isinstance(node, ast.stmt)}


def around(source: str, line: int) -> set[int]:
    """The statements of the outermost function that holds a line."""
    held = [each for each in functions(ast.parse(source)) if each.lineno <= line <= (each.end_lineno or 0)]
    return statements(min(held, key=lambda each: each.lineno)) if held else set()


def names_set_at(source: str, line: int) -> set[str]:
    """The names that a statement outside of functions sets: constants, and fields of a class."""
    tree = ast.parse(source)
    holders = [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    found = set()
    for node in (node for holder in holders for node in holder.body):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.lineno <= line <= (node.end_lineno or 0):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    return found


def mentions(source: str, names: set[str]) -> set[int]:
    """The statements of functions that mention one of these names."""
    found = set()
    for function in functions(ast.parse(source)):
        for statement in (node for part in function.body for node in ast.walk(part) if isinstance(node, ast.stmt)):
            words = {
                node.id if isinstance(node, ast.Name) else node.attr
                for node in ast.walk(statement)
                if isinstance(node, ast.Name | ast.Attribute)
            }
            if words & names:
                found.add(statement.lineno)
    return found
