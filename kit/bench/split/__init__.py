"""`kit bench split`: what a step costs that is cut into a stream, beside the plain one; and the lab over its whole grid.

Both ways work on the same job and the same rows and take turns in changing order; a ratio is taken turn by turn. Plain against
plain is the empty control: what it differs from 1 by is what the ratios may. Ranks import this package too, so that it asks
for little.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from kit.bench.cost import Cost, crowd
from kit.bench.split import grid, steps
from kit.bench.split.steps import Job

if TYPE_CHECKING:
    from kit.bench.session import Part, Session


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much of each. Rounds are even, so that turns are evenly dealt. `gpu` is the job on a GPU, which a small one would not fill."""

    job: Job = field(default_factory=Job)
    pipeline: Job = field(default_factory=lambda: Job(layers=2, microbatches=10))
    gpu: Job = field(default_factory=lambda: Job(layers=12, length=512))
    rounds: int = 10
    trials: int = 1  # fresh processes for each way of stepping, to see its peak
    peak_steps: int = 3
    loss: tuple[int, int] = (8, 4096)
    loss_rounds: int = 22
    grid: dict[str, grid.Config] = field(default_factory=grid.grid)

    def on(self, device: str) -> tuple[Job, Job]:
        """The job, and the one of a pipeline."""
        return (self.job, self.pipeline) if device == "cpu" else (self.gpu, replace(self.gpu, microbatches=10))


SHORT = Job(size="tiny", layers=4, length=256, micro_batch=2)  # about a third of a second on two cores
QUICK = Sizes(
    job=SHORT,
    pipeline=SHORT,
    rounds=4,
    peak_steps=1,
    loss=(4, 2048),
    loss_rounds=4,
    grid={name: config for name, config in grid.grid().items() if name in grid.QUICK},
)


def parts(session: Session, sizes: Sizes) -> dict[str, Part]:
    job, pipeline = sizes.on(session.device)
    rounds = sizes.rounds
    peaks = {"trials": sizes.trials, "times": sizes.peak_steps}
    return {
        "steps.megatron": partial(steps.times, session, job, "megatron", rounds=rounds),
        "steps.pipeline": partial(steps.bubbles, session, pipeline, rounds=rounds),
        "steps.fsdp2": partial(steps.times, session, job, "fsdp2", rounds=rounds),
        "steps.experts": partial(steps.experts, session, job, rounds=rounds),
        "losses": partial(steps.losses, session, shape=sizes.loss, rounds=sizes.loss_rounds),
        "memory.megatron": partial(steps.memory, session, job, "megatron", **peaks),
        "memory.fsdp2": partial(steps.memory, session, job, "fsdp2", **peaks),
        "grid.2": partial(grid.rows, session, 2, sizes.grid),
        "grid.4": partial(grid.rows, session, 4, sizes.grid),
    }


def costs(sizes: Sizes) -> dict[str, Cost]:
    """Ways times turns times a step. The World that parts share is counted where a process of the reference begins."""
    job, pipeline, turns = sizes.job.weight(), sizes.pipeline.weight(), sizes.rounds + steps.WARM
    elements = sizes.loss[0] * sizes.loss[1]
    peaks = 4 * sizes.trials

    def on(ranks: int) -> Cost:
        count = sum(config["ranks"] == ranks for config in sizes.grid.values())
        return (Cost(megatron=1) + Cost(job=5, step=55) * count) * crowd(ranks) if count else Cost()

    return {
        "steps.megatron": Cost(megatron=1, job=1, step=4 * turns * job),
        "steps.pipeline": Cost(job=1, step=6 * turns * pipeline),
        "steps.fsdp2": Cost(megatron=1, job=1, step=4 * turns * 1.6 * job),
        "steps.experts": Cost(job=1, step=(4 * turns + 4) * 1.4 * job),
        "losses": Cost(megatron=1, step=elements / 32768 * (sizes.loss_rounds + 1) * 9),
        "memory.megatron": Cost(job=1.5, step=sizes.peak_steps * job) * peaks,
        "memory.fsdp2": Cost(job=1.5, step=sizes.peak_steps * 1.6 * job) * peaks,
        "grid.2": on(2),
        "grid.4": on(4),
    }
