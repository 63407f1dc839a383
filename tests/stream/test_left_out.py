"""What another system may leave out of its ledger, or do in its own way: such ledgers pass, and a wrong neighbour of each still fails."""

from __future__ import annotations

from typing import Any

import pytest

from kit.labs.stream.rules import replicas_answer
from kit.results.rules import Measured, Missing, NotMeasured, settle
from kit.stream.judge import resume_equals
from kit.stream.judge.history import LoopLedger
from tests.stream.ledgers import RULES_BY_NAME, finding

Rows = list[dict[str, Any]]


def row(event: str, **ids: Any) -> dict[str, Any]:
    return {"event": event, **ids}


def ledger(*rows: dict[str, Any]) -> LoopLedger:
    return LoopLedger([{"time": 10.0 + number, **one} for number, one in enumerate(rows)])


def violations(*rows: dict[str, Any]) -> dict[str, str]:
    """The checks that fail, each with its first violation."""
    found: dict[str, str] = {}
    for name in RULES_BY_NAME:
        try:
            one = finding(name, ledger(*rows))
        except NotMeasured:
            continue
        if one.value:
            found[name] = one.why
    return found


def tokens(count: int = 4, *, first: int = 0, group: int = 0, version: int = 0, replica: int = 0) -> dict[str, Any]:
    return row("tokens", group=group, sample=0, replica=replica, version=version, first=first, count=count)


def completed(group: int = 0, *, version: int = 0, replica: int = 0, length: int = 4, **more: Any) -> dict[str, Any]:
    return row("completed", group=group, sample=0, replica=replica, version=version, length=length, **more)


def sent(group: int = 0, *, replica: int = 0, **more: Any) -> dict[str, Any]:
    return row("sent", group=group, sample=0, replica=replica, **more)


def sample(group: int, *, version: int = 0, replica: int = 0, count: int = 4) -> Rows:
    about: dict[str, Any] = {"group": group, "version": version, "replica": replica}
    return [sent(group, replica=replica), tokens(count, **about), completed(**about, length=count)]


# -- requests that begin again ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shown", [["cancelled"], ["failed"], ["started"], ["cancelled", "started"], []])
def test_a_sample_may_begin_again_without_sent(shown: list[str]) -> None:
    between = [row(event, group=0, sample=0) for event in shown]

    def rows(*, length: int) -> Rows:
        again = [tokens(version=1), completed(version=1, length=length), row("trained", group=0, version=1)]
        end = [row("cleared", group=0, step=0), row("ended", why="done")]
        start = [row("capacity", window=0, group=1), tokens(), row("bumped", version=1)]
        return [*start, *between, *again, *end]

    assert violations(*rows(length=4)) == {}
    assert {"stamps_per_token", "tokens_conserved"} <= violations(*rows(length=8)).keys()


def test_late_tokens_of_an_earlier_request_belong_to_it() -> None:
    late = [sent(attempt=0), tokens(), row("failed", group=0, sample=0), sent(attempt=1), tokens(first=4)]
    assert violations(*late, tokens(), completed()) == {}
    twice = violations(*late, tokens(), tokens(), completed(length=4))
    assert twice["stamps_per_token"].startswith("group 0 sample 0: token 0 is stamped twice")


# -- syncs --------------------------------------------------------------------------------------------------------------------

CORE = {"core": "a"}  # only the kit's cores have this id


def served(group: int, version: int, replica: int = 0) -> Rows:
    return [sent(group, replica=replica), tokens(group=group, version=version, replica=replica)]


def published(version: int, replica: int = 0) -> dict[str, Any]:
    return row("published", version=version, replica=replica)


def step_to(version: int, *rows: dict[str, Any]) -> Rows:
    return [row("bumped", version=version), row("hold", version=version), row("sync_begin", version=version), *rows]


