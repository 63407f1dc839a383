"""Measure one phase: wall time; memory before, after and at its peak; groups, descriptors and threads before and after.

`PhaseMeter` is a context manager; its `metrics` are there after the block whether or not it raised. The time of sampling is not in
`seconds` but in `overhead_seconds`. Meters may nest: an inner meter resets the process's peaks, so it first passes what it saw to the
outer ones. Peaks are of the process and include threads that work beside the phase.

Host numbers come from /proc/self/status (about 15 us). The kernel counts pages per CPU and adds them up lazily, so before Linux 6.16 a
level may be off by up to 32 pages for each core, more on very large boxes: compare drifts over many cycles, not single bytes. The peak is
VmHWM, reset to the current level by writing "5" to /proc/self/clear_refs; that also resets the peak that `getrusage` reports. `pss` walks
every mapping (2 to 15 ms with torch loaded): only for a run's boundaries.

CUDA numbers: `allocated`, `reserved` and `peak_allocated` come from this process's caching allocator. `driver_used` comes from
the driver and covers the whole GPU, every process and communicator on it; where ranks share a GPU it belongs to no single rank.
`process_used` is this process's part of that, where the driver reports it.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kit import machine
from kit.measure.observers.births import registered
from kit.measure.observers.holdings import BYTES, holdings
from kit.results.records import STEP_LINE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


class DeviceMemory(NamedTuple):
    """Bytes. `process_used` is None where the driver does not list this process, as in most containers."""

    allocated: int
    reserved: int
    peak_allocated: int
    driver_used: int
    process_used: int | None


HOST = {"rss": ["VmRSS"], "anon_rss": ["RssAnon"], "shared_rss": ["RssFile", "RssShmem"], "peak_rss": ["VmHWM"]}


def host_memory(status: Mapping[str, int] | None = None) -> dict[str, int]:
    """Resident, anonymous and shared bytes, and the peak since the last reset, as far as the kernel reports them."""
    found = machine.status() if status is None else status
    return {name: sum(found[part] for part in parts) for name, parts in HOST.items() if found.keys() >= {*parts}}


def device_memory(device: str) -> DeviceMemory | None:
    """Read allocator and driver; None on "cpu"."""
    if not device.startswith("cuda"):
        return None
    import torch

    # One raw reading: memory_allocated(), memory_reserved(), ... each flatten all statistics anew.
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]["current"]
    own = process_used(device, reserved)
    return DeviceMemory(allocated["current"], reserved, allocated["peak"], total - free, own)


def process_used(device: str, reserved: int) -> int | None:
    """Bytes of this process on a GPU, of which its allocator has `reserved`; None where the driver does not say."""
    library = machine.nvml()
    bus = None if library is None else bus_of(device)
    return None if bus is None else machine.gpu_process_bytes(library, bus, os.getpid(), at_least=reserved)


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


class Metric(NamedTuple):
    """One measured number. Units: "s", "B" for bytes, "1" for counts."""

    metric: str
    value: float
    unit: str


def current_device() -> str:
    """Return "cuda:N" once this process has initialised CUDA, else "cpu": asking must not put a context on a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return "cpu"
    return f"cuda:{torch.cuda.current_device()}"


