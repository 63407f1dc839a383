"""Smoke: the smallest lab. It creates process groups, all-reduces over them, destroys them, and counts what is left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from kit.labs.definition import Definition, LabConfig, Option, Step
from kit.labs.smoke.faults import FAULTS

PHASES = ("make", "talk", "destroy", "count")


@dataclass(frozen=True, kw_only=True, slots=True)
class SmokeConfig(LabConfig):
    """Groups of all ranks, made and destroyed in every cycle."""

    cycles: Annotated[int, Option("number of times that groups are created, used and destroyed", low=1, high=1000)] = 4
    groups: Annotated[int, Option("process groups that exist at the same time", low=1, high=64)] = 2
    size: Annotated[int, Option("numbers per message", low=1, high=1 << 24)] = 1024
    implementation: Annotated[
        str,
        Option(
            "your own group factory, module:attr; attr(ctx) has make(ranks) -> group and destroy(group)", target=True
        ),
    ] = "kit.labs.smoke.ranks.phases:Plain"


def plan(config: SmokeConfig) -> list[Step]:
    """A baseline after everything was done once, so that what is made only once does not look like a leak; then as many cycles
    without groups as with them."""
    cycles = range(1, config.cycles + 1)
    return [
        Step(0, "baseline"),
        *(Step(cycle, "control") for cycle in cycles),
        *(Step(cycle, phase) for cycle in cycles for phase in PHASES),
        Step(0, "end"),
    ]


LAB = Definition(
    name="smoke",
    summary="creates process groups, all-reduces over them, destroys them, and counts what is left",
    config=SmokeConfig,
    plan=plan,
    phases="kit.labs.smoke.ranks.phases:Smoke",
    rules="kit.labs.smoke.rules:RULES",
    presets="kit.labs.smoke.rules:PRESETS",
    first=("size", "ranks", "cycles", "groups", "implementation"),
    faults=FAULTS,
)
