"""The split step on Megatron, on real ranks: its states, non-finite values, errors half-way, reductions, experts."""

from __future__ import annotations

from typing import Any

import pytest

from kit.world import World
from tests.worlds import world_of

OVERLAP = {"overlap_grad_reduce": True, "distributed_optimizer": True}


world = world_of(2)


def ask(world: World, function: str, **arguments: Any) -> list[Any]:
    return world.call(f"tests.megatron.ranks.split:{function}", **arguments)


def one(answers: list[Any]) -> Any:
    """Return the answer that all ranks share."""
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


def test_calls_that_do_not_fit_name_the_state(world: World) -> None:
    found = one(ask(world, "states"))
    assert found["message"] == {
        "microbatch-closed": "microbatch: the step is closed; it must be open",
        "finish-closed": "finish: the step is closed; it must be open",
        "no-rows-a-microbatch": "begin: gbs=16 and mbs=0 must be at least 1",
        "begin-open": "begin: the step is open; it must be closed",
        "finish-empty": "finish: the step is open and has no microbatch yet; call microbatch or abort first",
        "half-a-microbatch": "microbatch: 3 rows do not fill whole microbatches of mbs=2",
        "after-an-error": "microbatch: the step is open and microbatch raised Misuse; call abort() first",
        "finish-after-an-error": "finish: the step is open and microbatch raised Misuse; call abort() first",
    }
    assert (found["closed"], found["version"]) == ("closed", 0)
    assert (found["state"], found["ticked"]) == ("closed", [1, 1])


@pytest.mark.slow
def test_jobs_that_are_refused(world: World) -> None:
    found = one(ask(world, "refused"))
    assert "calculate_per_token_loss must be false" in found["per-token"]
    assert "a rank must hold one model chunk" in found["chunks"]


@pytest.mark.drawn(1, of="kinds")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("advantages", id="gradient-too", marks=pytest.mark.slow),
        pytest.param("reference_logprobs", id="loss-alone"),
    ],
)
def test_what_is_not_finite_updates_nothing(world: World, kind: str) -> None:
    found = one(ask(world, "not_finite", kind=kind))
    assert (found["updated"], found["version"]) == (False, 1)
    assert found["finite"] == [False, True]
    assert found["changed"] == []  # weights, optimizer and schedule
    assert found["hooks_back"]
    assert found["next"] == [True, 2]
    assert found["next_as_ever"] == 0


@pytest.mark.slow
def test_a_data_rank_without_rows(world: World) -> None:
    found = one(ask(world, "no_rows"))
    assert found["updated"]
    assert 0 <= found["gradients"] <= 1e-6
    assert found["metrics"] <= 1e-6


def test_no_valid_token_anywhere(world: World) -> None:
    found = one(ask(world, "no_valid_token"))
    assert (found["global_loss"], found["grad_norm"], found["largest_gradient"]) == (0.0, 0.0, 0.0)
    assert (found["global_valid_seqs"], found["global_valid_toks"], found["updated"]) == (0, 0, True)
    extremes = {name: value for name, value in found["metrics"].items() if name.endswith(("_min", "_max"))}
    assert len(extremes) == 4
    assert set(extremes.values()) == {-1.0}
    assert {value for name, value in found["metrics"].items() if name not in extremes} == {0.0}


@pytest.mark.parametrize(
    "settings", [pytest.param({}, id="plain", marks=pytest.mark.slow), pytest.param(OVERLAP, id="overlap")]
)
def test_an_error_half_way_through_a_chunk(world: World, settings: dict[str, Any]) -> None:
    found = one(ask(world, "error_in_a_chunk", **settings))
    assert found["message"] == "broken in the middle of a chunk"
    assert found["hooks_back"]
    assert (found["state"], found["version"]) == ("open", 1)
    assert found["then"] == "microbatch: the step is open and microbatch raised LookupError; call abort() first"
    assert found["changed"] == []
    assert found["unlike_control"] == []


@pytest.mark.slow
def test_an_error_of_the_optimizer(world: World) -> None:
    found = one(ask(world, "error_after_reduction", **OVERLAP))
    assert found == {"message": "pop from empty list", "hooks_back": True, "changed": [], "version": 0, "updated": True}


@pytest.mark.drawn(3, of="jobs")
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain", marks=pytest.mark.slow),
        pytest.param({"overlap_grad_reduce": True}, id="overlap", marks=pytest.mark.slow),
        pytest.param({"distributed_optimizer": True}, id="distributed", marks=pytest.mark.slow),
        pytest.param(OVERLAP, id="overlap-distributed"),
        pytest.param({"sum_gradients": False}, id="mean", marks=pytest.mark.slow),
        pytest.param({"pp": 2}, id="pp2", marks=pytest.mark.slow),
        pytest.param({"pp": 2, "overlap_grad_reduce": True}, id="pp2-overlap"),
        pytest.param({"tp": 2}, id="tp2", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_reduced_once_and_are_the_plain_steps(world: World, settings: dict[str, Any]) -> None:
    answers = ask(world, "reductions", **settings)
    for found in answers:
        assert found["counts"] == [1]
        assert found["buckets"] >= 1
        assert 0 <= found["gradients"] <= 1e-6
        assert found["metrics_apart"] <= 1e-6
    # With pipeline stages too: the first stage does not see the loss, so it is sent the result.
    result = one([found["result"] for found in answers])
    assert len(result["metrics"]) == 17
    assert result["metrics"]["loss"] == result["global_loss"] != 0


@pytest.mark.slow
def test_shards_put_together_are_the_all_reduce(world: World) -> None:
    found = one([{"unequal": rank["unequal"], "seen": rank["own_alone"] > 0.1} for rank in ask(world, "put_together")])
    assert found == {"unequal": [], "seen": True}


@pytest.mark.drawn(1, of="experts")
@pytest.mark.parametrize(
    ("level", "ep"),
    [
        ("sequences", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("sequences", 1), ("tokens", 1), ("tokens", 2))),
    ],
)
def test_the_experts_loss_is_its_mean_over_all_microbatches(world: World, level: str, ep: int) -> None:
    found = one(ask(world, "aux_alone", level=level, ep=ep))
    assert found["size"] > 1e-5
    assert found["sync"] <= 1e-5
    assert found["split"] <= 1e-5
    assert found["uncorrected"] > 0.1
    assert found["uncorrected_as_told"] <= 1e-5


@pytest.mark.slow
def test_a_correction_is_made_only_where_something_is_missing(world: World) -> None:
    assert ask(world, "passes", masks="alike") == [4, 4]
    assert ask(world, "passes", masks="ragged") == [8, 8]


@pytest.mark.slow
def test_the_caller_may_reuse_what_it_passed(world: World) -> None:
    assert ask(world, "reused_buffers", ep=2) == [[], []]


@pytest.mark.slow
def test_experts_need_as_many_microbatches_everywhere(world: World) -> None:
    found = one(ask(world, "uneven_microbatches"))
    assert found["message"].endswith("with experts every data rank must have as many microbatches, not 1 to 4")
    assert found["hooks_back"]
    assert found["changed"] == []
    assert found["updated"]


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [1, 4])
def test_experts_both_ways(world: World, pieces: int) -> None:
    found = one(ask(world, "both_ways", pieces=pieces))
    assert "moe_aux_loss" in found
    assert max(found.values()) <= 1e-5
