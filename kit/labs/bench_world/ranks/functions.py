"""What ranks do for the bench of Worlds. It times starts, so these functions import what they need themselves."""

from __future__ import annotations

import os
import time

REDUCED = 3.0  # 1 from rank 0 and 2 from rank 1


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


def rank_number() -> int:
    """Nothing but this rank's number."""
    return int(os.environ["KIT_RANK"])
