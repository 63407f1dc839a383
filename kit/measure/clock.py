"""The clock: wall time, read after the device has finished all work in its queue.

A kernel launch returns at once, so a time taken without waiting for the device measures the launch alone. `now` waits
for every stream of the device first. On "cpu" there is nothing to wait for.
"""

from __future__ import annotations

import sys
import time


def is_cuda(device: str) -> bool:
    """Whether `device` ("cpu", "cuda", "cuda:1") is a CUDA device."""
    return device.startswith("cuda")


def current_device() -> str:
    """Return "cuda:N" once this process has initialised CUDA, else "cpu": asking must not put a context on a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return "cpu"
    return f"cuda:{torch.cuda.current_device()}"


def synchronize(device: str) -> None:
    """Wait until the device has finished all its work. An error of an earlier kernel is raised here."""
    if is_cuda(device):
        import torch

        torch.cuda.synchronize(device)


def now(device: str = "cpu") -> float:
    """Seconds of a monotonic clock, after a device synchronisation. Only differences have a meaning."""
    synchronize(device)
    return time.perf_counter()
