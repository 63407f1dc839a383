"""Ledgers of another system's desk, which the kit's would not write."""

from __future__ import annotations

from typing import Any

from kit.labs.share.ledgers import settled
from kit.share.books import DeskLedger
from kit.share.judge import no_deadlock, no_starvation, progress_true

LIMITS = {"event": "limits", "pipeline": "desk", "devices": 2, "request_ms": 500}
TRAINS = {"event": "acquire", "pipeline": "a", "kind": "training"}


def registers(name: str, devices: str = "0") -> dict[str, Any]:
    return {"event": "clusters", "pipeline": name, "trainer": devices, "tp": 1}


def ledger(*rows: dict[str, Any]) -> DeskLedger:
    return DeskLedger([{"time": float(at), **row} for at, row in enumerate(rows)])


def test_an_answer_that_comes_after_the_desk_has_ended_is_read() -> None:
    over = {"event": "ended", "pipeline": "desk", "why": "done"}
    error = {"event": "error", "pipeline": "a", "of": "desk", "why": "the desk is over"}
    ends = {"event": "ended", "pipeline": "a", "why": "error", "error": "the desk is over"}
    assert "ended with an error" in settled(no_deadlock, ledger(LIMITS, registers("a"), TRAINS, over, error, ends)).why


def test_a_replica_of_a_pipeline_that_registered_none_holds_nothing() -> None:
    woken = {"event": "expand", "pipeline": "b", "replica": 0}
    expired = {"event": "expired", "pipeline": "a", "kind": "training"}
    asks = (LIMITS, registers("b"), woken, registers("a"), TRAINS, expired)
    assert "device 0: nobody else holds it" in settled(no_starvation, ledger(*asks)).why


def test_a_pipeline_that_takes_the_place_of_a_dead_one_begins_without_groups() -> None:
    capacity = {"event": "capacity", "pipeline": "a", "groups_per_step": 2}
    ready, trained = (
        [{"event": event, "pipeline": "a", "group": at} for at in (0, 1)] for event in ("ready", "trained")
    )
    report = {"event": "progress", "pipeline": "a", "completed": 2, "target": 2}
    first = (LIMITS, capacity, *ready, *trained, {"event": "died", "pipeline": "a"}, capacity)
    assert settled(progress_true, ledger(*first, report)).value == 1
    assert settled(progress_true, ledger(*first, *ready, {"event": "bumped", "pipeline": "a"}, report)).value == 0
