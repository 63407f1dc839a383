"""What a desk in place of the kit's may do in several ways: each passes, and what is wrong in all of them fails."""

from __future__ import annotations

from typing import Any

import pytest

from kit.labs.share.ledgers import settled
from kit.loop.messages import Command, Event, Map
from kit.results.rules import Missing, NotMeasured
from kit.share.judge import RULES
from kit.share.judge.books import DeskLedger
from kit.share.member import Member
from kit.share.state import Cluster
from tests.share.chaos import violations

Facts = dict[str, Any]
LIMITS: Facts = {"event": "limits", "devices": 2, "pipeline": "desk", "watchdog_ms": 500}


def of(name: str, event: str, **ids: Any) -> Facts:
    return {"event": event, "pipeline": name, **ids}


def joins(name: str, **clusters: Any) -> list[Facts]:
    return [of(name, "register"), of(name, "clusters", tp=1, **clusters), of(name, "admit"), of(name, "admitted")]


def desk(event: str, number: int, idle: tuple[int, ...] = (), **what: str) -> Facts:
    operations = {"shrinks": "", "grants": "", "expands": ""} if event == "plan" else {}
    return of("desk", event, number=number, idle=idle, **{**operations, **what})


def wakes(name: str, replica: int, device: int) -> list[Facts]:
    return [
        of(name, "expand", replica=replica, devices=(device,)),
        of(name, "expanded", replica=replica),
        of(name, "joined", replica=replica),
    ]


def sleeps(name: str, replica: int, device: int) -> list[Facts]:
    return [of(name, event, replica=replica, devices=(device,)) for event in ("left", "shrink", "shrunk")]


def asks(name: str, kind: str) -> list[Facts]:
    cluster = "generation" if kind == "generation" else "trainer"
    return [of(name, "acquire", kind=kind), of(name, "queued", kind=kind, cluster=cluster)]


def found(rows: list[Facts], check: str) -> str:
    return violations([{"time": at / 100, **row} for at, row in enumerate(rows)]).get(check, "")


def leaving(first: tuple[int, ...], second: tuple[int, ...], gone: tuple[int, ...]) -> list[Facts]:
    """A pipeline leaves that trains on device 0, and has a replica on device 1."""
    return [
        LIMITS,
        *joins("a", trainer=(0,), generation=(1,)),
        *asks("a", "generation"),
        desk("plan", 1, (0, 1), expands="a.generation:0"),
        *wakes("a", 0, 1),
        of("a", "granted", kind="generation", cluster="generation", devices=(1,)),
        desk("commit", 1, (0,)),
        *asks("a", "training"),
        desk("plan", 2, (0,), grants="a.trainer:0"),
        of("a", "granted", kind="training", cluster="trainer", devices=(0,)),
        desk("commit", 2),
        of("a", "unregister"),
        desk("plan", 3, first, shrinks="a.generation:0"),
        *sleeps("a", 0, 1),
        desk("commit", 3, second),
        of("a", "gone", how="unregistered", idle=gone),
        of("a", "unregistered"),
    ]


@pytest.mark.parametrize(
    ("first", "second", "gone", "wrong"),
    [
        pytest.param((0,), (0, 1), (0, 1), "", id="a leaving trainer's device is idle at once"),
        pytest.param((), (1,), (0, 1), "", id="or once the pipeline is gone"),
        pytest.param((), (1,), (1,), "`gone` of a", id="not later"),
        pytest.param(
            (1,), (1,), (0, 1), "`plan` of desk, number 3", id="a replica's device is not idle while it is awake"
        ),
    ],
)
def test_when_a_leaving_trainers_device_is_idle(
    first: tuple[int, ...], second: tuple[int, ...], gone: tuple[int, ...], wrong: str
) -> None:
    answer = found(leaving(first, second, gone), "devices_conserved")
    assert wrong in answer
    assert bool(answer) == bool(wrong)


