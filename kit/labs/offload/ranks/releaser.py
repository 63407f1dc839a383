"""The code under test: the kit's own releaser, the adapter for your own, and the kit's own with one known bug.

The kit's takes tensors out first (groups may be needed to tell who holds what) and brings groups back first. Your own object has
`release() -> state` and `restore(state)` for everything, or `destroy() -> snapshot` and `reload(snapshot)` for groups alone; then the kit
moves the tensors. If it also has `around(ctx)`, a context manager, the job is built and lives inside it. Its errors are raised unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import time
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from kit.errors import BadInput
from kit.labs.offload.lab import KIT_RELEASER
from kit.labs.offload.ranks.job import JobContext
from kit.labs.rankside import Context
from kit.megatron import groups
from kit.megatron.groups import STATS, DestroyFailed
from kit.megatron.handles import Handle, c10d, groups_in, megatron_groups, parallel_state
from kit.target import load

State = dict[str, Any]
ELSEWHERE = frozenset({"double-patch", "leaves-default-group", "masks-original-error"})  # faults that lie in phases


class KitReleaser:
    def __init__(self, ctx: JobContext) -> None:
        self.ctx = ctx
        ctx.mover.arena.open()  # now, so that its file does not count as growth after the first release

    def release(self) -> State:
        return {"tensors": self.release_tensors(), "groups": self.destroy() if self.ctx.config.groups else {}}

    def restore(self, state: State) -> State:
        reloaded = self.reload(state["groups"]) if self.ctx.config.groups else {}
        return {"groups": reloaded, "tensors": self.restore_tensors()}

    def release_tensors(self) -> State:
        kinds = self.ctx.config.kinds
        return self.ctx.mover.release(kinds) if kinds else {}

    def restore_tensors(self) -> State:
        return self.ctx.mover.restore() if self.ctx.config.kinds else {}

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
    """The configured code under test, with `release` and `restore`; the kit's own with the fault, if one is on."""
    target = ctx.config.implementation
    if ctx.fault is not None and ctx.fault not in ELSEWHERE:
        if target != KIT_RELEASER:
            raise BadInput(f"fault {ctx.fault!r} is a bug of the kit's own releaser: leave implementation={target} out")
        return Broken(ctx)
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
                yield f"comm_{name}_{when}", sum(one[when].get(name, 0) for one in kept["suspended"]), "B"
        yield "groups_skipped", len(kept["skipped"]), "1"


# -- the known bugs ---------------------------------------------------------------------------------------------------------


LEAK_BYTES = 16 * 2**20
SLOW_S = 1.5


LOSSY = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
)


