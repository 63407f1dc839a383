"""Rewards that are computed outside the devices, after a step's last answer: the loop requests the trainer's devices once it has them.

Meanwhile the pipeline reports that the step is generated, so other pipelines may use its devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kit.loop.messages import Command, Event
from kit.stream.core import Controller
from kit.stream.generation import StreamState


class AwaitsRewards:
    """Wraps a loop's core. `seconds`: the wait of each step, by the version that it trains."""

    def __init__(self, core: Controller, name: str, seconds: Callable[[int], float]) -> None:
        self.core = core
        self.name = name
        self.seconds = seconds
        self.request = Command("acquire", "desk", name, kind="training")

    def begin(self) -> tuple[Any, tuple[Command, ...]]:
        return self.core.begin()

    def step(self, state: StreamState, event: Event) -> tuple[StreamState, tuple[Command, ...]]:
        if event.name == "alarm":  # a loop that ended in the meantime requests nothing
            return state, (self.request,) if "training" in state.asked and not state.closed else ()
        state, commands = self.core.step(state, event)
        return state, tuple(self.later(state) if command == self.request else command for command in commands)

    def later(self, state: StreamState) -> Command:
        return Command("after", "clock", self.name, number=state.version, ms=round(1000 * self.seconds(state.version)))
