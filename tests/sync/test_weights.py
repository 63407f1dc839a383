"""The weights that a receiver fills: everything is checked by name before the first byte; pieces of a tensor wait for one another."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kit.errors import KitError
from kit.sync.buckets import Bound, Cut, Layout, Mismatch, Whole, keep_copies, lay_out, specs_of
from tests.sync.ranks.service import LAYOUT, Tensors, table, tensors


def bring(layout: Layout, source: Tensors, applier: Any, order: list[int] | None = None) -> None:
    for index in order or range(len(layout.buckets)):
        buffer = torch.zeros(layout.sizes[index], dtype=torch.uint8)
        Bound(layout, source).pack(index, buffer)
        applier.apply(index, buffer)


def places(of: Tensors) -> dict[str, Any]:
    return {name: [(tensor, lambda full: full)] for (name, _), tensor in of.items()}


def cut(of: Tensors) -> Cut:
    return Cut(places(of), [*of.values()])


def loaded(of: Tensors) -> Cut:
    """Each full tensor is handed on with its name, whole, to whoever copies it."""
    return Cut(places(of), [*of.values()], lambda name, full: of[name, 0].copy_(full))


@pytest.mark.parametrize("kind", [Whole, cut, loaded])
def test_every_dtype_and_what_is_split_arrives(kind: Any) -> None:
    assert sum(spec.size > LAYOUT.bucket_bytes for spec in LAYOUT.specs) == 1
    mine = tensors(0)
    weights = kind(mine)
    for version in (1, 2):
        bring(LAYOUT, tensors(version), weights.bind(LAYOUT))
        assert table(mine) == table(tensors(version))
    put_back = weights.keep()
    bring(LAYOUT, tensors(3), weights.bind(LAYOUT))
    put_back()
    assert table(mine) == table(tensors(2))


def test_shards_are_cut_out_in_any_order_of_buckets() -> None:
    """Columns and rows of `large`, which spans three buckets, go to two places; nothing of `half` is wanted here."""
    source = tensors(1)
    columns, rows = torch.zeros(40, 128)[:, ::2], torch.zeros(20, 64)
    mine = {key: tensor for key, tensor in tensors(0).items() if key[0] not in {"large", "half"}}
    both = [(columns, lambda full: full), (rows, lambda full: full[20:])]
    weights = Cut({**places(mine), "large": both, "half": []}, [columns, rows, *mine.values()])
    order = list(range(len(LAYOUT.buckets)))
    for seed in range(5):
        random.Random(seed).shuffle(order)
        columns.zero_()
        rows.zero_()
        bring(LAYOUT, source, weights.bind(LAYOUT), order)
        assert torch.equal(columns, source["large", 0])
        assert torch.equal(rows, source["large", 0][20:])
        assert table(mine) == {name: one for name, one in table(source).items() if name not in {"large", "half"}}


def test_a_sync_that_broke_off_leaves_no_pieces_to_the_next() -> None:
    mine = tensors(0)
    weights = cut(mine)
    bring(LAYOUT, tensors(1), weights.bind(LAYOUT), [0, 1])
    bring(LAYOUT, tensors(2), weights.bind(LAYOUT))
    assert table(mine) == table(tensors(2))


@pytest.mark.parametrize("kind", [Whole, cut])
def test_what_is_missing_on_either_end_or_does_not_fit_is_named_before_a_byte_moves(kind: Any) -> None:
    mine = tensors(0)
    mine["extra", 0] = torch.zeros(2)
    mine["small", 0] = torch.zeros(3, 6)
    mine["half", 0] = mine["half", 0].float()
    del mine["one", 0]
    with pytest.raises(Mismatch) as caught:
        kind(mine).bind(LAYOUT)
    error = caught.value
    assert error.failed == (("small", 0), ("half", 0), ("one", 0))
    assert error.missing == (("extra", 0),)
    assert error.bucket == 0
    for reported in ("(3, 6)", "float32 (64, 16)", "bfloat16 (64, 16)", "one (shard 0) is missing here"):
        assert reported in str(error)
    assert "extra (shard 0) is not sent" in str(error)


@pytest.mark.parametrize("kind", [Whole, cut])
def test_weights_that_are_away_are_named(kind: Any) -> None:
    """The replica sleeps: a copy into its storages would write to memory that is gone."""
    mine = tensors(0)
    mine["eighth", 0].untyped_storage().resize_(0)
    with pytest.raises(Mismatch, match=r"eighth \(shard 0\) has no bytes here"):
        kind(mine).bind(LAYOUT)


def test_a_cut_that_cannot_be_made_is_named() -> None:
    mine = tensors(0)

    def refuses(full: torch.Tensor) -> torch.Tensor:
        raise KitError("three heads do not go into two parts")

    with pytest.raises(Mismatch, match=r"last \(shard 0\) does not fit its bfloat16 \(16, 8\) here"):
        Cut({**places(mine), "last": [(mine["last", 0], refuses)]}, []).bind(LAYOUT)


def test_a_strided_tensor_that_comes_in_pieces_is_refused_and_a_whole_one_is_not() -> None:
    mine = tensors(0)
    mine["half", 0] = torch.zeros(16, 64, dtype=torch.bfloat16).t()
    bring(LAYOUT, tensors(1), Whole(mine).bind(LAYOUT))
    assert table(mine) == table(tensors(1))
    mine["large", 0] = torch.zeros(64, 40).t()
    message = r"large \(shard 0\) is not contiguous here, but is split over several buckets"
    with pytest.raises(Mismatch, match=message) as caught:
        Whole(mine).bind(LAYOUT)
    large = [spec.name for spec in LAYOUT.specs].index("large")
    in_buckets = [at for at, row in enumerate(LAYOUT.buckets) if large in {piece.spec for piece in row}]
    assert len(in_buckets) > 1
    assert caught.value.bucket == in_buckets[0]


def test_a_tensor_that_was_replaced_is_the_one_that_is_filled() -> None:
    mine = tensors(0)
    weights = Whole(mine)
    bring(LAYOUT, tensors(1), weights.bind(LAYOUT))
    assert weights.bind(LAYOUT) is weights.bind(LAYOUT)
    old = mine["half", 0]
    mine["half", 0] = torch.zeros_like(old)
    bring(LAYOUT, tensors(2), weights.bind(LAYOUT))
    assert table(mine) == table(tensors(2))
    mine["half", 0] = torch.zeros(3)
    with pytest.raises(Mismatch, match=r"half \(shard 0\) is float32 \(3,\) here"):
        weights.bind(LAYOUT)


def test_another_layout_is_bound_anew() -> None:
    mine = tensors(0)
    weights = Whole(mine)
    bring(LAYOUT, tensors(1), weights.bind(LAYOUT))
    other = lay_out(specs_of(mine), 16384)
    bring(other, tensors(2), weights.bind(other))
    assert table(mine) == table(tensors(2))


def test_copies_that_are_kept_are_put_back_into_strided_tensors_too() -> None:
    mine = tensors(1)
    mine["half", 0] = mine["half", 0].t().contiguous().t()
    assert not mine["half", 0].is_contiguous()
    put_back = keep_copies([*mine.values()])
    for tensor in mine.values():
        tensor.zero_()
    put_back()
    assert table(mine) == table(tensors(1))
