"""The controller's rules, one by one. `tests/stream/test_mutants.py` runs these too, against a core with one rule broken."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kit.errors import BadInput
from kit.loop.messages import Event
from kit.stream.core import Controller, ForeignAnswer, resume_from
from kit.stream.settings import Resume
from tests.stream.driver import Driver, small, train_step

# -- dispatch -------------------------------------------------------------------------------------------------------------


def test_nothing_is_dispatched_before_the_base_is_published() -> None:
    plain = Controller(small())
    state, commands = plain.begin()
    assert [one.name for one in commands] == ["joined", "hold", "progress", "acquire"]
    state, commands = plain.step(state, Event("granted", kind="generation"))
    assert [(one.name, one.version) for one in commands] == [("sync_begin", 0), ("sync", 0)]
    state, commands = plain.step(state, Event("published", version=0, replica=0))
    assert commands == ()
    state, commands = plain.step(state, Event("synced", version=0))
    assert [one.name for one in commands] == ["resume", "next_prompt"]


def test_the_gate_lets_window_plus_one_batches_through_and_stamps_them() -> None:
    driver = Driver(small(window=1, places=8, slots=8, steps=5))
    assert [(one.group, one.version, one.target) for one in driver.did("reserved")] == [
        (0, 0, 0),
        (1, 0, 0),
        (2, 0, 1),
        (3, 0, 1),
    ]
    assert not driver.wants("next_prompt")


def test_no_batch_starts_that_no_step_of_the_run_could_train() -> None:
    driver = Driver(small(window=3, places=8, slots=8, steps=2))
    assert driver.groups("reserved") == [0, 1, 2, 3]


def test_a_place_and_a_slot_are_taken_before_the_gate_is_asked() -> None:
    driver = Driver(small(window=1, places=4, slots=3, steps=5))
    assert driver.groups("slot") == driver.groups("place") == [0, 1, 2]
    assert driver.state.index == 1
    assert driver.state.position == 1
    driver = Driver(small(sampler="windowed", places=2, slots=4, steps=5))
    assert driver.groups("reserved") == [0, 1]
    driver = Driver(small(window=1, places=4, slots=2, steps=5))
    assert driver.state.index == 0, "the gate was asked although no slot was free"


def test_nothing_is_reserved_while_no_replica_serves() -> None:
    driver = Driver(small(on_dead_replica="go-on"), answers=("acquire", "sync"))
    driver.event("died", replica=0)
    driver.answer(driver.one("next_prompt"))
    assert driver.groups("reserved") == []
    driver.event("joined", replica=1)
    assert driver.groups("reserved") == [0]


def test_a_group_has_the_version_at_its_reservation() -> None:
    driver = Driver(small(sampler="windowed", min_groups=2, places=2, window=2, steps=4))
    driver.finish_group(0, 1)
    train_step(driver)
    driver.finish_group(2, 3)
    assert driver.state.version == 1
    assert [driver.state.buffer[number].version for number in (4, 5)] == [1, 1]


def test_the_sampler_capacity_takes_groups_in_the_order_of_their_completion() -> None:
    driver = Driver(small(sampler="capacity", min_groups=2))
    driver.finish_group(2, 1)
    assert driver.groups("selected") == [2, 1]


def test_samples_of_a_group_go_to_one_replica_and_groups_to_the_one_with_the_fewest() -> None:
    driver = Driver(small(replicas=2, window=1))
    sent = [(one.group, one.sample, one.replica, one.attempt) for one in driver.wants("generate")]
    assert sent == [(group, sample, group % 2, 0) for group in range(4) for sample in range(2)]
    rows = [(one.group, one.sample, one.replica, one.attempt) for one in driver.did("sent")]
    assert rows == sent


# -- groups ---------------------------------------------------------------------------------------------------------------


def test_a_group_is_ready_with_its_last_sample_and_gives_its_slot_back() -> None:
    driver = Driver(small(min_groups=2))
    first, second = driver.wants("generate")[:2]
    driver.answer(first, version=0)
    assert driver.groups("ready") == []
    driver.answer(second, version=0)
    assert driver.groups("ready") == [0]
    assert driver.groups("slot_back") == [0]
    assert driver.groups("place_back") == [], "the place is kept until selection"


def test_ready_has_the_oldest_and_the_newest_version_of_any_token() -> None:
    driver = Driver(small(at_sync="keep", min_groups=2, window=1, steps=4))
    waiting = [one for one in driver.wants("generate") if one.group == 2]
    driver.answer(waiting[0], version=0)
    driver.finish_group(0, 1)
    train_step(driver)
    assert driver.state.version == 1
    driver.asked.remove(waiting[1])
    ids = {"group": 2, "sample": 1, "replica": 0}
    driver.event("completed", **ids, version=1, newest=1, length=3, reward="1")
    ready = next(one for one in driver.did("ready") if one.group == 2)
    assert (ready.version, ready.newest) == (0, 1)


def test_an_answer_is_taken_once() -> None:
    driver = Driver(small(min_groups=2))
    one = driver.wants("generate")[0]
    driver.answer(one)
    before = driver.state
    ids = {"group": 0, "sample": 0, "replica": 0}
    driver.event("completed", **ids, version=0, newest=0, length=4, reward="0")
    driver.event("failed", group=0, sample=0, why="late")
    driver.event("cancelled", group=0, sample=0)
    assert driver.state == before


def test_a_filtered_group_is_made_up_for_with_the_same_target() -> None:
    driver = Driver(small(filter=True, window=0, sampler="strict", places=2, min_groups=2))
    driver.finish_group(0, reward="0.5")
    assert driver.groups("filtered") == driver.groups("dropped") == [0]
    assert [(one.group, one.target) for one in driver.did("reserved")] == [(0, 0), (1, 0), (2, 0)]
    assert driver.state.accepted == 0
    driver.finish_group(1, 2)
    assert driver.groups("selected") == [1, 2]


def test_groups_without_variance_are_counted_and_trained_without_the_filter() -> None:
    driver = Driver(small(min_groups=2))
    driver.finish_group(0, reward="0.5")
    driver.finish_group(1)
    assert driver.state.counts["flat"] == 1
    assert driver.groups("selected") == [0, 1]


# -- steps ----------------------------------------------------------------------------------------------------------------


def test_a_step_begins_with_its_first_chunk_while_others_are_generated() -> None:
    driver = Driver(small(window=1, min_groups=1))
    driver.finish_group(1)
    assert driver.groups("selected") == [1]
    assert driver.groups("place_back") == [1]
    assert [one.name for one in driver.asked if one.to == "trainer"] == ["begin", "microbatch"]
    assert driver.one("microbatch").groups == (1,)
    driver.answer(driver.one("begin"))
    driver.answer(driver.one("microbatch"))
    assert not driver.wants("finish"), "the step has one of its two groups"
    driver.finish_group(0)
    assert not driver.wants("begin"), "one begin for an update"
    assert driver.one("microbatch").groups == (0,)
    driver.answer(driver.one("microbatch"))
    assert (driver.one("finish").step, driver.one("finish").update) == (0, 0)


def test_a_selection_gives_at_least_the_minimum_or_nothing_and_at_most_what_is_missing() -> None:
    settings = small(groups=4, train_global_batch_size=8, min_groups=3, places=8, slots=8, window=1)
    driver = Driver(settings)
    driver.finish_group(0, 1)
    assert driver.groups("selected") == []
    driver.finish_group(3)
    assert driver.groups("selected") == [0, 1, 3]
    driver.finish_group(2)
    assert driver.groups("selected") == [0, 1, 3, 2], "the last chunk may be small"
    driver.finish_group(4)
    assert len(driver.groups("selected")) == 4


def test_versions_count_steps_and_updates_count_finishes() -> None:
    driver = Driver(small(train_global_batch_size=2, min_groups=2, window=0, sampler="strict", places=2))
    driver.finish_group(0, 1)
    driver.answer(driver.one("begin"))
    assert not driver.wants("finish"), "its microbatch has no answer yet"
    driver.answer(driver.one("microbatch"))
    driver.answer(driver.one("finish"))
    assert (driver.state.updates, driver.state.version) == (1, 0)
    assert not driver.state.held
    assert [one.update for one in driver.did("begin")] == [0, 1]
    train_step(driver)
    assert (driver.state.updates, driver.state.version) == (2, 1)
    bumped = driver.did("bumped")[0]
    assert (bumped.version, bumped.updates, bumped.step) == (1, 2, 0)
    assert [(one.group, one.update, one.version) for one in driver.did("trained")] == [(0, 0, 0), (1, 1, 0)]


def test_dispatch_is_held_in_the_transition_in_which_the_version_moves() -> None:
    driver = Driver(small(min_groups=2, window=1))
    driver.at_once = ("acquire", "next_prompt")
    driver.finish_group(0, 1)
    driver.answer(driver.one("begin"))
    driver.answer(driver.one("microbatch"))
    before = len(driver.log)
    driver.answer(driver.one("finish"))
    names = [one.name for one in driver.log[before:]]
    assert names.index("trained") < names.index("bumped") < names.index("hold") < names.index("sync_begin")
    assert driver.state.held
    sync = driver.one("sync")
    assert (sync.version, sync.at_sync, sync.replicas) == (1, "keep", (0,))
    driver.event("published", version=1, replica=0)
    assert driver.groups("reserved") == [0, 1, 2, 3]
    driver.finish_group(2, 3, version=0)
    assert driver.groups("selected") == [0, 1], "nothing is trained before the weights are published"
    driver.asked.remove(sync)
    driver.event("synced", version=1)
    assert [one.version for one in driver.did("resume")] == [0, 1]
    assert driver.groups("selected") == [0, 1, 2, 3]


def test_rows_are_cleared_once_per_finish_and_groups_end_then() -> None:
    driver = Driver(small(min_groups=2))
    driver.finish_group(0, 1)
    for name in ("begin", "microbatch"):
        driver.answer(driver.one(name))
    assert not driver.wants("clear")
    driver.answer(driver.one("finish"))
    assert (driver.one("clear").step, driver.one("clear").groups) == (0, (0, 1))
    assert driver.groups("cleared") == []
    driver.answer(driver.one("clear"))
    assert driver.groups("cleared") == [0, 1]


def test_a_failed_clear_ends_the_run_after_the_version_has_moved() -> None:
    driver = Driver(small(min_groups=2))
    driver.finish_group(0, 1)
    for name in ("begin", "microbatch", "finish"):
        driver.answer(driver.one(name))
    driver.fail(driver.one("clear"))
    assert (driver.ended["why"], driver.ended["version"]) == ("error", 1)
    assert driver.groups("aborted")[:2] == [0, 1]
    assert "clear of step 0 failed after version 1 was reached" in driver.ended["error"]


def test_a_chunk_without_a_valid_token_is_consumed_unrun() -> None:
    driver = Driver(small(min_groups=1))
    driver.finish_group(0, length=0)
    assert not driver.wants("begin")
    driver.finish_group(1)
    assert driver.one("microbatch").groups == (1,)
    train_step(driver)
    assert driver.groups("dropped") == [0]
    assert driver.groups("trained") == driver.groups("cleared") == [1]
    assert driver.did("clear")[0].groups == (0, 1), "rows of what was not run are cleared too"


def test_a_step_without_any_valid_token_ends_in_a_named_error() -> None:
    driver = Driver(small(min_groups=2))
    driver.finish_group(0, 1, length=0)
    assert driver.ended["error"] == "step 0 update 0 has no valid token in its 2 groups"
    assert not driver.did("begin", "finish", "abort")


def test_log_probabilities_come_before_training_and_under_their_own_grant() -> None:
    driver = Driver(small(previous="recomputed", reference="recomputed", min_groups=2))
    driver.finish_group(0, 1)
    assert [(one.which, one.groups) for one in driver.wants("logprobs")] == [
        ("previous", (0, 1)),
        ("reference", (0, 1)),
    ]
    for one in driver.wants("logprobs"):
        assert not driver.wants("begin")
        driver.answer(one)
    assert driver.one("microbatch").groups == (0, 1)
    kinds = [(one.name, one.kind) for one in driver.did("acquire", "release")]
    assert kinds == [
        ("acquire", "generation"),
        ("acquire", "logprobs"),
        ("release", "logprobs"),
        ("acquire", "training"),
    ]


def test_what_is_scored_is_trained_before_the_next_chunk_is_scored() -> None:
    driver = Driver(small(previous="recomputed", min_groups=1))
    driver.finish_group(0, 1)
    driver.answer(driver.one("logprobs"))
    assert [one.kind for one in driver.did("acquire")] == ["generation", "logprobs", "training"]
    assert driver.one("microbatch").groups == (0,)
    assert driver.one("logprobs").groups == (1,), "under the grant for training"


def test_previous_log_probabilities_are_all_there_before_the_first_of_several_finishes() -> None:
    for previous, finishes in (("recomputed", 0), ("off", 1)):
        driver = Driver(small(previous=previous, train_global_batch_size=2, min_groups=1), at_once=("logprobs",))
        driver.finish_group(0)
        driver.answer(driver.one("begin"))
        driver.answer(driver.one("microbatch"))
        assert len(driver.wants("finish")) == finishes, "the weights would move before group 1 is scored"
    driver = Driver(
        small(previous="recomputed", train_global_batch_size=2), at_once=("logprobs", "begin", "microbatch")
    )
    driver.finish_group(0, 1)
    assert len(driver.wants("finish")) == 1


def test_the_trainers_devices_are_released_after_the_weights_are_published() -> None:
    driver = Driver(small(min_groups=2))
    driver.at_once = ("acquire", "next_prompt")
    driver.finish_group(0, 1)
    for name in ("begin", "microbatch", "finish"):
        driver.answer(driver.one(name))
    assert not driver.did("release")
    driver.answer(driver.one("sync"))
    assert [one.kind for one in driver.did("release")] == ["training"]


# -- failures of a step ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", ["begin", "microbatch", "finish"])
def test_a_failure_of_the_trainer_aborts_the_step_and_ends_the_run(failing: str) -> None:
    driver = Driver(small(min_groups=2))
    driver.finish_group(0, 1)
    for name in ("begin", "microbatch", "finish"):
        if name == failing:
            driver.fail(driver.one(name))
            break
        driver.answer(driver.one(name))
    driver.fail(driver.one("abort"), "the abort failed too")
    assert driver.ended["error"] == f"{failing} of step 0 failed: injected", "the first error is raised"
    assert (driver.ended["version"], driver.ended["updates"]) == (0, 0)
    assert sorted(driver.groups("aborted")) == [0, 1, 2, 3]
    assert sorted(driver.groups("place_back")) == [0, 0, 1, 1, 2, 3]


def test_a_second_failure_of_a_step_changes_nothing() -> None:
    driver = Driver(small(min_groups=1, step_retries=2))
    driver.finish_group(0, 1)
    for one in driver.wants("microbatch"):
        driver.fail(one)
    assert len(driver.wants("abort")) == 1
    assert driver.state.retried == 1


def test_the_first_error_is_the_one_that_is_raised() -> None:
    driver = Driver(small(min_groups=2))
    driver.finish_group(0, 1)
    driver.event("died", replica=0)
    driver.event("error", of="next_prompt", why="no data")
    driver.answer(driver.one("abort"))
    assert driver.ended["error"] == "replica 0 died"


def test_a_step_may_be_given_up_and_its_groups_are_trainable_again() -> None:
    driver = Driver(small(step_retries=1, min_groups=2))
    driver.finish_group(0, 1)
    driver.fail(driver.one("begin"))
    driver.answer(driver.one("abort"))
    assert driver.groups("place").count(0) == 2
    assert driver.groups("selected") == [0, 1, 0, 1]
    assert [one.step for one in driver.did("begin")] == [0, 1], "another step, another id"
    driver.event("done", of="microbatch", step=0, update=0, groups=(0, 1))
    assert driver.state.step is not None
    assert driver.state.step.unanswered == 2, "an answer of the step that was given up changes nothing"
    driver.asked = [one for one in driver.asked if one.get("step") != 0]
    train_step(driver)
    assert driver.state.version == 1
    assert driver.groups("trained") == [0, 1]
    driver.finish_group(2, 3)
    driver.fail(driver.one("begin"))
    driver.answer(driver.one("abort"))
    assert driver.ended["why"] == "error", "one retry was allowed"


def test_where_no_place_is_free_a_group_of_an_aborted_step_ends_and_is_made_up_for() -> None:
    driver = Driver(small(step_retries=1, min_groups=1, sampler="windowed", places=2, steps=4))
    driver.finish_group(0)
    assert driver.groups("reserved") == [0, 1, 2]
    driver.fail(driver.one("begin"))
    driver.answer(driver.one("abort"))
    assert driver.groups("aborted") == [0]
    assert driver.state.owed[0].replaces is None


def test_a_step_of_which_something_is_in_the_weights_is_not_tried_again() -> None:
    driver = Driver(small(step_retries=5, train_global_batch_size=2, min_groups=2))
    driver.finish_group(0, 1)
    for name in ("begin", "microbatch", "finish"):
        driver.answer(driver.one(name))
    driver.fail(driver.wants("begin")[0])
    driver.answer(driver.one("abort"))
    driver.answer(driver.one("clear"))
    assert (driver.ended["why"], driver.ended["updates"], driver.ended["version"]) == ("error", 1, 0)


def test_an_error_while_a_finish_is_under_way_waits_for_it_and_counts_it() -> None:
    driver = Driver(small(min_groups=2))
    driver.finish_group(0, 1)
    driver.answer(driver.one("begin"))
    driver.answer(driver.one("microbatch"))
    driver.event("died", replica=0)
    assert not driver.did("abort")
    driver.answer(driver.one("finish"))
    assert not driver.state.closed
    driver.answer(driver.one("clear"))
    assert (driver.ended["version"], driver.ended["updates"]) == (1, 1)
    assert driver.groups("cleared") == [0, 1]
    assert not [one for one in driver.did("sync") if one.version == 1]


@pytest.mark.parametrize("step", [0, 7])
def test_answers_of_steps_that_were_never_opened_are_refused(step: int) -> None:
    driver = Driver(small(min_groups=2))
    before = driver.state
    with pytest.raises(ForeignAnswer, match=f"answered microbatch of step {step}; 0 steps were opened"):
        driver.core.step(driver.state, Event("done", of="microbatch", step=step, update=0))
    assert driver.state == before


# -- samples that fail, replicas that go ----------------------------------------------------------------------------------


def test_a_failed_sample_stops_the_run_by_default() -> None:
    driver = Driver(small())
    driver.fail(driver.wants("generate")[1])
    assert driver.ended["error"] == "group 0 sample 1 failed: injected"
    assert driver.groups("failed") == [0]


def test_a_failed_group_is_replaced_in_its_batch() -> None:
    driver = Driver(small(on_failed="replace", min_groups=2, window=0, sampler="strict", places=2))
    failed, sibling = driver.wants("generate")[:2]
    driver.asked.remove(failed)
    driver.event("failed", group=0, sample=0, why="crashed")
    assert (driver.one("cancel").group, driver.one("cancel").sample) == (0, 1)
    assert driver.groups("place_back") == [], "a sample is still in flight"
    driver.asked.remove(sibling)
    driver.answer(driver.one("cancel"))
    replaced = driver.did("replaced")[0]
    assert (replaced.group, replaced.by) == (0, 2)
    assert [(one.group, one.target) for one in driver.did("reserved")] == [(0, 0), (1, 0), (2, 0)]


def test_a_group_that_cannot_be_replaced_any_more_ends_as_failed() -> None:
    driver = Driver(small(on_failed="replace", window=0, sampler="strict", places=2))
    driver.prompts = 2
    first = driver.wants("generate")[0]
    driver.asked.remove(first)
    driver.event("failed", group=0, sample=0, why="crashed")
    driver.answer(driver.one("cancel"))
    driver.finish_group(1)
    train_step(driver)
    assert driver.groups("failed") == [0]
    assert driver.groups("reserved") == [0, 1]
    assert driver.ended["error"] == "the data ended with 1 of 2 groups of a step selected and 0 in the buffer"


def test_a_step_that_shrinks_to_what_is_in_the_weights_is_over() -> None:
    driver = Driver(small(on_failed="shrink", train_global_batch_size=2, min_groups=1))
    driver.finish_group(0)
    train_step(driver)
    assert (driver.state.updates, driver.state.version) == (1, 0)
    driver.event("failed", group=1, sample=0, why="crashed")
    assert (driver.state.updates, driver.state.version) == (1, 1)
    assert not driver.state.held


def test_a_gated_group_that_is_too_old_is_made_up_for() -> None:
    driver = Driver(
        small(sampler="weight-fifo", on_failed="shrink", min_groups=1, window=1, steps=4, slots=8, places=8)
    )
    driver.finish_group(0, 1)
    train_step(driver)
    driver.event("failed", group=4, sample=0, why="crashed")
    driver.finish_group(2, 3, version=0)
    train_step(driver)
    assert driver.groups("trained") == [0, 1, 2], "the step of version 1 does without a group"
    assert driver.groups("evicted") == [3]
    assert driver.groups("reserved") == [*range(9)], "4 batches of 2, and one for the group that was too old"


def test_rows_of_groups_that_are_not_trained_are_discarded() -> None:
    driver = Driver(small(filter=True, on_failed="replace", min_groups=2))
    driver.finish_group(0, reward="1")
    assert [one.group for one in driver.did("discard")] == [0]
    one, other = [one for one in driver.wants("generate") if one.group == 1]
    driver.answer(one)
    driver.asked.remove(other)
    driver.event("failed", group=1, sample=1, why="crashed")
    assert [one.group for one in driver.did("discard")] == [0, 1]
    driver.event("failed", group=2, sample=0, why="crashed")
    driver.answer(driver.one("cancel"))
    assert [one.group for one in driver.did("discard")] == [0, 1], "no sample of it was complete"
    driver.event("error", of="discard", group=0, why="no such row")
    assert not driver.state.ending


def test_groups_are_not_replaced_for_ever() -> None:
    driver = Driver(small(on_failed="replace", slots=2, window=0, sampler="strict"))
    for _ in range(4):
        driver.fail(driver.wants("generate")[0])
        driver.answer(driver.wants("cancel")[0])
    assert not driver.state.ending
    driver.finish_group(driver.wants("generate")[0].group)
    assert driver.state.failed_in_a_row == 0
    driver = Driver(small(on_failed="replace", slots=2, window=0, sampler="strict"))
    for _ in range(5):
        driver.fail(driver.wants("generate")[0])
        if driver.wants("cancel"):
            driver.answer(driver.wants("cancel")[0])
    assert driver.ended["error"].startswith("5 groups failed and none completed; the last: group ")


def test_a_step_shrinks_by_the_failed_group_down_to_the_floor() -> None:
    settings = small(groups=3, train_global_batch_size=6, places=6, slots=6, on_failed="shrink", floor=2, window=1)
    driver = Driver(settings)
    for sample in (0, 1):
        driver.event("failed", group=1, sample=sample, why="crashed")
    assert driver.groups("failed") == [1]
    driver.finish_group(0, 2)
    train_step(driver)
    assert driver.state.version == 1
    assert driver.groups("trained") == [0, 2]
    driver.event("failed", group=3, sample=0, why="crashed")
    assert driver.state.shrunk == {1: 1}
    driver.event("failed", group=4, sample=0, why="crashed")
    assert driver.ended["error"] == "groups left for the step of version 1: 1, below floor=2"


def test_a_step_that_shrinks_takes_what_is_there() -> None:
    settings = small(groups=3, train_global_batch_size=6, min_groups=3, places=6, slots=6, on_failed="shrink")
    driver = Driver(settings)
    driver.finish_group(0, 2)
    driver.event("failed", group=1, sample=0, why="crashed")
    driver.answer(driver.one("cancel"))
    assert driver.groups("selected") == [0, 2]


def test_a_group_that_ends_is_not_sent_again() -> None:
    driver = at_a_sync("abort", on_failed="replace")
    first, second = [one for one in driver.wants("cancel") if one.group == 2]
    driver.answer(first)
    driver.asked.remove(second)
    driver.event("failed", group=2, sample=1, why="crashed")
    for one in driver.wants("cancel"):
        driver.answer(one)
    driver.answer(driver.one("sync"))
    assert {one.group for one in driver.did("generate") if one.attempt == 1} == {3}
    assert [one.group for one in driver.did("replaced")] == [2]


def test_a_dead_replica_stops_the_run_or_its_requests_go_to_another() -> None:
    driver = Driver(small(replicas=2))
    driver.event("died", replica=1, why="SIGKILL")
    assert driver.ended["error"] == "replica 1 died: SIGKILL"
    driver = Driver(small(replicas=2, on_dead_replica="go-on"))
    lost = [one for one in driver.wants("generate") if one.replica == 1]
    ids = {"sample": 0, "replica": 1, "version": 0}
    driver.event("tokens", group=1, **ids, first=0, count=3)
    before = len(driver.log)
    driver.event("died", replica=1)
    again = [one for one in driver.log[before:] if one.name == "generate"]
    assert [(one.group, one.sample, one.replica, one.attempt) for one in again] == [
        (one.group, one.sample, 0, 1) for one in lost
    ]
    assert driver.state.counts["wasted"] == 3
    driver.event("completed", group=1, **ids, newest=0, length=3, reward="1")
    assert driver.state.buffer[1].samples[0].status == "running", "the dead replica's answer has no reader"
    driver.event("tokens", group=1, **ids, first=3, count=2)
    assert driver.state.counts["wasted"] == 5


def test_with_no_replica_everything_waits_and_goes_on_when_one_has_joined() -> None:
    driver = Driver(small(replicas=1, on_dead_replica="go-on"))
    driver.event("died", replica=0)
    assert len(driver.state.waiting) == 8
    before = len(driver.log)
    driver.event("joined", replica=4)
    joined = driver.log[before:]
    assert [(one.name, one.replicas) for one in joined if one.name == "sync"] == [("sync", (4,))]
    assert [one.replica for one in joined if one.name == "generate"] == [4] * 8
    assert joined.index(driver.did("sync")[-1]) < joined.index(driver.did("generate")[8])


def test_a_replica_that_joins_while_the_weights_move_gets_the_version_after_them() -> None:
    """Once the trainer is free to send, it has newer weights than the current version."""
    driver = Driver(small(min_groups=2))
    driver.at_once = ("acquire", "next_prompt")
    driver.finish_group(0, 1)
    for name in ("begin", "microbatch"):
        driver.answer(driver.one(name))
    driver.event("joined", replica=4)
    assert not driver.wants("sync")
    driver.answer(driver.one("finish"))
    assert (driver.one("sync").version, driver.one("sync").replicas) == (1, (0, 4))


def test_a_replica_that_joined_while_an_update_failed_gets_the_version_before_it() -> None:
    driver = Driver(small(min_groups=2, step_retries=1))
    driver.at_once = ("acquire", "next_prompt")
    driver.finish_group(0, 1)
    for name in ("begin", "microbatch"):
        driver.answer(driver.one(name))
    driver.event("joined", replica=4)
    driver.fail(driver.one("finish"))
    assert (driver.one("sync").version, driver.one("sync").replicas) == (0, (4,))


def test_a_sync_that_lost_a_replica_is_tried_with_the_others() -> None:
    driver = Driver(small(replicas=2, on_dead_replica="go-on", min_groups=2))
    driver.at_once = ("acquire", "next_prompt")
    driver.finish_group(0, 1)
    for name in ("begin", "microbatch", "finish"):
        driver.answer(driver.one(name))
    driver.event("died", replica=1)
    driver.fail(driver.one("sync"))
    assert driver.one("sync").replicas == (0,)
    driver.fail(driver.one("sync"), "link is down")
    driver.answer(driver.one("clear"))
    assert driver.ended["error"] == "the sync of version 1 failed: link is down"


# -- at a sync ------------------------------------------------------------------------------------------------------------


def test_dispatch_goes_on_with_the_current_version_only() -> None:
    driver = Driver(small(min_groups=2))
    driver.at_once = ("acquire", "next_prompt")
    driver.event("joined", replica=4)
    joined = driver.one("sync")
    driver.finish_group(0, 1)
    for name in ("begin", "microbatch", "finish"):
        driver.answer(driver.one(name))
    assert driver.wants("sync") == [joined], "one sync at a time"
    driver.answer(joined)
    assert driver.state.held
    assert (driver.one("sync").version, driver.one("sync").replicas) == (1, (0, 4))


def at_a_sync(at_sync: str, **more: Any) -> Driver:
    driver = Driver(small(at_sync=at_sync, min_groups=2, **more))
    driver.at_once = ("acquire", "next_prompt")
    for one in [one for one in driver.wants("generate") if one.group == 2]:
        driver.event("tokens", group=2, sample=one.sample, replica=0, version=0, first=0, count=2)
    driver.finish_group(0, 1)
    for name in ("begin", "microbatch", "finish"):
        driver.answer(driver.one(name))
    return driver


@pytest.mark.parametrize("at_sync", ["keep", "recompute"])
def test_requests_in_flight_go_on_over_a_sync(at_sync: str) -> None:
    driver = at_a_sync(at_sync)
    assert driver.one("sync").at_sync == at_sync
    assert not driver.wants("cancel")


def test_a_sync_waits_for_what_is_in_flight_with_drain() -> None:
    driver = at_a_sync("drain")
    assert not driver.wants("sync")
    driver.finish_group(2, 3, version=0)
    assert driver.one("sync").version == 1


def test_requests_are_taken_back_and_sent_again_with_abort() -> None:
    driver = at_a_sync("abort")
    assert not driver.wants("sync")
    assert len(driver.wants("cancel")) == 4
    driver.finish_group(3, version=0)
    for one in [one for one in driver.wants("cancel") if one.group == 2]:
        driver.answer(one)
    driver.answer(driver.one("sync"))
    again = [one for one in driver.did("generate") if one.attempt == 1]
    assert [(one.group, one.sample) for one in again] == [(2, 0), (2, 1)]
    assert driver.groups("aborted") == [], "the group keeps its place"
    assert driver.state.counts["wasted"] == 4
    assert driver.groups("ready") == [0, 1, 3]


# -- ends -----------------------------------------------------------------------------------------------------------------


def test_a_run_ends_after_its_last_step_with_everything_given_back() -> None:
    driver = Driver(small(min_groups=2, sampler="windowed", places=8, slots=8, steps=1))
    driver.finish_group(0, 1)
    train_step(driver)
    assert not driver.state.closed
    for one in driver.wants("cancel"):
        driver.answer(one)
    assert (driver.ended["why"], driver.ended["version"]) == ("done", 1)
    assert sorted(driver.groups("aborted")) == [*range(2, 10)]
    assert [one.kind for one in driver.did("release")] == ["training", "generation"]


def test_exhausted_data_is_a_clean_end_only_between_steps() -> None:
    driver = Driver(small(steps=5, min_groups=2, window=0, sampler="strict", places=2))
    driver.prompts = 2
    driver.finish_group(0, 1)
    train_step(driver)
    assert (driver.ended["why"], driver.ended["version"]) == ("exhausted", 1)
    driver = Driver(small(steps=5, min_groups=2, sampler="windowed", places=8, slots=8), prompts=4)
    assert driver.state.exhausted
    driver.finish_group(0, 1, 2, 3)
    train_step(driver)
    train_step(driver)
    assert (driver.ended["why"], driver.ended["version"]) == ("exhausted", 2)
    driver = Driver(small(steps=5, min_groups=1, window=0, sampler="strict", places=2))
    driver.prompts = 3
    driver.finish_group(0, 1)
    train_step(driver)
    driver.finish_group(2)
    for name in ("begin", "microbatch"):
        driver.answer(driver.one(name))
    driver.answer(driver.one("abort"))
    assert driver.ended["error"] == "the data ended with 1 of 2 groups of a step selected and 0 in the buffer"
    driver = Driver(small(steps=5, min_groups=2, window=0, sampler="strict", places=2))
    driver.prompts = 3
    driver.finish_group(0, 1)
    train_step(driver)
    driver.finish_group(2)
    assert driver.ended["error"] == "the data ended with 0 of 2 groups of a step selected and 1 in the buffer"


def test_a_logger_never_ends_training() -> None:
    driver = Driver(small(min_groups=2))
    driver.event("error", of="metrics", step=0, version=1, why="disk full")
    driver.event("logger_failed", why="disk full")
    assert driver.state.counts["logger_failed"] == 2
    assert not driver.state.ending


def test_metrics_come_under_the_version_after_the_step() -> None:
    driver = Driver(small(min_groups=2))
    driver.finish_group(0, 1, length=3)
    train_step(driver)
    driver.finish_group(2, 3, version=0)
    train_step(driver)
    first, second = driver.did("metrics")
    assert (first.version, first.groups, first.tokens, first.lag_max) == (1, 2, 12, 0)
    assert (second.version, second.lag_max, second.lag_updates_max) == (2, 1, 1)


def test_progress_counts_what_is_there_of_the_awaited_step_and_nothing_of_the_next() -> None:
    """Else a loop could report a complete step, and would get no replica for the group that it lacks."""
    driver = Driver(small(groups=4, train_global_batch_size=8, places=8, slots=8, min_groups=4))
    driver.finish_group(0, 4, 5, 6)
    assert [(one.completed, one.target) for one in driver.did("progress")] == [(0, 4), (1, 4)]
    driver.finish_group(1, 2, 3)
    assert [one.completed for one in driver.did("progress")] == [0, 1, 2, 3, 4]


def test_progress_ends_at_the_size_of_the_step() -> None:
    """This sampler takes any group, so all that are complete count, but no more than a step needs."""
    driver = Driver(small(sampler="ready-first", places=8, slots=8, steps=5))
    driver.finish_group(5, 3, 1, 0)
    assert [(one.completed, one.target) for one in driver.did("progress")] == [(0, 2), (1, 2), (2, 2)]


def test_progress_of_a_large_step_is_reported_every_two_percent() -> None:
    driver = Driver(small(groups=200, train_global_batch_size=400, places=400, slots=200, min_groups=200))
    driver.finish_group(*range(200))
    reports = [one.completed for one in driver.did("progress") if one.target == 200]
    assert reports[:4] == [0, 4, 8, 12]
    assert len(reports) <= 51


def test_a_question_is_answered_at_once() -> None:
    driver = Driver(small())
    answer = driver.event("ask", of="status", question=7)[0]
    assert (answer.to, answer.question, answer.version, answer.in_flight, answer.held) == ("asker", 7, 0, 8, 0)


# -- resuming -------------------------------------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_with_the_batch_of_its_version() -> None:
    driver = Driver(small(min_groups=2, steps=4))
    driver.finish_group(0, 1)
    train_step(driver)
    resume = resume_from(driver.state)
    assert (resume.version, resume.updates, resume.steps) == (1, 1, 1)
    assert resume.open == (2, 3, 4, 5)
    assert resume.next == 6
    again = Driver(small(min_groups=2, steps=4), resume=resume)
    assert again.state.index == 2
    assert [(one.version, one.target) for one in again.did("reserved")] == [(1, 1), (1, 1), (1, 2), (1, 2)]
    assert again.state.accepted == 2
    driver.finish_group(2, 3)
    with pytest.raises(BadInput, match="step 1 is open"):
        resume_from(driver.state)


def test_what_a_state_of_an_own_core_owes_may_be_of_any_kind() -> None:
    held: dict[str, Any] = {"buffer": {7: None}, "owed": (2, 2), "prompt": 9, "counts": {"reserved": 9}}
    state = SimpleNamespace(version=2, updates=4, steps=3, step=None, **held)
    assert resume_from(state) == Resume(version=2, updates=4, steps=3, next=10, open=(7, 9))


def test_a_state_of_an_own_core_may_say_where_to_resume() -> None:
    start = Resume(version=2, updates=4, steps=3, next=9, open=(7, 8))

    @dataclass
    class Own:
        answer: Any

        def resume(self) -> Any:
            return self.answer

    assert resume_from(Own(start)) is start
    with pytest.raises(
        BadInput, match=r"resume\(\) of the controller's state returned \{'version': 2\}; it must return a .*Resume"
    ):
        resume_from(Own({"version": 2}))


def test_a_prompt_at_hand_when_the_run_stops_is_given_again() -> None:
    """It was asked for before the step ended and came after dispatch was held, so it never became a group."""
    driver = Driver(small(min_groups=2, steps=4, places=8, slots=8, window=2), answers=("acquire",))
    driver.answer(driver.wants("sync")[0])
    for number in range(4):
        driver.answer(driver.wants("next_prompt")[0])
        assert driver.state.prompt == -1, number
    driver.finish_group(0, 1)
    train_step(driver)
    driver.answer(driver.wants("next_prompt")[0])
    assert (driver.state.prompt, driver.state.step, driver.state.held) == (4, None, True)
    resume = resume_from(driver.state)
    assert (resume.open, resume.next) == ((2, 3, 4), 5)


# -- the state ------------------------------------------------------------------------------------------------------------


def test_a_state_is_frozen_hashable_and_untouched_by_a_step() -> None:
    driver = Driver(small())
    state = driver.state
    before = hash(state)
    after, _ = driver.core.step(state, Event("completed", **first_completed(driver)))
    assert (hash(state), state == after) == (before, False)
    with pytest.raises(FrozenInstanceError):
        state.version = 7


def first_completed(driver: Driver) -> dict[str, Any]:
    one = driver.wants("generate")[0]
    ids = {"group": one.group, "sample": one.sample, "replica": one.replica}
    return {**ids, "version": 0, "newest": 0, "length": 1, "reward": "1"}


def test_unknown_events_are_refused() -> None:
    driver = Driver(small())
    with pytest.raises(BadInput, match="unknown event 'sneezed'"):
        driver.event("sneezed")
