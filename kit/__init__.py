"""Lifecycle Kit: step live torchrun ranks through the moments that break RL post-training systems, and measure them.

This is the public face. Importing it imports nothing heavy: names are found when they are first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.errors import BadInput, KitError, RankDied, RankError, RankTimeout
    from kit.public import World, lab, load, panel, run
    from kit.results import Run

    __version__: str

__all__ = [
    "BadInput",
    "KitError",
    "RankDied",
    "RankError",
    "RankTimeout",
    "Run",
    "World",
    "__version__",
    "lab",
    "load",
    "load_ipython_extension",
    "panel",
    "run",
]

_HOMES = {
    **dict.fromkeys(("BadInput", "KitError", "RankDied", "RankError", "RankTimeout"), "kit.errors"),
    **dict.fromkeys(("World", "lab", "load", "panel", "run"), "kit.public"),
    "Run": "kit.results",
}


def load_ipython_extension(ipython: Any) -> None:
    """What `%load_ext kit` calls."""
    from kit.view.magics import load as load_magics

    load_magics(ipython)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("lifecycle-kit")
    except PackageNotFoundError:  # used from a folder, as the ranks of another environment do
        return "0.1.0+unknown"


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "__version__":
        value: Any = _version()
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'kit' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
