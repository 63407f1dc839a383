"""Drawn mutants: the operator and place follow from a hash of a fixed seed, the module and the function's name.

All places in a function where an operator applies are listed; the hash chooses one of the operators that have a place, then the place. Some
code is excluded by rule before the draw: text for people (errors, prints), logging and clocks, refusals of bad input (an `if` that only
raises; unit tests cover them), error handlers, branches that only a GPU takes, and hints to the kernel that only affect speed.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Iterator
from functools import cache
from itertools import accumulate, islice
from typing import Any, NamedTuple

from tests.mutants.mutant import Function, Mutant, NotApplicable, body_of, compiled, functions, source_of, span

SEED = "lifecycle-kit mutants 1"
GPU = ("cuda", "nccl", "is_available", "bound_device", "TORCHCOMM")
HINTS = {"huge_pages", "populate", "trim", "empty_cache"}
QUIET = {"print", "event", "stage", "perf_counter", "record", "sleep", "cast"}  # for people, or timing only
WAITS = {"wait", "barrier", "synchronize", "_synchronise", "synchronise", "join", "flush", "meet", "wait_for", "ahead"}
WAITS |= {"hear", "expect", "notify_all", "_await", "_wait", "guarded", "done"}
ORDERLESS = {"max", "min", "maximum", "minimum", "compare_digest"}
TYPED = {"isinstance", "issubclass", "getattr", "setattr", "hasattr", "super", "fromkeys", "map", "where"}
# Calls whose result is like their (first) argument, or like the object whose method they are.
ALIKE = {"sorted", "reversed", "list", "tuple", "max", "min", "abs", "float", "int", "maximum", "minimum", "expm1"}
ALIKE |= {
    "clone",
    "contiguous",
    "detach",
    "copy",
    "double",
    "exp",
    "reciprocal",
    "flatten",
    "sum",
    "clamp",
    "view",
    "chunk",
}
ALIKE |= {"removeprefix", "reshape", "masked_fill", "unbind"}
SWAPPED = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}


def sites(module: str, node: Function) -> dict[str, list[Change]]:
    """Return each operator's possible changes, in the order of the source."""
    source, body = source_of(module), body_of(node)
    found: dict[str, list[Change]] = {name: [] for name in OPERATORS}
    for each in places(body):
        for name, operator in OPERATORS.items():
            found[name] += operator(each, source)
    if node.name == "__init__":  # an attribute that is not set raises at its first use
        found["drop a statement"] = [each for each in found["drop a statement"] if not isinstance(each[0], ast.Assign)]
    gives = any(isinstance(each, ast.Return | ast.Yield | ast.YieldFrom) and each.value for each in ast.walk(node))
    if not gives and len(body) > 1 and not skipped(body[-1]) and not isinstance(body[-1], ast.Return):
        found["return early"] = [(body[-1], "return")]
    return {name: changes for name, changes in found.items() if changes}


def places(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield every node that may be changed: statements, and the expressions in them."""
    for statement in body:
        if skipped(statement):
            continue
        yield statement
        for part in own_parts(statement):
            yield from expressions(part)
        for name in ("body", "orelse", "finalbody"):
            if not (isinstance(statement, ast.If) and for_gpu(statement.test, name)):
                yield from places(getattr(statement, name, []))


def skipped(statement: ast.stmt) -> bool:
    if isinstance(
        statement, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.Pass | ast.Global | ast.Nonlocal
    ):
        return True
    if isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Raise):
        return True
    return isinstance(statement, ast.Expr) and called(statement.value) in QUIET | HINTS


def own_parts(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the statement's own expressions, without those of nested statements, signatures or annotations."""
    for name, value in ast.iter_fields(statement):
        if name == "annotation" or isinstance(statement, Function | ast.ClassDef):
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.expr | ast.withitem):
                yield each


def expressions(part: ast.AST) -> Iterator[ast.AST]:
    if isinstance(part, ast.JoinedStr) or called(part) in QUIET | HINTS:
        return
    yield part
    for name, child in ast.iter_fields(part):
        if isinstance(part, ast.IfExp) and for_gpu(part.test, name):
            continue
        for each in child if isinstance(child, list) else [child]:
            if isinstance(each, ast.AST):
                yield from expressions(each)


def for_gpu(test: ast.expr, block: str) -> bool:
    """Whether only a GPU takes this branch of a condition."""
    text = ast.unparse(test)
    if "== 'cpu'" in text or ".is_cpu" in text or "!= 'cuda'" in text:
        return block == "orelse"
    return block == "body" and any(word in text for word in GPU)


def called(node: ast.AST | None) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def text_of(node: ast.AST, source: str) -> str:
    return source[node_start(node, source) : node_end(node, source)]


# -- the operators: each yields a node and its replacement
# ----------------------------------------------------------------

Change = tuple[ast.AST, str]


def negate(node: ast.AST, source: str) -> Iterator[Change]:
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not any(word in ast.unparse(node.test) for word in GPU):
        yield node.test, f"not ({text_of(node.test, source)})"


def compare(node: ast.AST, source: str) -> Iterator[Change]:
    if not isinstance(node, ast.Compare) or len(node.ops) > 1 or type(node.ops[0]) not in SWAPPED:
        return
    old, new = SWAPPED[type(node.ops[0])]
    start, stop = node_end(node.left, source), node_start(node.comparators[0], source)
    text, base = text_of(node, source), node_start(node, source)
    if not any(word in text for word in GPU):
        yield node, text[: start - base] + source[start:stop].replace(old, new, 1) + text[stop - base :]