def test_a_sync_needs_no_end_unless_the_ledger_has_ends() -> None:
    rows = [published(0), *served(0, 0), *step_to(1, row("resume", version=1), published(1)), *served(1, 1)]
    assert violations(*rows) == {}
    late = violations(*rows, row("synced", version=1))
    assert "dispatch continues before the end of the sync that began" in late["publish_before_use"]


@pytest.mark.parametrize(("why", "more", "passes"), [
    ("done", {}, True), ("exhausted", {}, True), ("error", {}, False), ("done", CORE, True),
])  # fmt: skip
def test_the_last_hold_needs_no_resume_if_nothing_is_left(why: str, more: dict[str, Any], passes: bool) -> None:
    start = [row("hold", version=0), published(0), row("resume", version=0)]
    rows = [*start, *served(0, 0), *step_to(1, {**published(1), **more}, row("synced", version=1))]
    found = violations(*rows, row("ended", why=why)).get("publish_before_use", "")
    assert (not found) == passes
    assert passes or "never continued" in found or "dispatch has been held" in found


def test_a_core_that_ends_before_its_newest_version_is_served_needs_a_sync_of_that_version() -> None:
    start = [row("hold", version=0), published(0), row("resume", version=0), *served(0, 0)]
    late = [row("bumped", version=2), row("hold", version=2), {**published(1), **CORE}, row("synced", version=1)]
    found = violations(*start, *step_to(1, *late), row("ended", why="done"))
    assert "the last version was never served" in found["publish_before_use"]


def test_a_core_that_says_exhausted_although_its_data_are_not_must_dispatch_again() -> None:
    start = [row("hold", version=0), published(0), row("resume", version=0), *served(0, 0)]
    rows = [*start, *step_to(1, {**published(1), **CORE}, row("synced", version=1))]
    end = {**row("ended", why="exhausted"), "time": 1e5}
    assert "never continued" in violations(*rows, end)["publish_before_use"]
    assert "publish_before_use" not in violations(*rows, row("exhausted", **CORE), end)


def test_a_loop_that_never_ended_leaves_open_what_became_of_a_dead_replicas_requests() -> None:
    rows = [row("joined", replica=1), published(0, 1), sent(0, replica=1), row("died", replica=1)]
    with pytest.raises(NotMeasured, match="did not end, and 1 request of dead replicas"):
        finding("dead_rollout_named", ledger(*rows))
    assert "was not resent" in violations(*rows, row("ended", why="done"))["dead_rollout_named"]


def test_a_sample_that_moved_has_tokens_of_a_version_that_its_replica_never_had() -> None:
    start = [
        published(0),
        *served(0, 0),
        row("bumped", version=1),
        row("joined", replica=1),
        published(1),
        published(1, 1),
    ]
    moved = [*start, sent(replica=1), tokens(first=4, version=1, replica=1)]
    assert violations(*moved, completed(replica=1, length=8)) == {}
    assert "publish_before_use" in violations(*moved, completed(replica=1, length=8, newest=0))
    stayed = [*start, sent(1, replica=1), completed(1, replica=1)]
    assert "version 0 is used before it was published on replica 1" in violations(*stayed)["publish_before_use"]


# -- capacity -----------------------------------------------------------------------------------------------------------------


def begun(group: int, *, target: int | None = None) -> dict[str, Any]:
    return row("reserved", group=group, version=0, **({} if target is None else {"target": target}))


def test_groups_leave_the_slots_when_complete_if_there_is_no_ready() -> None:
    settings = row("capacity", slots=1, group=1)
    one_by_one = [one for group in range(3) for one in (begun(group), *sample(group))]
    assert violations(settings, *one_by_one) == {}
    at_once = violations(settings, begun(0), begun(1), *sample(0), *sample(1))
    assert "2 groups are in flight, slots: 1" in at_once["capacity_kept"]
    halves = [begun(0), completed(0), begun(1), row("completed", group=0, sample=1, version=0), completed(1)]
    assert "2 groups are in flight, slots: 1" in violations(settings, *halves)["capacity_kept"]


