"""Leave the distributed state as it was found, with own and with the caller's groups, on success and on failure."""

import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from common import attempt, census, collect, exercise, write

from kit.megatron import groups, model, ownership
from kit.megatron.config import ModelConfig

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TP2 = ModelConfig(tp=2)


class Collected(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def start(name: str) -> None:
    """Make a default group over its own store, because group names repeat and a store must not be reused."""
    store = dist.FileStore(str(Path(os.environ["KIT_OUT"]) / f"store-{name}"), SIZE)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=SIZE)


def work(*, fail: bool, release: bool = False) -> None:
    job = model.build(TP2)
    job.step()
    job.mover.close()
    if release:
        groups.destroy()
    if fail:
        raise ZeroDivisionError("the reason")


def around(*, initialise: str | None, fail: bool) -> dict[str, Any]:
    before, counted = ownership.describe_state(), census()

    def inside() -> None:
        with ownership.as_found(timeout_s=30):
            if initialise:
                start(initialise)
            work(fail=fail)

    error = attempt(inside)
    collect()
    after, left = ownership.describe_state(), census()
    return {
        "error": error,
        "same": before == after,
        "difference": {k: (before[k], after[k]) for k in before if before[k] != after[k]},
        "census": [counted, left],
        "named": c10d._world.group_count,  # how many names of groups were given out
    }


def callers_job() -> dict[str, Any]:
    """The caller owns a job; inside `as_found` its groups are released and not reloaded."""
    job = model.build(TP2)
    first = job.step(1)
    before = ownership.describe_state()
    with ownership.as_found(timeout_s=30):
        stats = groups.destroy()
        torch.manual_seed(99)
    same = ownership.describe_state() == before
    steps = job.step(1)
    job.mover.close()
    groups.destroy()
    return {"same": same, "destroyed": stats["destroyed"], "steps": len(first + steps)}


handler = Collected()
logging.getLogger("kit.megatron.ownership").addHandler(handler)
results = {
    "own-success": around(initialise="a", fail=False),
    "own-failure": around(initialise="b", fail=True),
}
start("caller")
mine, world = dist.new_group([0, 1]), dist.group.WORLD
results |= {"caller-success": around(initialise=None, fail=False), "caller-failure": around(initialise=None, fail=True)}
results["world_is_the_callers"] = dist.group.WORLD is world
results["usable"] = [attempt(lambda: exercise(None)), attempt(lambda: exercise(mine))]
results["job"] = callers_job()
results["log"] = handler.lines
write(results)
