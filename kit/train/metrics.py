"""Metrics of microbatches made into those of a step: sums over microbatches and data ranks, each by its own normalizer.

Names decide what is done: `..._min` and `..._max` are extremes, and where nothing was seen (all infinite) they are -1.0;
`lr`, `wd`, `reward` and `global_valid_...` are means; everything else is a sum.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kit.train.protocol import Normalizer

MEANS = ("lr", "wd", "reward")
NOTHING = -1.0  # what an extreme over nothing is


def kind(name: str) -> str:
    if name.endswith("_min"):
        return "min"
    if name.endswith("_max"):
        return "max"
    return "mean" if name in MEANS or name.startswith("global_valid_") else "sum"


def of_microbatches(seen: Iterable[Mapping[str, torch.Tensor]], names: Iterable[str]) -> dict[str, float]:
    """This rank's metrics: float64 over its microbatches. A name that no microbatch gave is what its kind gives over nothing."""
    table = list(seen)
    return {name: _over([float(row[name]) for row in table if name in row], kind(name)) for name in names}


def over_ranks(local: Mapping[str, float], group: dist.ProcessGroup | None, device: torch.device) -> dict[str, float]:
    """The same over the ranks of a group of data ranks; one replica of tensor and pipeline ranks is in it, so none counts twice."""
    names = sorted(local)
    done: dict[str, float] = {}
    for how, op in (
        ("sum", dist.ReduceOp.SUM),
        ("mean", dist.ReduceOp.SUM),
        ("min", dist.ReduceOp.MIN),
        ("max", dist.ReduceOp.MAX),
    ):
        chosen = [name for name in names if kind(name) == how]
        if not chosen:
            continue
        values = torch.tensor([local[name] for name in chosen], dtype=torch.float64, device=device)
        dist.all_reduce(values, op=op, group=group)
        if how == "mean":
            values /= dist.get_world_size(group)
        done |= dict(zip(chosen, values.tolist(), strict=True))
    return done


def normalised(
    raw: Mapping[str, float], normalizers: Mapping[str, Normalizer], *, tokens: float, sequences: float
) -> dict[str, float]:
    """Sums divided by the true counts, each by its own; extremes over nothing become -1.0."""
    by = {"tokens": tokens, "sequences": sequences, None: 1.0}
    done = {}
    for name, value in raw.items():
        if kind(name) in {"min", "max"}:
            done[name] = NOTHING if math.isinf(value) else value
        else:
            done[name] = value / by[normalizers.get(name)]
    return done


def _over(values: list[float], how: str) -> float:
    if how in {"min", "max"} and any(map(math.isnan, values)):
        return math.nan  # Python's own min and max would depend on the order
    if how == "min":
        return min(values, default=math.inf)
    if how == "max":
        return max(values, default=-math.inf)
    total = _sum(values)
    return total / len(values) if how == "mean" and values else total


def _sum(values: list[float]) -> float:
    """Exact; where infinities or an overflow are in the way, as plain addition has it. An error on one rank would stop the others."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return sum(values)
