"""Ledgers of another system's desk, which the kit's would not write."""

from __future__ import annotations

from typing import Any

import pytest

from kit.errors import BadInput
from kit.labs.share.ledgers import judged_loop, loops_in, settled
from kit.results.records import Row
from kit.share.judge.books import DeskLedger
from kit.share.judge.devices import one_owner
from kit.share.judge.ends import no_deadlock
from kit.share.judge.plans import plan_valid
from kit.share.judge.progress import progress_ended, progress_true
from kit.share.judge.replicas import empty_set_suspends, routed_to_awake, version_after_wake
from kit.share.judge.requests import no_request_lost, no_starvation, priority_kept
from kit.stream.judge.history import LoopLedger

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


# -- the example of docs/ledger.md, with changes -------------------------------------------------------------------------------

Event = dict[str, Any]


def a(event: str, **ids: Any) -> Event:
    return {"event": event, "pipeline": "a", **ids}


def b(event: str, **ids: Any) -> Event:
    return {"event": event, "pipeline": "b", **ids}


def wakes(replica: int) -> list[Event]:
    return [
        a("expand", replica=replica, devices=(replica,)),
        a("expanded", replica=replica),
        a("joined", replica=replica),
    ]


def sleeps(replica: int) -> list[Event]:
    return [a("left", replica=replica), a("shrunk", replica=replica)]


def requested(group: int, version: int = 0, replica: int = 1) -> list[Event]:
    ids: Event = {"group": group, "sample": 0, "replica": replica}
    return [a("sent", **ids), a("started", **ids, version=version), a("completed", **ids, version=version)]


def updates(version: int, *replicas: int) -> list[Event]:
    published = [a("published", version=version, replica=replica) for replica in replicas]
    return [
        a("bumped", version=version),
        a("hold", version=version),
        a("sync", version=version, replicas=replicas),
        *published,
    ]


SETTINGS: Event = {**LIMITS, "request_ms": 60_000}
CLUSTERS = a("clusters", trainer=(0,), generation=(0, 1), tp=1)
BASE = a("published", replica=1, version=0)
GENERATION = a("granted", kind="generation", devices=(1,))
BEGINS = [SETTINGS, CLUSTERS, a("acquire", kind="generation"), *wakes(1), GENERATION, BASE]
TRAINED = [
    a("acquire", kind="training"),
    a("granted", kind="training", devices=(0,)),
    *updates(1, 1),
    a("release", kind="training"),
]
ENDS = [
    a("release", kind="generation"),
    *sleeps(1),
    a("released", kind="generation"),
    a("ended", why="done"),
    {"event": "ended", "pipeline": "desk", "why": "done"},
]


def answer(rule: Any, *rows: Event) -> str:
    """The first violation, or nothing."""
    seen = settled(rule, ledger(*rows))
    return seen.why if seen.value else ""


def test_a_right_ledger_passes() -> None:
    for rule in (one_owner, no_request_lost, routed_to_awake, version_after_wake, no_starvation, no_deadlock):
        assert not answer(rule, *BEGINS, *requested(0), *TRAINED, *requested(1, 1), *ENDS)


def test_a_cluster_is_granted_its_own_devices() -> None:
    elsewhere = [a("acquire", kind="training"), a("granted", kind="training", devices=(1,))]
    assert "its own are 0" in answer(one_owner, SETTINGS, CLUSTERS, *elsewhere, *BEGINS[2:])
    assert "there is no kind 'traning'" in answer(one_owner, *BEGINS, a("granted", kind="traning", devices=(0,)))
    assert "there is no device 1" in answer(one_owner, {**SETTINGS, "devices": 1}, *BEGINS[1:], *ENDS)


def test_a_woken_replica_is_due_the_current_version_not_what_was_ordered_before_it_slept() -> None:
    two = [CLUSTERS, *wakes(0), *wakes(1), *updates(1, 0, 1)]
    stale = [SETTINGS, *two, *sleeps(0), *updates(2, 1), *wakes(0), a("published", replica=0, version=1)]
    assert "version 2 was ordered" in answer(version_after_wake, *stale)


def test_a_replica_may_finish_what_it_has_before_it_sleeps() -> None:
    asked, began, done = requested(0)
    assert not answer(no_request_lost, *BEGINS, asked, began, ENDS[0], ENDS[1], done, *ENDS[2:])
    assert "never sent again" in answer(no_request_lost, *BEGINS, asked, began, *ENDS)


def test_version_0_needs_no_published() -> None:
    unwritten = [row for row in BEGINS if row is not BASE]
    for rule in (routed_to_awake, version_after_wake, empty_set_suspends):
        assert not answer(rule, *unwritten, *requested(0), *TRAINED, *requested(1, 1), *ENDS)
    bare = [*unwritten, *requested(0), *TRAINED, *sleeps(1), *wakes(1), *requested(1, 1), *ENDS]
    assert "has no weights" in answer(routed_to_awake, *bare)
    assert "has received no weights" in answer(version_after_wake, *bare)


