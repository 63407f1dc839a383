"""What a loop of the lab `stream` runs on: the lab's own ranks, or simulated ones on a virtual clock. Notebook side.

On simulated ranks nothing is generated or trained, so nothing is recomputed; every check of a ledger applies as on live ranks. The trainer
fails one microbatch, in the step of version 1, so every simulated run has an aborted step; that step is retried once. The logger raises
every second time.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kit import machine
from kit.labs.lab import Drive
from kit.labs.stream.lab import StreamConfig
from kit.loop.messages import Command, Event, Memory
from kit.loop.runner import Port, RealClock, Runner
from kit.stream.live import TRAINER, LiveRanks, OpenDesk, Prompts, RunLedger, written_rows
from kit.stream.ports import replica_role
from kit.stream.settings import Resume, StreamSettings
from kit.stream.sides import Logger, LoopSide, silent
from kit.stream.simulated import System, durations, simulated_side

PIPELINE = "a"
ASKS_S = 0.02  # initial interval between two questions from outside
ASKS = 50  # questions after which the interval grows, so their number grows with the logarithm of the time
DIES_S = 0.2  # when a replica dies, in virtual time: while it decodes its first samples
MANY_GROUPS = 80
FAILS_EVERY = 5  # of so many groups a request fails
REHEARSED = {"microbatch": 1}  # commands that fail once on simulated ranks, and the step at which they fail


def broken_logger(_: dict[str, float], __: int) -> None:
    raise RuntimeError("a logger that raises, on purpose")


def raises_every_second_time() -> Logger:
    """A logger that logs at the other times, so that the logged seconds are judged too."""
    raises = itertools.cycle([True, False])

    def log(_: dict[str, float], __: int) -> None:
        if next(raises):
            raise RuntimeError("a logger that raises every second time, on purpose")

    return log


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """A loop on simulated ranks with failures that must not end it. `settings` are other ones of the controller, `options` those of the
    simulated ranks."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def dies_and_joins(number: int) -> Callable[[System], None]:
    """A replica dies while it decodes and joins again."""

    def prepare(system: System) -> None:
        system.schedule("died", number, DIES_S)
        system.schedule("joined", number, 2 * DIES_S)

    return prepare


