"""Seeded schedules: operations at any time, right or wrong, answers in any order, deaths. The judge reads each ledger."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.loop.messages import Event
from kit.share.core import Scheduler
from kit.share.state import DeskSettings, DeskState
from tests.loop.replaying import replay, replay_rows
from tests.share.chaos import Chaos, check_state, rows_of, violations

TIMES = ("no_starvation",)  # schedules have no time


def check(seed: int) -> Chaos:
    try:
        done = Chaos(seed).run()
        found = violations(rows_of(done.rows), without=TIMES)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error!r}") from error
    assert found == {}, f"seed {seed}"
    return done


def test_schedules_end_and_the_judge_finds_nothing() -> None:
    events: set[str] = set()
    for seed in range(120):
        events |= {row.event for row in check(seed).rows}
    assert events >= {
        "plan",
        "granted",
        "left",
        "joined",
        "died",
        "withdrawn",
        "released",
        "resized",
        "expired",
        "admission_limit",
    }


@pytest.mark.drawn(1, of="schedules")
@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_a_thousand_schedules_keep_every_device(first: int) -> None:
    for seed in range(first, first + 250):
        Chaos(seed).run()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_schedules() -> None:
    for seed in range(10_000, 20_000):
        check(seed) if seed % 8 == 0 else Chaos(seed).run()


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_schedules_by_hypothesis(seed: int, pipelines: int) -> None:
    assert violations(rows_of(Chaos(seed, pipelines=pipelines).run(80).rows), without=TIMES) == {}


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_schedules_by_hypothesis_many_times(seed: int, pipelines: int) -> None:
    assert violations(rows_of(Chaos(seed, pipelines=pipelines).run(80).rows), without=TIMES) == {}


@pytest.mark.parametrize("seed", range(8))
def test_replay_gives_the_same_commands(seed: int) -> None:
    done = Chaos(seed).run()
    state, commands = replay(done.core, done.events)
    assert commands == done.commands
    assert (state, hash(state)) == (done.state, hash(done.state))
    assert replay_rows({"desk": done.core}, done.rows) is None


# -- every order of a small instance ----------------------------------------------------------------------------------------


SCRIPT = ("progress", "generation", "training", "release", "training", "release", "leave")


class Explorer:
    """Depth-first search over (state of the desk, where each pipeline is, what has not been answered, deaths left)."""

    def __init__(
        self, pipelines: dict[str, dict[str, Any]], *, devices: int = 2, deaths: int = 0, admission: bool = False
    ) -> None:
        self.clusters = pipelines
        self.devices = devices
        names = tuple(pipelines)
        self.core = Scheduler(DeskSettings(devices=devices, pipelines=names, admission_ms=60_000 if admission else 0))
        self.deaths = deaths
        self.seen: set[Any] = set()
        self.ends = 0

    def run(self) -> None:
        state, _ = self.core.begin()
        for name, clusters in self.clusters.items():
            state, _ = self.core.step(state, Event("register", name, **clusters))
            state, _ = self.core.step(state, Event("admit", name))
        todo: list[Any] = [(state, tuple((name, 0, False) for name in self.clusters), frozenset[Event](), self.deaths)]
        while todo:
            node = todo.pop()
            key = (shape(node[0]), *node[1:])
            if key not in self.seen:
                self.seen.add(key)
                todo += self.after(*node)

    def after(self, state: DeskState, where: Any, answers: frozenset[Event], deaths: int) -> list[Any]:
        if state.closed:
            self.ends += 1
            assert not state.error, state.error
            assert state.idle == frozenset(range(self.devices))
            return []
        found = [self.take(state, event, where, answers - {event}, deaths) for event in answers]
        for at, (name, phase, waits) in enumerate(where):
            if not waits and phase < len(SCRIPT) and state.pipelines[name].admitted:
                moved = (*where[:at], (name, phase + 1, SCRIPT[phase] in ("generation", "training")), *where[at + 1 :])
                found.append(self.take(state, self.event(name, SCRIPT[phase]), moved, answers, deaths))
            if deaths and name in state.pipelines:
                moved = (*where[:at], (name, len(SCRIPT), False), *where[at + 1 :])
                found.append(self.take(state, Event("died", "desk", who=name), moved, answers, deaths - 1))
        assert found, f"nothing is under way, and {[name for name, phase, waits in where if waits]} wait"
        return found

    def event(self, name: str, what: str) -> Event:
        ids: dict[str, dict[str, Any]] = {"progress": {"completed": 0, "target": 4}, "release": {"kind": "training"}}
        if what in ("generation", "training"):
            return Event("acquire", name, kind=what)
        return Event("unregister" if what == "leave" else what, name, **ids.get(what, {}))

    def take(self, state: DeskState, event: Event, where: Any, answers: frozenset[Event], deaths: int) -> Any:
        state, commands = self.core.step(state, event)
        check_state(state, self.devices)
        for one in commands:
            if one.name in ("left", "expand"):
                name = "shrunk" if one.name == "left" else "expanded"
                answers |= {Event(name, "desk", who=one.pipeline, replica=one.replica)}
            elif one.name in ("granted", "error"):
                assert one.name == "granted" or "died" in one.why or "unregistered" in one.why, one
                where = tuple((name, phase, waits and name != one.pipeline) for name, phase, waits in where)
        return state, where, answers, deaths


def shape(state: DeskState) -> Any:
    """A state without counters that only grow; request numbers are replaced by their order."""
    order = {number: at for at, number in enumerate(sorted(one.number for one in state.requests))}
    requests = tuple((one.key, one.kind, order[one.number], one.target, one.held, one.again) for one in state.requests)
    leases = frozenset((key, one.kind, one.devices, one.active) for key, one in state.leases.items())
    return (
        state.idle,
        state.pipelines,
        requests,
        leases,
        state.plan,
        state.sleeping,
        state.waking,
        state.due,
        state.left,
        state.closed,
    )


A, B = {"trainer": (0,), "generation": (0, 1)}, {"trainer": (1,), "generation": (0, 1)}


@pytest.mark.parametrize(
    ("pipelines", "more"),
    [
        ({"a": A, "b": B}, {}),
        ({"a": A, "b": B}, {"deaths": 1}),
        ({"a": A, "b": A}, {"deaths": 1}),
        ({"a": A, "b": B}, {"admission": True}),
        (
            {"a": {"trainer": (0, 1), "generation": (0, 1)}, "b": {"trainer": (0, 1), "generation": (0, 1), "tp": 2}},
            {"deaths": 2},
        ),
    ],
)
def test_every_order_of_two_pipelines_on_two_devices_ends(pipelines: dict[str, Any], more: dict[str, Any]) -> None:
    explorer = Explorer(pipelines, **more)
    explorer.run()
    assert explorer.ends
    assert len(explorer.seen) > 100
