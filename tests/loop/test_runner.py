"""The runner: routing, order, deadlines, errors, and its virtual clock."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from kit.errors import BadInput
from kit.loop.messages import Command, Event, Memory
from kit.loop.runner import CoreRaised, RealClock, Runner, Simulated, Stalled, VirtualClock, made_core
from kit.results import run
from kit.results.frames import rows_of
from tests.loop.replaying import File, replay, replay_rows, turns


class Asks:
    """A core that asks a port `times` times, one after the other, and ends. Its state is the number of answers."""

    def __init__(self, times: int, to: str = "port", pipeline: str = "") -> None:
        self.times, self.to, self.pipeline = times, to, pipeline

    def begin(self) -> tuple[int, tuple[Command, ...]]:
        return 0, (Command("noted", "ledger", self.pipeline, n=0), self.ask(0))

    def step(self, state: int, event: Event) -> tuple[int, tuple[Command, ...]]:
        if event.name == "error":
            return state, (Command("ended", "runner", self.pipeline, why=event.why, of=event.of),)
        if event.name != "answer":
            return state, ()
        more = self.ask(state + 1) if state + 1 < self.times else Command("ended", "runner", self.pipeline, why="done")
        return state + 1, (more,)

    def ask(self, n: int) -> Command:
        return Command("ask", self.to, self.pipeline, n=n)


class Answers:
    """A core that other cores ask; its answers are commands to the asker."""

    def __init__(self, until: int) -> None:
        self.until = until

    def begin(self) -> tuple[int, tuple[Command, ...]]:
        return 0, ()

    def step(self, state: int, event: Event) -> tuple[int, tuple[Command, ...]]:
        answer = Command("answer", event.pipeline, event.pipeline, n=event.n)
        ended = (Command("ended", "runner"),) if state + 1 == self.until else ()
        return state + 1, (answer, *ended)


def simulated(clock: VirtualClock, **more: Any) -> Simulated:
    return Simulated(clock, {"ask": lambda command: [(2.5, Event("answer", command.pipeline, n=command.n))]}, **more)


class Raises(Asks):
    def step(self, state: int, event: Event) -> tuple[int, tuple[Command, ...]]:
        raise KeyError("mine")


def test_a_core_that_raises_is_named_with_its_event_and_its_line() -> None:
    clock = VirtualClock()
    words = r"^a in the event answer raised KeyError: 'mine' \(test_runner\.py, line \d+\)$"
    with pytest.raises(CoreRaised, match=words) as raised:
        Runner({"a": Raises(2, pipeline="a")}, {"port": simulated(clock)}, clock=clock).run()
    assert isinstance(raised.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("answer", "words"),
    [(None, "cannot unpack .*object"), ((0, None), ".*not iterable"), ((0, "no"), "'n' stands among .* no Command")],
)
def test_a_core_that_returns_no_state_and_commands_is_named(answer: Any, words: str) -> None:
    class Returns(Asks):
        def step(self, state: int, event: Event) -> Any:
            return answer

    clock = VirtualClock()
    with pytest.raises(CoreRaised, match=rf"^a in the event answer raised TypeError: {words}$"):
        Runner({"a": Returns(2, pipeline="a")}, {"port": simulated(clock)}, clock=clock).run()


def test_own_code_that_cannot_be_made_is_named_with_its_line() -> None:
    with pytest.raises(
        CoreRaised, match=rf"^{__name__}:cannot_be_made raised ValueError: no settings \(test_runner\.py, line \d+\)$"
    ):
        made_core(f"{__name__}:cannot_be_made", 1)
    with pytest.raises(CoreRaised, match=rf"^{__name__}:cannot_be_made raised TypeError: .* 2 were given$"):
        made_core(f"{__name__}:cannot_be_made", 1, 2)

    with pytest.raises(CoreRaised, match=r"raised JSONDecodeError: .* \(test_runner\.py, line \d+\)$"):
        made_core(f"{__name__}:reads_no_json")


@pytest.mark.parametrize(
    ("makes", "words"),
    [("makes_none", "NoneType, which has no begin and step"), ("Begins", "Begins, which has no step")],
)
def test_what_own_code_makes_and_is_no_core_is_named(makes: str, words: str) -> None:
    with pytest.raises(CoreRaised, match=rf"^{__name__}:{makes} returned {words}$"):
        made_core(f"{__name__}:{makes}")


def makes_none() -> None:
    """A factory without its `return`."""


class Begins:
    def begin(self) -> tuple[int, tuple[Command, ...]]:
        return 0, ()


def cannot_be_made(settings: object) -> None:
    raise ValueError("no settings")


def reads_no_json() -> None:
    json.loads("no")


def test_time_is_virtual_and_the_ledger_has_everything_in_order() -> None:
    clock, rows = VirtualClock(), Memory()
    runner = Runner({"a": Asks(2, pipeline="a")}, {"port": simulated(clock)}, clock=clock, ledger=rows)
    assert runner.run()["a"].why == "done"
    seen = [(row.event, row.time, row.ids.get("core"), row.ids.get("to")) for row in rows]
    assert seen == [
        ("begins", 0.0, "a", None),
        ("noted", 0.0, None, None),
        ("ask", 0.0, None, "port"),
        ("answer", 2.5, "a", None),
        ("ask", 2.5, None, "port"),
        ("answer", 5.0, "a", None),
        ("ended", 5.0, None, "runner"),
    ]
    assert runner.states["a"] == 2
    assert len(runner.own) == 3


def test_cores_answer_each_other_in_one_runner() -> None:
    cores = {"a": Asks(3, "desk", "a"), "b": Asks(2, "desk", "b"), "desk": Answers(5)}
    runner = Runner(cores, {}, clock=VirtualClock())
    assert set(runner.run()) == {"a", "b", "desk"}
    assert runner.states == {"a": 3, "b": 2, "desk": 5}
    assert replay_rows(cores, runner.ledger) is None  # type: ignore[arg-type]


def test_a_port_that_raises_becomes_an_error_with_the_commands_ids() -> None:
    clock = VirtualClock()
    runner = Runner({"a": Asks(3, pipeline="a")}, {"port": simulated(clock, fail_at={1: "no more"})}, clock=clock)
    ended = runner.run()["a"]
    assert (ended.why, ended.of) == ("RuntimeError: no more", "ask")
    error = next(row for row in runner.ledger if row.event == "error")  # type: ignore[attr-defined]
    assert error.ids["n"] == 1
    assert error.time == 2.5


def test_a_port_that_cannot_be_asked_is_an_error_for_every_core() -> None:
    class Broken:
        def send(self, _: Command) -> Iterable[Event]:
            return ()

        def take(self) -> Iterable[Event]:
            raise OSError("gone")

    runner = Runner({"a": Asks(1, pipeline="a")}, {"port": Broken()}, clock=VirtualClock())
    assert runner.run()["a"].why == "OSError: gone"


def test_a_wait_has_a_deadline_and_names_who_waits() -> None:
    clock = VirtualClock()
    silent = Simulated(clock, {"ask": lambda _: []})
    with pytest.raises(Stalled, match="no further event can arrive; not ended: a") as raised:
        Runner({"a": Asks(1)}, {"port": silent}, clock=clock).run()
    assert raised.value.cores == ("a",)
    late = Simulated(clock, {"ask": lambda _: [(100.0, Event("answer", n=0))]})
    with pytest.raises(Stalled, match="no event arrived within 60 s"):
        Runner({"a": Asks(1)}, {"port": late}, clock=clock, deadline_s=60).run()
    waited: list[float] = []
    with pytest.raises(Stalled, match=r"within 0\.05 s"):
        Runner({"a": Asks(1)}, {"port": silent}, clock=RealClock(waited.append), deadline_s=0.05).run()
    assert max(waited) <= 0.05


def test_addresses_are_checked() -> None:
    clock = VirtualClock()
    with pytest.raises(BadInput, match="sends ask to 'port', which is neither a core nor a port"):
        Runner({"a": Asks(1)}, {}, clock=clock).run()
    with pytest.raises(BadInput, match="'a' names a core and a port"):
        Runner({"a": Asks(1), "b": Asks(1)}, {"b": simulated(clock), "a": simulated(clock)}, clock=clock)
    with pytest.raises(BadInput, match="'ledger' is the runner's own address"):
        Runner({"ledger": Asks(1)}, {}, clock=clock)
    with pytest.raises(BadInput, match="at least one core"):
        Runner({}, {}, clock=clock)
    with pytest.raises(BadInput, match="deadline_s=0 must be above 0"):
        Runner({"a": Asks(1)}, {}, clock=clock, deadline_s=0)
    other = Simulated(clock, {"ask": lambda _: [(0.0, Event("answer", "c"))]})
    with pytest.raises(BadInput, match="belongs to the pipeline 'c', which has no core"):
        Runner({"a": Asks(1), "b": Asks(1)}, {"port": other}, clock=clock).run()


def test_a_ledger_on_disk_gives_back_what_passed(tmp_path: Path) -> None:
    clock, file = VirtualClock(), File(tmp_path / "records.jsonl", phase="run")
    core = Asks(3, pipeline="a")
    runner = Runner({"a": core}, {"port": simulated(clock)}, clock=clock, ledger=file)
    runner.run()
    file.close()
    rows = rows_of(run.File(tmp_path / "records.jsonl").read())
    assert replay_rows({"a": core}, rows) is None
    events = [event for _, event, _ in turns(rows) if event is not None]
    state, commands = replay(core, events)
    assert (state, commands[-1].name) == (3, "ended")
    last = rows[-1]
    assert (last.event, last.time, last.ids) == ("ended", 7.5, {"pipeline": "a", "to": "runner", "why": "done"})


def test_a_replay_names_the_first_turn_that_differs() -> None:
    clock, rows = VirtualClock(), Memory()
    Runner({"a": Asks(3, pipeline="a")}, {"port": simulated(clock)}, clock=clock, ledger=rows).run()
    difference = replay_rows({"a": Asks(2, pipeline="a")}, rows)
    assert difference is not None
    assert (difference.turn, difference.core, difference.replayed[0].name) == (2, "a", "ended")


def test_what_is_due_at_once_happens_in_the_order_of_its_scheduling() -> None:
    clock, seen = VirtualClock(), []
    for name, after in (("b", 1.0), ("c", 1.0), ("a", 0.5)):
        clock.after(after, lambda name=name: seen.append(name))
    while clock.wait(0.75):
        pass
    assert (seen, clock.now()) == (["a", "b", "c"], 1.0)
    with pytest.raises(ValueError, match="must be finite and at least 0"):
        clock.after(float("nan"), lambda: None)


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_of_the_system_that_is_set_neither_ends_nor_prolongs_a_run(
    monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    class SetsTheClock:
        """A port that answers at once, and sets the system's clock with its first answer."""

        def send(self, command: Command) -> Iterable[Event]:
            monkeypatch.setattr("time.time", lambda: real() + 3600 * hours)
            return [Event("answer", command.pipeline)]

        def take(self) -> Iterable[Event]:
            return ()

    real, ledger = time.time, Memory()
    Runner({"a": Asks(3)}, {"port": SetsTheClock()}, clock=RealClock(), ledger=ledger, deadline_s=600).run()
    times = [row.time for row in ledger]
    assert times == sorted(times)
    assert abs(times[-1] - times[0]) < 600


def test_a_wait_for_a_moment_that_has_passed_takes_no_time() -> None:
    """A negative number would be an error, or a wait without end."""
    waited: list[float] = []
    clock = RealClock(waited.append)
    assert clock.wait(-3.0)
    assert clock.wait(0.5)
    assert waited == [0.0, 0.5]


class StatesSettings(Asks):
    def begin(self) -> tuple[int, tuple[Command, ...]]:
        notes = (
            Command(name, "ledger", self.pipeline, window=9) for name in ("capacity", "begins", "noted", "resumed")
        )
        return 0, (*notes, self.ask(0))


def test_the_first_rows_of_a_loop_are_not_its_cores_to_state() -> None:
    clock, ledger = VirtualClock(), Memory()
    Runner({"a": StatesSettings(1, pipeline="a")}, {"port": simulated(clock)}, clock=clock, ledger=ledger).run()
    assert [row.event for row in ledger] == ["begins", "noted", "ask", "answer", "ended"]
    assert [row.at for row in ledger] == [*range(5)]
