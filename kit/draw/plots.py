"""A run as plots need it, what a plot and a table of it are, what a lab adds, how one plot or all of them become a picture, and what plots
share: samples and limits on axes, names at the ends of lines, axes of cycles and of steps.

A notebook shows a picture and a file keeps it; in a page whose theme may change it is SVG.
"""

from __future__ import annotations

import contextlib
import html
import io
import itertools
import math
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, NullFormatter

from kit.draw.style import DARK, LIGHT, LINES, SVG, Theme, theme
from kit.errors import BadInput
from kit.results import Run, Verdict
from kit.results.frames import Source, gpu_numbers, source
from kit.results.units import counted

ALL = "*"  # every check's limit is in the plot
OVERVIEW = "overview"  # all of a run's main plots in one picture
FORMATS = (".png", ".svg", ".pdf")
WIDTH = 11.0  # inches
DARK_PAGE = 'body[data-jp-theme-light="false"] .kit-picture, body.vscode-dark .kit-picture'
COLOURED = re.compile(r"#[0-9a-f]{6}\b")
BASELINE = "baseline"  # the phase after which a lab wants its levels to be the same again


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
    cycle: str = "cycle"  # what a cycle is, in words
    cycle_words: Mapping[int, str] = field(
        default_factory=dict
    )  # the name of each, where a lab has better ones than numbers

    def verdict(self, tolerances: Mapping[str, float] | None = None) -> Verdict:
        """The checks' answers. A run without checks here has those that it stored, and takes no tolerances."""
        return self.run.verdict(**(tolerances or {}))

    def metrics(self) -> set[str]:
        return set(self.frame["metric"].unique())

    def of(self, metric: str, phase: str = "") -> pd.DataFrame:
        """Finite values of a metric, of one phase or of all, with the number of their step."""
        rows = self.frame[(self.frame["metric"] == metric) & self.frame["value"].notna()]
        return rows[rows["phase"] == phase] if phase else rows

    def level(self, metric: str) -> pd.DataFrame:
        """A metric through the steps: its min, median and max over ranks."""
        return self.of(metric).groupby("step")["value"].agg(["min", "median", "max"])

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


def cycles_of(order: Sequence[tuple[int, str]]) -> list[int]:
    """Cycle 0 of a lab is what is done once, such as its end; in a loop that counts from 0 it has phases that come again."""
    steps = [(cycle, phase) for cycle, phase in order if phase != BASELINE]
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


# -- pictures ---------------------------------------------------------------------------------------------------------


