"""Rank functions for tests of calls in flight."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

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
