"""What ranks do for the probes: standard library, torch and Megatron only. They measure and return plain numbers; `probes` judges.

Here: what all of them share, a rank's device, and the times of collectives and groups.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from kit import nccl
from kit.measure.phase import current_device, synchronize, timed

WATCHED = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NCCL_HOSTID",
    "NCCL_MULTI_RANK_GPU_ENABLE",
    "NCCL_RAS_ENABLE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
)


def device() -> torch.device:
    """The rank's own; a World on the host hides the GPUs from its ranks."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def finish() -> None:
    """Until the GPU has done all that it was given."""
    synchronize(current_device())


def meet() -> None:
    """All ranks are here; over the host, so that nothing happens on the GPU."""
    dist.all_reduce(torch.zeros(1))


def place() -> dict[str, Any]:
    """This rank's seat, and that a kernel runs there."""
    here = device()
    seat: dict[str, Any] = {
        "device": str(here),
        "torch": torch.__version__,
        "nccl": nccl.written(nccl.running()),
        "env": {name: os.environ[name] for name in WATCHED if name in os.environ},
        "poisoned": bool(torch.cuda._is_in_bad_fork()),
    }
    if here.type == "cuda":
        about = torch.cuda.get_device_properties(here)
        seat |= {"name": about.name, "capability": list(torch.cuda.get_device_capability(here))}
        seat["built_for"] = torch.cuda.get_arch_list()
    numbers = torch.arange(1000, device=here, dtype=torch.float64)
    seat["sum"] = float((numbers * 2).sum().item())
    return seat


def ready_at_once() -> bool | None:
    """Whether WORLD has its communicator before the first collective; None on the host."""
    if device().type == "cpu":
        return None
    world: Any = dist.distributed_c10d._get_default_group()
    ask = getattr(world._get_backend(device()), "_is_initialized", None)
    return None if ask is None else bool(ask())


def all_reduces(*, n: int) -> dict[str, Any]:
    """Seconds of one small all-reduce of many, on the rank's device and on the host, and whether the sums are right."""
    measured: dict[str, Any] = {}
    for name, where in {"device": device(), "host": torch.device("cpu")}.items():
        first = sums(where)
        meet()
        value = torch.ones(1, device=where)
        seconds = timed(lambda value=value: [dist.all_reduce(value) for _ in range(n)])  # type: ignore[misc]
        measured[name] = {"seconds": seconds / n, "right": first and sums(where)}
    return measured


def sums(where: torch.device, group: Any = None) -> bool:
    """An all-reduce with values that depend on the rank, against the exact sum."""
    size, rank = dist.get_world_size(), dist.get_rank()
    value = torch.tensor([(rank + 1) ** 2, rank], dtype=torch.float64, device=where)
    dist.all_reduce(value, group=group)
    return value.tolist() == [sum((r + 1) ** 2 for r in range(size)), sum(range(size))]


def make_groups(*, backend: str, n: int) -> dict[str, Any]:
    """Groups of all ranks made, used once and destroyed: seconds of each for one, and whether every sum is right."""
    where = device() if backend == "nccl" else torch.device("cpu")
    everyone = list(range(dist.get_world_size()))
    made: list[Any] = []
    right: list[bool] = []
    meet()
    make = timed(lambda: made.extend(dist.new_group(everyone, backend=backend) for _ in range(n)))
    use = timed(lambda: right.extend(sums(where, group) for group in made))
    meet()
    destroy = timed(lambda: [dist.destroy_process_group(group) for group in made])
    made.clear()
    return {"make": make / n, "use": use / n, "destroy": destroy / n, "right": all(right)}
