"""A run's records as charts read them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from kit.results import NotMeasured, Run, Verdict
from kit.results.frames import Source, gpu_numbers, source
from kit.results.units import counted

CONTROL = "control"  # the phase that a lab repeats without the code under test, before all cycles
BASELINE = "baseline"  # the phase after which a lab wants its levels to be the same again
SEPARATE = 4  # up to this many ranks are drawn one by one; more are drawn as one cloud
NAMED = 10  # cycles on an axis of steps that have numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    """What charts are drawn from: each table is made once."""

    tables: dict[Callable[[Any], pd.DataFrame], pd.DataFrame] = field(default_factory=dict)

    def table(self, rows: Callable[[Any], pd.DataFrame]) -> pd.DataFrame:
        """What a chart's or a table's `rows` makes of this."""
        if rows not in self.tables:
            self.tables[rows] = rows(self)
        return self.tables[rows]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData(Tables):
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
    cycle: str = "cycle"  # what a cycle is, in words
    cycle_words: Mapping[int, str] = field(default_factory=dict)  # names of cycles that say more than numbers
    # The rows of each metric, and of each metric and phase: pictures ask for the same ones again and again.
    selections: dict[tuple[str, str], pd.DataFrame] = field(default_factory=dict, init=False, repr=False, compare=False)

    def verdict(self, tolerances: Mapping[str, float] | None = None) -> Verdict:
        """The checks' answers. A run without checks here has those that it stored, and takes no tolerances."""
        return self.run.verdict(**(tolerances or {}))

    def metrics(self) -> set[str]:
        return set(self.frame["metric"].unique())

    def of(self, metric: str, phase: str = "") -> pd.DataFrame:
        """Finite values of a metric, of one phase or of all, with the number of their step."""
        key = metric, phase
        if key not in self.selections:
            if phase:
                rows = self.of(metric)
                self.selections[key] = rows[rows["phase"] == phase]
            else:
                self.selections[key] = self.frame[(self.frame["metric"] == metric) & self.frame["value"].notna()]
        return self.selections[key]

    def timed(self) -> pd.DataFrame:
        """The seconds of every phase and rank."""
        if not self.order:
            raise NotMeasured("no phase has been measured yet")
        return self.of("seconds")

    def level(self, metric: str) -> pd.DataFrame:
        """A metric through the steps, as rows of a line: its median and range over ranks."""
        level = self.of(metric).groupby("step")["value"].agg(["min", "median", "max"])
        return level.set_axis(["low", "value", "high"], axis=1).rename_axis("x").reset_index()

    def start(self, metric: str) -> float | None:
        """A metric after a phase called baseline, else before the first phase."""
        rows = self.of(metric, BASELINE)
        if rows.empty:
            rows = self.of(f"{metric}_before")
        return None if rows.empty else float(rows[rows["step"] == rows["step"].min()]["value"].median())

    def memory_levels(self, phase: str) -> pd.DataFrame:
        """Memory after a phase of each cycle, as the memory checks see it: a column per rank, or per GPU that ranks share."""
        rows = self.of(self.memory.metric, phase)
        columns = rows["rank"].map(lambda rank: self.memory.gpu_of.get(rank, rank))
        return rows.assign(rank=columns).pivot_table(index="cycle", columns="rank", values="value", aggfunc="max")

    def ranks_word(self) -> str:
        return "1 rank" if len(self.ranks) == 1 else f"median and range of {len(self.ranks)} ranks"

    def lanes(self, rows: pd.DataFrame) -> pd.Series[str]:
        """The lane of each row among points: its rank, or one for all of many ranks."""
        if len(self.ranks) > SEPARATE:
            return pd.Series(counted(len(self.ranks), "rank"), rows.index)
        return rows["rank"].map(lambda rank: f"rank {rank}")

    def by_step(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Rows whose x is a step, with what their axis needs: ticks at cycles, every other one shaded; a run of one cycle has its
        phases' names instead."""
        rows = rows.assign(phase=[self.order[step][1] for step in rows["x"]])
        if len(self.cycles) <= 1:
            return with_attrs(rows, ticks={step: phase for step, (_, phase) in enumerate(self.order)}, axis="")
        places = stretches(self.order, self.cycles)
        names = {(steps[0] + steps[-1]) / 2: self.cycle_words.get(cycle, str(cycle)) for cycle, steps in places.items()}
        every = math.ceil(len(places) / NAMED)
        shades = [(steps[0] - 0.5, steps[-1] + 0.5) for steps in list(places.values())[1::2]]
        return with_attrs(
            rows,
            ticks=dict(list(names.items())[::every]),
            shades=shades if len(places) <= 2 * NAMED else [],
            axis=f"{self.cycle} (a point per phase)",
        )


def with_attrs(rows: pd.DataFrame, **attrs: Any) -> pd.DataFrame:
    """The rows with what a chart needs to know of all of them together: words for its titles, ticks, marks."""
    rows = rows.copy(deep=False)
    rows.attrs = {**rows.attrs, **dict[Any, Any](attrs)}
    return rows


def lines_apart(table: pd.DataFrame, owner: str) -> pd.DataFrame:
    """A table with a column for each rank (or GPU) as rows of lines: one for each, or of many their median and range."""
    table = table.rename_axis(index="x")
    if len(table.columns) > SEPARATE:
        name = f"median and range of {len(table.columns)} {owner}s"
        middle = {"value": table.median(axis=1), "low": table.min(axis=1), "high": table.max(axis=1)}
        return pd.DataFrame(middle).assign(kind=name).reset_index()
    names = [f"{owner} {number}" for number in table.columns]
    return table.set_axis(names, axis=1).reset_index().melt(["x"], var_name="kind").dropna(subset="value")


def stretches(order: Sequence[tuple[int, str]], cycles: Sequence[int]) -> dict[int, list[int]]:
    """The longest stretch of neighbouring steps of each of these cycles, without a control, which has the same numbers elsewhere."""
    longest: dict[int, list[int]] = {}
    for cycle, steps in itertools.groupby(enumerate(order), key=lambda step: step[1][0]):
        places = [place for place, (_, phase) in steps if phase != CONTROL]
        if cycle in cycles and len(places) >= len(longest.get(cycle, [])):
            longest[cycle] = places
    return dict(sorted(longest.items()))


def cycles_of(order: Sequence[tuple[int, str]]) -> list[int]:
    """Cycle 0 of a lab is what is done once, such as its end; in a loop that counts from 0 it has phases that come again."""
    steps = [(cycle, phase) for cycle, phase in order if phase not in (BASELINE, CONTROL)]
    again = {phase for cycle, phase in steps if cycle}
    return sorted({cycle for cycle, phase in steps if cycle or not again or phase in again})


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
    on_ranks = frame["rank"] >= 0  # rank -1 is the notebook side, which is shown where a run has no ranks
    frame = frame[(frame["step"] >= 0) & (on_ranks | (not on_ranks.any()))]
    return RunData(
        run=run,
        config=run.config,
        records=records,
        frame=frame,
        order=order,
        phases=list(dict.fromkeys(phase for _, phase in order)),
        cycles=cycles_of(order),
        ranks=sorted(int(rank) for rank in frame["rank"].unique()),
        gpus=gpu_numbers(records),
        memory=source(records),
    )
