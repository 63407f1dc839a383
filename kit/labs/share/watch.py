"""Watches the ranks of one machine from another process there: holders of device locks, cores, memory, processor time, and the driver's
numbers for each GPU.

The memory of a rank on a GPU is what the driver lists for its process on all GPUs together. A driver that lists other pids than this
process sees (a container), or none, gives no number.

A thread samples every 20 ms; `look` samples at once. Ranks are not involved and do not notice. If the kernel does not show the locks of
other processes, `blind` is true and no owners are recorded.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from kit import machine
from kit.labs.share.lab import BETWEEN_LOOKS_S, LOCK
from kit.results.records import Id, Row, value_in_words

EVERY_S = 0.02
GPUS_EVERY_S = 1.0  # about the period of the driver's own average
LEAST_CHANGE = 256 * 1024  # bytes: smaller changes of memory are not recorded


class Change(NamedTuple):
    """An owner such as "a.replica 0" took or freed a device; `name` is "taken" or "freed"."""

    name: str
    device: int
    owner: str


class Sighting(NamedTuple):
    """What is new since the sighting before, and who holds devices now."""

    rows: list[Row]
    changes: list[Change]
    owners: list[str]


class Samples(NamedTuple):
    """How many were taken, and in how many of them a device had two owners."""

    taken: int
    two_owners: int
    blind: bool


class Watch:
    """`names` has the ranks of this machine, whose number is `place`, by pid. The files that are locked for these devices are in the
    folder."""

    def __init__(
        self, names: Mapping[int, str], folder: Path, devices: Iterable[int], *, place: int, on_gpus: bool
    ) -> None:
        self.place = place
        self.names = names
        self.folder = folder
        self.samples = 0
        self.shared_samples = 0  # samples with two owners of a device
        self._rows: list[Row] = []
        self._changes: list[Change] = []
        self._owners: dict[int, tuple[str, ...]] = {}
        self._since: dict[int, float] = {}  # by device: since when it has its owners
        self._bytes: dict[str, int] = {}
        self._saw = time.time()
        self._cores: dict[str, str] = {}
        self._cpu: dict[int, dict[int, float]] = {}  # processor seconds of its owners then, by pid
        self.on_gpus = on_gpus
        self._gpus = machine.busy_gpus() if on_gpus else []
        self._next_gpus = 0.0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kit-observer", daemon=True)
        self.inodes: dict[int, int] = {}
        for device in devices:
            file = folder / LOCK.format(device)
            file.touch(mode=0o600)
            self.inodes[file.stat().st_ino] = device
        self.blind = not sees_locks(folder)

    def start(self) -> None:
        self._see()
        self._thread.start()

    def stop(self) -> Samples:
        self._over.set()
        self._thread.join()
        self._see()
        return Samples(self.samples, self.shared_samples, self.blind)

    def end(self) -> None:
        """Without a last sample, and without waiting."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(EVERY_S):
            self._see()

    def look(self) -> Sighting:
        self._see()
        return self.take()

    def take(self) -> Sighting:
        with self._lock:
            rows, self._rows = self._rows, []
            changes, self._changes = self._changes, []
            return Sighting(rows, changes, sorted({owner for owners in self._owners.values() for owner in owners}))

    def _see(self) -> None:
        with self._lock:
            at = time.time()
            if at - self._saw > BETWEEN_LOOKS_S:  # a busy machine; what happened meanwhile went unseen
                here: dict[str, Id] = {"machine": self.place}
                self._rows.append(
                    Row(metric="seen_gap", value=at - self._saw, unit="s", time=at, start=self._saw, ids=here)
                )
            # Cores first: reading memory takes long, and ranks choose cores only while they hold a device.
            for pid, name in self.names.items():
                self._see_cores(pid, name, at)
            if not self.blind:
                self._see_owners(at)
            self._see_memory()
            self._saw = at
            if self._gpus and at >= self._next_gpus:
                self._next_gpus = at + GPUS_EVERY_S
                for number, share in enumerate(machine.busy_gpus()):
                    ids: dict[str, Id] = {"gpu": number, "machine": self.place}
                    self._rows.append(Row(metric="gpu_busy", value=share, unit="%", time=at, ids=ids))

    def _see_owners(self, at: float) -> None:
        self.samples += 1
        locks = machine.file_locks()
        seen: dict[int, tuple[str, ...]] = {}
        for inode, device in self.inodes.items():
            pids = locks.get(inode, ())
            owners = tuple(sorted(self.names.get(pid, f"pid {pid}").partition("#")[0] for pid in pids))
            seen[device] = owners
            if owners != self._owners.get(device, ()):
                self._end_ownership(device, at)
                self._since[device] = at
                self._cpu[device] = {pid: machine.cpu_seconds(pid) or 0.0 for pid in pids}
                text, ids = " ".join(owners), {"device": device}
                self._rows.append(Row(metric="seen_owner", value=len(owners), unit="1", time=at, text=text, ids=ids))
        # Freed devices come first, because a device may change owners between two samples.
        self._changes += [
            Change(name, device, owner)
            for name, before, after in (("freed", self._owners, seen), ("taken", seen, self._owners))
            for device, owners in before.items()
            for owner in sorted({*owners} - {*after.get(device, ())})
        ]
        self.shared_samples += any(len(owners) > 1 for owners in seen.values())
        self._owners = seen

    def _end_ownership(self, device: int, at: float) -> None:
        """A span for the timeline: the owner of a device until now and the processor time that it used, in kernel ticks."""
        if owners := self._owners.get(device):
            since = self._since[device]
            used = sum((machine.cpu_seconds(pid) or before) - before for pid, before in self._cpu[device].items())
            ids: dict[str, Id] = {"track": f"device {device}", "device": device, "cpu_s": f"{used:.3f}"}
            text = " ".join(owners)
            self._rows.append(Row(metric="owned", value=at - since, unit="s", time=at, text=text, start=since, ids=ids))

    def _see_memory(self) -> None:
        """A reading is somewhere between the start of its row and its time: ranks may go on between the two."""
        start = time.time()
        sizes: dict[int, int | None]
        if self.on_gpus:
            metric, sizes = "seen_on_gpus", {**machine.gpu_bytes_by_pid()}
        else:
            metric, sizes = "seen_resident", {pid: machine.resident(pid) for pid in self.names}
        ended = time.time()
        for pid, name in self.names.items():
            size = sizes.get(pid)
            if size is not None and abs(size - self._bytes.get(name, -LEAST_CHANGE)) >= LEAST_CHANGE:
                self._bytes[name] = size
                self._rows.append(Row(metric=metric, value=size, unit="B", time=ended, start=start, ids={"who": name}))

    def _see_cores(self, pid: int, name: str, at: float) -> None:
        try:
            cores = value_in_words(tuple(sorted(os.sched_getaffinity(pid))))
        except ProcessLookupError:
            return
        if cores != self._cores.get(name):
            self._cores[name] = cores
            self._rows.append(Row(metric="seen_cores", time=at, text=cores, ids={"who": name}))


def sees_locks(folder: Path) -> bool:
    """Whether the kernel shows a lock that this process holds on a file there."""
    with tempfile.TemporaryFile(dir=folder) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return os.getpid() in machine.file_locks().get(os.fstat(file.fileno()).st_ino, ())
