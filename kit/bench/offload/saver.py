"""torch_memory_saver on a job of its own: everything the job allocates is in a region that it pauses, with a copy on the host.

Rank-side; only where it is installed, on CUDA. Its region also has what training leaves cached, which goes out and back too: `left` tells
how much that was in all. Has not run on a GPU yet.
"""

from __future__ import annotations

import time
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from kit.errors import KitError
from kit.measure.memory import device_memory
from kit.megatron import groups, model
from kit.megatron.config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "torch_memory_saver"
TAG = "kit-bench"


def refused() -> str:
    """Why it cannot be measured here; empty where it can."""
    if not torch.cuda.is_available():
        return "not measured here: it pauses CUDA memory, which needs a GPU"
    return "" if find_spec(NAME) else "not installed"


def tensors(*, size: str, cycles: int) -> dict[str, Any]:
    """Seconds of pause and resume, and the bytes that left the GPU."""
    saver = import_module(NAME).torch_memory_saver
    saver.hook_mode = "torch"  # the other one needs a library preloaded into the ranks
    with saver.region(tag=TAG, enable_cpu_backup=True):
        job = model.build(ModelConfig(size=size, seq=16, microbatches=1))
        job.step(1)
    try:
        return _cycles(saver, job, cycles)
    finally:
        job.mover.close()
        groups.destroy()


def _cycles(saver: Any, job: model.Training, cycles: int) -> dict[str, Any]:
    before = job.hashes()
    times: dict[str, list[float]] = {"out": [], "back": []}
    left = []
    for _ in range(cycles):
        full = _used(job)
        times["out"].append(timed(lambda: saver.pause(TAG)))
        left.append(full - _used(job))
        times["back"].append(timed(lambda: saver.resume(TAG)))
    if job.hashes() != before:
        raise KitError(f"{NAME} brought other bytes back than it took")
    return {"times": times, "left": min(left)}


def _used(job: model.Training) -> int:
    seen = device_memory(str(job.device))
    assert seen is not None
    return seen.driver_used


def timed(work: Callable[[], object]) -> float:
    """Seconds, with what was begun on a GPU before and in it done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
