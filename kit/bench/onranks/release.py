"""What `kit bench offload` and `kit bench release` have their ranks do: tensors out and back, and groups released and brought back.

The things that are compared take turns within one loop, so that what else happens on the machine befalls them alike.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from kit.errors import BadInput, KitError
from kit.measure import counts, host
from kit.measure.phase import device_memory, host_memory, timed
from kit.megatron import groups, model
from kit.megatron.config import ModelConfig
from kit.megatron.handles import c10d, current_groups, parallel_state
from kit.megatron.tensors import memory, offload_natively, reload_natively
from kit.nccl import unbound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kit.megatron.tensors import Item, Mover

# A private mapping of nothing. PROT_READ | PROT_WRITE is 3, MAP_PRIVATE | MAP_ANONYMOUS is 0x22.
_PROT, _MAP = 3, 0x22
_BLOCK = 2**30
SAVER, TAG = "torch_memory_saver", "kit-bench"


def tensors(*, size: str, cycles: int) -> dict[str, Any]:
    """Everything a job has, out and back `cycles` times; beside each move the plain copies that it is measured by."""
    job = model.build(ModelConfig(size=size, seq=16, microbatches=1))
    job.step(1)
    try:
        return _tensors(job, cycles)
    finally:
        job.mover.close()
        groups.destroy()


def _tensors(job: model.Training, cycles: int) -> dict[str, Any]:
    mover, cuda = job.mover, job.device.type == "cuda"
    sizes = [item.size for item in mover.items()]
    # Host memory that is there already, and not pinned: the driver copies to and from it by way of its own.
    pageable = torch.ones(sum(sizes), dtype=torch.uint8) if cuda else None
    times: dict[str, list[float]] = {}
    resident: list[tuple[int, int]] = []
    refused = ""

    def sample(**taken: float) -> None:
        for name, seconds in taken.items():
            times.setdefault(name, []).append(seconds)

    def copies() -> None:
        out, back = one_by_one(mover.items())
        sample(clone_out=out, clone_back=back)
        if pageable is not None:
            out, back = one_by_one(mover.items(), pageable)
            sample(pageable_out=out, pageable_back=back)

    def native_calls() -> str:
        try:
            sample(native_out=offload_natively(job.chunks, job.optimizer, job.device)["seconds"])
            sample(native_back=reload_natively(job.chunks, job.optimizer)["seconds"])
        except BadInput as error:
            return str(error)
        return ""

    if not cuda:  # there what these leave of the C library's memory would be in the way of what the mover is judged by
        for _ in range(2):
            copies()
        refused = native_calls()
    for cycle in range(cycles + 1):
        if cycle and cuda:
            copies()
            refused = native_calls()
        full = host_memory().get("anon_rss", 0)
        which = "first" if cycle == 0 else "steady"
        if cycle:
            sample(copy_out=_warm(mover, out=True))
        sample(**{f"{which}_out": mover.release()["seconds"]})
        resident.append((full, host_memory().get("anon_rss", 0)))
        if cycle and not cuda:
            arena = mover.arena
            # Each of these leaves pages behind that the next one gets: the mover and what it is judged by both follow one.
            sample(pieces=_into_new(arena.address(0), arena.used, pieces=True))
            sample(populate=_into_new(arena.address(0), arena.used, pieces=False))
        sample(**{f"{which}_back": mover.restore()["seconds"]})
        if cycle:
            sample(copy_back=_warm(mover, out=False))
    return {
        "times": times,
        "bytes": sum(sizes),
        "tensors": len(sizes),
        "threads": host.workers(),
        "refused": refused,
        "resident": resident,
    }


def _warm(mover: Mover, *, out: bool) -> float:
    """A plain copy of as many bytes as the job has, between places that are there: with memcpy on the CPU, in blocks as large as
    memcpy likes best; on CUDA between each tensor and its place in pinned memory. Nothing may be waiting in the arena."""
    items, arena = mover.items(), mover.arena
    total = sum(item.size for item in items)
    if mover.device.type == "cpu":
        half = min(_BLOCK, total // 2)
        whole = timed(lambda: host.libc.memcpy(arena.address(0), arena.address(half), half))
        return whole * total / half
    places = [arena.reserve(item.size) for item in items]
    arena.clear()
    pairs = [(arena.view(place, item.size), flat(item)) for place, item in zip(places, items, strict=True)]

    def copy() -> None:
        for pinned, one in pairs:  # the places hold what the tensors hold: the way back changes nothing
            (pinned if out else one).copy_(one if out else pinned, non_blocking=True)

    return timed(copy)


def _into_new(source: int, size: int, *, pieces: bool) -> float:
    """Seconds to copy into new memory that is asked to be of large pages: on one thread, populated whole and filled by one memcpy; or piece
    by piece on as many threads as the mover has, which is what the machine can do."""
    target: int = host.libc.mmap(None, size, _PROT, _MAP, -1, 0)
    if target == host.MAP_FAILED:
        raise OSError(ctypes.get_errno(), f"mapping {size} bytes failed")
    host.huge_pages(target, size)

    def work() -> None:
        if pieces:
            host.transfer([host.Move(target, source, size)], fresh=True, threads=host.workers())
        else:
            host.populate(target, size)
            host.libc.memcpy(target, source, size)

    taken = timed(work)
    host.libc.munmap(target, size)
    return taken


# -- what a job's own code would do, one tensor at a time: copies alone, which give nothing back -------------------------------


def flat(item: Item) -> torch.Tensor:
    """A storage as bytes, where it is."""
    return torch.empty(0, dtype=torch.uint8, device=item.storage.device).set_(item.storage)


def one_by_one(items: Sequence[Item], block: torch.Tensor | None = None) -> tuple[float, float]:
    """Seconds out and back of what one line of code does: each tensor into memory that is new, with `.cpu()` on CUDA, and back to where it
    was. With a block of host memory each goes to its place in that instead."""
    flats = [flat(item) for item in items]
    if block is None:
        kept: list[torch.Tensor] = []
        out = timed(lambda: kept.extend(one.cpu() if one.is_cuda else one.clone() for one in flats))
    else:
        kept = list(block.split([one.numel() for one in flats]))  # type: ignore[no-untyped-call]
        out = timed(lambda: [place.copy_(one) for one, place in zip(flats, kept, strict=True)])
    back = timed(lambda: [one.copy_(place) for one, place in zip(flats, kept, strict=True)])
    kept.clear()
    if block is None:
        host.trim()
    return out, back


# -- torch_memory_saver, where it is installed, on CUDA: all that the job allocates is in a region that it pauses. Its region also has what
# training leaves cached, which goes out and back too: `left` is how much that was in all. Has not run on a GPU yet. ------------


def saver_refused() -> str:
    """Why it cannot be measured here; empty where it can."""
    if not torch.cuda.is_available():
        return "not measured here: it pauses CUDA memory, which needs a GPU"
    return "" if find_spec(SAVER) else "not installed"


def saved(*, size: str, cycles: int) -> dict[str, Any]:
    """Seconds of pause and resume, and the bytes that left the GPU."""
    saver = import_module(SAVER).torch_memory_saver
    saver.hook_mode = "torch"  # the other one needs a library preloaded into the ranks
    with saver.region(tag=TAG, enable_cpu_backup=True):
        job = model.build(ModelConfig(size=size, seq=16, microbatches=1))
        job.step(1)
    try:
        return saver_cycles(saver, job, cycles)
    finally:
        job.mover.close()
        groups.destroy()


def saver_cycles(saver: Any, job: model.Training, cycles: int) -> dict[str, Any]:
    before = job.hashes()
    times: dict[str, list[float]] = {"out": [], "back": []}
    left = []
    for _ in range(cycles):
        full = _used(job)
        times["out"].append(timed(lambda: saver.pause(TAG)))
        left.append(full - _used(job))
        times["back"].append(timed(lambda: saver.resume(TAG)))
    if job.hashes() != before:
        raise KitError(f"{SAVER} brought other bytes back than it took")
    return {"times": times, "left": min(left)}


def _used(job: model.Training) -> int:
    seen = device_memory(str(job.device))
    assert seen is not None
    return seen.driver_used


# -- all groups of a job released and brought back in one way, again and again -----------------------------------------


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
    dist.barrier()
    first = levels()
    seen = [cycle(mode, more, by_store=by_store) for _ in range(n)]
    dist.barrier()
    last = levels()
    job.mover.close()
    left = {name: last.get(name, 0) - first[name] for name in first}
    return {"groups": own + more, "cycles": seen, "left": left, "mechanism": mechanism(mode=mode, by_store=by_store)}


def cycle(mode: str, more: int, *, by_store: bool) -> dict[str, Any]:
    """Seconds of each part, and what the release gave back by source."""
    dist.barrier()
    before = levels()
    dist.barrier()
    start = time.perf_counter()
    stats = groups.destroy(mode)
    gone = time.perf_counter()
    gc.collect()
    dist.barrier()
    released = levels()  # once all have released: a GPU may be shared
    dist.barrier()
    again = time.perf_counter()
    with unbound(c10d._world.default_pg) if by_store else contextlib.nullcontext():
        groups.reload(stats["snapshot"])
        if mode not in (*groups.EXACT, *groups.KEEPING):
            make_extra(more)  # these two rebuild what Megatron makes; the caller makes the others again
    back = time.perf_counter()
    dist.barrier()
    ready = time.perf_counter()
    every_group_talks()
    talked = time.perf_counter()
    return {
        "seconds": {"release": gone - start, "back": back - again, "first collective": talked - ready},
        "freed": {name: before[name] - released.get(name, 0) for name in before},
    }


def make_extra(number: int) -> None:
    """Groups of all ranks, in a global of Megatron's. It holds those that were there before no longer."""
    everyone = list(range(dist.get_world_size()))
    made = [dist.new_group(everyone, group_desc=f"MORE_{index}") for index in range(number)]
    setattr(parallel_state(), EXTRA, made)


def every_group_talks() -> None:
    wrong = [row["group"] for row in groups.talk(current_groups()) if not row["exact"]]
    assert not wrong, f"a wrong sum over {wrong}"


def levels() -> dict[str, int]:
    """What this process holds, by source: counts, and bytes. NCCL's own statistics are there while it has communicators."""
    return {**counts()._asdict(), **memory(), **{f"comm_{name}": size for name, size in groups.communicators().items()}}
