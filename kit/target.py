"""`module:attr`: how a person names code, here and on ranks. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def is_target(text: object) -> bool:
    module, colon, attribute = text.partition(":") if isinstance(text, str) else ("", "", "")
    return bool(module and colon and attribute)


def load(target: str) -> Any:
    """What `module:attr` or `module:attr.attr` names."""
    module, _, attributes = target.partition(":")
    found: Any = import_module(module)
    for attribute in attributes.split("."):
        found = getattr(found, attribute)
    return found


def load_callable(target: str) -> Callable[..., Any]:
    found = load(target)
    if not callable(found):
        raise TypeError(f"{target} is not callable")
    call: Callable[..., Any] = found
    return call
