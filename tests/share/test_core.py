"""The desk's rules, one by one, driven by hand."""

from __future__ import annotations

import re

import pytest

from kit.errors import BadInput
from kit.loop.messages import Command, Event
from kit.share.core import Scheduler
from kit.share.member import Member
from kit.share.planner import Share, View
from kit.share.state import Cluster, DeskSettings
from tests.loop.replaying import replay
from tests.share.driver import TRAINER_0, TRAINER_1, Drive, message, why


def pair(**settings: int) -> Drive:
    return Drive(**settings).join("a", target=10, **TRAINER_0).join("b", target=10, **TRAINER_1)


# -- requests ---------------------------------------------------------------------------------------------------------------


def test_a_request_other_than_generation_takes_all_of_its_devices_or_none() -> None:
    d = (
        Drive(names="abc")
        .join("a", target=10, trainer=(0, 1), generation=(0, 1))
        .join("b", trainer=(1,))
        .join("c", trainer=(0, 1))
    )
    assert d.active("a") == [0, 1]
    d.do("acquire", "b", kind="training")
    assert d.active("a") == [0]
    reported = d.do("acquire", "c", kind="training")
    assert message(reported, "left", "granted") == []  # it cannot be met, so nobody shrinks for it
    reported = d.do("release", "b", kind="training")
    assert message(reported, "left", "granted") == [("left", "a"), ("granted", "c")]


def test_priorities_decide_then_the_order_of_arrival() -> None:
    d = Drive(devices=1, names="abcdef")
    for name in "abcdef":
        d.join(name, trainer=(0,), critic=(0,), reference=(0,))
    d.do("acquire", "a", kind="training")
    for name, kind in zip("bcdef", ("values", "reference", "training", "initialisation", "training"), strict=True):
        d.do("acquire", name, kind=kind)
    order = []
    holder, kind = "a", "training"
    for _ in range(5):
        reported = d.do("release", holder, kind=kind)
        (granted,) = [one for one in reported if one.name == "granted"]
        holder, kind = granted.pipeline, granted.kind
        order.append((holder, kind))
    assert order == [("e", "initialisation"), ("d", "training"), ("f", "training"), ("c", "reference"), ("b", "values")]


def test_a_request_that_waits_keeps_its_devices_from_later_ones_but_not_from_those_who_hold_some() -> None:
    d = Drive(names="abc").join("a", trainer=(0,), critic=(1,)).join("b", trainer=(0, 1)).join("c", trainer=(1,))
    d.do("acquire", "a", kind="training")
    d.do("acquire", "b", kind="training")
    assert message(d.do("acquire", "c", kind="training"), "granted") == []  # b came first and needs device 1 too
    assert message(d.do("acquire", "a", kind="critic"), "granted") == [("granted", "a")]  # b has to wait for a anyway
    d.do("release", "a", kind="training")
    assert message(d.do("release", "a", kind="critic"), "granted") == [("granted", "b")]


def test_a_grant_may_let_another_request_of_the_pipeline_pass() -> None:
    d = (
        Drive(devices=3, names="abc")
        .join("a", trainer=(0,))
        .join("b", trainer=(0, 1))
        .join("c", trainer=(1,), critic=(2,))
    )
    d.do("acquire", "a", kind="training")
    d.do("acquire", "b", kind="training")
    d.do("acquire", "c", kind="training")
    reported = d.do("acquire", "c", kind="critic")
    assert [one.kind for one in reported if one.name == "granted"] == ["critic", "training"]


def test_generation_is_granted_once_any_replica_is_active() -> None:
    d = Drive().join("a", trainer=(0,), generation=(0, 1)).join("b", trainer=(1,))
    d.do("acquire", "b", kind="training")
    reported = d.do("acquire", "a", kind="generation", target=5)
    assert [
        (one.name, one.get("devices")) for one in reported if one.pipeline == "a" and one.name in ("expand", "granted")
    ] == [
        ("expand", (0,)),
        ("granted", (0,)),
    ]
    d.slow = True
    d.do("release", "b", kind="training")
    assert d.active("a") == [0]


