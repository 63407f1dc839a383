"""Ports without time: pipelines request anything at any time, right or wrong, and a seeded choice picks the next answer.

The ledger of a schedule is written as a runner writes it, so that the judge can read each one.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field
from typing import Any

from kit.labs.share.ledgers import settled
from kit.loop.messages import Command, Event, Memory, command_row, event_row
from kit.results import Row
from kit.results.rules import NotMeasured
from kit.share.core import Scheduler
from kit.share.judge import RULES
from kit.share.judge.books import DeskLedger
from kit.share.planner import gap_ratio, make_plan
from kit.share.state import KINDS, DeskSettings, DeskState, Plan

NAMES = ("a", "b", "c", "d")
GENERATED = (
    "training",
    "training",
    "logprobs",
    "critic",
    "reference",
    "initialisation",
    "generation",
    "generation",
    "generation",
)


@dataclass
class Chaos:
    """`died` is the rate at which something dies, `late` the rate at which a request reaches its limit."""

    seed: int
    core: Any = None
    pipelines: int = 0
    died: float = 0.01
    late: float = 0.01
    rows: Memory = field(default_factory=Memory)
    events: list[Event] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    answers: list[Event] = field(default_factory=list)
    ended: Command | None = None

    def __post_init__(self) -> None:
        draw = self.random = random.Random(self.seed)
        self.names = NAMES[: self.pipelines or draw.choice([1, 2, 2, 3, 4])]
        self.devices = draw.choice([1, 2, 2, 4, 6])
        settings = DeskSettings(
            devices=self.devices,
            pipelines=self.names,
            admission_ms=draw.choice([0, 60_000]),
            request_ms=10**9,
            operation_ms=10**9,
        )
        self.core = self.core(settings) if self.core else Scheduler(settings)
        self.clusters = {name: self.draw_clusters() for name in self.names}
        self.time = 0.0
        self.state: DeskState
        self.rows.write(Row(metric="begins", time=0.0, ids={"core": "desk"}))
        self.state, commands = self.core.begin()
        self.carry(commands)

    def draw_clusters(self) -> dict[str, Any]:
        draw = self.random
        tp = draw.choice([one for one in (1, 1, 2) if one <= self.devices])
        universe = list(range(self.devices))
        count = draw.randint(1, self.devices // tp) * tp
        found: dict[str, Any] = {
            "generation": draw.sample(universe, count) if draw.random() < 0.3 else universe[:count]
        }
        for name in ("trainer", "critic", "reference"):
            if name == "trainer" or draw.random() < 0.3:
                found[name] = draw.sample(universe, draw.randint(1, self.devices))
        return {"tp": tp, **{name: ",".join(map(str, some)) for name, some in found.items()}}

    def event(self, name: str, pipeline: str, /, **ids: Any) -> tuple[Command, ...]:
        event = Event(name, pipeline, **ids)
        self.time += 0.001
        self.events.append(event)
        self.rows.write(event_row(event, "desk", self.time))
        self.state, commands = self.core.step(self.state, event)
        self.carry(commands)
        check_state(self.state, self.devices)
        return commands

    def carry(self, commands: tuple[Command, ...]) -> None:
        for command in commands:
            self.commands.append(command)
            self.rows.write(command_row(command, self.time))
            if command.name in ("left", "expand"):
                answer = "shrunk" if command.name == "left" else "expanded"
                self.answers.append(Event(answer, "desk", who=command.pipeline, replica=command.replica))
            elif command.name == "ended":
                self.ended = command

    def answer(self) -> None:
        event = self.answers.pop(self.random.randrange(len(self.answers)))
        if event.name == "expanded" and self.random.random() < self.died:
            ids = {**dict(event.ids), "of": "expand", "why": "injected"}
            self.event("error", "desk", **ids)
        else:
            self.event(event.name, "desk", **dict(event.ids))

    def run(self, steps: int = 60) -> Chaos:
        for name in self.names:
            if self.seed % 3 or self.random.random() < 0.8:
                self.event("register", name, **self.clusters[name])
                self.event("admit", name)
        for _ in range(steps):
            if self.ended is not None:
                return self
            if self.answers and self.random.random() < 0.5:
                self.answer()
            elif self.random.random() < self.late:
                self.alarm()
            else:
                self.operate(self.random.choice(self.names))
        return self.wind_down()

    def alarm(self) -> None:
        """Fire one of the alarms that end nothing."""
        found = [number for number, what in self.state.alarms.items() if what[0] != "cycle"]
        self.event("alarm", "desk", number=self.random.choice([*found, 10**6]))

    def operate(self, name: str) -> None:
        draw = self.random
        what = draw.choice(
            ["acquire"] * 6 + ["release"] * 4 + ["progress"] * 6 + (list(RARE) if self.seed % 3 == 0 else [])
        )
        if draw.random() < self.died:
            what = "died"
        kind = draw.choice(GENERATED)
        ids: dict[str, Any] = {}
        if what == "register":
            ids = self.clusters[name]
        elif what == "acquire":
            ids = {"kind": kind}
            if kind == "generation" and draw.random() < 0.5:
                ids["target"] = draw.randint(0, 9)
            if draw.random() < 0.3:
                ids["release"] = draw.choice(list(KINDS))
        elif what == "release":
            held = [lease.kind for (who, _), lease in self.state.leases.items() if who == name]
            ids = {"kind": draw.choice(held) if held and draw.random() < 0.7 else kind}
        elif what == "resize":
            ids = {draw.choice(["add", "remove"]): str(draw.randint(0, self.devices))}
        elif what in ("progress", "progress_end"):
            ids = {"stream": draw.choice(["training", "training", "validation"])}
            if what == "progress":
                ids |= {"completed": draw.randint(0, 12), "target": draw.randint(1, 10)}
        elif what == "died":
            found = {"who": name, "replica": draw.randint(0, self.devices)}
            self.event("died", "desk", **(found if draw.random() < 0.8 else {"who": name}))
            return
        for stream in ("training", "validation") if what == "unregister" else ():
            self.event("progress_end", name, stream=stream)
        self.event(what, name, **ids)

    def wind_down(self) -> Chaos:
        """Unregister all pipelines. Whatever happened before, the desk must end."""
        for name in self.names:
            if self.ended is None and name not in self.state.left and name not in self.state.pipelines:
                self.event("register", name, **self.clusters[name])
            for stream in ("training", "validation"):
                if self.ended is None:
                    self.event("progress_end", name, stream=stream)
            if self.ended is None:
                self.event("unregister", name)
        while self.ended is None:
            assert self.answers, "the desk waits for nobody, and does not end"
            self.answer()
        assert self.ended.why == "done", self.ended
        assert self.state.idle == frozenset(range(self.devices))
        return self


RARE = ("register", "admit", "planned_release", "resize", "progress_end", "progress_end", "acquire", "unregister")


def check_state(state: DeskState, devices: int) -> None:
    """Check that every device is in one place (idle, leased, falling asleep or waking up), and that the state is consistent."""
    held = [*state.idle]
    for (name, cluster), lease in state.leases.items():
        bundles = state.pipelines[name].clusters[cluster].bundles
        held += [*lease.devices, *(device for one in lease.active for device in bundles[one])]
    for name, replica in state.sleeping | state.waking:
        held += state.pipelines[name].generation.bundles[replica]
    if not state.closed:
        assert sorted(held) == list(range(devices)), (sorted(held), state)
    assert not state.sleeping or state.plan is not None
    assert not state.waking or state.plan is not None
    assert len({one.key for one in state.requests}) == len(state.requests)
    if not state.closed and state.plan is None:
        assert not state.due, "a plan is due and none is made"
        waits = {one.kind for one in state.requests if not one.held}
        plan = make_plan(state, gap_ratio, devices) if waits else Plan()
        assert not plan.grants, "somebody waits for devices that it could have"
        assert not ("generation" in waits and plan), "somebody waits to generate, and a plan would help"


def rows_of(rows: Memory) -> list[dict[str, Any]]:
    return [{"event": row.event, "time": row.time, **row.ids} for row in rows]


def violations(rows: list[dict[str, Any]], without: tuple[str, ...] = ()) -> dict[str, str]:
    """Return what the judge finds, without the checks that cannot be judged here."""
    ledger = DeskLedger(rows)
    found = {}
    for rule in RULES:
        if rule.__name__ not in without:
            with contextlib.suppress(NotMeasured):
                measured = settled(rule, ledger)
                if measured.value:
                    found[rule.__name__] = measured.why
    return found
