"""Devices on a virtual clock, and the clock's alarms. Replicas take time to sleep and wake, and report when they take or free a device.

A pipeline brings its own ports. The receiver of sleep and wake (`Sleeper`) can be a `kit.stream.simulated.System`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from kit.loop.messages import Command, Event, Memory
from kit.loop.runner import A_SECOND, Answers, Core, Port, Runner, Simulated, Stalled, VirtualClock
from kit.results.records import Id, numbers


class Sleeper(Protocol):
    def remove(self, number: int) -> None: ...
    def add(self, number: int) -> None: ...


class Devices(Simulated):
    """The port "devices" of all pipelines, and "clock". `broken` replicas fail to wake; `hangs`: orders that get no answer."""

    def __init__(
        self,
        clock: VirtualClock,
        sleepers: Mapping[str, Sleeper],
        *,
        desk: str = "desk",
        sleep_s: float = 0.01,
        wake_s: float = 0.02,
        broken: Iterable[tuple[str, int]] = (),
        hangs: Iterable[tuple[str, str, int]] = (),
    ) -> None:
        super().__init__(clock, {"shrink": self.shrink, "expand": self.expand, "after": self.after})
        self.sleepers = dict(sleepers)
        self.desk = desk
        self.sleep_s = sleep_s
        self.wake_s = wake_s
        self.broken = set(broken)
        self.hangs = set(hangs)

    def after(self, command: Command) -> Answers:
        yield command.ms / 1000, Event("alarm", command.pipeline, number=command.number)

    def shrink(self, command: Command) -> Answers:
        name, replica = command.pipeline, command.replica
        if name in self.sleepers:
            self.sleepers[name].remove(replica)
        if ("shrink", name, replica) not in self.hangs:
            yield from self.each("freed", command, self.sleep_s)
            yield self.sleep_s, Event("shrunk", self.desk, who=name, replica=replica)

    def expand(self, command: Command) -> Answers:
        name, replica = command.pipeline, command.replica
        if (name, replica) in self.broken:
            why = "it cannot allocate its memory"
            yield self.wake_s, Event("error", self.desk, of="expand", who=name, replica=replica, why=why)
        elif ("expand", name, replica) not in self.hangs:
            yield from self.each("taken", command, 0.0)
            if name in self.sleepers:
                self.clock.after(self.wake_s, lambda: self.sleepers[name].add(replica))
            yield self.wake_s, Event("expanded", self.desk, who=name, replica=replica)

    def each(self, name: str, command: Command, seconds: float) -> Answers:
        for device in numbers(command.devices):
            yield seconds, Event(name, self.desk, who=command.pipeline, device=device)


class Script:
    """A scripted pipeline: at each time (ms) one operation with its ids; `ended` ends it. Replicas sleep when ordered to.

    Like any pipeline it ends with an error if the desk does.
    """

    def __init__(self, name: str, *lines: tuple[int, str, dict[str, Id]], desk: str = "desk") -> None:
        self.name = name
        self.lines = lines
        self.desk = desk

    def begin(self) -> tuple[int, tuple[Command, ...]]:
        return 0, tuple(
            Command("after", "clock", self.name, number=at, ms=line[0]) for at, line in enumerate(self.lines)
        )

    def step(self, state: int, event: Event) -> tuple[int, tuple[Command, ...]]:
        if event.name == "left":
            return state, (Command("shrink", "devices", self.name, replica=event.replica, devices=event.devices),)
        if event.name == "error" and event.get("of") == self.desk:
            return state, (Command("ended", "runner", self.name, why="error", error=event.why),)
        if event.name != "alarm":
            return state, ()
        _, name, ids = self.lines[event.number]
        return state, (Command(name, "runner" if name == "ended" else self.desk, self.name, **ids),)


class Ports:
    """One address for several pipelines: a command is sent to the port of its pipeline."""

    def __init__(self, ports: Mapping[str, Port]) -> None:
        self.ports = dict(ports)

    def send(self, command: Command) -> Iterable[Event]:
        return self.ports[command.pipeline].send(command)

    def take(self) -> Iterable[Event]:
        return [event for port in self.ports.values() for event in port.take()]


class DeskSimulation(NamedTuple):
    rows: Memory
    ended: dict[str, Command]
    runner: Runner

    @property
    def seconds(self) -> float:
        return self.rows[-1].time


def simulate(
    cores: Mapping[str, Core[Any]],
    ports: Mapping[str, Port],
    clock: VirtualClock,
    devices: Devices,
    *,
    until_s: float = 1e6,
    a_second: int = A_SECOND,
    rows: Memory | None = None,
    prepare: Callable[[Runner], None] = lambda _: None,
) -> DeskSimulation:
    """Run pipelines and their desk for at most `until_s`; `ended` lacks those that have not ended.

    `rows` is the ledger to write; it is kept even if the run breaks.

    `prepare` may schedule external events: `clock.after(3.0, lambda: runner.post(Event("died", "desk", who="a")))`.
    """

    def stop() -> None:
        raise Stalled(f"not ended after {until_s:g} s", ())

    rows = Memory() if rows is None else rows
    every = {**ports, "devices": devices, "clock": devices}
    runner = Runner(cores, every, clock=clock, ledger=rows, deadline_s=until_s, a_second=a_second)
    clock.after(until_s, stop)
    prepare(runner)
    with contextlib.suppress(Stalled):
        runner.run()
    return DeskSimulation(rows, runner.ended, runner)
