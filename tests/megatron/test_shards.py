"""Convert shards to full tensors and back: the mapping alone, and on real ranks compared with a plain model of the same full weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.errors import BadInput
from kit.megatron.config import ModelConfig
from kit.megatron.lora import refuse_unsupported
from kit.megatron.shards import COLUMNS, GATE_UP, QKV, ROWS, WHOLE, ShardPlace, join, made_of, part_of_tensor, views
from kit.world import World

ROOT = Path(__file__).parents[2]
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp4": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "distributed_optimizer": True},
    "tp2pp2": {"tp": 2, "pp": 2},
    "pp2dp2": {"pp": 2, "order": "tp-cp-ep-pp-dp"},
    "pp4": {"pp": 4},
    "odd": {"tp": 2, "size": "odd"},
    "ep1": {"experts": 4},
    "ep2": {"ep": 2, "experts": 4},
    "ep2pp2": {"ep": 2, "pp": 2, "experts": 4},
    "ep2etp2": {"ep": 2, "etp": 2, "experts": 4},
}
STAGES = {"pp": 2, "tp": 2}
# The end of each error message.
REFUSED = {
    "missing": "missing: model.layers.3.mlp.gate_proj.weight",
    "missing-on-one": "missing: model.layers.3.mlp.gate_proj.weight",
    "unknown": "unknown to this model: lm_head.weight",
    "turned": "wrong shape: model.layers.3.mlp.gate_proj.weight is (64, 128) and must be (128, 64)",
    "same-together": "(126, 64) and must be (128, 64), model.layers.3.mlp.up_proj.weight is (130, 64) and must be (128, 64)",
    "longer-vocabulary": "wrong shape: model.embed_tokens.weight is (257, 64) and must be (256, 64)",
    "many": "model.layers.3.mlp.up_proj.weight, model.layers.3.post_attention_layernorm.weight and 7 more",
}


def numbered(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Tensors in which every element is a distinct number."""
    made, start = [], 0
    for shape in shapes:
        count = torch.Size(shape).numel()
        made.append(torch.arange(start, start + count).view(shape))
        start += count
    return made


def cut(how: str, full: list[torch.Tensor], place: ShardPlace) -> torch.Tensor:
    """One rank's shard with every view filled; elements that no view covers are -1."""
    own = [part_of_tensor(how, each, place) for each in full]
    assert [each.untyped_storage().data_ptr() for each in own] == [each.untyped_storage().data_ptr() for each in full]
    dim = 1 if how == COLUMNS else 0
    shape = [*own[0].shape]
    shape[dim] = sum(each.shape[dim] for each in own)
    shard = torch.full(shape, -1)
    for into, each in zip(views(how, shard, place), own, strict=True):
        into.copy_(each.view(into.shape))
    return shard


def test_a_rank_has_its_query_groups_one_after_the_other() -> None:
    q, k, v = (torch.tensor([*names]).T for names in ([range(10, 18)], [range(20, 24)], [range(30, 34)]))
    # Eight query rows and four key rows; heads have one row, two queries share a key, and there are two tensor ranks.
    place = [ShardPlace(rank=rank, size=2, head=1, queries=2) for rank in range(2)]
    assert cut(QKV, [q, k, v], place[0]).flatten().tolist() == [10, 11, 20, 30, 12, 13, 21, 31]
    assert cut(QKV, [q, k, v], place[1]).flatten().tolist() == [14, 15, 22, 32, 16, 17, 23, 33]


def test_a_rank_has_its_half_of_gate_and_of_up() -> None:
    gate, up = torch.tensor([[0], [1], [2], [3]]), torch.tensor([[5], [6], [7], [8]])
    assert cut(GATE_UP, [gate, up], ShardPlace(1, 2, 1, 1)).flatten().tolist() == [2, 3, 7, 8]


