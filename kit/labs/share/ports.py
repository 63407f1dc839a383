"""The ports of the lab `share` on live ranks: for each pipeline those of its loop, plus devices and alarms. Notebook side.

A replica sleeps and wakes between two of its calls. Once its shrink is ordered, it gets no requests and its answers are ignored.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kit.errors import KitError, RankDied, RankTimeout
from kit.labs.lab import Drive
from kit.labs.share.lab import DESK, OBSERVER, TRAINER
from kit.labs.share.observer import Observer
from kit.labs.share.watch import EVERY_S
from kit.loop.messages import Command, Event
from kit.loop.runner import Stalled
from kit.results.records import Id
from kit.stream.live import STUCK_S, LiveRanks
from kit.stream.ports import replica_number, replica_role
from kit.world.calls import Pending

OF_REQUESTS = ("started", "tokens", "tool_called", "completed", "failed", "cancelled")
MOVES = ("begin", "finish", "abort")  # calls with which the trainer enters and leaves its devices


class PipelineCalls:
    """Calls to the ranks of one pipeline: its config, and its roles under the names that its loop knows."""

    def __init__(self, drive: Drive, pipeline: str) -> None:
        start = f"{pipeline} "
        self.config = drive.config.loops[pipeline]
        self.roles = {name.removeprefix(start): ranks for name, ranks in drive.roles.items() if name.startswith(start)}
        self.submit = drive.submit  # the drive must know every call
        self.wait = drive.wait


class Ranks(LiveRanks):
    """All ranks of one pipeline. `orders` has the replicas that are awake, `awake` those awake at the start."""

    def __init__(self, drive: Drive, pipeline: str, awake: Iterable[str] = (), *, observer: Observer) -> None:
        calls = PipelineCalls(drive, pipeline)
        super().__init__(calls, awake, pipeline=pipeline)
        self.drive_of_run = drive
        self.moves: dict[str, list[Command]] = {name: [] for name in calls.roles if name != TRAINER}  # by replica
        self.observer = observer
        self.ended_by: KitError | None = None  # the death of its trainer
        self.gone = False  # true once none of its ranks is on a device
        self.late: list[tuple[str, list[Event]]] = []  # events to report once a role is off its devices
        self.held: list[Event] = []  # errors of calls that its trainer's death ended
        self.woke: set[str] = set()  # replicas that have had no sync since they woke

    def move(self, command: Command) -> None:
        """A shrink or an expand; it begins when the replica has no other call. A dead replica answers nothing."""
        name = replica_role(command.replica)
        if name not in self.moves:
            return
        if command.name == "shrink" and name in self.orders:
            self.orders[name] = []
            self.active[name].clear()
        self.moves[name].append(command)

    def take(self) -> list[Event]:
        """The new events, without a replica's answers after its shrink was ordered. Events of the observer come before the trainer's
        reports that it entered or left its devices."""
        if self.stuck is not None:  # the reason is known, and an observer on a lost machine would be waited for
            return []
        try:
            return self._take()
        except RankTimeout as error:  # of a rank, or of an observer on another machine
            self.stuck = error
            raise

    def _take(self) -> list[Event]:
        leaving = {
            replica_number(name)
            for name, commands in self.moves.items()
            if any(command.name == "shrink" for command in commands)
        }
        arrived = [event for event in super().take() if event.name not in OF_REQUESTS or event.replica not in leaving]
        if self.ended_by is not None:
            # With a call's error the pipeline might end before the desk is informed of the death.
            errors = [event for event in arrived if (event.pipeline, event.name) == (self.pipeline, "error")]
            self.held += errors
            arrived = [event for event in arrived if event not in errors]
        off = [report for report in self.late if not self.observer.holds(f"{self.pipeline}.{report[0]}")]
        self.late = [report for report in self.late if report not in off]
        arrived += [event for _, events in off for event in (*self.observer.look(), *events)]
        if self.ended_by is not None and self.gone and not self.late:
            arrived += [*self.held, *self._refuse(self.ended_by)]
            self.held = []
        if any(event.get("of") in MOVES for event in arrived):
            arrived = [*self.observer.look(), *arrived]
        return arrived

    def start(self) -> None:
        if self.ended_by is not None:
            self._clear()
            return
        for name, commands in self.moves.items():
            if commands and name not in self.busy:
                self._move(name, commands.pop(0))
        super().start()

    def _move(self, name: str, command: Command) -> None:
        """Drop the replica's earlier requests; the pipeline has sent them elsewhere or will."""
        self.orders.pop(name, None)
        self.active.pop(name, None)
        ids = {"who": self.pipeline, "replica": command.replica}

        def ended(pending: Pending) -> list[Event]:
            try:
                pending.result()
            except RankDied as error:
                return self._lost(name, error)
            except RankTimeout:
                raise
            except KitError as error:
                why = str(error).partition("\n")[0]
                return self._refused(name, Event("error", DESK, of=command.name, why=why, **ids))
            if command.name == "expand":
                self.orders[name], self.active[name] = [], set()
                self.woke.add(name)
            return [*self.observer.look(), Event("shrunk" if command.name == "shrink" else "expanded", DESK, **ids)]

        self._call(name, command.name, {}, ended)

    def _sync_args(self, command: Command, names: Sequence[str]) -> dict[str, Any]:
        """A trainer of adapters sends those that a replica lacks: all to one that woke."""
        args = super()._sync_args(command, names)
        if self.drive.config.adapters:
            args["woke"] = sorted(self.woke & {*names})
            self.woke -= {*names}
        return args

    def _refused(self, name: str, error: Event) -> list[Event]:
        """A replica that cannot wake frees its devices before the desk is informed. One that cannot sleep may still hold them."""
        if error.of == "shrink":
            return [error]

        def ended(pending: Pending) -> list[Event]:
            try:
                pending.result()
            except KitError as worse:
                return self._lost(name, worse)
            return [*self.observer.look(), error]

        self._call(name, "vacate", {}, ended)
        return []

    def _lost(self, name: str, error: KitError) -> list[Event]:
        """A death is an event for the pipeline, and for the desk once the kernel has freed the devices of all its ranks. A pipeline ends
        with its trainer."""
        if name == TRAINER and isinstance(error, RankDied) and self.observer.for_desk:
            self.ended_by = error
            return []
        happened = super()._lost(name, error)
        self.moves.pop(name, None)
        self.late.append((name, [Event("died", DESK, who=self.pipeline, replica=replica_number(name))]))
        return happened if isinstance(error, RankDied) else [*happened, *self._vacate(name)]

    def _vacate(self, name: str) -> list[Event]:
        """Make a live replica leave its device, whatever it does; nothing waits for it. The desk is informed if it fails."""

        def stays(error: KitError) -> list[Event]:
            ids: dict[str, Id] = {"who": self.pipeline, "replica": replica_number(name)}
            return [Event("error", DESK, of="shrink", why=str(error).partition("\n")[0], **ids)]

        def ended(pending: Pending) -> list[Event]:
            try:
                pending.result()
            except RankDied:
                return []
            except KitError as error:
                return stays(error)
            return []

        try:
            self._call(name, "vacate", {}, ended)
        except KitError as error:  # one of its ranks is still in an earlier call
            return stays(error)
        return []

    def _clear(self) -> None:
        """The trainer is dead: the replicas leave their devices, and then the desk and the pipeline are informed."""
        for name in [name for name in self.moves if name not in self.busy]:
            self.arrived += self._vacate(name)
            del self.moves[name]
        if not self.moves and not self.flying and not self.gone:
            self.gone = True
            why = str(self.ended_by).partition("\n")[0]
            died = Event("died", DESK, who=self.pipeline)
            self.late.append((TRAINER, [died, Event("error", self.pipeline, of=TRAINER, why=why)]))

    def _refuse(self, error: KitError) -> list[Event]:
        """Handle commands for a dead trainer or for a replica of a dead pipeline."""
        why = str(error).partition("\n")[0]
        asked = [*self.queue, *self.syncs]
        self.queue.clear()
        self.syncs.clear()
        return [
            Event("error", self.pipeline, **{**dict(command.ids), "of": command.name, "why": why})
            for command in asked
            if command.name != "discard"
        ]


