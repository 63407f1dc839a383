"""The errors of the split step against the plain step: gradients by number of chunks, and every metric.

Errors are on a scale of decades with separate places for 0 (bit for bit) and for values that are not finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kit.draw.axes import grid_across, legend_of, limit_of
from kit.draw.style import LINES, MARKERS
from kit.labs.split import parity
from kit.labs.split.checks import COMMON
from kit.labs.split.config import cases_of
from kit.results import with_ids

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kit.draw.style import Theme
    from kit.results import Verdict

ZERO, BEYOND = 1.2, 0.8  # decades from the last tick to the place of 0, and to that of infinity
APART = 0.14  # levels, in columns
WRONG = "////"  # beside its colour
ROWS = 0.19  # inches for a metric
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True)
class Decades:
    """The positions of errors on an axis, and its decades."""

    low: int
    high: int
    infinite: bool

    @classmethod
    def of(cls, values: Iterable[float], marks: Iterable[float]) -> Decades:
        known = list(values)
        found = [value for value in (*known, *marks) if 0 < value < math.inf]
        low, high = (math.log10(pick(found)) for pick in (min, max))
        return cls(math.floor(low), math.ceil(high + 0.01), any(not value < math.inf for value in known))

    def place(self, value: float) -> float:
        if value == 0:
            return self.low - ZERO
        return math.log10(value) if value < math.inf else self.high + BEYOND

    def ticks(self) -> dict[float, str]:
        every = math.ceil((self.high - self.low) / 7)
        powers = range(self.high, self.low - 1, -every)
        shown = [power for power in powers if power - self.place(0) > every / 2]
        named = {float(power): f"10{str(power).translate(RAISED)}" for power in shown}
        return {**named, self.place(0): "0", **({self.place(math.inf): "∞"} if self.infinite else {})}

    def ends(self) -> tuple[float, float]:
        return self.place(0) - 0.8, self.high + (BEYOND + 0.4 if self.infinite else 0.3)

    def shade(self) -> tuple[float, float]:
        """The ends of the band for 0."""
        return self.ends()[0], self.low - ZERO / 2


# -- gradients -----------------------------------------------------------------------------------------------------------


def gradients(ax: Axes, frame: pd.DataFrame, config: Mapping[str, Any], verdict: Verdict, theme: Theme) -> None:
    """||dg|| / ||g|| over the model for each number of chunks: the first step as points, later ones as a span."""
    rows = with_ids(frame[(frame["phase"] == "compare") & (frame["metric"] == "gradient_error")], "step")
    limit, later = limit_of(verdict, "grad_parity"), limit_of(verdict, "later_steps")
    lines = [(limit, "limit {:g}, step 1"), (later if config["steps"] > 1 else None, "limit {:g}, later")]
    between = frame[(frame["phase"] == "compare") & (frame["metric"] == "chunk_error")].set_index("cycle")["value"]
    decades = Decades.of([*rows["value"], *between], [COMMON, *(value for value, _ in lines if value)])
    columns = {count: index for index, count in enumerate(config["chunks"])}
    levels = list(dict.fromkeys(case.level for case in cases_of(config)))
    for place, level in enumerate(levels):
        points = []
        for case in cases_of(config):
            mine = rows[rows["cycle"] == case.cycle]
            if case.level != level or mine.empty:
                continue
            x = columns[case.chunks] + (place - (len(levels) - 1) / 2) * APART
            rest = mine[mine["step"] > 1]["value"]
            if not rest.empty:
                ends = [decades.place(float(value)) for value in (rest.min(), rest.max())]
                ax.plot([x, x], ends, "_-", color=theme.faint, linewidth=4, alpha=0.5, markersize=9, zorder=2)
            if not case.first:
                ax.plot(
                    x, decades.place(float(between[case.cycle])), "D", color=theme.ink, markerfacecolor="none", zorder=3
                )
            points.append((x, float(mine[mine["step"] == 1]["value"].iloc[0])))
        draw_points(ax, points, decades, Drawn(level, theme.series[place * 3], MARKERS[place], limit), theme)
    right = len(columns) - 0.45
    for value, word in [*lines, (COMMON, "{:g}, common")]:
        if value:
            colour = theme.faint if value == COMMON else theme.bad
            ax.axhline(math.log10(value), color=colour, linewidth=1.3, linestyle=LINES[2], zorder=1)
            ax.text(right, math.log10(value), word.format(value), color=colour, fontsize=8.5, va="bottom")
    bottom, top = decades.ends()
    ax.axhspan(*decades.shade(), color=theme.shade, zorder=0, linewidth=0)
    ax.set_yticks(list(decades.ticks()), list(decades.ticks().values()))
    ax.set_ylim(bottom, top + 0.28 * (top - bottom))  # room for the legend
    ax.set_xlim(-0.5, right + 0.3 * (len(columns) + 1))
    ax.set_xticks(range(len(columns)), [str(count or "one per\nmicrobatch") for count in columns])
    ax.set_xlabel("chunks per step (a point is one step, n = 1)")
    ax.set_ylabel("||dg|| / ||g||")
    ax.set_title("Gradients against the plain step")
    handles, names = ax.get_legend_handles_labels()
    if len(columns) > 1:
        handles.append(Line2D([], [], linestyle="", marker="D", color=theme.ink, markerfacecolor="none"))
        names.append("against the first number of chunks")
    if config["steps"] > 1:
        handles.append(Patch(facecolor=theme.faint, alpha=0.5))
        names.append(f"steps 2 to {config['steps']}" if config["steps"] > 2 else "step 2")
    ax.legend(handles, names, ncols=2, loc="upper left", handletextpad=0.5, columnspacing=0.9)


@dataclass(frozen=True, slots=True)
class Drawn:
    """How the points of a level are drawn; above the limit they have the colour of failures."""

    level: str
    colour: str
    marker: str
    limit: float | None


def draw_points(ax: Axes, points: list[tuple[float, float]], decades: Decades, how: Drawn, theme: Theme) -> None:
    if not points:
        return
    places = [(x, decades.place(value)) for x, value in points]
    ax.plot(
        *zip(*places, strict=True), color=how.colour, linewidth=1.2, marker=how.marker, markersize=5.5, label=how.level
    )
    for (x, y), (_, value) in zip(places, points, strict=True):
        if how.limit is not None and not value <= how.limit:
            ax.plot(x, y, how.marker, color=theme.bad, markersize=8.5, zorder=4)


# -- metrics ---------------------------------------------------------------------------------------------------------------


def first_step(frame: pd.DataFrame, config: Mapping[str, Any]) -> pd.DataFrame:
    """The largest error of each metric over all numbers of chunks in the first step, by level. NotMeasured if the run ended before."""
    table = parity.metrics(frame, config)
    table = table[table["step"] == 1].assign(lost=table["split"].isna() & table["sync"].notna())
    worst = {"error": "max", "one_scalar_error": "max", "lost": "any"}
    found = table.groupby(["level", "normalizer", "metric"], as_index=False).agg(worst)
    return found.sort_values("level", ascending=False, kind="stable", ignore_index=True)  # tokens first


def height(table: pd.DataFrame) -> float:
    return 0.5 + ROWS * table["metric"].nunique()


class Bar(NamedTuple):
    """How an error is drawn, how a 0 is, and a word beside it."""

    colour: str
    zero: str
    word: str = ""
    hatch: str = ""


def draw_bar(ax: Axes, y: float, error: float, decades: Decades, how: Bar) -> None:
    if error == 0:
        x = decades.place(0) + (y - round(y)) * 1.5  # beside each other: two rows of digits would touch
        ax.text(x, y, "0", color=how.zero, fontsize=7, fontweight="bold", ha="center", va="center")
        return
    left = decades.shade()[1]
    ax.barh(y, decades.place(error) - left, 0.38, left=left, color=how.colour, hatch=how.hatch, linewidth=0, zorder=2)
    if how.word:
        ax.text(decades.place(error), y, f" {how.word}", color=how.colour, fontsize=7.5, va="center")


def metrics_legend(ax: Axes, theme: Theme) -> None:
    marks = [
        Patch(facecolor=theme.series[0], label="measured against the plain step"),
        Patch(facecolor=theme.bad, hatch=WRONG, edgecolor=theme.paper, linewidth=0, label="above the limit"),
        Patch(facecolor=theme.series[1], label="if the loss's normalizer divided every metric (computed)"),
    ]
    legend_of(ax, marks)


def metrics(ax: Axes, table: pd.DataFrame, level: str, verdict: Verdict, theme: Theme) -> None:
    """Two bars for each metric: the measured error, and the error if the loss's normalizer divided every metric.

    The drawing of the first level has the names; the others have the same order.
    """
    limit = limit_of(verdict, "metric_parity")
    decades = Decades.of([*table["error"], *table["one_scalar_error"]], [COMMON, limit or COMMON])
    names = list(dict.fromkeys(table["metric"]))
    rows = table[table["level"] == level].set_index("metric")
    for index, name in enumerate(names):
        error, scalar, lost = rows.loc[name, ["error", "one_scalar_error", "lost"]]
        wrong = limit is not None and not error <= limit
        colours = (theme.bad, theme.bad) if wrong else (theme.series[0], theme.good)
        draw_bar(ax, index - 0.2, error, decades, Bar(*colours, "missing" if lost else "", WRONG if wrong else ""))
        draw_bar(ax, index + 0.2, scalar, decades, Bar(theme.series[1], theme.faint))
    for value, word, colour in ((limit, "limit {:g} ", theme.bad), (COMMON, " {:g}, common", theme.faint)):
        if value:
            x, side = math.log10(value), "left" if value == COMMON else "right"
            ax.axvline(x, color=colour, linewidth=1.3, linestyle=LINES[2], zorder=3)
            ax.text(x, -0.75, word.format(value), color=colour, fontsize=8.5, va="center", ha=side)
    ax.axvspan(*decades.shade(), color=theme.shade, zorder=0, linewidth=0)
    ax.set_xticks(list(decades.ticks()), list(decades.ticks().values()))
    ax.set_xlim(*decades.ends())
    by = [
        "" if rows.loc[name, "normalizer"] == "none" else f"per {parity.singular(rows.loc[name, 'normalizer'])}"
        for name in names
    ]
    first = level == table["level"].iloc[0]
    ax.set_yticks(
        range(len(names)), [f"{name}  {one}" for name, one in zip(names, by, strict=True)] if first else by, fontsize=8
    )
    ax.set_ylim(len(names) - 0.4, -1.2)
    grid_across(ax)
    ax.set_xlabel("relative error in step 1, worst of all numbers of chunks")
    ax.set_title(f"Metrics, loss per {parity.singular(level)}")