def test_a_pipeline_that_trains_on_the_devices_of_its_replicas_waits_for_nobody() -> None:
    both = a("clusters", trainer=(0, 1), generation=(0, 1), tp=1)
    trains = [a("acquire", kind="training"), *sleeps(1), a("granted", kind="training", devices=(0, 1))]
    later = [{**a("bumped", version=1), "time": 1000.0}, {**a("release", kind="training"), "time": 1000.0}]
    begun = [SETTINGS, both, *BEGINS[2:], *trains]
    assert not answer(no_starvation, *begun, *later)
    none = [{**row, "time": 1000.0} for row in [*later, a("progress", completed=0, target=2)]]
    assert "has demand and no replica" in answer(
        no_starvation, *begun, *none, {**a("progress", completed=1, target=2), "time": 2000.0}
    )


def test_a_plan_may_leave_a_request_to_the_next_ones_within_the_watchdogs_time() -> None:
    waits = [a("acquire", kind="training"), a("queued", kind="training", cluster="trainer")]
    shrinks = {
        "event": "plan",
        "pipeline": "desk",
        "number": 1,
        "shrinks": "b.generation:0",
        "grants": "",
        "expands": "",
    }
    grants = {**shrinks, "number": 2, "shrinks": "", "grants": "a.trainer:0"}
    commit = {"event": "commit", "pipeline": "desk", "number": 1}
    asleep = [b("left", replica=0), b("shrunk", replica=0)]
    woken = [b("clusters", generation=(0,), tp=1), b("expand", replica=0, devices=(0,)), b("expanded", replica=0)]
    begun = [SETTINGS, CLUSTERS, *woken, *waits]
    assert not answer(
        priority_kept, *begun, shrinks, *asleep, commit, grants, a("granted", kind="training", devices=(0,))
    )
    late = {**shrinks, "number": 2, "shrinks": "", "time": 100.0}
    nothing = {**shrinks, "shrinks": ""}
    assert not answer(priority_kept, *begun, shrinks, *asleep, commit)
    assert "the devices of a.trainer were available" in answer(priority_kept, *begun, shrinks, *asleep, commit, late)
    assert "training of a waits" in answer(priority_kept, *begun, *asleep, nothing, commit, late)
    assert not answer(priority_kept, *begun, nothing, commit, late)  # a replica may finish what it has
    generation = {**shrinks, "shrinks": "", "grants": "a.generation:1", "expands": "a.generation:1"}
    assert not answer(plan_valid, SETTINGS, CLUSTERS, generation)


def test_a_plan_may_state_no_demand_as_zero() -> None:
    plan = {"event": "plan", "pipeline": "desk", "number": 1, "shrinks": "", "grants": "", "expands": ""}
    assert not answer(progress_ended, *BEGINS, {**plan, "demand": "a:0"})
    assert "states the demand" in answer(progress_ended, *BEGINS, {**plan, "demand": "a:1"})
    asks = a("progress", completed=1, target=3)
    assert not answer(progress_ended, *BEGINS, asks, {**plan, "demand": "a:2"})
    assert "states the demand" in answer(progress_ended, *BEGINS, asks, {**plan, "demand": "a:0"})


def test_limits_that_are_no_number_are_named() -> None:
    with pytest.raises(BadInput, match="the row `limits` of the ledger has devices=0,1; write a whole number"):
        ledger({**SETTINGS, "devices": (0, 1)})


def loops(*rows: Event) -> dict[str, LoopLedger]:
    return dict(loops_in([Row(metric=str(row["event"]), time=float(at), ids=ids(row)) for at, row in enumerate(rows)]))


def ids(row: Event) -> Event:
    return {name: value for name, value in row.items() if name not in ("event", "time")}


def test_the_loop_of_another_system_is_judged() -> None:
    capacity = a("capacity", window=0, group=1)
    trained = a("trained", group=0, version=0)
    whole = [capacity, *BEGINS, *requested(0), trained, *TRAINED, a("cleared", group=0, step=0), *ENDS]
    right = loops(*whole)["a"]
    assert right.foreign
    assert {name: seen.why for name, seen in judged_loop(right) if seen.value} == {}
    twice = loops(*whole[:-6], trained, *whole[-6:])["a"]
    assert "trained_once" in {name for name, seen in judged_loop(twice) if seen.value}
    begins = [{"event": "begins", "pipeline": "desk", "core": "desk"}, SETTINGS, capacity, {**a("begins"), "core": "a"}]
    same = loops(*begins, *whole[2:])["a"]
    assert [row.event for row in same.rows] == [row.event for row in right.rows if row.event != "limits"]
