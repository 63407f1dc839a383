"""Bench world: how fast a World starts, steps, restarts and reports a death. `make peers` compares it with other tools.

Every first start uses fresh processes and warm files: after the first sample the libraries are in the page cache. A second one
follows at once, in the same process. Two ranks on the CPU over gloo, even if there is a GPU. Two hosts are two network namespaces. A
sample counts only if the result was correct: the sum, the named rank, the fresh pids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from kit.labs.definition import BenchConfig, Definition, Option, Step, driven_parts

PARTS = ("start", "megatron", "step", "death", "restart", "calls", "hosts", "ray", "notebook", "help")


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchWorldConfig(BenchConfig):
    """The number of samples of each part."""

    QUICK: ClassVar[dict[str, Any]] = {
        "starts": 3,
        "megatron": 2,
        "steps": 50,
        "deaths": 3,
        "kernels": 2,
        "helps": 3,
        "restarts": 3,
        "phases": 5,
        "flights": 2,
        "hosts": 1,
        "rays": 1,
    }

    starts: Annotated[int, Option("starts of a World", low=1, high=1000)] = 7
    megatron: Annotated[int, Option("starts of a World with megatron.core", low=1, high=1000)] = 5
    steps: Annotated[int, Option("empty steps", low=1, high=100_000)] = 200
    phases: Annotated[int, Option("phases of 100 ms", low=1, high=1000)] = 20
    deaths: Annotated[int, Option("ranks that are killed", low=1, high=1000)] = 7
    restarts: Annotated[int, Option("restarts of a World", low=1, high=1000)] = 7
    flights: Annotated[int, Option("comparisons of calls in flight with calls one after another", low=1, high=1000)] = 5
    hosts: Annotated[int, Option("starts on two hosts beside one (with root)", low=1, high=1000)] = 5
    rays: Annotated[
        int, Option("starts on Ray beside Ray's own, and loops on Ray (where it is installed)", low=1, high=1000)
    ] = 3
    kernels: Annotated[int, Option("notebook processes that are killed", low=1, high=1000)] = 5
    helps: Annotated[int, Option("calls of kit --help", low=1, high=1000)] = 7


def plan(config: BenchWorldConfig) -> list[Step]:
    return driven_parts(config, PARTS, "kit.labs.bench_world.parts:measure_world")


LAB = Definition(
    name="bench-world",
    summary="measures how fast a World starts, steps, restarts and reports a death",
    config=BenchWorldConfig,
    plan=plan,
    rules="kit.labs.bench_world.rules:RULES",
    first=("quick", "parts"),
    tag="bench",
)
