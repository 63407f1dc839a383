"""The driven phases of the lab `stream`, on live and simulated ranks. Notebook side.

Three loops start from the same base weights, over the same ranks. `plain` has no controller: it generates all samples of a step, then
trains them in order of their groups. `lockstep` runs the same work under the controller with staleness 0; `stream` runs the config.

`simulated_stream` and `simulated_resume` run the controller on a virtual clock, within milliseconds. Every ledger check applies as on live
ranks; nothing is generated or trained, so nothing is recomputed. The trainer fails one microbatch, in the step of version 1, so every
simulated run has an aborted step; that step is retried once. The logger raises every second time.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kit.errors import KitError
from kit.labs.lab import Drive
from kit.labs.stream.lab import StreamConfig, settings
from kit.loop.messages import Command, Event, Memory
from kit.loop.runner import Core, Port, RealClock, Runner
from kit.results import Run
from kit.results.frames import events_of
from kit.results.records import Id, Row
from kit.stream import core, simulated
from kit.stream.core import Controller
from kit.stream.live import TRAINER, LiveRanks, OpenDesk, Prompts, RunLedger, silent, written
from kit.stream.ports import Foreign, Log, Meter, Watched, replica_role
from kit.stream.settings import Resume, StreamSettings, opening
from kit.stream.simulated import durations
from kit.target import load_callable

PIPELINE = "a"
ASKS_S = 0.02  # initial interval between two questions from outside
ASKS = 50  # questions after which the interval grows, so their number grows with the logarithm of the time
UNITS = {"steps_per_second": "1/s", "exposed_generation": "s"}


def plain(drive: Drive) -> None:
    """Each call ends before the next begins; log-probabilities are recomputed before the first update of a step."""
    config, plan = drive.config, settings(drive.config)
    ranks = started(drive)

    def events() -> Iterator[Event]:
        while True:
            ranks.wait(config.deadline_s)
            for event in ranks.take():
                if event.name in ("error", "died", "failed"):
                    raise KitError(f"{event.name} in the plain loop: {event.get('why', event.ids)}")
                yield event

    def do(name: str, **ids: Id) -> None:
        ranks.send(Command(name, "", **ids))
        next(event for event in events() if event.name == ("synced" if name == "sync" else "done"))

    def sync(version: int) -> None:
        do("sync", version=version, at_sync="keep", replicas=tuple(range(config.replicas)))

    def generate(groups: Sequence[int]) -> None:
        """Generate all samples of these groups, distributed over the replicas."""
        wanted = {(group, sample) for group in groups for sample in range(config.group)}
        for number, (group, sample) in enumerate(sorted(wanted)):
            ranks.send(Command("generate", "", group=group, sample=sample, replica=number % config.replicas, attempt=0))
        arrived = events()
        while wanted:
            event = next(arrived)
            if event.name == "completed":
                wanted.discard((event.group, event.sample))

    for step in range(config.steps):
        sync(step)
        groups = range(step * config.groups, (step + 1) * config.groups)
        generate(groups)
        for which in plan.logprobs:
            do("logprobs", step=step, groups=tuple(groups), which=which)
        for update, start in enumerate(range(0, len(groups), plan.minibatch)):
            ids, fed = {"step": step, "update": update}, tuple(groups[start : start + plan.minibatch])
            do("begin", **ids)
            do("microbatch", groups=fed, **ids)
            do("finish", **ids)
            do("clear", groups=fed, **ids)
    sync(config.steps)


def lockstep(drive: Drive) -> None:
    run(drive, strict(drive.config, drive.config.steps))


def strict(config: StreamConfig, steps: int) -> StreamSettings:
    whole = dict.fromkeys(("min_groups", "places", "slots"), config.groups)
    return dataclasses.replace(settings(config), sampler="strict", window=0, steps=steps, **whole)  # type: ignore[arg-type]


def stream(drive: Drive) -> None:
    run(drive, settings(drive.config))


def bound(drive: Drive) -> None:
    """The same config on simulated ranks, with the durations of the phase `stream`: the bound for its controller.

    Its ledger begins at the same time as that of `stream`, so both can be overlaid.
    """
    config, plan = drive.config, settings(drive.config)
    rows = events_of(Run(drive.folder).frame(), "stream")
    possible = simulated.simulate(
        plan, simulated.measured(rows), core=load_callable(config.implementation)(plan), sampler=own_sampler(config)
    ).rows
    drive.append([dataclasses.replace(row, time=rows[0].time + row.time) for row in possible])
    for loop, ledger in (("stream", rows), ("bound", possible)):
        for metric, value in simulated.pace(ledger).items():
            drive.record(metric, value, UNITS[metric], loop=loop)


def rehearse(drive: Drive) -> None:
    """Failures that must not end training: the logger raises at every step, a microbatch of the first step raises, and the last replica
    is killed while it decodes."""
    again = dataclasses.replace(settings(drive.config), on_dead_replica="go-on", step_retries=1)
    ranks = started(drive, Losing)
    drive.submit("fail_next", role=TRAINER).result()
    run(drive, again, logger=broken_logger, ranks=ranks)


def resume(drive: Drive) -> None:
    """The lockstep loop, stopped half-way and continued by fresh jobs, the trainer's from its saved state, and a new controller."""
    config, half = drive.config, drive.config.steps // 2
    state = run(drive, strict(config, half))
    drive.submit("save", role=TRAINER).result()
    ranks = started(drive)
    drive.submit("load", args={"version": half}, role=TRAINER).result()
    run(drive, strict(config, config.steps), core.resume_from(state), ranks=ranks)