def test_a_granted_request_asked_again_gets_the_same_devices() -> None:
    d = pair()
    first = [one for one in d.do("acquire", "a", kind="training") if one.name == "granted"]
    again = d.do("acquire", "a", kind="training")
    assert again == first
    assert first[0].devices == (0,)
    assert d.active("a") == [1]
    assert message(d.do("acquire", "a", kind="generation"), "granted", "queued") == [("granted", "a")]
    assert message(d.do("acquire", "b", kind="generation"), "granted", "queued") == [("queued", "b")]  # b has none now


def test_another_priority_or_a_second_pending_request_is_refused() -> None:
    d = pair()
    d.do("acquire", "a", kind="training")
    assert "holds trainer for training" in why(d.do("acquire", "a", kind="logprobs"))
    d = Drive().join("a", trainer=(0,)).join("b", trainer=(0,))
    d.do("acquire", "a", kind="training")
    d.do("acquire", "b", kind="training")
    assert "b already waits for trainer" in why(d.do("acquire", "b", kind="training"))
    assert "b already waits for trainer" in why(d.do("acquire", "b", kind="logprobs"))


def test_release_and_request_are_one_operation() -> None:
    d = Drive().join("a", trainer=(0,)).join("b", trainer=(0,))
    d.do("acquire", "a", kind="logprobs")
    d.do("acquire", "b", kind="logprobs")
    reported = d.do("acquire", "a", kind="training", release="logprobs")
    assert message(reported, "granted") == [("granted", "a")]  # no other grant came in between
    assert message(d.do("release", "a", kind="training"), "granted") == [("granted", "b")]
    e = pair()
    e.do("acquire", "a", kind="training")
    e.do("acquire", "a", kind="generation", release="training")
    assert not e.holds("a")
    assert "cannot release generation" in why(e.do("acquire", "a", kind="training", release="generation"))


def test_a_request_that_was_not_granted_can_be_withdrawn() -> None:
    d = Drive().join("a", trainer=(0,)).join("b", trainer=(0,))
    d.do("acquire", "a", kind="training")
    d.do("acquire", "b", kind="training")
    d.do("release", "b", kind="logprobs")  # b did not request this
    assert d.state.waits("b", "trainer")
    d.do("release", "b", kind="training")
    assert message(d.do("release", "a", kind="training"), "granted") == []
    assert message(d.do("release", "a", kind="training"), "granted") == []  # a repeated release changes nothing


def test_every_request_has_a_deadline_on_the_clock() -> None:
    d = Drive(request_ms=3000).join("a", trainer=(0,)).join("b", trainer=(0,))
    d.do("acquire", "a", kind="training")
    asked = [one.ms for one in d.do("acquire", "b", kind="training") if one.name == "after"]
    assert asked == [3000]
    assert d.alarm("request") == []  # a's alarm; its request was granted
    reported = d.alarm("request")
    assert why(reported) == "training of b was not granted within 3000 ms"
    assert message(d.do("release", "a", kind="training"), "granted") == []


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        ({"kind": "sleep"}, "cannot request sleep on no cluster"),
        ({"kind": "critic"}, "cannot request critic on critic"),
        ({"kind": "generation", "cluster": "trainer"}, "cannot request generation on trainer"),
        ({"kind": "training", "cluster": "generation"}, "cannot request training on generation"),
    ],
)
def test_requests_that_make_no_sense_are_refused(ids: dict[str, str], sentence: str) -> None:
    assert sentence in why(pair().do("acquire", "a", **ids))


def test_initialisation_may_take_the_generations_devices_as_a_whole() -> None:
    d = Drive().join("a", **TRAINER_0).join("b", target=5, **TRAINER_1)
    reported = d.do("acquire", "a", kind="initialisation", cluster="generation")
    assert message(reported, "left", "granted") == [("left", "b"), ("left", "b"), ("granted", "a")]
    assert "holds generation for initialisation" in why(d.do("acquire", "a", kind="generation"))
    reported = d.do("acquire", "a", kind="generation", release="initialisation", target=5)
    assert d.active("a")
    assert d.active("b")


def test_new_work_after_a_complete_step_gets_idle_devices() -> None:
    d = Drive().join("a", target=10, **TRAINER_0).join("b", trainer=(0,))
    d.do("progress", "a", completed=10, target=10)
    d.do("acquire", "b", kind="training")
    d.do("release", "b", kind="training")
    assert d.active("a") == [1]  # nothing is left to do, so nothing wakes
    d.do("progress", "a", completed=0, target=10)
    assert d.active("a") == [0, 1]


