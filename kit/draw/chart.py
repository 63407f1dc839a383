"""What every kind of chart shares: the spec, limits of rules, legends and units; and plots, which are charts together.

A chart's `rows` is a function that makes a table with named columns. What belongs to the whole table is in its `attrs`: words for
titles and labels, `marks` (value, words, colour) on the axis of values, and `bands` (left, right) on an axis of time.
"""

from __future__ import annotations

import abc
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kit.draw.style import LINES, Look, Theme
from kit.results import NotMeasured, Unjudged, Verdict
from kit.results.units import size_unit, time_unit, unit_word

EVERY_RULE = "*"  # among the limits of a plot that shows the whole verdict
FRAME = 0.95  # inches of a chart's title, legend and axis
INNER = 0.3  # inches less for a chart that shares its axis with the chart below it
LETTER = 0.066  # inches of a letter of the small type, on average
HANDLE = 0.44  # inches of a mark in a legend with the space around it
LEGEND_LINE = 12.8  # points


class ChartScene(NamedTuple):
    """What charts are drawn from: a run's data (or several runs'), its verdict, the theme, and the figure or the part of one."""

    data: Any
    verdict: Verdict
    theme: Theme
    figure: Any


@dataclass(frozen=True, slots=True)
class Limit:
    """Draws the limit of a rule. Panels whose names begin with `panel` have it. It is added to the column `base` of the
    rows, or to `start`, if they have one."""

    rule: str
    words: str = "limit {limit:g} {unit}"
    panel: str = ""


class Scale(NamedTuple):
    factor: float
    unit: str


class Mark(NamedTuple):
    """A value of the chart that has a line, and its words."""

    value: float
    words: str
    colour: str = "faint"


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart(abc.ABC):
    """A chart's spec. A subclass is a kind of chart and says which columns of the rows it reads; in all of them a `kind` has a look, and
    each value of `panel` has its own drawing.

    `rows` is called with the run's data, or with its verdict if the chart is `judged`; it may raise NotMeasured. Lists call the chart by
    its `title`; `heading`, if it differs, stands above the axes. It, `label` (of the values), `about` (of the other axis) and the words
    of looks may have braces: for an attr of the rows, or for a column that is the same in all of them. Values in `s`, `B` and `B/s` are
    scaled. `height` is in inches, `share` is the part of the width beside other charts.
    """

    rows: Callable[[Any], pd.DataFrame]
    title: str = ""
    heading: str = ""
    label: str = ""
    about: str = ""
    unit: str = ""
    limits: tuple[Limit, ...] = ()
    looks: Mapping[str, Look] = field(default_factory=dict)
    judged: bool = False
    legend: bool = True
    height: float = 3.0
    share: float = 1.0

    @abc.abstractmethod
    def draw(self, ax: Axes, table: pd.DataFrame, marks: Sequence[Mark], scale: Scale, theme: Theme) -> list[Any]:
        """Draw rows and marks onto the axes, with values in the scale's unit; return the marks of the legend."""

    def inches(self, rows: pd.DataFrame) -> float:  # noqa: ARG002 - of some kinds it depends on the rows
        return self.height

    def paint(self, ax: Axes, rows: pd.DataFrame, scene: ChartScene) -> list[Any]:
        parts = [name for name in self.looks if name in rows]
        columns = [*parts, *(name for name in ("value", "low", "high", "mark") if name in rows)]
        marks = self.marks(rows, scene.verdict)
        ends = [*rows[columns].abs().to_numpy().ravel(), *rows[parts].sum(axis=1), *(abs(mark.value) for mark in marks)]
        scale = scaled(self.unit, max((end for end in ends if end < math.inf), default=0.0))
        table = rows.assign(**{name: rows[name] * scale.factor for name in columns if scale.factor != 1})
        marks = [mark._replace(value=mark.value * scale.factor) for mark in marks]
        return self.draw(ax, table, marks, scale, scene.theme)

    def marks(self, rows: pd.DataFrame, verdict: Verdict) -> list[Mark]:
        """Limits of rules and the rows' own marks. A limit that no rule of the run has is not drawn."""
        # A run's own rows have a column `start` too, which is empty unless they are spans.
        starts = [
            rows[name].iloc[0]
            for name in ("base", "start")
            if name in rows and not (name == "start" and rows[name].isna().all())
        ]
        base = float(next(iter(starts), 0.0))
        panel, marks = str(column(rows, "panel").iloc[0]), list(rows.attrs.get("marks", ()))
        for limit in self.limits:
            row = next((row for row in verdict if row.check == limit.rule), None)
            if row is not None and panel.startswith(limit.panel) and math.isfinite(base):
                words = limit.words.format(limit=row.limit, unit=unit_word(row.unit), at=base + row.limit)
                marks.append(Mark(base + row.limit, words.strip(), "bad"))
        return marks


