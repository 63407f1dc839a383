"""Turns: what is compared runs alternately, in changing order, so that a disturbance of the machine affects all ways alike."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Way = TypeVar("Way", bound=Hashable)


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def turn_by_turn(names: Sequence[Way], rounds: int, timed: Callable[[Way, int], float]) -> dict[Way, list[float]]:
    """Seconds of each. In every turn each runs once, in changing order, after a garbage collection. The first turn, -1, is not counted,
    because it allocates pages and makes connections."""
    seconds: dict[Way, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.freeze()  # existing objects are not scanned in every turn
    try:
        for turn in range(-1, rounds):
            for place in order(len(names), turn):
                gc.collect()
                taken = timed(names[place], turn)
                if turn >= 0:
                    seconds[names[place]].append(taken)
    finally:
        gc.unfreeze()
    return seconds


def order(count: int, turn: int) -> list[int]:
    """The order of a turn: over `count` turns each is in every position and, for even counts, follows each other one equally often."""
    zigzag = [place // 2 + 1 if place % 2 else -(place // 2) for place in range(count)]
    return [(place + turn) % count for place in zigzag]
