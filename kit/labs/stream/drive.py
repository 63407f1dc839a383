"""The driven phases of the lab `stream`: three loops from the same base weights, over the same ranks.

`plain` has no controller: it generates all samples of a step, then trains them in order of their groups. `lockstep` gives the same work to
the controller with staleness 0; `stream` runs the config.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from kit.errors import KitError
from kit.labs.drive import Drive
from kit.labs.stream import broken
from kit.labs.stream.config import StreamConfig, replica_names, settings
from kit.labs.stream.ports import TRAINER, Ranks, ReplicaPort, SyncPort, TrainerPort, name_of
from kit.loop.messages import Command, Event, Row, listed
from kit.loop.runner import Core, Port, RealClock, Runner
from kit.results.records import new_row
from kit.stream.core import Controller, resume_from
from kit.stream.ports import Foreign, Log, Meter, Watched, Watcher
from kit.stream.settings import Resume, Settings, opening
from kit.stream.simulated import measured, pace, rows_of, simulate
from kit.target import load_callable

PIPELINE = "a"
ASKS_S = 0.02  # between two questions from outside, at first
ASKS = 50  # from then on the time between two grows, so that their number grows with the logarithm of the time
UNITS = {"steps_per_second": "1/s", "exposed_generation": "s"}


def plain(drive: Drive) -> None:
    """Every sample first, then every group in order; no controller."""
    config = drive.config
    loop = Straight(drive)
    for step in range(config.steps):
        loop.sync(step)
        groups = range(step * config.groups, (step + 1) * config.groups)
        loop.generate(groups)
        loop.train(step, groups)
    loop.sync(config.steps)


def lockstep(drive: Drive) -> None:
    """The controller without staleness: a step's groups are trained in order once all are complete."""
    run(drive, strict(drive.config, drive.config.steps))


def strict(config: StreamConfig, steps: int) -> Settings:
    """Without staleness, up to so many steps."""
    groups = config.groups
    return dataclasses.replace(
        settings(config), sampler="strict", window=0, min_groups=groups, places=groups, slots=groups, steps=steps
    )


def stream(drive: Drive) -> None:
    """The controller with the config, and with the fault that is on."""
    with broken.switched_on(drive.fault):
        run(drive, settings(drive.config))


def bound(drive: Drive) -> None:
    """The same config on simulated ranks, with the durations of the phase `stream`: what its controller could reach with them.

    Its ledger begins when that of `stream` did, so that both can be laid over one another.
    """
    config = drive.config
    rows = rows_of(drive.folder, "stream")
    core = load_callable(config.implementation)(settings(config))
    own = load_callable(config.sampler) if ":" in config.sampler else None
    possible = simulate(settings(config), measured(rows), core=core, sampler=own).rows
    drive.append([new_row(row.name, None, "", rows[0].time + row.time, ids=row.ids) for row in possible])
    for loop, ledger in (("stream", rows), ("bound", possible)):
        for metric, value in pace(ledger).items():
            drive.record(metric, value, UNITS[metric], loop=loop)


def rehearse(drive: Drive) -> None:
    """What must not end training: the logger raises at every step, a microbatch of the first step raises, and the last replica is killed
    while it decodes."""
    again = dataclasses.replace(settings(drive.config), on_dead_replica="go-on", step_retries=1)
    ranks = started(drive, Losing)
    drive.submit("fail_next", role=TRAINER).result()
    run(drive, again, logger=broken_logger, ranks=ranks)


def resume(drive: Drive) -> None:
    """The lockstep loop, stopped half-way: fresh jobs, the trainer's from its saved state, and a new controller go on."""
    config, half = drive.config, drive.config.steps // 2
    state = run(drive, strict(config, half))
    drive.submit("save", role=TRAINER).result()
    ranks = started(drive)
    drive.submit("load", args={"version": half}, role=TRAINER).result()
    start = resume_from(state)
    run(drive, strict(config, config.steps), start, ranks=ranks)


