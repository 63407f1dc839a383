"""Rank functions for tests of calls in flight."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kit.world import channel

FOR_EVER = 600.0


def number() -> int:
    return int(os.environ["KIT_RANK"])


def meet(*, folder: str, parties: int) -> int:
    """Return once `parties` ranks are in this function at the same time."""
    (Path(folder) / str(number())).touch()
    while len(list(Path(folder).iterdir())) < parties:
        time.sleep(0.001)
    return number()


def echo(*, ranks: Any = None, phase: Any = None, timeout_s: Any = None) -> list[Any]:
    return [ranks, phase, timeout_s]


def nap(*, seconds: float = FOR_EVER) -> int:
    time.sleep(seconds)
    return number()


def wait_for(*, gate: str) -> int:
    while not Path(gate).exists():
        time.sleep(0.001)
    return number()


def stubborn(*, begun: str) -> None:
    """Ignore every interrupt once started."""
    while True:
        try:
            Path(begun).touch()
            time.sleep(FOR_EVER)
        except KeyboardInterrupt:
            continue


def deaf_once(*, begun: str) -> None:
    """Lose the first interrupt, as a system call does that is entered just after the signal came."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    Path(begun).touch()
    signal.sigwait([signal.SIGINT])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    time.sleep(FOR_EVER)


def tidy(*, begun: str, tidied: str) -> None:
    """Clean up for a while once interrupted."""
    try:
        Path(begun).touch()
        time.sleep(FOR_EVER)
    finally:
        time.sleep(1.0)
        Path(tidied).touch()


def fail() -> None:
    raise ValueError(f"rank {number()} fails on purpose")


def report(*, gate: str, many: int) -> str:
    """Publish once, wait until the notebook has seen it, then publish the rest."""
    channel.publish("first")
    while not Path(gate).exists():
        time.sleep(0.001)
    for index in range(many):
        channel.publish({"index": index})
    return "done"


def report_and_fail() -> None:
    channel.publish("seen")
    raise ValueError("after it was published")


def pipeline(*, stuck: str, gate: str) -> int:
    """Rank 0 sends an activation and receives a gradient, as a stage does on GPUs: waiting for a transfer returns at once, and the
    synchronisation after it blocks. Rank 1 sends the gradient once the gate is there; before, its code or its device is `stuck`."""
    rank = dist.get_rank()
    with asynchronous_transfers() as queue:
        transfer(dist.isend if rank == 0 else dist.irecv)
        device_queue(queue)()
        queue.clear()
        if rank == 0:
            transfer(dist.irecv)
        elif stuck == "code":
            for _ in range(2):
                transfer(dist.irecv)  # posted early: rank 0 sends these after it has the gradient
            wait_for(gate=gate)
            transfer(dist.isend)
        else:
            queue.append(Kernel(gate))
        synchronize = device_queue(queue)
        synchronize()
    if stuck == "device" and rank == 1:
        transfer(dist.isend)
    if stuck == "code" and rank == 0:
        for _ in range(2):
            transfer(dist.isend)
    return number()


def transfer(kind: Any) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(kind, torch.ones(1), 1 - dist.get_rank())]):
        work.wait()


class Kernel:
    """What a device computes until the gate is there."""

    def __init__(self, gate: str) -> None:
        self.gate = gate

    def wait(self) -> None:
        wait_for(gate=self.gate)


class Queued:
    """The handle of a transfer on a device: its `wait` only orders the device's queue."""

    def wait(self) -> None: ...


@contextlib.contextmanager
def asynchronous_transfers() -> Iterator[list[Any]]:
    """Torch's sends and receives as on GPUs. Yields the transfers that are in the device's queue."""
    queue: list[Any] = []
    plain = {name: getattr(dist.ProcessGroup, name) for name in ("send", "recv")}

    def queued(group: dist.ProcessGroup, *args: Any, post: Any) -> Queued:
        queue.append(post(group, *args))
        return Queued()

    for name, post in plain.items():
        setattr(dist.ProcessGroup, name, functools.partialmethod(queued, post=post))
    try:
        yield queue
    finally:
        for name, post in plain.items():
            setattr(dist.ProcessGroup, name, post)


def device_queue(queue: list[Any]) -> Any:
    """A function in C that blocks until all in the queue is done, so that no Python frame shows what it waits for."""
    done = threading.Lock()
    done.acquire()

    def work() -> None:
        for queued in queue:
            queued.wait()
        done.release()

    threading.Thread(target=work, daemon=True).start()
    return done.acquire