def test_columns_are_cut_and_norms_are_not() -> None:
    full = numbered((2, 4))
    assert cut(COLUMNS, full, ShardPlace(1, 2, 1, 1)).tolist() == [[2, 3], [6, 7]]
    assert part_of_tensor(WHOLE, full[0], ShardPlace(1, 2, 1, 1)) is full[0]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("how", "shapes"),
    [
        (WHOLE, [(24,)]),
        (ROWS, [(8, 3)]),
        (COLUMNS, [(3, 8)]),
        (GATE_UP, [(8, 3), (8, 3)]),
        (QKV, [(24, 5), (8, 5), (8, 5)]),
        (QKV, [(24,), (8,), (8,)]),
    ],
)
def test_join_takes_back_what_cut_did(how: str, shapes: list[tuple[int, ...]], size: int) -> None:
    full = numbered(*shapes)
    places = [ShardPlace(rank=rank, size=size, head=2, queries=3) for rank in range(size)]
    shards = [cut(how, full, place) for place in places]
    back = join(how, shards, places[0])
    assert [each.tolist() for each in back] == [each.tolist() for each in full]
    if size == 1 and how != QKV:
        assert all(each.untyped_storage().data_ptr() == shards[0].untyped_storage().data_ptr() for each in back)
    if size > 1 and how != WHOLE:
        assert [each.tolist() for each in join(how, shards[::-1], places[0])] != [each.tolist() for each in full]


def test_layers_and_experts_are_counted_over_all_ranks() -> None:
    assert made_of("decoder.layers.1.mlp.linear_fc2.weight", first_layer=2) == (
        COLUMNS,
        ("model.layers.3.mlp.down_proj.weight",),
    )
    expert = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"
    owner = "model.layers.4.mlp.experts.7."
    assert made_of(expert, first_layer=4, first_expert=6) == (
        GATE_UP,
        (f"{owner}gate_proj.weight", f"{owner}up_proj.weight"),
    )


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.self_attention.q_layernorm.weight",
        "decoder.layers.0.mlp.experts.local_experts.0.router.weight",
        "decoder.layers.0.linear_fc1.weight",
        "embedding.position_embeddings.weight",
    ],
)
def test_a_parameter_that_is_not_known_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match=f"{name} is not a parameter"):
        made_of(name)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with World(4, device="cpu", env=environment, logs=tmp_path_factory.mktemp("logs")) as made:
        yield made


def ask(world: World, function: str, **arguments: Any) -> list[Any]:
    return world.call(f"tests.megatron.ranks.shards:{function}", **arguments)


@pytest.fixture(scope="module")
def surveys() -> dict[str, list[Any]]:
    return {}


@pytest.fixture
def ranks(request: pytest.FixtureRequest, world: World, surveys: dict[str, list[Any]]) -> list[Any]:
    name = request.param
    if name not in surveys:
        surveys[name] = ask(world, "survey", **LAYOUTS[name])
    return surveys[name]


ALIKE = ("dp4", "tp2", "pp2dp2", "pp4", "ep1", "ep2", "ep2pp2")  # each uses only features that another layout has too
every_layout = pytest.mark.parametrize(
    "ranks",
    [pytest.param(name, marks=[pytest.mark.slow] if name in ALIKE else []) for name in LAYOUTS],
    indirect=True,
)


@every_layout
def test_full_tensors_come_back_with_the_same_bits(ranks: list[Any]) -> None:
    for rank in ranks:
        assert rank["unequal"] == []
        assert rank["unequal_again"] == []
        assert rank["bfloat16"] == []


@every_layout
def test_what_was_merged_is_the_callers_own(ranks: list[Any]) -> None:
    for rank in ranks:
        assert rank["changed_later"] == []
        assert rank["devices"] == ["cpu"]


@every_layout
def test_full_tensors_arrive_one_by_one_on_the_first_rank_alone(ranks: list[Any]) -> None:
    assert ranks[0]["streamed"] == []
    assert [rank["streamed_count"] for rank in ranks[1:]] == [0] * 3


