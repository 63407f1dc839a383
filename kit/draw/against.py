"""Runs compared with the first of them: what changed most, as the medians and spreads of both and their ratio."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kit.draw.axes import grid_across
from kit.draw.plots import Picture, message
from kit.draw.style import MARKERS, theme
from kit.errors import BadInput
from kit.results import compare
from kit.results.comparison import told
from kit.results.frames import labels
from kit.results.units import amount, counted, samples

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from kit.draw.style import Theme
    from kit.results import Run

ROWS = 14
EVEN = 1.02  # a ratio below it counts as no change


def plot_against(runs: Sequence[Run], *, theme_name: str = "light", table: pd.DataFrame | None = None) -> Picture:
    """The others are compared with the first run. `table` is what `compare(runs)` returned, if that is known."""
    if len({run.id for run in runs}) < 2:
        raise BadInput("a comparison needs at least two different runs")
    look = theme(theme_name)
    table = compare(runs) if table is None else table
    table = table.assign(metric=labels(table))
    shown = most(table, ROWS)
    with mpl.rc_context(look.rc()):
        if shown.empty:
            words = f"nothing that both measured changed by more than {EVEN - 1:.0%} against {runs[0].id}"
            return message(words, look)
        keys = list(dict.fromkeys(zip(shown["phase"], shown["metric"], shown["unit"], strict=True)))
        picture = Picture(1.5 + (0.08 + 0.18 * (len(runs) - 1)) * len(keys))
        draw(picture.subplots(), table, keys, runs, look)
        picture.suptitle(
            f"{runs[0].lab} · what changed most against {run_words(runs[0])} · {counted(len(runs) - 1, 'other run')}",
            x=0.01,
            ha="left",
            fontsize=11.5,
        )
    return picture


def most(table: pd.DataFrame, rows: int) -> pd.DataFrame:
    """The phases and metrics that changed most, each at the rank where it did; what has no ratio is in the table only."""
    table = told(table)
    both = table[(table["found_in"] == "both") & (table["base"] > 0) & (table["value"] > 0)]
    apart = both["ratio"].where(both["ratio"] >= 1, 1 / both["ratio"])
    both = both.assign(apart=apart)[apart > EVEN]
    both = both.sort_values("apart", ascending=False, kind="stable")
    return both.drop_duplicates(["phase", "metric", "run"]).drop_duplicates(["phase", "metric"]).head(rows)


def draw(ax: Axes, table: pd.DataFrame, keys: Sequence[tuple[str, str, str]], runs: Sequence[Run], look: Theme) -> None:
    """A line at 1 is the first run. A bar is from the least to the greatest that the spreads allow."""
    others = [run.id for run in runs[1:]]
    low, high = 1.0, 1.0
    numbers: set[int] = set()
    for place, (phase, metric, unit) in enumerate(keys):
        mine = table[(table["phase"] == phase) & (table["metric"] == metric) & (table["found_in"] == "both")]
        for lane, other in enumerate(others):
            rows = mine[(mine["run"] == other) & (mine["base"] > 0) & (mine["value"] > 0)]
            if rows.empty:
                continue
            row = rows.iloc[int(rows["ratio"].map(math.log).abs().to_numpy().argmax())]
            numbers |= {int(row["n"]), int(row["base_n"])}
            y = place + (lane - (len(others) - 1) / 2) * 0.6 / len(others)
            base, value, ratio = float(row["base"]), float(row["value"]), float(row["ratio"])
            half = float(row["spread"]) / 2 / base
            left, right = max(ratio - half, ratio / 10), ratio + half
            colour = look.colour(lane)
            ax.plot([left, right], [y, y], color=colour, linewidth=5, alpha=0.3, solid_capstyle="round")
            ax.plot(ratio, y, MARKERS[lane % len(MARKERS)], color=colour, markersize=6, markeredgecolor=look.paper)
            words = f"{amount(base, unit)} → {amount(value, unit)}, rank {row['rank']}"
            where = ax.get_yaxis_transform()
            ax.text(1.01, y, words, transform=where, va="center", fontsize=8, color=look.ink)
            low, high = min(low, left), max(high, right)
    base_spread(ax, table, keys, look)
    ax.axvline(1, color=look.ink, linewidth=1.2)
    ax.set_xscale("log")
    reach = max(high / low, 1.5)
    ax.set_xlim(low / reach**0.04, high * reach**0.04)
    ticks = ratios(*ax.get_xlim())
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} x"))
    ax.set_yticks(range(len(keys)), [f"{phase}  {metric}" for phase, metric, _ in keys])
    ax.set_ylim(len(keys) - 0.4, -0.6)
    grid_across(ax)
    ax.set_xlabel(
        f"ratio of medians over cycles ({samples(numbers)}); bars: their spread around it; grey: that of the first run"
    )
    if len(others) > 1:
        for lane, run in enumerate(runs[1:]):
            ax.plot([], [], MARKERS[lane % len(MARKERS)], color=look.colour(lane), label=run_words(run))
        ax.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=min(3, len(others)), handletextpad=0.3, borderaxespad=0.3
        )
    else:
        ax.set_title(run_words(runs[1]))


def base_spread(ax: Axes, table: pd.DataFrame, keys: Sequence[tuple[str, str, str]], look: Theme) -> None:
    """How far the first run is from its own median: a change within it may be none."""
    for place, (phase, metric, _) in enumerate(keys):
        rows = table[(table["phase"] == phase) & (table["metric"] == metric) & (table["base"] > 0)]
        half = float((rows["base_spread"] / rows["base"]).max()) / 2
        if half > 0:
            ends = [max(1 - half, 0.1), 1 + half]
            ax.plot(ends, [place, place], color=look.faint, linewidth=9, alpha=0.25, solid_capstyle="butt", zorder=1)


def ratios(low: float, high: float) -> list[float]:
    """Ticks at 1 and at round ratios to both sides of it, far enough apart for their words."""
    apart = math.log(high / low) / 12
    found = [1.0]
    for step in (1.1, 1.25, 1.5, 2, 3, 5, *(10.0**power for power in range(1, 16))):
        if math.log(step / max(found)) >= apart:
            found = [1 / step, *found, step]
    return [float(f"{tick:.3g}") for tick in found if low <= tick <= high]


def run_words(run: Run) -> str:
    return run.id + (f", fault {run.fault}" if run.fault else "")
