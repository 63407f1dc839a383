"""What a machine can do at best: plain copies of one big block, by which moves of weights are measured. Runs on ranks, with torch alone.

On the CPU that is one memcpy. On CUDA it is also a copy within the GPU, to and from pinned memory, and to another GPU where the two
reach each other's memory. A rate counts a byte that is copied once, although it is read and written.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from kit.measure import host

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Work = Callable[[], object]

HOST, WITHIN, OUT, BACK, PEER = "memcpy", "within the GPU", "GPU to pinned memory", "pinned memory to GPU", "to GPU"


def memcpy(size: int) -> Work:
    """One copy between two places of host memory that are both there: of zeros the kernel would keep one page for all."""
    source, target = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
    return lambda: copy(target, source)


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """The one copy by which the host is measured: all bytes at once, by the C library."""
    host.libc.memcpy(target.data_ptr(), source.data_ptr(), source.nbytes)


def on_gpu(device: torch.device, size: int) -> dict[str, Work]:
    """By name, each to be awaited by synchronising the device; `size` bytes a block, of which there are two and one a peer."""
    here, other = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    works: dict[str, Work] = {
        WITHIN: partial(other.copy_, here, non_blocking=True),
        OUT: partial(pinned.copy_, here, non_blocking=True),
        BACK: partial(here.copy_, pinned, non_blocking=True),
    }
    for number in range(torch.cuda.device_count()):
        if number != device.index and torch.cuda.can_device_access_peer(device, number):
            there = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", number))
            works[f"{PEER} {number}"] = partial(there.copy_, here, non_blocking=True)
            break  # one stands for the others: weights go to one receiver at a time
    return works


def seconds(works: Mapping[str, Work], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Turn by turn; the first turn, in which pages are supplied and the driver connects GPUs, is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(-1, rounds):
        for name, work in works.items():
            wait(device)
            start = time.perf_counter()
            work()
            wait(device)
            if turn >= 0:
                taken[name].append(time.perf_counter() - start)
    return taken


def wait(device: torch.device) -> None:
    """Until the GPU is done; a copy to another one is this one's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured(*, size: int, rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds for `size` bytes of everything there is here."""
    where = torch.device(device)
    works = {HOST: memcpy(size)}
    if where.type == "cuda":
        works |= on_gpu(where, size)
    return seconds(works, rounds, where)