@pytest.mark.parametrize("ready", [True, False])
def test_groups_leave_the_buffer_when_complete_if_there_is_no_selected(ready: bool) -> None:
    settings = row("capacity", places=2, group=1)
    notes = [row("ready", group=group) for group in range(4)] if ready else []
    one_by_one = [one for group in range(4) for one in (begun(group), *sample(group), *notes[group : group + 1])]
    assert violations(settings, *one_by_one) == {}
    found = violations(settings, *[begun(group) for group in range(3)], *one_by_one[-4:])
    assert "3 groups are in the buffer, places: 2" in found["capacity_kept"]
    with_selected = violations(settings, *one_by_one, row("selected", group=0, step=0, version=0))
    assert "3 groups are in the buffer, places: 2" in with_selected["capacity_kept"]


def test_the_gate_counts_no_group_that_was_filtered() -> None:
    settings = {"window": 0, "groups_per_step": 1, "group": 1, "sampler": "in-order", "filter": True}

    def rows(*middle: dict[str, Any]) -> Rows:
        return [row("capacity", **settings), begun(0, target=0), *sample(0), *middle, row("bumped", version=1)]

    filtered, heir, dropped = row("filtered", group=0), begun(1, target=0), row("dropped", group=0)
    assert "capacity_kept" not in violations(*rows(filtered, heir, dropped))
    for early in (rows(heir, filtered, dropped), rows(heir, dropped)):
        assert "2 groups started up to version 0; the window allows 1" in violations(*early)["capacity_kept"]


# -- ends ---------------------------------------------------------------------------------------------------------------------


def test_without_any_ends_tokens_are_not_missed() -> None:
    rows = [*sample(0), *sample(1), row("trained", group=0, version=0)]
    with pytest.raises(Missing, match="no event that ends a group"):
        finding("tokens_conserved", ledger(*rows, row("ended", why="done")))
    wrong = violations(*rows, row("ended", why="done", generated=9))
    assert "states 9 generated tokens; counted from the rows: 8" in wrong["tokens_conserved"]
    with_ends = violations(*rows, row("cleared", group=0, step=0), row("ended", why="done"))
    assert "group 1 are neither trained nor wasted" in with_ends["tokens_conserved"]


@pytest.mark.parametrize("joined", [True, False])
def test_a_publication_shows_that_a_replica_is_back_if_there_is_no_joined(joined: bool) -> None:
    start = [row("joined", replica=1)] if joined else []
    died = [*start, published(0, 1), *sample(0, replica=1), row("died", replica=1), row("bumped", version=1)]
    found = violations(*died, published(1, 1), *sample(1, version=1, replica=1))
    assert ("the replica died in row" in found.get("dead_rollout_named", "")) is joined
    assert "the replica died in row" in violations(*died, *sample(1, replica=1))["dead_rollout_named"]


def ends_exhausted(**more: Any) -> Rows:
    trained = [row(event, step=0) for event in ("begin", "finish")] + [row("trained", group=0, step=0, version=0)]
    rows = [*sample(0), *sample(1), row("ready", group=1), *trained, row("bumped", version=1, step=0, **more)]
    return [*rows, row("exhausted"), row("aborted", group=1, time=99.0), row("ended", why="exhausted", time=99.0)]


def test_another_system_may_leave_over_a_part_of_a_step() -> None:
    assert "ends_cleanly" not in violations(*ends_exhausted())
    assert "a complete group was left over" in violations(*ends_exhausted(**CORE))["ends_cleanly"]


def test_replicas_answer_names_only_deaths_that_ended_the_loop() -> None:
    def answer(*rows: dict[str, Any], error: str = "disk full") -> Measured:
        return settle(replicas_answer(ledger(*rows, row("ended", why="error", error=error))))

    died, after = [sent(), row("died", replica=0)], sample(0, replica=1)
    assert answer(*died, *after).value == 0
    assert answer(*died, *after, error="disk 10 full").value == 0
    for wrong in (answer(*died), answer(*after, *died), answer(*died, *after, error="replica 0 died")):
        assert wrong.value == 1
        assert "replica 0 died" in wrong.why