@pytest.mark.parametrize(
    ("requests", "grants", "wrong"), [(1, 1, False), (2, 1, False), (2, 2, False), (1, 2, True), (2, 3, True)]
)
def test_a_request_that_is_repeated_may_be_granted_as_often(requests: int, grants: int, wrong: bool) -> None:
    rows = [
        LIMITS,
        *joins("a", trainer=(0,), generation=(1,)),
        *asks("a", "generation") * requests,
        desk("plan", 1, (0, 1), expands="a.generation:0"),
        *wakes("a", 0, 1),
        *[of("a", "granted", kind="generation", cluster="generation", devices=(1,))] * grants,
        desk("commit", 1, (0,)),
    ]
    assert ("no request waits for it" in found(rows, "no_request_lost")) == wrong


def staggered(*, b_left: bool, waits: int = 5, notes: int = 1) -> list[Facts]:
    """Of a, b and c, a trains late; b starts at its limit, has trained before a, and has left or not."""
    hands_over = [
        *asks("b", "training"),
        of("b", "granted", kind="training", cluster="trainer", devices=(1,)),
        of("b", "release", kind="training"),
    ]
    leaves = [of("b", "unregister"), of("b", "gone", how="unregistered", idle=(0, 1)), of("b", "unregistered")]
    return [
        {**LIMITS, "admission_ms": 50},
        *joins("a", trainer=(0,), generation=(0,)),
        *joins("b", trainer=(1,), generation=(1,))[:-1],
        *[of("a", "progress", completed=0, target=1)] * waits,
        *[of("b", "admission_limit", side="starts")] * notes,
        of("b", "admitted"),
        *(hands_over if b_left else []),
        *(leaves if b_left else []),
        *joins("c", trainer=(0,), generation=(0,)),
    ]


def test_who_starts_after_the_one_before_it_which_has_left() -> None:
    assert found(staggered(b_left=True), "admission") == ""
    assert "b has not handed over" in found(staggered(b_left=False), "admission")


@pytest.mark.parametrize(
    ("waits", "notes", "wrong"),
    [
        (5, 1, ""),
        (5, 0, ""),
        (3, 1, "`admission_limit` of b (row 11, 0.110 s): its wait has not been that long"),
        (3, 0, "a has not handed over and the limit is not reached"),
    ],
)
def test_who_starts_at_the_limit_has_waited_for_it_whether_the_desk_notes_it_or_not(
    waits: int, notes: int, wrong: str
) -> None:
    answer = found(staggered(b_left=True, waits=waits, notes=notes), "admission")
    assert wrong in answer
    assert bool(answer) == bool(wrong)


@pytest.mark.parametrize("notes", [True, False])
@pytest.mark.parametrize("waits", [True, False])
def test_who_trains_again_waits_for_the_next_one_whether_the_desk_notes_the_request_or_not(
    waits: bool, notes: bool
) -> None:
    """b comes first, or it reaches its limit; or a trains again before b is set up."""
    again = asks("a", "training")[: 2 if notes else 1]
    rows = [
        {**LIMITS, "admission_ms": 5000},
        *joins("a", trainer=(0,), generation=(1,)),
        *asks("a", "training"),
        of("a", "granted", kind="training", cluster="trainer", devices=(0,)),
        of("a", "release", kind="training"),
        *joins("b", trainer=(1,), generation=(1,)),
        *again,
        *asks("a", "training")[:1],  # repeated
        *[of("b", "acquire", kind="generation")] * waits,
        of("a", "granted", kind="training", cluster="trainer", devices=(0,)),
    ]
    assert ("b is not set up" in found(rows, "admission")) == (not waits)


def test_the_late_failure_of_ranks_that_were_replaced_is_not_that_of_the_new_ones() -> None:
    rows = [
        LIMITS,
        *joins("a", trainer=(0,), generation=(0, 1)),
        *asks("a", "generation"),
        desk("plan", 1, (0, 1), expands="a.generation:0,1"),
        *(of("a", "expand", replica=replica, devices=(replica,)) for replica in (0, 1)),
        of("a", "died", who="a", replica=1, core="desk"),
        of("a", "restarted", who="a", replica=1, core="desk"),
        *wakes("a", 0, 0)[1:],
        of("a", "granted", kind="generation", cluster="generation", devices=(0,)),
        desk("commit", 1, (1,)),
        of("a", "error", of="expand", who="a", replica=1, core="desk"),
        desk("plan", 2, (1,), expands="a.generation:1"),
        of("a", "expand", replica=1, devices=(1,)),
    ]
    assert found(rows, "plan_valid") == ""
    failed = [row for row in rows if row["event"] not in ("died", "restarted")]
    assert "replica 1 of a expands but is active, removed or dead" in found(failed, "plan_valid")


