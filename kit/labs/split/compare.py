"""How far two ways are apart: over the whole model, and tensor by tensor, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

EPS = torch.finfo(torch.float32).eps
ROUNDING = 64  # a gradient of fewer roundings of the model's largest one says nothing about itself

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Apart:
    """One tensor: ||a - b|| / ||b||, the element that differs most, and whether any bit differs."""

    name: str
    error: float
    index: int
    worst: float
    same: bool


def overall(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    """||a - b|| / ||b|| over all tensors. Names that are missing or not finite make it infinite."""
    if set(a) != set(b):
        return float("inf")
    apart = sum(float((a[name].double() - b[name].double()).square().sum()) for name in b)
    whole = sum(float(b[name].double().square().sum()) for name in b)
    if not (math.isfinite(apart) and math.isfinite(whole)):
        return float("inf")
    return (apart / whole) ** 0.5 if whole else (float("inf") if apart else 0.0)


def by_tensor(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> list[Apart]:
    """Every tensor. One that only one of them has is infinitely far off."""
    both = [_apart(name, a[name].double(), b[name].double()) for name in b if name in a]
    lone = [Apart(name=name, error=math.inf, index=0, worst=math.inf, same=False) for name in sorted(set(a) ^ set(b))]
    return both + lone


def certain(gradients: Tensors) -> dict[str, torch.Tensor]:
    """The elements whose gradient stands above rounding. Adam makes a whole step of the others' noise."""
    largest = max((float(value.abs().max()) for value in gradients.values()), default=0.0)
    return {name: value.abs() > ROUNDING * EPS * largest for name, value in gradients.items()}


def only(tensors: Tensors, chosen: Mapping[str, torch.Tensor], *, those: bool = True) -> Tensors:
    """The tensors with the other elements set to zero."""
    return {name: torch.where(chosen[name] == those, value, 0.0) for name, value in tensors.items()}


def _apart(name: str, a: torch.Tensor, b: torch.Tensor) -> Apart:
    difference = (a - b).abs().flatten()
    whole = float(b.norm())
    error = float(difference.norm())
    index = int(difference.argmax())
    relative = error / whole if whole else (float("inf") if error else 0.0)
    return Apart(name=name, error=relative, index=index, worst=float(difference[index]), same=bool(torch.equal(a, b)))
