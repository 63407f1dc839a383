"""The seconds of a loop, from rows written by hand: every second belongs to one activity, and replicas are idle without a request."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from kit.errors import BadInput
from kit.loop.messages import Command
from kit.results.records import Row
from kit.stream.ports import Meter, StepLog, covered, drifted, spent
from kit.stream.sides import silent

ROWS: list[tuple[float, str, dict[str, Any]]] = [
    (0.0, "joined", {"replica": 0}),
    (0.0, "joined", {"replica": 1}),
    (1.0, "sent", {"group": 0, "sample": 0, "replica": 0}),  # both were idle for 1 s
    (3.0, "sent", {"group": 0, "sample": 1, "replica": 1}),  # one of two for 2 s
    (4.0, "completed", {"group": 0, "sample": 0, "replica": 0, "core": "a"}),  # none for 1 s
    (6.0, "begin", {"step": 0, "to": "trainer"}),  # one of two for 2 s
    (7.0, "done", {"of": "begin", "step": 0, "core": "a"}),  # training: 1 s
    (7.0, "cancelled", {"group": 0, "sample": 1, "replica": 1, "core": "a"}),
    (9.0, "sync_begin", {"version": 1}),  # both for 2 s
    (10.0, "synced", {"version": 1, "core": "a"}),  # sync: 1 s, both idle
    (10.0, "died", {"replica": 1}),
    (13.0, "ended", {"why": "steps"}),  # the only one left for 3 s
]


def test_a_span_outside_of_the_moments_covers_nothing() -> None:
    spans = [(6.0, 9.0), (0.0, 1.0), (1.0, 3.0), (2.5, 3.5)]
    assert covered(spans) == 6.5
    assert covered(spans, since=2.0, until=5.0) == 1.5


def rows() -> list[Row]:
    return [Row(metric=event, time=time, ids=ids) for time, event, ids in ROWS]


def test_every_second_belongs_to_one_activity() -> None:
    seconds = spent(rows())
    assert {name: seconds[name] for name in ("training", "logprobs", "sync", "exposed_generation", "total")} == {
        "training": 1.0,
        "logprobs": 0.0,
        "sync": 1.0,
        "exposed_generation": 11.0,
        "total": 13.0,
    }


def test_idle_seconds_are_the_mean_of_the_replicas_that_are_there() -> None:
    assert spent(rows())["replicas_idle"] == pytest.approx(1 + 2 / 2 + 0 + 2 / 2 + 1 / 2 + 2 + 1 + 3)


def test_a_request_that_is_sent_again_leaves_its_first_replica() -> None:
    again = [*rows()[:3], Row(metric="sent", time=2.0, ids={"group": 0, "sample": 0, "replica": 1})]
    again += [Row(metric="ended", time=4.0, ids={})]
    assert spent(again)["replicas_idle"] == pytest.approx(1 + 1 / 2 + 2 / 2)


def test_a_late_answer_of_a_replica_that_the_request_has_left_changes_nothing() -> None:
    late = [*rows()[:3], Row(metric="sent", time=1.0, ids={"group": 0, "sample": 0, "replica": 1})]
    late += [
        Row(metric="completed", time=2.0, ids={"group": 0, "sample": 0, "replica": 0, "core": "a"}),
        Row(metric="ended", time=5.0, ids={}),
    ]
    assert spent(late)["replicas_idle"] == pytest.approx(1 + 1 / 2 + 3 / 2)


def test_the_drift_of_tokens_by_hand() -> None:
    found = drifted([0.0, math.log(2), -math.log(2)])
    assert found["drift_mean"] == pytest.approx(0.0)
    assert found["drift_mismatch"] == pytest.approx(2 / 3 * math.log(2))
    assert found["drift_ratio"] == pytest.approx((1 + 2 + 0.5) / 3)
    assert found["drift_kl"] == pytest.approx((0 + (2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2))) / 3)
    assert all(math.isfinite(value) for value in drifted([5000.0]).values())


def test_a_replica_has_left_when_the_core_reads_it_and_not_when_the_desk_writes_it() -> None:
    on_its_way = [*rows()[:3], Row(metric="left", time=2.0, ids={"replica": 1, "to": "a", "pipeline": "a"})]
    on_its_way += [
        Row(metric="left", time=4.0, ids={"replica": 1, "core": "a", "pipeline": "a"}),
        Row(metric="ended", time=5.0, ids={}),
    ]
    assert spent(on_its_way)["replicas_idle"] == pytest.approx(1 + 3 / 2 + 0)


@pytest.mark.parametrize("value", ["", None, (1, 2)])
def test_an_id_of_metrics_that_is_no_number_is_named(value: Any) -> None:
    meter = Meter()
    for row in rows():
        meter.see(row)
    metrics = Command("metrics", "log", step=0, version=1, update=0, reward="0.5", loss=value)
    with pytest.raises(
        BadInput, match=rf"^loss={re.escape(repr(value))} is no number, and a logger takes only numbers$"
    ):
        StepLog(meter, silent).send(metrics)
