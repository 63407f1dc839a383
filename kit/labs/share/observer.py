"""What this process sees of the ranks from outside: who holds the lock of a device, cores, memory. Notebook side.

A thread looks each 20 ms; `look` does so at once. A rank is not asked, and cannot tell. Where the kernel does not show locks of other
processes, `blind` says so and nothing is recorded about owners.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kit import machine
from kit.labs.share.config import DESK, LOCK
from kit.loop.messages import Event, listed
from kit.results.records import new_row

if TYPE_CHECKING:
    from kit.labs.drive import Drive

EVERY_S = 0.02
STEP = 256 * 1024  # bytes: a smaller change of memory is no row


class Observer:
    """`with Observer(drive, folder) as observer:` rows go to the run's records at `flush`; `take` gives events for the ledger of a desk."""

    def __init__(self, drive: Drive, folder: Path, *, for_desk: bool) -> None:
        self.drive = drive
        self.for_desk = for_desk
        pids = drive.world.pids
        self.names = {
            pids[rank]: name.replace(" ", ".", 1)
            for name, ranks in drive.roles.items()
            for rank in ranks
            if rank not in drive.lost
        }
        self.samples = 0
        self.shared_samples = 0  # with two owners of a device
        self._rows: list[dict[str, Any]] = []
        self._events: list[Event] = []
        self._owners: dict[int, tuple[str, ...]] = {}
        self._since: dict[int, float] = {}  # when the owners of a device came
        self._bytes: dict[str, int] = {}
        self._cores: dict[str, str] = {}
        self._began = {pid: machine.cpu_seconds(pid) or 0.0 for pid in self.names}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kit-observer", daemon=True)
        self.inodes: dict[int, int] = {}
        for device in range(drive.config.devices):
            file = folder / LOCK.format(device)
            file.touch(mode=0o600)
            self.inodes[file.stat().st_ino] = device
        self.blind = not sees_locks(folder)

    def __enter__(self) -> Self:
        self.look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.look()
        self.drive.record("seen_samples", self.samples, two_owners=self.shared_samples, blind=int(self.blind))
        for pid, name in self.names.items():
            if (now := machine.cpu_seconds(pid)) is not None:
                self.drive.record("cpu_seconds", now - self._began[pid], "s", who=name)
        self.flush()

    def _run(self) -> None:
        while not self._over.wait(EVERY_S):
            self._see()

    def look(self) -> list[Event]:
        """Look now; what happened since the last events were taken."""
        self._see()
        return self.take()

    def holds(self, role: str) -> bool:
        """Whether a rank of this role is on a device, as far as this process can see."""
        self._see()
        with self._lock:
            return any(role in owners for owners in self._owners.values())

    def take(self) -> list[Event]:
        with self._lock:
            events, self._events = self._events, []
        return events

    def flush(self) -> None:
        with self._lock:
            rows, self._rows = self._rows, []
        if rows:
            self.drive.append(rows)

    def _see(self) -> None:
        with self._lock:
            now = time.time()
            if not self.blind:
                self._see_owners(now)
            for pid, name in self.names.items():
                self._see_rank(pid, name, now)

    def _see_owners(self, now: float) -> None:
        self.samples += 1
        locks = machine.file_locks()
        found: dict[int, tuple[str, ...]] = {}
        for inode, device in self.inodes.items():
            owners = tuple(sorted(self.names.get(pid, f"pid {pid}") for pid in locks.get(inode, ())))
            found[device] = owners
            if owners != self._owners.get(device, ()):
                self._end_ownership(device, now)
                self._rows.append(
                    new_row("seen_owner", len(owners), "1", now, text=" ".join(owners), ids={"device": device})
                )
        # All that were freed come first: between two looks a device may go from one to the other.
        for name, at, others in (
            () if not self.for_desk else (("freed", self._owners, found), ("taken", found, self._owners))
        ):
            for device, owners in at.items():
                for owner in sorted({*owners} - {*others.get(device, ())}):
                    who = owner.partition(".")[0]
                    self._events.append(Event(name, DESK, who=who, device=device, owner=owner))
        self.shared_samples += any(len(owners) > 1 for owners in found.values())
        self._owners = found

    def _end_ownership(self, device: int, now: float) -> None:
        """A span for the timeline: who had a device until now."""
        since = self._since.pop(device, now)
        if owners := self._owners.get(device):
            ids = {"track": f"device {device}"}
            self._rows.append(new_row("owned", now - since, "s", now, text=" ".join(owners), start=since, ids=ids))
        self._since[device] = now

    def _see_rank(self, pid: int, name: str, now: float) -> None:
        size = machine.resident(pid)
        if size is None:
            return
        if abs(size - self._bytes.get(name, -STEP)) >= STEP:
            self._bytes[name] = size
            self._rows.append(new_row("seen_resident", size, "B", now, ids={"who": name}))
        try:
            cores = listed(sorted(os.sched_getaffinity(pid)))
        except ProcessLookupError:
            return
        if cores != self._cores.get(name):
            self._cores[name] = cores
            self._rows.append(new_row("seen_cores", None, "", now, text=cores, ids={"who": name}))


def sees_locks(folder: Path) -> bool:
    """Whether the kernel shows a lock that this process holds on a file there."""
    with tempfile.TemporaryFile(dir=folder) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return os.getpid() in machine.file_locks().get(os.fstat(file.fileno()).st_ino, ())