def run(
    drive: Drive,
    limits: StreamSettings,
    start: Resume | None = None,
    *,
    logger: Callable[[dict[str, float], int], object] = silent,
    ranks: LiveRanks | None = None,
) -> Any:
    """Run the controller with these settings on live ranks until it ends; returns its last state. `start`: where it resumes."""
    machine: Core[Any] = load_callable(drive.config.implementation)(limits, *([] if start is None else [start]))
    live, asker, meter = ranks or started(drive), Asker(), Meter()
    ports: dict[str, Port] = {
        **dict.fromkeys((TRAINER, "replica", "sync"), live),
        "data": Prompts(start),
        "desk": OpenDesk(),
        "log": Log(meter, logger),
        "asker": asker,
    }
    ledger = Watched(RunLedger(drive), meter)
    for name, ids in opening(limits, start):  # the meter's time begins here, however late the loop begins
        ledger.write(Row(metric=name, time=time.time(), ids=ids))
    with contextlib.ExitStack() as scope:
        if kind := own_sampler(drive.config):  # a core with a built-in sampler never asks it
            foreign = ports["sampler"] = Foreign(kind, settings(drive.config), pipeline=PIPELINE, resume=start)
            scope.callback(foreign.close)
            ledger.watchers.append(foreign)
        runner = Runner(
            {PIPELINE: machine},
            ports,
            clock=RealClock(lambda seconds: live.wait(min(seconds, asker.left()))),
            ledger=ledger,
            deadline_s=drive.config.deadline_s,
        )
        ended = runner.run()[PIPELINE]
    drive.record("controller_seconds", sum(runner.own), "s", events=len(runner.own))
    drive.record("answers", len(asker.seconds))
    drive.record("answer_seconds", statistics.median(asker.seconds or [math.nan]), "s")
    if ended.get("why") == "error":
        raise live.stuck or KitError(f"the controller ended with an error: {ended.get('error', 'no reason given')}")
    return runner.states[PIPELINE]


def own_sampler(config: StreamConfig) -> Any:
    return load_callable(config.sampler) if ":" in config.sampler else None


def broken_logger(_: dict[str, float], __: int) -> None:
    raise RuntimeError("a logger that raises, on purpose")


def raises_every_second_time() -> Callable[[dict[str, float], int], object]:
    """A logger that logs at the other times, so that the logged seconds are judged too."""
    raises = itertools.cycle([True, False])

    def log(_: dict[str, float], __: int) -> None:
        if next(raises):
            raise RuntimeError("a logger that raises every second time, on purpose")

    return log


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
            os.kill(self.drive.world.pids[ranks[0]], signal.SIGKILL)
        if any(event.name == "died" for event in arrived):
            self.drive.record("named_seconds", time.time() - self.killed_at, "s")
        return arrived


