"""A model that is written only by loading whole tensors: what it had comes back, and every unlike tensor of a name counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kit.engines.contents import Contents
from kit.engines.hosted import LoadedModel
from kit.errors import BadInput
from kit.sync.buckets import Mismatch, lay_out, specs_of
from kit.sync.hashes import differing_digests

CPU = torch.device("cpu")


class Engine:
    """It keeps its tensors transposed, as some engines do."""

    def __init__(self) -> None:
        self.packed = {"a.weight": torch.arange(6.0).view(3, 2), "b.bias": torch.ones(4)}
        self.table = torch.arange(5.0)

    def full_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.packed.items():
            yield name, tensor.t() if tensor.dim() == 2 else tensor

    def load(self, name: str, tensor: torch.Tensor) -> None:
        self.packed[name] = tensor.t().clone() if tensor.dim() == 2 else tensor.clone()

    def constants(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "table", self.table

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.packed["b.bias"].expand(len(tokens), 4)


@pytest.fixture
def model() -> LoadedModel:
    return LoadedModel(Engine(), "mine:Engine", CPU)


def full(value: float) -> dict[tuple[str, int], torch.Tensor]:
    return {("a.weight", 0): torch.full((2, 3), value), ("b.bias", 0): torch.full((4,), value)}


def bring(model: LoadedModel, tensors: dict[tuple[str, int], torch.Tensor]) -> None:
    layout = lay_out(specs_of(tensors), 1024)
    weights = model.weights(model.destinations())
    bound = weights.bind(layout)
    for index, pieces in enumerate(layout.buckets):
        buffer = torch.zeros(1024, dtype=torch.uint8)
        for piece in pieces:
            raw = tensors[layout.specs[piece.spec].key].contiguous().view(-1).view(torch.uint8)
            buffer[piece.offset : piece.offset + piece.size] = raw[piece.start : piece.start + piece.size]
        bound.apply(index, buffer)


def test_a_version_is_loaded_and_taken_back(model: LoadedModel) -> None:
    before = {name: tensor.clone() for name, tensor in model.full_tensors()}
    put_back = model.weights(model.destinations()).keep()
    bring(model, full(7.0))
    assert all((tensor == 7).all() for _, tensor in model.full_tensors())
    put_back()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.full_tensors())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({("a.weight", 0): torch.ones(3, 2)}, "a.weight"),
        ({("b.bias", 0): torch.ones(4, dtype=torch.bfloat16)}, "b.bias"),
        ({("c.bias", 0): torch.ones(4)}, "c.bias"),
    ],
)
def test_what_does_not_fit_is_named_before_the_first_byte(model: LoadedModel, changes: Any, sentence: str) -> None:
    with pytest.raises(Mismatch, match=sentence):
        bring(model, {**full(7.0), **changes})
    assert torch.equal(model.engine.packed["b.bias"], torch.ones(4))


def test_what_no_sync_wrote_is_counted(model: LoadedModel) -> None:
    contents = Contents(model)
    contents.disturbed()
    model.poison()
    model.load("b.bias", torch.ones(4))
    assert contents.unwritten() == {"a.weight": 6}
    model.engine.table[0] = 3
    assert contents.disturbed() == ["table"]


def test_weights_that_stay_in_a_sleeping_engine_are_listed(model: LoadedModel) -> None:
    model.sleep()
    assert len(model.resident()) == 2
    model.engine.packed.clear()
    assert model.resident() == []


class Flat(Engine):
    """All weights lie in one tensor, which is of no weight's size; its views are made when they are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.places = {name: tensor.shape for name, tensor in self.packed.items()}
        self.flat = torch.cat([tensor.flatten() for tensor in self.packed.values()])
        del self.packed

    def full_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        parts = self.flat.split([shape.numel() for shape in self.places.values()])
        for (name, shape), part in zip(self.places.items(), parts, strict=True):
            yield name, part.view(shape)


def test_one_tensor_for_all_weights_that_stays_in_a_sleeping_engine_is_listed() -> None:
    model = LoadedModel(Flat(), "mine:Flat", CPU)
    model.sleep()
    assert len(model.resident()) == 1
    model.engine.flat = torch.empty(0)
    assert model.resident() == []


def test_an_engine_without_a_call_is_refused() -> None:
    with pytest.raises(BadInput, match="serve=mine:Engine: the object it returned has no full_tensors"):
        LoadedModel(object(), "mine:Engine", CPU)


def test_unlike_tensors_of_one_name_all_count() -> None:
    assert differing_digests(iter([("head", "x"), ("head", "x"), ("norm", "z")])) == {"head": "x", "norm": "z"}
    assert differing_digests(iter([("head", "x"), ("head", "y")])) == {"head": "x y"}


def test_names_of_packed_tensors_are_those_of_their_parts(model: LoadedModel) -> None:
    assert model.counterparts("decoder.layers.3.mlp.linear_fc1.weight") == (
        "model.layers.3.mlp.gate_proj.weight",
        "model.layers.3.mlp.up_proj.weight",
    )
