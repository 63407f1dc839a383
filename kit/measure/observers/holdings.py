"""What this process holds besides tensors: shared memory of three kinds, files that it made, child processes, memory by kind.

Counts of descriptors, sockets and threads are taken around every phase (`kit.measure.phase`); these cost some milliseconds, and are taken
between phases. Shared memory has three kinds that are easily confused: an open memfd, a shared mapping (which outlives its descriptor),
and a name in /dev/shm (which outlives both). Files count if Python made them in a temporary folder and they still exist. Limits: an entry
in /dev/shm is taken for this job's where it is the user's, came after `watch()` and no process outside of the job uses it; a file that
C++ code made is not seen.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import TYPE_CHECKING, Any, NamedTuple

from kit import machine

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def watch() -> None:
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
    shared = [one for one in machine.mappings() if one.mode[3] == "s" and not one.name.startswith(NOT_OURS)]
    sizes = [one.end - one.start for one in shared]
    return len(sizes), sum(sizes)


class Shared(NamedTuple):
    """Memory that other processes may share: its bytes, and the kernel's name for it, even after the file is gone."""

    size: int
    name: str


Place = tuple[str, int]  # a file's device and inode


def shared_memory() -> dict[Place, Shared]:
    """What this process holds by a descriptor or by a mapping alone: memfds, files of /dev/shm, and writable shared mappings of others."""
    found: dict[Place, Shared] = {}
    for name, about in machine.open_files():
        if name.startswith((MEMFD, f"{SHM}/")):
            device = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}"
            found[device, about.st_ino] = Shared(about.st_size, name.removesuffix(_GONE))
    for start, end, place, name in _mappings():
        known = found.get(place, Shared(0, name))
        found[place] = known._replace(size=max(known.size, end - start))
    return {place: one for place, one in found.items() if not one.name.startswith(_NOT_MEMORY)}


def shared_at(address: int) -> Place | None:
    """The shared memory in which an address of this process lies."""
    return next((place for start, end, place, _ in _mappings() if start <= address < end), None)


def _mappings() -> Iterator[tuple[int, int, Place, str]]:
    """Where each mapping of shared memory begins and ends, of what, by which name."""
    for one in machine.mappings():
        shared = one.mode[1] == "w" and one.mode[3] == "s" and one.name[:1] == "/"
        writable = shared and not one.name.startswith(_DRIVERS)
        if writable or one.name.startswith((MEMFD, f"{SHM}/")):
            yield one.start, one.end, (one.device, one.inode), one.name.removesuffix(_GONE)


def shm_files() -> list[str]:
    """Names in /dev/shm that came since `watch()`, are this user's, and are used by no process outside of the job."""
    new, mine = machine.shm_names() - _found, _owner("self")
    strangers = (pid for pid in machine.pids() if pid != os.getpid() and not (mine and _owner(pid) == mine))
    return sorted(new - machine.shm_in_use(new, strangers))


def temp_files() -> list[str]:
    """What this process made in a temporary folder and is still there; a folder counts once, with all that is in it."""
    here = sorted(path for path in _made if os.path.lexists(path))
    return [path for path in here if not any(path.startswith(other + "/") for other in here)]


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
