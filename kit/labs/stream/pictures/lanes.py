"""Versions over time: the requests of each replica as bars in the colour of their tokens' version, the trainer above, the buffer below."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from kit.draw.axes import Box, grid_across, legend_of, marks_of, paint_boxes
from kit.draw.plots import RunData, Scene
from kit.draw.style import LINES, Theme
from kit.labs.stream import tables
from kit.loop.messages import Row
from kit.results.units import time_unit
from kit.stream.ports import syncs

REPLICAS = 8  # as many have lanes, the first ones
LANE = (0.022, 0.11)  # inches for a request of a replica
LANES = 3.0  # inches for all of them
TRAINER = 0.42  # inches
BETWEEN = 0.16  # inches between two replicas
LEGEND = 0.45  # inches
BAND = 0.4  # opacity of a sync
LETTER = 0.062  # inches
ACROSS = 10.2  # inches of the axis of time


class Lanes(NamedTuple):
    """Where everything is: the requests of each replica below one another, in as few lanes as they need."""

    boxes: dict[int, list[Box]]  # by version
    joints: list[Box]  # between two parts of a sample
    given_up: list[tuple[float, float]]
    names: dict[float, str]  # of replicas, by the middle of their lanes
    bottom: float


def lanes(rows: Sequence[Row]) -> Lanes:
    by: dict[int, list[tables.Sample]] = defaultdict(list)
    for sample in tables.samples(rows):
        by[sample.replica].append(sample)
    packed = {replica: pack(by[replica]) for replica in sorted(by)[:REPLICAS]}
    total = sum(max(numbers) + 1 for numbers in packed.values())
    high = min(max(LANES / total, LANE[0]), LANE[1])
    boxes: dict[int, list[Box]] = defaultdict(list)
    joints, given_up, names = [], [], {}
    top = TRAINER + BETWEEN
    for replica, places in packed.items():
        for sample, place in zip(by[replica], places, strict=True):
            upper = top + place * high
            middle = upper + 0.43 * high
            for part in sample.parts:
                boxes[part.version].append(Box(part.left, part.right, upper, upper + 0.86 * high))
            for one, after in itertools.pairwise(sample.parts):
                joints.append(Box(one.right, after.left, middle - 0.1 * high, middle + 0.1 * high))
            if sample.end in ("failed", "cancelled"):
                given_up.append((sample.parts[-1].right, middle))
        end = top + (max(places) + 1) * high
        names[(top + end) / 2] = f"replica {replica}"
        top = end + BETWEEN
    return Lanes(dict(sorted(boxes.items())), joints, given_up, names, top - BETWEEN)


def pack(samples: Sequence[tables.Sample]) -> list[int]:
    """The lane of each sample: the first that is free when it begins."""
    free: list[float] = []
    found = []
    for sample in samples:
        left, right = sample.parts[0].left, sample.parts[-1].right
        place = next((place for place, until in enumerate(free) if until <= left), len(free))
        free[place : place + 1] = [right]
        found.append(place)
    return found


def versions(scene: Scene) -> None:
    """The trainer's lane, the requests of each replica, and the buffer below on the same axis of time."""
    theme, frame = scene.theme, scene.data.records
    phase = tables.shown(frame)
    rows = tables.ledger(frame, phase)
    drawn = lanes(rows)
    began, ended = rows[0].time, rows[-1].time
    scale, unit = time_unit(ended - began)
    legend, ax, below = scene.figure.subplots(3, 1, sharex=False, height_ratios=(LEGEND, drawn.bottom + 0.2, 1.1))
    for version, boxes in drawn.boxes.items():
        paint_boxes(ax, boxes, began, scale, facecolor=theme.colour(version), gid=f"version {version}")
    paint_boxes(ax, drawn.joints, began, scale, facecolor=theme.ink, gid="joints")
    if drawn.given_up:
        x, y = zip(*drawn.given_up, strict=True)
        ax.plot(
            [(one - began) * scale for one in x], y, "x", color=theme.ink, markersize=4, markeredgewidth=1.1, zorder=4
        )
    draw_trainer(ax, rows, theme, began, scale)
    draw_buffer(below, rows, theme, began, scale)
    bands(rows, (ax, below), theme, began, scale)
    ax.set_yticks([TRAINER / 2, *drawn.names], ["trainer", *drawn.names.values()])
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(drawn.bottom + 0.05, -0.2)
    for one in (ax, below):
        one.set_xlim(0, (ended - began) * scale)
    ax.set_xticklabels([])
    grid_across(ax)
    below.set_xlabel(f"time since the loop began [{unit}]")
    many = len({sample.replica for sample in tables.samples(rows)})
    some = f", the first {REPLICAS} of {many} replicas" if many > REPLICAS else ""
    ax.set_title(f"Phase {phase}: a bar is a sample, its colour the weight version of its tokens{some}")
    style: dict[str, Any] = {"columnspacing": 1.1, "handlelength": 1.2}
    colours, others = version_marks(rows, drawn, theme)
    legend_of(legend, marks_of(colours), loc="upper left", **style)
    legend.add_artist(legend.get_legend())  # two rows: one could be wider than the picture
    legend_of(legend, marks_of(others), loc="lower left", **style)


