"""The faults of the offload lab: the kit's releaser with one bug each, and bugs put into a job that has come back."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from kit.labs.offload.ranks.releaser import KitReleaser, State
from kit.megatron import groups
from kit.megatron.groups.exact import DestroyFailed
from kit.megatron.groups.handle import Handle, c10d, groups_in, megatron_groups, parallel_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kit.labs.offload.ranks.job import JobContext

LEAK_BYTES = 16 * 2**20
SLOW_S = 1.5


class Broken(KitReleaser):
    """The kit's releaser with the configured fault."""

    def __init__(self, ctx: JobContext) -> None:
        super().__init__(ctx)
        self.kept: list[Any] = []
        self.reloads = 0
        if ctx.fault == "patch-left":
            dist.barrier = functools.partial(dist.barrier)
        self.last = ctx.rank == ctx.world_size - 1

    def destroy(self) -> State:  # noqa: PLR0911 - a way out for each fault
        if not self.ctx.config.groups:
            return super().destroy()
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
        if fault == "kept-world":
            return groups.destroy(self.ctx.config.mode, timeout_s=self.ctx.config.meet_timeout_s)
        if fault == "swallowed-failure":
            try:
                return super().destroy()
            except DestroyFailed as failure:
                return failure.stats
        return super().destroy()

    def reload(self, stats: State) -> State:
        if not self.ctx.config.groups:
            return super().reload(stats)
        fault, snapshot = self.ctx.fault, stats["snapshot"]
        if fault == "dropped-timeout":
            with default_timeouts():
                return super().reload(stats)
        if fault in {"lossy-snapshot", "stale-globals"}:
            lossy = {key: snapshot["init_arguments"][key] for key in LOSSY if key in snapshot["init_arguments"]}
            parallel_state().initialize_model_parallel(**lossy)
            return {}
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
        elif fault == "leaked-file":
            self.leave_a_file()
        elif fault == "slow-at-last" and self.reloads in (self.ctx.config.cycles - 1, self.ctx.config.cycles):
            time.sleep(SLOW_S)
        elif fault == "double-copy":
            copies = [item.storage.clone() for item in self.ctx.mover.items()]
            del copies
        elif fault == "bit-flip" and self.last:
            flip_one_bit(next(self.ctx.chunks[0].module.parameters()).data)
        elif fault == "lost-optimizer-state":
            for item in self.ctx.mover.items():
                if item.name.endswith("exp_avg"):
                    item.storage.fill_(0)
        elif fault == "alias-broken":
            parameter = next(self.ctx.chunks[0].module.parameters())
            parameter.main_grad = parameter.main_grad.clone()
        elif fault == "grads-not-zeroed":
            self.skip_zeroing()
        return done

    def leave_a_file(self) -> None:
        """A file in shared memory that nobody has open or mapped. It goes when the job ends."""
        fd, path = tempfile.mkstemp(prefix="kit-fault-", dir="/dev/shm")
        os.close(fd)
        weakref.finalize(self, os.unlink, path)

    def skip_zeroing(self) -> None:
        """Once, the next step's zeroing of the gradient buffers does nothing."""
        for chunk in self.ctx.chunks:
            chunk.zero_grad_buffer = once_nothing(chunk, "zero_grad_buffer")

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


LOSSY = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
)


@contextlib.contextmanager
def default_timeouts() -> Iterator[None]:
    """Groups are made with torch's default timeout, whatever was asked for: what leaving the argument out comes to."""
    plain = c10d._new_process_group_helper

    def helper(*args: Any, backend_options: Any = None, **kwargs: Any) -> Any:
        default = c10d._get_default_timeout(c10d.Backend(str(args[3]).rpartition(":")[2]))
        if backend_options is not None:
            backend_options._timeout = default
        return plain(*args, backend_options=backend_options, **kwargs | {"timeout": default})

    c10d._new_process_group_helper = helper
    try:
        yield
    finally:
        c10d._new_process_group_helper = plain


def forget_groups_only() -> State:
    """Destroy what the group globals hold and null those alone: the bug of many a home-made helper."""
    snapshot = groups.snapshot()
    module = parallel_state()
    for name in [n for n in vars(module) if n.startswith("_") and "_GROUP" in n]:
        for group in groups_in(getattr(module, name)):
            if group in c10d._world.pg_map:
                dist.destroy_process_group(group)
        setattr(module, name, None)
    return snapshot


def flip_one_bit(tensor: torch.Tensor) -> None:
    raw = tensor.view(-1)[:1].view(torch.uint8)
    raw[0] ^= 1


def once_nothing(owner: Any, name: str) -> Callable[[], None]:
    """A method that does nothing once, then is itself again."""

    def nothing() -> None:
        delattr(owner, name)

    return nothing


@contextlib.contextmanager
def double_patched() -> Any:
    """new_group patched by a second wrapper that makes a group of its own beside the inner one and forgets it."""
    plain = dist.new_group

    def twice(*args: Any, **kwargs: Any) -> Any:
        plain(*args, **kwargs)
        return plain(*args, **kwargs)

    dist.new_group = c10d.new_group = twice
    try:
        yield
    finally:
        dist.new_group = c10d.new_group = plain