def run(
    drive: Drive,
    limits: Settings,
    start: Resume | None = None,
    *,
    logger: Callable[[dict[str, float], int], object] | None = None,
    ranks: Ranks | None = None,
) -> Any:
    """The controller with these settings over live ranks until it ends; its last state. `start` is where it goes on."""
    core: Core[Any] = load_callable(drive.config.implementation)(limits, *([] if start is None else [start]))
    live, asker, meter = ranks or started(drive), Asker(), Meter()
    ports: dict[str, Port] = {
        "trainer": TrainerPort(live),
        "replica": ReplicaPort(live),
        "sync": SyncPort(live),
        "data": Data() if start is None else Data(start.next, start.open),
        "desk": Desk(),
        "log": Log(meter, logger or silent),
        "asker": asker,
    }
    written = Written(drive)
    for name, ids in opening(limits, start):
        row = Row(name, time.time(), ids)
        written.write(row)
        meter.see(row)  # its time begins where the ledger does, however long it takes until the loop does
    watchers: list[Watcher] = [meter]
    with contextlib.ExitStack() as scope:
        if ":" in drive.config.sampler:  # a core that has one of our samplers never asks it
            kind = load_callable(drive.config.sampler)
            foreign = Foreign(kind, settings(drive.config), pipeline=PIPELINE, resume=start)
            scope.callback(foreign.close)
            ports["sampler"] = foreign
            watchers.append(foreign)
        runner = Runner(
            {PIPELINE: core},
            ports,
            clock=RealClock(lambda seconds: live.wait(min(seconds, asker.left()))),
            ledger=Watched(written, *watchers),
            deadline_s=drive.config.deadline_s,
        )
        ended = runner.run()[PIPELINE]
    drive.record("controller_seconds", sum(runner.own), "s", events=len(runner.own))
    drive.record("answers", len(asker.seconds))
    drive.record("answer_seconds", statistics.median(asker.seconds or [math.nan]), "s")
    if ended.get("why") == "error":
        raise live.stuck or KitError(f"the controller ended with an error: {ended.get('error', 'no reason given')}")
    return runner.states[PIPELINE]


def silent(_: dict[str, float], __: int) -> None:
    """A logger that drops everything: the numbers are in the ledger."""


def broken_logger(_: dict[str, float], __: int) -> None:
    raise RuntimeError("a logger that raises, on purpose")


class Losing(Ranks):
    """Live ranks, of which the last replica's first one is killed once it decodes with version 1."""

    killed_at = 0.0

    def take(self) -> list[Event]:
        arrived = super().take()
        last = self.drive.config.replicas - 1
        if not self.killed_at and any(
            event.name == "tokens" and event.replica == last and event.version for event in arrived
        ):
            ranks = self.drive.roles[name_of(last)]
            self.drive.lost |= {*ranks}
            self.killed_at = time.time()
            os.kill(self.drive.world.pids[ranks[0]], signal.SIGKILL)
        if any(event.name == "died" for event in arrived):
            self.drive.record("named_seconds", time.time() - self.killed_at, "s")
        return arrived


class Asker(Port):
    """Somebody outside who asks for the status at fixed times, and notes how long after each time the answer came."""

    def __init__(self) -> None:
        self.began = time.time()
        self.due = self.began + ASKS_S
        self.asked: dict[int, float] = {}
        self.seconds: list[float] = []

    def left(self) -> float:
        """Seconds until the next question."""
        return max(0.0, self.due - time.time())

    def take(self) -> Iterable[Event]:
        """All that are due: a controller that was blocked is late with each of them."""
        asked = []
        while time.time() >= self.due:
            number = len(self.asked)
            self.asked[number] = self.due
            self.due += max(ASKS_S, (self.due - self.began) / ASKS)
            asked.append(Event("ask", PIPELINE, of="status", question=number, asker="asker"))
        return asked

    def send(self, command: Command) -> Iterable[Event]:
        self.seconds.append(time.time() - self.asked[command.question])
        return []


