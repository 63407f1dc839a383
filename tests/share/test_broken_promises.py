"""What the contract of a desk leaves open passes, and what breaks it fails, with and without the notes that a desk may leave out."""

from __future__ import annotations

from typing import Any

import pytest

from tests.share.chaos import violations
from tests.share.driver import TRAINER_0, TRAINER_1, Drive, message
from tests.share.test_free_ways import LIMITS, Facts, asks, desk, found, joins, of, sleeps, wakes

SLOW: Facts = {**LIMITS, "watchdog_ms": 5000, "request_ms": 60_000}


def at(time: float, *rows: Facts) -> list[Facts]:
    return [{**row, "time": time} for row in rows]


def timed(rows: list[Facts], check: str) -> str:
    return violations(rows).get(check, "")


def request(name: str, kind: str, *, noted: bool) -> list[Facts]:
    return asks(name, kind)[: 2 if noted else 1]


def granted(name: str, kind: str, *devices: int, cluster: str = "trainer") -> Facts:
    return of(name, "granted", kind=kind, cluster=cluster, devices=devices)


def gives(name: str, kind: str, number: int, *devices: int, idle: tuple[int, ...] = (0, 1)) -> list[Facts]:
    """A cycle that only grants."""
    cluster = "critic" if kind == "critic" else "trainer"
    grants = f"{name}.{cluster}:{','.join(map(str, devices))}"
    rest = tuple(device for device in idle if device not in devices)
    return [
        desk("plan", number, idle, grants=grants),
        granted(name, kind, *devices, cluster=cluster),
        desk("commit", number, rest),
    ]


def begins(name: str, replica: int, device: int, number: int = 1) -> list[Facts]:
    """A cycle that wakes one replica on one of two idle devices."""
    return [
        of(name, "acquire", kind="generation"),
        desk("plan", number, (0, 1), expands=f"{name}.generation:{replica}"),
        *wakes(name, replica, device),
        granted(name, "generation", device, cluster="generation"),
        desk("commit", number, tuple({0, 1} - {device})),
    ]


# -- what waits, and who comes first ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["a", "b"])
@pytest.mark.parametrize("noted", [(), ("a",), ("b",), ("a", "b")])
def test_a_desk_may_note_only_the_requests_that_wait(noted: tuple[str, ...], first: str) -> None:
    """c trains; a asks before b. Then `first` gets the device."""
    rows = [
        LIMITS,
        *joins("a", trainer=(0,)),
        *joins("b", trainer=(0,)),
        *joins("c", trainer=(0,)),
        *request("c", "training", noted=True),
        *gives("c", "training", 1, 0),
        *request("a", "training", noted="a" in noted),
        *request("b", "training", noted="b" in noted),
        of("c", "release", kind="training"),
        *gives(first, "training", 2, 0),
    ]
    assert ("granted out of turn" in found(rows, "priority_kept")) == (first == "b")


@pytest.mark.parametrize("noted", [True, False])
@pytest.mark.parametrize("first", ["a", "b"])
def test_a_request_that_is_repeated_keeps_its_place(first: str, noted: bool) -> None:
    rows = [
        LIMITS,
        *joins("a", trainer=(0,)),
        *joins("b", trainer=(0,)),
        *joins("c", trainer=(0,)),
        *request("c", "training", noted=noted),
        *gives("c", "training", 1, 0),
        *[row for name in "aba" for row in request(name, "training", noted=noted)],
        of("c", "release", kind="training"),
        *gives(first, "training", 2, 0),
    ]
    assert ("granted out of turn" in found(rows, "priority_kept")) == (first == "b")


@pytest.mark.parametrize(("asks_first", "wrong"), [(True, False), (False, True)])
def test_a_request_may_be_noted_after_the_plan_that_its_turn_makes(asks_first: bool, wrong: bool) -> None:
    asked, noted = ({**row, "core": "desk"} if row["event"] == "acquire" else row for row in asks("a", "training"))
    rows = [LIMITS, *joins("a", trainer=(0,)), *([asked] if asks_first else [])]
    rows += [*gives("a", "training", 1, 0)[:1], noted, *gives("a", "training", 1, 0)[1:]]
    assert ("granted out of turn" in found(rows, "priority_kept")) == wrong


