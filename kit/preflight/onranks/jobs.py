"""Tiny training jobs: two steps twice, to the same bits; experts; a communicator that is suspended and resumed."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.distributed as dist

from kit import nccl
from kit.measure.phase import timed
from kit.preflight.onranks import device, finish, meet, sums
from kit.preflight.onranks.memory import first_line, held


def twice(*, layout: dict[str, Any], dtypes: list[str]) -> dict[str, Any]:
    """Per number type two jobs of this layout on the same groups, two steps each; seconds of the groups, of a job and of a step."""
    from kit.megatron import groups, model
    from kit.megatron.config import ModelConfig

    start = time.perf_counter()
    model.initialise(ModelConfig(layers=2, **layout))
    finish()
    measured: dict[str, Any] = {"layout": time.perf_counter() - start}
    for dtype in dtypes:
        turns = [one(ModelConfig(layers=2, dtype=dtype, **layout)) for _ in range(2)]
        first, second = (turn.pop("bits") for turn in turns)
        apart = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
        measured[dtype] = {**turns[1], "tensors": len(first), "apart": apart[:3]}
    groups.destroy("exact", timeout_s=10.0)
    return measured


def one(config: Any) -> dict[str, Any]:
    """A job of two steps: its losses, gradient norms and tensors as bits, and the second step's seconds."""
    from kit.megatron import model

    start = time.perf_counter()
    job = model.assemble(config, device())
    finish()
    built = time.perf_counter() - start
    steps = job.step(1)
    second = timed(lambda: steps.extend(job.step(1)))
    numbers = {f"step {i} {name}": float(value).hex() for i, step in enumerate(steps) for name, value in step.items()}
    bits = {**numbers, **job.hashes()}
    finite = all(math.isfinite(value) for step in steps for value in step.values())
    job.mover.close()
    return {"bits": bits, "job": built, "step": second, "finite": finite, "loss": steps[-1]["loss"]}


def experts() -> dict[str, Any]:
    """One step of a job with four experts over two ranks."""
    from kit.megatron import groups, model
    from kit.megatron.config import ModelConfig

    job = model.build(ModelConfig(layers=2, experts=4, ep=2))
    (step,) = job.step(1)
    job.mover.close()
    groups.destroy("exact", timeout_s=10.0)
    return {"loss": step["loss"], "finite": math.isfinite(step["loss"]) and math.isfinite(step["grad_norm"])}


def suspended() -> dict[str, Any]:
    """One communicator asleep and awake again; why not, where it cannot be."""
    if device().type == "cpu":
        return {"refused": "it needs a GPU, and these ranks work on the host"}
    if why := nccl.no_suspend(nccl.running(), torch.__version__):
        return {"refused": why}
    group: Any = dist.new_group(list(range(dist.get_world_size())), backend="nccl")
    before = sums(device(), group)
    backend = group._get_backend(device())
    try:
        seen: dict[str, Any] = {"stats": [dict(backend.memory_stats())]}
    except (AttributeError, RuntimeError) as error:  # a torch built for an older NCCL, or NCCL's memory manager is off
        return {"refused": f"NCCL's memory statistics: {first_line(error)}"}
    meet()
    levels = [held()]
    meet()
    start = time.perf_counter()
    try:
        backend.suspend()
    except RuntimeError as error:
        return {**seen, "error": first_line(error)}
    finish()
    seen["suspend"] = time.perf_counter() - start
    meet()
    levels.append(held())
    seen["stats"].append(dict(backend.memory_stats()))
    meet()
    start = time.perf_counter()
    backend.resume()
    finish()
    seen["resume"] = time.perf_counter() - start
    seen["right"] = before and sums(device(), group)
    seen["freed"] = levels[0] - levels[1]
    dist.destroy_process_group(group)
    return seen
