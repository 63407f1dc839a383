"""What every peer is asked, in a process of its own: `run(Peer())` at the end of a peer's module.

Tells a line when the first all-reduce and the steps are done, then is killed (hold), or kills rank 1 and tells a second line.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from typing import Any, Protocol

from kit.bench.peers import PREFIX

REDUCED = 3.0
SETTLE_S = 0.5  # from sending the work to the kill: by then rank 0 is inside the collective
WORDS = 300


class Peer(Protocol):
    """Two ranks held by some library."""

    def start(self) -> list[float]:
        """Start the ranks; what an all-reduce of 1 and 2 came to on them."""

    def can_step(self) -> bool: ...

    def step(self) -> None:
        """An empty step on both ranks."""

    def pids(self) -> list[int]: ...

    def hang(self) -> None:
        """Rank 1 sleeps, rank 0 waits for it in a collective; returns at once."""

    def answer(self) -> None:
        """Wait for the answer to `hang`, as a person's cell would; raises what the library raises."""


def run(peer: Peer) -> None:
    asked: dict[str, Any] = json.loads(sys.argv[1])
    began = time.perf_counter()
    values = peer.start()
    started = time.perf_counter() - began
    if values != [REDUCED] * 2:
        raise RuntimeError(f"the all-reduce came to {values}")
    steps = [timed(peer) for _ in range(asked["steps"] if peer.can_step() else 0)]
    victim = peer.pids()[1]
    tell({"start": started, "steps": steps})
    if asked["hold"]:
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


def timed(peer: Peer) -> float:
    began = time.perf_counter()
    peer.step()
    return time.perf_counter() - began


def tell(what: dict[str, Any]) -> None:
    print(f"\n{PREFIX}{json.dumps(what)}", flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
