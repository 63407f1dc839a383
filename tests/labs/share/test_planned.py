"""The least time of paced pipelines, computed before a run: by hand, and against simulated runs of the load of the bench."""

from __future__ import annotations

from typing import Any

import pytest

from kit.errors import BadInput
from kit.labs.bench_share.loads import EVEN, STANDARD
from kit.labs.share import tables
from kit.labs.share.drive import simulate_alone, simulate_pipelines
from kit.labs.share.planned import planned_work
from kit.loop.messages import Memory
from kit.share.judge.books import DeskLedger
from kit.train.draws import reward_wait_s
from tests.labs.share.conftest import share, simulated

WAITS: dict[str, Any] = {**STANDARD, "steps": 1, "groups": 3, "simulated": True}


def test_the_bound_of_equal_answers_by_hand() -> None:
    by = planned_work(share(**EVEN, steps=1))
    generating = {"a": 24 * 2 * 12 * 0.02, "b": 24 * 2 * 6 * 0.02}
    training = 24 * 2 * 0.005
    assert by.work == pytest.approx({name: seconds + training for name, seconds in generating.items()})
    assert by.path == pytest.approx({name: seconds / 2 + training for name, seconds in generating.items()})
    assert by.bound == pytest.approx(sum(by.work.values()) / 2)


def test_a_pipeline_that_waits_may_set_the_bound() -> None:
    one = {**EVEN, "steps": 1, "groups": 1, "a.reward_ms": (9000, 9000)}
    by = planned_work(share(**one))
    assert by.bound == by.path["a"] == pytest.approx(2 * 12 * 0.02 / 2 + 9 + 2 * 0.005)


@pytest.mark.parametrize("change", [{"pace_ms": 0}, {"a.answer": (4, 8)}, {"train_pace_ms": 0}, {"window": 1}])
def test_work_that_is_not_known_before_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="the work of pipeline a is not known before a run"):
        planned_work(share(**{**EVEN, **change}))


@pytest.mark.parametrize("change", [{"tools": 1}, {"tail": True, "tools": 1, "tp": 2, "infer_tp": 2, "train": (0, 1)}])
def test_tools_that_cannot_work_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="tools=1 needs"):
        share(**change)
    with pytest.raises(
        BadInput, match="reward_ms=\\[9, 1\\] must be the shortest and the longest wait, but 9 exceeds 1"
    ):
        share(reward_ms=(9, 1))


@pytest.fixture(scope="module")
def ledger() -> DeskLedger:
    rows = Memory()
    simulate_pipelines(share(**WAITS), rows=rows)
    return DeskLedger(rows)


def test_no_loop_of_the_load_is_faster_than_its_bound(ledger: DeskLedger) -> None:
    config = share(**WAITS)
    by, together = planned_work(config), ledger.rows[-1].time
    alone = {name: simulate_alone(config, name, (0, 1)) for name in config.names}
    assert all(seconds > by.path[name] for name, seconds in alone.items())
    assert by.bound < together < sum(alone.values())
    # What a replica did before it was put to sleep is done again.
    used = tables.uses(ledger).groupby("use")["seconds"].sum()
    assert sum(by.work.values()) <= used["generating"] + used["training"] + 1e-6
    assert used.sum() == pytest.approx(2 * together)


def test_a_replica_does_not_work_while_all_its_requests_wait_for_tools(ledger: DeskLedger) -> None:
    assert {row.who for row in ledger.of("tool_called")} == {"b"}
    without = DeskLedger([row for row in ledger.rows if row.event != "tool_called"])
    seconds = [sum(call.right - call.left for call in tables.work(book)) for book in (ledger, without)]
    assert seconds[0] < seconds[1]


def test_a_step_that_waits_for_rewards_counts_as_generated(ledger: DeskLedger) -> None:
    own = [row for row in ledger.rows if row.who == "b"]
    complete = next(row for row in own if row.event == "progress" and row["completed"] == row["target"])
    asked = next(row for row in own if row.event == "acquire" and row["kind"] == "training")
    waited = reward_wait_s(share(**WAITS).loops["b"].seed, (1000, 8000), 0)
    assert asked.time - complete.time == pytest.approx(waited, abs=0.01)


def test_every_check_of_a_simulated_run_of_the_load_passes() -> None:
    verdict, _ = simulated(**WAITS)
    assert not [check.check for check in verdict if check.passed is False]