@pytest.mark.parametrize("event", ["withdrawn", "expired"])
def test_a_request_that_the_desk_says_is_over_keeps_its_place(event: str) -> None:
    rows = [
        LIMITS,
        *[row for name in "abc" for row in joins(name, trainer=(0,))],
        *asks("c", "training"),
        *gives("c", "training", 1, 0),
        *asks("a", "training"),
        *asks("b", "training"),
        of("a", event, kind="training", cluster="trainer"),
        {**of("c", "release", kind="training"), "core": "desk"},
        *gives("b", "training", 2, 0),
    ]
    assert "granted out of turn" in found(rows, "priority_kept")


def test_a_request_that_was_held_back_and_withdrawn_has_no_place() -> None:
    """a asks to train before b is set up, which is not noted as waiting, and gives up. What it asks later comes after b's request."""
    rows = [
        {**SLOW, "admission_ms": 60_000},
        *joins("a", trainer=(0,), generation=(1,)),
        *asks("a", "training"),
        *gives("a", "training", 1, 0),
        of("a", "release", kind="training"),
        *joins("b", trainer=(0,), generation=(1,)),
        of("a", "acquire", kind="training"),
        of("a", "release", kind="training"),
        of("b", "acquire", kind="generation"),
        *asks("b", "training"),
        *asks("a", "training"),
        *gives("b", "training", 2, 0),
    ]
    assert found(rows, "priority_kept") == ""


@pytest.mark.parametrize("noted", [True, False])
@pytest.mark.parametrize("name", ["a", "b"])
def test_who_is_held_back_by_the_admission_does_not_wait(name: str, noted: bool) -> None:
    """a may not train again before b is set up, so b's request to train comes first."""
    rows = [
        {**SLOW, "admission_ms": 60_000},
        *joins("a", trainer=(0,), generation=(1,)),
        *request("a", "training", noted=noted),
        *gives("a", "training", 1, 0),
        of("a", "release", kind="training"),
        *joins("b", trainer=(0,), generation=(1,)),
        of("a", "acquire", kind="training"),
        *request("b", "training", noted=noted),
        *gives(name, "training", 2, 0),
    ]
    assert "priority_kept" not in violations([{"time": 0.0, **row} for row in rows])
    assert ("b is not set up" in found(rows, "admission")) == (name == "a")


@pytest.mark.parametrize(("seconds", "wrong"), [(4, False), (6, True)])
def test_a_request_is_served_within_the_watchdogs_time_if_its_devices_are_idle(seconds: float, wrong: bool) -> None:
    """A replica on them may have longer to finish; a request that waits for more of the devices may keep them."""
    idle = [SLOW, *joins("b", trainer=(1,)), of("b", "acquire", kind="training")]
    rows = [*at(0, *idle), *at(seconds, *gives("b", "training", 1, 1))]
    assert ("were available for" in timed(rows, "priority_kept")) == wrong
    busy = [SLOW, *joins("a", generation=(1,)), *joins("b", trainer=(1,)), *begins("a", 0, 1), idle[-1]]
    shrinks = desk("plan", 2, (0,), shrinks="a.generation:0", grants="b.trainer:1")
    rows = [*at(0, *busy), *at(seconds, shrinks, *sleeps("a", 0, 1), granted("b", "training", 1))]
    assert timed(rows, "priority_kept") == ""
    both = [SLOW, *joins("a", trainer=(0,), critic=(1,)), *joins("b", trainer=(0, 1)), *asks("a", "training")]
    waits = [*gives("a", "training", 1, 0), *asks("b", "training"), of("a", "acquire", kind="critic")]
    rows = [*at(0, *both, *waits), *at(seconds, of("a", "release", kind="training"), *gives("b", "training", 2, 0, 1))]
    assert timed(rows, "priority_kept") == ""


def test_a_new_request_waits_anew() -> None:
    """a's first request was left to the next plan, and was withdrawn; its second one, 10 s later, is left to the next plan, too."""
    rows = [
        *at(0, SLOW, *joins("a", trainer=(0,)), *joins("b", generation=(1,)), of("a", "acquire", kind="training")),
        *at(0, *begins("b", 0, 1)),
        *at(0.1, of("a", "release", kind="training")),
        *at(10, of("b", "planned_release"), of("a", "acquire", kind="training")),
        *at(10, desk("plan", 2, (0,), shrinks="b.generation:0"), *sleeps("b", 0, 1), desk("commit", 2, (0, 1))),
        *at(10.1, of("b", "released", kind="generation"), *gives("a", "training", 3, 0)),
    ]
    assert timed(rows, "priority_kept") == ""
    kept = [row for row in rows if row["event"] != "release"]
    assert timed(kept, "priority_kept")


