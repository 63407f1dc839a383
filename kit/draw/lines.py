"""Lines over cycles or over another axis, each with its range, its limit and the values beyond it; also as areas on one another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullFormatter

from kit.draw.chart import (
    Chart,
    Mark,
    Scale,
    column,
    draw_bands,
    draw_marks,
    name_places,
    patches,
    scaled,
    strokes,
    with_unit,
)
from kit.draw.style import Look, Theme, looks_of

FAR = 8  # a limit this many times as high as all values needs a scale that has room for both
EQUAL = 1.001  # values on a logarithmic axis that differ by less are drawn as equal
MANY = 30  # more points of a line are small
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines(Chart):
    """`value` over `x`: a line for each `kind`.

    Columns that rows may have: `low` and `high` are a band around the line, or with `bars` a bar at each point; `phase` colours the
    points; `start` is drawn as a thin line. Values above the lowest limit are marked, or those of them that are `judged`. With `stacked`,
    lines are areas on one another that keep their height until the next x.

    Attrs: `ticks` has the words at places of x, `shades` spans of it. The axis of values spans at least `least` and begins at 0 with
    `zero`. On the scale `errors`, which is logarithmic, 0 and infinity have places of their own.
    """

    bars: bool = False
    stacked: bool = False
    x_unit: str = ""
    x_log: bool = False
    scale: Literal["", "log", "errors"] = ""
    least: float = 0.0
    zero: bool = False

    def draw(self, ax: Axes, table: pd.DataFrame, marks: Sequence[Mark], scale: Scale, theme: Theme) -> list[Any]:
        x_scale, x_unit = scaled(self.x_unit, float(table["x"].max()))
        table = table.assign(x=table["x"] * x_scale, kind=column(table, "kind").map(str))
        limit = min((mark.value for mark in marks if mark.colour == "bad"), default=math.inf)

        # The scale comes first: on that of errors, values that are not finite are moved to their place.
        if self.scale == "errors":
            table = errors_axis(ax, table, marks, theme)
        elif self.scale == "log":
            log_axis(ax)
        elif FAR * table["value"].abs().max() < limit < math.inf and not self.stacked:
            ax.set_yscale("symlog", linthresh=1)
            ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")

        looks = looks_of(table["kind"], self.looks)
        if self.stacked:
            draw_areas(ax, table, looks, theme)
            handles = patches(looks, theme)
        elif "phase" in table:
            looks = {kind: Look("faint", kind, line=place) for place, kind in enumerate(looks)}
            phases = looks_of(table["phase"], self.looks)
            colours = [theme.of(phases[phase].colour) for phase in table["phase"]]
            point: dict[str, Any] = {
                "s": 26 if table["x"].nunique() <= MANY else 9,
                "edgecolors": theme.paper,
                "linewidths": 0.6,
            }
            ax.scatter(table["x"], table["value"], c=colours, zorder=3, **point)
            handles = [*(strokes(looks, theme) if len(looks) > 1 else ()), *patches(phases, theme)]
        else:
            handles = strokes(looks, theme) if any(looks) else []
        for kind, look in looks.items() if not self.stacked else ():
            self._line(ax, table[table["kind"] == kind], look, math.inf if "phase" in table else limit, theme)

        if "start" in table:
            ax.axhline(table["start"].iloc[0], color=theme.faint, linewidth=1.0, zorder=1)
        draw_marks(ax, marks, theme)
        draw_bands(ax, table, x_scale, theme)
        if self.scale == "log":
            widen_if_equal(ax)
        elif not self.scale:
            self._values_axis(ax, table, max((mark.value for mark in marks), default=-math.inf), scale.factor)
        self._x_axis(ax, table, theme)
        ax.set(xlabel=with_unit(self.about, x_unit) if self.about else "", ylabel=with_unit(self.label, scale.unit))
        return handles

    def _line(self, ax: Axes, line: pd.DataFrame, look: Look, limit: float, theme: Theme) -> None:
        x, colour = line["x"], theme.of(look.colour)
        if "low" in line and self.bars:
            ax.vlines(x, line["low"], line["high"], color=colour, linewidth=5, alpha=0.3)
            for end in ("low", "high"):
                ax.plot(x, line[end], "_", color=colour, alpha=0.5, markersize=7)
        elif "low" in line:
            ax.fill_between(x, line["low"], line["high"], color=colour, alpha=0.25, linewidth=0)
        ax.plot(x, line["value"], linewidth=1.3, **look.stroke(theme))
        beyond = line[(line["value"] > limit) & column(line, "judged", True)]
        bad: dict[str, Any] = {"linestyle": "", "color": theme.bad, "markersize": 8.5, "zorder": 4}
        if len(beyond):
            ax.plot(beyond["x"], beyond["value"], marker=look.marker or "o", **bad)

    def _values_axis(self, ax: Axes, table: pd.DataFrame, highest_mark: float, factor: float) -> None:
        """Noise does not look like a mountain, counts have whole ticks, and the words of the highest mark have room."""
        low, high = ax.get_ylim()
        middle = (low + high) / 2
        low, high = min(low, middle - self.least * factor / 2), max(high, middle + self.least * factor / 2)
        if ax.get_yscale() == "symlog":
            ax.set_ylim(low, 5 * highest_mark)
            return
        low = 0.0 if self.stacked or self.zero else low
        ax.set_ylim(low, max(high, highest_mark + 0.15 * (high - low)))
        whole = bool((table["value"].dropna() % 1 == 0).all())
        ax.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=whole))

    def _x_axis(self, ax: Axes, table: pd.DataFrame, theme: Theme) -> None:
        least, most = table["x"].min(), table["x"].max()
        if self.x_log:
            ax.set_xscale("log", base=2)
            ax.minorticks_off()
        if "ticks" in table.attrs:
            name_places(ax, table.attrs["ticks"])
        elif not self.x_unit:
            ax.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
        if not self.x_log and ("ticks" in table.attrs or least == most):
            margin = max(0.5, 0.03 * (most - least))
            ax.set_xlim(least - margin, most + margin)
        for left, right in table.attrs.get("shades", ()):
            ax.axvspan(left, right, color=theme.shade, zorder=0, linewidth=0)


def draw_areas(ax: Axes, table: pd.DataFrame, looks: Mapping[str, Look], theme: Theme) -> None:
    wide = table.pivot_table(index="x", columns="kind", values="value", aggfunc="last").ffill().fillna(0.0)
    colours = [theme.of(look.colour) for look in looks.values()]
    areas = [wide[kind] for kind in looks]
    ax.stackplot(wide.index, *areas, step="post", linewidth=0, colors=colours, alpha=0.8, zorder=1.6)
    ax.margins(x=0)


def log_axis(ax: Axes) -> None:
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())


def widen_if_equal(ax: Axes) -> None:
    """Equal values get a decade of the axis. Matplotlib gives it to exactly equal ones only, and its logarithms round, depending on the
    processor."""
    low, high = ax.get_ylim()
    if high < EQUAL * low:
        ax.set_ylim(low / math.sqrt(10), high * math.sqrt(10))


def errors_axis(ax: Axes, table: pd.DataFrame, marks: Sequence[Mark], theme: Theme) -> pd.DataFrame:
    """Decades, below them a shaded place for 0, above them one for what is infinite; returns the table with that moved there."""
    errors = [*table[["value", "low", "high"]].to_numpy().ravel(), *(mark.value for mark in marks)]
    known = [math.log10(error) for error in errors if 0 < error < math.inf]
    low, high = math.floor(min(known)), math.ceil(max(known) + 0.01)
    powers = range(high, low - 1, -math.ceil((high - low) / 7))
    ticks = {10.0**power: f"10{str(power).translate(RAISED)}" for power in powers} | {0.0: "0"}
    is_infinite = math.inf in errors
    if is_infinite:
        ticks[10.0 ** (high + 1)] = "∞"
    ax.set_yscale("symlog", linthresh=10.0**low, linscale=1.2)
    ax.set_yticks(list(ticks), list(ticks.values()))
    ax.minorticks_off()
    ax.axhspan(-(10.0**low), 0.5 * 10.0**low, color=theme.shade, zorder=0, linewidth=0)
    ax.set_ylim(-0.7 * 10.0**low, 10.0 ** (high + (1.4 if is_infinite else 0.4)))
    return table.replace(math.inf, 10.0 ** (high + 1))
