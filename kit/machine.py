"""What the kernel and the GPU driver report about this machine: processes, descriptors, mappings, memory, control groups, GPUs.

Only this module reads /proc and control groups and queries NVML or `nvidia-smi`; the process needs no CUDA. It uses Linux and the
standard library only; every room may import it, on both sides.

Every control group from the process's own up to the mount can limit memory or processes, so the level with the least room counts.
Inside a container the kernel may name a path that the mount does not show; the mount then stands for the group.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import resource
import socket
import stat
import subprocess
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

KIB, MIB, GIB = 2**10, 2**20, 2**30  # bytes
SHM = "/dev/shm"  # noqa: S108 - it is listed, and nothing is made there
MARK = "KIT_WORLD"  # in the environment of every process of a World: see kit.world.leftovers

VSIZE, ENV_END = 20, 48  # in `stat_fields`
STARTED_S = 1.0  # a busy machine may leave a process for some 50 ms between its new memory and its environment

# -- processes -----------------------------------------------------------------------------------------------------------


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - numbers are wanted, not paths


def stat_fields(pid: int | str) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the third (state) on; None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()  # the process's name may contain spaces and brackets


def start_time(pid: int) -> int | None:
    """Return a process's start in clock ticks since boot; pid and start time together identify a process for ever."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else None


def alive(pid: int, started: int) -> bool:
    fields = stat_fields(pid)
    return fields is not None and int(fields[19]) == started and fields[0] not in "ZX"


def owner() -> str:
    """Return a name that no other process on this machine ever has: namespace, pid and start time of this process."""
    return f"{namespace()}:{os.getpid()}:{start_time(os.getpid())}"


def is_gone(owner: str) -> bool:
    """Whether the process with this name has certainly ended. False for another machine, boot or namespace, which cannot be checked."""
    place, _, tail = owner.partition(":")
    pid, _, started = tail.partition(":")
    known = place == namespace() and pid.isdecimal() and started.isdecimal()
    return known and not alive(int(pid), int(started))


def started_at(ticks: int) -> float:
    """Convert a process's start time to Unix seconds."""
    (boot,) = (line.split()[1] for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    return int(boot) + ticks / os.sysconf("SC_CLK_TCK")


def waiting_place(pid: int) -> str:
    """Return the kernel function in which a process waits; empty if the kernel does not say."""
    with contextlib.suppress(OSError):
        place = Path(f"/proc/{pid}/wchan").read_text()
        return "" if place == "0" else place
    return ""


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def marked(pid: int | str) -> str | None:
    """Return a process's `MARK`, `id@namespace:pid:start time`. None if it has none or its environment cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        for entry in environment(pid).split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name == MARK.encode() and value.count(b":") >= 2:
                return value.decode()
    return None


def environment(pid: int | str) -> bytes:
    """What /proc shows of it. A process that is just starting its program shows an empty one, until the kernel has placed it."""
    file, deadline = Path(f"/proc/{pid}/environ"), time.monotonic() + STARTED_S
    while not (shown := file.read_bytes()) and time.monotonic() < deadline:
        fields = stat_fields(pid)
        if fields is None or fields[VSIZE] == "0":  # it ended, or is the kernel's
            break
        if fields[ENV_END] != "0":
            return file.read_bytes()
        time.sleep(0.0005)
    return shown


def children() -> list[int] | None:
    """Return this process's children, including zombies and adopted orphans; None if the kernel does not list them."""
    pids: list[int] = []
    try:
        for task in os.listdir("/proc/self/task"):  # noqa: PTH208 - as above
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                pids += map(int, Path(f"/proc/self/task/{task}/children").read_bytes().split())
    except OSError:
        return None
    return pids


def pin(cores: Iterable[int]) -> None:
    """Run every thread of this process on these cores only. A new thread inherits the cores of the thread that starts it."""
    for task in os.listdir("/proc/self/task"):  # noqa: PTH208 - as above
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task), cores)