@pytest.mark.parametrize("withdraws", [True, False])
def test_two_waits_for_a_first_replica_are_not_one(withdraws: bool) -> None:
    ends = [of("a", "planned_release"), of("a", "released", kind="generation"), of("a", "acquire", kind="generation")]
    rows = [
        *at(0, SLOW, *joins("a", generation=(1,)), of("a", "progress", completed=0, target=2)),
        *at(0, of("a", "acquire", kind="generation")),
        *at(4, *(ends if withdraws else [of("a", "progress", completed=0, target=2)])),
        *at(8, *begins("a", 0, 1)[1:]),
    ]
    assert ("no replica for 8.000 s" in timed(rows, "no_starvation")) == (not withdraws)


@pytest.mark.parametrize("why", ["", "its step is over", "its replica was removed", "its replica died"])
def test_who_has_no_replica_is_in_need_only_if_it_may_have_one(why: str) -> None:
    away = [desk("plan", 2, (0,), shrinks="a.generation:0"), *sleeps("a", 0, 1), desk("commit", 2, (0, 1))]
    over = {
        "its step is over": [of("a", "progress_end"), *away],
        "its replica was removed": [of("a", "resize", remove=(0,)), *away],
        "its replica died": [of("a", "died", who="a", replica=0, core="desk")],
    }
    rows = [
        *at(0, SLOW, *joins("a", generation=(1,)), *begins("a", 0, 1), of("a", "progress", completed=0, target=2)),
        *at(1, *over.get(why, away), *([] if "over" in why else [of("a", "progress", completed=1, target=2)])),
        *at(70, of("a", "progress", completed=1, target=2)),
    ]
    assert bool(timed(rows, "no_starvation")) == (not why)


def test_the_one_that_registered_next_may_have_left_before_a_pipeline_trains_again() -> None:
    def rows(*after: Facts) -> list[Facts]:
        return [
            {**SLOW, "admission_ms": 60_000},
            *joins("a", trainer=(0,), generation=(1,)),
            *asks("a", "training"),
            *gives("a", "training", 1, 0),
            of("a", "release", kind="training"),
            *joins("b", trainer=(1,), generation=(1,)),
            *after,
            *asks("a", "training"),
            *gives("a", "training", 2, 0),
        ]

    leaves = [of("b", "unregister"), of("b", "gone", how="unregistered", idle=(0, 1)), of("b", "unregistered")]
    assert found(rows(*leaves, *joins("c", trainer=(1,), generation=(1,))), "admission") == ""
    assert "b is not set up" in found(rows(), "admission")


# -- answers ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["died", "unregistered"])
@pytest.mark.parametrize(("answers", "wrong"), [("ge", False), ("eg", False), ("g", True)])
def test_a_desk_may_note_that_a_pipeline_is_gone_before_it_answers_its_request(
    answers: str, wrong: bool, how: str
) -> None:
    written = {
        "e": of("a", "error", of="acquire", kind="training", cluster="trainer", why="it left"),
        "g": of("a", "gone", how=how, idle=(1,)),
    }
    rows = [
        LIMITS,
        *joins("a", trainer=(0,)),
        *joins("b", trainer=(0,)),
        *asks("b", "training"),
        *gives("b", "training", 1, 0),
        of("a", "acquire", kind="training"),
        of("a", "died", who="a", core="desk") if how == "died" else of("a", "unregister"),
        *[written[letter] for letter in answers],
        of("a", "unregistered"),
    ]
    assert ("has no answer although the pipeline is gone" in found(rows, "no_request_lost")) == wrong


@pytest.mark.parametrize("noted", [True, False])
@pytest.mark.parametrize(("seconds", "wrong"), [(59.0, False), (60.0, True)])
def test_a_request_that_is_denied_after_its_limit_has_starved(seconds: float, wrong: bool, noted: bool) -> None:
    asked = [*joins("b", trainer=(0,)), *asks("b", "training"), *gives("b", "training", 1, 0)]
    denied = of("c", "error", of="acquire", kind="training", cluster="trainer", why="too long")
    expired = [of("c", "expired", kind="training", cluster="trainer")] if noted and wrong else []
    rows = [
        *at(0, SLOW, *asked, *joins("c", trainer=(0,)), of("c", "acquire", kind="training")),
        *at(1, of("b", "progress", completed=0, target=1)),
        *at(seconds, *expired, denied),
    ]
    assert bool(timed(rows, "no_starvation")) == wrong


