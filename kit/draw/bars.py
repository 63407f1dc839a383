"""Many bars on one axis of time: as one collection, since a run may have thousands."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection


class Box(NamedTuple):
    """A bar: its ends in seconds, and its place from the top in inches."""

    left: float
    right: float
    top: float
    bottom: float


def paint_boxes(ax: Axes, boxes: Iterable[Box], began: float, scale: float, **look: Any) -> None:
    corners = [
        [
            ((x - began) * scale, y)
            for x, y in ((b.left, b.top), (b.right, b.top), (b.right, b.bottom), (b.left, b.bottom))
        ]
        for b in boxes
    ]
    ax.add_collection(PolyCollection(corners, **{"linewidth": 0, "zorder": 2, **look}), autolim=False)