# -- plots -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plot:
    """Charts under one name: beside each other, or `below` each other on one axis. A chart without rows is left out."""

    title: str
    charts: Sequence[Chart]
    below: bool = False

    @property
    def limits(self) -> set[str]:
        """The rules on which the drawing depends."""
        named = {limit.rule for chart in self.charts for limit in chart.limits}
        return named | {EVERY_RULE} if any(chart.judged for chart in self.charts) else named

    def drawings(self, data: Any, verdict: Verdict) -> list[tuple[Chart, pd.DataFrame]]:
        """Each chart with the rows of each of its drawings."""
        drawings: list[tuple[Chart, pd.DataFrame]] = []
        for chart in self.charts:
            try:
                rows = chart.rows(verdict) if chart.judged else data.table(chart.rows)
            except (NotMeasured, Unjudged):
                continue
            if len(rows):
                panels = rows.groupby(column(rows, "panel"), sort=False)
                drawings += [(chart, part) for _, part in panels]
        return drawings

    def height(self, data: Any, verdict: Verdict) -> float:
        inches = [chart.inches(rows) for chart, rows in self.drawings(data, verdict)]
        return sum(inches) - INNER * (len(inches) - 1) if self.below else max(inches)

    def paint(self, scene: ChartScene) -> None:
        drawings = self.drawings(scene.data, scene.verdict)
        if self.below:
            inches = [max(chart.inches(rows) - FRAME, 0.3) for chart, rows in drawings]
            grid: dict[str, Any] = {"nrows": len(drawings), "height_ratios": inches, "sharex": True}
        else:
            grid = {"ncols": len(drawings), "width_ratios": [chart.share for chart, _ in drawings]}
        axes = list(scene.figure.subplots(squeeze=False, **grid).flat)
        width = scene.figure.bbox.width / scene.figure.figure.dpi - 0.6

        deep: list[int] = []  # the lines of each legend
        before: tuple[Chart | None, list[str]] = (None, [])
        for ax, (chart, rows) in zip(axes, drawings, strict=True):
            handles, words = chart.paint(ax, rows, scene), {**rows.iloc[0], **rows.attrs}
            for handle in handles:
                handle.set_label(filled_template(handle.get_label(), words))
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_label_text(filled_template(axis.get_label_text(), words))
            # Panels with the same words have one legend, as wide as all of them.
            shares = [other.share * (other is chart or self.below) for other, _ in drawings]
            part = sum(shares) / sum(other.share for other, _ in drawings)
            legend = chart, [handle.get_label() for handle in handles]
            is_new = chart.legend and bool(handles) and legend != before
            deep.append(draw_legend(ax, handles, width * part) if is_new else 0)
            before = legend
        for ax, (chart, rows), lines in zip(axes, drawings, deep, strict=True):
            room = lines if self.below else max(deep)  # titles beside each other are at the same height
            title = filled_template(chart.heading or chart.title or self.title, {**rows.iloc[0], **rows.attrs})
            if title.strip():
                ax.set_title(title, pad=6 + LEGEND_LINE * room + 2 * (room > 0))
            if self.below and ax is not axes[-1]:
                ax.set_xlabel("")


# -- for the kinds ---------------------------------------------------------------------------------------------------


def filled_template(template: str, words: Mapping[Any, Any]) -> str:
    """The template with its words, as `str.format` would. Braces that name none of them stay: a label may be anybody's text."""

    def word(match: re.Match[str]) -> str:
        return format(words[match[1]], match[2] or "") if match[1] in words else match[0]

    return re.sub(r"\{(\w+)(?::([^{}]*))?\}", word, template)


