"""The engine of `kit explore` on a toy: draws, findings, limits, shrinking. No lab and no process."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from typing import ClassVar

import pytest

from kit.loop.explore import (
    NEVER_RETURNED,
    RAISED,
    Judged,
    World,
    outcome_of,
    play,
    shrink,
    world_of,
)
from kit.loop.messages import Command, Event, Memory
from kit.loop.runner import Restless, Runner, Simulated, VirtualClock
from kit.results import Row


class Numbers:
    """A world is a list of numbers; the rule `small` fails if one is above 90, and one above 99 is never finished with."""

    own: ClassVar[tuple[str, ...]] = ()
    phase: ClassVar[str] = "toy"
    rooms: ClassVar[tuple[str, ...]] = ()
    beyond: ClassVar[Mapping[str, str]] = {}

    def draw(self, rng: random.Random) -> World:
        return {"numbers": [rng.randint(1, 98) for _ in range(rng.randint(1, 12))]}

    def run(self, world: World, rows: Memory) -> None:
        for at, number in enumerate(world["numbers"]):
            rows.write(Row(metric="number", time=float(at), ids={"number": number}))
            if number < 0:
                raise ValueError(f"{number} is below 0")
            while number > 99:
                pass
            time.sleep(number == 0)  # as long as a machine that is busy with other work may keep it

    def judge(self, rows: Memory) -> Judged:
        large = [row["number"] for row in rows if row["number"] > 90]
        return Judged({"small": f"{large[0]} is above 90"} if large else {}, ["even"])

    def smaller(self, world: World) -> Iterator[World]:
        numbers = world["numbers"]
        for at in range(len(numbers)):
            if len(numbers) > 1:
                yield {"numbers": numbers[:at] + numbers[at + 1 :]}
            if numbers[at] > 1:
                yield {"numbers": [*numbers[:at], numbers[at] - 1, *numbers[at + 1 :]]}

    def sizes(self, world: World) -> dict[str, int]:
        return {"numbers": len(world["numbers"])}

    def config(self, world: World) -> World:
        return world


def test_a_world_follows_from_its_seed_alone() -> None:
    worlds = Numbers()
    outcomes = [outcome_of(worlds, seed) for seed in range(40)]
    again = [outcome_of(worlds, seed) for seed in reversed(range(40))][::-1]
    about = [(outcome.seed, outcome.sizes, outcome.events, outcome.findings) for outcome in outcomes]
    assert about == [(outcome.seed, outcome.sizes, outcome.events, outcome.findings) for outcome in again]
    assert 0 < sum(bool(outcome.findings) for outcome in outcomes) < 40


def test_a_failure_is_made_as_small_as_it_can_be() -> None:
    worlds = Numbers()
    seed = next(
        seed
        for seed in range(100)
        if outcome_of(worlds, seed).findings and outcome_of(worlds, seed).sizes["numbers"] > 3
    )
    small = shrink(worlds, world_of(worlds, seed))
    assert small.world == {"numbers": [91]}
    assert small.played.findings == {"small": "91 is above 90"}
    assert small.tried > 1


def test_what_a_core_raises_is_a_finding_and_its_rows_are_kept() -> None:
    played = play(Numbers(), {"numbers": [1, -2, 3]})
    assert played.rule == RAISED
    assert "ValueError: -2 is below 0" in played.findings[RAISED]
    assert "the last of 2 rows is `number`" in played.findings[RAISED]
    assert [row["number"] for row in played.rows] == [1, -2]
    assert shrink(Numbers(), {"numbers": [1, -2, 3]}).world == {"numbers": [-2]}


def test_a_world_on_a_busy_machine_may_take_longer_than_its_limit() -> None:
    assert play(Numbers(), {"numbers": [0]}, wall_s=0.8).findings == {}
    assert [*play(Numbers(), {"numbers": [0, 0]}, wall_s=0.2).findings] == [NEVER_RETURNED]


def test_a_core_that_does_not_return_is_a_finding() -> None:
    played = play(Numbers(), {"numbers": [5, 100]}, wall_s=0.2)
    assert [*played.findings] == [NEVER_RETURNED]
    assert [row["number"] for row in played.rows] == [5, 100]
    small = shrink(Numbers(), {"numbers": [5, 100, 7]}, wall_s=0.1)
    assert small.world == {"numbers": [100]}


class Echo:
    """A core that orders an alarm, and after it another one, `ms` later each."""

    def __init__(self, ms: int, times: int) -> None:
        self.ms, self.times = ms, times

    def begin(self) -> tuple[int, tuple[Command, ...]]:
        return 0, (Command("after", "clock", ms=self.ms),)

    def step(self, state: int, event: Event) -> tuple[int, tuple[Command, ...]]:
        assert event.name == "alarm"
        ends = state == self.times
        return state + 1, (Command("ended", "runner", why="done") if ends else Command("after", "clock", ms=self.ms),)


@pytest.mark.parametrize("ms", [0, 1])
def test_events_without_the_clock_moving_end_a_run_and_others_do_not(ms: int) -> None:
    clock = VirtualClock()
    port = Simulated(clock, {"after": lambda command: [(command.ms / 1000, Event("alarm"))]})
    runner = Runner({"echo": Echo(ms, 5000)}, {"clock": port}, clock=clock, a_second=1500)
    if ms:
        assert runner.run()["echo"]["why"] == "done"
    else:
        with pytest.raises(
            Restless, match=r"more than 1500 events within a second .* the last is the event alarm for echo"
        ):
            runner.run()