class Picture(Figure):
    """A figure that a notebook shows by itself, whatever its matplotlib settings."""

    def __init__(self, height: float = 1.2, *, width: float = WIDTH) -> None:
        super().__init__(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06))

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()

    def save(self, path: str | Path) -> Path:
        path = Path(path)
        if path.suffix not in FORMATS:
            raise BadInput(f"a picture is saved as {', '.join(FORMATS)}, not {path.name!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        stamp = {"Date": None} if path.suffix == ".svg" else None  # the same run makes the same file
        with mpl.rc_context(SVG):
            self._settle()
            self.savefig(path, dpi=110, metadata=stamp)
        return path

    def _settle(self) -> None:
        """Lay out once and round: the solver's last digits differ from time to time, and names in the file with them."""
        self.draw_without_rendering()
        self.set_layout_engine("none")
        parts = list(self.subfigs)
        while parts:
            part = parts.pop()
            place = part.bbox_relative
            place.p0, place.p1 = np.round(place.p0, 5), np.round(place.p1, 5)
            parts += part.subfigs
        for axes in self.axes:
            x, y, width, height = axes.get_position(original=True).bounds
            axes.set_position((round(x, 5), round(y, 5), round(width, 5), round(height, 5)))

    def lay_out_as(self, like: Picture) -> None:
        """Put the axes where the other picture has them, if it has the same size and parts."""
        pairs = list(zip(self.axes, like.axes, strict=False))
        if len(self.axes) != len(like.axes) or tuple(self.get_size_inches()) != tuple(like.get_size_inches()):
            return
        self.set_layout_engine("none")
        for axes, other in pairs:
            axes.set_position(other.get_position(original=True))


def message(words: str, theme: Theme) -> Picture:
    picture = Picture(width=8)
    picture.text(0.5, 0.5, words, ha="center", va="center", color=theme.faint)
    return picture


# -- plots ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scene:
    """What a plot is painted from, and the figure, or a part of one, that it is painted onto."""

    data: RunData
    verdict: Verdict
    theme: Theme
    figure: Any


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
class Pictures:
    """What a lab shows of its runs: plots and tables by name, the rows of plots in its overview, words for the heading, and forecasts.

    A plot with the name of a general one takes its place. A run that is not `ready` is drawn as any run.
    """

    plots: Mapping[str, Plot] = field(default_factory=dict)
    overview: Sequence[Sequence[str]] = ()
    words: Callable[[RunData], list[str]] | None = None
    ready: Callable[[RunData], bool] = lambda _: True
    tables: Mapping[str, Table] = field(default_factory=dict)
    what_if: WhatIf | None = None
    cycle: str = "cycle"
    cycle_words: Callable[[Mapping[str, Any]], Mapping[int, str]] | None = None  # of a config


class Album:
    def __init__(self, run: Run, *sources: Pictures) -> None:
        """Read the records, once. The first of `sources` that is ready leads; the last has what every run has."""
        data = read(run)
        for one in sources:
            if one.cycle_words is not None:
                with contextlib.suppress(LookupError, TypeError, AttributeError):  # an older or damaged config
                    data = replace(data, cycle=one.cycle, cycle_words=one.cycle_words(data.config))
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
            for figures, row in zip(split(picture, len(rows), height_ratios=heights), rows, strict=True):
                for figure, one in zip(split(figures, 1, len(row)), row, strict=True):
                    self.plots[one].paint(Scene(self.data, verdict, look, figure))
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
        data, run = self.data, self.data.run
        words = self.lead.words(data) if self.lead.words else [counted(len(data.cycles), "cycle")]
        name = run.lab if run.id.startswith(run.lab) else f"{run.lab} {run.id}"
        fault = [f"fault: {run.fault}"] if run.fault else []
        limits = ", ".join(f"{key} {value:g}" for key, value in (tolerances or {}).items())
        moved = [f"limits moved: {limits}"] if limits else []
        return " · ".join([name, counted(len(data.ranks), "rank"), *words, *fault, run.status, *moved])

    def moves_with(self, name: str, moved: set[str]) -> bool:
        """Whether a plot changes when the limits of these rules move."""
        limits = (ALL,) if name == OVERVIEW else self.plots[name].limits
        return ALL in limits or not moved.isdisjoint(limits)


def split(figure: Any, rows: int, columns: int = 1, **options: Any) -> list[Any]:
    """Parts below one another have the whole width each, so that long names in one do not push the others in."""
    return [figure] if rows * columns == 1 else list(figure.subfigures(rows, columns, **options))


# -- in a page ---------------------------------------------------------------------------------------------------------


PLACES = {colour: f"--kit-{index}" for index, colour in enumerate(LIGHT.colours())}
SHEET = "".join(
    f"{where} {{{''.join(f'{name}:{colour};' for name, colour in zip(PLACES.values(), look.colours(), strict=True))}}}\n"
    for where, look in ((".kit-picture", LIGHT), (DARK_PAGE, DARK))
) + (".kit-picture svg { display:block; width:100%; height:auto; stroke-linejoin:round; stroke-linecap:butt; }")


def inline(picture: Picture, label: str) -> str:
    """A picture that was drawn in the light theme, as SVG in the colours of a page with `SHEET`. The label is for screen readers."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    # Names in two pictures of one page must differ.
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": secrets.token_hex(4)}):
        canvas: Any = FigureCanvasSVG(picture)
        canvas.print_svg(buffer, metadata=nothing)  # `savefig` would draw a second time
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # matplotlib's own sheet would style every drawing of the page.
    text = re.sub(r"<style.*?</style>", "", text, count=1, flags=re.DOTALL)
    text = COLOURED.sub(lambda found: f"var({PLACES[found[0]]})" if found[0] in PLACES else found[0], text)
    head, rest = text.split(">", 1)
    head = re.sub(r' (?:width|height)="[^"]*pt"', "", head)
    named = f'{head} role="img" aria-label="{html.escape(label, quote=True)}">'
    width = round(picture.get_size_inches()[0] * 96)
    return f'<div class="kit-picture" style="max-width:{width}px">{named}{rest}</div>'


# -- what plots share --------------------------------------------------------------------------------------------------


SEPARATE = 4  # up to this many ranks are drawn one by one; more are drawn as one cloud


def rank_lanes(data: RunData) -> list[list[int]]:
    return [[rank] for rank in data.ranks] if len(data.ranks) <= SEPARATE else [data.ranks]


def draw_samples(ax: Axes, x: float, values: pd.Series[float], theme: Theme, *, marker: str, colour: str) -> None:
    ax.plot([x, x], [values.min(), values.max()], color=colour, linewidth=5, alpha=0.3, solid_capstyle="round")
    ax.plot([x] * len(values), values, marker, color=colour, markersize=4.5, markeredgecolor=theme.paper)
    if len(values) > 1:
        ax.plot(x, values.median(), "_", color=theme.ink, markersize=11, markeredgewidth=1.4)


def draw_level(
    ax: Axes,
    level: pd.DataFrame,
    data: RunData,
    theme: Theme,
    *,
    start: float = 0.0,
    scale: float = 1.0,
    line: Any = "-",
    points: bool = True,
) -> None:
    """A line through the medians, a band over the ranks, and points in the colours of the phases."""
    drawn = (level - start) * scale
    ax.fill_between(drawn.index, drawn["min"], drawn["max"], color=theme.faint, alpha=0.25, linewidth=0)
    ax.plot(drawn.index, drawn["median"], color=theme.faint, linewidth=1.2, linestyle=line)
    if points:
        colours = [theme.colour(data.phases.index(data.order[step][1])) for step in drawn.index]
        look: dict[str, Any] = {"edgecolors": theme.paper, "linewidths": 0.6, "zorder": 3}
        ax.scatter(drawn.index, drawn["median"], s=26 if len(data.order) <= 30 else 9, c=colours, **look)


def stack(ax: Axes, x: float, width: float, parts: Iterable[tuple[float, Mapping[str, Any]]]) -> float:
    """Bars that stand on one another, each with its look; the height that they reach."""
    top = 0.0
    for size, look in parts:
        ax.bar(x, size, width, bottom=top, zorder=2, **look)
        top += max(size, 0.0)
    return top


def limit_of(verdict: Verdict, *checks: str) -> float | None:
    return next((row.limit for row in verdict if row.check in checks), None)


def draw_limit(ax: Axes, limit: float, word: str, theme: Theme) -> None:
    ax.axhline(limit, color=theme.bad, linewidth=1.4, linestyle=LINES[2], gid="limit")
    ax.annotate(
        word,
        (1, limit),
        (0, 2),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        va="bottom",
        color=theme.bad,
        fontsize=8.5,
    )


def widen(ax: Axes, *, least: float) -> None:
    """Keep noise from looking like a mountain: the axis spans at least this much."""
    low, high = ax.get_ylim()
    if high - low < least:
        middle = (low + high) / 2
        ax.set_ylim(middle - least / 2, middle + least / 2)


def log_scale(ax: Axes) -> None:
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())


def grid_across(ax: Axes) -> None:
    ax.grid(visible=False, axis="y")
    ax.grid(visible=True, axis="x")


def marks_of(looks: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """The marks of a legend by their words: a patch where a look has a facecolor, else a line or a marker."""
    return [
        Patch(label=word, **look) if "facecolor" in look else Line2D([], [], label=word, **look)
        for word, look in looks.items()
    ]


def legend_of(ax: Axes, handles: Sequence[Any], **options: Any) -> None:
    ax.set_axis_off()
    ax.legend(handles=handles, **{"ncols": len(handles), "loc": "center left", "borderaxespad": 0, **options})


def cycle_axis(ax: Axes) -> None:
    ax.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    left, right = ax.get_xlim()
    if right - left < 1:
        ax.set_xlim(0.5, 1.5)
    ax.set_xlabel("cycle")


def step_axis(ax: Axes, data: RunData, theme: Theme) -> None:
    """Steps by cycle, every other cycle shaded; a run of one cycle has its phases' names instead."""
    ax.set_xlim(-0.7, len(data.order) - 0.3)
    if len(data.cycles) <= 1:
        ax.set_xticks(range(len(data.order)), [phase for _, phase in data.order], rotation=25, ha="right")
        return
    where = stretches(data.order, data.cycles)
    every = math.ceil(len(where) / 10)
    for number, places in enumerate(where.values()):
        if number % 2 and len(where) <= 20:
            ax.axvspan(places[0] - 0.5, places[-1] + 0.5, color=theme.shade, zorder=0, linewidth=0)
    shown = list(where.items())[::every]
    names = [data.cycle_words.get(cycle, str(cycle)) for cycle, _ in shown]
    ax.set_xticks([(places[0] + places[-1]) / 2 for _, places in shown], names)
    ax.tick_params(axis="x", length=0)
    ax.set_xlabel(f"{data.cycle} (a point per phase)")


def stretches(order: Sequence[tuple[int, str]], cycles: Sequence[int]) -> dict[int, list[int]]:
    """The longest stretch of neighbouring steps of each of these cycles: a control has the same numbers elsewhere."""
    longest: dict[int, list[int]] = {}
    for cycle, steps in itertools.groupby(enumerate(order), key=lambda step: step[1][0]):
        places = [place for place, _ in steps]
        if cycle in cycles and len(places) >= len(longest.get(cycle, [])):
            longest[cycle] = places
    return dict(sorted(longest.items()))


def name_ends(ax: Axes, ends: Sequence[tuple[float, str]], last: int, theme: Theme) -> None:
    """Write names at the ends of their lines, in room made for them, moved apart where they would overlap."""
    ax.set_xlim(right=(last + 1.4) * 1.42)
    low, high = ax.get_ylim()
    room, lowest = (high - low) * 0.085, -math.inf
    paper = {"facecolor": theme.paper, "edgecolor": "none", "pad": 1.0}
    for left, (value, name) in zip(range(len(ends), 0, -1), sorted(ends), strict=True):
        lowest = max(min(value, high - (left - 0.5) * room), lowest + room)
        x = last + 0.04 * (last + 5)
        ax.text(x, lowest, name, color=theme.ink, fontsize=8.5, va="center", bbox=paper)


def phase_columns(data: RunData) -> int:
    return max(1, min(len(data.phases), 130 // (6 + max(map(len, data.phases)))))


def phase_legend(ax: Axes, data: RunData, theme: Theme) -> None:
    looks = {name: {"facecolor": theme.colour(n), "hatch": theme.hatch(n)} for n, name in enumerate(data.phases)}
    legend_of(ax, marks_of(looks), ncols=phase_columns(data), handlelength=1.4)


# -- many bars on one axis of time: as one collection, since a run may have thousands ----------------------------------


class Box(NamedTuple):
    """A bar: its ends in seconds, and its place from the top in inches."""

    left: float
    right: float
    top: float
    bottom: float


def paint_boxes(ax: Axes, boxes: Iterable[Box], began: float, scale: float, **look: Any) -> None:
    corners = [
        [
            ((x - began) * scale, y)
            for x, y in ((b.left, b.top), (b.right, b.top), (b.right, b.bottom), (b.left, b.bottom))
        ]
        for b in boxes
    ]
    ax.add_collection(PolyCollection(corners, **{"linewidth": 0, "zorder": 2, **look}), autolim=False)
