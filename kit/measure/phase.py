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

Between phases: what the process holds besides tensors, which costs some milliseconds. Shared memory has three kinds that are easily
confused: an open memfd, a shared mapping (which outlives its descriptor), and a name in /dev/shm (which outlives both). Files count if
Python made them in a temporary folder and they still exist. Limits: an entry in /dev/shm is taken for this job's where it is the user's,
came after `watch()` and no process outside of the job uses it; a file that C++ code made is not seen.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kit import machine
from kit.measure.observers.births import registered_groups
from kit.results.records import STEP_LINE


class DeviceMemory(NamedTuple):
    """Bytes. `process_used` is None where the driver does not list this process, as in most containers."""

    allocated: int
    reserved: int
    peak_allocated: int
    driver_used: int
    process_used: int | None


HOST = {"rss": ["VmRSS"], "anon_rss": ["RssAnon"], "shared_rss": ["RssFile", "RssShmem"], "peak_rss": ["VmHWM"]}


def host_memory_metrics(status: Mapping[str, int] | None = None) -> dict[str, int]:
    """Resident, anonymous and shared bytes, and the peak since the last reset, as far as the kernel reports them."""
    memory_status = machine.status() if status is None else status
    return {
        name: sum(memory_status[part] for part in parts)
        for name, parts in HOST.items()
        if memory_status.keys() >= {*parts}
    }


def device_memory(device: str) -> DeviceMemory | None:
    """Read allocator and driver; None on "cpu"."""
    if not device.startswith("cuda"):
        return None
    import torch

    # One raw reading: memory_allocated(), memory_reserved(), ... each flatten all statistics again.
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


def seconds_on_device(work: Callable[[], object]) -> float:
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
        self._before = _memory_levels(device)
        for meter in _open:
            meter._fold(self._before)
        self.peak_refused = reset_peaks(device)
        _open.append(self)
        self._looked = 0.0
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
        after = _memory_levels(device)
        self._fold(after)
        levels = {name: self._peaks.get(name, value) for name, value in after.items()}
        if self.peak_refused:
            levels.pop("peak_rss", None)
        levels |= {f"{name}_before": value for name, value in self._before.items() if name not in _PEAKS}
        self.metrics = [Metric("seconds", end - self._start - self._looked, "s")]
        for name, value in levels.items():
            counted = name.removesuffix("_before") in Counts._fields
            self.metrics.append(Metric(name, value, "1" if counted else "B"))
        self.metrics.append(Metric("overhead_seconds", self._overhead + self._looked + time.perf_counter() - end, "s"))
        if failure is not None and error is None:
            raise failure
        self.device_error = failure

    def _fold(self, seen: dict[str, int]) -> None:
        for name in _PEAKS:
            self._peaks[name] = max(self._peaks[name], seen.get(name, 0))


@contextlib.contextmanager
def looking() -> Iterator[None]:
    """A measurement that cannot wait until the phase ends: its time is overhead. It must not wait for the device."""
    began = time.perf_counter()
    try:
        yield
    finally:
        for meter in _open:
            meter._looked += time.perf_counter() - began


def between_phases(device: str) -> list[Metric]:
    """What this process holds besides tensors, and the seconds that the measurement took. Outside of a phase it adds no time to one."""
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


def resource_counts(status: Mapping[str, int] | None = None) -> Counts:
    """Costs some 30 us. A communicator that was not destroyed shows here even where no GPU reports its memory."""
    status = machine.status() if status is None else status
    return Counts(len(registered_groups()), *machine.descriptors(), status["Threads"])


def _memory_levels(device: str) -> dict[str, int]:
    """Take every cheap source once, under the names the records carry. A source that is not here has no key."""
    status = machine.status()
    on_device = device_memory(device)
    levels = {
        **host_memory_metrics(status),
        **resource_counts(status)._asdict(),
        **(on_device._asdict() if on_device else {}),
    }
    return {name: value for name, value in levels.items() if value is not None}


