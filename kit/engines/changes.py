"""A lab's own comparison of two versions of tensors, word by word. A word is one element.

Nothing of the code under test takes part. What a delta needs is counted by information: the changed words, and their positions in the
fewest bits, where changes are equally likely everywhere in a tensor; each rounded up to a block of the bucket layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

BLOCK = 512  # bytes: every tensor in a bucket begins at a multiple


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangedTensor:
    name: str
    words: int
    changed: int
    size: int  # bytes of a word

    def needed(self, delta: str) -> int:
        """The least bytes for what changed: for `tensor` all words, for `word` the changed ones and their positions."""
        if not self.changed:
            return 0
        whole = blocks(self.words * self.size)
        if delta == "tensor":
            return whole
        return min(whole, blocks(self.changed * self.size) + blocks(position_bits(self.changed, self.words) / 8))


class ChangeOracle:
    """The tensors of the last version that was compared."""

    def __init__(self) -> None:
        self.before: dict[str, torch.Tensor] = {}

    def remember(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.before = {name: as_bytes(tensor) for name, tensor in tensors.items()}

    def compare(self, tensors: Mapping[str, torch.Tensor]) -> list[ChangedTensor]:
        """Every tensor, in order; none without an earlier version."""
        return [
            ChangedTensor(
                name=name,
                words=tensor.numel(),
                changed=int((as_bytes(tensor) != self.before[name]).any(dim=1).sum()),
                size=tensor.element_size(),
            )
            for name, tensor in tensors.items()
            if self.before
        ]

    def names(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        return [each.name for each in self.compare(tensors) if each.changed]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor on the host, one row of bytes per word."""
    flat = tensor.detach().to("cpu", copy=True).contiguous().view(-1)
    return flat.view(torch.uint8).view(-1, tensor.element_size())


def position_bits(chosen: int, words: int) -> float:
    """The bits that tell which words were chosen."""
    ways = math.lgamma(words + 1) - math.lgamma(chosen + 1) - math.lgamma(words - chosen + 1)
    return ways / math.log(2)


def blocks(size: float) -> int:
    return math.ceil(size / BLOCK) * BLOCK