def version_marks(rows: Sequence[Row], drawn: Lanes, theme: Theme) -> tuple[dict[str, dict[str, Any]], ...]:
    """Every version with its colour, where versions that share one are named together; and all other marks."""
    made = {int(row.ids["version"]) for row in rows if row.name == "bumped"} | {*drawn.boxes}
    by: dict[str, list[int]] = defaultdict(list)
    for version in sorted(made):
        by[theme.colour(version)].append(version)
    colours: dict[str, dict[str, Any]] = {}
    for colour, some in by.items():
        colours[("" if colours else "version ") + few(some)] = {"facecolor": colour}
    hatched = {"facecolor": theme.faint, "hatch": "////", "edgecolor": theme.paper, "linewidth": 0}
    marks: dict[str, dict[str, Any]] = {"sync, from request to publication": {"facecolor": theme.faint, "alpha": BAND}}
    if drawn.joints:
        marks["one sample across a sync"] = {"color": theme.ink, "linewidth": 1.2}
    if any(one.part == "logprobs" for one in tables.work(rows)):
        marks["log-probabilities"] = hatched
    if drawn.given_up:
        marks["given up"] = {"color": theme.ink, "linestyle": "", "marker": "x", "markersize": 5}
    return colours, marks


def few(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) if len(numbers) < 4 else f"{numbers[0]}, {numbers[1]} ... {numbers[-1]}"


def draw_trainer(ax: Axes, rows: Sequence[Row], theme: Theme, began: float, scale: float) -> None:
    """A step from its first call to its last in the colour of the version that it makes; it is open while it waits for groups."""
    made = {int(row.ids["step"]): int(row.ids["version"]) for row in rows if row.name == "bumped"}
    by: dict[int, list[tables.Work]] = defaultdict(list)
    for one in tables.work(rows):
        by[one.step].append(one)
    inch = (rows[-1].time - began) / ACROSS
    ends = [*[calls[0].left for calls in by.values()][1:], rows[-1].time]
    hatched = {"hatch": "////", "edgecolor": theme.paper}
    for (step, calls), following in zip(by.items(), ends, strict=True):
        colour = theme.colour(made[step]) if step in made else theme.faint
        left, right = calls[0].left, calls[-1].right
        middle = (0.06 + TRAINER) / 2
        paint_boxes(ax, [Box(left, right, middle - 0.02, middle + 0.02)], began, scale, facecolor=colour)
        for part, look in (("training", {}), ("logprobs", hatched)):
            mine = [Box(one.left, one.right, 0.06, TRAINER) for one in calls if one.part == part]
            paint_boxes(ax, mine, began, scale, facecolor=colour, gid=f"step {step}", **look)
        whole = f"step {step}, version {made[step]}" if step in made else f"step {step} given up"
        fitting = [word for word in (whole, f"step {step}", str(step)) if len(word) * LETTER * inch < following - left]
        if fitting:
            ax.text((left - began) * scale, 0.03, fitting[0], fontsize=7.5, va="bottom")


def bands(rows: Sequence[Row], axes: Iterable[Axes], theme: Theme, began: float, scale: float) -> None:
    """Each sync as a band: it begins when the version is made, and waits for calls that are under way."""
    for span in syncs(rows):
        left, right = ((when - began) * scale for when in span)
        for ax in axes:
            ax.axvspan(left, right, color=theme.faint, alpha=BAND, linewidth=0.8, zorder=0.5, gid="sync")


def draw_buffer(ax: Axes, rows: Sequence[Row], theme: Theme, began: float, scale: float) -> None:
    """Places that complete and unfinished groups take, against the limits."""
    table, limits = tables.buffer(rows), tables.capacity(rows)
    x = (table["time"] - began) * scale
    ax.stackplot(
        x, table["complete"], table["unfinished"], step="post", linewidth=0,
        colors=[theme.ink, theme.faint], alpha=0.7, labels=["complete", "unfinished"], zorder=2,
    )  # fmt: skip
    top = float((table["complete"] + table["unfinished"]).max())
    if "places" in limits:
        top = max(top, limits["places"])
        ax.axhline(
            limits["places"],
            color=theme.bad,
            linewidth=1.4,
            linestyle=LINES[2],
            label=f"limit, {limits['places']} places",
        )
    ax.set_ylim(0, 1.5 * top)  # room for the legend
    ax.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    ax.set(ylabel="groups", title="Groups in the buffer")
    ax.legend(loc="upper left", ncols=3, columnspacing=1.1, handlelength=1.4)


def height(data: RunData) -> float:
    return lanes(tables.ledger(data.records, tables.shown(data.records))).bottom + 0.2 + LEGEND + 1.1 + 0.95
