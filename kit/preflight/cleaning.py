"""What a probe may leave behind when it is cut: processes of its Worlds, their folder, names in /dev/shm. Found, ended, removed, named."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kit import machine
from kit.world import leftovers

if TYPE_CHECKING:
    from collections.abc import Iterable

SHM = Path("/dev/shm")  # noqa: S108 - what appeared there is looked for
# Names that torch, NCCL, CUDA, Python's multiprocessing and the kit use there.
PREFIXES = ("torch_", "nccl-", "cuda.shm.", "psm_", "sem.mp", "kit")
AGENT_S = 3.0  # in which a World's agent, whose notebook is gone, ends its ranks and removes what they left


def shm_names() -> set[str]:
    """Names of this user's in /dev/shm that libraries of a job may have made."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(SHM):
            with contextlib.suppress(OSError):
                if entry.name.startswith(PREFIXES) and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    found.add(entry.name)
    return found


def clean(pid: int, started: int, ranks: Iterable[int], before: set[str]) -> list[str]:
    """Clean up after a probe's process that is gone; a word for each thing that it had left behind.

    A World's agent ends by itself what its notebook can no longer end, so it is given a moment. What is there after that counts.
    """
    owner = f":{pid}:{started}"
    left = wait_for_agents(owner)
    for number, command in left.items():
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
        left[number] = f"process {number} ({command})"
    for folder in [path for path in leftovers.base().iterdir() if path.name.endswith(owner)]:
        shutil.rmtree(folder, ignore_errors=True)
    leftovers.forget_shared(ranks)
    new = shm_names() - before
    new -= in_use(new)
    for name in new:
        with contextlib.suppress(OSError):
            (SHM / name).unlink()
    return [*left.values(), *(f"{SHM}/{name}" for name in sorted(new))]


def wait_for_agents(owner: str) -> dict[int, str]:
    """Processes of the owner's Worlds that are still alive after a moment, with their commands."""
    deadline = time.monotonic() + AGENT_S
    while (alive := marked(owner)) and time.monotonic() < deadline:
        time.sleep(0.03)
    return alive


def marked(owner: str) -> dict[int, str]:
    found = {}
    for pid in machine.pids():
        fields = machine.stat_fields(pid)
        if fields and fields[0] not in "ZX" and (machine.marked(pid) or "").endswith(owner):
            found[pid] = machine.command(pid)
    return found


def in_use(names: set[str]) -> set[str]:
    """Those that some process has mapped or open: somebody else's, who works beside us."""
    used: set[str] = set()
    for pid in machine.pids() if names else ():
        with contextlib.suppress(OSError):
            files = machine.files_of(pid)
            used |= {name for name in names if f"{SHM}/{name}\n" in files or f"{SHM}/{name} " in files}
    return used
