"""Microbatches by rows and by tokens; sequences packed into one row are as independent as in separate rows."""

from __future__ import annotations

import pytest
import torch

from kit.errors import BadInput
from kit.megatron.config import GEOMETRIES
from kit.train import protocol as room
from kit.train.plain import from_weights, initial_weights, next_logprobs, plain_logprobs
from kit.train.protocol import Batch

GEOMETRY = GEOMETRIES["tiny"]
LENGTHS = [9, 1, 20, 2, 13, 20, 5]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def batch() -> Batch:
    generator = torch.Generator().manual_seed(4)
    lengths = torch.tensor(LENGTHS)
    inside = torch.arange(20)[None] < lengths[:, None]
    return {
        "input_ids": torch.randint(1, GEOMETRY.vocab, (7, 20), generator=generator) * inside,
        "input_lengths": lengths,
        "token_mask": inside.float(),
        "sample_mask": torch.arange(7).float(),
    }


def shape(pieces: list[Batch]) -> list[list[int]]:
    return [piece["sample_mask"].int().tolist() for piece in pieces]


def test_fixed_are_rows_in_order(batch) -> None:
    assert shape(room.microbatches(batch, "fixed", mbs=3, token_budget=0)) == [[0, 1, 2], [3, 4, 5], [6]]


def test_dynamic_rows_times_longest_is_within_the_budget(batch) -> None:
    pieces = room.microbatches(batch, "dynamic", mbs=3, token_budget=40)
    assert shape(pieces) == [[2, 5], [4, 0, 6], [3, 1]]
    for piece in pieces:
        longest = max(piece["input_lengths"].tolist())
        assert piece["input_ids"].shape == piece["token_mask"].shape == (len(piece["sample_mask"]), longest)
        assert piece["input_ids"].numel() <= 40


def test_packed_lengths_add_up_within_the_budget(batch) -> None:
    pieces = room.microbatches(batch, "packed", mbs=3, token_budget=35)
    assert shape(pieces) == [[2, 4, 3], [5, 0, 6, 1]]
    assert [int(piece["input_lengths"].sum()) for piece in pieces] == [35, 35]


@pytest.mark.parametrize("batching", ["dynamic", "packed"])
def test_every_token_is_in_one_piece_as_it_was(batch, batching) -> None:
    found = {}
    for piece in room.microbatches(batch, batching, mbs=1, token_budget=24):
        for row, ids, length in zip(
            *(piece[name].tolist() for name in ("sample_mask", "input_ids", "input_lengths")), strict=True
        ):
            found[int(row)] = ids[:length]
    wanted = batch["input_ids"].tolist()
    assert found == {row: wanted[row][:length] for row, length in enumerate(LENGTHS)}


@pytest.mark.parametrize("batching", ["dynamic", "packed"])
def test_a_sequence_above_the_budget_is_refused(batch, batching) -> None:
    with pytest.raises(BadInput, match="token_budget=19 is less than the longest sequence: use at least 20"):
        room.microbatches(batch, batching, mbs=1, token_budget=19)


@pytest.mark.parametrize("batching", ["fixed", "dynamic", "packed"])
def test_no_rows_are_no_pieces(batch, batching) -> None:
    none = {name: value[:0] for name, value in batch.items()}
    assert room.microbatches(none, batching, mbs=2, token_budget=20) == []


def test_a_piece_has_a_prediction_to_make_at_least(batch) -> None:
    piece = room.microbatches({name: value[1:2] for name, value in batch.items()}, "packed", mbs=1, token_budget=20)[0]
    assert piece["input_ids"].shape == (1, 2)
    packed = room.pack(piece)
    assert packed.input_ids.shape == (1, 1)
    model = from_weights(GEOMETRY, initial_weights(GEOMETRY, 1))
    unpacked = packed.unpack(next_logprobs(model, packed.input_ids, packed.positions, packed.segments))
    assert unpacked.tolist() == [[0.0]]
    unpacked.sum().backward()
    assert not any(param.grad is None or param.grad.any() for param in model.parameters())


def test_packed_logprobs_and_gradients_are_those_of_rows(batch) -> None:
    weights = {name: value * 4 for name, value in initial_weights(GEOMETRY, 1).items()}
    models = [from_weights(GEOMETRY, weights, dtype=torch.float64) for _ in range(2)]
    packed = room.pack(batch)
    assert packed.positions[0, : 9 + 1 + 2].tolist() == [*range(9), 0, 0, 1]
    assert packed.segments[0, 8:12].tolist() == [0, 1, 2, 2]
    apart = plain_logprobs(models[0], batch["input_ids"]) * batch["token_mask"][:, 1:]
    together = packed.unpack(next_logprobs(models[1], packed.input_ids, packed.positions, packed.segments))
    torch.testing.assert_close(together, apart)
    for each in (apart, together):
        each.square().sum().backward()
    for one, two in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)


def test_segments_keep_sequences_apart(batch) -> None:
    model = from_weights(GEOMETRY, {name: value * 4 for name, value in initial_weights(GEOMETRY, 1).items()})
    packed = room.pack(batch)
    leaky = next_logprobs(model, packed.input_ids, packed.positions)
    good = next_logprobs(model, packed.input_ids, packed.positions, packed.segments)
    torch.testing.assert_close(leaky[0, :8], good[0, :8])
    assert not torch.allclose(leaky[0, 10:20], good[0, 10:20])


def test_a_place_without_a_prediction_points_at_a_token_that_is_there(batch) -> None:
    alone = {name: value[1:2] for name, value in batch.items()}
    packed = room.pack(alone)
    assert packed.input_ids.shape == (1, 1)
    assert not packed.present.any()
    assert packed.index.unique().tolist() == [0]
