"""What this process holds open: registered process groups, file descriptors, sockets among them, native threads.

A communicator that was not destroyed shows here even where no GPU tells its memory. `counts` costs some 30 us and is
taken around every phase; `census` adds every group's name, description, backend and ranks.
"""

from __future__ import annotations

import os
import stat
import sys
from typing import Any, NamedTuple

from kit.measure.memory import status


class Counts(NamedTuple):
    """How many of each. `sockets` is a part of `fds`."""

    groups: int
    fds: int
    sockets: int
    threads: int


def counts() -> Counts:
    """Count without names. The descriptor that the listing itself needs is not counted."""
    fds, sockets = descriptors()
    return Counts(groups=group_count(), fds=fds, sockets=sockets, threads=status().threads)


def descriptors() -> tuple[int, int]:
    """Open file descriptors, and sockets among them."""
    fds = sockets = 0
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers are wanted, not paths
        try:
            mode = os.fstat(int(name)).st_mode
        except OSError:  # closed since the listing: the listing's own, or another thread's
            continue
        fds += 1
        sockets += stat.S_ISSOCK(mode)
    return fds, sockets


def group_count() -> int:
    """Process groups registered with torch.distributed: 0 where it was never loaded."""
    world = _world()
    return 0 if world is None else len(world.pg_map)


def groups() -> list[dict[str, Any]]:
    """One row a process group in torch's registry, in the order of registration; a destroyed group is not in it."""
    world = _world()
    if world is None:
        return []
    return [
        {
            "name": str(world.pg_names[group]),
            "description": str(group.group_desc),
            "backend": str(world.pg_backend_config[group]),
            "size": len(world.pg_group_ranks[group]),
            "ranks": sorted(world.pg_group_ranks[group]),
        }
        for group in list(world.pg_map)
    ]


def census() -> dict[str, Any]:
    """Counts and the groups themselves, JSON-able: {"groups": [...], "fds": n, "sockets": n, "threads": n}."""
    here = counts()
    return {"groups": groups(), "fds": here.fds, "sockets": here.sockets, "threads": here.threads}


def _world() -> Any:
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return None if c10d is None else c10d._world
