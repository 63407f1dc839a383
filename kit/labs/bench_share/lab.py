"""Bench share: the cost of time sharing compared with its bound, whether it changes numbers, the time of a switch, and the scheduler's
speed.

Parts are independent; `scheduler` and `seeds` need no ranks. Ranks of the parts `load` and `makespan` wait for each token and each trained
sample, as with a larger model, so the loops are measured instead of the ranks' competition for this machine's cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from kit.labs.definition import BenchConfig, Definition, Option, Step, driven_parts

PARTS = ("together", "load", "seeds", "makespan", "switch", "adapters", "scheduler")


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchShareConfig(BenchConfig):
    QUICK: ClassVar[dict[str, Any]] = {
        "parts": "together,load,seeds,scheduler",
        "steps": 2,
        "load_steps": 2,
        "loads": 1,
        "seeds": 5,
        "paced_steps": 2,
        "runs": 1,
        "rounds": 20,
        "plans": 3,
    }

    steps: Annotated[int, Option("steps of each pipeline that is compared", low=1, high=1000)] = 5
    loads: Annotated[int, Option("runs of the part load, each with another seed", low=1, high=100)] = 5
    load_steps: Annotated[int, Option("steps of each pipeline in the parts load and seeds", low=1, high=1000)] = 3
    seeds: Annotated[int, Option("runs of the part seeds, on a virtual clock", low=1, high=1000)] = 25
    paced_steps: Annotated[int, Option("steps of each pipeline in the part makespan", low=1, high=1000)] = 9
    runs: Annotated[int, Option("runs of the part switch, each with one or two switches", low=1, high=100)] = 5
    serving: Annotated[
        Literal["tiny", "125m", "qwen2.5-0.5b"], Option("size of the model that serves four adapters")
    ] = "125m"
    served: Annotated[int, Option("rounds of the part adapters, each with one row per adapter", low=1, high=1000)] = 7
    rounds: Annotated[int, Option("devices that training takes and gives back", low=1, high=100_000)] = 100
    plans: Annotated[int, Option("plans from nothing", low=1, high=1000)] = 9


def plan(config: BenchShareConfig) -> list[Step]:
    return driven_parts(config, PARTS, "kit.labs.bench_share.parts:measure_share")


LAB = Definition(
    name="bench-share",
    summary="measures gain and cost of time sharing, and the scheduler's speed",
    config=BenchShareConfig,
    plan=plan,
    rules="kit.labs.bench_share.rules:RULES",
    first=("quick", "parts", "device"),
    tag="bench",
)
