"""Whole loops over the same work beside each other, and how long requests waited."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.draw.plots import grid_across
from kit.draw.style import LINES
from kit.labs.share import tables
from kit.labs.share.pictures.lanes import loop_of
from kit.results import NotMeasured
from kit.results.units import time_unit

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from kit.draw.plots import RunData, Scene
    from kit.draw.style import Theme

HEADS = 1.05
LOOP = {"shared": "shared: this config", "bound": "bound: arithmetic", "static": "static: half each"}


def has(data: RunData) -> bool:
    try:
        return len(tables.loops(data.records)) > 0
    except NotMeasured:
        return False


def loops(scene: Scene) -> None:
    left, right = scene.figure.subplots(1, 2, width_ratios=(5, 5))
    draw_loops(left, tables.loops(scene.data.records), scene.theme)
    draw_waits(right, scene)


def name_of(loop: str, known: str) -> str:
    words = LOOP.get(loop, loop)
    if loop == "serial":
        words = "serial: one after the other"
    return f"{words} (arithmetic)" if known == "arithmetic" and loop != "bound" else words


def draw_loops(ax: Axes, table: pd.DataFrame, theme: Theme) -> None:
    longest = float(table["seconds"].max())
    scale, unit = time_unit(longest)
    for place, row in enumerate(table.to_dict("records")):
        seconds = float(row["seconds"]) * scale
        calculated = row["known by"] == "arithmetic"
        ax.barh(place, seconds, 0.6, color=theme.faint if calculated else theme.series[2], zorder=2)
        compared = row["loop"] in ("shared", "serial", "static") and row["times bound"] > 0
        over = f", {row['times bound']:.2f} x bound" if compared else ""
        paper = {"facecolor": theme.paper, "edgecolor": "none", "pad": 0.8}
        ax.text(
            seconds + 0.02 * longest * scale,
            place,
            f"{seconds:.3g} {unit}{over}",
            va="center",
            fontsize=8.5,
            bbox=paper,
            zorder=4,
        )
    bound = table[table["loop"] == "bound"]["seconds"]
    if len(bound):
        ax.axvline(
            float(bound.iloc[0]) * scale, color=theme.bad, linewidth=1.2, linestyle=LINES[2], zorder=3, gid="bound"
        )
    ax.set_yticks(
        range(len(table)), [name_of(str(row["loop"]), str(row["known by"])) for row in table.to_dict("records")]
    )
    ax.set_ylim(max(len(table), 3) - 0.4, -0.6)
    ax.set_xlim(0, 1.45 * longest * scale)
    grid_across(ax)
    ax.set_xlabel(f"time [{unit}] (n = 1 each)")
    ax.set_title("Time of each loop over the same work")


def draw_waits(ax: Axes, scene: Scene) -> None:
    """The mean and the longest wait of each pipeline's requests, by kind."""
    loop, theme = loop_of(scene.data), scene.theme
    table = tables.requests(scene.data.records, loop.phase)
    longest = float(table["longest wait"].max())
    scale, unit = time_unit(longest)
    for place, row in enumerate(table.to_dict("records")):
        at = loop.names.index(row["pipeline"]) if row["pipeline"] in loop.names else len(loop.names)
        ax.barh(place, row["mean wait"] * scale, 0.6, color=theme.colour(at), zorder=2)
        ax.plot(
            [row["mean wait"] * scale, row["longest wait"] * scale],
            [place, place],
            color=theme.ink,
            linewidth=1.2,
            zorder=3,
        )
        ax.plot(row["longest wait"] * scale, place, "|", color=theme.ink, markersize=9, zorder=3)
        ax.text(row["longest wait"] * scale, place, f"  {row['requests']} x", va="center", fontsize=8.5)
    ax.set_yticks(range(len(table)), [f"{row['pipeline']} {row['kind']}" for row in table.to_dict("records")])
    ax.set_ylim(max(len(table), 3) - 0.4, -0.6)
    ax.set_xlim(0, max(1.2 * longest * scale, 1e-9))
    grid_across(ax)
    ax.set_xlabel(f"time [{unit}]: mean (bar) and longest (line)")
    ax.set_title("Waits for devices")


def height(data: RunData) -> float:
    rows = max(len(tables.loops(data.records)), len(tables.requests(data.records, loop_of(data).phase)), 3)
    return 0.3 * rows + HEADS
