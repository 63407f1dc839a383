"""ipyparallel: a controller and two engines; a step is `execute` on both, as a `%%px` cell is."""

from __future__ import annotations

import logging
import os
from importlib import import_module
from typing import Any

from kit.bench.peers.trial import free_port, run

library: Any = import_module("ipyparallel")


def reduce(rank: int, port: int) -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    value = torch.ones(1) * (rank + 1)
    dist.all_reduce(value)
    return float(value)


def wait(sleeper: int) -> None:
    import os
    import time

    import torch.distributed as dist

    if os.getpid() == sleeper:
        time.sleep(600)
    dist.barrier()


class Engines:
    def start(self) -> list[float]:
        cluster = library.Cluster(n=2, engines="local", log_level=logging.ERROR)
        self.client = cluster.start_and_connect_sync()
        self.both = self.client[:]
        port = free_port()
        sent = [self.client[engine].apply_async(reduce, rank, port) for rank, engine in enumerate(self.client.ids)]
        return [float(one.get(60)) for one in sent]

    def can_step(self) -> bool:
        return True

    def step(self) -> None:
        self.both.execute("pass", silent=True, block=True)

    def pids(self) -> list[int]:
        return list(self.both.apply_sync(os.getpid))

    def hang(self) -> None:
        self.waiting = self.both.apply_async(wait, self.pids()[1])

    def answer(self) -> None:
        self.waiting.get(60)


if __name__ == "__main__":
    run(Engines())
