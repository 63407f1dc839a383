"""What changed between two packed versions, packed again into buckets that hold nothing else.

`tensor`: every tensor with a changed word, whole. `word`: the changed words of each tensor and their positions, or the whole tensor where
that is shorter. Names are those of the tensors; the second part of a key says what the bytes are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch

from kit.sync.buckets import GAPS, WORDS, Bound, Key, Layout, bucket_views, lay_out, specs_of
from kit.sync.cache import Segment, starts
from kit.sync.words import bits, changed_words, gaps_of

Delta = Literal["off", "tensor", "word"]
Packed = Callable[[int], torch.Tensor]  # the bytes of a bucket by its number
WORTH = 0.75  # of the bytes of all weights: above this the whole version is sent


class Changes:
    """The changes since version `base`, in memory of their own from `pack` to `close`."""

    segment: Segment

    def __init__(self, base: int, tensors: Mapping[Key, torch.Tensor], bucket_bytes: int) -> None:
        self.base = base
        self.tensors = tensors
        self.layout = lay_out(specs_of(tensors), bucket_bytes, oversize="split")
        self.starts, self._size = starts(self.layout.sizes)

    def worth_sending(self, whole: Layout) -> bool:
        return sum(self.layout.sizes) <= WORTH * sum(whole.sizes)

    def pack(self) -> None:
        self.segment = Segment(self._size, name="kit-changes")
        bound = Bound(self.layout, self.tensors)
        try:
            for index in range(len(self.layout.buckets)):
                bound.pack(index, self.bucket(index), fresh=True)
        except BaseException:
            self.close()
            raise

    def bucket(self, index: int) -> torch.Tensor:
        start = self.starts[index]
        return self.segment.tensor[start : start + self.layout.sizes[index]]

    def close(self) -> None:
        self.segment.close()


def find_changes(
    layout: Layout, old: Packed, new: Packed, live: Mapping[Key, torch.Tensor], by: Delta
) -> dict[Key, torch.Tensor]:
    """What changed from one packed version to another one, which these live weights are."""
    tensors: dict[Key, torch.Tensor] = {}
    for key, pieces in changed_pieces(layout, old, new).items():
        tensors |= {key: live[key]} if by == "tensor" else shortest(key, pieces, live[key])
    return tensors


class ChangedPiece(NamedTuple):
    """A piece of a tensor: its first word's number in the tensor, which words changed, and all of its words."""

    start: int
    changed: torch.Tensor
    words: torch.Tensor


def shortest(key: Key, pieces: Sequence[ChangedPiece], whole: torch.Tensor) -> dict[Key, torch.Tensor]:
    """The changed words of a tensor with their gaps, or all of it."""
    count = sum(int(piece.changed.sum()) for piece in pieces)
    if count * (whole.element_size() + 1) >= whole.nbytes:  # a gap takes a byte or more
        return {key: whole}
    places = [piece.changed.nonzero().view(-1) for piece in pieces]
    gaps = gaps_of(torch.cat([at + piece.start for at, piece in zip(places, pieces, strict=True)]))
    words = torch.cat([bits(piece.words).view(-1)[at] for at, piece in zip(places, pieces, strict=True)])
    if gaps.nbytes + words.nbytes >= whole.nbytes:
        return {key: whole}
    return {(key[0], GAPS): gaps, (key[0], WORDS): words.view(whole.dtype)}


def changed_pieces(layout: Layout, old: Packed, new: Packed) -> dict[Key, list[ChangedPiece]]:
    """Where the tensors with changed words changed, by their pieces in the buckets."""
    pieces: dict[Key, list[ChangedPiece]] = {}
    for index in range(len(layout.buckets)):
        pairs = zip(bucket_views(layout, index, old(index)), bucket_views(layout, index, new(index)), strict=True)
        for was, now in pairs:
            changed = changed_words(was.tensor, now.tensor)
            if changed.any():
                pieces.setdefault(now.spec.key, []).append(ChangedPiece(now.start, changed, now.tensor))
    return pieces
