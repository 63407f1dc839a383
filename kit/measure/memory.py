"""Memory of this process: what the kernel holds for it, and on CUDA what the allocator and the driver hold.

Host numbers come from /proc/self/status (about 15 us). The kernel counts pages per CPU and adds them up lazily, so
before Linux 6.16 a level may be off by up to 32 pages for each core, more on very large boxes: compare drifts over
many cycles, not single bytes. The peak is VmHWM, reset to the current level by writing "5" to
/proc/self/clear_refs; that also resets the peak that `getrusage` reports. `pss` walks every mapping (2 to 15 ms with torch
loaded): only for a run's boundaries.

CUDA numbers: `allocated`, `reserved` and `peak_allocated` come from this process's caching allocator. `driver_used` comes from
the driver and covers the whole GPU, every process and communicator on it; where ranks share a GPU it belongs to no single rank.
`process_used` is this process's part of that, where the driver reports it.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from kit import gpu, machine

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class HostMemory(NamedTuple):
    """Bytes. None where the kernel does not report them."""

    rss: int | None
    anon: int | None
    shared: int | None
    peak: int | None


class DeviceMemory(NamedTuple):
    """Bytes. `process_used` is None where the driver does not list this process, as in most containers."""

    allocated: int
    reserved: int
    peak_allocated: int
    driver_used: int
    process_used: int | None


def host_memory(status: Mapping[str, int] | None = None) -> HostMemory:
    """Resident, anonymous and shared bytes, and the peak since the last reset, from a reading of `machine.status()`."""
    found = machine.status() if status is None else status
    file, shm = found.get("RssFile"), found.get("RssShmem")
    shared = None if file is None or shm is None else file + shm
    return HostMemory(rss=found.get("VmRSS"), anon=found.get("RssAnon"), shared=shared, peak=found.get("VmHWM"))


def device_memory(device: str) -> DeviceMemory | None:
    """Read allocator and driver; None on "cpu"."""
    if not device.startswith("cuda"):
        return None
    import torch

    # One raw reading: memory_allocated(), memory_reserved(), ... each flatten all statistics anew.
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]["current"]
    return DeviceMemory(
        allocated=allocated["current"],
        reserved=reserved,
        peak_allocated=allocated["peak"],
        driver_used=total - free,
        process_used=process_used(device, reserved),
    )


def process_used(device: str, reserved: int, pid: int | None = None) -> int | None:
    """Bytes of a process (this one) on a GPU, of which its allocator has `reserved`; None where the driver does not say."""
    library = gpu.library()
    bus = None if library is None else bus_of(device)
    return None if bus is None else gpu.process_bytes(library, bus, pid or os.getpid(), at_least=reserved)


@functools.cache
def bus_of(device: str) -> str | None:
    """The PCI address of a CUDA device, by which NVML finds it whatever CUDA_VISIBLE_DEVICES is; None where torch does not report it."""
    import torch

    about: Any = torch.cuda.get_device_properties(device)
    if not hasattr(about, "pci_domain_id"):
        return None
    return f"{about.pci_domain_id:08x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"


def reset_peaks(device: str = "cpu") -> str | None:
    """Reset the host's and the allocator's peaks to the current levels. Returns why the kernel refused, or None."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.reset_peak_memory_stats(device)
    return machine.reset_peak()


ENTRIES = 100_000  # some KB each


class History:
    """PyTorch's history of its CUDA allocator, from `start` to `stop`; `write` in between writes it to a file.

    Every allocation is recorded with its stack, which slows the run down. Limits: CUDA only; the last `ENTRIES` events; a rank that is
    killed writes nothing, and one on another machine writes there. The file contains paths of the code.
    """

    def __init__(self, file: Path) -> None:
        import torch

        self.file = file
        self._memory: Any = torch.cuda.memory

    def start(self) -> None:
        self._memory._record_memory_history(max_entries=ENTRIES, stacks="python")

    def write(self) -> bool:
        """Whether the file was written. What prevents it is printed: it must not hide why a phase raised."""
        draft = self.file.with_name(f".{self.file.name}.draft")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._memory._dump_snapshot(str(draft))
            draft.replace(self.file)
        except (OSError, RuntimeError) as error:
            print(f"no memory snapshot: {type(error).__name__}: {error}", flush=True)
            draft.unlink(missing_ok=True)
            return False
        return True

    def stop(self) -> None:
        self._memory._record_memory_history(enabled=None)