@pytest.mark.parametrize("second", [{"shrinks": "b.generation:0"}, {"expands": "a.generation:0"}], ids=str)
@pytest.mark.parametrize(("seconds", "wrong"), [(0.4, False), (0.6, True)])
def test_plans_may_leave_a_request_to_the_next_ones_for_as_long_as_the_watchdog(
    second: dict[str, str], seconds: float, wrong: bool
) -> None:
    rows = [
        {**LIMITS, "devices": 3},
        *joins("a", trainer=(0,), generation=(2,)),
        *joins("b", trainer=(1,), generation=(1,)),
        *asks("b", "generation"),
        desk("plan", 1, (0, 1, 2), expands="b.generation:0"),
        *wakes("b", 0, 1),
        of("b", "granted", kind="generation", cluster="generation", devices=(1,)),
        desk("commit", 1, (0, 2)),
        *asks("a", "training"),
        {**desk("plan", 2, (0, 2), **second), "time": 1.0},
        {**desk("commit", 2), "time": 1.0},
        {**desk("plan", 3), "time": 1.0 + seconds},
    ]
    assert ("waits although its devices are available" in found(rows, "priority_kept")) == wrong


@pytest.mark.parametrize(("dies", "wrong"), [(True, False), (False, True)])
def test_nobody_waits_for_the_answer_to_a_dead_pipeline(dies: bool, wrong: bool) -> None:
    rows = [
        LIMITS,
        *joins("a", trainer=(0,), generation=(1,)),
        *asks("a", "generation"),
        desk("plan", 1, (0, 1), expands="a.generation:0"),
        *wakes("a", 0, 1),
        of("a", "granted", kind="generation", cluster="generation", devices=(1,)),
        desk("commit", 1, (0,)),
        of("a", "planned_release", kind="generation"),
        *([of("a", "died", who="a", core="desk"), of("a", "gone", how="died", idle=(0, 1))] if dies else []),
        of("desk", "ended", why="done"),
    ]
    assert ("`planned_release` of a" in found(rows, "planned_release_once")) == wrong


@pytest.mark.parametrize("left", [True, False])
def test_one_that_had_left_need_not_be_removed_when_it_dies(left: bool) -> None:
    """A desk that writes no `gone` for it. The desk must remove one that it had."""
    rows = [
        LIMITS,
        *joins("a", trainer=(0,), generation=(1,)),
        *joins("b", trainer=(0,), generation=(1,)),
        *([of("a", "unregister"), of("a", "unregistered")] if left else []),
        of("a", "died", who="a", core="desk"),
        of("b", "died", who="b", core="desk"),
        of("b", "gone", how="died", idle=(0, 1)),
    ]
    assert ("`died` of a" in found(rows, "dead_pipeline_leaves")) is not left


@pytest.mark.parametrize(("check", "left_out"), [("devices_conserved", "idle"), ("progress_ended", "demand")])
def test_ids_that_a_desk_may_leave_out_of_its_plans(check: str, left_out: str) -> None:
    """Not even where a desk in place of the kit's is under suspicion of keeping rows away."""
    rows = leaving((0,), (0, 1), (0, 1))
    rows = [{key: value for key, value in row.items() if key != left_out} for row in rows]
    rule = next(rule for rule in RULES if rule.__name__ == check)
    with pytest.raises(NotMeasured, match=left_out) as error:
        settled(rule, DeskLedger([{"time": at / 100, **row} for at, row in enumerate(rows)]))
    assert not isinstance(error.value, Missing)


class OneCall:
    """A loop that ends with the first error."""

    def begin(self) -> tuple[str, tuple[Command, ...]]:
        return "runs", ()

    def step(self, state: str, event: Event) -> tuple[str, tuple[Command, ...]]:
        why = Command("ended", "runner", "a", why="error", error=str(event.get("why", "")))
        return state, (why,) if event.name == "error" else ()


