"""Context parallelism: the ranks of a group have the same rows, and each computes one part of their columns.

Parts are contiguous and equally wide; rows are padded at their end. A query needs the keys and values of all earlier columns, so attention
gathers them, and the gradient of a key is a sum over the ranks whose queries saw it. Log-probabilities are gathered to whole rows, of which
each rank computes the same loss: the slope of its own columns is already the whole one there, and is not summed. So the sum of the
parameters' gradients over all ranks is the gradient of the rows, without a factor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

Back = Callable[[torch.Tensor, dist.ProcessGroup, int], torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Columns:
    """Which columns this rank computes, by its place in the context group."""

    group: dist.ProcessGroup

    def padded(self, rows: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """[rows, length] with more columns at the end, so that every rank has as many."""
        return functional.pad(rows, (0, -rows.shape[1] % dist.get_world_size(self.group)), value=fill)

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's columns of [rows, length]."""
        return part_of(self.padded(rows), self.group, 1)

    def keys_and_values(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Those of all columns, stacked, from [rows, heads, own columns, head]."""
        return _gathered(torch.stack([keys, values]), self.group, 3, slope_of_keys)

    def whole(self, scored: torch.Tensor, length: int) -> torch.Tensor:
        """[rows, length] from every rank's own columns."""
        return _gathered(scored, self.group, 1, slope_of_scores)[:, :length]


def part_of(whole: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    return whole.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]


def slope_of_keys(slope: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Each rank has what its own queries add to the gradient of every key: summed in float32 or wider, as FSDP sums gradients."""
    wide = torch.promote_types(slope.dtype, torch.float32)
    total = slope.to(wide, copy=True, memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return part_of(total, group, dim).to(slope.dtype)


def slope_of_scores(slope: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Every rank has the same slopes of whole rows, since it computes the same loss: a sum would be that many times too large."""
    return part_of(slope, group, dim)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup, dim: int, back: Back) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.back = group, dim, back
        own = part.contiguous()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own, group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.back(slopes[0], ctx.group, ctx.dim), None, None, None


def _gathered(part: torch.Tensor, group: dist.ProcessGroup, dim: int, back: Back) -> torch.Tensor:
    joined: torch.Tensor = _Gathered.apply(part, group, dim, back)  # type: ignore[no-untyped-call]
    return joined
