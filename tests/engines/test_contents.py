"""The lab's view of a model: names over all stages, what changed, what was written, and constants."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kit.engines.contents import Contents, ModuleTensors, constants, versioned
from kit.engines.hosted import OwnSide


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number
        self.linear = nn.Linear(2, 2, bias=False)


class Decoder(nn.Module):
    def __init__(self, numbers: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(number) for number in numbers])


class Stage(nn.Module):
    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.decoder = Decoder(numbers)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("mask", torch.ones(4), persistent=False)
        self.table = torch.arange(4.0)


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_names_count_layers_over_all_stages_and_drop_wrappers() -> None:
    stage = Wrapper(Wrapper(Stage(3, 4)))
    names = {"decoder.layers.2.linear.weight", "decoder.layers.3.linear.weight", "scale", "count"}
    assert {name for name, _ in versioned([stage])} == names
    assert {name for name, _ in constants([stage])} == {"mask", "table"}


def test_the_last_stages_copy_of_the_embedding_has_the_embeddings_name() -> None:
    last = nn.Module()
    last.output_layer = nn.Linear(2, 2, bias=False)
    assert [name for name, _ in versioned([last])] == ["embedding.word_embeddings.weight"]


def test_a_tensor_that_changed_is_named_once() -> None:
    stage = Stage(1)
    contents = Contents(ModuleTensors([stage]))
    assert contents.changed() == {"decoder.layers.0.linear.weight", "scale", "count"}
    assert contents.changed() == set()
    stage.scale[1] += 1
    assert contents.changed() == {"scale"}
    assert contents.changed() == set()


def test_a_constant_is_compared_with_the_first_look() -> None:
    stage = Stage(1)
    contents = Contents(ModuleTensors([stage]))
    assert contents.disturbed() == []
    stage.table, stage.mask = stage.table.flip(0), torch.empty(0)
    assert contents.disturbed() == ["mask", "table"]
    assert contents.disturbed() == ["mask", "table"]


def test_what_a_receiver_derives_may_change_and_what_it_declares_frozen_may_not() -> None:
    stage = Stage(1)
    side = OwnSide.__new__(OwnSide)
    side.chunks = [stage]
    side.receive_by(SimpleNamespace(load=None, derived=["packed", "mas"], frozen=["scale"]), "mine:Side")
    contents = Contents(side)
    assert contents.disturbed() == []
    stage.decoder.layers[0].linear.packed, stage.mask = torch.ones(2), torch.empty(0)
    assert contents.disturbed() == []
    side.poison()
    assert set(contents.unwritten()) == {"count", "decoder.layers.0.linear.weight"}
    stage.scale[1] += 1
    stage.table[0] += 1
    assert contents.disturbed() == ["scale", "table"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_no_one_wrote_is_counted_by_element(dtype: torch.dtype) -> None:
    stage = Stage(1).to(dtype)
    contents = Contents(ModuleTensors([stage]))
    contents.holder.poison()
    weight = stage.decoder.layers[0].linear.weight.data
    assert contents.unwritten() == {"count": 2, "decoder.layers.0.linear.weight": 4, "scale": 3}
    weight[0] = 1
    stage.scale.fill_(1)
    stage.count[0] = 7  # of whole numbers any may be right, so one that was written shows that the sync reached them
    assert contents.unwritten() == {"decoder.layers.0.linear.weight": 2}
    weight.zero_()
    assert contents.unwritten() == {}
