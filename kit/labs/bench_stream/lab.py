"""Bench stream: the gain over the plain loop, the accuracy of the recomputation, and whether the loop learns.

Every row comes from runs of the lab with the phases that it needs. Ranks of the part `paced` wait for each token and each trained sample,
as with a larger model, so the loop is measured instead of the ranks' competition for this machine's cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from kit.labs.definition import BenchConfig, Definition, Option, Step, driven_parts

PARTS = ("lockstep", "stamps", "paced", "learns")


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchStreamConfig(BenchConfig):
    QUICK: ClassVar[dict[str, Any]] = {"steps": 2, "paced_steps": 3, "decidable": 100, "learning_steps": 10, "seeds": 1}

    steps: Annotated[int, Option("steps of a loop that is compared", low=1, high=1000)] = 5
    paced_steps: Annotated[int, Option("steps of a paced loop", low=1, high=1000)] = 9
    decidable: Annotated[int, Option("tokens that are needed to judge the stamps", low=1, high=10**9)] = 10_000
    learning_steps: Annotated[int, Option("steps of a loop that learns", low=5, high=100_000)] = 40
    seeds: Annotated[int, Option("seeds of the loops that learn", low=1, high=1000)] = 3


def plan(config: BenchStreamConfig) -> list[Step]:
    return driven_parts(config, PARTS, "kit.labs.bench_stream.parts:measure_stream")


LAB = Definition(
    name="bench-stream",
    summary="measures gain and cost of asynchrony, and whether the loop learns",
    config=BenchStreamConfig,
    plan=plan,
    rules="kit.labs.bench_stream.rules:RULES",
    first=("quick", "parts", "device"),
    tag="bench",
)
