"""A run as plots need it, read once: its steps in order, and a metric's median and range over ranks at each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from kit.results.sources import Source, gpu_numbers, source
from kit.results.units import counted

if TYPE_CHECKING:
    from kit.results import Run, Verdict

BASELINE = "baseline"  # the phase after which a lab wants its levels to be the same again


@dataclass(frozen=True, slots=True)
class Level:
    """A metric through the steps. `start` is its value after a phase called baseline, else before the first phase."""

    at: list[int]
    middle: list[float]
    low: list[float]
    high: list[float]
    start: float | None


@dataclass(frozen=True, slots=True)
class RunData:
    """A run's records as they were when it was read.

    `records` are all of them; `frame` are the finite ones that ranks made within a timed phase, with the number of their step.
    `order` are the timed (cycle, phase) pairs in the order in which they ended. `gpus` is the GPU of each rank, where the run
    recorded it; `memory` says which records tell how much memory there is.
    """

    run: Run
    config: Mapping[str, Any]
    records: pd.DataFrame
    frame: pd.DataFrame
    order: list[tuple[int, str]]
    phases: list[str]
    cycles: list[int]
    ranks: list[int]
    gpus: Mapping[int, int]
    memory: Source

    def verdict(self, tolerances: Mapping[str, float] | None = None) -> Verdict:
        """The checks' answers. A run without checks here has those that it stored, and takes no tolerances."""
        return self.run.verdict(**(tolerances or {}))

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

    def memory_levels(self, phase: str) -> pd.DataFrame:
        """Memory after a phase of each cycle, as the memory checks see it: a column per rank, or per GPU that ranks share."""
        rows = self.of(self.memory.metric)
        rows = rows[rows["phase"] == phase]
        columns = rows["rank"].map(lambda rank: self.memory.gpu_of.get(rank, rank))
        return rows.assign(rank=columns).pivot_table(index="cycle", columns="rank", values="value", aggfunc="max")

    def ranks_word(self) -> str:
        return "1 rank" if len(self.ranks) == 1 else f"median and range of {len(self.ranks)} ranks"

    def cycles_word(self) -> str:
        return counted(len(self.cycles), "cycle")


def read(run: Run) -> RunData:
    """Read a run. A record outside any timed phase belongs to no step."""
    records = run.frame()
    frame = records[records["value"].abs() != float("inf")]
    timed = frame[frame["metric"] == "seconds"]
    ends = timed.groupby(["cycle", "phase"])["time"].min().sort_values(kind="stable")
    order = [(int(cycle), str(phase)) for cycle, phase in ends.index]
    number: Mapping[Any, int] = {key: index for index, key in enumerate(order)}
    keys = zip(frame["cycle"], frame["phase"], strict=True)
    frame = frame.assign(step=[number.get(key, -1) for key in keys])
    frame = frame[(frame["step"] >= 0) & (frame["rank"] >= 0)]  # rank -1 is the notebook side
    return RunData(
        run=run,
        config=run.config,
        records=records,
        frame=frame,
        order=order,
        phases=list(dict.fromkeys(phase for _, phase in order)),
        cycles=sorted({cycle for cycle, phase in order if phase != BASELINE}),
        ranks=sorted(int(rank) for rank in frame["rank"].unique()),
        gpus=gpu_numbers(records),
        memory=source(records),
    )