WORDS = {"loss": "loss", "global_loss": "loss", "grad_norm": "grad norm"}


def log_steps(results: Sequence[Mapping[str, Any]], *, done: int, seconds: float, device: str, what: str = "") -> None:
    """Print a line for each of these steps, the last of which is step `done`; together they took `seconds`.

    It reads the allocator's counter, or the resident memory, and never waits for the device: about 30 us a line.
    """
    per_row = f"{1e3 * seconds / max(len(results), 1):.1f} ms"
    for step, result in enumerate(results, start=done - len(results) + 1):
        numbers = [f"{word} {result[name]:.6g}" for name, word in WORDS.items() if name in result]
        of = f" ({what})" if what else ""
        print(f"{STEP_LINE}{step}{of}: {', '.join([*numbers, _held_bytes(device), per_row])}")


def _held_bytes(device: str) -> str:
    on_gpu = device.startswith("cuda")
    held = sys.modules["torch"].cuda.memory_allocated(device) if on_gpu else machine.status()["VmRSS"]
    return f"{'allocated' if on_gpu else 'resident'} {held / 2**20:.1f} MiB"


# -- between phases: what the process holds besides tensors ------------------------------------------------------------

SHM = machine.SHM
MEMFD = "/memfd:"
# Semaphores, and what groups and drivers make.
_NOT_MEMORY = (f"{SHM}/sem.", f"{SHM}/nccl-", f"{SHM}/cuda.shm.")
_DRIVERS = ("/dev/nvidia", "/dev/dri")
_GONE = " (deleted)"
CREATING = ("os.mkdir", "os.rename", "os.link", "os.symlink")
NOT_OURS = ("/dev/nvidia", "/dev/dri", "/usr/", "/lib", "/etc/")
RSS = {"file_rss": "RssFile", "shm_rss": "RssShmem"}
BYTES = ("file_rss", "shm_rss", "shared_bytes", "pinned_bytes")

_made: set[str] = set()
_found: set[str] = set()
_places: list[str] = []  # the temporary folders, once somebody watches


def watch_files() -> None:
    """Remember what is in /dev/shm now, and from now on which files this process makes."""
    if not _places:
        _places.extend({f"{tempfile.gettempdir()}/", "/tmp/", "/var/tmp/", f"{SHM}/"})  # noqa: S108 - compared only
        sys.addaudithook(_audit)
    _made.clear()
    _found.clear()
    _found.update(machine.shm_names())


def holdings(device: str = "cpu") -> dict[str, int]:
    """How much of each is held now, by metric: counts, and bytes for the names in `BYTES`."""
    maps, mapped = shared_maps()
    status, started = machine.status(), machine.children()
    levels = {
        "memfds": sum(name.startswith(MEMFD) for name, _ in machine.open_files()),
        "shared_maps": maps,
        "shared_bytes": mapped,
        "shm_files": len(shm_files()),
        "temp_files": len(temp_files()),
        **({} if started is None else {"children": len(started)}),
        **{metric: status[name] for metric, name in RSS.items() if name in status},
    }
    if device.startswith("cuda"):
        levels |= pinned()
    return levels


def shared_maps() -> tuple[int, int]:
    """Mappings that other processes may share: how many, and their bytes. Those of drivers and libraries are left out."""
    shared = [
        mapping for mapping in machine.mappings() if mapping.mode[3] == "s" and not mapping.name.startswith(NOT_OURS)
    ]
    sizes = [mapping.end - mapping.start for mapping in shared]
    return len(sizes), sum(sizes)


class Shared(NamedTuple):
    """Memory that other processes may share: its bytes, and the kernel's name for it, even after the file is gone."""

    size: int
    name: str


Place = tuple[str, int]  # a file's device and inode


