"""Bench view: how long a user waits for a panel: moving a limit, redrawing a plot, opening a large run.

Records are synthetic, in the format of the offload lab; no lab runs. Times do not include rendering in the browser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from kit.labs.definition import BenchConfig, Definition, Option, Step, driven_parts

PARTS = ("opening", "panels", "moving", "filtering", "listing")


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchViewConfig(BenchConfig):
    """The sizes of the runs, and the number of samples of each part."""

    QUICK: ClassVar[dict[str, Any]] = {"many": 20_000, "moves": 5, "opens": 2, "panels": 2, "runs": 200}

    records: Annotated[int, Option("records of a run that is shown", low=1000, high=10**7)] = 10_000
    many: Annotated[int, Option("records of a large run", low=1000, high=10**7)] = 100_000
    moves: Annotated[int, Option("times that a limit or a filter moves", low=1, high=1000)] = 30
    opens: Annotated[int, Option("times that a large run is opened", low=1, high=1000)] = 5
    panels: Annotated[int, Option("panels that are made", low=1, high=1000)] = 7
    runs: Annotated[int, Option("runs in the table of runs", low=2, high=10**4)] = 2000


def plan(config: BenchViewConfig) -> list[Step]:
    return driven_parts(config, PARTS, "kit.labs.bench_view.parts:measure_view")


LAB = Definition(
    name="bench-view",
    summary="measures how long a user waits for a panel, a plot or a large run",
    config=BenchViewConfig,
    plan=plan,
    rules="kit.labs.bench_view.rules:RULES",
    first=("quick", "parts"),
    tag="bench",
)
