"""What a plot and a table of a run are, what a lab adds of them, and how one plot or all of them become a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

from kit.draw.picture import Picture, message
from kit.draw.style import Theme, theme
from kit.errors import BadInput
from kit.results.units import counted

if TYPE_CHECKING:
    import pandas as pd

    from kit.draw.data import RunData
    from kit.results import Run, Verdict

ALL = "*"  # every check's limit is in the plot
OVERVIEW = "overview"  # all of a run's main plots in one picture


@dataclass(frozen=True, slots=True)
class Scene:
    """What a plot is painted from, and the figure that it is painted onto: `alone`, or a part of one beside other plots."""

    data: RunData
    verdict: Verdict
    theme: Theme
    figure: Any
    alone: bool = True


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot by its title. `height` is in inches. `limits` names the checks whose limits are drawn: it moves with no others."""

    title: str
    has: Callable[[RunData], bool]
    height: Callable[[RunData, Verdict], float]
    paint: Callable[[Scene], None]
    limits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a run. `worst` is the column whose greatest value comes first.

    `units` are the units of columns; ROW is the unit that the row's own column `unit` names.
    """

    title: str
    make: Callable[[Run], pd.DataFrame]
    worst: str = ""
    units: Mapping[str, str] = field(default_factory=dict)


ROW = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """What a lab shows of its runs: plots and tables by name, the rows of plots in its overview, and words for the heading.

    A plot with the name of a general one takes its place. A run that is not `ready` is drawn as any run.
    """

    plots: Mapping[str, Plot] = field(default_factory=dict)
    overview: Sequence[Sequence[str]] = ()
    words: Callable[[RunData], list[str]] | None = None
    ready: Callable[[RunData], bool] = lambda _: True
    tables: Mapping[str, Table] = field(default_factory=dict)


class Album:
    """The plots that one run has something for, by name."""

    def __init__(self, data: RunData, *sources: Pictures) -> None:
        """The first of `sources` that is ready leads; the last has what every run has."""
        self.data = data
        self.lead = next(one for one in sources if one.ready(data))
        every = {**sources[-1].plots, **self.lead.plots}
        order = dict.fromkeys([*self.lead.plots, *every])
        self.plots = {name: every[name] for name in order if every[name].has(data)}

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
        with mpl.rc_context(look.rc()):
            rows = self._overview() if name == OVERVIEW else [[name]]
            if not rows:
                return message(f"{self.data.run.id}: no phase has been measured yet", look)
            heights = [max(self.plots[one].height(self.data, verdict) for one in row) for row in rows]
            picture = Picture(sum(heights) + 0.35)  # the heading
            for figures, row in zip(split(picture, heights), rows, strict=True):
                for figure, one in zip(across(figures, len(row)), row, strict=True):
                    self.plots[one].paint(Scene(self.data, verdict, look, figure, alone=name != OVERVIEW))
            picture.suptitle(
                self.heading(tolerances), x=0.01, ha="left", fontsize=11.5 if name == OVERVIEW else 9, color=look.ink
            )
            if like is not None:
                picture.lay_out_as(like)
        return picture

    def _overview(self) -> list[list[str]]:
        rows = [[name for name in row if name in self.plots] for row in self.lead.overview]
        return [row for row in rows if row] if self.data.order else []

    def heading(self, tolerances: Mapping[str, float] | None = None) -> str:
        """What was run and how it ended; moved limits are named."""
        data, run = self.data, self.data.run
        words = self.lead.words(data) if self.lead.words else [data.cycles_word()]
        name = run.lab if run.id.startswith(run.lab) else f"{run.lab} {run.id}"
        fault = [f"fault: {run.fault}"] if run.fault else []
        limits = ", ".join(f"{key} {value:g}" for key, value in (tolerances or {}).items())
        moved = [f"limits moved: {limits}"] if limits else []
        return " · ".join([name, counted(len(data.ranks), "rank"), *words, *fault, run.status, *moved])

    def moves_with(self, name: str, tolerances: Mapping[str, Sequence[str]], moved: set[str]) -> bool:
        """Whether a plot changes when these tolerances move; `tolerances` has the checks of each."""
        limits = (ALL,) if name == OVERVIEW else self.plots[name].limits
        return any(ALL in limits or set(limits) & set(tolerances.get(one, ())) for one in moved)


def split(figure: Any, heights: Sequence[float]) -> list[Any]:
    """Parts below one another: each has the whole width, so that long names in one do not push the others in."""
    if len(heights) == 1:
        return [figure]
    return list(figure.subfigures(len(heights), 1, height_ratios=heights))


def across(figure: Any, count: int) -> list[Any]:
    """Parts side by side."""
    return [figure] if count == 1 else list(figure.subfigures(1, count))
