"""What a lab shows of its runs, and the album of one run: its plots by name, each drawn alone or all of them in one picture."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from kit.draw.chart import EVERY_RULE, Chart, Plot
from kit.draw.data import RunData, read
from kit.draw.picture import Picture, message, paint
from kit.draw.style import theme
from kit.errors import BadInput
from kit.results import Run
from kit.results.units import counted

OVERVIEW = "overview"  # all of a run's main plots in one picture


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a run, from `rows` as a chart has them. `worst` is the column whose greatest value comes first.

    `units` are the units of columns; ROW is the unit that the row's own column `unit` names.
    """

    title: str
    rows: Callable[[RunData], pd.DataFrame]
    worst: str = ""
    units: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """What a run would have been with other settings: a table that follows its controls.

    `names` are settings to choose by name, `numbers` those between two whole numbers; a run's own values come first. `prepare` reads a run
    once; what it returns takes a value for each control. Both raise `KitError` where a run or the values cannot be forecast.
    """

    title: str
    names: Mapping[str, Sequence[str]]
    numbers: Mapping[str, tuple[int, int]]
    prepare: Callable[[Run], Callable[..., pd.DataFrame]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Charts:
    """What a lab shows of its runs: plots and tables by name, the rows of plots in its overview, words for the heading, and forecasts.

    A plot with the name of a general one takes its place. A run that is not `ready` is drawn as any run.
    """

    plots: Mapping[str, Plot | Chart] = field(default_factory=dict)
    overview: Sequence[Sequence[str]] = ()
    words: Callable[[RunData], list[str]] | None = None
    ready: Callable[[RunData], bool] = lambda _: True
    tables: Mapping[str, Table] = field(default_factory=dict)
    what_if: WhatIf | None = None
    cycle: str = "cycle"
    cycle_words: Callable[[Mapping[str, Any]], Mapping[int, str]] | None = None  # of a config


class Album:
    def __init__(self, run: Run, *sources: Charts) -> None:
        """Read the records, once. The first of `sources` that is ready leads; the last has what every run has."""
        data = read(run)
        for charts in sources:
            if charts.cycle_words is not None:
                with contextlib.suppress(LookupError, TypeError, AttributeError):  # an older or damaged config
                    data = replace(data, cycle=charts.cycle, cycle_words=charts.cycle_words(data.config))
        self.data = data
        self.lead = next(charts for charts in sources if charts.ready(data))
        every = {**self.lead.plots, **sources[-1].plots, **self.lead.plots}
        plots = {name: plot if isinstance(plot, Plot) else Plot(plot.title, [plot]) for name, plot in every.items()}
        self.plots = {name: plot for name, plot in plots.items() if self._has(plot)}

    def _has(self, plot: Plot) -> bool:
        """Whether the run has rows for a plot. A plot is listed even if making its rows fails: only drawing that plot raises the error."""
        try:
            return bool(plot.drawings(self.data, self.data.verdict()))
        except Exception:  # noqa: BLE001 - a partial or damaged run may break anything
            return True

    @property
    def names(self) -> list[str]:
        return [OVERVIEW, *self.plots]

    def title(self, name: str) -> str:
        return "Overview" if name == OVERVIEW else self.plots[name].title

    def draw(
        self,
        name: str = OVERVIEW,
        *,
        theme_name: str = "light",
        tolerances: Mapping[str, float] | None = None,
        like: Picture | None = None,
    ) -> Picture:
        """A plot, or all of them. `tolerances` move the limits that are drawn.

        Laid out as `like`, the same plot under other limits, it takes half the time.
        """
        if name not in self.names:
            raise BadInput(f"this run has no plot {name!r}; its plots are: {', '.join(self.names)}")
        look, verdict = theme(theme_name), self.data.verdict(tolerances)
        rows = self._overview() if name == OVERVIEW else [[name]]
        if not rows:
            return message(f"{self.data.run.id}: no phase has been measured yet", look)
        plots = [[self.plots[plot] for plot in row] for row in rows]
        picture = paint(plots, self.heading(tolerances), look, self.data, verdict)
        if like is not None:
            picture.lay_out_as(like)
        return picture

    def _overview(self) -> list[list[str]]:
        rows = [[name for name in row if name in self.plots] for row in self.lead.overview]
        return [row for row in rows if row] if self.data.order else []

    def heading(self, tolerances: Mapping[str, float] | None = None) -> str:
        data, run = self.data, self.data.run
        so_far = " so far" if run.status == "running" else ""
        words = self.lead.words(data) if self.lead.words else [counted(len(data.cycles), "cycle") + so_far]
        name = run.lab if run.id.startswith(run.lab) else f"{run.lab} {run.id}"
        fault = [f"fault: {run.fault}"] if run.fault else []
        limits = ", ".join(f"{key} {value:g}" for key, value in (tolerances or {}).items())
        moved = [f"limits moved: {limits}"] if limits else []
        # Until each rank has written a row, only the config knows how many there are.
        given = run.config.get("ranks")  # anything, in a run of a person's own
        ranks = max(len(data.ranks), given if isinstance(given, int) else 0)
        return " · ".join([name, counted(ranks, "rank"), *words, *fault, run.status, *moved])

    def moves_with(self, name: str, moved: set[str]) -> bool:
        """Whether a plot changes when the limits of these rules move."""
        limits = {EVERY_RULE} if name == OVERVIEW else self.plots[name].limits
        return EVERY_RULE in limits or not moved.isdisjoint(limits)
