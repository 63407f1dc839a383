"""What a World holds on this machine, to check that nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from kit import machine
from kit.measure.phase import MEMFD, shared_memory
from kit.world import leftovers, warm


def marked(owner: int) -> list[int]:
    """Return existing processes, zombies included, that a World of the process `owner` started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            value = machine.marked(int(entry.name))
            if value is not None and int(value.split(":")[1]) == owner:
                found.append(int(entry.name))
    return found


@contextlib.contextmanager
def nothing_added() -> Iterator[None]:
    """Fail if this process holds something at the end that it did not hold at the beginning."""
    before = holdings(os.getpid())

    def added() -> dict[str, list[object]]:
        after = holdings(os.getpid())
        new = {kind: [*(Counter(after[kind]) - Counter(before[kind])).elements()] for kind in after}
        return {kind: found for kind, found in new.items() if found}

    yield
    wait_for(lambda: not added(), 5.0)
    assert added() == {}


def holdings(owner: int) -> dict[str, list[Any]]:
    """Everything that a World could leave behind, at this moment. This process's own waiting agents may stay."""
    waiting = waiting_agents() if owner == os.getpid() else {}
    return {
        "processes": [pid for pid in marked(owner) if machine.marked(pid) not in waiting],
        "folders": [
            path.name for path in leftovers.base().iterdir() if f":{owner}:" in path.name and path.name not in waiting
        ],
        "shared memory": sorted(path.name for path in Path("/dev/shm").iterdir() if is_segment(path.name, owner)),
        "fds": sorted(
            os.readlink(fd)
            for fd in Path("/proc/self/fd").iterdir()
            if fd.is_symlink() and is_channel(fd, waiting.values())
        )
        if owner == os.getpid()
        else [],
    }


def waiting_agents() -> dict[str, str]:
    """The marks of this process's waiting agent, and of replaced ones that still have Worlds, each with the end of its channel here."""
    alive = [agent for agent in warm._started if not agent.gone.is_set()]
    kept = [agent for agent in alive if agent is warm._current or agent.agents or agent.looks]
    channels = {agent.folder.name: agent.link.fileno() for agent in kept}
    open_ones = {name: fd for name, fd in channels.items() if fd >= 0}  # the others are gone soon
    return {name: os.readlink(f"/proc/self/fd/{fd}") for name, fd in open_ones.items()}


def waits_for_a_world(pid: int) -> bool:
    """Whether a process is the waiting agent of a notebook that lives: its folder is named like its mark, those of its forks are not."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return False
    mark = machine.marked(pid)
    return "--wait" in words and mark in {Path(word).name for word in words} and not leftovers.is_dead(str(mark))


def is_segment(name: str, owner: int) -> bool:
    """Whether a file of /dev/shm may belong to a World of this owner. Worlds of other test workers run beside it: torch's file names
    contain the pid of the process that made the file, and a file of a living process with another owner does not count."""
    if not name.startswith(("torch", "kit", "sem.mp")):
        return False
    maker = re.match(r"torch_(\d+)_", name)
    if maker is None or int(maker[1]) == owner or not Path(f"/proc/{maker[1]}").exists():
        return True
    return f":{owner}:" in (machine.marked(maker[1]) or "")


def memory_files() -> list[str]:
    """Memory files that this process holds by descriptor or by mapping."""
    return [one.name for one in shared_memory().values() if one.name.startswith(MEMFD)]


def is_channel(fd: Path, but: Collection[str]) -> bool:
    """Whether a descriptor is of a kind that a World opens. Other files (fonts, caches) do not count, whatever their names."""
    try:
        target = os.readlink(fd)
    except FileNotFoundError:
        return False
    kinds = ("socket:", "pipe:", "/memfd:kit", "/dev/shm/kit", f"{leftovers.base()}/")
    return target not in but and target.startswith(kinds)


def wait_for(condition: object, seconds: float = 10.0) -> bool:
    """Poll until `condition()` holds; used for process ends, which send no notification."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.02)
    return False
