"""Progress of a loop whose adapters train in turn: a stream for each adapter, about its own next step.

The window lets replicas generate the next step of every adapter at once, so the desk needs what all of them lack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kit.loop.messages import Command, Event
from kit.loop.runner import Core
from kit.stream.generation import StreamState

# By adapter: how many groups of its next step are complete, and how many the step has.
Reports = Mapping[int, tuple[int, int]]


class ReportsByAdapter:
    """Wraps a loop's core, and replaces its reports about the step that it awaits. The groups of a step, which belong to one adapter, are
    numbered in order."""

    def __init__(self, core: Core[Any], name: str, *, adapters: int, groups: int) -> None:
        self.core = core
        self.name = name
        self.adapters = adapters
        self.groups = groups

    def begin(self) -> tuple[StreamState, tuple[Command, ...]]:
        state, commands = self.core.begin()
        return state, self.with_reports(commands, {}, self.reports(state))

    def step(self, state: StreamState, event: Event) -> tuple[StreamState, tuple[Command, ...]]:
        after, commands = self.core.step(state, event)
        return after, self.with_reports(commands, self.reports(state), self.reports(after))

    def reports(self, state: StreamState) -> Reports:
        if state.closed:
            return {}
        taken = () if state.step is None else state.step.groups
        complete = [*taken, *(group for group in state.buffer.values() if group.order >= 0)]
        there = Counter(group.id // self.groups % self.adapters for group in complete)
        reports: dict[int, tuple[int, int]] = {}
        for step in range(state.version, min(state.version + self.adapters, state.last)):
            adapter, need = step % self.adapters, self.groups - int(state.shrunk.get(step, 0))
            if need:
                reports[adapter] = min(there[adapter], need), need
        return reports

    def with_reports(self, commands: tuple[Command, ...], before: Reports, after: Reports) -> tuple[Command, ...]:
        """The commands with what has changed, every 2 % of a step, before the first that the desk or the runner gets."""
        changed = [
            self.to_desk("progress", adapter, completed=completed, target=target)
            for adapter, (completed, target) in after.items()
            if adapter not in before or in_parts(before[adapter]) != in_parts((completed, target))
        ]
        changed += [self.to_desk("progress_end", adapter) for adapter in before if adapter not in after]
        others = [command for command in commands if (command.to, command.name) != ("desk", "progress")]
        at = next((at for at, command in enumerate(others) if command.to in ("desk", "runner")), len(others))
        return (*others[:at], *changed, *others[at:])

    def to_desk(self, name: str, adapter: int, **ids: int) -> Command:
        return Command(name, "desk", self.name, stream=f"adapter {adapter}", **ids)


def in_parts(report: tuple[int, int]) -> tuple[int, int]:
    completed, target = report
    return 50 * completed // target, target
