"""Devices and their owners over time, and below them the requests of each pipeline with the time that they waited."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from kit.draw.plots import Box, legend_of, marks_of
from kit.labs.share import tables
from kit.labs.share.pictures.lanes import (
    BETWEEN,
    HATCH,
    PALE,
    Loop,
    Painter,
    lanes_axis,
    loop_of,
    owner_marks,
    some,
    time_axis,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kit.draw.plots import RunData, Scene
    from kit.draw.style import Theme

DEVICES = 16  # as many have lanes, the first ones
LANES = 4.6  # inches for all of them
HIGH = 0.4  # inches of one
STRIP = 0.07  # inches of a sync
WORDS = 0.15  # inches above a lane
LEGEND = 0.42
LANE = 0.17  # inches of a lane of requests
HEADS = 1.0  # inches of titles and of the axis


def devices(scene: Scene) -> None:
    """The devices, and the requests on the same axis of time."""
    loop, theme = loop_of(scene.data), scene.theme
    heights = (LEGEND, devices_height(loop), requests_height(loop))
    legend, upper, lower = scene.figure.subplots(3, 1, height_ratios=heights)
    draw_devices(upper, loop, theme)
    draw_requests(lower, loop, theme)
    time_axis(upper, loop, last=False)
    time_axis(lower, loop)
    style: dict[str, Any] = {"columnspacing": 1.1, "handlelength": 1.4}
    first = owner_marks(loop, theme)
    mark = {"facecolor": theme.faint, "linewidth": 0}
    second: dict[str, dict[str, Any]] = {
        "training": mark,
        "generating (lower)": {**mark, "alpha": 0.65},
        "owner without work": {**mark, "alpha": PALE},
        "falls asleep, wakes, gets weights": {**mark, "hatch": HATCH, "edgecolor": theme.paper, "alpha": 0.75},
        "sync of weights": {"color": theme.ink, "linewidth": 3},
    }
    legend_of(legend, marks_of(first), loc="upper left", **style)
    legend.add_artist(legend.get_legend())
    legend_of(legend, marks_of(second), loc="lower left", **style)


def devices_height(loop: Loop) -> float:
    count = min(loop.book.limit("devices", 0), DEVICES)
    return count * (lane_height(count) + WORDS + BETWEEN)


def lane_height(count: int) -> float:
    return min(HIGH, LANES / max(count, 1) - WORDS - BETWEEN)


def draw_devices(ax: Axes, loop: Loop, theme: Theme) -> None:
    """A lane each: who has it, and whether the owner trains, generates, moves in or out, or has nothing to do."""
    paint = Painter(ax, loop, theme)
    table = tables.uses(loop.book)
    number = loop.book.limit("devices", 0)
    shown = range(min(number, DEVICES))
    high = lane_height(len(shown))
    names: dict[float, str] = {}
    places: dict[int, float] = {}
    for device in shown:
        places[device] = device * (high + WORDS + BETWEEN) + WORDS
        names[places[device] + high / 2] = f"device {device}"
    boxes: dict[tuple[str, str], list[Box]] = defaultdict(list)
    for row in table[table["device"].isin(places) & (table["use"] != "idle")].to_dict("records"):
        top, left, right = places[row["device"]], row["left"], row["right"]
        low = top + (0.4 * high if row["use"] == "generating" else 0.0)
        boxes[row["pipeline"], row["use"]].append(Box(left, right, low, top + high))
        if row["use"] == "generating":  # the upper part belongs to it too
            boxes[row["pipeline"], "waiting"].append(Box(left, right, top, low))
    for (name, use), some_ in boxes.items():
        if use == "switching":
            paint.hatched(name, some_, gid=f"{name} {use}")
        else:
            paint.boxes(name, some_, alpha=PALE if use == "waiting" else 1.0, gid=f"{name} {use}")
    draw_steps(paint, places)
    strips = [
        Box(one.left, one.right, places[device] + high - STRIP, places[device] + high)
        for one in tables.syncs(loop.book)
        for device in one.devices
        if device in places
    ]
    paint.boxes("", strips, facecolor=theme.ink, zorder=3, gid="sync")
    lanes_axis(ax, names, devices_height(loop))
    ax.set_title(
        f"Phase {loop.phase}: owner of each device{some([str(one) for one in range(number)], DEVICES, 'devices')}"
    )


def draw_steps(paint: Painter, places: dict[int, float]) -> None:
    """The number of each step above its training, as far as there is room until the next one."""
    loop, calls = paint.loop, list(tables.training(paint.loop.book))
    begins: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for span in tables.spans(loop.book):
        if span.what != "trainer":
            continue
        mine = [one for one in calls if one.pipeline == span.pipeline and span.left <= one.left < span.right]
        for step in dict.fromkeys(one.step for one in mine):
            left = min(one.left for one in mine if one.step == step)
            for device in span.devices:
                begins[device].append((left, step))
    for device, some_ in begins.items():
        ends = [left for left, _ in some_[1:]] + [loop.ended]
        for (left, step), until in zip(some_, ends, strict=True):
            fitting = [text for text in (f"step {step}", str(step)) if loop.fits(text, until - left)]
            if device in places and fitting:
                paint.ax.text(loop.at(left), places[device] - 0.02, fitting[0], fontsize=7.5, va="bottom")


# -- requests --------------------------------------------------------------------------------------------------------------


def request_lanes(loop: Loop) -> dict[tuple[str, str], float]:
    """A lane for each pipeline and cluster that somebody asked for, by its top."""
    asked = {(one.pipeline, one.cluster) for one in tables.waits(loop.book)}
    order = {name: at for at, name in enumerate(loop.names)}
    keys = sorted(asked, key=lambda key: (order.get(key[0], len(order)), key[1] == "generation", key[1]))
    return {key: at * (LANE + BETWEEN) for at, key in enumerate(keys)}


def requests_height(loop: Loop) -> float:
    return len(request_lanes(loop)) * (LANE + BETWEEN) + 0.06


def draw_requests(ax: Axes, loop: Loop, theme: Theme) -> None:
    """A full bar is the wait, a line the lease. Hatched: all replicas sleep although there is work."""
    paint = Painter(ax, loop, theme)
    lanes = request_lanes(loop)
    waiting: dict[tuple[str, bool], list[Box]] = defaultdict(list)
    longest = max((one.right - one.left for one in tables.waits(loop.book)), default=0.0)
    for one in tables.waits(loop.book):
        top = lanes[one.pipeline, one.cluster]
        waiting[one.pipeline, one.kind == "suspended"].append(Box(one.left, one.right, top, top + LANE))
        if one.end == "granted" and one.kind not in ("suspended", "admission"):
            ax.plot(
                loop.at(one.right),
                top + LANE / 2,
                "|",
                color=theme.ink,
                markersize=9,
                markeredgewidth=1.3,
                zorder=4,
                gid="granted",
            )
    for (name, is_suspended), boxes in waiting.items():
        (paint.hatched if is_suspended else paint.boxes)(name, boxes, gid=f"{name} waits")
    held: dict[str, list[Box]] = defaultdict(list)
    for span in tables.spans(loop.book):
        cluster = "generation" if span.what.startswith("replica") else span.what
        if (span.pipeline, cluster) in lanes:
            top = lanes[span.pipeline, cluster] + LANE / 2
            held[span.pipeline].append(Box(span.left, span.right, top - 0.02, top + 0.02))
    for name, boxes in held.items():
        paint.boxes(name, boxes, zorder=1.5, gid=f"{name} has devices")
    names = {top + LANE / 2: f"{name} {cluster}" for (name, cluster), top in lanes.items()}
    lanes_axis(ax, names, requests_height(loop))
    ax.set_title(
        f"Requests: a bar waits (longest {longest * loop.scale:.3g} {loop.unit}; hatched: all replicas sleep, with work left), "
        "| is the grant, a line the lease"
    )


def height(data: RunData) -> float:
    loop = loop_of(data)
    return LEGEND + devices_height(loop) + requests_height(loop) + HEADS
