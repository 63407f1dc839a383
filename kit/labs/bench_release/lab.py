"""Bench release: ways to release and restore a job's communicators, by number of groups and ranks.

Ways take turns, each in new ranks, because two of them leave groups behind. Times are of the slowest rank; freed bytes are the minimum
over ranks, bytes left at the end the maximum. Each row names the mechanism that remade its communicators; `exact` is compared only with
a way of the same mechanism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from kit.labs.definition import BenchConfig, Definition, Option, Step, driven_parts

RANKS = 2  # of the parts by number of groups


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchReleaseConfig(BenchConfig):
    QUICK: ClassVar[dict[str, Any]] = {"groups": (0, 40), "more_ranks": (), "trials": 1, "cycles": 2}

    groups: Annotated[tuple[int, ...], Option("numbers of groups on 2 ranks; 0: as many as Megatron makes")] = (
        0,
        40,
        80,
    )
    more_ranks: Annotated[tuple[int, ...], Option("numbers of ranks with Megatron's groups")] = (4, 8)
    trials: Annotated[int, Option("fresh ranks for each way", low=1, high=100)] = 3
    cycles: Annotated[int, Option("cycles of each trial", low=1, high=1000)] = 3


def plan(config: BenchReleaseConfig) -> list[Step]:
    parts = [
        *(f"groups.{count or 'own'}" for count in config.groups),
        *(f"ranks.{count}" for count in config.more_ranks),
    ]
    return driven_parts(config, parts, "kit.labs.bench_release.parts:measure_release")


LAB = Definition(
    name="bench-release",
    summary="measures the time to release and restore a job's communicators, mode by mode",
    config=BenchReleaseConfig,
    plan=plan,
    rules="kit.labs.bench_release.rules:RULES",
    first=("quick", "parts", "device", "groups"),
    tag="bench",
)
