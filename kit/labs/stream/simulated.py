"""The phases `stream` and `resume` without ranks: the controller against simulated ones on a virtual clock, in milliseconds. Notebook side.

Every ledger check is judged as on live ranks; nothing is generated or trained, so nothing is recomputed. The trainer fails one microbatch,
in the step of version 1, so that a step that is aborted is part of every simulated run; that step is tried again once. The logger raises.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

from kit.errors import KitError
from kit.labs.lab import Drive
from kit.labs.stream import broken
from kit.labs.stream.config import StreamConfig, settings
from kit.labs.stream.drive import PIPELINE, broken_logger
from kit.loop.messages import Command, Event, Memory
from kit.loop.runner import Core
from kit.results.records import new_row
from kit.stream import core, simulated
from kit.stream.settings import Resume
from kit.stream.simulated import Durations, drawn_length
from kit.target import load_callable

REHEARSED = {"microbatch": 1}  # commands that fail once, and the step of their first failure


def stream(drive: Drive) -> None:
    """The controller with the config, and with the fault that is on."""
    with written(drive) as rows, broken.switched_on(drive.fault):
        simulate(drive.config, rows, **broken.CONDITIONS.get(drive.fault, {}))


def resume(drive: Drive) -> None:
    """The loop of the phase `stream`, stopped half-way: new ranks and a new controller go on."""
    with written(drive) as rows, broken.switched_on(drive.fault):
        state = simulate(drive.config, Memory(), until=drive.config.steps // 2)
        simulate(drive.config, rows, start=core.resume_from(state))


@contextlib.contextmanager
def written(drive: Drive) -> Iterator[Memory]:
    """A ledger that goes to the run's records, also that of a run that breaks."""
    base, rows = time.time(), Memory()
    try:
        yield rows
    finally:
        drive.append([new_row(row.name, None, "", base + row.time, ids=row.ids) for row in rows])


class Stopped(Exception):  # noqa: N818 - it is no error
    """The loop has reached the version at which it is to stop."""


class Stopping:
    """A controller that stops behind a step, from a version on; `state` is what it knew then."""

    def __init__(self, one: Core[Any], until: int | None) -> None:
        self.core, self.until = one, until
        self.state: Any = None

    def begin(self) -> tuple[Any, tuple[Command, ...]]:
        return self.core.begin()

    def step(self, state: Any, event: Event) -> tuple[Any, tuple[Command, ...]]:
        self.state, commands = self.core.step(state, event)
        if self.until is not None and self.state.version >= self.until and self.state.step is None:
            raise Stopped
        return self.state, commands


def simulate(
    config: StreamConfig,
    rows: Memory,
    *,
    fails: Mapping[str, int] = REHEARSED,
    prompts: int | None = None,
    start: Resume | None = None,
    until: int | None = None,
) -> Any:
    """Run the controller until it ends, or up to a version; its last state. `rows` is its ledger; `prompts` None: the data never ends."""
    plan = dataclasses.replace(settings(config), step_retries=1)
    controller = Stopping(load_callable(config.implementation)(plan, *([] if start is None else [start])), until)
    with contextlib.suppress(Stopped):
        ended = simulated.simulate(
            plan,
            durations(config),
            prompts=prompts,
            core=controller,
            resume=start,
            sampler=load_callable(config.sampler) if ":" in config.sampler else None,
            logger=broken_logger,
            rows=rows,
            pipeline=PIPELINE,
            fails=fails,
        ).ended
        if ended.get("why") == "error":
            raise KitError(f"the controller ended with an error: {ended.get('error', 'no reason given')}")
    return controller.state


def durations(config: StreamConfig) -> Durations:
    """Of tokens and samples as the config paces them; without a pace, training takes about as long as generation."""
    low, high = config.answer
    paces = {"token_s": config.pace_ms / 1000, "train_s": config.train_pace_ms * config.group / 1000}
    given: dict[str, Any] = {name: seconds for name, seconds in paces.items() if seconds}
    return Durations(length=drawn_length(low, high, config.seed), span=config.decode, **given)
