"""Observes the ranks of a run: those of this machine from this process, those of each other one from a rank there that does nothing else.
Notebook side.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Protocol, Self

from kit.errors import KitError
from kit.labs.lab import Drive
from kit.labs.share.lab import DESK, OBSERVER, member_name
from kit.labs.share.watch import Change, Samples, Sighting, Watch
from kit.loop.messages import Event
from kit.results.records import Row

FAR_S = 15.0  # longest wait for an observer on another machine, which only looks; a busy one may answer late

CLOCKS_S = 0.01  # a replica takes longer to wake
CLOCK_LOOKS = 5


def owner_of(role: str) -> str:
    """The owner of devices: "a.replica 0" for the role "a replica 0"."""
    return role.replace(" ", ".", 1)


class Watcher(Protocol):
    """Watches the ranks of one machine, on which `folder` has the locks of its devices."""

    folder: Path

    def start(self) -> None: ...
    def look(self) -> Sighting: ...
    def stop(self) -> Samples: ...


class FarWatch:
    """The watch of another machine, which a rank there keeps."""

    def __init__(self, drive: Drive, names: dict[int, str], machine: int, *, on_gpus: bool) -> None:
        self.drive = drive
        self.role = f"{OBSERVER}{machine}"
        named = {str(pid): name for pid, name in names.items()}
        self._refuse_other_clock(machine)
        self.folder = Path(self._ask("watch", names=named, machine=machine, on_gpus=on_gpus))

    def _refuse_other_clock(self, machine: int) -> None:
        """The checks compare times of several machines. A question and its answer are no proof of a smaller difference."""
        for _ in range(CLOCK_LOOKS):
            before, there, after = time.time(), self._ask("clock"), time.time()
            if (apart := max(before - there, there - after)) > CLOCKS_S:
                raise KitError(
                    f"the clock of machine {machine} is off by {apart * 1e3:.0f} ms or more, and the lab compares times of machines: "
                    "set their clocks by one source (chrony, NTP)"
                )

    def _ask(self, method: str, **args: Any) -> Any:
        timeout_s = min(FAR_S, self.drive.config.timeout_s)
        (answer,) = self.drive.submit(method, role=self.role, args=args, timeout_s=timeout_s).result()
        return answer

    def start(self) -> None:
        self._ask("start")

    def look(self) -> Sighting:
        rows, changes, owners = self._ask("look")
        return Sighting([Row.placed(facts) for facts in rows], [Change(*change) for change in changes], owners)

    def stop(self) -> Samples:
        return Samples(*self._ask("stop"))


class Observer:
    """`with Observer(drive, folder) as observer:` rows go to the run's records at `flush`; `take` gives events for the ledger of a desk."""

    def __init__(self, drive: Drive, folder: Path, *, for_desk: bool) -> None:
        self.drive = drive
        self.for_desk = for_desk
        self._rows: list[Row] = []
        self._events: list[Event] = []
        self._owners: dict[int, list[str]] = {}  # of devices, by machine
        seats = drive.world.status()
        self._machines = {owner_of(name): seats[ranks[0]]["node"] for name, ranks in drive.roles.items()}

        def names(machine: int) -> dict[int, str]:
            return {
                seats[rank]["pid"]: member_name(owner_of(name), place, len(ranks))
                for name, ranks in drive.roles.items()
                for place, rank in enumerate(ranks)
                if rank not in drive.lost and seats[rank]["node"] == machine and not name.startswith(OBSERVER)
            }

        on_gpus = drive.world.device == "cuda"
        self._near = Watch(names(0), folder, drive.config.devices_on(0), place=0, on_gpus=on_gpus)
        far = {
            machine: FarWatch(drive, names(machine), machine, on_gpus=on_gpus)
            for machine in range(1, drive.config.nodes)
        }
        self._watchers: dict[int, Watcher] = {0: self._near, **far}

    def __enter__(self) -> Self:
        try:
            for watcher in self._watchers.values():
                watcher.start()
            self.look()
        except BaseException:  # of another machine's watcher; that of this one has a thread
            self._near.stop()
            raise
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        for machine, watcher in self._watchers.items():
            if machine and failure is not None:  # it may be the reason that a rank does not answer
                continue
            taken, two_owners, blind = watcher.stop()
            self._see(machine, watcher.look())
            self.drive.record("seen_samples", taken, two_owners=two_owners, blind=int(blind), machine=machine)
        self.flush()

    def folder_of(self, role: str) -> str:
        return str(self._watchers[self._machines[owner_of(role)]].folder)

    def look(self) -> list[Event]:
        for machine, watcher in self._watchers.items():
            self._see(machine, watcher.look())
        return self.take()

    def holds(self, owner: str) -> bool:
        machine = self._machines[owner]
        self._see(machine, self._watchers[machine].look())
        return owner in self._owners[machine]

    def take(self) -> list[Event]:
        self._see(0, self._near.take())
        events, self._events = self._events, []
        return events

    def flush(self) -> None:
        self._see(0, self._near.take())
        rows, self._rows = self._rows, []
        if rows:
            self.drive.append(rows)

    def _see(self, machine: int, seen: Sighting) -> None:
        self._rows += seen.rows
        self._owners[machine] = seen.owners
        if self.for_desk:
            self._events += [
                Event(change.name, DESK, who=change.owner.partition(".")[0], device=change.device, owner=change.owner)
                for change in seen.changes
            ]