def inherited() -> tuple[object, ...]:
    """Return what a new process takes over from this one beside its environment and folder: cores, limits, priority, umask."""
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
    text = Path("/proc/self/status").read_text()
    umask = next((line for line in text.splitlines() if line.startswith("Umask")), "")
    return os.sched_getaffinity(0), limits, os.getpriority(os.PRIO_PROCESS, 0), umask


def cpu_seconds(pid: int) -> float | None:
    fields = stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else None


def queued_seconds() -> float:
    """How long this thread has been ready to run while others had the cores; 0 where the kernel does not count it."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def busy_seconds() -> tuple[float, float]:
    """Processor time used so far: by everything on this machine, and by this process and all that it started."""
    user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    parents: dict[int, int] = {}
    spent: dict[int, int] = {}
    for pid in pids():
        if fields := stat_fields(pid):
            parents[pid], spent[pid] = int(fields[1]), sum(map(int, fields[11:15]))  # with its children that have ended
    own = [os.getpid()]
    for parent in own:  # it grows: children of children
        own += [pid for pid, of in parents.items() if of == parent]
    ticks = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + sum(interrupts)) / ticks, sum(spent.get(pid, 0) for pid in own) / ticks


def resident(pid: int) -> int | None:
    """Resident bytes of a process; None when there is no such process."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


def file_locks() -> dict[int, set[int]]:
    """Return which processes hold a whole-file lock (flock), by the file's inode. Empty if the kernel does not say."""
    children_of: dict[int, set[int]] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if fields[1] == "FLOCK":  # a process that waits for a lock has an arrow in this field
                children_of.setdefault(int(fields[5].rpartition(":")[2]), set()).add(int(fields[4]))
    return children_of


def has_thread(native_id: int | None) -> bool:
    return Path(f"/proc/self/task/{native_id}").exists()


def namespace() -> str:
    """Return an identifier of this machine, its boot and the pid namespace; only within it does a pid mean the same process."""
    space = Path("/proc/self/ns/pid")
    return f"{zlib.crc32(f'{boot_id()}{space.readlink() if space.is_symlink() else None}'.encode()):08x}"


def host() -> str:
    return boot_id() or socket.gethostname()


def boot_id() -> str:
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text().strip() if file.exists() else ""


def ptrace_scope(file: Path = Path("/proc/sys/kernel/yama/ptrace_scope")) -> int | None:
    """Return who may trace a process: 0 any process of the user, 1 only its parents, more is stricter; None if the kernel has no Yama."""
    return _number(file)


def cpu_model() -> str | None:
    """Return the CPU's model; None if the kernel does not say, as on ARM."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def output(*command: str, timeout_s: float = 20) -> tuple[str | None, str | None]:
    """Run a tool; return its stdout and None, or None and the reason why there is no output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except FileNotFoundError:
        return None, f"{command[0]} is not on this box"
    except OSError as error:
        return None, f"{command[0]} cannot be started: {error.strerror}"
    except subprocess.TimeoutExpired:
        return None, f"{command[0]} did not answer within {timeout_s:g} s"
    if done.returncode:
        words = (done.stderr or done.stdout).strip().partition("\n")[0]
        return None, f"{command[0]} ended with status {done.returncode}: {words}"
    return done.stdout, None


# -- what this process holds -----------------------------------------------------------------------------------------------


_WANTED = frozenset((b"VmHWM", b"VmRSS", b"RssAnon", b"RssFile", b"RssShmem", b"Threads"))


def status() -> dict[str, int]:
    """Return bytes by kind (VmRSS, VmHWM, RssAnon, RssFile, RssShmem) and Threads, as far as this kernel reports them.

    The file is opened each time: a descriptor kept across a fork would show the parent.
    """
    fields = {}
    with open("/proc/self/status", "rb", buffering=0) as file:  # noqa: PTH123 - half the cost of Path.read_bytes
        for line in file.read().splitlines():
            name, _, value = line.partition(b":")
            if name in _WANTED:
                number, *unit = value.split()
                fields[name.decode()] = int(number) * (1024 if unit else 1)
    return fields


