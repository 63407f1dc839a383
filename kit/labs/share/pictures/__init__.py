"""The pictures of a share run: devices and their owners with requests, utilisation, versions, memory, and whole loops.

Colour is the pipeline in all of them. Those with lanes on an axis of time are in `lanes`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from kit.draw.plots import (
    Box,
    Pictures,
    Plot,
    RunData,
    Scene,
    Table,
    draw_limit,
    grid_across,
    legend_of,
    limit_of,
    marks_of,
    paint_boxes,
)
from kit.draw.style import LINES, Theme
from kit.labs.share import tables
from kit.labs.share.lab import MAIN
from kit.labs.share.pictures.lanes import (
    BETWEEN,
    HATCH,
    HEADS,
    LEGEND,
    PALE,
    Loop,
    devices,
    height_of_devices,
    height_of_versions,
    lanes_axis,
    loop_of,
    owner_marks,
    time_axis,
    versions,
)
from kit.results import NotMeasured, Verdict
from kit.results.records import flat
from kit.results.units import counted, size_unit, time_unit

KEYS = 0.22  # inches of a legend
BINS = 80
USED = 8  # at most as many devices have lanes of utilisation
LANE = 0.5  # inches of one
BY = {"cpu": "CPU time", "gpu": "GPU busy"}
FILLED = 4  # at most as many devices have a plot of memory
FILL = 1.15  # inches of one
MIB = 2**20

# -- utilisation -----------------------------------------------------------------------------------------------------------


def looks(loop: Loop, theme: Theme) -> dict[tuple[str, str], dict[str, Any]]:
    plain: dict[str, Any] = {"linewidth": 0}
    hatched = {"hatch": HATCH, "edgecolor": theme.paper, "alpha": 0.75}
    return {
        **{(name, "working"): {**plain, "facecolor": theme.colour(at)} for at, name in enumerate(loop.names)},
        ("", "switching"): {**plain, "facecolor": theme.faint, **hatched},
        ("", "waiting"): {**plain, "facecolor": theme.faint, "alpha": PALE},
    }


def utilisation(scene: Scene) -> None:
    loop, theme = loop_of(scene.data), scene.theme
    axes = scene.figure.subplot_mosaic(
        [["legend", "legend"], ["time", "total"]], height_ratios=(KEYS, lanes_height(loop)), width_ratios=(7, 3)
    )
    kinds = looks(loop, theme)
    words = {"switching": "switching", "waiting": "owner without work"}
    marks = {words.get(use, f"pipeline {name}, working"): look for (name, use), look in kinds.items()}
    legend_of(axes["legend"], marks_of(marks), columnspacing=1.1)
    table = tables.uses(loop.book)
    works = table["use"].isin(["training", "generating"])
    table["kind"] = [*zip(table["pipeline"].where(works, ""), table["use"].mask(works, "working"), strict=True)]
    draw_time(axes["time"], loop, table, kinds)
    paced = any(value for name, value in flat(scene.data.config).items() if name.endswith("pace_ms"))
    measured = tables.utilisation(scene.data.records, loop.phase, paced=paced).set_index("device")
    draw_total(axes["total"], loop, table, kinds, measured)


def middle(device: int) -> float:
    return device * (LANE + BETWEEN) + LANE / 2


def lanes_height(loop: Loop) -> float:
    return max(len(loop.devices(USED)), 2) * (LANE + BETWEEN)


def draw_time(ax: Axes, loop: Loop, table: pd.DataFrame, kinds: dict[tuple[str, str], dict[str, Any]]) -> None:
    """One lane per device; full height means busy all the time."""
    edges = np.linspace(loop.began, loop.ended, BINS + 1)
    boxes: dict[tuple[str, str], list[Box]] = defaultdict(list)
    for device in loop.devices(USED):
        reached = np.full(BINS, middle(device) + LANE / 2)
        for kind in kinds:
            share = np.zeros(BINS)
            rows = table[(table["device"] == device) & (table["kind"] == kind)]
            for left, right in zip(rows["left"], rows["right"], strict=True):
                share += np.clip(np.minimum(right, edges[1:]) - np.maximum(left, edges[:-1]), 0, None)
            tops = reached - LANE * share / np.diff(edges)
            for at in np.flatnonzero(share):
                boxes[kind].append(Box(float(edges[at]), float(edges[at + 1]), float(tops[at]), float(reached[at])))
            reached = tops
    for (name, use), look in kinds.items():
        paint_boxes(ax, boxes[name, use], loop.began, loop.scale, gid=f"{name} {use}", **look)
    lanes_axis(ax, {middle(device): f"device {device}" for device in loop.devices(USED)}, lanes_height(loop))
    time_axis(ax, loop)
    width = (loop.ended - loop.began) / BINS * loop.scale
    ax.set_title(
        f"Utilisation of each device by its owner's work (bins of {width:.2g} {loop.unit}){loop.first_of(USED)}"
    )


def draw_total(
    ax: Axes, loop: Loop, table: pd.DataFrame, kinds: dict[tuple[str, str], dict[str, Any]], measured: pd.DataFrame
) -> None:
    for device in loop.devices(USED):
        mine = table[table["device"] == device]
        shares = 100 * mine.groupby("kind")["seconds"].sum() / max(loop.ended - loop.began, 1e-9)
        left, working = 0.0, 0.0
        for kind, look in kinds.items():
            share = float(shares.get(kind, 0.0))
            ax.barh(middle(device), share, 0.7 * LANE, left=left, zorder=2, **look)
            left += share
            working += share * (kind[1] == "working")
        used = measured.loc[device]
        more = "" if used["by"] == "work" else f",\n{100 * used['used']:.0f} % {BY[str(used['by'])]}"
        ax.text(101, middle(device), f"{working:.0f} % at work{more}", va="center", fontsize=8.5)
    lanes_axis(ax, dict.fromkeys(map(middle, loop.devices(USED)), ""), lanes_height(loop))
    ax.set_xlim(0, 145)
    ax.set_xticks([0, 25, 50, 75, 100])
    grid_across(ax)
    ax.set_xlabel("share of the time [%]")
    ax.set_title("In total")


# -- memory ----------------------------------------------------------------------------------------------------------------


def memory(scene: Scene) -> None:
    """One plot per device: the memory of each pipeline above the minimum of each rank, which is its process without a model."""
    loop, theme = loop_of(scene.data), scene.theme
    table = tables.memory(scene.data.records, loop.phase)
    shown = loop.devices(FILLED)
    legend, *axes = scene.figure.subplots(len(shown) + 1, 1, height_ratios=(KEYS, *[FILL] * len(shown)))
    legend_of(legend, marks_of(owner_marks(loop, theme)), **LEGEND)
    parts = [levels(table[table["device"] == device], loop) for device in shown]
    noise = (limit_of(scene.verdict, "peak_fits") or 0.0) * MIB
    most = max(max(part.most, part.budget + noise) for part in parts)
    scale, unit = size_unit(most)
    for device, part, ax in zip(shown, parts, axes, strict=True):
        ax.stackplot(
            [loop.at(when) for when in part.at], *[stack * scale for stack in part.stacks], step="post", linewidth=0,
            colors=[theme.colour(place) for place in range(len(loop.names))], alpha=0.85, zorder=2,
        )  # fmt: skip
        limit = (part.budget + noise) * scale
        draw_limit(ax, limit, f"budget {limit:.4g} {unit}: maximum of one rank plus noise", theme)
        ax.set_ylim(0, 1.35 * most * scale)
        ax.set_ylabel(f"[{unit}]")
        many = "" if device else loop.first_of(FILLED)
        ax.set_title(
            f"Device {device}: resident bytes of its ranks above their minimum ({part.least * scale:.4g} {unit}){many}"
        )
        time_axis(ax, loop, last=device == shown[-1])


class Levels(NamedTuple):
    """Times; at each the bytes of each pipeline above the minimum of its ranks; the maximum of all pipelines together; the sum of the
    minimums; and the budget: the maximum of one rank."""

    at: list[float]
    stacks: list[Any]
    most: float
    least: float
    budget: float


def levels(table: pd.DataFrame, loop: Loop) -> Levels:
    least = table.groupby("who")["bytes"].min()
    above = table.assign(bytes=table["bytes"] - table["who"].map(least))
    last: dict[str, dict[str, float]] = {name: {} for name in loop.names}
    at: list[float] = []
    sums: list[list[float]] = []
    for row in above.to_dict("records"):
        last[row["pipeline"]][row["who"]] = row["bytes"]
        at.append(row["time"])
        sums.append([sum(mine.values()) for mine in last.values()])
    at += [max(loop.ended, *at[-1:])] if at else []
    stacks = np.array([*sums, *sums[-1:]]).reshape(len(at), len(loop.names)).T
    most = float(stacks.sum(axis=0).max(initial=1.0))
    return Levels(at, [*stacks], most, float(least.sum()), float(above["bytes"].max()) if len(above) else 0.0)


# -- loops -----------------------------------------------------------------------------------------------------------------


def loops(scene: Scene) -> None:
    left, right = scene.figure.subplots(1, 2, width_ratios=(5, 5))
    draw_loops(left, tables.loops(scene.data.records), scene.theme)
    draw_waits(right, scene)


def loops_height(data: RunData, _: Verdict) -> float:
    waits = tables.requests(data.records, loop_of(data).phase)
    return 0.3 * max(len(tables.loops(data.records)), len(waits), 3) + HEADS


LOOPS = {
    "shared": "shared: this config",
    "bound": "bound: arithmetic",
    "serial": "serial: one after the other",
    "static": "static: half each",
}


def draw_loops(ax: Axes, table: pd.DataFrame, theme: Theme) -> None:
    longest = float(table["seconds"].max())
    scale, unit = time_unit(longest)
    names = []
    for place, row in enumerate(table.to_dict("records")):
        seconds, loop, calculated = float(row["seconds"]) * scale, str(row["loop"]), row["known by"] == "arithmetic"
        names.append(LOOPS.get(loop, loop) + (" (arithmetic)" if calculated and loop != "bound" else ""))
        ax.barh(place, seconds, 0.6, color=theme.faint if calculated else theme.series[2], zorder=2)
        compared = loop in ("shared", "serial", "static") and row["times bound"] > 0
        text = f"{seconds:.3g} {unit}" + (f", {row['times bound']:.2f} x bound" if compared else "")
        paper = {"facecolor": theme.paper, "edgecolor": "none", "pad": 0.8}
        ax.text(seconds + 0.02 * longest * scale, place, text, va="center", fontsize=8.5, bbox=paper, zorder=4)
        if loop == "bound":
            ax.axvline(seconds, color=theme.bad, linewidth=1.2, linestyle=LINES[2], zorder=3, gid="bound")
    bars_axis(ax, names, 1.45 * longest * scale)
    ax.set_xlabel(f"time [{unit}] (n = 1 each)")
    ax.set_title("Time of each loop over the same work")


def draw_waits(ax: Axes, scene: Scene) -> None:
    loop, theme = loop_of(scene.data), scene.theme
    table = tables.requests(scene.data.records, loop.phase)
    scale, unit = time_unit(float(table["longest wait"].max()))
    for place, row in enumerate(table.to_dict("records")):
        at = loop.names.index(row["pipeline"]) if row["pipeline"] in loop.names else len(loop.names)
        mean, most = row["mean wait"] * scale, row["longest wait"] * scale
        ax.barh(place, mean, 0.6, color=theme.colour(at), zorder=2)
        ax.plot([mean, most], [place, place], color=theme.ink, linewidth=1.2, zorder=3)
        ax.plot(most, place, "|", color=theme.ink, markersize=9, zorder=3)
        ax.text(most, place, f"  {row['requests']} x", va="center", fontsize=8.5)
    names = [f"{row['pipeline']} {row['kind']}" for row in table.to_dict("records")]
    bars_axis(ax, names, max(1.2 * float(table["longest wait"].max()) * scale, 1e-9))
    ax.set_xlabel(f"time [{unit}]: mean (bar) and longest (line)")
    ax.set_title("Waits for devices")


def bars_axis(ax: Axes, names: Sequence[str], right: float) -> None:
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(max(len(names), 3) - 0.4, -0.6)
    ax.set_xlim(0, right)
    grid_across(ax)


# -- all of them -----------------------------------------------------------------------------------------------------------


def ready(data: RunData) -> bool:
    return bool(data.order) and tables.shown(data.records) is not None


def is_measured(make: Callable[[], pd.DataFrame]) -> bool:
    try:
        make()
    except NotMeasured:
        return False
    return True


def words(data: RunData) -> list[str]:
    config = data.config
    if "devices" not in config:  # another system's ledger
        return []
    loops = {name: loop for name, loop in config.items() if isinstance(loop, dict)}
    trains = ", ".join(f"{name} on {some(loop['train'])}" for name, loop in loops.items())
    steps = " and ".join(str(loop["steps"]) for loop in loops.values())
    return [
        config["size"], counted(config["devices"], "device"), f"training: {trains}",
        f"planner {config['planner']}", f"{steps} steps",
    ]  # fmt: skip


def some(numbers: Sequence[int]) -> str:
    whole = list(numbers) == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 2
    return f"{numbers[0]}-{numbers[-1]}" if whole else ",".join(map(str, numbers))


def seconds_in(*columns: str) -> dict[str, str]:
    return dict.fromkeys(columns, "s")


PICTURES = Pictures(
    plots={
        "devices": Plot("Devices, owners and requests", ready, height_of_devices, devices),
        "utilisation": Plot(
            "Utilisation of devices",
            ready,
            lambda data, _: KEYS + lanes_height(loop_of(data)) + HEADS,
            utilisation,
        ),
        "versions": Plot("Versions over time, by replica", ready, height_of_versions, versions),
        "device-memory": Plot(
            "Memory of devices",
            lambda data: is_measured(lambda: tables.memory(data.records, tables.shown(data.records) or MAIN)),
            lambda data, _: KEYS + FILL * len(loop_of(data).devices(FILLED)) + 0.75,
            memory,
            ("peak_fits",),
        ),
        "loops": Plot(
            "Loops and waits", lambda data: is_measured(lambda: tables.loops(data.records)), loops_height, loops
        ),
    },
    overview=(("devices",), ("utilisation",), ("versions",), ("device-memory",), ("loops",), ("verdict",)),
    words=words,
    ready=ready,
    tables={
        "leases": Table(
            "Devices and their owners",
            lambda run: tables.leases(run.frame()),
            "unused",
            seconds_in("seconds", *tables.USES[:-1], "unused"),
        ),
        "switches": Table(
            "Every switch",
            lambda run: tables.switches(run.frame()),
            "total",
            seconds_in("at", "shrink", "expand", "weights", "total"),
        ),
        "requests": Table(
            "Requests for devices",
            lambda run: tables.requests(run.frame()),
            "longest wait",
            seconds_in("mean wait", "longest wait", "waited"),
        ),
        "pipelines": Table(
            "Every pipeline",
            lambda run: tables.progress(run.frame()),
            "seconds",
            seconds_in("seconds", "alone", "device-seconds", "working", "switching", "waited"),
        ),
        "loops": Table("Loop by loop", lambda run: tables.loops(run.frame()), units=seconds_in("seconds")),
    },
)
