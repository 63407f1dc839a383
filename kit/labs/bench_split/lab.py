"""Bench split: the cost of a split step compared with the plain one.

Both ways use the same job and rows and take turns in changing order; ratios are taken turn by turn. Plain over plain is the empty
control: it shows how far a ratio differs from 1 by chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from kit.labs.definition import BenchConfig, Definition, Option, Step, driven_parts

PARTS = (
    *("steps.megatron", "steps.pipeline", "steps.fsdp2", "steps.experts"),
    *("losses", "memory.megatron", "memory.fsdp2"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchSplitConfig(BenchConfig):
    """The model and one data rank's rows of a step; a GPU gets a larger job, because a small one would not fill it."""

    # Steps of about a third of a second on two cores: ratios of shorter ones are too noisy.
    QUICK: ClassVar[dict[str, Any]] = {
        "size": "tiny",
        "layers": 4,
        "length": 256,
        "micro_batch": 2,
        "pipeline_layers": 4,
        "pipeline_microbatches": 5,
        "rounds": 4,
        "peak_steps": 1,
        "loss_rows": 4,
        "loss_length": 2048,
        "loss_rounds": 4,
    }

    size: Annotated[Literal["tiny", "125m", "qwen2.5-0.5b"], Option("model size")] = "125m"
    layers: Annotated[int, Option("number of layers", low=1, high=200)] = 1
    length: Annotated[int, Option("tokens of a row", low=2, high=1 << 17)] = 32
    micro_batch: Annotated[int, Option("rows of a microbatch", low=1, high=1 << 16)] = 1
    microbatches: Annotated[int, Option("microbatches of a step", low=1, high=1 << 16)] = 5
    pipeline_layers: Annotated[int, Option("number of layers on two pipeline stages", low=2, high=200)] = 2
    pipeline_microbatches: Annotated[int, Option("microbatches on two pipeline stages", low=2, high=1 << 16)] = 10
    rounds: Annotated[int, Option("turns of each way; even, so that the order is balanced", low=2, high=1000)] = 10
    trials: Annotated[int, Option("fresh processes for each way, to measure its peak", low=1, high=100)] = 1
    peak_steps: Annotated[int, Option("steps of each process that measures a peak", low=1, high=100)] = 3
    loss_rows: Annotated[int, Option("rows of a loss alone", low=1, high=1 << 16)] = 8
    loss_length: Annotated[int, Option("tokens of a row of a loss alone", low=2, high=1 << 17)] = 4096
    loss_rounds: Annotated[int, Option("turns of each loss, with metrics and bare", low=2, high=1000)] = 22


def plan(config: BenchSplitConfig) -> list[Step]:
    return driven_parts(config, PARTS, "kit.labs.bench_split.parts:measure_split")


LAB = Definition(
    name="bench-split",
    summary="measures the cost of a split step compared with the plain one",
    config=BenchSplitConfig,
    plan=plan,
    rules="kit.labs.bench_split.rules:RULES",
    first=("quick", "parts", "device"),
    tag="bench",
)
