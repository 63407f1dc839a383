"""nbdistributed: the two managers behind its `%dist_init`; a step is what a cell sends to all."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

from kit.bench.peers.trial import run

processes: Any = import_module("nbdistributed.process_manager")
communication: Any = import_module("nbdistributed.communication")

REDUCE = "value = torch.ones(1) * (rank + 1)\ndist.all_reduce(value)\nvalue.item()"
HANG = "import time\nif rank == 1: time.sleep(600)\ndist.barrier()"
TRIES = 240
TRY_S = 0.25


class Workers:
    def start(self) -> list[float]:
        self.manager = processes.ProcessManager()
        port = self.manager.start_workers(2)
        self.link = communication.CommunicationManager(2, port)
        self.connect()
        return [float(answer["output"]) for _, answer in sorted(self.link.send_to_all("execute", REDUCE).items())]

    def connect(self) -> None:
        """What is sent to a worker that has not connected yet is lost: ask until both answer."""
        for _ in range(TRIES):
            with contextlib.suppress(TimeoutError):
                self.link.send_to_all("get_status", {}, timeout=TRY_S)
                return
        raise TimeoutError("the workers did not connect")

    def can_step(self) -> bool:
        return True

    def step(self) -> None:
        self.link.send_to_all("execute", "pass")

    def pids(self) -> list[int]:
        return [process.pid for process in self.manager.processes]

    def hang(self) -> None:
        self.waiting = ThreadPoolExecutor(1).submit(self.link.send_to_all, "execute", HANG)

    def answer(self) -> None:
        self.waiting.result()


if __name__ == "__main__":
    run(Workers())