def synchronize(device: str) -> None:
    """Wait until the device has finished all its work. An error of an earlier kernel is raised here."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)


def now(device: str) -> float:
    """Seconds of a monotonic clock (for differences), read after the device has finished its work: a kernel launch returns at once."""
    synchronize(device)
    return time.perf_counter()


def timed(work: Callable[[], object]) -> float:
    """Seconds of this work, without what the device had to finish before it and with what the work started there."""
    start = now(current_device())
    work()
    return now(current_device()) - start


_open: list[PhaseMeter] = []
_PEAKS = ("peak_rss", "peak_allocated")


class PhaseMeter:
    """`with PhaseMeter(device) as m: ...`, then `m.metrics`.

    `device` None means "cuda:N" once this process has initialised CUDA, else "cpu". `peak_refused` says why there is
    no `peak_rss`, `device_error` holds what the device raised at the end of a phase that had failed already, and
    `ended` is the Unix time of the end.
    """

    def __init__(self, device: str | None = None) -> None:
        self.metrics: list[Metric] = []
        self.peak_refused: str | None = None
        self.device_error: Exception | None = None
        self.ended = time.time()
        self._device = device
        self._peaks = dict.fromkeys(_PEAKS, 0)

    def __enter__(self) -> PhaseMeter:
        device = self._device or current_device()
        synchronize(device)
        began = time.perf_counter()
        self._before = _levels(device)
        for meter in _open:
            meter._fold(self._before)
        self.peak_refused = reset_peaks(device)
        _open.append(self)
        self._start = time.perf_counter()
        self._overhead = self._start - began
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        device = self._device or current_device()
        failure: Exception | None = None
        try:
            synchronize(device)
        except RuntimeError as raised:  # a kernel of the phase failed and took the device along; the host can be read
            failure, device = raised, "cpu"
        end = time.perf_counter()
        self.ended = time.time()
        _open.remove(self)
        after = _levels(device)
        self._fold(after)
        levels = {name: self._peaks.get(name, value) for name, value in after.items()}
        if self.peak_refused:
            levels.pop("peak_rss", None)
        levels |= {f"{name}_before": value for name, value in self._before.items() if name not in _PEAKS}
        self.metrics = [Metric("seconds", end - self._start, "s")]
        for name, value in levels.items():
            counted = name.removesuffix("_before") in Counts._fields
            self.metrics.append(Metric(name, value, "1" if counted else "B"))
        self.metrics.append(Metric("overhead_seconds", self._overhead + time.perf_counter() - end, "s"))
        if failure is not None and error is None:
            raise failure
        self.device_error = failure

    def _fold(self, seen: dict[str, int]) -> None:
        for name in _PEAKS:
            self._peaks[name] = max(self._peaks[name], seen.get(name, 0))


def between_phases(device: str) -> list[Metric]:
    """What this process holds besides tensors, and how long the look took. Call it outside a phase, so that it adds no time to one."""
    start = time.perf_counter()
    held = holdings(device)
    rows = [Metric(name, float(value), "B" if name in BYTES else "1") for name, value in held.items()]
    return [*rows, Metric("observers_seconds", time.perf_counter() - start, "s")]


class Counts(NamedTuple):
    """What this process holds open: registered process groups, file descriptors (sockets are a part of them), native threads."""

    groups: int
    fds: int
    sockets: int
    threads: int


def counts(status: Mapping[str, int] | None = None) -> Counts:
    """Costs some 30 us. A communicator that was not destroyed shows here even where no GPU reports its memory."""
    status = machine.status() if status is None else status
    return Counts(len(registered()), *machine.descriptors(), status["Threads"])


def _levels(device: str) -> dict[str, int]:
    """Take every cheap source once, under the names the records carry. A source that is not here has no key."""
    status = machine.status()
    on_device = device_memory(device)
    levels = {**host_memory(status), **counts(status)._asdict(), **(on_device._asdict() if on_device else {})}
    return {name: value for name, value in levels.items() if value is not None}


WORDS = {"loss": "loss", "global_loss": "loss", "grad_norm": "grad norm"}


def log_steps(results: Sequence[Mapping[str, Any]], *, done: int, seconds: float, device: str, what: str = "") -> None:
    """Print a line for each of these steps, the last of which is step `done`; together they took `seconds`.

    It reads the allocator's counter, or the resident memory, and never waits for the device: about 30 us a line.
    """
    each = f"{1e3 * seconds / max(len(results), 1):.1f} ms"
    for step, result in enumerate(results, start=done - len(results) + 1):
        numbers = [f"{word} {result[name]:.6g}" for name, word in WORDS.items() if name in result]
        of = f" ({what})" if what else ""
        print(f"{STEP_LINE}{step}{of}: {', '.join([*numbers, _held(device), each])}")


def _held(device: str) -> str:
    on_gpu = device.startswith("cuda")
    held = sys.modules["torch"].cuda.memory_allocated(device) if on_gpu else machine.status()["VmRSS"]
    return f"{'allocated' if on_gpu else 'resident'} {held / 2**20:.1f} MiB"