@pytest.mark.parametrize(
    ("before", "wrong"),
    [
        ([], True),
        (asks("a", "training"), False),
        ([of("a", "planned_release")], False),
        ([of("a", "unregister")], False),
    ],
)
def test_a_request_that_nothing_speaks_against_is_not_refused(before: list[Facts], wrong: bool) -> None:
    rows = [
        LIMITS,
        *joins("a", trainer=(0,), generation=(1,)),
        *before,
        of("a", "acquire", kind="training"),
        of("a", "error", of="acquire", kind="training", cluster="trainer", why="no"),
    ]
    assert ("nothing speaks against it" in found(rows, "no_request_lost")) == wrong


@pytest.mark.parametrize("may_wake", [True, False])
def test_a_request_to_generate_without_replicas_may_be_refused(may_wake: bool) -> None:
    rows = [
        LIMITS,
        *joins("a", generation=(0, 1)),
        of("a", "resize", remove=(0,) if may_wake else (0, 1)),
        of("a", "acquire", kind="generation"),
        of("a", "error", of="acquire", kind="generation", cluster="generation", why="no replica may wake"),
    ]
    assert ("nothing speaks against it" in found(rows, "no_request_lost")) == may_wake


@pytest.mark.parametrize("early", ["", "joined", "granted"])
def test_a_replica_joins_and_a_request_is_granted_only_once_one_has_woken(early: str) -> None:
    _, expanded, joined = wakes("a", 0, 1)
    joined, grant = {**joined, "to": "a"}, granted("a", "generation", 1, cluster="generation")
    order = {"": [expanded, joined, grant], "joined": [joined, expanded, grant], "granted": [grant, expanded, joined]}
    rows = [
        LIMITS,
        *joins("a", generation=(1,)),
        of("a", "acquire", kind="generation"),
        desk("plan", 1, (0, 1), expands="a.generation:0"),
        of("a", "expand", replica=0, devices=(1,)),
        *order[early],
        desk("commit", 1, (0,)),
    ]
    answer = found(rows, "no_request_lost")
    assert bool(answer) == bool(early)
    assert early in answer
    assert not early or "woken" in answer


@pytest.mark.parametrize("asked", ["planned_release", "unregister"])
@pytest.mark.parametrize("asleep", [True, False])
def test_who_leaves_hears_so_once_its_replicas_sleep(asked: str, asleep: bool) -> None:
    ends = [desk("plan", 2, (0,), shrinks="a.generation:0"), *sleeps("a", 0, 1), desk("commit", 2, (0, 1))]
    told = of("a", "released", kind="generation") if asked == "planned_release" else of("a", "unregistered")
    rows = [
        LIMITS,
        *joins("a", generation=(1,)),
        *begins("a", 0, 1),
        of("a", asked),
        *([*ends, told] if asleep else [told, *ends]),
        of("a", "planned_release"),  # of what is gone by then, so that the check has something to count
    ]
    assert ("are still active" in found(rows, "planned_release_once")) == (not asleep)


@pytest.mark.parametrize(("stated", "wrong"), [({}, False), ({"version": 0}, False), ({"version": 1}, True)])
def test_a_request_need_not_state_the_version_with_which_it_begins(stated: Facts, wrong: bool) -> None:
    request_of = {"group": 0, "sample": 0, "replica": 0}
    rows = [
        LIMITS,
        *joins("a", generation=(1,)),
        *begins("a", 0, 1),
        of("a", "hold", version=0),
        of("a", "published", replica=0, version=0),
        of("a", "sent", **request_of),
        of("a", "started", **request_of, **stated),
    ]
    assert ("has version 1; the replica serves version 0" in found(rows, "version_after_wake")) == wrong


def test_a_release_waits_for_a_replica_that_wakes() -> None:
    rows = [
        LIMITS,
        *joins("a", generation=(1,)),
        *begins("a", 0, 1)[:2],
        of("a", "expand", replica=0, devices=(1,)),
        of("a", "planned_release"),
        of("a", "released", kind="generation"),
        of("a", "expanded", replica=0),
    ]
    assert "replica 0 has not fallen asleep yet" in found(rows, "planned_release_once")


