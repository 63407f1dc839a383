"""A rank's part: put a mutant's code into the living function, restore the plain code, and report whether the change was run."""

from __future__ import annotations

import functools
import importlib
import inspect
from types import FunctionType
from typing import Any

from tests.mutants.mutant import MARK, Mutant, compiled

_plain: dict[str, tuple[FunctionType, Any]] = {}  # the mutated function and its plain code, by place
_runs: list[int] = [0]


def swap(**mutant: Any) -> None:
    """Mutate one function of this process until `restore`."""
    made = Mutant(**mutant)
    if _plain:
        raise RuntimeError(f"{', '.join(_plain)} is mutated already")
    function = living(made.module, made.function)
    code = compiled(made)
    if code.co_freevars != function.__code__.co_freevars:
        raise RuntimeError(f"{made.place}: the living function's closure is another than its source's")
    _plain[made.place] = function, function.__code__
    _runs[0] = 0
    function.__globals__[MARK] = _run
    function.__code__ = code


def restore() -> int:
    """Restore the plain code; return how often the changed statement ran."""
    for function, code in _plain.values():
        function.__code__ = code
        function.__globals__.pop(MARK)
    _plain.clear()
    return _runs[0]


def _run() -> None:
    _runs[0] += 1


def living(module: str, name: str) -> FunctionType:
    """Return the function behind a qualified name, without its decorators."""
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    while not isinstance(found, FunctionType) or hasattr(found, "__wrapped__"):
        if isinstance(found, property):
            found = found.fget
        elif isinstance(found, functools.cached_property):
            found = found.func
        elif hasattr(found, "__wrapped__"):
            found = found.__wrapped__
        else:
            found = found.__func__
    return found