class Live:
    def __init__(self, drive: Drive, parts: Iterable[Ranks]) -> None:
        self.drive = drive
        self.parts = tuple(parts)
        self.heard = time.monotonic()  # when a call was last in flight

    def wait(self, seconds: float) -> None:
        for part in self.parts:
            if part.stuck is not None:
                raise part.stuck
            part.start()
        flying = [pending for part in self.parts for pending, _, _ in part.flying.values()]
        if flying:
            self.heard = time.monotonic()
        if any(part.arrived for part in self.parts):
            return
        seconds = min(part.patient(seconds) for part in self.parts)
        if any(part.late for part in self.parts):  # which no call ends
            seconds = min(seconds, EVERY_S)
        if flying:
            self.drive.wait(flying, timeout_s=seconds)
        else:
            if time.monotonic() - self.heard > self.drive.config.deadline_s:
                raise Stalled("every core waits for an answer, but no call is in flight", ())
            time.sleep(min(seconds, STUCK_S / 10))


class LiveDevices:
    def __init__(self, parts: Mapping[str, Ranks], observer: Observer) -> None:
        self.parts = parts
        self.observer = observer

    def send(self, command: Command) -> Iterable[Event]:
        self.parts[command.pipeline].move(command)
        return ()

    def take(self) -> Iterable[Event]:
        return self.observer.take()


class AlarmClock:
    def __init__(self) -> None:
        self._due: list[tuple[float, int, str]] = []

    def send(self, command: Command) -> Iterable[Event]:
        heapq.heappush(self._due, (time.monotonic() + command.ms / 1000, command.number, command.pipeline))
        return ()

    def take(self) -> Iterable[Event]:
        rung = []
        while self._due and self._due[0][0] <= time.monotonic():
            _, number, pipeline = heapq.heappop(self._due)
            rung.append(Event("alarm", pipeline, number=number))
        return rung

    def left(self) -> float:
        return max(0.0, self._due[0][0] - time.monotonic()) if self._due else 3600.0


def pipeline_roles(drive: Drive) -> list[str]:
    return [name for name in drive.roles if not name.startswith(OBSERVER)]


def started(drive: Drive, names: Sequence[str], observer: Observer, *, alone: bool) -> None:
    """Reset the ranks of these roles to version 0, with no other rank on a device. Ranks that share a device do so in turn."""
    vacate(drive, pipeline_roles(drive))
    for turn in [names] if alone else [[name] for name in names]:
        finished(
            drive,
            [
                drive.submit("reset", args={"folder": observer.folder_of(name), "alone": alone}, role=name)
                for name in turn
            ],
        )


def vacate(drive: Drive, names: Sequence[str]) -> None:
    """The ranks of these roles leave their devices."""
    finished(drive, [drive.submit("vacate", role=name) for name in names])


def finished(drive: Drive, pendings: Sequence[Pending]) -> None:
    drive.wait(pendings, first=False)
    for pending in pendings:
        pending.result()
