"""The lateness of answers, on clocks that the test sets."""

from __future__ import annotations

import pandas as pd
import pytest

from kit import machine
from kit.labs.stream import sides
from kit.labs.stream.rules import controller_answers
from kit.loop.messages import Command
from kit.results.rules import NotMeasured


@pytest.mark.parametrize(("queued", "late"), [(0.0, 0.3), (0.29, 0.01), (0.4, 0.0)])
def test_a_busy_machine_is_not_the_controllers_lateness(
    monkeypatch: pytest.MonkeyPatch, queued: float, late: float
) -> None:
    now, waited = [100.0], [5.0]
    monkeypatch.setattr(sides.time, "time", lambda: now[0])
    monkeypatch.setattr(machine, "queued_seconds", lambda: waited[0])
    asker = sides.Asker()
    assert asker.left() == pytest.approx(sides.ASKS_S)
    now[0] += sides.ASKS_S
    assert len([*asker.take()]) == 1
    now[0] += 0.3
    waited[0] += queued
    asker.send(Command("answer", "asker", question=0))
    assert asker.seconds == [pytest.approx(late)]


def test_of_a_long_turn_in_which_a_question_fell_due_only_the_part_after_that_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, waited = [100.0], [5.0]
    monkeypatch.setattr(sides.time, "time", lambda: now[0])
    monkeypatch.setattr(machine, "queued_seconds", lambda: waited[0])
    asker = sides.Asker()
    now[0] += 0.4  # ten questions of this turn, half of which others had the cores
    waited[0] += 0.2
    for number, _ in enumerate([*asker.take()]):
        asker.send(Command("answer", "asker", question=number))
    assert asker.seconds[0] == pytest.approx((0.4 - sides.ASKS_S) / 2)
    waited[0] += 3.0  # before a later question is due
    now[0] += 3.0
    assert len([*asker.take()]) > 10
    asker.send(Command("answer", "asker", question=len(asker.seconds)))
    assert asker.seconds[-1] == pytest.approx(0.0)


def test_what_was_queued_before_the_loop_waited_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waited = [100.0], [5.0]
    monkeypatch.setattr(sides.time, "time", lambda: now[0])
    monkeypatch.setattr(machine, "queued_seconds", lambda: waited[0])
    asker = sides.Asker()
    waited[0] += 7.0  # in the time of the question before
    asker.left()
    assert [*asker.take()] == []
    now[0] += sides.ASKS_S
    assert len([*asker.take()]) == 1
    now[0] += 0.3
    asker.send(Command("answer", "asker", question=0))
    assert asker.seconds == [pytest.approx(0.3)]


def test_a_controller_that_answers_nothing_is_told_so() -> None:
    values = {"questions": 80.0, "answers": 0.0, "answer_seconds": float("nan")}
    frame = pd.DataFrame([{"phase": "stream", "metric": metric, "value": value} for metric, value in values.items()])
    with pytest.raises(NotMeasured, match="answered none of 80 questions"):
        controller_answers(frame, {})
    with pytest.raises(NotMeasured, match="only 0 questions fitted"):
        controller_answers(frame[frame["metric"] != "questions"], {})
