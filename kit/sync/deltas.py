"""What changed between two packed versions, packed again into buckets that hold nothing else.

`tensor`: every tensor with a changed word, whole. `word`: the changed words of each tensor and their positions, or the whole tensor where
that is shorter. Names are those of the tensors; the second part of a key says what the bytes are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch

from kit.sync.buckets import GAPS, WORDS, Bound, Key, Layout, bucket_views, lay_out, specs_of
from kit.sync.cache import Segment, starts
from kit.sync.words import bits, changed_positions, gaps_of

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
    for key, parts in changed_parts(layout, old, new).items():
        tensors |= {key: live[key]} if by == "tensor" else shortest(key, parts, live[key])
    return tensors


def shortest(
    key: Key, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], whole: torch.Tensor
) -> dict[Key, torch.Tensor]:
    """The changed words of a tensor with their gaps, or all of it."""
    gaps, words = gaps_of(torch.cat([at for at, _ in parts])), torch.cat([words for _, words in parts])
    if gaps.nbytes + words.nbytes >= whole.nbytes:
        return {key: whole}
    return {(key[0], GAPS): gaps, (key[0], WORDS): words}


def changed_parts(layout: Layout, old: Packed, new: Packed) -> dict[Key, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The positions and new values of changed words, for each tensor that has any, by its pieces in the buckets."""
    parts: dict[Key, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for index in range(len(layout.buckets)):
        pairs = zip(bucket_views(layout, index, old(index)), bucket_views(layout, index, new(index)), strict=True)
        for was, now in pairs:
            at = changed_positions(was.tensor, now.tensor)
            if len(at):
                words = bits(now.tensor).view(-1)[at].view(now.tensor.dtype)
                parts.setdefault(now.spec.key, []).append((at + now.start, words))
    return parts
