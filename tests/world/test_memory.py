"""Ten thousand calls leave the memory of the notebook and of the ranks unchanged."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.world import World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
CALLS, WARM, MOST = 5_000, 2_000, 2**20


def anonymous(pid: int | None) -> int:
    """A process's own bytes; file pages are left out because they come and go."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


CALLED: dict[str, Callable[[World, int], object]] = {
    "call": lambda world, n: world.call("json:dumps", obj={"n": n, "text": "x" * 50}),
    "one cell again and again": lambda world, n: world.run("n = 1"),
    "another cell each time": lambda world, n: world.eval(f"'a cell of some length, as people write them', {n}"),
    "output": lambda world, n: world.run("print('.')"),
}


@pytest.mark.parametrize("how", CALLED)
def test_ten_thousand_calls_grow_neither_side(tmp_path: Path, how: str) -> None:
    with World(2, device="cpu", logs=tmp_path) as world:
        pids = [os.getpid(), world.torchrun_pid, *world.pids]
        for n in range(WARM):
            CALLED[how](world, n)
        gc.collect()
        levels = [[anonymous(pid) for pid in pids]]
        for half in range(2):
            for n in range(CALLS):
                CALLED[how](world, WARM + half * CALLS + n)
            gc.collect()
            levels.append([anonymous(pid) for pid in pids])
    # What leaks grows in both halves; a process's heap may grow once, for whatever ran in it before.
    grown = [min(half - start, end - half) for start, half, end in zip(*levels, strict=True)]
    assert max(grown) < MOST, f"bytes gained by notebook, torchrun and ranks: {grown}"
