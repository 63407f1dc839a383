"""Runs compared with the first of them: what changed most, as the medians and spreads of both and their ratio."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from kit.draw.axes import grid_across
from kit.draw.plots import Picture, message
from kit.draw.style import MARKERS, Theme, theme
from kit.errors import BadInput
from kit.results import Run, compare
from kit.results.comparison import labelled, told, warnings
from kit.results.frames import labels
from kit.results.units import amount, counted, samples

ROWS = 14
LETTERS = 130  # that fit into a row of the legend
EVEN = 1.02  # a ratio below it counts as no change


def plot_against(runs: Sequence[Run], *, theme_name: str = "light", table: pd.DataFrame | None = None) -> Picture:
    """The others are compared with the first run. `table` is what `compare(runs)` returned, if that is known."""
    if len({run.id for run in runs}) < 2:
        raise BadInput("a comparison needs at least two different runs")
    look = theme(theme_name)
    shown = most(compare(runs) if table is None else table, ROWS)
    with mpl.rc_context(look.rc()):
        others = labelled(runs)
        first = others.pop(runs[0].id)
        if shown.empty:
            return message(f"nothing that both measured changed by more than {EVEN - 1:.0%} against {first}", look)
        beside = max(
            1, min(3, len(others), LETTERS // max(map(len, others.values()), default=1))
        )  # names in a row of the legend
        warned = [f"Warning: {why}" for why in warnings(runs)]
        picture = Picture(
            1.5
            + 0.2 * (len(warned) + math.ceil(len(others) / beside))
            + (0.08 + 0.18 * len(others)) * shown["place"].nunique()
        )
        draw(picture.subplots(), shown, others, look, beside)
        picture.suptitle(
            "\n".join(
                [f"{runs[0].lab} · what changed most against {first} · {counted(len(others), 'other run')}", *warned]
            ),
            x=0.01,
            ha="left",
            fontsize=11.5,
        )
    return picture


def most(table: pd.DataFrame, rows: int) -> pd.DataFrame:
    """The phases and metrics that changed most, with their place; of each run the rank where it did. What has no ratio is left out."""
    table = told(table)
    table = table[(table["found_in"] == "both") & (table["base"] > 0) & (table["value"] > 0)]
    table = table.assign(metric=labels(table), apart=table["ratio"].where(table["ratio"] >= 1, 1 / table["ratio"]))
    table = table.sort_values("apart", ascending=False, kind="stable").drop_duplicates(["phase", "metric", "run"])
    names = table["phase"] + "  " + table["metric"]
    places = {name: place for place, name in enumerate(names[table["apart"] > EVEN].unique()[:rows])}
    return table.assign(name=names, place=names.map(places)).dropna(subset="place")


def draw(ax: Axes, shown: pd.DataFrame, others: Mapping[str, str], look: Theme, beside: int) -> None:
    """A line at 1 is the first run, with its own spread in grey. A bar is from the least to the greatest that the spreads allow."""
    ends = [1.0]
    for place, mine in shown.groupby("place"):
        half = float((mine["base_spread"] / mine["base"]).max()) / 2
        if half > 0:
            own = [max(1 - half, 0.1), 1 + half]
            ax.plot(
                own, [float(str(place))] * 2, color=look.faint, linewidth=9, alpha=0.25, solid_capstyle="butt", zorder=1
            )
    lanes = {run: lane for lane, run in enumerate(others)}
    rows: Iterable[Any] = shown.itertuples()
    for row in rows:
        lane = lanes[row.run]
        y = row.place + (lane - (len(others) - 1) / 2) * 0.6 / len(others)
        half = row.spread / 2 / row.base
        span = [max(row.ratio - half, row.ratio / 10), row.ratio + half]
        ax.plot(span, [y, y], color=look.colour(lane), linewidth=5, alpha=0.3, solid_capstyle="round")
        style: dict[str, Any] = {"color": look.colour(lane), "markersize": 6, "markeredgecolor": look.paper}
        ax.plot(row.ratio, y, MARKERS[lane % len(MARKERS)], **style)
        words = f"{amount(row.base, row.unit)} → {amount(row.value, row.unit)}, rank {row.rank}"
        ax.text(1.01, y, words, transform=ax.get_yaxis_transform(), va="center", fontsize=8, color=look.ink)
        ends += span
    ax.axvline(1, color=look.ink, linewidth=1.2)
    ax.set_xscale("log")
    margin = max(max(ends) / min(ends), 1.5) ** 0.04
    ax.set_xlim(min(ends) / margin, max(ends) * margin)
    ax.xaxis.set_major_locator(FixedLocator(ratios(*ax.get_xlim())))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g} x")
    names = shown.drop_duplicates("place").sort_values("place")["name"]
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    grid_across(ax)
    numbers = samples({*shown["n"], *shown["base_n"]})
    ax.set_xlabel(
        f"ratio of medians over cycles ({numbers}); bars: their spread around it; grey: that of the first run"
    )
    if len(others) == 1:
        ax.set_title(next(iter(others.values())))
        return
    for lane, words in enumerate(others.values()):
        ax.plot([], [], MARKERS[lane % len(MARKERS)], color=look.colour(lane), label=words)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=beside, handletextpad=0.3, borderaxespad=0.3)


def ratios(low: float, high: float) -> list[float]:
    """Ticks at 1 and at round ratios to both sides of it, far enough apart for their words."""
    apart = math.log(high / low) / 12
    found = [1.0]
    for step in (1.1, 1.25, 1.5, 2, 3, 5, *(10.0**power for power in range(1, 16))):
        if math.log(step / max(found)) >= apart:
            found = [1 / step, *found, step]
    return [float(f"{tick:.3g}") for tick in found if low <= tick <= high]
