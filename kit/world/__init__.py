"""World: spawn, talk to, watch and end live torchrun ranks. Knows nothing of Megatron or labs.

notebook ── World ── Crew ──── agent (torch loaded; torchrun runs in it) ──forks── rank 0, rank 1, ...
              │                                                                      │
              └── Call: request ───────────────── work ──────────────────────────────┤ main thread
                  silence: stack, phase, interrupt ─ watch ──────────────────────────┘ side thread

starting -> idle <-> busy -> idle            every rank answered
                      busy -> dead            a rank or torchrun ended; restart() -> idle
                      busy (stays)            a deadline passed: look at it, wait, or restart()
any -> closed                                 close(), end of the notebook's process
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kit.world.world import World

__all__ = ["World"]


def __getattr__(name: str) -> object:
    """The rank side imports this package for its parts; World is for the notebook side and loads when asked for."""
    if name == "World":
        from kit.world.world import World

        return World
    raise AttributeError(name)
