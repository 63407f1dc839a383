"""User code goes through the same phases and checks; an error that it raises is reported as its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import kit
from kit.errors import BadInput
from kit.results.growth import largest
from tests.labs.offload.conftest import ROOT
from tests.labs.parts import failed, why

Offload = Callable[..., kit.Run]


@pytest.mark.slow
@pytest.mark.drawn(2, of="own code")
def test_release_and_restore(offload: Offload) -> None:
    assert failed(offload(implementation="mine:Whole").verdict()) == set()


@pytest.mark.slow
@pytest.mark.drawn(2, of="own code")
def test_the_documented_mover_alone_leaves_no_descriptor(offload: Offload) -> None:
    run = offload(implementation="mine:Moves", groups=False, cycles=2)
    verdict = run.verdict()
    assert failed(verdict) == set()
    # The check itself excuses what own code opens in the first cycle and keeps.
    opened = largest("fds", after="verify", base="build", until="compare")(run.frame(), run.config)
    assert opened.value == 0, opened.why
    assert why(verdict, "tensors_restored").startswith("tensors_changed: 0 after verify")


@pytest.mark.slow
@pytest.mark.drawn(2, of="own code")
@pytest.mark.parametrize(
    ("code", "fails"),
    [
        ("StartsAThreadOnce", set()),
        ("StartsAThreadEachTime", {"threads_return", "fds_return", "nothing_piles_up"}),
        ("LeavesSettings", {"random_unchanged"}),
    ],
)
def test_what_a_reload_leaves_in_the_process(offload: Offload, code: str, fails: set[str]) -> None:
    verdict = offload(implementation=f"mine:{code}", groups=False, cycles=4).verdict()
    assert failed(verdict) == fails
    if code == "LeavesSettings":
        assert "torch.backends.cudnn.benchmark" in why(verdict, "random_unchanged")


@pytest.mark.slow
@pytest.mark.drawn(2, of="own code")
def test_a_reload_that_fails_is_rehearsed_where_own_code_says_that_it_may_be_retried(offload: Offload) -> None:
    silent = offload(implementation="mine:Whole").verdict()
    assert why(silent, "restore_failure_is_clean").startswith(
        "not measured: your releaser does not say `retries = True`"
    )
    right = offload(implementation="mine:Retries").verdict()
    assert failed(right) == set()
    assert why(right, "restore_failure_is_clean").startswith("tensors are away again after 6 failing reloads")
    assert why(right, "rehearsals_leave_nothing") == "nothing is left by a failure (restore-fails)"


@pytest.mark.slow
@pytest.mark.drawn(2, of="own code")
def test_what_a_failed_release_of_own_code_leaves_is_found_out(offload: Offload) -> None:
    right = offload(implementation="mine:Recovers").verdict()
    assert failed(right) == set()
    assert why(right, "rehearsals_leave_nothing") == "nothing is left by a failure (destroy-fails, restore-fails)"
    leaky = offload(implementation="mine:LeaksWhenRefused").verdict()
    assert failed(leaky) == {"rehearsals_leave_nothing"}
    assert why(leaky, "rehearsals_leave_nothing").startswith("descriptors: ")


@pytest.mark.slow
@pytest.mark.drawn(2, of="own code")
def test_a_reload_that_makes_new_tensors_is_rehearsed_too(offload: Offload) -> None:
    weights = {"groups": False, "grads": False, "optimizer": False}
    right = offload(implementation="moved:Remade", **weights).verdict()
    assert failed(right) == set()
    assert why(right, "restore_failure_is_clean").startswith("tensors are away again after 6 failing reloads")
    wrong = offload(implementation="moved:KeepsPart", **weights).verdict()
    assert failed(wrong) == {"restore_failure_is_clean"}
    unnamed = offload(implementation="moved:NamesNoTensor", **weights).verdict()
    assert "names missing in the error: 1 (rank 1: the tensor in: rank 1: no memory for" in why(
        unnamed, "restore_failure_is_clean"
    )


@pytest.mark.slow
@pytest.mark.drawn(2, of="own code")
def test_a_reload_that_fails_on_one_rank_alone_is_found_out(offload: Offload) -> None:
    alone = offload(implementation="mine:RetriesAlone", groups=False).verdict()
    assert failed(alone) == {"restore_failure_is_clean"}
    assert "no error: 1 (rank 0: the first allocation failed)" in why(alone, "restore_failure_is_clean")


@pytest.mark.slow
def test_groups_in_a_wrapper_that_megatron_keeps_end_with_the_job(offload: Offload) -> None:
    """Megatron's DDP outlives its job where gradients are reduced while the backward pass runs, and keeps the wrappers of its groups."""
    ddp: dict[str, Any] = {"ranks": 4, "pp": 2, "distributed_optimizer": True, "overlap_grad_reduce": True}
    run = offload(implementation="own_wrapper:Wrapping", cycles=2, steps=1, **ddp)
    assert failed(run.verdict()) == set()


