"""What the ranks do for a machine's Pace."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from kit.megatron import groups, model
from kit.megatron.config import ModelConfig

STEPS, GROUPS = 5, 10
BYTES = 2**28


def primitives() -> dict[str, float]:
    """Seconds of the job, of a step, of a group and of 2**30 bytes out and back; ranks meet before each."""
    start = met()
    job = model.build(ModelConfig(tp=2))
    job.step(1)
    built = met()
    job.step(STEPS)
    trained = met()
    everyone = list(range(dist.get_world_size()))
    for _ in range(GROUPS):
        group = dist.new_group(everyone)
        dist.all_reduce(torch.ones(1, device=job.device), group=group)
        dist.destroy_process_group(group)
    grouped = met()
    copied = copy(str(job.device))
    job.mover.close()
    groups.destroy()
    return {
        "job_s": built - start,
        "step_s": (trained - built) / STEPS,
        "group_s": (grouped - trained) / GROUPS,
        "copy_s": copied,
    }


def copy(device: str = "cpu") -> float:
    """Seconds of 2**30 bytes out to host memory and back, taken of fewer."""
    there = torch.ones(BYTES, dtype=torch.uint8, device=device)
    out = torch.ones(BYTES, dtype=torch.uint8)
    start = met()
    out.copy_(there)
    there.copy_(out)
    return (met() - start) * 2**30 / BYTES


def met() -> float:
    """Now, when every rank and the device are through."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter()
