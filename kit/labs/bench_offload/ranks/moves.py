"""A job's tensors out and back, and the plain copies that they are measured by, in turns within one loop."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from kit.errors import BadInput, KitError
from kit.measure import host
from kit.measure.phase import device_memory, host_memory_metrics, seconds_on_device
from kit.megatron import groups, model
from kit.megatron.config import ModelConfig
from kit.megatron.tensors import Item, Mover, flat_bytes, offload_natively, reload_natively

# A private mapping of nothing. PROT_READ | PROT_WRITE is 3, MAP_PRIVATE | MAP_ANONYMOUS is 0x22.
_PROT, _MAP = 3, 0x22
_BLOCK = 2**30
SAVER, TAG = "torch_memory_saver", "kit-bench"


def out_and_back(*, size: str, cycles: int) -> dict[str, Any]:
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
    # Host memory that is supplied already, and not pinned: the driver copies to and from it through its own pinned buffer.
    pageable = torch.ones(sum(sizes), dtype=torch.uint8) if cuda else None
    times: dict[str, list[float]] = {}
    resident: list[tuple[int, int]] = []

    def sample(**taken: float) -> None:
        for name, seconds in taken.items():
            times.setdefault(name, []).append(seconds)

    def plain_copies() -> str:
        """Plain copies, and Megatron's own calls; why these were refused, if they were."""
        sample(**dict(zip(("clone_out", "clone_back"), one_by_one(mover.items()), strict=True)))
        if pageable is not None:
            sample(**dict(zip(("pageable_out", "pageable_back"), one_by_one(mover.items(), pageable), strict=True)))
        try:
            sample(native_out=offload_natively(job.chunks, job.optimizer, job.device)["seconds"])
            sample(native_back=reload_natively(job.chunks, job.optimizer)["seconds"])
        except BadInput as error:
            return str(error)
        return ""

    # On the CPU before the mover: what these leave of the C library's memory would be in the way of what it is judged by.
    refused = "" if cuda else [plain_copies() for _ in range(2)][-1]
    for cycle in range(cycles + 1):
        if cycle and cuda:
            refused = plain_copies()
        full = host_memory_metrics().get("anon_rss", 0)
        which = "steady" if cycle else "first"
        if cycle:
            sample(copy_out=_warm(mover, out=True))
        sample(**{f"{which}_out": mover.release()["seconds"]})
        resident.append((full, host_memory_metrics().get("anon_rss", 0)))
        if cycle and not cuda:
            # Each of these leaves pages behind that the next one gets: the mover and what it is judged by both follow one.
            for name in ("pieces", "populate"):
                sample(**{name: _into_new(mover.arena.address(0), mover.arena.used, pieces=name == "pieces")})
        sample(**{f"{which}_back": mover.restore()["seconds"]})
        if cycle:
            sample(copy_back=_warm(mover, out=False))
    return {
        "times": times,
        "bytes": sum(sizes),
        "tensors": len(sizes),
        "threads": host.copy_threads(),
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
        return seconds_on_device(lambda: host.libc.memcpy(arena.address(0), arena.address(half), half)) * total / half
    places = [arena.reserve(item.size) for item in items]
    arena.clear()
    pairs = [(arena.view(place, item.size), flat_bytes(item)) for place, item in zip(places, items, strict=True)]

    def copy() -> None:
        for pinned, tensor in pairs:  # the places hold what the tensors hold: the way back changes nothing
            (pinned if out else tensor).copy_(tensor if out else pinned, non_blocking=True)

    return seconds_on_device(copy)


def _into_new(source: int, size: int, *, pieces: bool) -> float:
    """Seconds to copy into new memory that is asked to be of large pages: on one thread, populated whole and filled by one memcpy; or piece
    by piece on as many threads as the mover has, which is what the machine can do."""
    target: int = host.libc.mmap(None, size, _PROT, _MAP, -1, 0)
    if target == host.MAP_FAILED:
        raise OSError(ctypes.get_errno(), f"mapping {size} bytes failed")
    host.huge_pages(target, size)

    def work() -> None:
        if pieces:
            host.transfer([host.Move(target, source, size)], fresh=True, threads=host.copy_threads())
        else:
            host.populate(target, size)
            host.libc.memcpy(target, source, size)

    taken = seconds_on_device(work)
    host.libc.munmap(target, size)
    return taken


# -- what a job's own code would do, one tensor at a time: copies alone, which give nothing back -------------------------------


def one_by_one(items: Sequence[Item], block: torch.Tensor | None = None) -> tuple[float, float]:
    """Seconds out and back of what one line of code does: each tensor into memory that is new, with `.cpu()` on CUDA, and back to where it
    was. With a block of host memory each goes to its place in that instead."""
    flats = [flat_bytes(item) for item in items]
    if block is None:
        kept: list[torch.Tensor] = []
        out = seconds_on_device(
            lambda: kept.extend(tensor.cpu() if tensor.is_cuda else tensor.clone() for tensor in flats)
        )
    else:
        kept = list(block.split([tensor.numel() for tensor in flats]))  # type: ignore[no-untyped-call]
        out = seconds_on_device(lambda: [place.copy_(tensor) for tensor, place in zip(flats, kept, strict=True)])
    back = seconds_on_device(lambda: [tensor.copy_(place) for tensor, place in zip(flats, kept, strict=True)])
    kept.clear()
    if block is None:
        host.trim()
    return out, back


# -- torch_memory_saver, where it is installed, on CUDA: all that the job allocates is in a region that it pauses. Its region also has what
# training leaves cached, which goes out and back too: `left` is how much that was in all. Has not run on a GPU yet. ------------


def saved(*, size: str, cycles: int) -> dict[str, Any]:
    """Seconds of pause and resume, and the bytes that left the GPU; or why it cannot be measured here."""
    if not torch.cuda.is_available():
        return {"refused": "not measured here: it pauses CUDA memory, which needs a GPU"}
    if not find_spec(SAVER):
        return {"refused": "not installed"}
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
        times["out"].append(seconds_on_device(lambda: saver.pause(TAG)))
        left.append(full - _used(job))
        times["back"].append(seconds_on_device(lambda: saver.resume(TAG)))
    if job.hashes() != before:
        raise KitError(f"{SAVER} brought other bytes back than it took")
    return {"times": times, "left": min(left)}


def _used(job: model.Training) -> int:
    seen = device_memory(str(job.device))
    assert seen is not None
    return seen.driver_used