@pytest.mark.slow
@pytest.mark.drawn(2, of="own code")
def test_a_wrapper_around_every_group(offload: Offload) -> None:
    run = offload(implementation="own_wrapper:Wrapping", cycles=2)
    assert failed(run.verdict()) == set()
    assert why(run.verdict(), "destroy_failure_raises") == "failure_hidden: 0 after rehearse_failure (2 ranks)"


@pytest.mark.slow
@pytest.mark.drawn(2, of="own code")
def test_own_code_finds_who_holds_a_group_by_a_walk_over_all_objects(offload: Offload) -> None:
    assert failed(offload(implementation="referred:Referred", cycles=2).verdict()) == set()


@pytest.mark.slow
@pytest.mark.drawn(2, of="own code")
def test_a_plain_function_pair_is_found_out(offload: Offload) -> None:
    verdict = offload(implementation="own_pair:OwnPair").verdict()
    assert failed(verdict) == {
        "options_unchanged",
        "groups_return_to_baseline",
        "handles_alive",
        "stale_handle_raises",
        "old_groups_dead",
        "fds_return",
        "threads_return",
        "training_continues_bitwise",
        "destroy_failure_raises",
    }
    assert why(verdict, "training_continues_bitwise").startswith("could not be judged: training stopped in cycle 1")


@pytest.mark.slow
@pytest.mark.drawn(2, of="own code")
def test_code_that_does_nothing(offload: Offload) -> None:
    verdict = offload(implementation="mine:Nothing").verdict()
    assert failed(verdict) == {
        "groups_return_to_baseline",
        "model_parallel_uninitialised",
        "stale_handle_raises",
        "old_groups_dead",
        "tensors_released",
        "no_tensor_left",
        "destroy_failure_raises",
    }
    # Training still continues bit-identically, which alone proves nothing.
    assert "bit-identical" in why(verdict, "training_continues_bitwise")
    assert "no group was destroyed through" in why(verdict, "destroy_failure_raises")


@pytest.mark.slow
@pytest.mark.drawn(2, of="own code")
def test_what_it_raises_is_its_own(offload: Offload) -> None:
    with pytest.raises(kit.RankError, match="LookupError: my own release failed") as caught:
        offload(implementation="mine:Raises")
    assert caught.value.phase == "release"
    assert "mine.py" in caught.value.traceback


@pytest.mark.slow
@pytest.mark.drawn(2, of="own code")
def test_an_object_without_the_methods(offload: Offload) -> None:
    with pytest.raises(kit.RankError, match="neither release and restore nor destroy and reload"):
        offload(implementation="mine:Empty")


def test_a_bug_of_the_kits_own_code_is_not_put_into_somebodys(offload: Offload) -> None:
    with pytest.raises(BadInput, match="fault 'bit-flip' cannot be detected with implementation=mine:Whole; use"):
        offload(fault="bit-flip", implementation="mine:Whole")


@pytest.mark.slow
@pytest.mark.drawn(2, of="own code")
@pytest.mark.parametrize("job", ["mine:Plain", "mine:QuasiNewton"])
def test_a_job_without_megatron(offload: Offload, job: str) -> None:
    run = offload(model=job, cycles=2)
    verdict = run.verdict()
    assert failed(verdict) == set()
    assert why(verdict, "training_continues_bitwise").startswith("3 steps and all final tensors")
    assert why(verdict, "tensors_restored").startswith("tensors_changed: 0 after verify")
    frame = run.frame()
    assert set(frame[(frame["phase"] == "idle") & (frame["metric"] == "left_bytes")]["value"]) == {0.0}
    assert why(verdict, "handles_alive") == "not measured: the job has no Megatron groups"


def test_the_documentation_names_the_examples() -> None:
    page = (ROOT / "docs" / "own-code.md").read_text()
    assert "[examples/own_pair.py](examples/own_pair.py)" in page
    assert "[examples/own_wrapper.py](examples/own_wrapper.py)" in page
    assert "kit run offload --set implementation=own_pair:OwnPair" in page