class Broken(KitReleaser):
    def __init__(self, ctx: JobContext) -> None:
        super().__init__(ctx)
        self.kept: list[Any] = []
        self.reloads = 0
        if ctx.fault == "patch-left":
            dist.barrier = functools.partial(dist.barrier)
        self.last = ctx.rank == ctx.world_size - 1

    def destroy(self) -> State:
        fault = self.ctx.fault
        if fault == "leak-gloo":
            self.kept.append(dist.new_group(backend="gloo"))
        elif fault == "leak-device":
            self.kept.append(dist.new_group())
        elif fault == "kept-handle":
            self.kept.append(next(g.kit_inner for g in megatron_groups() if isinstance(g, Handle)))
        elif fault == "stale-globals":
            return {"snapshot": forget_groups_only()}
        elif fault == "missing-rank-in-destroy" and self.last:
            return {"snapshot": groups.snapshot()}
        elif fault == "kept-world":
            return groups.destroy(self.ctx.config.mode, timeout_s=self.ctx.config.meet_timeout_s)
        try:
            return super().destroy()
        except DestroyFailed as failure:
            if fault == "swallowed-failure":
                return failure.stats
            raise

    def reload(self, stats: State) -> State:
        fault = self.ctx.fault
        if fault in {"lossy-snapshot", "stale-globals"}:
            given = stats["snapshot"]["init_arguments"]
            parallel_state().initialize_model_parallel(**{key: given[key] for key in LOSSY if key in given})
            return {}
        with default_timeouts() if fault == "dropped-timeout" else contextlib.nullcontext():
            done = super().reload(stats)
        if fault == "stale-handles":
            self.leave_a_stale_handle()
        return done

    def restore_tensors(self) -> State:
        fault = self.ctx.fault
        if fault == "slow-leak":
            self.kept.append(bytearray(b"x" * LEAK_BYTES))
        done = super().restore_tensors()
        self.reloads += 1
        if fault == "reseeded":
            torch.manual_seed(self.ctx.config.seed)
        elif fault == "leaked-file":  # in shared memory, not open or mapped anywhere; removed when the job ends
            fd, path = tempfile.mkstemp(prefix="kit-fault-", dir="/dev/shm")
            os.close(fd)
            weakref.finalize(self, os.unlink, path)
        elif fault == "slow-at-last" and self.reloads in (self.ctx.config.cycles - 1, self.ctx.config.cycles):
            time.sleep(SLOW_S)
        elif fault == "double-copy":
            _ = [item.storage.clone() for item in self.ctx.mover.items()]
        elif fault == "bit-flip" and self.last:
            next(self.ctx.chunks[0].module.parameters()).data.view(-1)[:1].view(torch.uint8)[0] ^= 1
        elif fault == "lost-optimizer-state":
            for item in self.ctx.mover.items():
                if item.name.endswith("exp_avg"):
                    item.storage.fill_(0)
        elif fault == "alias-broken":
            parameter = next(self.ctx.chunks[0].module.parameters())
            parameter.main_grad = parameter.main_grad.clone()
        elif fault == "grads-not-zeroed":  # once, the next step's zeroing of the gradient buffers does nothing
            for chunk in self.ctx.chunks:
                chunk.zero_grad_buffer = functools.partial(delattr, chunk, "zero_grad_buffer")
        return done

    def leave_a_stale_handle(self) -> None:
        """The first module that keeps a group gets one that is destroyed."""
        dead = dist.new_group()
        dist.destroy_process_group(dead)
        for module in self.ctx.chunks[0].modules():
            for name, value in vars(module).items():
                if isinstance(value, dist.ProcessGroup):
                    setattr(module, name, dead)
                    return
        raise RuntimeError("no layer keeps a process group, so none can go stale")


@contextlib.contextmanager
def default_timeouts() -> Iterator[None]:
    """Create groups with torch's default timeout whatever timeout is passed, as if the argument had been left out."""
    plain = c10d._new_process_group_helper

    def helper(*args: Any, backend_options: Any = None, **kwargs: Any) -> Any:
        default = c10d._get_default_timeout(c10d.Backend(str(args[3]).rpartition(":")[2]))
        if backend_options is not None:
            backend_options._timeout = default
        return plain(*args, backend_options=backend_options, **kwargs | {"timeout": default})

    with mock.patch.object(c10d, "_new_process_group_helper", helper):
        yield


def forget_groups_only() -> State:
    """Destroy the groups in the group globals and set only these to None: a common bug of home-made helpers."""
    snapshot = groups.snapshot()
    module = parallel_state()
    for name in [n for n in vars(module) if n.startswith("_") and "_GROUP" in n]:
        for group in groups_in(getattr(module, name)):
            if group in c10d._world.pg_map:
                dist.destroy_process_group(group)
        setattr(module, name, None)
    return snapshot


@contextlib.contextmanager
def double_patched() -> Iterator[None]:
    """new_group patched by a second wrapper that makes a group of its own beside the inner one and forgets it."""
    plain = dist.new_group

    def twice(*args: Any, **kwargs: Any) -> Any:
        plain(*args, **kwargs)
        return plain(*args, **kwargs)

    with mock.patch.object(dist, "new_group", twice), mock.patch.object(c10d, "new_group", twice):
        yield