# -- cycles -----------------------------------------------------------------------------------------------------------------


def test_all_shrinks_end_before_the_first_expand_and_the_grants() -> None:
    d = (
        Drive(devices=4, names="ab")
        .join("a", target=10, generation=(0, 1, 2, 3))
        .join("b", trainer=(0,), generation=(0, 1, 2, 3))
    )
    d.slow = True
    d.do("progress", "b", completed=0, target=20)
    reported = d.do("acquire", "b", kind="generation")
    assert message(reported, "left", "expand") == [("left", "a")] * 3  # remaining work 10 to 20: one and three of four
    assert message(d.do("acquire", "b", kind="training"), "queued", "plan") == [
        ("queued", "b")
    ]  # planned when this cycle is over
    assert message(d.answer(), "expand") == []
    assert message(d.answer(), "expand") == []
    assert message(d.answer(), "expand") == [("expand", "b")] * 3
    reported = [one for _ in range(3) for one in d.answer()]
    steps = [name for name, _ in message(reported, "joined", "commit", "granted", "plan", "left")]
    assert steps == ["joined", "granted", "joined", "joined", "commit", "plan", "left"]


def test_a_pipeline_may_shrink_one_replica_and_expand_another_in_one_cycle() -> None:
    d = Drive(devices=2, names="ab").join("a", trainer=(0,), generation=(0, 1)).join("b", trainer=(1,))
    d.do("acquire", "b", kind="training")
    d.do("progress", "a", completed=0, target=5)
    d.do("acquire", "a", kind="generation")
    d.slow = True
    d.do("resize", "a", remove=(0,))  # the resize stays under way
    d.do("release", "b", kind="training")
    d.slow = False
    d.answer()
    assert d.active("a") == [1]
    (plan, *_) = [one for one in reversed(d.log) if one.name == "plan"]
    assert plan.expands == "a.generation:1"


def test_operations_of_a_pipeline_that_left_between_plan_and_commit_are_skipped() -> None:
    d = Drive().join("a", target=10, **TRAINER_0).join("b", **TRAINER_1)
    d.slow = True
    d.do("acquire", "b", kind="training")
    reported = d.do("died", who="b")
    assert message(reported, "error") == [("error", "b")]
    d.answer()
    assert not d.holds("b")
    assert "b" not in d.state.pipelines
    reported = d.do("died", who="a")  # its replica is waking up
    assert d.state.idle == {0, 1}
    assert message(reported, "ended") == [("ended", "desk")]


def test_an_unregistered_pipeline_sleeps_first_and_its_waiters_get_an_error() -> None:
    d = pair()
    d.do("acquire", "a", kind="training")
    d.slow = True
    reported = d.do("unregister", "a")
    d.slow = False
    assert message(reported, "unregistered") == []
    while d.waiting:
        d.answer()
    assert "a" not in d.state.pipelines
    assert "not registered" in why(d.do("acquire", "a", kind="training"))
    assert message(d.do("unregister", "a"), "unregistered", "left") == [("unregistered", "a")]
    assert d.do("release", "a", kind="training") == []
    e = Drive().join("a", trainer=(0,)).join("b", trainer=(0,))
    e.do("acquire", "a", kind="training")
    e.do("acquire", "b", kind="training")
    assert why(e.do("unregister", "b")) == "b unregistered"


def test_a_plan_that_breaks_a_condition_is_not_carried_out() -> None:
    def greedy(view: View) -> None:
        for share in view.shares.values():
            for replica in list(share.free):
                view.expand(share.name, replica)

    d = Drive(planner=greedy).join("a", target=5, **TRAINER_0)
    reported = d.join("b", **TRAINER_1).do("acquire", "b", kind="generation")
    assert message(reported, "expand", "left", "plan") == []
    assert {one.why for one in reported if one.name == "error"} == {d.state.error}
    assert "condition 10" in d.state.error
    assert message(reported, "ended") == [("ended", "desk")]


def test_a_planner_that_raises_ends_the_desk_with_its_name() -> None:
    def broken(view: View) -> None:
        raise KeyError("share")

    reported = Drive(planner=broken).join("a", **TRAINER_0).do("acquire", "a", kind="generation")
    assert message(reported, "error", "ended") == [("error", "a"), ("ended", "desk")]
    place = r"\(test_core\.py, line \d+\)"
    assert re.fullmatch(f"the planner gap-ratio raised KeyError: 'share' {place}", reported[-1].error)


