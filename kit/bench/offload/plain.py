"""What a job's own code would do to have its tensors on the host and back, one tensor at a time. Rank-side.

None of it gives anything back: these are copies alone, of the bytes that the mover brings out and back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kit.bench.offload.saver import timed
from kit.measure import host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kit.megatron.tensors import Item


def flat(item: Item) -> torch.Tensor:
    """A storage as bytes, where it is."""
    return torch.empty(0, dtype=torch.uint8, device=item.storage.device).set_(item.storage)


def one_by_one(items: Sequence[Item]) -> tuple[float, float]:
    """What one line of code does: each tensor into memory that is new, with `.cpu()` on CUDA; and back to where it was."""
    flats = [flat(item) for item in items]
    kept: list[torch.Tensor] = []
    out = timed(lambda: kept.extend(one.cpu() if one.is_cuda else one.clone() for one in flats))
    back = timed(lambda: [one.copy_(place) for one, place in zip(flats, kept, strict=True)])
    kept.clear()
    host.trim()
    return out, back


class Pageable:
    """Host memory that is there already, and not pinned: the driver copies to and from it by way of its own."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.block = torch.ones(sum(item.size for item in items), dtype=torch.uint8)

    def copies(self, items: Sequence[Item]) -> tuple[float, float]:
        """Seconds out and back."""
        pairs, start = [], 0
        for item in items:
            pairs.append((self.block[start : start + item.size], flat(item)))
            start += item.size
        out = timed(lambda: [place.copy_(one) for place, one in pairs])
        back = timed(lambda: [one.copy_(place) for place, one in pairs])
        return out, back
