"""A peer that does not come: what the one that waits for it can still do."""

from __future__ import annotations

import datetime as dt
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from kit.preflight.onranks.talk import device, finish, meet, sums

_group: Any = None


def come_late(*, rank: int, seconds: float) -> None:
    """An all-reduce for which one rank comes late."""
    if dist.get_rank() == rank:
        time.sleep(seconds)
    value = torch.ones(1, device=device())
    dist.all_reduce(value)
    finish()


def prepare(*, deadline_s: float) -> bool:
    """A group of both ranks that works, with a deadline."""
    global _group  # noqa: PLW0603 - kept between two calls
    _group = dist.new_group(
        list(range(dist.get_world_size())),
        backend="nccl" if device().type == "cuda" else "gloo",
        timeout=dt.timedelta(seconds=deadline_s),
    )
    right = sums(device(), _group)
    finish()
    meet()
    return right


def wait_in_vain(*, deadline_s: float) -> dict[str, Any]:
    """Both ranks wait, each for the other: rank 0 in a collective of a group that works, the other one where a group begins."""
    act = collective if dist.get_rank() == 0 else join
    start = time.perf_counter()
    words = ""
    try:
        act(deadline_s)
    except Exception as error:  # noqa: BLE001 - how it ends is what is asked
        words = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
    return {"way": act.__name__, "seconds": time.perf_counter() - start, "error": words}


def collective(deadline_s: float) -> None:
    value = torch.ones(1, device=device())
    work = dist.all_reduce(value, group=_group, async_op=True)
    # gloo keeps the group's own deadline
    work.wait(dt.timedelta(seconds=deadline_s)) if value.is_cuda else work.wait()


def join(deadline_s: float) -> None:
    """As the second of two, where the first, which has to hand out the communicator's id (NCCL) or its address (gloo), is absent."""
    wait = dt.timedelta(seconds=deadline_s)
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*where, is_master=False, wait_for_workers=False, timeout=wait)
    made: Any = dist.ProcessGroupNCCL if device().type == "cuda" else dist.ProcessGroupGloo
    group = made(PrefixStore("kit-preflight-absent", store), 1, 2, wait)
    try:
        group.allreduce([torch.ones(1, device=device())]).wait()
    finally:
        if device().type == "cuda":
            group.abort()


def survive() -> dict[str, Any]:
    """Give the group up, as after a failure, and use WORLD again."""
    global _group
    group, _group = _group, None
    start = time.perf_counter()
    if device().type == "cuda":
        group.abort()
    dist.destroy_process_group(group)
    given_up = time.perf_counter() - start
    return {"give_up": given_up, "host": sums(torch.device("cpu")), "device": sums(device())}
