"""What the rank scripts share: a census of this process, and the way a result gets out."""

import gc
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def census() -> dict[str, int]:
    """Threads, sockets and open files of this process, and groups registered with torch, once every rank has come."""
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
    """The name and text of what a call raises; empty when it raises nothing."""
    try:
        function()
    except Exception as error:  # noqa: BLE001 - what it raises is what is asked
        return f"{type(error).__name__}: {error}"
    return ""


def exercise(group: Any) -> None:
    dist.all_reduce(torch.ones(1), group=group)