class Asker(Port):
    """Asks for the status at fixed times from outside, and records how long after each time the answer came."""

    def __init__(self) -> None:
        self.began = time.time()
        self.due = self.began + ASKS_S
        self.asked: list[float] = []  # when each question was due
        self.seconds: list[float] = []

    def left(self) -> float:
        return max(0.0, self.due - time.time())

    def take(self) -> Iterable[Event]:
        """All questions that are due; a blocked controller is late with each of them."""
        asked = []
        while time.time() >= self.due:
            asked.append(Event("ask", PIPELINE, of="status", question=len(self.asked), asker="asker"))
            self.asked.append(self.due)
            self.due += max(ASKS_S, (self.due - self.began) / ASKS)
        return asked

    def send(self, command: Command) -> Iterable[Event]:
        self.seconds.append(time.time() - self.asked[command.question])
        return []


def started(drive: Drive, ranks: type[LiveRanks] = LiveRanks) -> LiveRanks:
    """Reset all ranks to version 0."""
    pendings = [drive.submit("reset", role=role) for role in drive.roles]
    drive.wait(pendings, first=False)
    for pending in pendings:
        pending.result()
    return ranks(drive, drive.config.replica_names, pipeline=PIPELINE)


def controller(plan: Any, start: Resume | None = None) -> Core[Any]:
    return Controller(plan, pipeline=PIPELINE, resume=start)


# -- simulated ranks ------------------------------------------------------------------------------------------------------

REHEARSED = {"microbatch": 1}  # commands that fail once, and the step at which they fail


def simulated_stream(drive: Drive) -> None:
    with written(drive) as rows:
        run_simulated(drive.config, rows, **drive.scene)


def simulated_resume(drive: Drive) -> None:
    """The loop of the phase `stream`, stopped half-way and continued by new ranks and a new controller."""
    with written(drive) as rows:
        state = run_simulated(drive.config, Memory(), until=drive.config.steps // 2, **drive.scene)
        run_simulated(drive.config, rows, start=core.resume_from(state))


class Stopped(Exception):  # noqa: N818 - not an error
    """The loop has reached the version at which it should stop."""


class Stopping:
    """A controller that stops after a step once it has reached a version; `state` is its state then."""

    def __init__(self, machine: Core[Any], until: int | None) -> None:
        self.core, self.until = machine, until
        self.state: Any = None

    def begin(self) -> tuple[Any, tuple[Command, ...]]:
        return self.core.begin()

    def step(self, state: Any, event: Event) -> tuple[Any, tuple[Command, ...]]:
        self.state, commands = self.core.step(state, event)
        if self.until is not None:
            core.refuse_state(self.state, ("version", "step"))
            if self.state.version >= self.until and self.state.step is None:
                raise Stopped
        return self.state, commands


def run_simulated(
    config: StreamConfig,
    rows: Memory,
    *,
    fails: Mapping[str, int] = REHEARSED,
    prompts: int | None = None,
    start: Resume | None = None,
    until: int | None = None,
) -> Any:
    """Run the controller to its end or up to a version; returns its last state. `rows`: its ledger; `prompts` None: the data never ends."""
    plan = dataclasses.replace(settings(config), step_retries=1)
    controller = Stopping(load_callable(config.implementation)(plan, *([] if start is None else [start])), until)
    with contextlib.suppress(Stopped):
        ended = simulated.simulate(
            plan,
            durations(config),
            prompts=prompts,
            core=controller,
            resume=start,
            sampler=own_sampler(config),
            logger=raises_every_second_time(),
            rows=rows,
            pipeline=PIPELINE,
            fails=fails,
        ).ended
        if ended.get("why") == "error":
            raise KitError(f"the controller ended with an error: {ended.get('error', 'no reason given')}")
    return controller.state
