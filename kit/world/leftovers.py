"""Processes and folders that earlier Worlds left behind, in spite of everything.

Every process that a World starts carries KIT_WORLD=<id>:<notebook's pid>:<its start time> in its environment, and so do the processes
that it starts. A process is a leftover when that notebook (pid *and* start time) is gone. Nothing else is ever touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from kit.errors import BadInput
from kit.machine import alive, command, marked, pids, start_time
from kit.world import processes


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftover:
    """A process of a World whose notebook is gone."""

    world: str
    pid: int
    started: int
    command: str

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def mark(world: str) -> str:
    """The value of KIT_WORLD for a World of this process."""
    pid = os.getpid()
    return f"{world}:{pid}:{start_time(pid)}"


def owner_alive(value: str) -> bool:
    _, pid, started = value.rsplit(":", 2)
    return alive(int(pid), int(started))


def find() -> list[Leftover]:
    """Leftover processes on this machine, oldest first."""
    found = []
    for pid in pids():
        started, value = start_time(pid), marked(pid)
        if pid == os.getpid() or value is None or started is None or owner_alive(value) or not alive(pid, started):
            continue
        with contextlib.suppress(OSError):
            found.append(Leftover(world=value.rsplit(":", 2)[0], pid=pid, started=started, command=command(pid)[:120]))
    return sorted(found, key=lambda one: one.started)


def clean() -> tuple[list[Leftover], list[Path]]:
    """End leftover processes and remove dead Worlds' folders; what was ended and removed."""
    ended = find()
    for one in ended:
        processes.kill(one.pid, one.started)
    deadline = time.monotonic() + 5
    while any(alive(one.pid, one.started) for one in ended) and time.monotonic() < deadline:
        time.sleep(0.01)
    return ended, sweep()


def end_marked(value: str, spare: int | None = None) -> None:
    """SIGKILL what carries this mark, but for one, and wait: it may have left its rank's process group."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        left = [pid for pid in pids() if pid != spare and marked(pid) == value]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def forget_shared(pids: Iterable[int]) -> None:
    """Remove the counters that torch keeps in /dev/shm for CUDA memory shared between processes: a killed process leaves them there."""
    for pid in pids:
        for file in Path("/dev/shm").glob(f"torch_{pid}_*"):  # noqa: S108 - named by processes of ours that are gone
            with contextlib.suppress(OSError):  # in a /dev/shm that containers share it may be somebody else's
                file.unlink()


def base() -> Path:
    """The owner-only folder under which Worlds keep their sockets."""
    root = Path(tempfile.gettempdir())
    if len(str(root)) > 60:  # a Unix socket's path ends at 107 bytes
        root = Path("/tmp")  # noqa: S108 - owner and mode of our folder in it are checked
    folder = root / f"kit-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077 or not stat.S_ISDIR(found.st_mode):
        raise BadInput(
            f"{folder} must be a folder of yours that only you can enter; remove it, or set TMPDIR to another place"
        )
    return folder


def dead_folders() -> list[Path]:
    return [folder for folder in base().iterdir() if not owner_alive(folder.name)]


def sweep() -> list[Path]:
    """Remove the folders of Worlds whose notebook is gone and that no process uses any more."""
    in_use = {one.world for one in find()}
    removed = [folder for folder in dead_folders() if folder.name.rsplit(":", 2)[0] not in in_use]
    for folder in removed:
        shutil.rmtree(folder, ignore_errors=True)
    return removed


def end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
