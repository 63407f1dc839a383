"""What the settings on_failed, floor, filter and reference change in a run of the lab."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import kit
from kit.labs.definition import Fault
from kit.labs.stream.lab import LAB
from kit.labs.stream.rules import ledger, no_length_bias
from kit.results import Verdict
from kit.results.rules import NotMeasured
from kit.stream import core, generation
from kit.stream.generation import StreamTurn
from kit.stream.judge.history import LoopLedger
from tests.labs.parts import failed, passed, why
from tests.labs.simulated import run
from tests.labs.stream.conftest import simulated

choose = core.choose  # the right one
# A request of the first group cannot be sent, so the group fails.
REQUEST = 12
UNSENT = Fault("unsent", "a request cannot be sent", "every_group_once", scene={"fail_at": {REQUEST: "no route"}})


def with_a_failed_group(**config: object) -> tuple[Verdict, str]:
    return run(LAB, UNSENT, ranks=1, phases="stream", **config)


def test_a_group_that_fails_ends_the_run_unless_it_may_be_replaced_or_left_out() -> None:
    assert "no route" in with_a_failed_group()[1]
    for settings in ({"on_failed": "replace"}, {"on_failed": "shrink", "floor": 3}):
        verdict, error = with_a_failed_group(**settings)
        assert (error, failed(verdict)) == ("", set())
        assert passed(verdict, "one_step_per_batch") is True


def test_a_step_does_not_shrink_below_its_floor() -> None:
    verdict, error = with_a_failed_group(on_failed="shrink", floor=4)
    assert "floor" in error
    assert "no_deadlock" not in failed(verdict)


@pytest.mark.slow
def test_on_ranks_groups_that_train_nothing_are_replaced_and_the_reference_is_recomputed(
    on_ranks: Callable[..., kit.Run],
) -> None:
    run = on_ranks(filter=True, reference="recomputed", phases="lockstep,stream,verify", answer=[1, 2], lr=3e-3)
    rows = ledger(run.frame(), "stream")
    assert rows is not None
    assert failed(run.verdict()) == set()
    filtered = {row["group"] for row in rows.by_event["filtered"]}
    assert filtered
    assert not filtered & {row["group"] for row in rows.trained()}
    scored = {row["which"] for row in rows.by_event["logprobs"]}
    assert scored == {"previous", "reference"}


def of_lengths(trained: list[int], complete: list[int], cut: list[int], aborted: str) -> LoopLedger:
    """A ledger of an own sampler with a sample per group: trained, complete but not trained, and given up unfinished."""
    rows: list[dict[str, object]] = [{"event": "capacity", "sampler": "mine:Own"}]
    rows.append({"event": "chosen", "groups": "", "evicted": "", "aborted": aborted})
    for group, length in enumerate([*trained, *complete, *cut]):
        of = {"group": group, "sample": 0, "version": 0}
        rows.append({"event": "tokens", **of, "replica": 0, "first": 0, "count": length})
        if group < len(trained) + len(complete):
            rows.append({"event": "completed", **of, "length": length})
        if group < len(trained):
            rows.append({"event": "trained", **of})
    return LoopLedger([{"time": float(at), **row} for at, row in enumerate(rows)])


def test_an_own_sampler_that_gives_up_unfinished_groups_keeps_the_short_ones() -> None:
    short, long = [4, 5] * 60, [9, 10] * 60
    with pytest.raises(NotMeasured, match="mine:Own gives up groups that are slower"):
        no_length_bias(of_lengths(short, [], long, aborted="130,131"))
    assert (no_length_bias(of_lengths(short, [], long, aborted="")).value or 0) > 3


def test_trained_samples_of_one_length_are_judged_by_the_spread_of_all() -> None:
    trained = [8] * 120
    assert no_length_bias(of_lengths(trained, [], [8, 3], aborted="")).value == 0
    assert (no_length_bias(of_lengths(trained, [16], [], aborted="")).value or 9) < 3
    assert (no_length_bias(of_lengths(trained, [16] * 120, [], aborted="")).value or 0) > 3


@pytest.mark.parametrize("fault", [None, "starts-beyond-the-end"])
@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        ("in-order", "started for version 5; the run ends at version 5"),
        ("weight-fifo", "the 5 steps of the run had all their groups"),
        ("ready-first", "the 5 steps of the run had all their groups"),
        ("capacity", ""),  # it knows no steps
    ],
)
def test_a_group_that_no_step_of_the_run_can_train_is_named(sampler: str, words: str, fault: str | None) -> None:
    verdict, error = simulated(fault, sampler=sampler, phases="stream")
    wrong = bool(fault and words)
    assert (error, failed(verdict)) == ("", {"capacity_kept"} if wrong else set())
    assert not wrong or words in why(verdict, "capacity_kept")


def drops_the_last_straggler(t: StreamTurn) -> None:
    """The run's last group is given up as failed once all others of its step were taken."""
    choose(t)
    if t.version == t.last - 1 and t.step is not None and not t.step.aborting and len(t.step.groups) == t.need - 1:
        for group in [slot for slot in t.buffer.values() if slot.order < 0 and slot.ends is None]:
            generation.doom(t, group, "failed", "too slow")
            t.shrunk = t.shrunk.plus(t.version)
            t.news = True


def test_a_straggler_of_the_last_step_is_not_given_up() -> None:
    patch = {"kit.stream.core:choose": f"{__name__}:drops_the_last_straggler"}
    fault = Fault(
        "last-straggler", "the last group is not awaited", "eviction_justified", patch=patch, where="notebook"
    )
    verdict, error = run(LAB, fault, ranks=1, phases="stream", on_failed="shrink")
    assert error == ""
    assert "none of its requests failed" in why(verdict, "eviction_justified")
