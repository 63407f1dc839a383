"""What the pictures on an axis of time share: the time of the loop, a lane for each thing, and the colours of pipelines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kit.draw.plots import grid_across, paint_boxes
from kit.labs.share import tables
from kit.results.units import time_unit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from matplotlib.axes import Axes

    from kit.draw.plots import Box, RunData
    from kit.draw.style import Theme
    from kit.share.books import Ledger

ACROSS = 9.8  # inches of the axis of time
LETTER = 0.062  # inches
BETWEEN = 0.07  # inches between two lanes
PALE = 0.3  # opacity of what somebody has and does not use
HATCH = "////"


class Loop(NamedTuple):
    """The loop that is drawn, its ledger, its ends in seconds, and the unit of its axis."""

    phase: str
    book: Ledger
    names: list[str]
    began: float
    ended: float
    scale: float
    unit: str

    def at(self, when: float) -> float:
        return (when - self.began) * self.scale

    def fits(self, text: str, seconds: float) -> bool:
        return len(text) * LETTER * (self.ended - self.began) < seconds * ACROSS


def loop_of(data: RunData) -> Loop:
    phase = tables.shown(data.records) or tables.SHARED
    book = tables.ledger(data.records, phase)
    began, ended = tables.ends(book)
    return Loop(phase, book, tables.pipelines(book), began, ended, *time_unit(ended - began))


class Painter:
    """Boxes in the colours of pipelines, collected by look so that each look is one collection."""

    def __init__(self, ax: Axes, loop: Loop, theme: Theme) -> None:
        self.ax = ax
        self.loop = loop
        self.theme = theme

    def colour(self, pipeline: str) -> str:
        names = self.loop.names
        return self.theme.colour(names.index(pipeline)) if pipeline in names else self.theme.faint

    def boxes(self, pipeline: str, boxes: Iterable[Box], **look: Any) -> None:
        given = {"facecolor": self.colour(pipeline), **look}
        paint_boxes(self.ax, boxes, self.loop.began, self.loop.scale, **given)

    def hatched(self, pipeline: str, boxes: Iterable[Box], **look: Any) -> None:
        self.boxes(pipeline, boxes, hatch=HATCH, edgecolor=self.theme.paper, alpha=0.75, **look)

    def word(self, text: str, left: float, right: float, y: float, **style: Any) -> None:
        """A text in the middle of a bar, if the bar is wide enough."""
        if self.loop.fits(text, right - left):
            middle = self.loop.at((left + right) / 2)
            self.ax.text(middle, y, text, **{"fontsize": 7.5, "ha": "center", "va": "center", "zorder": 5, **style})


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


def some(names: Sequence[str], most: int, noun: str) -> str:
    """What a title adds where not all have a lane."""
    return f", the first {most} of {len(names)} {noun}" if len(names) > most else ""
