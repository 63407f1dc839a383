"""What plots share: samples and limits on axes, names at the ends of lines, and axes of cycles and of steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, NullFormatter

from kit.draw.plots import Level, RunData
from kit.draw.style import LINES, Theme
from kit.results import Verdict

SEPARATE = 4  # up to this many ranks are drawn one by one; more are drawn as one cloud


def rank_lanes(data: RunData) -> list[list[int]]:
    """The ranks of each lane: one by one while they are few, else all in one."""
    return [[rank] for rank in data.ranks] if len(data.ranks) <= SEPARATE else [data.ranks]


def draw_samples(ax: Axes, x: float, values: pd.Series[float], theme: Theme, *, marker: str, colour: str) -> None:
    """A point per sample, a bar over their range and a tick at the median."""
    ax.plot([x, x], [values.min(), values.max()], color=colour, linewidth=5, alpha=0.3, solid_capstyle="round")
    ax.plot([x] * len(values), values, marker, color=colour, markersize=4.5, markeredgecolor=theme.paper)
    if len(values) > 1:
        ax.plot(x, values.median(), "_", color=theme.ink, markersize=11, markeredgewidth=1.4)


def draw_level(
    ax: Axes,
    level: Level,
    data: RunData,
    theme: Theme,
    *,
    start: float = 0.0,
    scale: float = 1.0,
    line: Any = "-",
    points: bool = True,
) -> None:
    """A line through the medians, a band over the ranks, and points in the colours of the phases."""
    curves = (level.low, level.middle, level.high)
    low, middle, high = ([(value - start) * scale for value in values] for values in curves)
    ax.fill_between(level.at, low, high, color=theme.faint, alpha=0.25, linewidth=0)
    ax.plot(level.at, middle, color=theme.faint, linewidth=1.2, linestyle=line)
    if points:
        colours = [theme.colour(data.phases.index(data.order[step][1])) for step in level.at]
        size = 26 if len(data.order) <= 30 else 9
        ax.scatter(level.at, middle, s=size, c=colours, edgecolors=theme.paper, linewidths=0.6, zorder=3)


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
    ax.set_xticks(
        [(places[0] + places[-1]) / 2 for _, places in shown],
        [data.cycle_words.get(cycle, str(cycle)) for cycle, _ in shown],
    )
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
    """As many names in a row of the legend as the width carries."""
    return max(1, min(len(data.phases), 130 // (6 + max(map(len, data.phases)))))


def phase_legend(ax: Axes, data: RunData, theme: Theme) -> None:
    marks = [
        Patch(facecolor=theme.colour(index), hatch=theme.hatch(index), label=phase)
        for index, phase in enumerate(data.phases)
    ]
    legend_of(ax, marks, ncols=phase_columns(data), handlelength=1.4)


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
