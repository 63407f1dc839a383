"""Helpers of the rank scripts: a census of this process, and how a rank returns its result."""

import gc
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def census() -> dict[str, int]:
    """Count this process's threads, sockets and open files and torch's registered groups, after a barrier with all ranks."""
    if dist.is_initialized():
        dist.barrier()
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except FileNotFoundError:  # the listing's own descriptor
            continue
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "sockets": sum(link.startswith("socket") for link in links),
        "fds": len(links),
        "groups": len(dist.distributed_c10d._world.pg_map),
    }


def collect() -> None:
    gc.collect()


def write(result: Any) -> None:
    (Path(os.environ["KIT_OUT"]) / f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))


def attempt(function: Any) -> str:
    """Return the type and text of the exception that a call raises; empty if it raises none."""
    try:
        function()
    except Exception as error:  # noqa: BLE001 - what it raises is what is asked
        return f"{type(error).__name__}: {error}"
    return ""


def exercise(group: Any) -> None:
    dist.all_reduce(torch.ones(1), group=group)
