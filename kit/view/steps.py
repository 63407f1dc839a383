"""A run as plots need it: its steps in order, and a metric's median and range over ranks at each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from kit.labs.memory import card_numbers, source

if TYPE_CHECKING:
    from kit.labs.memory import Source
    from kit.results import Run

BASELINE = "baseline"  # the phase after which a lab wants its levels to be the same again


@dataclass(frozen=True, slots=True)
class Level:
    """A metric through the steps. `start` is what it was after a phase called baseline, else before the first phase."""

    at: list[int]
    middle: list[float]
    low: list[float]
    high: list[float]
    start: float | None


@dataclass(frozen=True, slots=True)
class Steps:
    """The measured (cycle, phase) pairs in the order in which they ended, and their records.

    `cards` tells which card a rank works on, where the run says so; `memory` who is asked how much there is.
    """

    order: list[tuple[int, str]]
    phases: list[str]
    cycles: list[int]
    ranks: list[int]
    frame: pd.DataFrame
    cards: Mapping[int, int]
    memory: Source

    @property
    def card_title(self) -> str:
        """What a picture of the driver's numbers is of."""
        return "GPU memory, each card shared by ranks" if self.memory.card_of else "GPU memory"

    def metrics(self) -> set[str]:
        return set(self.frame["metric"].unique())

    def of(self, metric: str) -> pd.DataFrame:
        """Finite values of a metric, with the number of their step."""
        return self.frame[(self.frame["metric"] == metric) & self.frame["value"].notna()]

    def level(self, metric: str) -> Level:
        groups = self.of(metric).groupby("step")["value"]
        first = self.of(metric)
        first = first[first["phase"] == BASELINE]
        if first.empty:
            first = self.of(f"{metric}_before")
        start = first[first["step"] == first["step"].min()]["value"]
        return Level(
            at=[int(step) for step in groups.median().index],
            middle=groups.median().tolist(),
            low=groups.min().tolist(),
            high=groups.max().tolist(),
            start=None if start.empty else float(start.median()),
        )


def steps(run: Run) -> Steps:
    """Read a run. A record outside any timed phase belongs to no step and is left out."""
    frame = run.frame()
    cards, memory = card_numbers(frame), source(frame)
    frame = frame[frame["value"].abs() != float("inf")]
    timed = frame[frame["metric"] == "seconds"]
    ends = timed.groupby(["cycle", "phase"])["time"].min().sort_values(kind="stable")
    order = [(int(cycle), str(phase)) for cycle, phase in ends.index]
    number: Mapping[Any, int] = {key: index for index, key in enumerate(order)}
    keys = list(zip(frame["cycle"], frame["phase"], strict=True))
    frame = frame.assign(step=[number.get(key, -1) for key in keys])
    frame = frame[frame["step"] >= 0]
    return Steps(
        order=order,
        phases=list(dict.fromkeys(phase for _, phase in order)),
        cycles=sorted({cycle for cycle, phase in order if phase != BASELINE}),
        ranks=sorted(int(rank) for rank in frame["rank"].unique()),
        frame=frame,
        cards=cards,
        memory=memory,
    )
