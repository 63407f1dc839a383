"""Single rules of the checks of served requests and of replicas' sleep, on ledgers written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from kit.labs.share.ledgers import settled
from kit.share.judge.books import DeskLedger
from kit.share.judge.plans import MOST_SLEEPS, sleeps_in_a_row
from kit.share.judge.replicas import empty_set_suspends
from kit.share.judge.requests import no_request_lost


def rows(*names: str) -> list[dict[str, Any]]:
    """Rows of pipeline a and its replica 0. `left` is the desk's command, `shrink` the pipeline's order once it has received it."""
    request = {"group": 0, "sample": 0}
    return [
        {
            "event": name,
            "time": float(at),
            "pipeline": "a",
            "replica": 0,
            **(request if name in ("sent", "completed") else {}),
        }
        for at, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    ("names", "wrong"),
    [
        (("published", "sent", "left", "sent", "shrink", "published", "sent", "completed"), 0),  # a does not know yet
        (("published", "sent", "left", "shrink", "sent"), 1),
        (("published", "sent", "left", "sent"), 1),  # this ledger has no orders
    ],
    ids=["before it heard", "after it heard", "no orders"],
)
def test_a_pipeline_sends_until_it_hears_that_its_last_replica_left(names: tuple[str, ...], wrong: int) -> None:
    found = settled(empty_set_suspends, DeskLedger(rows(*names)))
    assert found.value == wrong, found.why


def test_a_request_that_was_sent_before_it_heard_is_stranded_too() -> None:
    lost = rows("published", "left", "sent", "shrink", "ended")
    lost[-1] |= {"why": "done"}
    assert "was never sent again after its replica left" in settled(no_request_lost, DeskLedger([*ASKED, *lost])).why
    again = rows("published", "left", "sent", "shrink", "published", "sent", "completed", "ended")
    again[-1] |= {"why": "done"}
    assert not settled(no_request_lost, DeskLedger([*ASKED, *again])).value


@pytest.mark.parametrize(
    ("between", "most"),
    [
        ({}, 20.0),
        ({"event": "progress", "completed": 1, "target": 4}, 20.0),  # the same report again and again
        ({"event": "progress", "target": 4}, 1.0),
        ({"event": "completed"}, 1.0),
        ({"event": "plan", "grants": "b.trainer:0"}, 1.0),  # another pipeline trains
    ],
    ids=["no progress", "the same report", "progress", "an answer", "for a request"],
)
def test_a_pipeline_that_only_moves_its_replicas_thrashes(between: dict[str, Any], most: float) -> None:
    about = {"time": 0.0, "pipeline": "a"}
    ledger: list[dict[str, Any]] = [
        {"event": "clusters", **about, "generation": "0"},
        {"event": "acquire", "kind": "generation", **about},
    ]
    for number in range(20):
        moves = [{"event": "plan", "shrinks": "a.generation:0"}, {"event": "left", "replica": 0}]
        ledger += [
            about | {"completed": number} | row for row in (*moves[:1], *([between] if between else ()), *moves[1:])
        ]
    ledger[3:3] = [about | row for row in ({"event": "plan"}, {"event": "left", "replica": 0})]
    measured = sleeps_in_a_row(DeskLedger(ledger))
    assert measured.value == pytest.approx(most, abs=1.0)
    assert ((measured.value or 0.0) > MOST_SLEEPS) is (most > MOST_SLEEPS)


ASKED: list[dict[str, Any]] = [
    {"event": name, "time": -1.0, "pipeline": "a", "kind": "generation", "cluster": "generation", "devices": "0"}
    for name in ("acquire", "granted")
]
