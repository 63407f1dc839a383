"""What ranks do for `kit bench world`, and for a machine's Pace. torch and Megatron are loaded by what needs them."""

from __future__ import annotations

import os
import time

REDUCED = 3.0  # 1 from rank 0 and 2 from rank 1
STEPS, GROUPS = 5, 10
BYTES = 2**28


def first_all_reduce() -> float:
    import torch
    import torch.distributed as dist

    value = torch.ones(1) * (dist.get_rank() + 1)
    dist.all_reduce(value)
    return float(value)


def wait_for_rank_1() -> None:
    """Everybody waits in a collective for rank 1, which sleeps; rank 0 says when it goes in."""
    import torch.distributed as dist

    if dist.get_rank() == 1:
        time.sleep(600)
    print("waiting", flush=True)
    dist.barrier()


def meter_cost(*, n: int, seconds: float) -> list[float]:
    """Seconds that measuring adds to each of n phases of that length, taken with a clock around the meter."""
    from kit.measure import PhaseMeter

    costs = []
    for _ in range(n):
        began = time.perf_counter()
        with PhaseMeter() as meter:
            time.sleep(seconds)
        whole = time.perf_counter() - began
        costs.append(whole - next(metric.value for metric in meter.metrics if metric.metric == "seconds"))
    return costs


def number() -> int:
    """Nothing but this rank's number."""
    return int(os.environ["KIT_RANK"])


def primitives() -> dict[str, float]:
    """Seconds of the job, of a step, of a group and of 2**30 bytes out and back; ranks meet before each."""
    import torch
    import torch.distributed as dist

    from kit.megatron import groups, model
    from kit.megatron.config import ModelConfig

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
    import torch

    there = torch.ones(BYTES, dtype=torch.uint8, device=device)
    out = torch.ones(BYTES, dtype=torch.uint8)
    start = met()
    out.copy_(there)
    there.copy_(out)
    return (met() - start) * 2**30 / BYTES


def met() -> float:
    """Now, when every rank and the device are through."""
    import torch.distributed as dist

    from kit.measure.phase import current_device, synchronize

    synchronize(current_device())
    dist.barrier()
    return time.perf_counter()
