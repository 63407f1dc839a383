"""The split step on FSDP2 compared with the plain step, on two real ranks over gloo, and both with a plain float64 model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kit.train.fsdp import Schedule
from kit.train.options import Settings
from kit.world import World
from tests.worlds import world_of

EXACT = ("lr", "wd", "global_valid_seqs", "global_valid_toks", "version")
GRADIENTS, PARAMETERS, METRICS, LOSS = 1e-6, 1e-5, 1e-6, 1e-6
FIXED = {"gradients": GRADIENTS, "parameters": PARAMETERS, "metrics": METRICS, "loss": LOSS}
# For one token's ratio: float32 rounds a log-probability between 8 and 16 to 1e-6, and after a step weights differ in their last bit.
EXTREMES = 4e-6
# bfloat16 on different scales agrees only to its own rounding, and Adam enlarges small gradients.
NARROW = {"gradients": 2e-2, "parameters": 1e-3, "metrics": 5e-2, "loss": 1e-3}


world = world_of(2)


def ask(world: World, function: str, **arguments: Any) -> list[Any]:
    return world.call(f"tests.train.ranks.steps:{function}", **arguments)


@pytest.mark.drawn(1, of="cuts")
@pytest.mark.parametrize(
    ("level", "batching", "dtype"),
    [
        ("tokens", "fixed", "float32"),
        pytest.param("sequences", "fixed", "float32", marks=pytest.mark.slow),
        ("tokens", "dynamic", "float32"),
        ("sequences", "packed", "float32"),
        pytest.param("tokens", "fixed", "float64", marks=pytest.mark.slow),
        pytest.param("tokens", "fixed", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_however_a_step_is_cut_it_is_the_plain_step(world: World, level: str, batching: str, dtype: str) -> None:
    limits = NARROW if dtype == "bfloat16" else FIXED
    for rank in ask(world, "parity", level=level, batching=batching, dtype=dtype):
        for found in rank["calls"].values():
            assert found["gradients"] <= limits["gradients"]
            assert found["parameters"] <= limits["parameters"]
            assert found["loss"] <= limits["loss"]
            assert max(found["norms"]) <= limits["gradients"]
            for step in found["metrics"]:
                assert len(step) > 10
                most = dict.fromkeys(step, limits["metrics"])
                most |= {name: max(EXTREMES, limits["metrics"]) for name in step if name.endswith(("_min", "_max"))}
                assert {name: value for name, value in step.items() if value > most[name]} == {}
            assert found["same"] == [dict.fromkeys(EXACT, True)] * 3
            assert found["reductions"] == [1] * 3 * found["groups"]
            assert found["scattered"] == 3 * found["groups"] == 9
        if batching == "fixed":
            assert rank["different_bits"] == 1
        first, _, third = rank["results"]
        assert (first["lr"], first["wd"], first["version"], third["version"]) == (1e-4, 0.01, 1, 3)
        assert third["lr"] == pytest.approx(1e-4 + 9e-4 * 2 / 4)
        assert first["global_valid_seqs"] == 35


@pytest.mark.drawn(1, of="gradients")
@pytest.mark.parametrize(
    ("batching", "level", "masks", "cuts"),
    [
        ("fixed", "tokens", "ragged", [[4, 12, 4], [8, 8, 4]]),
        ("fixed", "sequences", "ragged", [[20, 0], [1, 7]]),
        ("fixed", "tokens", "ragged", [[10, 10], [0, 0]]),
        ("fixed", "tokens", "empty-rank", [[20], [20]]),
        ("fixed", "sequences", "empty-rank", [[20], [20]]),
        ("dynamic", "tokens", "ragged", [[10, 10], [3, 2]]),
        ("packed", "sequences", "ragged", [[10, 10], [0, 9]]),
        ("packed", "tokens", "empty-rank", [[20], [20]]),
    ],
)
def test_gradients_are_those_of_one_plain_model_over_all_rows(
    world: World, batching: str, level: str, masks: str, cuts: list[list[int]]
) -> None:
    ranks = ask(world, "one_step", batching=batching, level=level, masks=masks, cuts=cuts)
    assert ranks[0]["result"] == ranks[1]["result"]
    for rank in ranks:
        assert rank["off"] <= GRADIENTS
        result = rank["result"]
        assert [result["global_valid_seqs"], result["global_valid_toks"]] == rank["counts"]
        assert result["metrics"]["num_unmasked_tokens"] == rank["counts"][1]


def test_a_step_without_a_valid_token_has_no_gradient(world: World) -> None:
    for rank in ask(world, "nothing_valid"):
        result = rank["result"]
        assert rank["zero"]
        assert (result["global_loss"], result["grad_norm"], result["updated"], result["version"]) == (0.0, 0.0, True, 1)
        assert (result["metrics"]["probs_ratio_min"], result["metrics"]["probs_ratio_max"]) == (-1.0, -1.0)
        assert rank["as_plain"] == 0.0
        for name, by in rank["shrunk"].items():
            decayed = 0.0 if name.endswith(("norm.weight", "bias")) else 1e-4 * 0.01
            assert by == pytest.approx(decayed, rel=0.5)


def test_a_step_without_rows_reduces_and_ticks(world: World) -> None:
    for result in ask(world, "no_rows_at_all"):
        assert (result["global_loss"], result["global_valid_toks"], result["version"]) == (0.0, 0.0, 1)


@pytest.mark.drawn(2, of="aborts")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # each keeps unreduced sums in a different place
@pytest.mark.parametrize("where", ["nowhere", "loss", "forward", "backward"])
def test_abort_leaves_nothing(world: World, where: str, dtype: str) -> None:
    for rank in ask(world, "abort", where=where, dtype=dtype):
        if where == "nowhere":
            assert (rank["error"], rank["again"]) == ("", [])
        else:
            assert rank["error"] == "ArithmeticError: broken"
            for message in rank["again"]:
                assert message.startswith("Misuse")
                assert "the step is open and microbatch raised ArithmeticError; call abort() first" in message
        assert rank["hooks_back"]
        assert rank["same"]
        assert rank["left"] == []
        assert rank["version"] == 1
        assert rank["next_same"]
        assert rank["moved"]


def test_misuse_names_the_state(world: World) -> None:
    for message in ask(world, "misuse"):
        assert message["abort closed"] == ""
        for call in ("microbatch", "finish"):
            assert message[f"{call} closed"] == f"Misuse: {call}: the step is closed; it must be open"
        assert message["begin open"] == "Misuse: begin: the step is open; it must be closed"
        assert message["finish empty"].startswith("Misuse: finish: the step is open and has no microbatch yet")


def test_gradients_that_are_not_finite_update_nothing(world: World) -> None:
    for rank in ask(world, "not_finite"):
        assert rank["updated"] == [False, False]
        assert rank["version"] == [2, 2]
        assert not rank["finite"]
        assert rank["skipped"]
        assert rank["rates"][0] == rank["rates"][1]
        assert rank["steps"] == [40, 40]
        assert rank["next"] is True


def test_a_rank_that_refuses_its_rows_leaves_nobody_waiting(world: World) -> None:
    first, second = ask(world, "refused")
    assert first == ["Misuse: microbatch: another rank refused its rows, so no rank ran its rows", "True"]
    assert second[0].startswith("BadInput: token_budget=8 is less than the longest sequence")
    assert second[1] == "True"


def test_clip_is_of_the_norm_over_all_parameters(world: World) -> None:
    first, second = ask(world, "clipping")
    assert first == second
    assert first["norm"] == pytest.approx(first["loose"], rel=1e-5)
    assert first["after"] == pytest.approx(0.01, rel=1e-3)
    assert first["norm"] > 0.1


def test_what_was_passed_may_be_reused(world: World) -> None:
    assert ask(world, "unchanged_inputs") == [True, True]


def test_hashing_leaves_tensors_resizable(world: World) -> None:
    """numpy() on a tensor marks its storage as not resizable, so a release could not free it."""
    assert ask(world, "fixed_in_size_by_hashing") == [[], []]


def test_batches_by_tokens_need_a_budget(world: World) -> None:
    assert all(
        "token_budget=0 is not allowed with batching='packed'" in message
        for message in ask(world, "build_needs_a_budget")
    )


@pytest.mark.parametrize("warmup", [0, 7])
def test_the_schedule_is_megatrons(warmup: int) -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    settings = Settings(lr=3e-3, first_lr=1e-4, last_lr=2e-4, warmup=warmup, decay=50)
    theirs, ours = (torch.optim.AdamW([torch.zeros(2, 2)], lr=settings.lr) for _ in range(2))
    reference = OptimizerParamScheduler(
        theirs,  # type: ignore[arg-type]
        init_lr=settings.first_lr,
        max_lr=settings.lr,
        min_lr=settings.last_lr,
        lr_warmup_steps=settings.warmup,
        lr_decay_steps=settings.decay,
        lr_decay_style="cosine",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=50,
        wd_incr_style="constant",
    )
    schedule = Schedule(ours, settings)
    for increment in (3, 4, 1, 9, 20, 13, 1, 30):
        assert math.isclose(ours.param_groups[0]["lr"], theirs.param_groups[0]["lr"], rel_tol=1e-12)
        reference.step(increment)
        schedule.step(increment)
    restored = Schedule(ours, settings)
    restored.load_state_dict(schedule.state_dict())
    assert ours.param_groups[0]["lr"] == settings.last_lr
