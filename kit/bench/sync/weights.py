"""Weights to bring: of a model's shapes, or so many tensors of one size."""

from __future__ import annotations

from typing import Any

import torch

from kit.megatron.config import GEOMETRIES
from kit.train.plain import PlainModel

MIB = 2**20
PAGE = 4096
NOISE = 8 * MIB
Tensors = dict[tuple[str, int], torch.Tensor]


def shapes_of(wanted: dict[str, Any]) -> list[tuple[int, ...]]:
    """Of a model's parameters, or so many tensors of so many bytes; bfloat16."""
    if "model" in wanted:
        return [tuple(each.shape) for each in PlainModel(GEOMETRIES[wanted["model"]], device="meta").parameters()]
    return [(wanted["each"] // 2,)] * wanted["count"]


def weights(wanted: dict[str, Any], *, filled: bool) -> Tensors:
    """Tensors with memory of their own, whose pages are there: noise, or zeros."""
    noise = torch.randint(0, 256, (NOISE + PAGE,), dtype=torch.uint8)
    made: Tensors = {}
    for number, shape in enumerate(shapes_of(wanted)):
        one = torch.empty(shape, dtype=torch.bfloat16)
        flat = one.view(-1).view(torch.uint8).zero_()
        shift = number % PAGE
        for start in range(0, flat.numel() if filled else 0, NOISE):
            part = flat[start : start + NOISE]
            part.copy_(noise[shift : shift + part.numel()])
        made[f"weight{number}", 0] = one
    return made
