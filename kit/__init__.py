"""Lifecycle Kit: step live torchrun ranks through the moments that break RL post-training systems, and measure them.

This is the public face. Importing it imports nothing heavy: each name is loaded at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.errors import BadInput, Cancelled, KitError, RankDied, RankError, RankTimeout
    from kit.exploration import explore
    from kit.public import Pending, Run, World, lab, load, panel, run, runs, wait

    __version__: str

__all__ = ["BadInput", "Cancelled", "KitError", "RankDied", "RankError", "RankTimeout", "load_ipython_extension"]
__all__ += ["Pending", "Run", "World", "__version__", "explore", "lab", "load", "panel", "run", "runs", "wait"]

_HOMES = {
    **dict.fromkeys(("BadInput", "Cancelled", "KitError", "RankDied", "RankError", "RankTimeout"), "kit.errors"),
    "explore": "kit.exploration",
    **dict.fromkeys(("Pending", "Run", "World", "lab", "load", "panel", "run", "runs", "wait"), "kit.public"),
}


def load_ipython_extension(ipython: Any) -> None:
    """Load the magics; IPython calls this for `%load_ext kit`."""
    from kit.view.magics import load_extension as load_magics

    load_magics(ipython)


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "__version__":
        from kit.target import kit_version

        return kit_version()
    if name not in _HOMES:
        raise AttributeError(f"module 'kit' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
