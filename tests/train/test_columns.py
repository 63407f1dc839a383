"""Ranks that share the columns of their rows compute what one model computes on whole rows, on real ranks over gloo."""

from __future__ import annotations

from typing import Any

import pytest

from kit.world import World
from tests.worlds import world_of

ROUNDING = 1e-12  # of float64
GRADIENTS = 1e-6  # of float32, against float64

world = world_of(4)


def ask(world: World, function: str, **arguments: Any) -> list[Any]:
    return world.call(f"tests.train.ranks.context:{function}", **arguments)


@pytest.mark.parametrize(("cp", "lengths"), [(2, [2, 3, 8, 9, 17]), (4, [2, 3, 5, 8, 13])])
def test_logprobs_and_gradients_are_those_of_whole_rows(world: World, cp: int, lengths: list[int]) -> None:
    """Also of rows that the ranks do not divide, and of rows with fewer columns than there are ranks."""
    for rank in ask(world, "every_length", cp=cp, lengths=lengths):
        assert max(rank["logprobs"]) < ROUNDING
        assert max(rank["gradients"]) < ROUNDING


@pytest.mark.parametrize("cp", [2, 4])
def test_packed_sequences_stay_apart_across_parts(world: World, cp: int) -> None:
    for rank in ask(world, "packed", cp=cp, draws=8):
        assert max(rank["logprobs"]) < ROUNDING
        assert max(rank["gradients"]) < ROUNDING


def test_a_rank_computes_its_part_only(world: World) -> None:
    for rank in ask(world, "computed", cp=2):
        assert rank["logits"] == [2, 4, 256]  # of seven columns
        assert rank["cached_same"]


SLOW = [
    {"cp": 2, "batching": "dynamic", "level": "sequences", "dtype": "float32", "empty": True},
    {"cp": 4, "batching": "packed", "level": "tokens", "dtype": "float32", "empty": False},
    {"cp": 2, "batching": "fixed", "level": "tokens", "dtype": "bfloat16", "empty": False},
]


@pytest.mark.parametrize(
    "config",
    [
        {"cp": 2, "batching": "fixed", "level": "tokens", "dtype": "float32", "empty": False},
        {"cp": 2, "batching": "packed", "level": "sequences", "dtype": "float32", "empty": True},
        {"cp": 4, "batching": "dynamic", "level": "tokens", "dtype": "float32", "empty": False},
        *(pytest.param(config, marks=pytest.mark.slow) for config in SLOW),
    ],
    ids=lambda config: "-".join(map(str, config.values())),
)
def test_a_step_is_that_of_one_model_over_all_rows(world: World, config: dict[str, Any]) -> None:
    ranks = ask(world, "one_step", **config)
    for way in ("plain", "split"):
        assert all(rank[way]["result"] == ranks[0][way]["result"] for rank in ranks)
        for rank in ranks:
            result = rank[way]["result"]
            assert rank[way]["off"] <= (GRADIENTS if config["dtype"] == "float32" else 5e-2)
            assert [result["global_valid_seqs"], result["global_valid_toks"]] == rank["counts"]
            assert result["metrics"]["num_unmasked_tokens"] == rank["counts"][1]
    assert ranks[0]["split"]["result"]["grad_norm"] == pytest.approx(ranks[0]["norm"], rel=1e-6)


def test_a_rank_that_alone_refuses_its_rows_leaves_nobody_waiting(world: World) -> None:
    *others, last = ask(world, "refused", cp=2)
    assert set(others) == {"Misuse: microbatch: another rank refused its rows, so no rank ran its rows"}
    assert last.startswith("BadInput: token_budget=8 is less than the longest sequence")


def test_a_job_needs_both_groups(world: World) -> None:
    for message in ask(world, "half_of_the_groups"):
        assert message.startswith("data_group and context_group must both be given, and divide 4 ranks")
