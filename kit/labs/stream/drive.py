"""The driven phases of the lab `stream`, on live and simulated ranks. Notebook side.

Three loops start from the same base weights, over the same ranks. `plain` has no controller: it generates all samples of a step, then
trains them in order of their groups. `lockstep` runs the same work under the controller with staleness 0; `stream` runs the config.

The same loops run on simulated ranks (`sides.py`), within milliseconds; the plan has those that mean something there.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from kit.errors import KitError
from kit.labs.lab import Drive
from kit.labs.stream.lab import StreamConfig, settings
from kit.labs.stream.sides import (
    PIPELINE,
    LiveLoop,
    Losing,
    SimulatedLoop,
    StreamLoop,
    broken_logger,
    rehearsals,
)
from kit.loop.messages import Command, Event
from kit.loop.runner import Core, made_core
from kit.results import Run
from kit.results.frames import events_of
from kit.results.records import Id
from kit.stream import core, simulated
from kit.stream.core import Controller
from kit.stream.live import TRAINER
from kit.stream.settings import Resume, StreamSettings
from kit.stream.sides import Logger, run_loop
from kit.target import load_callable

UNITS = {"steps_per_second": "1/s", "exposed_generation": "s"}


def plain(drive: Drive) -> None:
    """Each call ends before the next begins; log-probabilities are recomputed before the first update of a step."""
    config, plan = drive.config, settings(drive.config)
    ranks = LiveLoop(drive).ranks

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
    run_controller(begin_loop(drive), strict(drive.config))


def strict(config: StreamConfig) -> StreamSettings:
    whole = dict.fromkeys(("min_groups", "places", "slots"), config.groups)
    return dataclasses.replace(settings(config), sampler="strict", window=0, **whole)  # type: ignore[arg-type]


def stream(drive: Drive) -> None:
    run_controller(begin_loop(drive), settings(drive.config))


def bound(drive: Drive) -> None:
    """The same config on simulated ranks, with the durations of the phase `stream`: the bound for its controller.

    Its ledger begins at the same time as that of `stream`, so both can be overlaid.
    """
    config, plan = drive.config, settings(drive.config)
    rows = events_of(Run(drive.folder).frame(), "stream")
    possible = simulated.simulate(
        plan, simulated.measured(rows), core=made_core(config.implementation, plan), sampler=own_sampler(plan)
    ).rows
    drive.append([dataclasses.replace(row, time=rows[0].time + row.time) for row in possible])
    for loop, ledger in (("stream", rows), ("bound", possible)):
        for metric, value in simulated.pace(ledger).items():
            drive.record(metric, value, UNITS[metric], loop=loop)


def resume(drive: Drive) -> None:
    """The loop of the phase `stream`, stopped half-way and continued by fresh jobs, the trainer's from its state, and a new controller."""
    stop_and_continue(drive, settings(drive.config))


def resume_lockstep(drive: Drive) -> None:
    """The same with the loop of the phase `lockstep`, which computes the same bit for bit whether it is stopped or not."""
    stop_and_continue(drive, strict(drive.config))


def stop_and_continue(drive: Drive, limits: StreamSettings) -> None:
    before = begin_loop(drive)
    state = run_controller(before, limits, until=drive.config.steps // 2)
    start = core.resume_from(state)
    run_controller(before.continued(start.version), limits, start)


def rehearse(drive: Drive) -> None:
    """Failures that must not end training: the logger raises at every step, a microbatch of the first step raises, and the last replica
    is killed while it decodes. On simulated ranks each failure has a separate loop."""
    if drive.config.simulated:
        for scene in rehearsals(drive.config):
            limits = dataclasses.replace(settings(drive.config), **scene.settings)
            run_controller(SimulatedLoop(drive, scene.options), limits)
        return
    loop = LiveLoop(drive, Losing)
    drive.submit("fail_next", role=TRAINER).result()
    limits = dataclasses.replace(settings(drive.config), on_dead_replica="go-on", step_retries=1)
    run_controller(loop, limits, logger=broken_logger)


# -- a loop ---------------------------------------------------------------------------------------------------------------


def begin_loop(drive: Drive) -> StreamLoop:
    return SimulatedLoop(drive) if drive.config.simulated else LiveLoop(drive)


def run_controller(
    loop: StreamLoop,
    limits: StreamSettings,
    start: Resume | None = None,
    *,
    until: int | None = None,
    logger: Logger | None = None,
) -> Any:
    """Run the config's controller to its end or up to a version; returns its last state. `start`: where it resumes."""
    limits = dataclasses.replace(limits, step_retries=max(limits.step_retries, loop.step_retries))
    made = made_core(loop.drive.config.implementation, limits, *([] if start is None else [start]))
    machine = Stopping(made, until)
    with loop.side(limits, start, stops=until is not None) as side, contextlib.suppress(Stopped):
        runner = run_loop(
            machine,
            limits,
            side,
            pipeline=PIPELINE,
            start=start,
            sampler=own_sampler(limits),
            logger=logger or loop.logger,
        )
        loop.ended(runner)
        ended = runner.ended[PIPELINE]
        if ended.get("why") == "error":
            raise KitError(f"the controller ended with an error: {ended.get('error', 'no reason given')}")
    return machine.state


def own_sampler(limits: StreamSettings) -> Any:
    return load_callable(limits.sampler) if ":" in limits.sampler else None


def controller(plan: Any, start: Resume | None = None) -> Core[Any]:
    return Controller(plan, pipeline=PIPELINE, resume=start)


class Stopped(KitError):  # noqa: N818 - not an error
    """The loop has reached the version at which it should stop."""


class Stopping:
    """A controller that stops between two steps once it has reached a version, at the next event or `later`; `state` is its state then.

    With `has_prompt` it stops only while a prompt is at hand that is no group yet.
    """

    def __init__(self, machine: Core[Any], until: int | None, *, later: int = 0, has_prompt: bool = False) -> None:
        self.core, self.until = machine, until
        self.later = later  # how many more events between two steps it still handles
        self.has_prompt = has_prompt
        self.prompt: Id | None = None  # read from events and notes, as a state of another shape may have no such field
        self.state: Any = None
        self.stopped = False

    def begin(self) -> tuple[Any, tuple[Command, ...]]:
        return self.core.begin()

    def step(self, state: Any, event: Event) -> tuple[Any, tuple[Command, ...]]:
        if self.until is not None:
            core.refuse_state(state, ("version", "step"))
            if state.version >= self.until and state.step is None and (self.prompt is not None or not self.has_prompt):
                if self.later == 0:
                    self.stopped = True
                    raise Stopped
                self.later -= 1
        self.state, commands = self.core.step(state, event)
        if event.name == "prompt":
            self.prompt = event.group
        if any(note.name == "reserved" and note.get("group") == self.prompt for note in commands):
            self.prompt = None
        return self.state, commands
