"""What the losses share: masked values, sums by row and over rows, extremes.

Tokens are summed within their row in the type they have, rows in float64: however rows are dealt out over microbatches and
ranks, a metric is the same to the last few bits of float64. Nothing here waits for the device.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch

from kit.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from kit.train.protocol import Normalizer

Level = Literal["tokens", "sequences"]
LEVELS = ("tokens", "sequences")


def known(name: str, word: object, words: tuple[str, ...]) -> None:
    if word not in words:
        raise BadInput(f"{name}={word!r} is unknown: choose one of {', '.join(words)}")


def kept(values: Tensor, inside: Tensor) -> Tensor:
    """Values where they count and 0 elsewhere. Not by multiplying: NaN times 0 is NaN, forward and backward."""
    return torch.where(inside, values, 0.0)


def by_row(each: Tensor, length: Tensor, level: Level) -> Tensor:
    """Each row's share in a loss, [rows]: the sum of its tokens, or their mean; 0 for a row without a valid token."""
    total = each.sum(1)
    return total if level == "tokens" else total / length[:, 0].clamp(min=1)


def over_rows(
    columns: Mapping[str, Tensor], normalizers: Mapping[str, Normalizer], *, tokens: float, sequences: float
) -> dict[str, Tensor]:
    """Sums over rows, each divided by its own normalizer; float64 scalars."""
    groups = {by: [name for name in columns if normalizers[name] == by] for by in ("tokens", "sequences", None)}
    totals = torch.stack([columns[name] for names in groups.values() for name in names]).double().sum(1)
    tokenwise, rowwise, plain = torch.split(totals, [len(names) for names in groups.values()])
    divided = (*(tokenwise / tokens).unbind(), *(rowwise / sequences).unbind(), *plain.unbind())
    return dict(zip((name for names in groups.values() for name in names), divided, strict=True))


def extremes(mask: Tensor, **values: Tensor) -> dict[str, Tensor]:
    """The least and the largest valid of each, as `..._min` and `..._max`; over nothing +inf and -inf."""
    if not mask.numel():
        nothing = {"min": math.inf, "max": -math.inf}
        return {f"{name}_{end}": mask.new_full((), value) for name in values for end, value in nothing.items()}
    away = mask.reciprocal().sub_(1)  # 0 for a valid place, infinite elsewhere
    seen = {}
    for name, each in values.items():
        seen[f"{name}_min"] = (each + away).amin()
        seen[f"{name}_max"] = (each - away).amax()
    return seen
