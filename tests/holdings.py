"""What a World holds on this machine, to see that nothing of it is left."""

from __future__ import annotations

import os
import time
from pathlib import Path

from kit.world import leftovers


def marked(owner: int) -> list[int]:
    """Processes, zombies included, that a World of the process `owner` started and that are still there."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            value = leftovers.marked(int(entry.name))
            if value is not None and int(value.split(":")[1]) == owner:
                found.append(int(entry.name))
    return found


def holdings(owner: int) -> dict[str, object]:
    """All that a World could leave behind, as of now."""
    return {
        "processes": marked(owner),
        "folders": [path.name for path in leftovers.base().iterdir() if f":{owner}:" in path.name],
        "shared memory": sorted(
            path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("torch", "kit", "sem.mp"))
        ),
        "fds": sorted(os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink() and is_channel(fd))
        if owner == os.getpid()
        else [],
    }


def is_channel(fd: Path) -> bool:
    try:
        return os.readlink(fd).startswith(("socket:", "pipe:")) or "kit" in os.readlink(fd)
    except FileNotFoundError:
        return False


def wait_for(condition: object, seconds: float = 10.0) -> bool:
    """Poll until `condition()` holds; for ends of processes, which nobody can be told of."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.02)
    return False
