"""The probes: each starts a World of its own, has its ranks measure, and judges what they bring.

Rows that need a GPU are not measurable without one; the rest is the same on both. Limits that a row is judged by are in the row.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kit.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.preflight.report import Report

MIB, GIB = 2**20, 2**30
START_S = 3600.0  # the probe's own limit ends a start that takes too long
Settings = dict[str, Any]
Seen = Mapping[str, Any]  # what a rank measured
Line = (
    tuple[str, bool | None, str] | tuple[str, bool | None, str, float, str]
)  # what, passed, why; a number and its unit


@contextlib.contextmanager
def started(
    report: Report, device: str, settings: Settings, ranks: int = 2, *, megatron: bool = False
) -> Iterator[World]:
    """A World; how long it took is a row and a time."""
    preload = ("megatron.core",) if megatron else ()
    report.at(f"the start of {ranks} rank{'s' * (ranks > 1)}")
    began = time.monotonic()
    asked: Settings = {"env": settings["env"], "preload": preload, "start_timeout_s": START_S}
    with World(ranks, device=device, **asked) as world:
        seconds = time.monotonic() - began
        report.pids(world.pids)
        report.row("start", passed=True, value=seconds, unit="s")
        if ranks == 2:
            report.time(**{"world_megatron" if megatron else "world": seconds})
        yield world
        report.at("the end of the ranks")


def on_ranks(world: World, target: str, **arguments: Any) -> list[Any]:
    """Call `target` of the package `onranks`, such as ".jobs:twice"."""
    return world.call(f"kit.preflight.onranks{target}", args=arguments, timeout_s=60.0)


def mib(size: float) -> float:
    return round(size / MIB, 1)