def test_a_replica_that_cannot_wake_is_lost_and_one_that_cannot_sleep_ends_everything() -> None:
    d = Drive(names="a")
    d.slow = True
    d.join("a", target=5, **TRAINER_0)
    d.answer("out of memory")
    assert d.state.pipelines["a"].dead == {0}
    d.slow = False
    d.answer()
    assert d.active("a") == [1]
    d.slow = True
    d.do("acquire", "a", kind="initialisation", cluster="trainer")
    d.do("planned_release", "a")
    reported = d.answer("stuck")
    assert why(reported) == "replica 1 of a could not release its devices: stuck"


@pytest.mark.parametrize(
    ("waits", "sentence"), [("shrink", "did not answer a shrink"), ("expand", "did not answer an expand")]
)
def test_a_cycle_has_a_limit(waits: str, sentence: str) -> None:
    d = Drive(names="a", operation_ms=700)
    d.slow = waits == "expand"
    d.join("a", target=5, **TRAINER_0)
    if waits == "shrink":
        d.slow = True
        d.do("planned_release", "a")
        number = max(number for number, what in d.state.alarms.items() if what[0] == "cycle")
        reported = d.do("alarm", number=number)
    else:
        reported = d.alarm("cycle")
    assert sentence in d.state.error
    assert "700 ms" in d.state.error
    assert message(reported, "error") == [("error", "a")]


# -- releases, resizes, deaths ----------------------------------------------------------------------------------------------


def test_a_planned_release_ends_the_lease_and_a_second_one_joins_the_first() -> None:
    d = Drive(names="a").join("a", target=5, **TRAINER_0)
    d.slow = True
    reported = d.do("planned_release", "a")
    assert message(reported, "left", "released") == [("left", "a"), ("left", "a")]
    assert message(d.do("planned_release", "a"), "left", "released") == []
    assert "is releasing its generation" in why(d.do("acquire", "a", kind="generation"))
    d.answer()
    assert message(d.answer(), "released") == [("released", "a"), ("released", "a")]
    assert not d.state.leases
    assert message(d.do("planned_release", "a"), "released") == [("released", "a")]  # nothing is active
    d.slow = False
    d.do("progress", "a", completed=0, target=9)
    assert d.active("a") == []  # it gave its devices back and has not requested any since
    d.do("acquire", "a", kind="generation")
    assert d.active("a") == [0, 1]


def test_a_death_does_not_take_the_place_of_a_planned_release() -> None:
    d = Drive(names="a").join("a", target=5, **TRAINER_0)
    d.slow = True
    d.do("planned_release", "a")
    d.do("died", who="a", replica=0)
    reported = d.do("died", who="a", replica=1)
    assert message(reported, "released") == [("released", "a")]
    assert d.state.idle == {0, 1}
    assert message(d.answer(), "joined", "released") == []  # its late answer frees nothing a second time


def test_a_resize_names_exactly_one_of_add_and_remove() -> None:
    d = Drive(names="a").join("a", target=5, **TRAINER_0)
    for ids in ({}, {"add": (0,), "remove": (1,)}):
        assert "exactly one" in why(d.do("resize", "a", **ids))
    assert "no replica 7" in why(d.do("resize", "a", remove=(7,)))
    assert message(d.do("resize", "a", remove=(1,)), "left", "resized") == [("resized", "a"), ("left", "a")]
    assert d.active("a") == [0]
    d.do("resize", "a", remove=(1,))
    assert d.active("a") == [0]
    d.do("resize", "a", add=(1,))
    assert d.active("a") == [0, 1]
    d.do("died", who="a", replica=1)
    assert "replica 1 of a died" in why(d.do("resize", "a", add=(1,)))
    assert "not registered" in why(d.do("resize", "b", add=(1,)))


def test_a_dead_pipeline_leaves_everything() -> None:
    d = pair()
    d.do("acquire", "a", kind="training")
    d.do("died", who="a")
    assert d.active("b") == [0, 1]
    d.do("died", who="a")
    assert d.state.left == {"a"}
    assert message(d.do("died", who="b"), "ended") == [("ended", "desk")]


