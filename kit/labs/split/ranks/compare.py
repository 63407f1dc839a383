"""The distance between the tensors of two steps, over the whole model and per tensor, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

EPS = torch.finfo(torch.float32).eps
ROUNDING = 64  # a gradient below this many roundings of the model's largest gradient is noise

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Distance:
    """One tensor: ||a - b|| / ||b||, the element that differs most, and whether all bits are the same."""

    name: str
    error: float
    index: int
    worst: float
    same: bool


def overall(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    """||a - b|| / ||b|| over all tensors; infinite if a tensor is missing or not finite."""
    if set(a) != set(b):
        return float("inf")
    apart = sum(float((a[name].double() - b[name].double()).square().sum()) for name in b)
    whole = sum(float(b[name].double().square().sum()) for name in b)
    if not (math.isfinite(apart) and math.isfinite(whole)):
        return float("inf")
    return (apart / whole) ** 0.5 if whole else (float("inf") if apart else 0.0)


def by_tensor(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> list[Distance]:
    """Every tensor; the error of one that `a` or `b` lacks is infinite."""
    both = [_distance(name, a[name].double(), b[name].double()) for name in b if name in a]
    lone = [
        Distance(name=name, error=math.inf, index=0, worst=math.inf, same=False) for name in sorted(set(a) ^ set(b))
    ]
    return both + lone


def certain(gradients: Tensors) -> dict[str, torch.Tensor]:
    """The elements whose gradient is above rounding. Adam turns the noise of the others into whole steps."""
    largest = max((float(value.abs().max()) for value in gradients.values()), default=0.0)
    return {name: value.abs() > ROUNDING * EPS * largest for name, value in gradients.items()}


def only(tensors: Tensors, chosen: Mapping[str, torch.Tensor], *, those: bool = True) -> Tensors:
    """The tensors with the other elements set to zero."""
    return {name: torch.where(chosen[name] == those, value, 0.0) for name, value in tensors.items()}


def _distance(name: str, a: torch.Tensor, b: torch.Tensor) -> Distance:
    difference = (a - b).abs().flatten()
    whole = float(b.norm())
    error = float(difference.norm())
    index = int(difference.argmax())
    relative = error / whole if whole else (float("inf") if error else 0.0)
    return Distance(
        name=name, error=relative, index=index, worst=float(difference[index]), same=bool(torch.equal(a, b))
    )
