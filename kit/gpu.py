"""What the GPU driver says, to a process that need not have CUDA: whether there is a driver, its GPUs, who uses their memory and which
code they run.

The only module that asks NVML or `nvidia-smi`; every room may import it, on both sides. NVML answers within a phase's time, and
`nvidia-smi` within a second.

A process is found by its pid. In a container the driver may list processes by the host's pids, or none at all: then there is no
answer, and a process of the host with the same pid is recognised by having less than the allocator of the process that was meant.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kit import machine

# Any of them: NVIDIA's, also where a container hides /proc or Windows provides the GPU, and AMD's.
DRIVERS = tuple(map(Path, ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")))
FRESH_S = 3.0
LIBRARY = "libnvidia-ml.so.1"
FINE, TOO_SMALL = 0, 7
NOT_TOLD = 2**64 - 1
SPARE = 8  # processes that may have come between asking how many and asking which


def has_driver() -> bool:
    return any(path.exists() for path in DRIVERS)


def query(*fields: str, timeout_s: float = 20) -> tuple[list[list[str]], str | None]:
    """A row of texts per GPU (`nvidia-smi --help-query-gpu` lists the fields), or none and why."""
    found, why = machine.output(
        "nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", timeout_s=timeout_s
    )
    return [[cell.strip() for cell in line.split(",")] for line in (found or "").splitlines()], why


def runs(built_for: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether a GPU of this compute capability runs a library that was built for these architectures (sm_90, sm_90a, compute_90).

    Binary code runs on later GPUs of its generation, and PTX is compiled for every later one (CUDA C++ Programming Guide, "Binary
    Compatibility" and "PTX Compatibility"). What ends with "a" runs on that architecture alone, with "f" on its family.
    """
    here = 10 * capability[0] + capability[1]
    for kind, _, digits in (one.partition("_") for one in built_for):
        number = int(digits.rstrip("af") or 0)
        if digits.endswith("a"):
            fits = number == here
        else:
            later = kind == "compute" and not digits.endswith("f")
            fits = number <= here and (later or number // 10 == capability[0])
        if fits:
            return True
    return False


def free_bytes() -> Sequence[int]:
    """Free memory of each GPU, read every few seconds at most; empty where there is no driver to ask."""
    return _free(int(time.monotonic() / FRESH_S))


@functools.lru_cache(maxsize=1)
def _free(when: int) -> Sequence[int]:  # noqa: ARG001 - a new time is a new question
    return [int(mib) << 20 for (mib,) in query("memory.free")[0] if mib.isdigit()]


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
    """NVML, initialised; None without a driver, or with one that is too old."""
    try:
        found = ctypes.CDLL(LIBRARY)
        found.nvmlDeviceGetComputeRunningProcesses_v3  # noqa: B018 - whether it is there
        return found if found.nvmlInit_v2() == FINE else None
    except (OSError, AttributeError):
        return None


def process_bytes(nvml: Any, bus: str, pid: int, *, at_least: int = 0) -> int | None:
    """Bytes of a process on the GPU at a PCI address; None where the driver does not say, or means another process."""
    gpu = ctypes.c_void_p()
    if nvml is None or nvml.nvmlDeviceGetHandleByPciBusId_v2(bus.encode(), ctypes.byref(gpu)) != FINE:
        return None
    count = ctypes.c_uint(0)
    if nvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu, ctypes.byref(count), None) != TOO_SMALL:
        return None  # no process, or an error
    count.value += SPARE
    listed = (Process * count.value)()
    if nvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu, ctypes.byref(count), listed) != FINE:
        return None
    mine = [one.used for one in listed[: count.value] if one.pid == pid and one.used != NOT_TOLD]
    used = sum(mine)  # a GPU in parts lists a process once for each
    return used if mine and used >= at_least else None


class Busy(ctypes.Structure):
    """`nvmlUtilization_t`: percent of the time in which a kernel ran, and in which memory was read or written."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def busy() -> list[int]:
    """Of each GPU: the percent of the last second or so in which a kernel ran. Empty without NVML, or where it does not say."""
    nvml, count, found = library(), ctypes.c_uint(0), []
    if nvml is None or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != FINE:
        return []
    for number in range(count.value):
        gpu, rates = ctypes.c_void_p(), Busy()
        if nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(gpu)) != FINE:
            return []
        if nvml.nvmlDeviceGetUtilizationRates(gpu, ctypes.byref(rates)) != FINE:
            return []
        found.append(int(rates.gpu))
    return found
