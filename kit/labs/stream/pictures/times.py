"""Where the time of each step went, whole loops beside each other, and what was measured against the bound."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kit.draw.axes import grid_across, legend_of, marks_of, stack
from kit.labs.stream import tables
from kit.results.units import time_unit
from kit.stream.meter import PARTS

if TYPE_CHECKING:
    from collections.abc import Collection

    import pandas as pd
    from matplotlib.axes import Axes

    from kit.draw.plots import RunData, Scene
    from kit.draw.style import Theme

NAMED = 10  # steps that have numbers
MOST = 16  # steps that are drawn as bars of their own, the last ones
PART = {
    "training": (0, "training"),
    "logprobs": (3, "log-probabilities"),
    "sync": (2, "sync"),
    "exposed_generation": (1, "waiting for samples (exposed generation)"),
}
LOOP = {
    "plain": "plain: generate, then train",
    "lockstep": "lockstep: staleness 0",
    "stream": "stream: this config",
    "bound": "bound: simulated",
}


def looks(theme: Theme) -> dict[str, dict[str, Any]]:
    """The parts of the time in their colours, by column."""
    return {part: {"facecolor": theme.series[PART[part][0]], "linewidth": 0} for part in PARTS}


def part_legend(ax: Axes, theme: Theme) -> None:
    legend_of(ax, marks_of({PART[part][1]: look for part, look in looks(theme).items()}), columnspacing=1.1)


def times(scene: Scene) -> None:
    """Every step by part, and beside it whole loops over the same work."""
    theme, frame = scene.theme, scene.data.records
    axes = scene.figure.subplot_mosaic(
        [["legend", "legend"], ["steps", "loops"]], height_ratios=(0.1, 1), width_ratios=(6, 5)
    )
    part_legend(axes["legend"], theme)
    draw_steps(axes["steps"], tables.steps(frame, tables.shown(frame) or ""), theme)
    draw_loops(axes["loops"], tables.loops(frame), theme)


def whole_numbers(ax: Axes, numbers: Collection[int]) -> None:
    """An axis of bars at whole numbers. A few bars are not as wide as the plot."""
    low, high = min(numbers), max(numbers)
    every = math.ceil((high - low + 1) / NAMED)
    ax.set_xticks(range(low, high + 1, every))
    ax.set_xlim(low - 0.8, max(high, low + 3) + 0.8)


def draw_steps(ax: Axes, table: pd.DataFrame, theme: Theme) -> None:
    table = table.iloc[-MOST:]
    scale, unit = time_unit(float(table["total"].max()))
    for row in table.to_dict("records"):
        top = stack(ax, row["step"], 0.7, [(row[part] * scale, look) for part, look in looks(theme).items()])
        share = row["exposed_generation"] / row["total"] if row["total"] else 0.0
        ax.text(row["step"], top, f"{share:.0%}", ha="center", va="bottom", fontsize=7.5)
    ax.set_ylim(0, 1.15 * float(table["total"].max()) * scale)
    whole_numbers(ax, table["step"])
    ax.set_xlabel("step (n = 1 each)")
    ax.set_ylabel(f"time [{unit}]")
    ax.set_title("Time of each step, and the share of waiting")


def draw_loops(ax: Axes, table: pd.DataFrame, theme: Theme) -> None:
    longest = float(table["total"].max())
    scale, unit = time_unit(longest)
    for place, row in enumerate(table.to_dict("records")):
        left = 0.0
        for part, look in looks(theme).items():
            ax.barh(place, row[part] * scale, 0.6, left=left, zorder=2, **look)
            left += row[part] * scale
        ax.text(left, place, f" {left:.3g} {unit}", va="center", fontsize=8.5)
    ax.set_yticks(range(len(table)), [LOOP[loop] for loop in table["loop"]])
    ax.set_ylim(max(len(table), 3) - 0.4, -0.6)
    ax.set_xlim(0, 1.22 * longest * scale)
    grid_across(ax)
    ax.set_xlabel(f"time [{unit}] (n = 1 each)")
    ax.set_title("Time of each loop over the same groups")


def bound(scene: Scene) -> None:
    """Speed and waiting, each beside that of the simulated loop with the same durations."""
    left, right = scene.figure.subplots(1, 2, width_ratios=(4, 6))
    frame, theme = scene.data.records, scene.theme
    table = {str(row["metric"]): row for row in tables.bound(frame).to_dict("records")}
    speed, waiting = table["steps_per_second"], table["exposed_generation"]
    looks = {"measured": theme.series[0], "bound": theme.faint}
    for place, (name, colour) in enumerate(looks.items()):
        reached = float(speed[name])
        left.barh(place, reached, 0.6, color=colour, zorder=2)
        left.text(reached, place, f" {reached:.3g}", va="center", fontsize=8.5)
    left.set_yticks(range(len(looks)), ["measured", "bound: simulated"])
    left.set_ylim(len(looks) - 0.4, -0.6)
    left.set_xlim(0, 1.2 * max(float(speed[name]) for name in looks))
    grid_across(left)
    left.set_xlabel("steps per second")
    left.set_title("Measured against bound")
    waits = {name: tables.steps(frame, phase) for name, phase in (("measured", "stream"), ("bound", "bound"))}
    scale, unit = time_unit(max(float(one["exposed_generation"].max()) for one in waits.values()))
    for side, (name, steps) in zip((-0.2, 0.2), waits.items(), strict=True):
        some = steps.iloc[-MOST:]
        label = f"{name}: {float(waiting[name]) * scale:.3g} {unit}"
        right.bar(
            some["step"] + side, some["exposed_generation"] * scale, 0.4, color=looks[name], zorder=2, label=label
        )
    whole_numbers(right, waits["measured"].iloc[-MOST:]["step"])
    right.set_ylim(0, 1.3 * right.get_ylim()[1])
    right.set_xlabel("step")
    right.set_ylabel(f"time [{unit}]")
    right.set_title("Exposed generation of each step")
    right.legend(loc="upper right", ncols=2)


def bounded(data: RunData) -> bool:
    return bool(((data.records["phase"] == "bound") & (data.records["metric"] == "steps_per_second")).any())
