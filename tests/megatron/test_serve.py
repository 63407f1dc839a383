"""Replicas beside a training job in one World: their answers with the job's weights, and the memory that sleeping frees."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from kit.world import World
from tests.worlds import world_of

# The trainer's config on two ranks, and the tensor-parallel size of the replicas on the other two.
PAIRS: dict[str, dict[str, Any]] = {
    "tp2 to tp1": {"trainer": {"tp": 2}, "infer_tp": 1},
    "tp2 to tp2": {"trainer": {"tp": 2}, "infer_tp": 2},
    "pp2 to tp1": {"trainer": {"pp": 2}, "infer_tp": 1},
    "dp2 to tp1": {"trainer": {"distributed_optimizer": True}, "infer_tp": 1},
    "dp2 to tp1, bfloat16": {"trainer": {}, "infer_tp": 1, "dtype": "bfloat16"},
    "tp2 to tp2, bfloat16": {"trainer": {"tp": 2}, "infer_tp": 2, "dtype": "bfloat16"},
}
QUICK = ("tp2 to tp1", "tp2 to tp2")
ALIKE = [name for name in PAIRS if "tp2 to tp2" in name or "dp2" in name]


pytestmark = pytest.mark.slow  # a sync run in `make test` already serves, sleeps and wakes


world = world_of(4)


def ask(world: World, function: str, **arguments: Any) -> list[Any]:
    return world.call(f"tests.megatron.ranks.serve:{function}", **arguments)


@pytest.fixture(scope="module")
def results() -> dict[str, list[Any]]:
    return {}


@pytest.fixture
def ranks(request: pytest.FixtureRequest, world: World, results: dict[str, list[Any]]) -> list[Any]:
    name = request.param
    if name not in results:
        results[name] = ask(world, "served", **PAIRS[name])
    return results[name]


def pairs(names: Iterable[str]) -> Any:
    some = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("ranks", some, indirect=True)


every_pair = pairs(PAIRS)


@every_pair
def test_a_training_job_tells_its_logits_on_its_first_rank_and_stays_as_it_was(ranks: list[Any]) -> None:
    first, second = ranks[:2]
    assert first["has_logits"]
    assert not second["has_logits"]
    assert first["full"] > 0
    assert second["full"] == 0
    for rank in (first, second):
        assert rank["same"]
        assert "are off the device: restore them before asking for logits" in rank["away"]


@every_pair
def test_a_replica_that_woke_answers_with_the_weights_it_was_given(ranks: list[Any]) -> None:
    for replica in ranks[2:]:
        assert replica["unequal"] == []
        assert replica["changed"]
        assert replica["again"]
        assert replica["dtype"] == "torch.float32"
        assert replica["shape"] == [3, 256]


@pairs(ALIKE)
def test_equal_layouts_answer_with_the_same_bits(ranks: list[Any]) -> None:
    assert [replica["equal"] for replica in ranks[2:]] == [True, True]


@pairs(name for name in PAIRS if "bfloat16" not in name)
def test_other_layouts_answer_alike(ranks: list[Any]) -> None:
    assert max(replica["apart"] for replica in ranks[2:]) <= 1e-5


@every_pair
def test_a_replica_gives_its_weights_back_and_takes_them_again(ranks: list[Any]) -> None:
    for replica in ranks[2:]:
        assert replica["asleep"]
        assert replica["bytes"] == 0
        assert replica["names"]
        assert "is asleep: wake it and fill its weights" in replica["serve_asleep"]
        assert "asleep already" in replica["sleep_twice"]
        assert "awake already" in replica["wake_early"]
        assert replica["awake"]
        assert replica["nan"]
        assert replica["lacking_shows"]


def test_the_memory_of_a_replica_that_sleeps_is_the_systems_again(world: World) -> None:
    for rank in ask(world, "weighed"):
        assert rank["size"] > 80 * 2**20
        assert rank["fell"] >= 0.9 * rank["size"]
        assert rank["rose"] >= 0.9 * rank["size"]


def test_a_storage_that_cannot_be_resized_is_named_and_nothing_is_given_back(world: World) -> None:
    for rank in ask(world, "fixed"):
        assert rank["message"].startswith("KitError: the storage of decoder.final_layernorm.weight cannot be resized")
        assert rank["kept"]


def test_a_replica_has_one_stage(world: World) -> None:
    assert set(ask(world, "in_stages")) == {"BadInput: pp=2 is not allowed for a replica: it must be 1"}
