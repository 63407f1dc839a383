"""The weight version of each trainer and each replica over time. A replica that sleeps has none."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from kit.draw.plots import Box, legend_of, marks_of
from kit.labs.share import tables
from kit.labs.share.pictures.lanes import (
    BETWEEN,
    HATCH,
    Loop,
    Painter,
    lanes_axis,
    loop_of,
    owner_marks,
    time_axis,
)

if TYPE_CHECKING:
    from kit.draw.plots import RunData, Scene

REPLICAS = 8  # of a pipeline, as many have lanes
LANE = 0.2  # inches
LEGEND = 0.22
HEADS = 1.0
EVEN, ODD = 0.75, 0.4  # opacity of versions in turn


class Stretch(NamedTuple):
    pipeline: str
    what: str
    version: int  # -1: it has no weights yet
    left: float
    right: float


def stretches(loop: Loop) -> list[Stretch]:
    """Which version was where: a trainer's from the step that made it, a replica's from its publication until it leaves."""
    found = []
    for name in loop.names:
        made = [
            (loop.began, 0),
            *((row.time, int(row["version"])) for row in loop.book.of("bumped") if row.who == name),
        ]
        ends = [when for when, _ in made[1:]] + [max(row.time for row in loop.book.rows if row.who == name)]
        found += [
            Stretch(name, "trainer", version, left, right) for (left, version), right in zip(made, ends, strict=True)
        ]
    published = tables.weights(loop.book)
    for span in tables.spans(loop.book):
        if span.state != "awake":
            continue
        mine = [one for one in published[span.pipeline, span.what] if span.left <= one[0] <= span.right]
        lefts = [span.left, *(when for when, _ in mine), span.right]
        versions = [-1, *(version for _, version in mine)]
        found += [
            Stretch(span.pipeline, span.what, version, left, right)
            for version, left, right in zip(versions, lefts, lefts[1:], strict=False)
        ]
    return found


def lanes(loop: Loop, found: list[Stretch]) -> dict[tuple[str, str], float]:
    """Each pipeline's trainer, then its replicas by number."""
    keys = {(one.pipeline, one.what) for one in found}
    tops: dict[tuple[str, str], float] = {}
    top = 0.0
    for name in loop.names:
        replicas = sorted((what for who, what in keys if who == name and what != "trainer"), key=number)
        for what in ("trainer", *replicas[:REPLICAS]):
            tops[name, what] = top
            top += LANE + BETWEEN
        top += BETWEEN
    return tops


def number(what: str) -> int:
    return int(what.rsplit(maxsplit=1)[-1])


def versions(scene: Scene) -> None:
    loop, theme = loop_of(scene.data), scene.theme
    found = stretches(loop)
    tops = lanes(loop, found)
    legend, ax = scene.figure.subplots(2, 1, height_ratios=(LEGEND, lanes_height(tops)))
    paint = Painter(ax, loop, theme)
    boxes: dict[tuple[str, bool], list[Box]] = defaultdict(list)
    bare: dict[str, list[Box]] = defaultdict(list)
    for one in found:
        if (one.pipeline, one.what) not in tops or one.right <= one.left:
            continue
        top = tops[one.pipeline, one.what]
        box = Box(one.left, one.right, top, top + LANE)
        if one.version < 0:
            bare[one.pipeline].append(box)
        else:
            boxes[one.pipeline, bool(one.version % 2)].append(box)
            text = f"v{one.version}" if loop.fits(f"v{one.version}", one.right - one.left) else str(one.version)
            paint.word(text, one.left, one.right, top + LANE / 2)
    for (name, odd), some in boxes.items():
        paint.boxes(name, some, alpha=ODD if odd else EVEN, gid=f"{name} versions")
    for name, some in bare.items():
        paint.hatched(name, some, gid=f"{name} without weights")
    names = {top + LANE / 2: f"{name} {what}" for (name, what), top in tops.items()}
    lanes_axis(ax, names, lanes_height(tops))
    time_axis(ax, loop)
    ax.set_title(f"Phase {loop.phase}: weight version of each trainer and each awake replica")
    hatched = {"facecolor": theme.faint, "hatch": HATCH, "edgecolor": theme.paper, "linewidth": 0}
    marks = {**owner_marks(loop, theme), "awake, without weights": hatched}
    legend_of(legend, marks_of(marks), columnspacing=1.1, handlelength=1.4)


def lanes_height(tops: dict[tuple[str, str], float]) -> float:
    return max(tops.values(), default=0.0) + LANE + BETWEEN


def height(data: RunData) -> float:
    loop = loop_of(data)
    return LEGEND + lanes_height(lanes(loop, stretches(loop))) + HEADS
