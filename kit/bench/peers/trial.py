"""What every peer is asked, in a process of its own: `python -m kit.bench.peers.trial NAME ARGUMENTS`; and each peer in its own words.

Tells a line when the first all-reduce and the steps are done, then is killed (hold), or kills rank 1 and tells a second line.
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

from kit.bench.peers import PREFIX
from kit.bench.rows import seconds_of

REDUCED = 3.0
SETTLE_S = 0.5  # from sending the work to the kill: by then rank 0 is inside the collective
WORDS = 300


def run(peer: Peer, *, steps: int, hold: bool) -> None:
    began = time.perf_counter()
    values = peer.start()
    started = time.perf_counter() - began
    if values != [REDUCED] * 2:
        raise RuntimeError(f"the all-reduce came to {values}")
    taken = [seconds_of(peer.step) for _ in range(steps)] if hasattr(peer, "step") else []
    victim = peer.pids()[1]
    tell({"start": started, "steps": taken})
    if hold:
        sys.stdin.read()
    peer.hang()
    time.sleep(SETTLE_S)
    began = time.perf_counter()
    os.kill(victim, signal.SIGKILL)
    try:
        peer.answer()
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the answer
        told = time.perf_counter() - began
        tell({"told": told, "words": f"{type(error).__name__}: {' '.join(str(error).split())}"[:WORDS]})
    os._exit(0)  # what the library does at exit is not asked; the bench ends what is left


def tell(what: dict[str, Any]) -> None:
    print(f"\n{PREFIX}{json.dumps(what)}", flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def reduce(rank: int, port: int) -> float:
    """On a rank, to which a library sends it without this module."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    value = torch.ones(1) * (rank + 1)
    dist.all_reduce(value)
    return float(value)


def wait_for_rank_1() -> None:
    """On a rank, as above."""
    import time

    import torch.distributed as dist

    if dist.get_rank() == 1:
        time.sleep(600)
    dist.barrier()


# A peer is two ranks held by some library, which is loaded when the peer is made.
#   start()   starts the ranks; returns what an all-reduce of 1 and 2 came to on them
#   step()    an empty step on both ranks; a library without it does not keep ranks between steps
#   pids()    of both ranks
#   hang()    returns at once; rank 1 sleeps, rank 0 waits for it in a collective
#   answer()  waits for the answer to `hang`, as a person's cell would; raises what the library raises


class IPyParallel:
    """A controller and two engines; a step is `execute` on both, as a `%%px` cell is."""

    def __init__(self) -> None:
        self.library: Any = import_module("ipyparallel")

    def start(self) -> list[float]:
        cluster = self.library.Cluster(n=2, engines="local", log_level=logging.ERROR)
        self.client = cluster.start_and_connect_sync()
        self.both = self.client[:]
        port = free_port()
        sent = [self.client[engine].apply_async(reduce, rank, port) for rank, engine in enumerate(self.client.ids)]
        return [float(one.get(60)) for one in sent]

    def step(self) -> None:
        self.both.execute("pass", silent=True, block=True)

    def pids(self) -> list[int]:
        return list(self.both.apply_sync(os.getpid))

    def hang(self) -> None:
        self.waiting = self.both.apply_async(wait_for_rank_1)

    def answer(self) -> None:
        self.waiting.get(60)


class Monarch:
    """Two processes with an actor each; a step is an endpoint called on both."""

    def __init__(self) -> None:
        library: Any = import_module("monarch.actor")
        # By default a death that nobody handled ends this process too, before it can tell the time.
        library.unhandled_fault_hook = lambda _: None

        class Ranks(library.Actor):  # type: ignore[misc]
            @library.endpoint  # type: ignore[untyped-decorator]
            def reduce(self, port: int) -> float:
                return reduce(library.current_rank().rank, port)

            @library.endpoint  # type: ignore[untyped-decorator]
            def nothing(self) -> None: ...

            @library.endpoint  # type: ignore[untyped-decorator]
            def pid(self) -> int:
                return os.getpid()

            @library.endpoint  # type: ignore[untyped-decorator]
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
    """The two managers behind its `%dist_init`; a step is what a cell sends to all."""

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
        """What is sent to a worker that has not connected yet is lost: ask until both answer."""
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
    """torchrun alone, as a notebook starts a script with it: it has no steps, and its exit reports a death."""

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
        script = Path("script.py")  # in the trial's own folder
        script.write_text(self.SCRIPT)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.said = sorted(self.process.stdout.readline().split() for _ in range(2))
        return [float(value) for _, _, value in self.said]

    def pids(self) -> list[int]:
        return [int(pid) for _, pid, _ in self.said]

    def hang(self) -> None:
        """The script does so after its all-reduce."""

    def answer(self) -> None:
        _, errors = self.process.communicate()
        raise subprocess.SubprocessError(f"status {self.process.returncode}: {errors[errors.find('Root Cause') :]}")


Peer = IPyParallel | Monarch | NBDistributed | Torchrun
PEERS: dict[str, type[Peer]] = {
    "ipyparallel": IPyParallel,
    "monarch": Monarch,
    "nbdistributed": NBDistributed,
    "torchrun": Torchrun,
}

if __name__ == "__main__":
    run(PEERS[sys.argv[1]](), **json.loads(sys.argv[2]))