def reset_peak() -> str | None:
    """Reset VmHWM to the current level. Returns why the kernel refused, or None."""
    try:
        with open("/proc/self/clear_refs", "wb", buffering=0) as file:  # noqa: PTH123 - as above
            file.write(b"5")
    except OSError as error:
        return f"/proc/self/clear_refs: {error.strerror}"
    return None


def pss() -> int | None:
    """Return proportional resident bytes: a page shared by n processes counts 1/n. Slow. None if the kernel does not say."""
    try:
        with open("/proc/self/smaps_rollup", "rb") as file:  # noqa: PTH123 - as above
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(b"Pss:"))
    except FileNotFoundError:
        return None


def descriptors() -> tuple[int, int]:
    """Count open file descriptors, and the sockets among them, without the descriptor that the listing itself needs."""
    count = sockets = 0
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - as above
        try:
            mode = os.fstat(int(name)).st_mode
        except OSError:  # closed since the listing: its own descriptor, or another thread's
            continue
        count += 1
        sockets += stat.S_ISSOCK(mode)
    return count, sockets


def open_files() -> Iterator[tuple[str, os.stat_result]]:
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - as above
        with contextlib.suppress(OSError):
            yield os.readlink(f"/proc/self/fd/{name}"), os.fstat(int(name))  # noqa: PTH115 - a text, not a path


def opened_again(fd: int) -> int:
    """A descriptor that only reads the same file. Its locks are not those of the first."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def shm_names(prefixes: tuple[str, ...] = ("",)) -> set[str]:
    """Return this user's files in /dev/shm with names that begin with one of the prefixes."""
    numbers = set()
    with contextlib.suppress(OSError), os.scandir(SHM) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.name.startswith(prefixes) and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    numbers.add(entry.name)
    return numbers


def shm_in_use(names: set[str], by: Iterable[int]) -> set[str]:
    """Return which of these files in /dev/shm one of the processes has open or mapped."""
    used: set[str] = set()
    for pid in by if names else ():
        with contextlib.suppress(OSError):
            folder = f"/proc/{pid}/fd"
            links = [os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)]  # noqa: PTH115, PTH208 - as above
            files = "\n".join([Path(f"/proc/{pid}/maps").read_text(errors="replace"), *links, ""])
            used |= {name for name in names if f"{SHM}/{name}\n" in files or f"{SHM}/{name} " in files}
    return used


class Mapping(NamedTuple):
    start: int
    end: int
    mode: str
    device: str
    inode: int
    name: str


def mappings() -> Iterator[Mapping]:
    with open("/proc/self/maps", errors="replace") as file:  # noqa: PTH123 - as above
        for line in file:
            span, mode, _, device, inode, *name = line.rstrip("\n").split(maxsplit=5)
            start, _, end = span.partition("-")
            yield Mapping(int(start, 16), int(end, 16), mode, device, int(inode), "".join(name))


# -- memory and control groups ---------------------------------------------------------------------------------------------

_UNLIMITED = 1 << 60  # version 1 of control groups writes "no limit" as the largest multiple of a page
_FILES = {
    ("memory", 1): ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ("memory", 2): ("memory.max", "memory.current"),
    ("pids", 1): ("pids.max", "pids.current"),
    ("pids", 2): ("pids.max", "pids.current"),
}


class MemoryLimit(NamedTuple):
    """A limit, and the current use at the limiting level. `maximum` None: no limit. `version` None: no control group."""

    maximum: int | None
    used: int | None
    version: int | None


def cgroup_limit(controller: str, proc: Path = Path("/proc/self")) -> MemoryLimit:
    """Return the limit on "memory" (bytes) or "pids" (processes and threads) with the least room left."""
    version, levels = _levels(controller, proc)
    if not levels:
        return MemoryLimit(None, None, version)
    _, maximum, used = min(levels, key=lambda level: level[1] - level[2])
    return MemoryLimit(maximum, used, version)