def shared_memory() -> dict[Place, Shared]:
    """What this process holds by a descriptor or by a mapping alone: memfds, files of /dev/shm, and writable shared mappings of others."""
    places: dict[Place, Shared] = {}
    for name, about in machine.open_files():
        if name.startswith((MEMFD, f"{SHM}/")):
            device = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}"
            places[device, about.st_ino] = Shared(about.st_size, name.removesuffix(_GONE))
    for start, end, place, name in _mappings():
        known = places.get(place, Shared(0, name))
        places[place] = known._replace(size=max(known.size, end - start))
    return {place: shared for place, shared in places.items() if not shared.name.startswith(_NOT_MEMORY)}


def memory_pages() -> dict[Place, int]:
    """Bytes of the pages that memfds and files of /dev/shm have, of those that this process holds open: whoever wrote them."""
    return {
        (f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}", about.st_ino): 512 * about.st_blocks
        for name, about in machine.open_files()
        if name.startswith((MEMFD, f"{SHM}/"))
    }


def shared_at(address: int) -> Place | None:
    """The shared memory in which an address of this process lies."""
    return next((place for start, end, place, _ in _mappings() if start <= address < end), None)


def shared_bytes() -> int:
    """Bytes of shared memory that this process itself has touched, and of what it holds by a descriptor and has not mapped."""
    mapped = {place for _, _, place, _ in _mappings()}
    unmapped = sum(shared.size for place, shared in shared_memory().items() if place not in mapped)
    return machine.status().get("RssShmem", 0) + unmapped


def shared_spans() -> list[tuple[int, int]]:
    """The addresses at which each mapping of shared memory begins and ends."""
    return [(start, end) for start, end, _, _ in _mappings()]


def _mappings() -> Iterator[tuple[int, int, Place, str]]:
    """Where each mapping of shared memory begins and ends, of what, by which name."""
    for mapping in machine.mappings():
        shared = mapping.mode[1] == "w" and mapping.mode[3] == "s" and mapping.name[:1] == "/"
        writable = shared and not mapping.name.startswith(_DRIVERS)
        if writable or mapping.name.startswith((MEMFD, f"{SHM}/")):
            yield mapping.start, mapping.end, (mapping.device, mapping.inode), mapping.name.removesuffix(_GONE)


def shm_files() -> list[str]:
    """Names in /dev/shm that came since `watch()`, are this user's, and are used by no process outside of the job."""
    new, owner = machine.shm_names() - _found, _owner("self")
    strangers = (pid for pid in machine.pids() if pid != os.getpid() and not (owner and _owner(pid) == owner))
    return sorted(new - machine.shm_in_use(new, strangers))


def temp_files() -> list[str]:
    """What this process made in a temporary folder and is still there; a folder counts once, with all that is in it."""
    existing = sorted(path for path in _made if os.path.lexists(path))
    return [path for path in existing if not any(path.startswith(folder + "/") for folder in existing)]


def pinned() -> dict[str, int]:
    """Host memory that torch's allocator has pinned, where this torch reports it."""
    import torch

    stats: Any = getattr(torch.cuda, "host_memory_stats", dict)()
    size = stats.get("allocated_bytes.current")
    return {} if size is None else {"pinned_bytes": int(size)}


def _owner(pid: int | str) -> list[str]:
    """Pid and start time of the notebook that a process works for; empty for a stranger."""
    return (machine.marked(pid) or "").rsplit(":", 2)[1:]


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
        path, _, flags = args
        made = path if isinstance(flags, int) and flags & os.O_CREAT else None
    elif event in CREATING:
        made = args[0] if event == "os.mkdir" else args[1]
    else:
        return
    path = os.fspath(made) if isinstance(made, str | os.PathLike) else None
    if isinstance(path, str):
        path = os.path.abspath(path)  # noqa: PTH100 - the hook runs at every open of the process
        ours = path.startswith(tuple(_places)) and "/__pycache__/" not in path
        if ours and f"{path}/" not in _places:  # a file without a name opens the temporary folder
            _made.add(path)
