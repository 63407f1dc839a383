"""Bench routing: the offload lab with collectives through torch's own backends and through torchcomms, turn by turn, each run in fresh
ranks.

The results of the job (losses, gradient norms, a digest of all tensors) must be bit-identical; a time is a ratio, on over off. Where
routing has no effect, nothing is measured and the rows say why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from kit.labs.definition import BenchConfig, Definition, Option, Step, driven_parts


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRoutingConfig(BenchConfig):
    QUICK: ClassVar[dict[str, Any]] = {"turns": 1, "cycles": 1}

    turns: Annotated[int, Option("runs of each way, in turns", low=1, high=100)] = 5
    cycles: Annotated[int, Option("cycles of each run", low=1, high=1000)] = 3


def plan(config: BenchRoutingConfig) -> list[Step]:
    return driven_parts(config, ("offload",), "kit.labs.bench_routing.parts:measure_routing")


LAB = Definition(
    name="bench-routing",
    summary="measures the offload lab with collectives through torch's own backends and through torchcomms",
    config=BenchRoutingConfig,
    plan=plan,
    rules="kit.labs.bench_routing.rules:RULES",
    first=("quick", "device"),
    tag="bench",
)