def started(drive: Drive, ranks: type[Ranks] = Ranks) -> Ranks:
    """All ranks at version 0, as if nothing had run before."""
    pendings = [drive.submit("reset", role=role) for role in drive.roles]
    drive.wait(pendings, first=False)
    for pending in pendings:
        pending.result()
    return ranks(drive, replica_names(drive.config), pipeline=PIPELINE)


class Written:
    """The ledger among the run's records."""

    def __init__(self, drive: Drive) -> None:
        self.drive = drive
        self.rows: list[dict[str, Any]] = []

    def write(self, row: Row) -> None:
        self.rows.append(new_row(row.name, None, "", row.time, ids=row.ids))

    def flush(self) -> None:
        rows, self.rows = self.rows, []
        if rows:
            self.drive.append(rows)


class Straight:
    """Calls one after the other, each waited for."""

    def __init__(self, drive: Drive) -> None:
        self.config: StreamConfig = drive.config
        self.ranks = started(drive)

    def generate(self, groups: Sequence[int]) -> None:
        """All samples of these groups, dealt out over the replicas."""
        wanted = {(group, sample) for group in groups for sample in range(self.config.group)}
        names = [*self.ranks.orders]
        for number, (group, sample) in enumerate(sorted(wanted)):
            order = {"order": "generate", "group": group, "sample": sample, "attempt": 0}
            self.ranks.orders[names[number % len(names)]].append(order)
        for event in self.events():
            if event.name == "completed":
                wanted.discard((event.group, event.sample))
            if not wanted:
                return

    def train(self, step: int, groups: Sequence[int]) -> None:
        """One step, cut into its updates; log-probabilities that are recomputed come before the first."""
        plan = settings(self.config)
        for which in plan.logprobs:
            self.do(Command("logprobs", TRAINER, step=step, groups=listed(groups), which=which))
        for update, start in enumerate(range(0, len(groups), plan.minibatch)):
            ids = {"step": step, "update": update}
            self.do(Command("begin", TRAINER, **ids))
            self.do(Command("microbatch", TRAINER, groups=listed(groups[start : start + plan.minibatch]), **ids))
            self.do(Command("finish", TRAINER, **ids))
            self.do(Command("clear", TRAINER, groups=listed(groups[start : start + plan.minibatch]), **ids))

    def sync(self, version: int) -> None:
        replicas = listed(range(self.config.replicas))
        self.do(Command("sync", "sync", version=version, at_sync="keep", replicas=replicas))

    def do(self, command: Command) -> None:
        """One call of the trainer, or a sync."""
        (self.ranks.syncs if command.name == "sync" else self.ranks.queue).append(command)
        last = "synced" if command.name == "sync" else "done"
        next(event for event in self.events() if event.name == last)

    def events(self) -> Iterator[Event]:
        while True:
            self.ranks.wait(self.config.deadline_s)
            for event in self.ranks.take():
                if event.name in ("error", "died", "failed"):
                    raise KitError(f"{event.name} in the plain loop: {event.get('why', event.ids)}")
                yield event


class Data(Port):
    """Prompts by number: those that are given again, then from the first on without end. Replicas make each from the seed."""

    def __init__(self, first: int = 0, again: Iterable[int] = ()) -> None:
        self.numbers = itertools.chain(again, itertools.count(first))

    def send(self, command: Command) -> Iterable[Event]:
        return [Event("prompt", command.pipeline, group=next(self.numbers))]


class Desk(Port):
    """Grants whatever is asked for, at once: these devices belong to this pipeline alone."""

    def send(self, command: Command) -> Iterable[Event]:
        return [Event("granted", command.pipeline, kind=command.kind)] if command.name == "acquire" else []


def controller(plan: Any, start: Resume | None = None) -> Core[Any]:
    """The kit's own controller."""
    return Controller(plan, pipeline=PIPELINE, resume=start)
