"""What the driver says one process holds on one card: asked of NVML itself, since `nvidia-smi` takes longer than most phases do.

A process is found by its number. In a container the driver may list processes by the host's numbers, or none at all: then there is no
answer, and a number of the host's that happens to be the same is told by its having less than the process' own allocator has.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
FINE, TOO_SMALL = 0, 7
NOT_TOLD = 2**64 - 1
SPARE = 8  # processes that may have come between asking how many and asking which


class Process(ctypes.Structure):
    """`nvmlProcessInfo_v2_t`, which the calls whose name ends with _v3 fill too."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@functools.cache
def library() -> Any:
    """NVML, ready to be asked; None where there is no driver, or one too old."""
    try:
        found = ctypes.CDLL(LIBRARY)
        found.nvmlDeviceGetComputeRunningProcesses_v3  # noqa: B018 - whether it is there
        return found if found.nvmlInit_v2() == FINE else None
    except (OSError, AttributeError):
        return None


def process_bytes(nvml: Any, bus: str, pid: int, *, at_least: int = 0) -> int | None:
    """Bytes of a process on the card at a PCI address; None where the driver does not tell, or means another process."""
    card = ctypes.c_void_p()
    if nvml is None or nvml.nvmlDeviceGetHandleByPciBusId_v2(bus.encode(), ctypes.byref(card)) != FINE:
        return None
    count = ctypes.c_uint(0)
    if nvml.nvmlDeviceGetComputeRunningProcesses_v3(card, ctypes.byref(count), None) != TOO_SMALL:
        return None  # nobody, or an error
    count.value += SPARE
    listed = (Process * count.value)()
    if nvml.nvmlDeviceGetComputeRunningProcesses_v3(card, ctypes.byref(count), listed) != FINE:
        return None
    mine = [one.used for one in listed[: count.value] if one.pid == pid and one.used != NOT_TOLD]
    used = sum(mine)  # a card in parts lists a process once for each
    return used if mine and used >= at_least else None
