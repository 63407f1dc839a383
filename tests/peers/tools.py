"""The tools that `make peers` compares, and one trial of a tool: `python -m tests.peers.tools NAME ARGUMENTS`.

A trial is a fresh process, so it can neither crash the measurement nor be slowed by leftovers. It prints a line when the first all-reduce
and the steps are done. Then it waits to be killed (`hold`), or kills rank 1 and prints a second line. Imports are not timed.

A tool holds two ranks with a library, which is loaded when the tool is made:
    needs      the library's distribution
    is_a_step  what counts as a step; empty if the library does not keep ranks between steps
    start()    starts the ranks; returns the results of an all-reduce of 1 and 2
    step()     an empty step on both ranks
    pids()     of both ranks
    hang()     returns at once; rank 1 sleeps, rank 0 waits for it in a collective
    answer()   waits for the answer to `hang`, as a user's cell would; raises what the library raises
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

PREFIX = "kit-peer "
REDUCED = [3.0, 3.0]  # 1 from rank 0 and 2 from rank 1, on both
SETTLE_S = 0.5  # delay before the kill, so that rank 0 is inside the collective
WORDS = 300


# -- on the ranks ----------------------------------------------------------------------------------------------------------


def join_and_reduce(rank: int, port: int) -> float:
    """A library sends this function to a rank without this module, so it imports what it needs itself."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    value = torch.ones(1) * (rank + 1)
    dist.all_reduce(value)
    return float(value)


def reduce_in_world() -> float:
    import torch
    import torch.distributed as dist

    value = torch.ones(1) * (dist.get_rank() + 1)
    dist.all_reduce(value)
    return float(value)


def wait_for_rank_1() -> None:
    import time

    import torch.distributed as dist

    if dist.get_rank() == 1:
        time.sleep(600)
    dist.barrier()


# -- the tools -------------------------------------------------------------------------------------------------------------


class Kit:
    """A World of two ranks; a step is `World.run`, as a `%%ranks` cell is."""

    needs, is_a_step = "lifecycle-kit", "World.run('pass')"

    def __init__(self) -> None:
        self.library: Any = import_module("kit.world")

    def start(self) -> list[float]:
        self.world = self.library.World(2, device="cpu", logs="logs")
        return list(self.world.call("tests.peers.tools:reduce_in_world"))

    def step(self) -> None:
        self.world.run("pass")

    def pids(self) -> list[int]:
        return list(self.world.pids)

    def hang(self) -> None:
        self.waiting = self.world.submit("tests.peers.tools:wait_for_rank_1")

    def answer(self) -> None:
        self.waiting.result(timeout_s=60)


class IPyParallel:
    """A controller and two engines; a step is `execute` on both, as a `%%px` cell is."""

    needs, is_a_step = "ipyparallel", "DirectView.execute('pass')"

    def __init__(self) -> None:
        self.library: Any = import_module("ipyparallel")

    def start(self) -> list[float]:
        cluster = self.library.Cluster(n=2, engines="local", log_level=logging.ERROR)
        self.client = cluster.start_and_connect_sync()
        self.view = self.client[:]
        port = free_port()
        sent = [
            self.client[engine].apply_async(join_and_reduce, rank, port) for rank, engine in enumerate(self.client.ids)
        ]
        return [float(answer.get(60)) for answer in sent]

    def step(self) -> None:
        self.view.execute("pass", silent=True, block=True)

    def pids(self) -> list[int]:
        return list(self.view.apply_sync(os.getpid))

    def hang(self) -> None:
        self.waiting = self.view.apply_async(wait_for_rank_1)

    def answer(self) -> None:
        self.waiting.get(60)


class Monarch:
    """Two processes with an actor each; a step is an endpoint called on both."""

    needs, is_a_step = "torchmonarch", "an empty endpoint called on both actors"

    def __init__(self) -> None:
        library: Any = import_module("monarch.actor")
        # By default an unhandled death ends this process too, before it can report the time.
        library.unhandled_fault_hook = lambda _: None

        class Ranks(library.Actor):
            @library.endpoint
            def reduce(self, port: int) -> float:
                return join_and_reduce(library.current_rank().rank, port)

            @library.endpoint
            def nothing(self) -> None: ...

            @library.endpoint
            def pid(self) -> int:
                return os.getpid()

            @library.endpoint
            def wait(self) -> None:
                wait_for_rank_1()

        self.library, self.actors = library, Ranks

    def start(self) -> list[float]:
        self.ranks = self.library.this_host().spawn_procs({"gpus": 2}).spawn("ranks", self.actors)
        return [float(value) for _, value in self.ranks.reduce.call(free_port()).get().items()]

    def step(self) -> None:
        self.ranks.nothing.call().get()

    def pids(self) -> list[int]:
        return [int(value) for _, value in self.ranks.pid.call().get().items()]

    def hang(self) -> None:
        self.waiting = self.ranks.wait.call()

    def answer(self) -> None:
        self.waiting.get(timeout=60)


