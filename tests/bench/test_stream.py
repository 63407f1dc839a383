"""The bench of streaming: what it reads from the ledger of a learning run."""

from __future__ import annotations

from typing import Any

import pytest

from kit.labs.bench_stream import parts as stream
from kit.stream.judge.history import LoopLedger

CONFIG = {"steps": 10, "seed": 1234, "numbers": 3}


def rising(*, falls: bool = False) -> stream.Curve:
    """A curve of two groups of two samples per step and one step per second. Rewards rise from 0.1 to 0.55 and differ a little by group."""
    rows: list[dict[str, Any]] = [{"event": "capacity", "time": 0.0}]
    for step in range(10):
        height = 0.1 + 0.05 * (9 - step if falls else step)
        for group in (2 * step, 2 * step + 1):
            for sample, more in enumerate((0.0, 0.02 * (group % 2))):
                ids = {"group": group, "sample": sample, "version": max(0, step - 1), "newest": step}
                rows.append(
                    {"event": "completed", "time": step + 0.1, "reward": str(height + more), "length": 2, **ids}
                )
            rows.append({"event": "trained", "time": step + 0.5, "group": group, "step": step, "version": step})
        rows.append({"event": "bumped", "time": step + 1.0, "step": step, "version": step + 1, "updates": step + 1})
    return stream.Curve(LoopLedger(rows), CONFIG)


def test_the_gain_is_that_of_the_last_fifth_over_the_first() -> None:
    curve = rising()
    assert curve.first == pytest.approx(0.13)
    assert curve.gain == pytest.approx(0.4)
    assert curve.error == pytest.approx((2 * 0.0026 / 3 / 4) ** 0.5)  # two windows of four groups each
    assert curve.lag == pytest.approx(0.9)
    assert rising(falls=True).gain < 0


def test_a_reward_is_reached_in_steps_and_in_seconds() -> None:
    curve = rising()
    assert curve.ids(0.3) == {
        "gain": "0.4",
        "error": f"{curve.error:.6g}",
        "constant": f"{curve.constant:.6g}",
        "lag": "0.9",
        "reached_steps": 6,
        "reached_s": "6",
    }
    assert "reached_s" not in curve.ids(0.9)


def test_the_best_constant_answer_has_the_right_form_and_is_sometimes_right() -> None:
    assert 0.625 < rising().constant < 1.0  # 0.625: one digit and END, but never the right digit