# -- orders -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "order", "wrong"),
    [
        ({"expands": "a.generation:0"}, of("a", "expand", replica=0, devices=(0,)), False),
        ({"grants": "a.trainer:0"}, of("a", "expand", replica=0, devices=(0,)), True),
        ({"grants": "a.trainer:0"}, granted("a", "training", 0), False),
        ({"grants": "a.critic:0"}, granted("a", "training", 0), True),
        ({"shrinks": "b.generation:0"}, of("b", "left", replica=0, devices=(1,), to="b"), False),
        ({"grants": "a.trainer:0"}, of("b", "left", replica=0, devices=(1,), to="b"), True),
    ],
)
def test_orders_are_those_of_the_plan(plan: dict[str, str], order: Facts, wrong: bool) -> None:
    rows: list[dict[str, Any]] = [
        LIMITS,
        *joins("a", trainer=(0,), critic=(0,), generation=(0, 1)),
        *joins("b", generation=(1,)),
        *begins("b", 0, 1),
        *asks("a", "training"),
        desk("plan", 2, (0,), **plan),
        order,
    ]
    assert ("no plan orders it" in found(rows, "plan_valid")) == wrong


def test_a_request_that_the_admission_holds_back_gets_no_devices_planned_for_the_one_before_it() -> None:
    """a's request for log probabilities is planned; before its replica sleeps, a asks to train in its place, for which b must be set up."""
    d = Drive(admission_ms=9000).join("a", target=10, **TRAINER_0)
    d.do("acquire", "a", kind="training")
    d.do("release", "a", kind="training")
    d.join("b", **TRAINER_1)
    d.slow = True
    d.do("acquire", "a", kind="logprobs")
    d.do("acquire", "a", kind="training", release="logprobs")
    assert message(d.answer(), "granted") == []
    assert not d.holds("a")
    d.slow = False
    assert ("granted", "a") in message(d.do("acquire", "b", kind="generation"), "granted")


@pytest.mark.parametrize(("noted", "moves", "wrong"), [(False, True, False), (True, True, True), (False, False, True)])
def test_a_desk_that_notes_no_request_may_ask_again_for_a_pipeline_without_replicas(
    noted: bool, moves: bool, wrong: bool
) -> None:
    """a has its one replica, which sleeps for b's trainer or not, and is granted generation a second time."""
    asked = asks("b", "training")[: 2 if noted else 1]
    rows = [SLOW, *joins("a", generation=(0,)), *joins("b", trainer=(0,)), *begins("a", 0, 0), *asked]
    if moves:
        rows += [desk("plan", 2, (1,), shrinks="a.generation:0", grants="b.trainer:0"), *sleeps("a", 0, 0)]
        rows += [granted("b", "training", 0), desk("commit", 2, (1,)), of("b", "release", kind="training")]
        rows += [desk("plan", 3, (0, 1), expands="a.generation:0"), *wakes("a", 0, 0)]
    rows.append(granted("a", "generation", 0, cluster="generation"))
    assert ("no request waits for it" in found(rows, "no_request_lost")) == wrong


# -- resizes ----------------------------------------------------------------------------------------------------------------


def resized(*answer: Facts) -> list[Facts]:
    """a, whose replica 0 is awake, removes it; then comes an answer, and time passes."""
    rows = [SLOW, *joins("a", generation=(0, 1)), *begins("a", 0, 0), of("a", "resize", remove=(0,)), *answer]
    return [*rows, {**of("a", "progress", completed=1, target=2), "time": 5.0}, {**desk("plan", 9, ()), "time": 5.1}]


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        ([of("a", "resized")], False),
        ([of("a", "error", of="resize", why="no")], False),
        ([of("a", "unregister"), of("a", "unregistered")], True),
        ([of("a", "died")], False),
    ],
)
def test_a_resize_is_answered(answer: list[Facts], wrong: bool) -> None:
    answered = "`resize` of a" in (said := found(resized(*answer), "no_request_lost")) and "no answer" in said
    assert answered == wrong


@pytest.mark.parametrize(("seconds", "wrong"), [(4.0, False), (6.0, True)])
def test_a_removed_replica_falls_asleep(seconds: float, wrong: bool) -> None:
    rows = [
        SLOW,
        *joins("a", generation=(0, 1)),
        *begins("a", 0, 0),
        of("a", "resize", remove=(0,)),
        of("a", "resized"),
    ]
    late = [desk("plan", 2, (1,), shrinks="a.generation:0"), *sleeps("a", 0, 0), desk("commit", 2, (0, 1))]
    assert ("has removed replica 0 of a" in timed([*at(0, *rows), *at(seconds, *late)], "no_request_lost")) == wrong