@pytest.mark.parametrize(("of_what", "waits"), [("trainer", False), ("microbatch", True)])
def test_a_pipeline_whose_trainer_died_does_not_wait_for_the_desk(of_what: str, waits: bool) -> None:
    """The desk owes a dead pipeline nothing, and may have ended with it."""
    member = Member(OneCall(), "a", {"generation": Cluster((0,)), "trainer": Cluster((0,))})
    state, _ = member.begin()
    state, _ = member.step(state, Event("admitted", "a"))
    _, commands = member.step(state, Event("error", "a", **Map({"of": of_what, "why": "killed"})))
    assert [command.name for command in commands] == (["progress_end", "unregister"] if waits else ["ended"])


@pytest.mark.parametrize(
    ("expands", "wrong"),
    [
        ("a.generation:0,1", ""),
        ("a.generation:0 a.generation:1", ""),
        ("a.generation:0 a.generation:1 a.generation:0", "replica 0 of a gets the devices [0], which are not free"),
    ],
)
def test_a_plan_may_name_replicas_of_a_pipeline_together_or_one_by_one(expands: str, wrong: str) -> None:
    rows = [LIMITS, *joins("a", generation=(0, 1)), *asks("a", "generation"), desk("plan", 1, (0, 1), expands=expands)]
    assert wrong in (answer := found(rows, "plan_valid"))
    assert bool(answer) == bool(wrong)


@pytest.mark.parametrize("demand", ["", "a:1"])
@pytest.mark.parametrize("leaves", [True, False])
def test_a_plan_need_not_list_the_demand_of_a_pipeline_that_leaves(leaves: bool, demand: str) -> None:
    rows = [
        LIMITS,
        *joins("a", generation=(0,)),
        of("a", "progress", completed=0, target=2),
        *([of("a", "progress_end"), of("a", "unregister")] if leaves else []),
        of("a", "progress", completed=1, target=2),
        desk("plan", 1, (0,), demand=demand),
    ]
    assert bool(found(rows, "progress_ended")) == (not leaves and not demand)


@pytest.mark.parametrize(("to", "wrong"), [("b", ""), ("", "its devices [0] are not idle")])
def test_another_pipeline_may_hold_the_devices_of_a_dead_one_when_it_is_removed(to: str, wrong: str) -> None:
    rows = [
        LIMITS,
        *joins("a", generation=(0,)),
        *joins("b", trainer=(0,)),
        *asks("a", "generation"),
        desk("plan", 1, (0,), expands="a.generation:0"),
        *wakes("a", 0, 0),
        of("a", "died", who="a", core="desk"),
        *([*asks("b", "training"), of("b", "granted", kind="training", cluster="trainer", devices=(0,))] if to else []),
        of("a", "gone", how="died", idle=()),
    ]
    assert wrong in (answer := found(rows, "dead_pipeline_leaves"))
    assert bool(answer) == bool(wrong)


@pytest.mark.parametrize(("waits_ms", "wrong"), [(400, False), (600, True)])
def test_a_desk_may_plan_later_for_several_events_at_once(waits_ms: int, wrong: bool) -> None:
    """It may wait as long as the watchdog. Then its trainer works for a second, which does not count."""
    told = [
        LIMITS,
        *joins("a", trainer=(0,), generation=(1,)),
        {**of("a", "acquire", kind="training"), "core": "desk"},
        *asks("a", "training")[1:],
        {**of("desk", "alarm", number=1), "core": "desk"},
        desk("plan", 1, (0, 1), grants="a.trainer:0"),
        of("a", "granted", kind="training", cluster="trainer", devices=(0,)),
        {**of("a", "alarm", number=2), "core": "a"},
        {**of("a", "release", kind="training"), "core": "desk"},
    ]
    events = [row["event"] for row in told]
    planned, over = events.index("alarm"), events.index("granted") + 1
    seconds = [waits_ms / 1000 * (at >= planned) + (at >= over) for at in range(len(told))]
    rows = [{"time": time, **row} for time, row in zip(seconds, told, strict=True)]
    answer = violations(rows).get("priority_kept", "")
    assert ("were available for 0.600 s and no plan was made" in answer) == bool(answer) == wrong