def draw_legend(ax: Axes, handles: Sequence[Any], width: float) -> int:
    """A legend between the axes and their title, in as few lines as the inches of width allow; returns how many."""
    words = [len(handle.get_label()) for handle in handles]
    for deep in range(1, len(words) + 1):
        columns = math.ceil(len(words) / deep)
        longest = [max(part) for part in np.array_split(words, columns)]  # as matplotlib fills the columns
        if sum(HANDLE + LETTER * letters for letters in longest) <= width:
            break
    place: dict[str, Any] = {"bbox_to_anchor": (0, 1), "borderaxespad": 0.1, "borderpad": 0.2}
    legend = ax.legend(handles=handles, loc="lower left", ncols=columns, columnspacing=1.1, handlelength=1.4, **place)
    legend.set_in_layout(False)  # it may reach over the next axes: the distance of titles makes its room
    return deep


def axes_width(ax: Axes) -> float:
    """About how many inches wide the axes will be."""
    return float(ax.figure.bbox.width / ax.figure.figure.dpi * ax.get_position().width) * 1.1


def name_places(ax: Axes, names: Mapping[float, str]) -> None:
    """Names under places of the horizontal axis, slanted where they would touch."""
    letters = max(len(line) for name in names.values() for line in name.split("\n"))
    slant: dict[str, Any] = {"rotation": 25, "ha": "right"} if letters * LETTER > axes_width(ax) / len(names) else {}
    ax.set_xticks(list(names), list(names.values()), **slant)


def parts_of(values: pd.Series[Any]) -> list[str]:
    """The names among values: the categories in their order, where they are categories."""
    names = values.cat.categories if isinstance(values.dtype, pd.CategoricalDtype) else values.unique()
    return [str(name) for name in names]


def patches(looks: Mapping[str, Look], theme: Theme) -> list[Any]:
    return [Patch(label=look.word, **look.face(theme)) for look in looks.values()]


def strokes(looks: Mapping[str, Look], theme: Theme) -> list[Any]:
    """Marks of lines and points; of what has neither, the bar of its range."""
    return [
        Line2D([], [], label=look.word, **look.stroke(theme))
        if look.marker or look.line is not None
        else Patch(label=look.word, facecolor=theme.of(look.colour), alpha=0.3)
        for look in looks.values()
    ]


def scaled(unit: str, most: float) -> Scale:
    """The unit in which an axis that reaches this far is read best."""
    if unit == "s":
        return Scale(*time_unit(most))
    if unit == "B":
        return Scale(*size_unit(most))
    return Scale(1e-9, "GB/s") if unit == "B/s" else Scale(1.0, unit_word(unit))


def with_unit(words: str, unit: str) -> str:
    return f"{words} [{unit}]" if words and unit else words or unit


def draw_marks(ax: Axes, marks: Sequence[Mark], theme: Theme, *, upright: bool = False) -> None:
    """Lines across the axes with their words at the end; `upright` on a horizontal axis of values."""
    for mark in marks:
        look: dict[str, Any] = {"color": theme.of(mark.colour), "linewidth": 1.4, "linestyle": LINES[2]}
        (ax.axvline if upright else ax.axhline)(mark.value, gid="limit", zorder=1.8, **look)
        at, across = ("data", "axes fraction"), ("axes fraction", "data")
        ax.annotate(
            mark.words,
            (mark.value, 1) if upright else (1, mark.value),
            (2, -2) if upright else (0, 2),
            xycoords=at if upright else across,
            textcoords="offset points",
            ha="left" if upright else "right",
            va="top" if upright else "bottom",
            color=theme.of(mark.colour),
            fontsize=8.5,
            bbox={"facecolor": theme.paper, "edgecolor": "none", "pad": 0.6, "alpha": 0.7},
        )


def draw_bands(ax: Axes, rows: pd.DataFrame, scale: float, theme: Theme) -> None:
    for left, right in rows.attrs.get("bands", ()):
        ax.axvspan(left * scale, right * scale, color=theme.faint, alpha=0.4, linewidth=0.8, zorder=0.5, gid="band")


def grid_across(ax: Axes) -> None:
    ax.grid(visible=False, axis="y")
    ax.grid(visible=True, axis="x")


def column(rows: pd.DataFrame, name: str, default: Any = "") -> pd.Series[Any]:
    """A column that rows may lack."""
    return rows[name] if name in rows else pd.Series(default, rows.index)
