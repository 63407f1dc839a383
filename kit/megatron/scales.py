"""Scales of keys and values: a persistent buffer for each in every attention layer, as engines with 8-bit caches have them.

The kit's forwards do not use them. They stand for what a version must bring besides parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from kit.megatron import shards

FLOAT8_MAX = 448.0
MADE_BY = "linear_qkv.weight"


def add_scales(chunks: Sequence[Any]) -> None:
    """Give every attention layer its scales, all of them 1."""
    for attention, _ in attention_layers(chunks):
        for name in shards.SCALES:
            attention.register_buffer(name, torch.ones(1, device=next(shards.unwrapped(chunks[0]).parameters()).device))


def calibrate(chunks: Sequence[Any]) -> None:
    """Derive the scales from the live weights, the same on all tensor ranks. Collective over these."""
    for attention, part in attention_layers(chunks):
        _, *keys_and_values = shards.views(part.how, part.param.data, part.place)
        largest = torch.stack([weights.abs().max().float() for weights in keys_and_values]) / FLOAT8_MAX
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=part.group)
        for name, value in zip(shards.SCALES, largest, strict=True):
            getattr(attention, name).fill_(value)


def scale_values(chunks: Sequence[Any]) -> dict[str, float]:
    """The scales of this rank's layers by the names under which they are sent."""
    parts = (part for chunk in chunks for part in shards.parts_of_chunk(chunk))
    return {part.full[0]: float(part.param) for part in parts if part.name.endswith(shards.SCALES)}


def attention_layers(chunks: Sequence[Any]) -> Iterator[tuple[Any, shards.ShardPart]]:
    """The attention of each layer, with the parameter that makes queries, keys and values."""
    for chunk in chunks:
        for part in list(shards.parts_of_chunk(chunk)):
            if part.name.endswith(MADE_BY):
                yield shards.unwrapped(chunk).get_submodule(part.name.removesuffix(MADE_BY) + "core_attention"), part
