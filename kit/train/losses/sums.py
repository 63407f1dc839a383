"""What the losses share: masked values, sums by row and over rows, extremes.

Everything is computed in float64: log-probabilities far apart neither cancel nor overflow, and however rows are dealt out over
microbatches and ranks, a metric is the same to the last few bits. Nothing here waits for the device.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from kit.train.options import Level
    from kit.train.protocol import Normalizer


def kept(values: Tensor, inside: Tensor) -> Tensor:
    """Values where they count and 0 elsewhere, in float64. Not by multiplying: NaN times 0 is NaN, forward and backward."""
    return torch.where(inside, values.double(), 0.0)


def by_row(each: Tensor, length: Tensor, level: Level) -> Tensor:
    """Each row's share in a loss, [rows]: the sum of its tokens, or their mean; 0 for a row without a valid token."""
    total = each.sum(1)
    return total if level == "tokens" else total / length[:, 0].clamp(min=1)


def over_rows(
    columns: Mapping[str, Tensor], normalizers: Mapping[str, Normalizer], *, tokens: float, sequences: float
) -> dict[str, Tensor]:
    """Sums over rows, each divided by its own normalizer; float64 scalars."""
    groups = {by: [name for name in columns if normalizers[name] == by] for by in ("tokens", "sequences", None)}
    totals = torch.stack([columns[name].double() for names in groups.values() for name in names]).sum(1)
    tokenwise, rowwise, plain = torch.split(totals, [len(names) for names in groups.values()])
    divided = (*(tokenwise / tokens).unbind(), *(rowwise / sequences).unbind(), *plain.unbind())
    return dict(zip((name for names in groups.values() for name in names), divided, strict=True))


def extremes(inside: Tensor, **values: Tensor) -> dict[str, Tensor]:
    """The least and the largest valid of each, as `..._min` and `..._max`; over nothing +inf and -inf."""
    seen = {}
    for name, each in values.items():
        for end, nothing, find in (("min", math.inf, torch.amin), ("max", -math.inf, torch.amax)):
            some = torch.where(inside, each, nothing)
            seen[f"{name}_{end}"] = find(some) if some.numel() else each.new_full((), nothing)
    return seen
