"""The code under test: the kit's own releaser, and the adapter for your own.

The kit's takes tensors out first (groups may be needed to tell who holds what) and brings groups back first. If the tensors of one rank
cannot come back, those of all ranks go again, and `restore` may be called again with the same state. Your own object has
`release() -> state` and `restore(state)` for everything, or `destroy() -> snapshot` and `reload(snapshot)` for groups alone; then the kit
moves the tensors. If it also has `around(ctx)`, a context manager, the job is built and lives inside it. Its errors are raised unchanged.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from kit.errors import BadInput, KitError
from kit.labs.offload.ranks.job import JobContext
from kit.labs.rankside import Context
from kit.megatron import groups
from kit.megatron.groups import STATS
from kit.target import load

State = dict[str, Any]


class KitReleaser:
    def __init__(self, ctx: JobContext) -> None:
        self.ctx = ctx

    def release(self) -> State:
        return {"tensors": self.release_tensors(), "groups": self.destroy() if self.ctx.config.groups else {}}

    def restore(self, state: State) -> State:
        reloaded = self.reload(state["groups"]) if state["groups"] else {}
        state["groups"] = {}  # they are back, whatever becomes of the tensors
        return {"groups": reloaded, "tensors": self.restore_tensors()}

    def release_tensors(self) -> State:
        kinds = self.ctx.config.kinds
        return self.ctx.mover.release(kinds) if kinds else {}

    def restore_tensors(self) -> State:
        return self.restore_together() if self.ctx.config.kinds else {}

    def restore_together(self) -> State:
        """Bring the tensors back on all ranks, or on none: a rank that trains on would wait for one that cannot."""
        ctx, failure = self.ctx, ""
        try:
            moved = ctx.mover.restore()
        except Exception as error:  # noqa: BLE001 - raised again below, with its rank
            moved, failure = {}, str(error)
        failed_on = groups.reports("restore", failure, ctx.rank, ctx.world_size, ctx.config.meet_timeout_s)
        if failures := [f"rank {rank}: {text}" for rank, text in enumerate(failed_on) if text]:
            if not failure:
                self.release_tensors()
            raise KitError(
                f"{'; '.join(failures)}; the tensors of all ranks are away as before, and can be restored later"
            )
        return moved

    def destroy(self) -> State:
        config = self.ctx.config
        return groups.destroy(config.mode, include_world=config.include_world, timeout_s=config.meet_timeout_s)

    def reload(self, stats: State) -> State:
        if not stats.get("snapshot"):
            return {}  # a job without Megatron's groups
        return groups.reload(stats["snapshot"], timeout_s=self.ctx.config.meet_timeout_s)


class PairReleaser(KitReleaser):
    """Your own destroy and reload of groups, between the kit's moves of tensors."""

    def __init__(self, ctx: JobContext, own: Any) -> None:
        super().__init__(ctx)
        self.own = own

    def destroy(self) -> State:
        start = time.perf_counter()
        snapshot = self.own.destroy()
        return {"snapshot": snapshot, "seconds": time.perf_counter() - start}

    def reload(self, stats: State) -> State:
        start = time.perf_counter()
        self.own.reload(stats["snapshot"])
        return {"seconds": time.perf_counter() - start}


def around(ctx: Context) -> contextlib.AbstractContextManager[Any]:
    """Your code's `around(ctx)`, if it has one: it is in force while the job is built and lives."""
    own = getattr(load(ctx.config.implementation), "around", None)
    manager: contextlib.AbstractContextManager[Any] = contextlib.nullcontext() if own is None else own(ctx)
    return manager


def make_releaser(ctx: JobContext) -> Any:
    """The configured code under test, with `release` and `restore`."""
    target = ctx.config.implementation
    own = load(target)(ctx)
    if hasattr(own, "release") and hasattr(own, "restore"):
        return own
    if hasattr(own, "destroy") and hasattr(own, "reload"):
        return PairReleaser(ctx, own)
    raise BadInput(
        f"implementation={target}: the object it returned has neither release and restore nor destroy and reload"
    )


def reported(stats: Any) -> Iterator[tuple[str, float, str]]:
    """What the code under test reports about its parts, in the kit's format: metric, value, unit."""
    parts = {name: part for name, part in stats.items() if isinstance(part, dict)} if isinstance(stats, dict) else {}
    of_groups, of_tensors = parts.get("groups", {}), parts.get("tensors", {})
    for metric, value, unit in (
        ("groups_seconds", of_groups.get("seconds"), "s"),
        ("tensors_seconds", of_tensors.get("seconds"), "s"),
        ("groups_destroyed", of_groups.get("destroyed"), "1"),
        ("groups_reloaded", of_groups.get("reloaded"), "1"),
        ("addresses_changed", of_tensors.get("addresses_changed"), "1"),
    ):
        if isinstance(value, int | float):
            yield metric, value, unit
    moved, snapshot = of_tensors.get("bytes"), of_groups.get("snapshot")
    if isinstance(moved, dict):
        yield from ((f"{kind}_bytes", size, "B") for kind, size in moved.items())
    if isinstance(snapshot, dict) and (kept := snapshot.get("suspended")):
        for when in ("before", "after"):  # the library's own statistics, summed over this rank's communicators
            for name in STATS:
                yield f"comm_{name}_{when}", sum(group[when].get(name, 0) for group in kept["suspended"]), "B"
        yield "groups_skipped", len(kept["skipped"]), "1"
