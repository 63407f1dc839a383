"""All groups of a job released and brought back in one way, again and again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from kit.errors import BadInput
from kit.measure import resource_counts
from kit.measure.turns import seconds_of
from kit.megatron import groups, model
from kit.megatron.config import ModelConfig
from kit.megatron.handles import c10d, current_groups, parallel_state
from kit.megatron.tensors import process_memory
from kit.nccl import unbound

GLOO, STORE = "gloo over the store", "ncclCommInitRankConfig over the store"
SPLIT, KEPT = "ncclCommSplit", "ncclCommResume"
EXTRA = "_MORE_FOR_THE_BENCH_GROUPS"  # a global among Megatron's own, so that every mode finds what it holds


def refused(*, mode: str) -> str:
    """Why these ranks cannot release in this way; empty where they can."""
    if mode not in groups.KEEPING:
        return ""
    try:
        groups.refuse_keeping()
    except BadInput as error:
        return str(error)
    return ""


def mechanism(*, mode: str, by_store: bool) -> str:
    """What makes this rank's communicators again. Under a default group that is bound to its device, torch splits it; the exact modes
    unbind it meanwhile, and so does `by_store`."""
    if not c10d._world.default_pg.bound_device_id:
        return STORE if torch.cuda.is_available() else GLOO
    if mode in groups.KEEPING:
        return KEPT
    return STORE if by_store or mode in groups.EXACT else SPLIT


def cycles(*, mode: str, by_store: bool, total: int, n: int) -> dict[str, Any]:
    """A job of tensor parallel 2 with `total` groups a rank, or as many as Megatron makes where that is 0 or less than it makes."""
    job = model.build(ModelConfig(tp=2, layers=1))
    own = len(current_groups())
    more = max(0, total - own)
    make_extra(more)
    job.step(1)
    every_group_talks()
    gc.collect()
    first = levels()
    seen = [cycle(mode, more, by_store=by_store) for _ in range(n)]
    last = levels()
    job.mover.close()
    left = {name: last.get(name, 0) - first[name] for name in first}
    return {"groups": own + more, "cycles": seen, "left": left, "mechanism": mechanism(mode=mode, by_store=by_store)}


def cycle(mode: str, more: int, *, by_store: bool) -> dict[str, Any]:
    """Seconds of each part, and what the release gave back by source."""
    before = levels()
    snapshot: list[Any] = []

    def back() -> None:
        with unbound(c10d._world.default_pg) if by_store else contextlib.nullcontext():
            groups.reload(snapshot[0])
            if mode not in (*groups.EXACT, *groups.KEEPING):
                make_extra(more)  # these two rebuild what Megatron makes; the caller makes the others again

    seconds = {"release": timed_together(lambda: snapshot.append(groups.destroy(mode)["snapshot"]))}
    gc.collect()
    released = levels()  # once all have released: a GPU may be shared
    seconds |= {"back": timed_together(back), "first collective": timed_together(every_group_talks)}
    return {"seconds": seconds, "freed": {name: before[name] - released.get(name, 0) for name in before}}


def timed_together(work: Callable[[], object]) -> float:
    """Seconds of this rank's own work; all ranks begin it together."""
    dist.barrier()
    return seconds_of(work)


def make_extra(number: int) -> None:
    """Groups of all ranks, in a global of Megatron's. Earlier groups are no longer referenced."""
    everyone = list(range(dist.get_world_size()))
    made = [dist.new_group(everyone, group_desc=f"MORE_{index}") for index in range(number)]
    setattr(parallel_state(), EXTRA, made)


def every_group_talks() -> None:
    wrong = [row["group"] for row in groups.talk(current_groups()) if not row["exact"]]
    assert not wrong, f"a wrong sum over {wrong}"


def levels() -> dict[str, int]:
    """What this process holds once all ranks have come here, by source: counts, and bytes. NCCL's own statistics are there while it has
    communicators."""
    dist.barrier()
    return {
        **resource_counts()._asdict(),
        **process_memory(),
        **{f"comm_{name}": size for name, size in groups.communicators().items()},
    }
