"""The job that is trained: ours, or the person's own, made from one context; and what user code is given to work on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kit.labs.offload.lab import OffloadConfig, model_config
from kit.labs.rankside import Context
from kit.megatron import groups, model, tensors


class Trainable(Protocol):
    """The interface of your own model: Megatron chunks (or plain modules), an optimizer, and steps."""

    chunks: list[Any]
    optimizer: Any

    def step(self, n: int) -> list[dict[str, float]]: ...


@dataclass(kw_only=True, slots=True)
class JobContext:
    """`ctx` for the code under test: the job to work on. `groups` describes Megatron's groups as plain JSON, `around` is what
    the code's own `around(ctx)` gave."""

    rank: int
    world_size: int
    device: torch.device
    config: OffloadConfig
    chunks: list[Any]
    optimizer: Any
    scheduler: Any
    groups: list[dict[str, Any]]
    mover: tensors.Mover
    around: Any = None


def build(ctx: Context) -> Trainable:
    return model.build(model_config(ctx.config))


def context_for(ctx: Context, job: Trainable, around: Any) -> JobContext:
    mover = getattr(job, "mover", None) or tensors.Mover(job.chunks, job.optimizer, ctx.device)
    mover.arena.open()  # now, so that its file does not count as growth after the first release, whoever moves tensors with it
    return JobContext(
        rank=ctx.rank,
        world_size=ctx.world_size,
        device=ctx.device,
        config=ctx.config,
        chunks=job.chunks,
        optimizer=job.optimizer,
        scheduler=getattr(job, "scheduler", None),
        groups=groups.snapshot().get("groups", []),
        mover=mover,
        around=around,
    )
