"""`kit bench offload`: how fast a job's tensors leave the device and come back, and what is left after many cycles.

The plain copies that a move is compared with are of the same bytes and take turns with it in the same processes. A ratio is
of times: 1.43 times memcpy's time is 0.7 of its speed. Ranks import this package too, so that it asks for little.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from kit.bench.offload import lab, tensors
from kit.bench.report import tell
from kit.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much of each."""

    models: tuple[str, ...] = ("125m", "qwen2.5-0.5b")
    trials: int = 2  # fresh processes for each model: as many first cycles
    cycles: int = 5  # steady ones in each trial
    leak_cycles: int = 20
    grid: tuple[str, ...] = tuple(lab.GRID)


QUICK = Sizes(models=("125m",), trials=1, cycles=3, leak_cycles=5, grid=("tp2", "dp2 with the distributed optimizer"))


def main(as_json: bool, sizes: Sizes = Sizes()) -> int:
    with tempfile.TemporaryDirectory(prefix="kit-bench-") as scratch:
        logs = Path(scratch)
        rows = [
            row for model in sizes.models for row in tensors.rows(model, logs, trials=sizes.trials, cycles=sizes.cycles)
        ]
        rows += lab.leaks(logs, cycles=sizes.leak_cycles)
        rows += [lab.bitwise(name, logs) for name in sizes.grid]
        with World(1, logs=logs) as world:
            provenance = world.call("kit.measure:provenance")[0]
    tell("offload", rows, provenance, as_json=as_json)
    return 0