def user_limit() -> MemoryLimit:
    """Return the limit on this user's processes and threads (`ulimit -u`) and their number; root has no such limit."""
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if most == resource.RLIM_INFINITY or os.geteuid() == 0:
        return MemoryLimit(None, None, None)
    used = 0
    for pid in pids():
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == os.getuid():  # noqa: PTH116 - as above
                used += len(os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208 - as above
    return MemoryLimit(most, used, None)


def threads_a_rank(ranks: int) -> int:
    """How many threads each rank should compute with here: its share of the cores, and together at most half of the processes
    and threads that the control group or the user may have. More cores than that are common in containers of large machines."""
    most = cgroup_limit("pids").maximum
    users = resource.getrlimit(resource.RLIMIT_NPROC)[0] if os.geteuid() else resource.RLIM_INFINITY
    tasks = [limit // 2 for limit in (most, users) if limit is not None and limit != resource.RLIM_INFINITY]
    return max(1, min([len(os.sched_getaffinity(0)), *tasks]) // ranks)


def defaults_of_ranks(ranks: int) -> dict[str, str]:
    """Environment variables of ranks, unless they are set. All threads of a rank share one arena of the C library. By default a new thread
    may get its own, which grows for some cycles until it has held its most: memory that settles, and looks like a leak."""
    return {"OMP_NUM_THREADS": str(threads_a_rank(ranks)), "MALLOC_ARENA_MAX": "1"}


def cgroup_limits(proc: Path = Path("/proc/self")) -> dict[str, int | None]:
    """Return both limits as one flat JSON-able dict: version, memory_max, memory_used (bytes), pids_max, pids_used."""
    memory, pids = cgroup_limit("memory", proc), cgroup_limit("pids", proc)
    return {
        "version": memory.version or pids.version,
        "memory_max": memory.maximum,
        "memory_used": memory.used,
        "pids_max": pids.maximum,
        "pids_used": pids.used,
    }


def free_memory(proc: Path = Path("/proc/self"), meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the bytes that can still be allocated: what the machine has available, or the room below a group's limit if less.

    Both count inactive file pages as free: the kernel drops them when it needs room, and a group that has just read a
    checkpoint is charged for all of it.
    """
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    version, levels = _levels("memory", proc)

    def dropped_if_needed(file: Path) -> int:
        events = dict(line.split() for line in file.read_text().splitlines()) if file.exists() else {}
        return int(events.get("inactive_file" if version == 2 else "total_inactive_file", 0))

    left = [most - used + dropped_if_needed(folder / "memory.stat") for folder, most, used in levels]
    return max(0, min([int(fields["MemAvailable"].split()[0]) * 1024, *left]))


def oom_kills(proc: Path = Path("/proc/self")) -> int | None:
    """Return how many processes of this control group the kernel has killed because memory ran out; None if it does not count them."""
    version, folders = _folders("memory", proc)
    file = folders[0] / ("memory.events" if version == 2 else "memory.oom_control") if folders else None
    if file is None or not file.exists():
        return None
    counts = dict(line.split() for line in file.read_text().splitlines())
    return int(counts["oom_kill"]) if "oom_kill" in counts else None


def _levels(controller: str, proc: Path) -> tuple[int | None, list[tuple[Path, int, int]]]:
    """Return the version of control groups with this controller, and each level with a limit: folder, limit and use."""
    version, folders = _folders(controller, proc)
    limited = []
    for folder in folders:
        maximum, used = (_number(folder / name) for name in _FILES[controller, version or 2])
        if maximum is not None and used is not None:
            limited.append((folder, maximum, used))
    return version, limited


def _folders(controller: str, proc: Path) -> tuple[int | None, list[Path]]:
    """Return the version of control groups with this controller, and its folders from the process's group up to the mount."""
    lines = (proc / "cgroup").read_text().splitlines() if (proc / "cgroup").exists() else []
    groups = [line.split(":", 2)[1:] for line in lines]
    paths = {name: path for controllers, path in groups for name in controllers.split(",")}
    for version, key in ((1, controller), (2, "")):
        if key in paths and (mounted := _mount(version, controller, proc)) is not None:
            root, mount = mounted
            inner = Path(paths[key].removeprefix(root.rstrip("/")).lstrip("/"))
            own = mount / inner
            if ".." in inner.parts or not own.is_dir():
                return version, [mount]
            return version, [own, *(folder for folder in own.parents if folder.is_relative_to(mount))]
    return None, []


def _mount(version: int, controller: str, proc: Path) -> tuple[str, Path] | None:
    """Return the path that the hierarchy's mount shows as its root, and where it is mounted."""
    for line in (proc / "mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        root, point = left.split()[3:5]
        if kind == "cgroup2" if version == 2 else kind == "cgroup" and controller in options.split(","):
            return root, Path(point)
    return None


def _number(file: Path) -> int | None:
    if not file.exists():  # the root group has no limit files
        return None
    text = file.read_text().split()[0]
    return None if text == "max" or int(text) >= _UNLIMITED else int(text)


# -- the GPU driver: NVML is fast enough for every phase, nvidia-smi takes up to a second ----------------------------------

# A process is found by its pid. In a container the driver may list processes by the host's pids, or none: then there is no answer. A host
# process that happens to have the same pid is rejected if it uses less memory than the allocator of the wanted process has reserved.

# With a driver one of these exists: NVIDIA's (also where a container hides /proc or Windows provides the GPU) or AMD's.
GPU_DRIVERS = tuple(map(Path, ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")))
FRESH_S = 3.0
NVML = "libnvidia-ml.so.1"
NVML_FINE, NVML_TOO_SMALL = 0, 7
DRIVER_TEXT = 80  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE
NVML_UNKNOWN = 2**64 - 1
SPARE = 8  # room for processes that start between the query for their number and the query for the list


def has_gpu_driver() -> bool:
    return any(path.exists() for path in GPU_DRIVERS)


def gpu_driver() -> str | None:
    """Return the version of NVIDIA's driver, which the kernel reports, or NVML where a container hides that."""
    with contextlib.suppress(OSError):
        if version := re.search(r"\d+\.\d+[.\d]*", GPU_DRIVERS[0].read_text()):
            return version[0]
    library, text = nvml(), ctypes.create_string_buffer(DRIVER_TEXT)
    if library is None or library.nvmlSystemGetDriverVersion(text, DRIVER_TEXT) != NVML_FINE:
        return None
    return text.value.decode()


def query_gpus(*fields: str, timeout_s: float = 20) -> tuple[list[list[str]], str | None]:
    """Return a row of texts per GPU (`nvidia-smi --help-query-gpu` lists the fields), or no rows and the reason."""
    printed, why = output(
        "nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", timeout_s=timeout_s
    )
    return [[cell.strip() for cell in line.split(",")] for line in (printed or "").splitlines()], why


def runs_on_gpu(built_for: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether a GPU of this compute capability runs a library built for these architectures (sm_90, sm_90a, compute_90).

    Binary code runs on later GPUs of its generation, and PTX is compiled for every later one (CUDA C++ Programming Guide, "Binary
    Compatibility" and "PTX Compatibility"). Code for "sm_90a" runs on that architecture only; a suffix "f" means its family.
    """
    code = 10 * capability[0] + capability[1]

    def fits(architecture: str) -> bool:
        kind, _, digits = architecture.partition("_")
        number = int(digits.rstrip("af") or 0)
        if digits.endswith("a"):
            return number == code
        later = kind == "compute" and not digits.endswith("f")
        return number <= code and (later or number // 10 == capability[0])

    return any(map(fits, built_for))


def free_gpu_bytes() -> Sequence[int]:
    """Return the free memory of each GPU that ranks will see, read every few seconds at most; empty without a driver."""
    return _free_gpu_bytes(int(time.monotonic() / FRESH_S), os.environ.get("CUDA_VISIBLE_DEVICES"))


@functools.lru_cache(maxsize=1)
def _free_gpu_bytes(when: int, visible: str | None) -> Sequence[int]:  # noqa: ARG001 - a new time is a new question
    gpus = [(uuid, int(mib) << 20) for uuid, mib in query_gpus("uuid", "memory.free")[0] if mib.isdigit()]
    return [gpus[place][1] for place in visible_gpus([uuid for uuid, _ in gpus], visible)]


def visible_gpus(uuids: Sequence[str], visible: str | None) -> Sequence[int]:
    """Return the places of the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; all where it is not set.

    CUDA reads numbers and (the beginnings of) UUIDs up to the first name that it does not know (CUDA C++ Programming Guide, "CUDA
    Environment Variables"). Parts of a GPU (MIG) have no memory of their own in the driver's list, so there is no answer for them.
    """
    if visible is None:
        return range(len(uuids))
    places: list[int] = []
    for name in visible.split(","):
        word = name.strip()
        known = [place for place, uuid in enumerate(uuids) if word.startswith("GPU-") and uuid.startswith(word)]
        place = int(word) if word.isdigit() else known[0] if len(known) == 1 else len(uuids)
        if place >= len(uuids) or place in places:
            break
        places.append(place)
    return places


class GpuProcess(ctypes.Structure):
    """`nvmlProcessInfo_v2_t`, which NVML's _v3 calls fill too."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@functools.cache
def nvml() -> Any:
    """Return NVML, initialised; None without a driver, or with one that is too old."""
    try:
        library = ctypes.CDLL(NVML)
        library.nvmlDeviceGetComputeRunningProcesses_v3  # noqa: B018 - whether it is there
        return library if library.nvmlInit_v2() == NVML_FINE else None
    except (OSError, AttributeError):
        return None


def gpu_process_bytes(library: Any, bus: str, pid: int, *, at_least: int = 0) -> int | None:
    """Return a process's bytes on the GPU at a PCI address; None if the driver does not say, or lists another process."""
    gpu = ctypes.c_void_p()
    if library is None or library.nvmlDeviceGetHandleByPciBusId_v2(bus.encode(), ctypes.byref(gpu)) != NVML_FINE:
        return None
    used_by_pid = [used for listed, used in _gpu_processes(library, gpu) if listed == pid]
    used = sum(used_by_pid)  # a partitioned GPU (MIG) lists a process once per partition
    return used if used_by_pid and used >= at_least else None


def _gpu_processes(library: Any, gpu: ctypes.c_void_p) -> list[tuple[int, int]]:
    """Return pid and bytes of each process on a GPU for which the driver reports both."""
    count = ctypes.c_uint(0)
    if library.nvmlDeviceGetComputeRunningProcesses_v3(gpu, ctypes.byref(count), None) != NVML_TOO_SMALL:
        return []  # no process, or an error
    count.value += SPARE
    listed = (GpuProcess * count.value)()
    if library.nvmlDeviceGetComputeRunningProcesses_v3(gpu, ctypes.byref(count), listed) != NVML_FINE:
        return []
    return [(process.pid, process.used) for process in listed[: count.value] if process.used != NVML_UNKNOWN]


def gpu_bytes_by_pid() -> dict[int, int]:
    """Return the bytes of each process on all GPUs together, as far as the driver lists it."""
    library, used = nvml(), Counter[int]()
    for gpu in _gpus(library):
        for pid, size in _gpu_processes(library, gpu):
            used[pid] += size
    return dict(used)


def _gpus(library: Any) -> list[ctypes.c_void_p]:
    """Return NVML's handles of all GPUs; empty if it is missing or does not say."""
    count, handles = ctypes.c_uint(0), []
    if library is None or library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != NVML_FINE:
        return []
    for number in range(count.value):
        gpu = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(gpu)) != NVML_FINE:
            return []
        handles.append(gpu)
    return handles


class GpuBusy(ctypes.Structure):
    """`nvmlUtilization_t`: percent of the time during which a kernel ran, or memory was read or written."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def busy_gpus() -> list[int]:
    """Return per GPU the percent of the last second or so during which a kernel ran. Empty if NVML is missing or does not say."""
    library, percents = nvml(), []
    for gpu in _gpus(library):
        rates = GpuBusy()
        if library.nvmlDeviceGetUtilizationRates(gpu, ctypes.byref(rates)) != NVML_FINE:
            return []
        percents.append(int(rates.gpu))
    return percents
