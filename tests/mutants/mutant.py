"""A mutant: one small change to the source of one function under test, and how to compile it. Standard library only.

A mutant names a function by module and qualified name, and a pattern that occurs exactly once in its body; it has no line numbers. It
compiles to the code object of that function alone, which ranks put into the living function: no file changes, and every reference to the
function stays valid. So only the body of a function or method can be mutated, generators and context managers included. Signatures,
decorators and functions made inside other functions are refused (mutate the outer function instead).
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MARK = "_kit_mutant_was_run"  # ranks define it in the mutated module; a call to it precedes the changed statement
# Decorators whose result leads to the function through `__wrapped__`, `fget` or `__func__`.
TRANSPARENT = (
    "property",
    "staticmethod",
    "classmethod",
    "contextlib.contextmanager",
    "abstractmethod",
    "torch.no_grad()",
)
KIND = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
Function = ast.FunctionDef | ast.AsyncFunctionDef


class NotApplicable(ValueError):  # noqa: N818 - it is what was found
    """The mutant does not fit the source, or cannot be put into a living function."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """`config` names the setup of the catalogue in which it runs; `set` changes single settings of it."""

    config: str
    module: str
    function: str
    old: str = field(kw_only=True)
    new: str = field(kw_only=True)
    check: str = field(kw_only=True)  # the check that should fail
    bug: str = field(kw_only=True)  # a short description of the mistake
    set: Mapping[str, Any] = field(kw_only=True, default_factory=dict)
    origin: str = field(kw_only=True, default="source")  # "docs": breaks a promise of the docs

    @property
    def id(self) -> str:
        text = "\0".join((self.config, self.module, self.function, self.old, self.new, repr(sorted(self.set.items()))))
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def place(self) -> str:
        return f"{self.module}:{self.function}"


@cache
def source_of(module: str) -> str:
    path = ROOT / module.replace(".", "/")
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(source_of(module))


def functions(module: str) -> Iterator[tuple[str, Function]]:
    """Yield every function and method of a module with its qualified name, except those inside other functions."""

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Function]]:
        for node in body:
            if isinstance(node, Function):
                yield prefix + node.name, node
            elif isinstance(node, ast.ClassDef):
                yield from walk(node.body, f"{prefix}{node.name}.")

    yield from walk(tree_of(module).body, "")


def body_of(node: Function) -> list[ast.stmt]:
    """Return a function's statements without its docstring."""
    first = node.body[0]
    is_doc = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return node.body[1:] if is_doc else node.body


def span(module: str, node: Function) -> tuple[int, int]:
    """Return the start and end of a function's body in the module's text."""
    starts = [0, *(found.end() for found in re.finditer("\n", source_of(module)))]  # the last is the end
    body = body_of(node)
    if not body or body[0].lineno == node.lineno:
        raise NotApplicable("its body stands on the line of its head")
    assert node.end_lineno is not None
    return starts[body[0].lineno - 1], starts[node.end_lineno]


def mutated(mutant: Mutant) -> tuple[str, int]:
    """Return the module's text with the change, and the line on which the change begins."""
    found = [node for name, node in functions(mutant.module) if name == mutant.function]
    if len(found) != 1:
        raise NotApplicable(f"{mutant.place}: {len(found)} functions of that name")
    (node,) = found
    opaque = [text for each in node.decorator_list if not (text := ast.unparse(each)).endswith(TRANSPARENT)]
    if opaque:
        raise NotApplicable(f"{mutant.place}: the decorator {opaque[0]} may keep another function or old results")
    start, end = span(mutant.module, node)
    text = source_of(mutant.module)
    times = text.count(mutant.old, start, end)
    if times != 1:
        raise NotApplicable(f"{mutant.place}: its body holds the pattern {times} times, not once: {mutant.old!r}")
    at = text.index(mutant.old, start, end)
    changed = text[:at] + mutant.new + text[at + len(mutant.old) :]
    lead = len(mutant.old) - len(mutant.old.lstrip())
    return changed, text.count("\n", 0, at + lead) + 1


def compiled(mutant: Mutant) -> CodeType:
    """Compile the mutated function to code that fits into the living function, or raise `NotApplicable`."""
    text, line = mutated(mutant)
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise NotApplicable(f"{mutant.place}: what results is no Python: {error}") from error
    plain, changed = (code_of(each, mutant) for each in (tree_of(mutant.module), tree))
    if (plain.co_code, plain.co_consts, plain.co_names) == (changed.co_code, changed.co_consts, changed.co_names):
        raise NotApplicable(f"{mutant.place}: it compiles to the same code: {mutant.old!r}")
    mark(tree, mutant.function, line)
    changed = code_of(tree, mutant)
    for what in ("co_freevars", "co_argcount", "co_kwonlyargcount"):
        if getattr(plain, what) != getattr(changed, what):
            raise NotApplicable(
                f"{mutant.place}: {what} would be {getattr(changed, what)}, and is {getattr(plain, what)}"
            )
    if (plain.co_flags ^ changed.co_flags) & KIND:
        raise NotApplicable(f"{mutant.place}: a generator would become a function, or the other way round")
    return changed


def code_of(tree: ast.Module, mutant: Mutant) -> CodeType:
    """Return the function's code object, compiled only with its class, if any, and the module's __future__ imports."""
    filename = str(ROOT / mutant.module.replace(".", "/")) + ".py"
    around = mutant.function.partition(".")[0]
    body = [
        each
        for each in tree.body
        if (isinstance(each, Function | ast.ClassDef) and each.name == around)
        or (isinstance(each, ast.ImportFrom) and each.module == "__future__")
    ]
    code = compile(ast.Module(body, type_ignores=[]), filename, "exec")
    found = [each for each in codes(code) if each.co_qualname == mutant.function]
    if len(found) != 1:
        raise NotApplicable(f"{mutant.place}: {len(found)} code objects of that name")
    return found[0]


def codes(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from codes(each)


def mark(tree: ast.Module, function: str, line: int) -> None:
    """Insert a call before the innermost statement that contains the change, to record whether the change was reached."""
    at: list[Any] = tree.body
    for name in function.split("."):
        at = next(node for node in at if isinstance(node, Function | ast.ClassDef) and node.name == name).body
    place: tuple[list[Any], int] = at, 0
    while True:
        index = next((i for i, each in enumerate(at) if each.lineno <= line <= (each.end_lineno or line)), None)
        if index is None:
            break
        place = at, index
        inner = [
            block for block in blocks(at[index]) if block and block[0].lineno <= line <= (block[-1].end_lineno or line)
        ]
        if not inner:
            break
        at = inner[0]
    body, index = place
    call = ast.parse(f"{MARK}()").body[0]
    body.insert(index, ast.copy_location(call, body[index]))
    ast.fix_missing_locations(tree)


def blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        if block := getattr(node, name, None):
            yield block
    for handler in getattr(node, "handlers", []):
        yield handler.body
    for case in getattr(node, "cases", []):
        yield case.body
