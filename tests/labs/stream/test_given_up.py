"""What the settings on_failed, floor, filter and reference change in a run of the lab."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import kit
from kit.labs.definition import Fault
from kit.labs.stream.lab import LAB
from kit.labs.stream.rules import ledger
from kit.results import Verdict
from tests.labs.parts import failed, passed
from tests.labs.simulated import run

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