@pytest.mark.parametrize(("filtered", "how", "passes"), [
    (True, "replaced", True), (True, "failed", True), (False, "replaced", False), (False, "failed", False),
])  # fmt: skip
def test_a_filtered_group_may_be_replaced_whatever_on_failed_is(filtered: bool, how: str, passes: bool) -> None:
    settings = row("capacity", on_failed="stop", filter=True, sampler="windowed", window=1)
    shown = row("filtered", group=0) if filtered else row("failed", group=0, sample=0)
    rows = [settings, begun(0), *sample(0), shown, begun(1), row(how, group=0, by=1), *sample(1), begun(2)]
    why = violations(*rows).get("eviction_justified", "")
    assert why == "" if passes else "the loop continues although on_failed=stop" in why


# -- steps --------------------------------------------------------------------------------------------------------------------


def test_a_group_of_an_aborted_step_may_be_trained_without_selected() -> None:
    trained = row("trained", group=0, step=0, version=0)
    failed = [row("begin", step=0), trained, row("error", of="finish", step=0), row("abort", step=0)]
    again = [row("begin", step=0), trained, row("finish", step=0), row("bumped", version=1, step=0)]
    assert "abort_on_failure" not in violations(*failed, *again, row("ended", why="done"))
    lost = violations(*failed, row("ended", why="error", error="NaN"))
    assert "neither ended nor became trainable again" in lost["abort_on_failure"]


@pytest.mark.parametrize(("groups_per_step", "passes"), [(2, True), (1, False), (None, True)])
def test_without_selected_the_number_of_groups_shows_that_a_step_is_over(
    groups_per_step: int | None, passes: bool
) -> None:
    def finished(step: int, update: int, group: int, version: int) -> Rows:
        about = {"step": step, "update": update}
        return [row("begin", **about), row("finish", **about), row("trained", group=group, version=version, **about)]

    rows = [row("capacity", group=1, groups_per_step=groups_per_step) if groups_per_step else row("capacity", group=1)]
    rows += [*sample(0), *finished(0, 0, 0, 0), row("cleared", group=0, step=0), row("bumped", version=1, step=0)]
    rows += [*sample(1), *finished(1, 0, 1, 1), row("error", of="clear", step=1, update=0)]
    found = violations(*rows, row("ended", why="error", error="clear failed")).get("one_clear_per_finish", "")
    assert found == "" if passes else "the version never rose although the step was finished" in found


def test_an_update_may_be_tried_again_alone() -> None:
    def finished(update: int) -> Rows:
        about = {"step": 0, "update": update}
        trained = [row("trained", group=2 * update + place, version=0, **about) for place in range(2)]
        return [row("begin", **about), row("finish", **about), *trained]

    failed = [row("begin", step=0, update=1), row("error", of="begin", step=0, update=1), row("abort", step=0)]
    start = [row("capacity", groups_per_step=4, group=1, train_global_batch_size=2), *finished(0), *failed]
    end = row("bumped", version=1, step=0)
    assert "one_step_per_batch" not in violations(*start, *finished(1), end)
    again = violations(*start, *finished(0), end)["one_step_per_batch"]
    assert "step 0 trained 2 groups" in again
    skips = violations(*start[:1], *finished(1), end)["one_step_per_batch"]
    assert "0 updates of the step were already finished" in skips
    small = violations(*start, *finished(1)[:3], end)["one_step_per_batch"]
    assert "step 0 trained 3 groups" in small