# -- coming and progress ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ids", "sentence"),
    [
        ("c", {"trainer": (0,)}, "unexpected pipeline c"),
        ("a", {"trainer": (0, 2)}, "names the devices [2]"),
        ("a", {"trainer": (0, 0)}, "names a device twice"),
        ("a", {"generation": (0, 1), "tp": 0}, "tp=0 does not divide"),
        ("a", {"generation": (0,), "tp": 2}, "tp=2 does not divide"),
        ("b", {"trainer": (0,)}, "b was already registered"),
    ],
)
def test_registrations_that_make_no_sense_are_refused(name: str, ids: dict[str, str | int], sentence: str) -> None:
    d = Drive().join("b", **TRAINER_1)
    assert sentence in why(d.do("register", name, **ids))
    assert message(d.do("register", "b", **TRAINER_1), "registered") == [("registered", "b")]


def test_nobody_asks_before_it_is_admitted() -> None:
    d = Drive()
    assert "not registered" in why(d.do("acquire", "a", kind="training"))
    d.do("register", "a", **TRAINER_0)
    assert "has not been admitted" in why(d.do("acquire", "a", kind="training"))


def test_the_second_starts_after_the_first_hand_over_and_the_first_trains_on_when_it_is_set_up() -> None:
    d = Drive(admission_ms=9000).join("a", target=10, **TRAINER_0)
    assert message(d.join("b", **TRAINER_1).log, "admitted") == [("admitted", "a")]
    d.do("acquire", "a", kind="logprobs")
    assert message(d.do("acquire", "a", kind="training", release="logprobs"), "admitted") == []
    assert message(d.do("release", "a", kind="training"), "admitted") == [("admitted", "b")]
    assert message(d.do("acquire", "a", kind="training"), "granted", "queued") == []
    reported = d.do("acquire", "b", kind="generation", target=4)
    assert ("granted", "a") in message(reported, "granted")
    assert message(d.do("admit", "a"), "admitted") == [("admitted", "a")]


def test_each_pipeline_of_three_waits_for_its_neighbour_only() -> None:
    d = Drive(3, "abc", admission_ms=9000).join("a", target=10, **TRAINER_0).join("b", target=10, **TRAINER_1)
    d.join("c", trainer=(2,), generation=(0, 1))
    d.do("acquire", "a", kind="training")
    assert message(d.do("release", "a", kind="training"), "admitted") == [("admitted", "b")]
    d.do("acquire", "b", kind="generation")
    assert message(d.do("acquire", "a", kind="training"), "granted", "queued") == [("queued", "a"), ("granted", "a")]
    d.do("acquire", "b", kind="training")
    assert message(d.do("release", "b", kind="training"), "admitted") == [("admitted", "c")]
    assert message(d.do("acquire", "b", kind="training"), "granted", "queued") == []
    assert ("granted", "b") in message(d.do("acquire", "c", kind="generation", target=4), "granted")


def test_new_ranks_replace_dead_ones() -> None:
    d = Drive().join("a", target=10, generation=(0,)).join("b", trainer=(1,))
    d.do("died", who="a", replica=0)
    assert message(d.do("restarted", who="a", replica=0), "expand") == [("expand", "a")]
    assert message(d.do("restarted", who="a", replica=0), "expand") == []  # it is alive
    d.do("died", who="b")
    assert "already registered" in why(d.do("register", "b", trainer=(1,)))
    d.do("restarted", who="b", replica=0)  # a replica of nobody
    assert "already registered" in why(d.do("register", "b", trainer=(1,)))
    d.do("restarted", who="b")
    d.join("b", trainer=(1,))
    assert message(d.do("acquire", "b", kind="training"), "granted") == [("granted", "b")]


def test_each_side_of_the_admission_has_a_limit_that_is_reported() -> None:
    d = Drive(admission_ms=9000).join("a", target=10, **TRAINER_0).join("b", **TRAINER_1)
    assert d.alarm("admission") == []  # a's alarm; a was admitted
    reported = d.alarm("admission")
    assert message(reported, "admission_limit", "admitted") == [("admission_limit", "b"), ("admitted", "b")]
    d.do("acquire", "a", kind="training")
    d.do("release", "a", kind="training")
    d.do("acquire", "a", kind="training")
    reported = d.alarm("admission")
    assert message(reported, "admission_limit", "granted") == [("admission_limit", "a"), ("granted", "a")]


