"""Memory of this process: what the kernel holds for it, and on CUDA what the allocator and the driver hold.

Host numbers come from /proc/self/status (about 15 us). The kernel counts pages per CPU and adds them up lazily, so
before Linux 6.16 a level may be off by up to 32 pages for each core, more on very large boxes: compare drifts over
many cycles, not single bytes. The peak is VmHWM, set back to the level of now by writing "5" to
/proc/self/clear_refs; that also sets back what `getrusage` says. `pss` walks every mapping (2 to 15 ms with torch
loaded): only for a run's boundaries.

CUDA numbers: `allocated`, `reserved` and `peak_allocated` are this process's caching allocator; `driver_used` is the
whole GPU, every process and communicator on it, as the driver tells it: on a card that ranks share it is no rank's own.
`process_used` is this process's part of that, where the driver tells it.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from kit.measure import nvml
from kit.measure.clock import is_cuda

if TYPE_CHECKING:
    from collections.abc import Iterable


class HostMemory(NamedTuple):
    """Bytes. None where this kernel does not tell."""

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


class ProcStatus(NamedTuple):
    """One reading of /proc/self/status."""

    memory: HostMemory
    threads: int


def status() -> ProcStatus:
    """Memory and thread count in one reading; opened each time, as a kept descriptor shows the parent after a fork."""
    with open("/proc/self/status", "rb", buffering=0) as file:  # noqa: PTH123 - half the cost of Path.read_bytes
        fields = dict(_fields(file.read().splitlines()))
    file_pages, shmem = fields.get(b"RssFile"), fields.get(b"RssShmem")
    shared = None if file_pages is None or shmem is None else file_pages + shmem
    memory = HostMemory(rss=fields.get(b"VmRSS"), anon=fields.get(b"RssAnon"), shared=shared, peak=fields.get(b"VmHWM"))
    return ProcStatus(memory=memory, threads=fields[b"Threads"])


_WANTED = frozenset((b"VmHWM", b"VmRSS", b"RssAnon", b"RssFile", b"RssShmem", b"Threads"))


def _fields(lines: Iterable[bytes]) -> Iterable[tuple[bytes, int]]:
    for line in lines:
        name, _, rest = line.partition(b":")
        if name in _WANTED:
            number, *unit = rest.split()
            yield name, int(number) * (1024 if unit else 1)


def host_memory() -> HostMemory:
    """Resident, anonymous and shared bytes, and the peak since the last reset."""
    return status().memory


def reset_host_peak() -> str | None:
    """Set the kernel's peak back to the level of now. Returns why it could not, or None."""
    try:
        with open("/proc/self/clear_refs", "wb", buffering=0) as file:  # noqa: PTH123 - as above
            file.write(b"5")
    except OSError as error:
        return f"/proc/self/clear_refs: {error.strerror}"
    return None


def device_memory(device: str) -> DeviceMemory | None:
    """Read allocator and driver; None on "cpu"."""
    if not is_cuda(device):
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


def process_used(device: str, reserved: int) -> int | None:
    """This process's bytes on a card, of which its allocator has so many; None where the driver does not tell."""
    library = nvml.library()
    bus = None if library is None else bus_of(device)
    return None if bus is None else nvml.process_bytes(library, bus, os.getpid(), at_least=reserved)


@functools.cache
def bus_of(device: str) -> str | None:
    """The PCI address of a CUDA device, by which NVML knows it whatever CUDA_VISIBLE_DEVICES says; None where torch does not tell."""
    import torch

    about: Any = torch.cuda.get_device_properties(device)
    if not hasattr(about, "pci_domain_id"):
        return None
    return f"{about.pci_domain_id:08x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"


def reset_peaks(device: str = "cpu") -> str | None:
    """Set the host's and the allocator's peak back to the levels of now. Returns why the host refused, or None."""
    if is_cuda(device):
        import torch

        torch.cuda.reset_peak_memory_stats(device)
    return reset_host_peak()


def pss() -> int | None:
    """Proportional resident bytes: a page shared by n processes counts 1/n. Slow. None where it is not told."""
    try:
        with open("/proc/self/smaps_rollup", "rb") as file:  # noqa: PTH123 - one style for /proc in this file
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(b"Pss:"))
    except FileNotFoundError:
        return None