@pytest.mark.parametrize("second", ["3.0", "1.0"])
def test_an_update_that_is_tried_again_is_logged_again(second: str) -> None:
    def logged(start: float, seconds: str) -> Rows:
        about, end = {"step": 0, "update": 0}, start + float(seconds)
        trained = [
            row("begin", **about, time=start),
            row("done", of="begin", **about, time=end),
            row("metrics", version=0, **about, time=end),
        ]
        return [*trained, row("logged", version=0, **about, s_training=seconds, time=end)]

    first, again = logged(1.0, "1.0"), logged(3.0, "3.0")
    again[-1] |= {"s_training": second}
    found = violations(row("capacity", time=0.0), *first, row("abort", step=0, time=2.0), *again)
    assert second == "3.0" or "states s_training 1.0; counted from the rows: 3" in found["metrics_true"]
    assert ("metrics_true" in found) is (second != "3.0")


@pytest.mark.parametrize(("place", "queue", "passes"), [
    (False, 1, True), (False, 0, False), (True, 1, False), (True, 0, True),
])  # fmt: skip
def test_groups_of_an_aborted_step_wait_again_without_place(place: bool, queue: int, passes: bool) -> None:
    places = [row("place", group=1)] if place else []
    rows = [*places, *sample(0), row("ready", group=0), *sample(1), row("ready", group=1)]
    rows += [row("selected", group=0, step=0, version=0), row("begin", step=0), row("abort", step=0)]
    rows += [row("selected", group=1, step=1, version=0), row("metrics", version=0, queue=queue)]
    found = violations(*rows, row("bumped", version=1)).get("metrics_true", "")
    assert found == "" if passes else f"states queue {queue}" in found


# -- requests that go on -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("answer", "lost"), [
    ([completed()], 0), ([], 0), ([tokens(1, first=4), completed(length=5)], 0),
    ([completed(length=1)], 3), ([tokens(), completed()], 4),
])  # fmt: skip
def test_a_request_that_adds_no_token_wastes_none(answer: Rows, lost: int) -> None:
    found = violations(row("capacity", at_sync="keep"), sent(), tokens(), sent(), *answer).get("no_needless_waste", "")
    assert found == "" if not lost else f"{lost} tokens of the attempt in row 1 lost" in found


# -- a resumed run --------------------------------------------------------------------------------------------------------------


def resumes(before: Rows, *after: dict[str, Any]) -> str:
    """The first violation of a run that is resumed at version 1, if any."""
    found = settle(resume_equals(ledger(*before), ledger(row("resumed", step=1, version=1), *after)))
    return found.why if found.value else ""


def stopped(*groups: int, version: int = 0) -> Rows:
    begun_groups = [row("reserved", group=group, version=0) for group in groups]
    return [*begun_groups, row("trained", group=groups[0], version=version), row("bumped", version=1)]


def test_ids_with_gaps_show_no_lost_prompt() -> None:
    assert resumes(stopped(10, 20), row("reserved", group=20, version=1), row("reserved", group=30, version=1)) == ""
    lost = resumes(stopped(0, 1), row("reserved", group=1, version=1), row("reserved", group=3, version=1))
    assert lost.startswith("group 2 is in neither run")


@pytest.mark.parametrize("late", [True, False])
def test_a_group_may_be_noted_as_trained_after_the_version_rose(late: bool) -> None:
    *begins, trained, bumped = stopped(0, 1)
    before = [*begins, *([bumped, trained] if late else [trained, bumped])]
    assert resumes(before, row("reserved", group=1, version=1)) == ""
    again = [row("reserved", group=1, version=1), row("trained", group=0, version=1)]
    assert "trained before the stop" in resumes(before, *again)
    assert "is lost" in resumes([*begins, bumped, {**trained, "version": 1}], row("reserved", group=1, version=1))


# -- groups beyond the run, and groups given up at its end --------------------------------------------------------------------

READY_FIRST: dict[str, Any] = {"sampler": "ready-first", "window": 1, "group": 1, "groups_per_step": 1}
FIRST_STEP = [row("reserved", group=0, version=0), row("reserved", group=1, version=0), row("bumped", version=1)]


