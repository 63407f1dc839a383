"""The code under test: the kit's own releaser, and the adapter for your own.

The kit's takes tensors out first (groups may be needed to tell who holds what) and brings groups back first. Your own object has
`release() -> state` and `restore(state)` for everything, or `destroy() -> snapshot` and `reload(snapshot)` for groups alone; then the kit
moves the tensors. If it also has `around(ctx)`, a context manager, the job is built and lives inside it. Its errors are raised unchanged.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from kit.errors import BadInput
from kit.labs.offload import KIT_RELEASER
from kit.megatron import groups
from kit.megatron.groups import STATS
from kit.target import load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.labs.offload.ranks.job import JobContext
    from kit.labs.rankside import Context

State = dict[str, Any]
BROKEN = "kit.labs.offload.ranks.broken:Broken"
ELSEWHERE = frozenset({"double-patch", "leaves-default-group", "masks-original-error"})  # faults that lie in phases


class KitReleaser:
    """Groups by the configured mode, tensors to a host arena."""

    def __init__(self, ctx: JobContext) -> None:
        self.ctx = ctx
        ctx.mover.arena.open()  # now, so that its file is no growth after the first release

    def release(self) -> State:
        return {"tensors": self.release_tensors(), "groups": self.destroy()}

    def restore(self, state: State) -> State:
        return {"groups": self.reload(state["groups"]), "tensors": self.restore_tensors()}

    def release_tensors(self) -> State:
        kinds = self.ctx.config.kinds
        return self.ctx.mover.release(kinds) if kinds else {}

    def restore_tensors(self) -> State:
        return self.ctx.mover.restore() if self.ctx.config.kinds else {}

    def destroy(self) -> State:
        config = self.ctx.config
        if not config.groups:
            return {}
        return groups.destroy(config.mode, include_world=config.include_world, timeout_s=config.meet_timeout_s)

    def reload(self, stats: State) -> State:
        if not stats.get("snapshot"):
            return {}  # nothing was given back: groups=false, or a job without Megatron's groups
        return groups.reload(stats["snapshot"], timeout_s=self.ctx.config.meet_timeout_s)


class PairReleaser(KitReleaser):
    """Your own destroy and reload of groups, between the kit's moves of tensors."""

    def __init__(self, ctx: JobContext, own: Any) -> None:
        super().__init__(ctx)
        self.own = own

    def destroy(self) -> State:
        if not self.ctx.config.groups:
            return {}
        start = time.perf_counter()
        snapshot = self.own.destroy()
        return {"snapshot": snapshot, "seconds": time.perf_counter() - start}

    def reload(self, stats: State) -> State:
        if not self.ctx.config.groups:
            return {}
        start = time.perf_counter()
        self.own.reload(stats["snapshot"])
        return {"seconds": time.perf_counter() - start}


def around(ctx: Context) -> contextlib.AbstractContextManager[Any]:
    """Your code's `around(ctx)`, if it has one: it is in force while the job is built and lives."""
    own = getattr(load(ctx.config.implementation), "around", None)
    manager: contextlib.AbstractContextManager[Any] = contextlib.nullcontext() if own is None else own(ctx)
    return manager


def make_releaser(ctx: JobContext) -> Any:
    """The configured code under test, with `release` and `restore`; the kit's own with the fault, if one is on."""
    target = ctx.config.implementation
    if ctx.fault is not None and ctx.fault not in ELSEWHERE:
        if target != KIT_RELEASER:
            raise BadInput(f"fault {ctx.fault!r} is a bug of the kit's own releaser: leave implementation={target} out")
        return load(BROKEN)(ctx)
    own = load(target)(ctx)
    if hasattr(own, "release") and hasattr(own, "restore"):
        return own
    if hasattr(own, "destroy") and hasattr(own, "reload"):
        return PairReleaser(ctx, own)
    raise BadInput(
        f"implementation={target}: the object it returned has neither release and restore nor destroy and reload"
    )


def told(stats: Any) -> Iterator[tuple[str, float, str]]:
    """What the code under test reports of its parts, in the format of the kit's own: metric, value, unit."""
    parts = {name: part for name, part in stats.items() if isinstance(part, dict)} if isinstance(stats, dict) else {}
    for part, name, metric, unit in (
        ("groups", "seconds", "groups_seconds", "s"),
        ("tensors", "seconds", "tensors_seconds", "s"),
        ("groups", "destroyed", "groups_destroyed", "1"),
        ("groups", "reloaded", "groups_reloaded", "1"),
        ("tensors", "addresses_changed", "addresses_changed", "1"),
    ):
        if isinstance(value := parts.get(part, {}).get(name), int | float):
            yield metric, value, unit
    moved = parts.get("tensors", {}).get("bytes")
    for kind, size in (moved if isinstance(moved, dict) else {}).items():
        yield f"{kind}_bytes", size, "B"
    snapshot = parts.get("groups", {}).get("snapshot")
    kept = snapshot.get("suspended") if isinstance(snapshot, dict) else None
    if kept:  # the library's own statistics, summed over this rank's communicators
        for when in ("before", "after"):
            for name in STATS:
                yield f"comm_{name}_{when}", sum(one[when].get(name, 0) for one in kept["suspended"]), "B"
        yield "groups_skipped", len(kept["skipped"]), "1"
