"""Monarch: two processes with an actor each; a step is an endpoint called on both."""

from __future__ import annotations

import os
import time
from typing import Any

import monarch.actor  # type: ignore[import-not-found, unused-ignore]
from monarch.actor import Actor, current_rank, endpoint, this_host  # type: ignore[import-not-found, unused-ignore]

from kit.bench.peers.trial import free_port, run


class Ranks(Actor):  # type: ignore[misc, unused-ignore]
    @endpoint  # type: ignore[untyped-decorator, unused-ignore]
    def reduce(self, port: int) -> float:
        import torch
        import torch.distributed as dist

        rank = current_rank().rank
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        value = torch.ones(1) * (rank + 1)
        dist.all_reduce(value)
        return float(value)

    @endpoint  # type: ignore[untyped-decorator, unused-ignore]
    def nothing(self) -> None: ...

    @endpoint  # type: ignore[untyped-decorator, unused-ignore]
    def pid(self) -> int:
        return os.getpid()

    @endpoint  # type: ignore[untyped-decorator, unused-ignore]
    def wait(self) -> None:
        import torch.distributed as dist

        if current_rank().rank == 1:
            time.sleep(600)
        dist.barrier()


class Mesh:
    def start(self) -> list[float]:
        # By default a death that nobody handled ends this process too, before it can tell the time.
        monarch.actor.unhandled_fault_hook = lambda _: None
        self.ranks = this_host().spawn_procs({"gpus": 2}).spawn("ranks", Ranks)
        return [float(one) for one in values(self.ranks.reduce.call(free_port()).get())]

    def can_step(self) -> bool:
        return True

    def step(self) -> None:
        self.ranks.nothing.call().get()

    def pids(self) -> list[int]:
        return [int(one) for one in values(self.ranks.pid.call().get())]

    def hang(self) -> None:
        self.waiting = self.ranks.wait.call()

    def answer(self) -> None:
        self.waiting.get(timeout=60)


def values(mesh: Any) -> list[Any]:
    return [value for _, value in mesh.items()]


if __name__ == "__main__":
    run(Mesh())
