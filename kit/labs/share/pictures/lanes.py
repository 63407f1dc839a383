"""Pictures with lanes over time: devices with their owners and requests, and versions by replica.

Colour is the pipeline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from kit.draw.plots import Box, RunData, Scene, grid_across, legend_of, marks_of, paint_boxes
from kit.draw.style import Theme
from kit.labs.share import tables
from kit.labs.share.lab import MAIN
from kit.labs.share.ledgers import spans
from kit.results import Verdict
from kit.results.units import time_unit
from kit.share.books import DeskLedger

ACROSS = 9.8  # inches of the axis of time
LETTER = 0.062  # inches
BETWEEN = 0.07  # inches between two lanes
HEADS = 1.0  # inches of titles and of the axis
PALE = 0.3  # opacity of a device that its owner does not use
HATCH = "////"
LEGEND: dict[str, Any] = {"columnspacing": 1.1, "handlelength": 1.4}

DEVICES = 16  # at most as many devices have lanes
LANES = 4.6  # inches for all of them
HIGH = 0.4  # inches of one
STRIP = 0.07  # inches of a sync
WORDS = 0.15  # inches above a lane
LEGENDS = 0.42  # inches of two rows
REQUESTS = 0.17  # inches of a lane of requests

REPLICAS = 8  # at most as many replicas of a pipeline have lanes of versions
VERSIONS = 0.2  # inches of one
LEGEND_OF_VERSIONS = 0.22


class Loop(NamedTuple):
    phase: str
    book: DeskLedger
    names: list[str]
    began: float
    ended: float
    scale: float
    unit: str

    def at(self, when: float) -> float:
        return (when - self.began) * self.scale

    def fits(self, text: str, seconds: float) -> bool:
        return len(text) * LETTER * (self.ended - self.began) < seconds * ACROSS

    def devices(self, most: int) -> range:
        return range(min(self.book.limit("devices", 0), most))

    def first_of(self, most: int) -> str:
        """The addition to a title if not all devices have a lane."""
        count = self.book.limit("devices", 0)
        return f", the first {most} of {count} devices" if count > most else ""


def loop_of(data: RunData) -> Loop:
    phase = tables.shown(data.records) or MAIN
    book = tables.ledger(data.records, phase)
    began, ended = tables.ends(book)
    return Loop(phase, book, tables.pipelines(book), began, ended, *time_unit(ended - began))


class Painter:
    """Boxes in the colours of pipelines, collected by look so that each look is one collection."""

    def __init__(self, ax: Axes, loop: Loop, theme: Theme) -> None:
        self.ax = ax
        self.loop = loop
        self.theme = theme

    def boxes(self, pipeline: str, boxes: Iterable[Box], **look: Any) -> None:
        names = self.loop.names
        colour = self.theme.colour(names.index(pipeline)) if pipeline in names else self.theme.faint
        paint_boxes(self.ax, boxes, self.loop.began, self.loop.scale, **{"facecolor": colour, **look})

    def hatched(self, pipeline: str, boxes: Iterable[Box], **look: Any) -> None:
        self.boxes(pipeline, boxes, hatch=HATCH, edgecolor=self.theme.paper, alpha=0.75, **look)


def time_axis(ax: Axes, loop: Loop, *, last: bool = True) -> None:
    ax.set_xlim(0, max(loop.at(loop.ended), 1e-9))
    grid_across(ax)
    if last:
        ax.set_xlabel(f"time since the loop began [{loop.unit}]")
    else:
        ax.set_xticklabels([])


def lanes_axis(ax: Axes, names: Mapping[float, str], bottom: float) -> None:
    ax.set_yticks([*names], [*names.values()])
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(bottom, -0.06)


def owner_marks(loop: Loop, theme: Theme) -> dict[str, dict[str, Any]]:
    return {f"pipeline {name}": {"facecolor": theme.colour(at)} for at, name in enumerate(loop.names)}


# -- devices ---------------------------------------------------------------------------------------------------------------


def devices(scene: Scene) -> None:
    loop, theme = loop_of(scene.data), scene.theme
    legend, upper, lower = scene.figure.subplots(
        3, 1, height_ratios=(LEGENDS, devices_height(loop), requests_height(loop))
    )
    draw_devices(upper, loop, theme)
    draw_requests(lower, loop, theme)
    time_axis(upper, loop, last=False)
    time_axis(lower, loop)
    mark = {"facecolor": theme.faint, "linewidth": 0}
    second: dict[str, dict[str, Any]] = {
        "training": mark,
        "generating (lower)": {**mark, "alpha": 0.65},
        "owner without work": {**mark, "alpha": PALE},
        "falls asleep, wakes, gets weights": {**mark, "hatch": HATCH, "edgecolor": theme.paper, "alpha": 0.75},
        "sync of weights": {"color": theme.ink, "linewidth": 3},
    }
    legend_of(legend, marks_of(owner_marks(loop, theme)), loc="upper left", **LEGEND)
    legend.add_artist(legend.get_legend())
    legend_of(legend, marks_of(second), loc="lower left", **LEGEND)


def height_of_devices(data: RunData, _: Verdict) -> float:
    loop = loop_of(data)
    return LEGENDS + devices_height(loop) + requests_height(loop) + HEADS


def devices_height(loop: Loop) -> float:
    count = len(loop.devices(DEVICES))
    return count * (lane_height(count) + WORDS + BETWEEN)


def lane_height(count: int) -> float:
    return min(HIGH, LANES / max(count, 1) - WORDS - BETWEEN)


def draw_devices(ax: Axes, loop: Loop, theme: Theme) -> None:
    """One lane per device: its owner, and whether the owner trains, generates, moves in or out, or is idle."""
    paint = Painter(ax, loop, theme)
    table = tables.uses(loop.book)
    high = lane_height(len(loop.devices(DEVICES)))
    places = {device: device * (high + WORDS + BETWEEN) + WORDS for device in loop.devices(DEVICES)}
    boxes: dict[tuple[str, str], list[Box]] = defaultdict(list)
    for row in table[table["device"].isin(places) & (table["use"] != "idle")].to_dict("records"):
        top, left, right = places[row["device"]], row["left"], row["right"]
        low = top + (0.4 * high if row["use"] == "generating" else 0.0)
        boxes[row["pipeline"], row["use"]].append(Box(left, right, low, top + high))
        if row["use"] == "generating":  # the upper part belongs to it too
            boxes[row["pipeline"], "waiting"].append(Box(left, right, top, low))
    for (name, use), some in boxes.items():
        if use == "switching":
            paint.hatched(name, some, gid=f"{name} {use}")
        else:
            paint.boxes(name, some, alpha=PALE if use == "waiting" else 1.0, gid=f"{name} {use}")
    draw_steps(ax, loop, places)
    strips = [
        Box(left, right, places[device] + high - STRIP, places[device] + high)
        for some_devices, left, right in tables.syncs(loop.book)
        for device in some_devices
        if device in places
    ]
    paint.boxes("", strips, facecolor=theme.ink, zorder=3, gid="sync")
    lanes_axis(ax, {top + high / 2: f"device {device}" for device, top in places.items()}, devices_height(loop))
    ax.set_title(f"Phase {loop.phase}: owner of each device{loop.first_of(DEVICES)}")


def draw_steps(ax: Axes, loop: Loop, places: Mapping[int, float]) -> None:
    """The number of each step above its training, if there is room before the next one."""
    calls = list(tables.training(loop.book))
    begins: dict[int, dict[int, float]] = defaultdict(dict)  # of each step, by device
    for span in spans(loop.book):
        for call in calls if span.what == "trainer" else ():
            if call.pipeline == span.pipeline and span.left <= call.left < span.right:
                for device in {*span.devices} & {*places}:
                    begins[device].setdefault(call.step, call.left)
    for device, lefts in begins.items():
        for (step, left), until in zip(lefts.items(), [*[*lefts.values()][1:], loop.ended], strict=True):
            fitting = [text for text in (f"step {step}", str(step)) if loop.fits(text, until - left)]
            ax.text(loop.at(left), places[device] - 0.02, "".join(fitting[:1]), fontsize=7.5, va="bottom")


def request_lanes(loop: Loop) -> dict[tuple[str, str], float]:
    asked = {(one.pipeline, one.cluster) for one in tables.waits(loop.book)}
    order = {name: at for at, name in enumerate(loop.names)}
    keys = sorted(asked, key=lambda key: (order.get(key[0], len(order)), key[1] == "generation", key[1]))
    return {key: at * (REQUESTS + BETWEEN) for at, key in enumerate(keys)}


def requests_height(loop: Loop) -> float:
    return len(request_lanes(loop)) * (REQUESTS + BETWEEN) + 0.06


def draw_requests(ax: Axes, loop: Loop, theme: Theme) -> None:
    paint, lanes, waits = Painter(ax, loop, theme), request_lanes(loop), tables.waits(loop.book)
    waiting: dict[tuple[str, bool], list[Box]] = defaultdict(list)
    for one in waits:
        top = lanes[one.pipeline, one.cluster]
        waiting[one.pipeline, one.kind == "suspended"].append(Box(one.left, one.right, top, top + REQUESTS))
        if one.end == "granted" and one.kind not in ("suspended", "admission"):
            mark: dict[str, Any] = {
                "color": theme.ink,
                "markersize": 9,
                "markeredgewidth": 1.3,
                "zorder": 4,
                "gid": "granted",
            }
            ax.plot(loop.at(one.right), top + REQUESTS / 2, "|", **mark)
    for (name, is_suspended), boxes in waiting.items():
        (paint.hatched if is_suspended else paint.boxes)(name, boxes, gid=f"{name} waits")
    held: dict[str, list[Box]] = defaultdict(list)
    for span in spans(loop.book):
        cluster = "generation" if span.what.startswith("replica") else span.what
        if (span.pipeline, cluster) in lanes:
            top = lanes[span.pipeline, cluster] + REQUESTS / 2
            held[span.pipeline].append(Box(span.left, span.right, top - 0.02, top + 0.02))
    for name, boxes in held.items():
        paint.boxes(name, boxes, zorder=1.5, gid=f"{name} has devices")
    names = {top + REQUESTS / 2: f"{name} {cluster}" for (name, cluster), top in lanes.items()}
    lanes_axis(ax, names, requests_height(loop))
    longest = max((one.right - one.left for one in waits), default=0.0)
    ax.set_title(
        f"Requests: bar = wait (longest {longest * loop.scale:.3g} {loop.unit}; hatched: all replicas sleep with work left), "
        "| = grant, line = lease"
    )


# -- versions --------------------------------------------------------------------------------------------------------------


class Stretch(NamedTuple):
    pipeline: str
    what: str
    version: int  # -1: it has no weights yet
    left: float
    right: float


def stretches(loop: Loop) -> list[Stretch]:
    """Where each version was: on a trainer from the step that made it, on a replica from its publication until the replica leaves."""
    found: list[Stretch] = []

    def add(name: str, what: str, changes: Sequence[tuple[float, int]], ended: float) -> None:
        ends = [*(when for when, _ in changes[1:]), ended]
        found.extend(
            Stretch(name, what, version, left, end) for (left, version), end in zip(changes, ends, strict=True)
        )

    for name in loop.names:
        made = [(row.time, int(row["version"])) for row in loop.book.of("bumped") if row.who == name]
        add(name, "trainer", [(loop.began, 0), *made], max(row.time for row in loop.book.rows if row.who == name))
    published = tables.weights(loop.book)
    for span in spans(loop.book):
        if span.state == "awake":
            mine = [one for one in published[span.pipeline, span.what] if span.left <= one[0] <= span.right]
            add(span.pipeline, span.what, [(span.left, -1), *mine], span.right)
    return found


def version_lanes(loop: Loop, found: Iterable[Stretch]) -> dict[tuple[str, str], float]:
    keys = {(one.pipeline, one.what) for one in found if one.what != "trainer"}
    tops: dict[tuple[str, str], float] = {}
    top = 0.0
    for name in loop.names:
        replicas = sorted((what for who, what in keys if who == name), key=lambda what: int(what.split()[-1]))
        for what in ("trainer", *replicas[:REPLICAS]):
            tops[name, what] = top
            top += VERSIONS + BETWEEN
        top += BETWEEN
    return tops


def versions(scene: Scene) -> None:
    loop, theme = loop_of(scene.data), scene.theme
    found = stretches(loop)
    tops = version_lanes(loop, found)
    legend, ax = scene.figure.subplots(2, 1, height_ratios=(LEGEND_OF_VERSIONS, versions_height(tops)))
    paint = Painter(ax, loop, theme)
    boxes: dict[tuple[str, float], list[Box]] = defaultdict(list)  # by opacity, 0: without weights
    for one in found:
        if (one.pipeline, one.what) not in tops or one.right <= one.left:
            continue
        top = tops[one.pipeline, one.what]
        opacity = 0.0 if one.version < 0 else 0.4 if one.version % 2 else 0.75
        boxes[one.pipeline, opacity].append(Box(one.left, one.right, top, top + VERSIONS))
        fitting = [text for text in (f"v{one.version}", str(one.version)) if loop.fits(text, one.right - one.left)]
        if opacity and fitting:
            middle = loop.at((one.left + one.right) / 2)
            ax.text(middle, top + VERSIONS / 2, fitting[0], fontsize=7.5, ha="center", va="center", zorder=5)
    for (name, opacity), some in boxes.items():
        if opacity:
            paint.boxes(name, some, alpha=opacity, gid=f"{name} versions")
        else:
            paint.hatched(name, some, gid=f"{name} without weights")
    names = {top + VERSIONS / 2: f"{name} {what}" for (name, what), top in tops.items()}
    lanes_axis(ax, names, versions_height(tops))
    time_axis(ax, loop)
    ax.set_title(f"Phase {loop.phase}: weight version of each trainer and each awake replica")
    hatched = {"facecolor": theme.faint, "hatch": HATCH, "edgecolor": theme.paper, "linewidth": 0}
    legend_of(legend, marks_of({**owner_marks(loop, theme), "awake, without weights": hatched}), **LEGEND)


def versions_height(tops: Mapping[tuple[str, str], float]) -> float:
    return max(tops.values(), default=0.0) + VERSIONS + BETWEEN


def height_of_versions(data: RunData, _: Verdict) -> float:
    loop = loop_of(data)
    return LEGEND_OF_VERSIONS + versions_height(version_lanes(loop, stretches(loop))) + HEADS
