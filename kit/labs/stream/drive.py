"""The driven phases of the lab `stream`: three loops from the same base weights, over the same ranks.

`plain` has no controller: it generates all samples of a step, then trains them in order of their groups. `lockstep` gives the same work to
the controller with staleness 0; `stream` runs the config.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from kit.errors import KitError
from kit.labs.stream.config import replica_names, settings
from kit.labs.stream.ports import TRAINER, Ranks, ReplicaPort, SyncPort, TrainerPort
from kit.loop.clock import RealClock
from kit.loop.ledger import Row
from kit.loop.messages import Command, Event, listed
from kit.loop.runner import Runner, Stalled
from kit.results.records import new_row
from kit.target import load_callable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kit.labs.drive import Drive
    from kit.labs.stream.config import StreamConfig
    from kit.loop.runner import Core

PIPELINE = "a"


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
    config = drive.config
    strict = dataclasses.replace(
        settings(config),
        sampler="strict",
        window=0,
        min_groups=config.groups,
        places=config.groups,
        slots=config.groups,
    )
    run(drive, load_callable(config.implementation)(strict))


def stream(drive: Drive) -> None:
    """The controller with the config."""
    run(drive, load_callable(drive.config.implementation)(settings(drive.config)))


def run(drive: Drive, core: Core[Any]) -> None:
    """A core over live ranks until it ends."""
    ranks = started(drive)
    ports = {
        "trainer": TrainerPort(ranks),
        "replica": ReplicaPort(ranks),
        "sync": SyncPort(ranks),
        "data": Data(),
        "desk": Desk(),
        "log": Log(),
    }
    runner = Runner(
        {PIPELINE: core}, ports, clock=RealClock(ranks.wait), ledger=Written(drive), deadline_s=drive.config.deadline_s
    )
    try:
        carry_out(runner, lambda: ranks.busy)
    finally:
        drive.record("controller_seconds", sum(runner.own), "s", events=len(runner.own))


def carry_out(runner: Runner, busy: Callable[[], Iterable[str]] = tuple) -> None:
    """Run the controller to its end. Where nothing happens any more, a row says so, and which roles are `busy`."""
    try:
        ended = runner.run()[PIPELINE]
    except Stalled as error:
        waits = {"busy": ", ".join(roles)} if (roles := [*busy()]) else {}
        runner.ledger.write(Row("stalled", runner.clock.now(), {"why": str(error), **waits}))
        runner.ledger.flush()
        raise KitError(f"{error}; without an answer: {waits['busy']}" if waits else str(error)) from error
    if ended.get("why") == "error":
        raise KitError(f"the controller ended with an error: {ended.get('error', 'no reason given')}")


def started(drive: Drive) -> Ranks:
    """All ranks at version 0, as if nothing had run before."""
    pendings = [drive.submit("reset", role=role) for role in drive.roles]
    drive.wait(pendings, first=False)
    for pending in pendings:
        pending.result()
    return Ranks(drive, replica_names(drive.config), pipeline=PIPELINE)


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


class Data:
    """Prompts by number, from 0 on: replicas make each from the seed. `most`: how many there are."""

    def __init__(self, most: int | None = None, first: int = 0) -> None:
        self.next = first
        self.most = most

    def send(self, command: Command) -> Iterable[Event]:
        if self.most is not None and self.next >= self.most:
            return [Event("exhausted", command.pipeline)]
        self.next += 1
        return [Event("prompt", command.pipeline, group=self.next - 1)]

    def take(self) -> Iterable[Event]:
        return ()


class Desk:
    """Grants whatever is asked for, at once: these devices belong to this pipeline alone."""

    def send(self, command: Command) -> Iterable[Event]:
        return [Event("granted", command.pipeline, kind=command.kind)] if command.name == "acquire" else []

    def take(self) -> Iterable[Event]:
        return ()


class Log:
    """Metrics are in the ledger already."""

    def send(self, command: Command) -> Iterable[Event]:  # noqa: ARG002 - ports are called alike
        return ()

    def take(self) -> Iterable[Event]:
        return ()


def controller(plan: Any) -> Core[Any]:
    """The kit's own controller."""
    from kit.stream.core import Controller

    return Controller(plan, pipeline=PIPELINE)
