"""`kit bench split`: what a step costs that is cut into a stream, beside the plain one; and the lab over its whole grid.

Both ways work on the same job and the same rows and take turns in changing order; a ratio is taken turn by turn. Plain against
plain is the empty control: what it differs from 1 by is what the ratios may. Ranks import this package too, so that it asks
for little.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from kit.bench.report import tell
from kit.bench.rows import Row
from kit.bench.split import grid, steps
from kit.bench.split.steps import Job
from kit.errors import KitError
from kit.world import World

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much of each. Rounds are even, so that turns are evenly dealt."""

    job: Job = field(default_factory=Job)
    pipeline: Job = field(default_factory=lambda: Job(layers=2, microbatches=10))
    experts: Job = field(default_factory=Job)
    rounds: int = 10
    trials: int = 1  # fresh processes for each way of stepping, to see its peak
    peak_steps: int = 3
    loss: tuple[int, int] = (8, 4096)
    loss_rounds: int = 22
    grid: dict[str, grid.Config] = field(default_factory=grid.grid)


QUICK = Sizes(rounds=4, peak_steps=1, loss_rounds=6, grid=dict(islice(grid.covering().items(), 4)))


def main(as_json: bool, sizes: Sizes = Sizes()) -> int:
    with tempfile.TemporaryDirectory(prefix="kit-bench-") as scratch:
        logs = Path(scratch)
        job, few, rounds = sizes.job, sizes.trials, sizes.rounds
        parts: dict[str, Callable[[], list[Row]]] = {
            "steps of megatron": partial(steps.times, job, "megatron", logs, rounds=rounds),
            "steps of fsdp2": partial(steps.times, job, "fsdp2", logs, rounds=rounds),
            "steps of a pipeline": partial(steps.bubbles, sizes.pipeline, logs, rounds=rounds),
            "steps with experts": partial(steps.experts, sizes.experts, logs, rounds=rounds),
            "losses": partial(steps.losses, logs, shape=sizes.loss, rounds=sizes.loss_rounds),
            "memory of megatron": partial(steps.memory, job, "megatron", logs, trials=few, times=sizes.peak_steps),
            "memory of fsdp2": partial(steps.memory, job, "fsdp2", logs, trials=few, times=sizes.peak_steps),
        }
        rows: list[Row] = []
        try:
            for what, part in parts.items():
                rows += measured(what, part)
            rows += grid.rows(logs, sizes.grid)
        except KeyboardInterrupt:  # what was measured before is told
            rows.append(Row(what="the rest", note="not measured: interrupted"))
        with World(1, logs=logs) as world:
            provenance = world.call("kit.measure:provenance")[0]
    tell("split", rows, provenance, as_json=as_json)
    return 0


def measured(what: str, part: Callable[[], list[Row]]) -> list[Row]:
    """A part that breaks is a row that says so; the others go on."""
    try:
        return part()
    except KitError as error:
        return [Row(what=what, note=f"not measured: {str(error).partition(chr(10))[0]}")]