def drop(node: ast.AST, _: str) -> Iterator[Change]:
    """Drop a call or a change of an existing object, but not the definition of a name."""
    call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and called(node.value) not in WAITS
    targets = node.targets if isinstance(node, ast.Assign) else [None]
    place = all(isinstance(each, ast.Attribute | ast.Subscript) for each in targets)
    if call or place or isinstance(node, ast.AugAssign | ast.Delete):
        yield node, "pass"


def no_wait(node: ast.AST, _: str) -> Iterator[Change]:
    if isinstance(node, ast.Expr) and called(node.value) in WAITS:
        yield node, "pass"


def off_by_one(node: ast.AST, _: str) -> Iterator[Change]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield node, str(node.value + 1)


def swap_arguments(node: ast.AST, source: str) -> Iterator[Change]:
    """Swap the first two arguments, except in calls that take them in any order or cannot take them swapped."""
    if isinstance(node, ast.Call) and len(node.args) > 1 and called(node) not in ORDERLESS | TYPED:
        first, second = node.args[:2]
        if not any(isinstance(each, ast.Starred | ast.GeneratorExp | ast.Constant) for each in (first, second)):
            text, base = text_of(node, source), node_start(node, source)
            a, b = (slice(node_start(each, source) - base, node_end(each, source) - base) for each in (first, second))
            yield node, text[: a.start] + text[b] + text[a.stop : b.start] + text[a] + text[b.stop :]


def argument(node: ast.AST, source: str) -> Iterator[Change]:
    """Replace a call by its argument, or a method call by its object, where the result has the same kind."""
    if not isinstance(node, ast.Call) or called(node) not in ALIKE:
        return
    method = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) not in ("torch", "math")
    given = node.func.value if method else next(iter(node.args), None)  # type: ignore[attr-defined]
    if given is not None and not isinstance(given, ast.Starred | ast.GeneratorExp):
        simple = isinstance(given, ast.Name | ast.Attribute | ast.Call | ast.Constant | ast.Subscript)
        text = text_of(given, source)
        yield node, text if simple else f"({text})"


OPERATORS: dict[str, Callable[[ast.AST, str], Iterator[Change]]] = {
    "negate a condition": negate,
    "swap a comparison": compare,
    "drop a statement": drop,
    "drop a wait": no_wait,
    "off by one": off_by_one,
    "swap arguments": swap_arguments,
    "argument for call": argument,
}


def node_start(node: Any, source: str) -> int:
    return offset(node.lineno, node.col_offset, source)


def node_end(node: Any, source: str) -> int:
    return offset(node.end_lineno, node.end_col_offset, source)


def offset(line: int, column: int, source: str) -> int:
    """Convert a position of the syntax tree, which counts bytes, to an index into the text."""
    start, text = lines_of(source)[line - 1]
    return start + (column if text.isascii() else len(text.encode()[:column].decode()))


@cache
def lines_of(source: str) -> list[tuple[int, str]]:
    """Return each line with the index of its start."""
    lines = source.splitlines(keepends=True)
    return list(zip(accumulate(map(len, lines), initial=0), lines, strict=False))


# -- the draw ------------------------------------------------------------------------------------------------------------


class Target(NamedTuple):
    """A module to draw from: setup and check for its mutants, exceptions for some functions, and functions left out with reasons."""

    config: str
    module: str
    check: str
    others: dict[str, tuple[str, str]] = {}  # noqa: RUF012 - never changed  # function: (setup, check)
    left_out: dict[str, str] = {}  # noqa: RUF012 - as above  # function: why


def number(*words: str) -> int:
    return int.from_bytes(hashlib.sha256("\0".join((SEED, *words)).encode()).digest()[:8], "big")


def drawn(targets: tuple[Target, ...], count: int) -> list[Mutant]:
    """Draw one mutant each for the first `count` functions by hash that have a place for an operator."""
    candidates = sorted(
        (number(target.module, name), target, name, node)
        for target in targets
        for name, node in functions(target.module)
        if name not in target.left_out
    )
    made = (draw(target, name, node) for _, target, name, node in candidates if sites(target.module, node))
    return list(islice(made, count))


def draw(target: Target, name: str, node: Function) -> Mutant:
    """Return the first change by hash that compiles."""
    by_operator = sites(target.module, node)
    config, check = target.others.get(name, (target.config, target.check))
    order = sorted(by_operator, key=lambda operator: number(target.module, name, operator))
    for operator in order:
        there = by_operator[operator]
        first = number(target.module, name, operator, "place") % len(there)
        for change in (*there[first:], *there[:first]):
            old, new = unique(target.module, node, change)
            mutant = Mutant(config, target.module, name, old=old, new=new, check=check, bug=operator, origin="drawn")
            try:
                compiled(mutant)
            except NotApplicable:
                continue
            return mutant
    raise NotApplicable(f"{target.module}:{name}: no place of any operator compiles")


def unique(module: str, node: Function, change: Change) -> tuple[str, str]:
    """Express the change as a pattern that occurs once in the function's body: the node alone, or with whole lines around it."""
    source = source_of(module)
    begin, end = span(module, node)
    start, stop = node_start(change[0], source), node_end(change[0], source)
    left, right = start, stop
    while source.count(source[left:right], begin, end) > 1:
        if right == stop and not source[right:].startswith("\n"):
            right = source.index("\n", right)
        elif left > begin:
            left = max(begin, source.rfind("\n", 0, left - 1) + 1)
        else:
            right = source.index("\n", right + 1)
    return source[left:right], source[left:start] + change[1] + source[stop:right]
