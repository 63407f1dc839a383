"""Rank functions for tests with Worlds of 1 and 2 ranks. Ranks 0 and 2 are linked across Worlds; rank 1 shares a World with rank 2."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch.distributed as dist

from kit.errors import KitError
from kit.sync.link import Link, Listener, PeerGone, address_of, call

FOR_EVER = 600.0


def number() -> int:
    return int(os.environ["KIT_RANK"])


def numbers() -> list[int]:
    """The global rank number, and rank and size in the World's own group."""
    return [number(), dist.get_rank(), dist.get_world_size()]


def say() -> None:
    print(f"here is {number()}")


def meet(*, name: str) -> int:
    """Exchange messages across Worlds; this returns only if all Worlds run at the same time."""
    if number() != 1:
        with linked(name) as link:
            if number() == 0:  # the side that was called speaks first
                link.send({"kind": "hello"})
            link.expect("hello")
            if number() != 0:
                link.send({"kind": "hello"})
    return number()


def fail(*, numbers: list[int]) -> None:
    if number() in numbers:
        raise ValueError(f"{number()} is told to raise")


def fail_while_others_sleep() -> None:
    """Rank 0 raises; the other ranks do not notice."""
    if number() == 0:
        raise ValueError("told to raise")
    time.sleep(FOR_EVER)


def sleep() -> None:
    print("asleep")
    time.sleep(FOR_EVER)


def stuck() -> None:
    """Rank 1 waits where an interrupt does not reach it."""
    print("asleep")
    if number() == 1:
        dist.barrier()
    time.sleep(FOR_EVER)


def wait_for_rank_2(*, name: str, does: str, gate: str = "") -> None:
    """Rank 0 waits for rank 2 at a link, and rank 1 waits for it in a collective."""
    if number() == 0:
        with linked(name) as link:
            link.send({"kind": "hello"})  # without this message, a caller that leaves early counts as never connected
            try:
                link.receive("a word")
            except PeerGone:
                print("the peer is gone")
                raise
    elif number() == 1:
        dist.barrier()
    else:
        with linked(name) as link:
            link.expect("hello")
            if does == "hang":
                time.sleep(FOR_EVER)
            if does == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        while not Path(gate).exists():
            time.sleep(0.01)
        raise ValueError("the cause")


def linked(name: str) -> Link:
    if number() == 0:
        with Listener(name=name) as listener:
            return listener.accept(["rank 2"], FOR_EVER)["rank 2"]
    end = time.monotonic() + 60
    while True:
        try:
            return call(address_of(name), "rank 2", peer="rank 0", timeout_s=FOR_EVER)
        except KitError:  # it does not listen yet
            if time.monotonic() > end:
                raise
            time.sleep(0.01)