def rehearsals(config: StreamConfig) -> Iterator[Rehearsal]:
    """Requests fail, and their groups are replaced or one lacks in its step; the last replica dies. The first loop is long enough to show
    how requests are spread over replicas, and that failures between which groups complete do not end it."""
    longer = {"steps": max(config.steps, MANY_GROUPS // config.groups)}
    now_and_then = {"fails": {**REHEARSED, "generate": range(1, MANY_GROUPS, FAILS_EVERY)}}
    yield Rehearsal(settings={"on_failed": "replace", **longer}, options=now_and_then)
    if config.groups > 1:
        yield Rehearsal(settings={"on_failed": "shrink", "floor": 1}, options={"fails": {**REHEARSED, "generate": 1}})
    if config.replicas > 1:
        yield Rehearsal(settings={"on_dead_replica": "go-on"}, options={"prepare": dies_and_joins(config.replicas - 1)})


class StreamLoop(Protocol):
    """One loop from version 0. `step_retries`: the fewest failed steps that its controller retries."""

    drive: Drive
    logger: Logger
    step_retries: int

    def side(
        self, limits: StreamSettings, start: Resume | None, *, stops: bool
    ) -> contextlib.AbstractContextManager[LoopSide]:
        """The clock, ports and ledger of this loop. `stops`: another loop continues it."""

    def ended(self, runner: Runner) -> None:
        """Record what the run took. Raises if a call of the ranks took too long."""

    def continued(self, version: int) -> StreamLoop:
        """A loop on fresh ranks that have the state of this one, which was stopped at a version."""


# -- simulated ranks ------------------------------------------------------------------------------------------------------


class SimulatedLoop:
    """`options` of the simulated ranks; without any, those of the fault's scene."""

    def __init__(self, drive: Drive, options: Mapping[str, Any] | None = None) -> None:
        self.drive = drive
        self.options = {"fails": REHEARSED, **(options or drive.scene)}
        self.logger: Logger = raises_every_second_time()
        self.step_retries = 1

    @contextlib.contextmanager
    def side(self, limits: StreamSettings, start: Resume | None, *, stops: bool) -> Iterator[LoopSide]:
        config = self.drive.config
        scene = self.options if start is None else {"fails": REHEARSED}  # a fault shows before a resume
        # Time is virtual, so a loop that is stopped has the rows with which the phase `stream` begins.
        with contextlib.nullcontext(Memory()) if stops else written_rows(self.drive) as rows:
            yield simulated_side(limits, durations(config), ledger=rows, resume=start, pipeline=PIPELINE, **scene)

    def ended(self, runner: Runner) -> None:
        """Its seconds are virtual, so there is nothing to record."""

    def continued(self, version: int) -> SimulatedLoop:  # noqa: ARG002 - the trainer has no weights
        return SimulatedLoop(self.drive)


# -- live ranks -----------------------------------------------------------------------------------------------------------


class LiveLoop:
    """The lab's ranks, all reset to version 0. `kind`: the class of the ports on them."""

    def __init__(self, drive: Drive, kind: type[LiveRanks] = LiveRanks) -> None:
        self.drive = drive
        self.logger: Logger = silent
        self.step_retries = 0
        self.asker: Asker
        pendings = [drive.submit("reset", role=role) for role in drive.roles]
        drive.wait(pendings, first=False)
        noises = [noise or 0.0 for pending in pendings for noise in pending.result()]
        if noise := max(noises):
            drive.submit("allow", args={"noise": noise}, role=TRAINER).result()
        self.ranks = kind(drive, drive.config.replica_names, pipeline=PIPELINE)

    @contextlib.contextmanager
    def side(self, limits: StreamSettings, start: Resume | None, *, stops: bool) -> Iterator[LoopSide]:  # noqa: ARG002 - its ledger is kept
        asker = self.asker = Asker()
        ports: dict[str, Port] = {
            **dict.fromkeys((TRAINER, "replica", "sync"), self.ranks),
            "data": Prompts(start),
            "desk": OpenDesk(),
            "asker": asker,
        }
        yield LoopSide(
            clock=RealClock(lambda seconds: self.ranks.wait(min(seconds, asker.left()))),
            ports=ports,
            ledger=RunLedger(self.drive),
            deadline_s=self.drive.config.deadline_s,
        )

    def ended(self, runner: Runner) -> None:
        self.drive.record("controller_seconds", sum(runner.own), "s", events=len(runner.own))
        self.drive.record("questions", len(self.asker.asked))
        self.drive.record("answers", len(self.asker.seconds))
        self.drive.record("answer_seconds", statistics.median(self.asker.seconds or [math.nan]), "s")
        if self.ranks.stuck is not None:
            raise self.ranks.stuck
        self.ranks.settle()  # an own sampler may leave more requests than the loop trains

    def continued(self, version: int) -> LiveLoop:
        self.ranks.settle()
        self.drive.submit("save", role=TRAINER).result()
        fresh = LiveLoop(self.drive)
        self.drive.submit("load", args={"version": version}, role=TRAINER).result()
        return fresh


class Losing(LiveRanks):
    """Live ranks; the first rank of the last replica is killed once it decodes with version 1."""

    drive: Drive
    killed_at = 0.0

    def take(self) -> list[Event]:
        arrived = super().take()
        last = self.drive.config.replicas - 1
        decoding = (event for event in arrived if event.name == "tokens" and event.replica == last)
        if not self.killed_at and any(event.version for event in decoding):
            ranks = self.drive.roles[replica_role(last)]
            self.drive.lost |= {*ranks}
            self.killed_at = time.time()
            self.drive.record("killed", None, text=replica_role(last))
            self.drive.world.kill_rank(ranks[0])
        if any(event.name == "died" for event in arrived):
            self.drive.record("named_seconds", time.time() - self.killed_at, "s")
        return arrived


class Asker(Port):
    """Asks for the status at fixed times from outside, and records how long after each time the answer came.

    Time in which the loop was ready to run and others had the cores is not the controller's, and does not count."""

    def __init__(self) -> None:
        self.began = time.time()
        self.due = self.began + ASKS_S
        # When each question was due, and how long this thread had been queued until then.
        self.asked: list[tuple[float, float]] = []
        self.seconds: list[float] = []
        self.seen = self.began, machine.queued_seconds()

    def left(self) -> float:
        return max(0.0, self.due - time.time())

    def take(self) -> Iterable[Event]:
        """All questions that are due; a blocked controller is late with each of them."""
        asked, (before, queued_before) = [], self.seen
        self.seen = now, queued = time.time(), machine.queued_seconds()
        while now >= self.due:
            share = min(1.0, (now - self.due) / (now - before))  # of the time since the last look
            asked.append(Event("ask", PIPELINE, of="status", question=len(self.asked), asker="asker"))
            self.asked.append((self.due, queued - share * (queued - queued_before)))
            self.due += max(ASKS_S, (self.due - self.began) / ASKS)
        return asked

    def send(self, command: Command) -> Iterable[Event]:
        due, queued = self.asked[command.question]
        self.seconds.append(max(0.0, time.time() - due - (machine.queued_seconds() - queued)))
        return []