@every_layout
def test_full_tensors_are_applied_one_by_one_in_any_order(ranks: list[Any]) -> None:
    for rank in ranks:
        assert rank["emptied"] > 0
        assert rank["applied"] == []
        assert rank["not_views"] == []


def test_a_full_tensor_of_another_shape_is_not_applied(world: World) -> None:
    found = ask(world, "misapplied", **STAGES)
    assert found[-1].startswith("BadInput")
    for message in found:
        assert message in {"BadInput: model.norm.weight is (1,) and must be (64,)", "no such tensor here"}


@every_layout
def test_logits_are_those_of_the_plain_model(ranks: list[Any]) -> None:
    found = [each for rank in ranks for each in rank["logits"]]
    assert found
    assert max(found) <= 1e-5


@every_layout
def test_gradients_are_those_of_the_plain_model(ranks: list[Any]) -> None:
    for rank in ranks:
        assert rank["gradient_names"]
        assert {name: far for name, far in rank["gradients"].items() if far > 1e-5} == {}


def test_two_tensors_that_changed_places_are_seen(world: World) -> None:
    names = [f"model.layers.2.self_attn.{kind}_proj.weight" for kind in "kv"]
    for found in ask(world, "mixed", name=names[0], like=names[1], **STAGES):
        assert found == names


@pytest.mark.drawn(3, of="refused")
@pytest.mark.parametrize("case", REFUSED)
def test_tensors_that_do_not_fit_are_refused_by_name_on_every_rank(world: World, case: str) -> None:
    found = ask(world, "refused", case=case, **STAGES)
    assert len({rank["message"] for rank in found}) == 1
    assert found[0]["message"].startswith("these tensors do not fill the model: ")
    assert found[0]["message"].endswith(REFUSED[case])
    for rank in found:
        assert rank["changed"] == []


def test_a_rank_needs_its_own_stages_tensors_alone(world: World) -> None:
    assert ask(world, "own_alone", **STAGES) == [[]] * 4


@pytest.mark.parametrize(
    ("targets", "layout"),
    [
        ("all", {"tp": 2, "layers": 2}),
        ("all", {"layers": 2}),
        pytest.param("attention", {"tp": 2, "distributed_optimizer": True}, marks=pytest.mark.slow),
        pytest.param("mlp", {"tp": 2, "size": "odd"}, marks=pytest.mark.slow),
    ],
)
def test_adapters_on_one_base_are_plain_models_with_merged_weights(
    world: World, targets: str, layout: dict[str, Any]
) -> None:
    ranks = world.call("tests.megatron.ranks.lora:adapted", targets=targets, **layout)
    for rank in ranks:
        assert rank["base_trains"] == []
        assert rank["loaded"] == [[], []]
        assert max(rank["logits"] + rank["merged"]) <= 1e-5 < rank["apart"]
        assert {name: far for name, far in rank["gradients"].items() if far > 1e-4} == {}
        assert rank["stepped"]
        assert rank["grad_norm"] == pytest.approx(rank["norm"], rel=1e-4)
        assert rank["trained"]
        assert rank["other"] == []
        assert rank["base"] == []


def test_a_job_that_no_adapter_can_have_is_refused() -> None:
    refusals = {
        "pp": "pp=2 is not allowed with adapters: it must be 1",
        "overlap_grad_reduce": "overlap_grad_reduce=True is not allowed with adapters: the base has no gradients whose reduction "
        "could be overlapped",
        "experts": "experts=4 is not allowed with adapters: experts have linear layers of their own, which get no adapter",
    }
    for setting, sentence in refusals.items():
        with pytest.raises(BadInput, match=re.escape(sentence)):
            refuse_unsupported(ModelConfig(**{setting: {"pp": 2, "overlap_grad_reduce": True, "experts": 4}[setting]}))
