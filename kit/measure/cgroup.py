"""What a container allows: memory and process limits of this process's control group, version 1 or 2.

A limit counts at every level from the process's own group up to the mount, so the level with the least room is the
one told. Inside a container the kernel may name a path that the mount does not show; the mount itself then stands for
the group.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_UNLIMITED = 1 << 60  # version 1 writes "no limit" as the largest multiple of a page
_FILES = {
    ("memory", 1): ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ("memory", 2): ("memory.max", "memory.current"),
    ("pids", 1): ("pids.max", "pids.current"),
    ("pids", 2): ("pids.max", "pids.current"),
}


class Limit(NamedTuple):
    """`used` is what the limiting level uses already. `maximum` None: no limit. `version` None: no control group."""

    maximum: int | None
    used: int | None
    version: int | None


def cgroup_limit(controller: str, proc: Path = Path("/proc/self")) -> Limit:
    """Return the limit on "memory" (bytes) or "pids" (processes and threads) with the least room left."""
    found = _folders(controller, proc)
    if found is None:
        return Limit(None, None, None)
    version, folders = found
    maximum_name, used_name = _FILES[controller, version]
    best: tuple[int, int] | None = None
    for folder in folders:
        maximum, used = _number(folder / maximum_name), _number(folder / used_name)
        if maximum is not None and used is not None and (best is None or maximum - used < best[0] - best[1]):
            best = maximum, used
    return Limit(best[0], best[1], version) if best else Limit(None, None, version)


def cgroup_limits(proc: Path = Path("/proc/self")) -> dict[str, int | None]:
    """Both limits as one flat JSON-able dict: version, memory_max, memory_used (bytes), pids_max, pids_used."""
    memory, pids = cgroup_limit("memory", proc), cgroup_limit("pids", proc)
    return {
        "version": memory.version or pids.version,
        "memory_max": memory.maximum,
        "memory_used": memory.used,
        "pids_max": pids.maximum,
        "pids_used": pids.used,
    }


def free_memory(proc: Path = Path("/proc/self"), meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that may still be taken: what the machine has available, or what a level's limit leaves where that is less.

    Pages of files that nobody uses count as free on both sides: the kernel drops them when it needs room, and a group that
    has just read a checkpoint is charged for all of it.
    """
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    version, folders = _folders("memory", proc) or (2, [])
    maximum_name, used_name = _FILES["memory", version]
    for folder in folders:
        maximum, used = _number(folder / maximum_name), _number(folder / used_name)
        if maximum is not None and used is not None:
            free = min(free, maximum - used + _dropped_if_needed(folder, version))
    return max(0, free)


def _dropped_if_needed(folder: Path, version: int) -> int:
    key = "inactive_file" if version == 2 else "total_inactive_file"
    file = folder / "memory.stat"
    fields = dict(line.split() for line in file.read_text().splitlines()) if file.exists() else {}
    return int(fields.get(key, 0))


def _folders(controller: str, proc: Path) -> tuple[int, list[Path]] | None:
    """Find the version that holds the controller, and its folders from the own group up to the mount."""
    if not (proc / "cgroup").exists():
        return None
    paths = {}
    for line in (proc / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            paths[name] = path
    for version, key in ((1, controller), (2, "")):
        if key in paths:
            mount = _mount(version, controller, proc)
            if mount is not None:
                return version, _upwards(*mount, paths[key])
    return None


def _mount(version: int, controller: str, proc: Path) -> tuple[str, Path] | None:
    """Find the hierarchy's mount: the path it shows as its root, and where it is mounted."""
    for line in (proc / "mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        root, point = left.split()[3:5]
        holds = kind == "cgroup2" if version == 2 else kind == "cgroup" and controller in options.split(",")
        if holds:
            return root, Path(point)
    return None


def _upwards(root: str, mount: Path, path: str) -> list[Path]:
    inner = Path(path.removeprefix(root.rstrip("/")).lstrip("/"))
    own = mount / inner
    if ".." in inner.parts or not own.is_dir():
        return [mount]
    return [own, *(folder for folder in own.parents if folder.is_relative_to(mount))]


def _number(file: Path) -> int | None:
    if not file.exists():  # the root group has no limit files
        return None
    text = file.read_text().split()[0]
    return None if text == "max" or int(text) >= _UNLIMITED else int(text)
