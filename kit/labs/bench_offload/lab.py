"""Bench offload: how fast a job's tensors are offloaded and reloaded.

Plain copies of the same bytes take turns with each move in the same processes. Ratios are of times: 1.43 times memcpy's time is 0.7 of
its speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from kit.labs.definition import BenchConfig, Definition, Option, Step, driven_parts


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOffloadConfig(BenchConfig):
    QUICK: ClassVar[dict[str, Any]] = {"models": "125m", "trials": 1, "cycles": 3}

    models: Annotated[str, Option("model sizes, separated by commas")] = "125m,qwen2.5-0.5b"
    trials: Annotated[int, Option("fresh processes for each model, each with one first cycle", low=1, high=100)] = 2
    cycles: Annotated[int, Option("steady cycles in each trial", low=1, high=1000)] = 5


def plan(config: BenchOffloadConfig) -> list[Step]:
    parts = [f"{way}.{model}" for way in ("tensors", "saver") for model in config.models.split(",")]
    return driven_parts(config, parts, "kit.labs.bench_offload.parts:measure_offload")


LAB = Definition(
    name="bench-offload",
    summary="measures how fast a job's tensors go out and back, compared with plain copies",
    config=BenchOffloadConfig,
    plan=plan,
    rules="kit.labs.bench_offload.rules:RULES",
    first=("quick", "parts", "device", "models"),
    tag="bench",
)
