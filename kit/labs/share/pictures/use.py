"""What each device was used for, over time and in total."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from kit.draw.plots import Box, grid_across, legend_of, marks_of, paint_boxes
from kit.labs.share import tables
from kit.labs.share.pictures.lanes import BETWEEN, HATCH, PALE, Loop, loop_of, some, time_axis

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from kit.draw.plots import RunData, Scene
    from kit.draw.style import Theme

DEVICES = 8  # as many have lanes, the first ones
HIGH = 0.5  # inches of one
BINS = 80
LEGEND = 0.22
HEADS = 1.0
BY = {"cpu": "CPU time", "gpu": "GPU busy"}


def looks(loop: Loop, theme: Theme) -> dict[tuple[str, str], dict[str, Any]]:
    """How work of each pipeline and each other use is drawn, from the bottom of a lane up."""
    plain: dict[str, Any] = {"linewidth": 0}
    work = {
        (name, "working"): {**plain, "facecolor": theme.colour(at), "gid": f"{name} working"}
        for at, name in enumerate(loop.names)
    }
    return {
        **work,
        ("", "switching"): {
            "facecolor": theme.faint,
            "hatch": HATCH,
            "edgecolor": theme.paper,
            "alpha": 0.75,
            "linewidth": 0,
        },
        ("", "waiting"): {**plain, "facecolor": theme.faint, "alpha": PALE},
    }


def key_of(pipeline: str, use: str) -> tuple[str, str]:
    return (pipeline, "working") if use in ("training", "generating") else ("", use)


def utilisation(scene: Scene) -> None:
    loop, theme = loop_of(scene.data), scene.theme
    axes = scene.figure.subplot_mosaic(
        [["legend", "legend"], ["time", "total"]],
        height_ratios=(LEGEND, lanes_height(loop)),
        width_ratios=(7, 3),
    )
    kinds = looks(loop, theme)
    words = {"switching": "switching", "waiting": "owner without work"}
    marks = {words.get(use, f"pipeline {name}, working"): look for (name, use), look in kinds.items()}
    legend_of(axes["legend"], marks_of({word: without_gid(look) for word, look in marks.items()}), columnspacing=1.1)
    table = tables.uses(loop.book)
    draw_time(axes["time"], loop, table, kinds)
    paced = any(map(any, (scene.data.config.get(name, ()) for name in ("pace_ms", "train_pace_ms"))))
    measured = tables.utilisation(scene.data.records, loop.phase, paced=paced).set_index("device")
    draw_total(axes["total"], loop, table, kinds, measured)


def without_gid(look: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in look.items() if key != "gid"}


def shown(loop: Loop) -> range:
    return range(min(loop.book.limit("devices", 0), DEVICES))


def lanes_height(loop: Loop) -> float:
    return max(len(shown(loop)), 2) * (HIGH + BETWEEN)


def draw_time(ax: Axes, loop: Loop, table: pd.DataFrame, kinds: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Each device in a lane whose full height is all of the time."""
    edges = np.linspace(loop.began, loop.ended, BINS + 1)
    boxes: dict[tuple[str, str], list[Box]] = defaultdict(list)
    for device in shown(loop):
        mine = table[table["device"] == device]
        bottom = (device + 1) * (HIGH + BETWEEN) - BETWEEN
        reached = np.full(BINS, bottom)
        for kind in kinds:
            rows = mine[[key_of(str(one.pipeline), str(one.use)) == kind for one in mine.itertuples()]]
            share = np.zeros(BINS)
            for left, right in zip(rows["left"], rows["right"], strict=True):
                share += np.clip(np.minimum(right, edges[1:]) - np.maximum(left, edges[:-1]), 0, None)
            tops = reached - HIGH * share / np.diff(edges)
            for at in np.flatnonzero(share):
                boxes[kind].append(Box(float(edges[at]), float(edges[at + 1]), float(tops[at]), float(reached[at])))
            reached = tops
    for kind, look in kinds.items():
        paint_boxes(ax, boxes[kind], loop.began, loop.scale, **look)
    device_lanes(ax, loop)
    time_axis(ax, loop)
    many = [str(one) for one in range(loop.book.limit("devices", 0))]
    bin_ = (loop.ended - loop.began) / BINS * loop.scale
    ax.set_title(
        f"Utilisation of each device by its owner's work (bins of {bin_:.2g} {loop.unit}){some(many, DEVICES, 'devices')}"
    )


def draw_total(
    ax: Axes, loop: Loop, table: pd.DataFrame, kinds: dict[tuple[str, str], dict[str, Any]], measured: pd.DataFrame
) -> None:
    """The same over the whole loop, and beside it what the kernel or the driver says of the device."""
    total = loop.ended - loop.began
    for device in shown(loop):
        mine = table[table["device"] == device]
        place = device * (HIGH + BETWEEN) + HIGH / 2
        left, working = 0.0, 0.0
        for kind, look in kinds.items():
            rows = mine[[key_of(str(one.pipeline), str(one.use)) == kind for one in mine.itertuples()]]
            share = float((rows["right"] - rows["left"]).sum()) / total if total else 0.0
            ax.barh(place, 100 * share, 0.7 * HIGH, left=left, zorder=2, **without_gid(look))
            left += 100 * share
            working += 100 * share * (kind[1] == "working")
        used = measured.loc[device]
        more = "" if used["by"] == "work" else f",\n{100 * used['used']:.0f} % {BY[str(used['by'])]}"
        ax.text(101, place, f"{working:.0f} % at work{more}", va="center", fontsize=8.5)
    device_lanes(ax, loop, named=False)
    ax.set_xlim(0, 145)
    ax.set_xticks([0, 25, 50, 75, 100])
    grid_across(ax)
    ax.set_xlabel("share of the time [%]")
    ax.set_title("In total")


def device_lanes(ax: Axes, loop: Loop, *, named: bool = True) -> None:
    places = [device * (HIGH + BETWEEN) + HIGH / 2 for device in shown(loop)]
    ax.set_yticks(places, [f"device {device}" if named else "" for device in shown(loop)])
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(lanes_height(loop), -BETWEEN)


def height(data: RunData) -> float:
    return LEGEND + lanes_height(loop_of(data)) + HEADS