def test_progress_is_clamped_by_stream_and_summed() -> None:
    d = Drive(names="a").join("a", **TRAINER_0)
    d.do("progress", "a", completed=12, target=10)
    d.do("progress", "a", completed=1, target=4, stream="validation")
    one = d.state.pipelines["a"]
    assert (one.progress, one.remaining, one.moved) == ((11, 14), 3, 2)
    d.do("progress", "a", completed=11, target=10)  # equal after clamping
    assert d.state.pipelines["a"].moved == 2
    d.do("progress_end", "a", stream="validation")
    assert d.state.pipelines["a"].remaining == 0


def test_adapters_are_clamped_one_by_one_and_summed() -> None:
    d = Drive(names="a").join("a", **TRAINER_0)
    d.do("progress", "a", completed=9, target=4, stream="adapter 0")
    d.do("progress", "a", completed=1, target=4, stream="adapter 1")
    assert d.state.pipelines["a"].progress == (5, 8)
    d.do("progress_end", "a", stream="adapter 0")
    assert d.state.pipelines["a"].progress == (1, 4)


def test_a_pipeline_with_adapters_may_validate() -> None:
    d = Drive(names="a").join("a", **TRAINER_0)
    d.do("progress", "a", completed=0, target=2, stream="validation")
    d.do("progress", "a", completed=1, target=4, stream="adapter 0")
    assert d.state.pipelines["a"].progress == (1, 6)


@pytest.mark.parametrize(("first", "then"), [("adapter 1", "training"), ("training", "adapter 0")])
def test_a_pipeline_reports_each_adapter_or_none(first: str, then: str) -> None:
    d = Drive(names="a").join("a", **TRAINER_0)
    d.do("progress", "a", completed=0, target=4, stream=first)
    refused = d.do("progress", "a", completed=0, target=9, stream=then)
    why = f"a reports progress of {first} and cannot report {then} too; report each adapter, or none"
    assert [(one.name, one.of, one.why) for one in refused] == [("error", "progress", why)]
    assert d.state.pipelines["a"].progress == (0, 4)


def test_a_suspended_pipeline_with_demand_gets_devices_as_soon_as_there_are_some() -> None:
    d = Drive(devices=1).join("a", target=5, trainer=(0,), generation=(0,)).join("b", trainer=(0,))
    d.do("acquire", "b", kind="training")
    assert d.active("a") == []
    d.do("release", "b", kind="training")
    assert d.active("a") == [0]


def test_the_watchdog_asks_again_where_a_request_was_consumed_and_progress_stands_still() -> None:
    d = Drive(devices=1).join("a", trainer=(0,), generation=(0,)).join("b", trainer=(0,))
    d.do("acquire", "a", kind="generation", target=4)  # it reports no progress
    d.do("acquire", "b", kind="training")
    d.alarm("watchdog")
    d.do("release", "b", kind="training")
    assert d.active("a") == []
    reported = d.alarm("watchdog")
    assert message(reported, "asked_again", "joined", "granted") == [
        ("asked_again", "a"),
        ("joined", "a"),
        ("granted", "a"),
    ]
    assert message(d.alarm("watchdog"), "asked_again") == []  # it has a replica


def test_the_watchdog_counts_progress_and_not_heartbeats() -> None:
    d = Drive(devices=1).join("a", target=4, trainer=(0,), generation=(0,)).join("b", trainer=(0,))
    d.do("acquire", "b", kind="training")
    d.alarm("watchdog")
    d.do("progress", "a", completed=1, target=4)
    assert message(d.alarm("watchdog"), "asked_again") == []  # a made progress
    d.do("progress", "a", completed=1, target=4)
    assert message(d.alarm("watchdog"), "asked_again") == [("asked_again", "a")]
    assert message(d.alarm("watchdog"), "asked_again") == []  # its request waits already
    d.do("progress", "b", completed=4, target=4)
    assert message(d.alarm("watchdog"), "asked_again") == []


