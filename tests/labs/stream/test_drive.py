"""How many questions a loop gets from outside, and what the rehearsed failures of simulated loops show."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kit.labs.stream import sides
from kit.labs.stream.rules import QUESTIONS_ASKED
from kit.loop.messages import Command
from kit.stream import core, generation
from tests.labs.simulated import failed
from tests.labs.stream.conftest import simulated


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], int]:
    """asked(seconds) returns the number of questions in a loop of that length that looks for them every 10 ms (1 s from 100 s on)."""

    def count(seconds: float) -> int:
        now = [1000.0]
        monkeypatch.setattr(sides.time, "time", lambda: now[0])
        asker, number = sides.Asker(), 0
        while now[0] < 1000.0 + seconds:
            now[0] += 0.01 if seconds < 100 else 1.0
            for event in asker.take():
                number += 1
                asker.send(Command("answer", "asker", question=event.question))
        assert len(asker.seconds) == number
        return number

    return count


def test_a_loop_of_a_second_is_asked_often_enough(asked: Callable[[float], int]) -> None:
    assert asked(1.2) >= QUESTIONS_ASKED


def test_a_loop_of_a_day_is_not_asked_for_ever(asked: Callable[[float], int]) -> None:
    assert asked(10) < 200
    assert asked(24 * 3600) < 700


def test_a_controller_that_was_blocked_is_late_with_each_question(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(sides.time, "time", lambda: now[0])
    asker = sides.Asker()
    now[0] += 0.4
    waiting = [event.question for event in asker.take()]
    for question in waiting:
        asker.send(Command("answer", "asker", question=question))
    assert len(waiting) >= 19
    assert asker.seconds[0] == pytest.approx(0.38)


def nothing(*_: object) -> None: ...


def test_a_rehearsed_replica_that_joins_again_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(core.HANDLERS, "joined", nothing)
    assert "publish_before_use" in failed(simulated()[0])


def test_a_rehearsed_step_does_not_wait_for_its_failed_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "shrink_step", nothing)
    assert failed(simulated()[0]) == {"no_deadlock"}
