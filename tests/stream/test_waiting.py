"""What a loop without an end waits for is named from its ledger."""

from __future__ import annotations

import pytest

from kit.stream.judge.history import LoopLedger
from kit.stream.judge.waiting import waiting_for
from tests.stream.ledgers import Row, System

BEGUN = [
    {"event": "capacity", "groups_per_step": 2, "steps": 3},
    {"event": "sync_begin", "version": 0},
    {"event": "sync", "version": 0, "replicas": [0, 1], "to": "sync"},
    {"event": "published", "version": 0, "replica": 0},
]
SYNCED = [*BEGUN, {"event": "published", "version": 0, "replica": 1}, {"event": "synced", "version": 0}]
STEP = [
    *SYNCED,
    {"event": "reserved", "group": 4, "version": 0},
    {"event": "sent", "group": 4, "sample": 1, "replica": 1},
    {"event": "completed", "group": 4, "sample": 1, "replica": 1, "version": 0},
    {"event": "ready", "group": 4},
]
TRAINS = [
    *STEP,
    {"event": "selected", "group": 4, "step": 0, "version": 0},
    {"event": "begin", "step": 0, "update": 0, "to": "trainer"},
    {"event": "microbatch", "step": 0, "update": 0, "groups": "4", "to": "trainer"},
    {"event": "done", "of": "begin", "step": 0, "update": 0, "core": "a"},
]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (BEGUN, "the sync of version 0 (row 1) has not ended, not published on replica 1"),
        (STEP[:-2], "1 request on replica 1 unanswered, first sample 1 of group 4 (sent in row 7)"),
        (STEP, "no command is unanswered; the version is 0 of 3; 1 group in the buffer, 1 complete"),
        (TRAINS, "the trainer has not answered microbatch of step 0 (row 12)"),
        ([*TRAINS, {"event": "acquire", "kind": "training"}], "devices for training not granted (requested in row 14)"),
        ([*STEP, {"event": "select", "version": 0, "to": "sampler"}], "select unanswered (row 10)"),
        ([*STEP, {"event": "hold", "version": 0}], "dispatch is held since row 10"),
        (
            [*STEP, {"event": "selected", "group": 4, "step": 0}],
            "step 0 has 1 group of 2; 0 groups in the buffer, 0 complete",
        ),
        ([*STEP, {"event": "exhausted"}], "the data ended in row 10"),
    ],
)
def test_what_waits_is_named(rows: list[Row], words: str) -> None:
    assert words in waiting_for(LoopLedger([{"time": float(place), **row} for place, row in enumerate(rows)]))


def test_a_loop_that_ended_waits_for_nothing() -> None:
    assert waiting_for(LoopLedger(System().run())).startswith("no command is unanswered; the version is 4")