def test_balance_is_restored_when_shares_are_more_than_ten_points_off() -> None:
    eight = {"generation": (0, 1, 2, 3, 4, 5, 6, 7)}
    d = Drive(devices=8).join("a", target=100, **eight).join("b", target=100, **eight)
    d.do("progress", "b", completed=1, target=100)
    assert (len(d.active("a")), len(d.active("b"))) == (4, 4)
    reported = d.do("progress", "a", completed=15, target=100)
    assert message(reported, "left") == []
    d.do("progress", "a", completed=90, target=100)
    assert (len(d.active("a")), len(d.active("b"))) == (1, 7)


EIGHT = {"generation": (0, 1, 2, 3, 4, 5, 6, 7)}


def test_nothing_moves_for_less_than_ten_points() -> None:
    twenty = {"generation": ",".join(map(str, range(20)))}
    d = Drive(devices=20).join("a", target=100, **twenty).join("b", target=100, **twenty)
    assert (len(d.active("a")), len(d.active("b"))) == (10, 10)
    assert (
        message(d.do("progress", "a", completed=15, target=100), "plan") == []
    )  # 46 % of the demand; its share would be 9
    assert message(d.do("progress", "a", completed=60, target=100), "plan") == [("plan", "desk")]


def test_balance_waits_while_a_request_waits() -> None:
    d = Drive(devices=9, names="abcd").join("c", trainer=(8,)).join("d", trainer=(8,))
    d.join("a", target=100, **EIGHT).join("b", target=100, **EIGHT)
    d.do("acquire", "c", kind="training")
    d.do("acquire", "d", kind="training")
    assert message(d.do("progress", "a", completed=90, target=100), "plan") == []
    d.do("release", "d", kind="training")
    assert (len(d.active("a")), len(d.active("b"))) == (1, 7)


def test_a_suspended_pipeline_whose_demand_becomes_known_gets_devices() -> None:
    d = Drive(devices=1).join("a", trainer=(0,), generation=(0,)).join("b", trainer=(0,))
    d.do("acquire", "a", kind="generation", target=4)
    d.do("acquire", "b", kind="training")
    d.do("release", "b", kind="training")
    assert d.active("a") == []  # it has not reported what is left
    d.do("progress", "a", completed=1, target=4)
    assert d.active("a") == [0]


@pytest.mark.parametrize(
    ("name", "ids"), [("planned_release", {}), ("died", {"who": "b", "replica": 0}), ("resize", {"remove": (0,)})]
)
def test_a_replica_that_was_given_up_since_the_plan_is_not_woken(name: str, ids: dict[str, str | int]) -> None:
    d = Drive().join("a", target=10, **TRAINER_0).join("b", **TRAINER_1)
    d.slow = True
    assert message(d.do("acquire", "b", kind="generation", target=10), "left") == [("left", "a")]
    d.do(name, "desk" if name == "died" else "b", **ids)
    reported = d.answer()
    assert [one.replica for one in reported if one.name == "expand" and one.pipeline == "b"] in ([], [1])


def test_a_pipeline_that_releases_since_the_plan_gets_no_more_replicas() -> None:
    four = {"generation": (0, 1, 2, 3)}
    d = Drive(devices=4).join("a", target=10, **four).join("b", target=10, **four)
    assert (len(d.active("a")), len(d.active("b"))) == (2, 2)
    d.slow = True
    assert message(d.do("progress", "a", completed=9, target=10), "left") == [("left", "a")]
    d.do("planned_release", "b")
    assert message(d.answer(), "expand", "left") == [("left", "b"), ("left", "b")]


def test_an_alarm_of_an_earlier_cycle_is_about_nothing() -> None:
    d = Drive(names="a").join("a", target=5, **TRAINER_0)
    d.slow = True
    d.do("planned_release", "a")
    assert d.alarm("cycle") == []
    assert not d.state.error


def test_who_leaves_or_has_left_cannot_ask() -> None:
    d = Drive().join("a", target=5, **TRAINER_0)
    d.slow = True
    d.do("unregister", "a")
    assert "not registered" in why(d.do("acquire", "a", kind="training"))
    d.answer()
    d.answer()
    assert "was already registered" in why(d.do("register", "a", **TRAINER_0))


def test_the_watchdog_leaves_alone_who_needs_nothing() -> None:
    d = Drive(devices=1).join("a", target=4, trainer=(0,), generation=(0,)).join("b", trainer=(0,))
    d.do("acquire", "b", kind="training")
    d.do("progress", "a", completed=4, target=4)
    d.alarm("watchdog")
    assert message(d.alarm("watchdog"), "asked_again") == []


