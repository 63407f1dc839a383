"""Functions, classes and methods of other modules that were replaced."""

from __future__ import annotations

import sys
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

_FUNCTIONS = (FunctionType, BuiltinFunctionType)
_DATA = (int, float, str, bytes, type(None), tuple, list, dict, set, frozenset)


class Name(NamedTuple):
    """A name in a module, or of a class in it."""

    owner: Any
    name: str
    value: Any


Names = dict[str, Name]


def take(*prefixes: str) -> Names:
    """Every function and class in the loaded modules of these packages, and every method of their classes, by dotted name."""
    found: Names = {}
    classes: dict[int, str] = {}
    for module in _modules(prefixes):
        for name, value in list(vars(module).items()):
            if issubclass(type(value), (*_FUNCTIONS, type)):  # isinstance would wake names that warn of their end
                found[f"{module.__name__}.{name}"] = Name(module, name, value)
            if issubclass(type(value), type) and str(value.__module__).startswith((*prefixes, "torch._C")):
                title = classes.setdefault(id(value), f"{module.__name__}.{name}")
                for member, one in list(vars(value).items()):
                    if not isinstance(one, _DATA):
                        found.setdefault(f"{title}.{member}", Name(value, member, one))
    return found


def replaced(before: Names) -> list[str]:
    """Names with another value now, or gone. Modules loaded since are ignored."""
    missing = object()
    return [title for title, one in before.items() if vars(one.owner).get(one.name, missing) is not one.value]


def _modules(prefixes: tuple[str, ...]) -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and any(name == one or name.startswith(one + ".") for one in prefixes)
    ]