@pytest.mark.parametrize(
    "rest",
    [
        [row("filtered", group=1), row("dropped", group=1), row("reserved", group=2, version=1), row("ended", why="error", error="x")],
        [row("filtered", group=1), row("reserved", group=2, version=1), row("bumped", version=2), row("dropped", group=1)],
        [
            row("failed", group=1, sample=0),
            row("reserved", group=2, version=1),
            row("bumped", version=2),
            row("failed", group=1),
        ],
    ],
    ids=["of a step that never ended", "filtered before the end", "failed before the end"],
)  # fmt: skip
def test_a_group_may_take_the_place_of_one_that_was_lost_in_the_last_step(rest: Rows) -> None:
    settings = row("capacity", steps=2, on_failed="replace", **READY_FIRST)
    assert "capacity_kept" not in violations(settings, *FIRST_STEP, *rest)
    kept = [one for one in rest if one.get("group") != 1]
    assert "all their groups" in violations(settings, *FIRST_STEP, *kept)["capacity_kept"]


def test_what_is_left_when_a_step_shrank_for_a_reason_may_be_given_up() -> None:
    settings = row(
        "capacity", sampler="windowed", window=0, groups_per_step=2, steps=1, group=1, on_failed="shrink", filter=True
    )
    rows = [
        settings,
        *(row("reserved", group=group, version=0) for group in range(3)),
        row("filtered", group=1),
        row("dropped", group=1),
        row("selected", group=0, step=0, version=0),
        row("begin", step=0),
        row("aborted", group=2),
        row("finish", step=0),
        row("bumped", version=1, step=0),
    ]
    assert "eviction_justified" not in violations(*rows)
    assert "eviction_justified" in violations(*(one for one in rows if one["event"] != "filtered"))


@pytest.mark.parametrize(
    "rows",
    [
        [row("capacity", **READY_FIRST), row("reserved", group=0, version=0), row("evicted", group=0)],
        [
            row("capacity", **{**READY_FIRST, "sampler": "strict"}),
            row("bumped", version=1),
            row("reserved", group=0, version=1),
            row("evicted", group=0),
        ],
    ],
    ids=["by a sampler without age", "of this version"],
)
def test_what_is_left_out_excuses_no_eviction_that_nothing_could_justify(rows: Rows) -> None:
    assert "eviction_justified" in violations(*rows, row("reserved", group=1, version=1))


def test_an_eviction_that_cannot_be_judged_hides_no_other_end() -> None:
    """Without `bumped` the eviction may have been due; the straggler was dropped for no reason all the same."""
    settings = row("capacity", sampler="windowed", window=0, group=1, groups_per_step=1, on_failed="replace")
    begun = [row("reserved", group=group, version=0) for group in range(3)]
    with pytest.raises(Missing, match="`bumped`"):
        finding("eviction_justified", ledger(settings, *begun[:2], row("evicted", group=0), begun[2]))
    ends = [row("evicted", group=0), row("dropped", group=1)]
    assert "`dropped` of group 1" in violations(settings, *begun[:2], *ends, begun[2])["eviction_justified"]


def test_a_pair_of_permits_of_which_one_half_is_left_out_is_not_measured() -> None:
    slots = [row("slot", group=0), row("slot_back", group=0)]
    whole = [row("place", group=0), *slots, row("place_back", group=0), row("ended", why="done")]
    assert finding("permits_return", ledger(*whole)).value == 0
    with pytest.raises(Missing, match="`place_back`"):
        finding("permits_return", ledger(*(one for one in whole if one["event"] != "place_back")))


def test_a_logged_word_is_no_number_that_is_compared() -> None:
    rows = [
        row("metrics", version=1, s_sync="n/a", groups=1),
        row("trained", group=0, version=0, step=0),
        row("bumped", version=1),
    ]
    assert "metrics_true" not in violations(*rows)