class Short:
    """A core that ends when a replica has joined."""

    def begin(self) -> tuple[int, tuple[Command, ...]]:
        return 0, ()

    def step(self, state: int, event: Event) -> tuple[int, tuple[Command, ...]]:
        if event.name == "unregistered" or event.get("of") == "resize":
            raise AssertionError("that is no event for a pipeline's core")
        ends = (Command("ended", "runner", "a", why="done"),) if event.name == "joined" else ()
        return state + 1, ends


def reported(*events: Event) -> list[list[str]]:
    """Return what an admitted member commands for each of these events."""
    member = Member(Short(), "a", {"generation": Cluster((0,))})
    state, _ = member.begin()
    state, _ = member.step(state, Event("admitted", "a"))
    found = []
    for event in events:
        state, commands = member.step(state, event)
        found.append([one.name for one in commands])
    return found


def test_a_pipeline_that_waits_to_leave_ends_with_the_desk() -> None:
    error = Event("error", "a", of="desk", why="gone")
    assert reported(Event("joined", "a", replica=0), error) == [["progress_end", "unregister"], ["ended"]]


def test_a_pipeline_that_the_desk_holds_for_dead_ends_without_asking() -> None:
    """Its core may end only after the desk has gone, when nobody would answer."""
    d = Drive().join("a", target=4, **TRAINER_0)
    assert message(d.do("died", who="a"), "unregistered", "ended") == [("unregistered", "a")]
    assert reported(Event("unregistered", "a"), Event("joined", "a", replica=0)) == [[], ["ended"]]


def test_a_refused_resize_does_not_end_a_pipeline() -> None:
    error = Event("error", "a", of="resize", why="replica 0 of a died")
    assert reported(error, Event("joined", "a", replica=0)) == [[], ["progress_end", "unregister"]]


def test_a_replica_that_a_planner_shrank_is_not_free_in_that_cycle() -> None:
    view = View([Share("a", 1, (frozenset({0}), frozenset({1})), {0}, set())], {1}, 2)
    view.shrink("a", 0)
    assert list(view.shares["a"].free) == [1]
    view.expand("a", 1)
    assert list(view.shares["a"].free) == []


# -- the core as a core -----------------------------------------------------------------------------------------------------


def test_states_are_frozen_and_hashable_and_events_replay() -> None:
    d = pair()
    d.do("acquire", "a", kind="training")
    assert hash(d.state) == hash(d.core.step(d.state, Event("taken", "desk", device=0))[0])
    with pytest.raises(Exception, match="immutable"):
        d.state.cycles = 3
    with pytest.raises(BadInput, match="unknown event 'generate'"):
        d.do("generate", "a")


def test_settings_that_cannot_work_are_refused() -> None:
    for wrong, sentence in (
        ({"devices": 0}, "devices=0"),
        ({"pipelines": ()}, "must be names"),
        ({"pipelines": ("a", "a")}, "each once"),
        ({"request_ms": 0}, "every wait has a limit"),
    ):
        with pytest.raises(BadInput, match=sentence):
            DeskSettings(**{"devices": 2, "pipelines": ("a",), **wrong})
    with pytest.raises(BadInput, match="neither one of gap-ratio, home, fifo, static"):
        Scheduler(DeskSettings(devices=1, pipelines=("a",), planner="best"))


def test_the_desk_ends_when_the_last_expected_pipeline_has_left() -> None:
    d = Drive().join("a", **TRAINER_0)
    assert message(d.do("unregister", "a"), "ended") == []
    d.join("b", **TRAINER_1)
    assert message(d.do("unregister", "b"), "ended") == [("ended", "desk")]
    assert d.do("acquire", "b", kind="training") == []
    assert replay(d.core, [Event("progress", "b", completed=1, target=2)])[0] is not None


def test_a_pipeline_that_dies_while_it_leaves_gets_its_answer() -> None:
    d = Drive().join("a", target=4, **TRAINER_0)
    d.slow = True
    assert message(d.do("unregister", "a"), "unregistered") == []
    assert message(d.do("died", who="a"), "unregistered") == [("unregistered", "a")]
