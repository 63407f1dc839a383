"""Optimizer updates in float64 as an oracle: clipping by the global norm, AdamW and schedule, with separate formulas.

From the weights before the first step and the gradients that the optimizer got in each step, `replay` computes the weights afterwards and
`steps` the numbers that each result must have. No code is shared with the optimizers; only their settings are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Tensors = dict[str, torch.Tensor]


EPS = 2.0**-23  # of float32, in which gradients are


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The numbers that the result of one step must have, and the relative rounding that a float32 norm may have."""

    norm: float
    norm_rounding: float
    lr: float
    wd: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """The error of a tensor after all steps, without rounding, relative to the distance that it had to move."""

    name: str
    error: float


def learning_rate(settings: Any, seen: int) -> float:
    """The learning rate of a step after `seen` trained sequences: linear warm-up, then half a cosine down."""
    if seen < settings.warmup:
        part = seen / settings.warmup
        return float((1 - part) * settings.first_lr + part * settings.lr)
    part = min(1.0, (seen - settings.warmup) / (settings.decay - settings.warmup))
    return float(settings.last_lr + (settings.lr - settings.last_lr) * math.cos(part * math.pi / 2) ** 2)


def steps(settings: Any, gradients: Sequence[Mapping[str, torch.Tensor]], sequences: int) -> list[Step]:
    """Norm, learning rate and decay of every step. A step without gradients was skipped and does not advance the schedule."""
    made, seen = [], 0
    for found in gradients:
        squares = [torch.dot(flat, flat).item() for flat in (value.double().flatten() for value in found.values())]
        norm = math.sqrt(math.fsum(squares)) if found else math.nan
        lr = learning_rate(settings, seen)
        made.append(Step(norm=norm, norm_rounding=norm_rounding(found), lr=lr, wd=settings.weight_decay))
        seen += sequences if found else 0
    return made


def norm_rounding(tensors: Mapping[str, torch.Tensor]) -> float:
    """The relative error that rounding allows for a norm that is summed in float32, tensor by tensor, in any order.

    Each of n additions rounds by at most half an EPS, up or down. The error of the sum is about sqrt(n) of these, and that of its root
    half as much. Four times that is allowed. torch's own norm of 16384 elements uses a tenth of it, 1.5e-6.
    """
    return EPS * math.sqrt(max((value.numel() for value in tensors.values()), default=0))


def unclipped(settings: Any, found: Tensors, norm: float) -> Tensors:
    """Gradients before clipping, also if the step clips them before it calls the optimizer.

    Clipped gradients have exactly the norm that clipping leaves, while the step reports a larger one. They are multiplied in float64 by
    the factor that follows from the reported `norm`; if that is wrong, so are they. Other gradients are returned unchanged.
    """
    factor = (norm + 1e-6) / settings.clip
    if not found or not factor > 1:
        return found
    (now,) = steps(settings, [found], 0)
    if relative(now.norm, norm / factor) > now.norm_rounding + EPS:
        return found
    return {name: value.double() * factor for name, value in found.items()}


def replay(
    settings: Any, start: torch.Tensor, gradients: Sequence[torch.Tensor | None], done: Sequence[Step]
) -> torch.Tensor:
    """One tensor after all steps, in float64. Only matrices decay."""
    b1, b2 = settings.betas
    weight = start.double().clone()
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    count = 0
    for gradient, step in zip(gradients, done, strict=True):
        if gradient is None:
            continue
        count += 1
        held = gradient.double() * min(1.0, settings.clip / (step.norm + 1e-6))
        first += (held - first) * (1 - b1)
        second += (held**2 - second) * (1 - b2)
        direction = first / (1 - b1**count) / ((second / (1 - b2**count)) ** 0.5 + settings.eps)
        pulled = step.wd * weight if start.dim() > 1 else 0.0
        weight = weight - step.lr * (direction + pulled)
    return weight


def moved(
    settings: Any,
    start: Tensors,
    end: Tensors,
    gradients: Sequence[Tensors],
    done: Sequence[Step],
    *,
    eps: float,
) -> list[Moved]:
    """The error of every tensor. `eps` is the relative rounding of the dtype of the weights."""
    found = []
    for name, before in start.items():
        must = replay(settings, before, [step.get(name) if step else None for step in gradients], done)
        rounding = len(gradients) * eps * must.abs()
        beyond = ((end[name].double() - must).abs() - rounding).clamp(min=0)
        whole = float((must - before.double()).norm())
        off = float(beyond.norm())
        error = off / whole if whole else (math.inf if off else 0.0)
        found.append(Moved(name=name, error=error if math.isfinite(error) else math.inf))
    return found


def relative(value: float, exact: float) -> float:
    """|value - exact| / |exact|; infinite if that is not a number."""
    error = abs(value - exact) / abs(exact) if exact else float(value != exact)
    return error if math.isfinite(error) else math.inf