class NBDistributed:
    """The two managers behind its `%dist_init`; a step is a cell's message to all."""

    needs = "nbdistributed"
    is_a_step = "its manager sends 'pass' to all; its cells poll for the answer and take longer"
    REDUCE = "value = torch.ones(1) * (rank + 1)\ndist.all_reduce(value)\nvalue.item()"
    HANG = "import time\nif rank == 1: time.sleep(600)\ndist.barrier()"
    TRIES, TRY_S = 240, 0.25

    def __init__(self) -> None:
        self.processes: Any = import_module("nbdistributed.process_manager")
        self.communication: Any = import_module("nbdistributed.communication")

    def start(self) -> list[float]:
        self.manager = self.processes.ProcessManager()
        self.link = self.communication.CommunicationManager(2, self.manager.start_workers(2))
        self.connect()
        return [float(answer["output"]) for _, answer in sorted(self.link.send_to_all("execute", self.REDUCE).items())]

    def connect(self) -> None:
        """Messages to a worker that has not connected yet are lost, so repeat until both answer."""
        for _ in range(self.TRIES):
            with contextlib.suppress(TimeoutError):
                self.link.send_to_all("get_status", {}, timeout=self.TRY_S)
                return
        raise TimeoutError("the workers did not connect")

    def step(self) -> None:
        self.link.send_to_all("execute", "pass")

    def pids(self) -> list[int]:
        return [process.pid for process in self.manager.processes]

    def hang(self) -> None:
        self.waiting = ThreadPoolExecutor(1).submit(self.link.send_to_all, "execute", self.HANG)

    def answer(self) -> None:
        self.waiting.result()


class Torchrun:
    """Plain torchrun, as a notebook starts a script with it; its exit reports a death."""

    needs, is_a_step = "torch", ""

    SCRIPT = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
value = torch.ones(1) * (rank + 1)
dist.all_reduce(value)
os.write(1, f"{rank} {os.getpid()} {value.item()}\\n".encode())
if rank == 1:
    time.sleep(600)
dist.barrier()
"""

    def start(self) -> list[float]:
        script = Path("script.py")  # in the trial's folder
        script.write_text(self.SCRIPT)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.states = sorted(self.process.stdout.readline().split() for _ in range(2))
        return [float(value) for _, _, value in self.states]

    def pids(self) -> list[int]:
        return [int(pid) for _, pid, _ in self.states]

    def hang(self) -> None:
        """The script does so after its all-reduce."""

    def answer(self) -> None:
        _, errors = self.process.communicate()
        raise subprocess.SubprocessError(f"status {self.process.returncode}: {errors[errors.find('Root Cause') :]}")


TOOLS: dict[str, Any] = {
    "kit": Kit,
    "ipyparallel": IPyParallel,
    "monarch": Monarch,
    "nbdistributed": NBDistributed,
    "torchrun": Torchrun,
}


# -- one trial -------------------------------------------------------------------------------------------------------------


def run_trial(tool: Any, *, steps: int, hold: bool) -> None:
    began = time.perf_counter()
    values = tool.start()
    started = time.perf_counter() - began
    if values != REDUCED:
        raise RuntimeError(f"the all-reduce gave {values}")
    taken = [seconds_of_step(tool) for _ in range(steps)] if tool.is_a_step else []
    victim = tool.pids()[1]
    report(start=started, steps=taken)
    if hold:
        sys.stdin.read()
    tool.hang()
    time.sleep(SETTLE_S)
    began = time.perf_counter()
    os.kill(victim, signal.SIGKILL)
    try:
        tool.answer()
    except BaseException as error:  # noqa: BLE001 - any exception is the answer
        took = time.perf_counter() - began
        report(death=took, words=f"{type(error).__name__}: {' '.join(str(error).split())}"[:WORDS])
    os._exit(0)  # skip the library's exit code; the measurement ends leftovers


def seconds_of_step(tool: Any) -> float:
    began = time.perf_counter()
    tool.step()
    return time.perf_counter() - began


def report(**values: Any) -> None:
    print(f"\n{PREFIX}{json.dumps(values)}", flush=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    run_trial(TOOLS[sys.argv[1]](), **json.loads(sys.argv[2]))
