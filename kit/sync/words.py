"""Changed words of a tensor: where two versions of it differ, and how such words are sent and written. A word is one element.

Words are compared as bits: -0.0 differs from 0.0, and NaN equals itself. Their positions are sent as gaps: the number of unchanged words
before each changed one, in one byte each, where 255 stands for as many words and no changed one; in four bytes each where that is shorter.
A part of the full tensor gets only the words that lie in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kit.errors import KitError

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SKIP = 255


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor's words as integers."""
    return tensor.detach().view(BITS[tensor.element_size()])


def changed_words(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Which words differ between two tensors of one shape and dtype, in order."""
    return (bits(old) != bits(new)).view(-1)


def gaps_of(positions: torch.Tensor) -> torch.Tensor:
    """Positions as gaps, in bytes or in words of four bytes, whichever is shorter."""
    gaps = positions.clone()
    gaps[1:] -= positions[:-1] + 1
    skips = gaps // SKIP
    places = torch.arange(len(gaps)) + skips.cumsum(0)
    count = len(gaps) + int(skips.sum())
    if count >= 4 * len(gaps) and int(gaps.max()) < 2**31:
        return gaps.to(torch.int32)
    encoded = torch.full((count,), SKIP, dtype=torch.uint8)
    encoded[places] = (gaps % SKIP).to(torch.uint8)
    return encoded


def positions_of(gaps: torch.Tensor) -> torch.Tensor:
    """The positions that `gaps_of` was given."""
    if gaps.dtype == torch.int32:
        return (gaps.to(torch.int64) + 1).cumsum(0) - 1
    changed = gaps != SKIP
    return ((gaps.to(torch.int64) + changed).cumsum(0) - 1)[changed]


def write_words(
    into: torch.Tensor,
    take: Callable[[torch.Tensor], torch.Tensor],
    shape: Sequence[int],
    positions: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Write words at positions of a full tensor of this shape into the part of it that `take` returns."""
    size = torch.Size(shape).numel()
    if len(positions) != len(values) or (len(positions) and int(positions[-1]) >= size):
        raise KitError(f"{len(values)} words at {len(positions)} positions do not fit a tensor of {size} words")
    positions, values = positions.to(into.device), bits(values).to(into.device)
    target = bits(into)
    full = torch.empty(shape, device="meta")
    part = take(full)
    if part.shape == into.shape and is_nested_view(part, full):
        coordinates, inside = coordinates_in(part, positions)
        target[coordinates] = values[inside]
        return
    moved = torch.zeros(shape, dtype=torch.bool, device=into.device)
    moved.view(-1)[positions] = True
    words = torch.zeros(shape, dtype=values.dtype, device=into.device)
    words.view(-1)[positions] = values
    target.copy_(torch.where(take(moved), take(words), target))


def is_nested_view(part: torch.Tensor, full: torch.Tensor) -> bool:
    """Whether a part is a view of the full tensor in which each dimension steps over all words of the next one."""
    if part.untyped_storage()._cdata != full.untyped_storage()._cdata:
        return False
    reach = 1
    for size, stride in zip(reversed(part.shape), reversed(part.stride()), strict=True):
        if size > 1:
            if stride < reach:
                return False
            reach = size * stride
    return True


def coordinates_in(part: torch.Tensor, positions: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """The coordinates in a nested view of those positions that lie in it, and which these are."""
    rest = positions - int(part.storage_offset())
    inside = rest >= 0
    coordinates = []
    for size, stride in zip(part.shape, part.stride(), strict=True):
        at = rest // stride if size > 1 else torch.zeros_like(rest)
        inside &= at < size
        rest = rest - at * stride
        coordinates.append(at)
    inside &= rest == 0
    return tuple(at[inside] for at in coordinates), inside
