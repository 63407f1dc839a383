"""Lanes over time: a lane for each rank, replica or device, with boxes for what it did and marks for what happened."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.ticker import AutoLocator

from kit.draw.chart import (
    FRAME,
    Chart,
    Mark,
    Scale,
    axes_width,
    column,
    draw_bands,
    grid_across,
    parts_of,
    patches,
    scaled,
    strokes,
    with_unit,
)
from kit.draw.style import Look, Theme, looks_of

BETWEEN = 0.08  # inches between two lanes
LINE = 0.15  # inches of words above a lane
SMALL = 0.06  # inches of a letter of the words in lanes
LONG = 28  # letters in a line of words
MOMENTS = {"tick": "|", "cross": "x"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Lanes(Chart):
    """A box from `left` to `right` (seconds), or a moment at `left`, for each row of a `lane`. Its `kind` is the colour, and the rest of
    the look unless it has a `state`.

    Columns that rows may have: `low` and `high` are the box's place in its lane, from 0 at the top to 1; `tall` is the height of the lane
    in inches and `gap` the room above it. `words` are written above the lane where the row begins, or into its box; of alternatives,
    separated by "|", the first that fits. Attrs: `bands` (left, right) go through all lanes; the axis ends at `ended` or later.
    """

    lane: float = 0.3  # inches
    most: float = 4.6  # inches of all lanes together that have no `tall`

    def inches(self, rows: pd.DataFrame) -> float:
        return max(top + tall for top, tall in self._places(self._complete(rows)).values()) + FRAME

    def draw(self, ax: Axes, table: pd.DataFrame, marks: Sequence[Mark], scale: Scale, theme: Theme) -> list[Any]:  # noqa: ARG002
        rows, table = table, self._complete(table)
        lanes = self._places(table)
        bottom = max(top + tall for top, tall in lanes.values())
        factor, unit = scaled("s", float(rows.attrs.get("ended", rows["right"].max())))
        table["left"], table["right"] = table["left"] * factor, table["right"] * factor
        top, tall = (table["lane"].map({name: place[index] for name, place in lanes.items()}) for index in (0, 1))
        table["top"], table["upper"], table["lower"] = top, top + table["low"] * tall, top + table["high"] * tall

        for (kind, state), part in table.groupby(["kind", "state"], sort=False, observed=True):
            draw_boxes(ax, part, part["look"].iloc[0], theme, name=f"{kind} {state}".strip())
        left = min(0.0, table["left"].min())
        ended = max(rows.attrs.get("ended", 0.0) * factor, table["right"].max(), 1e-9)
        ax.set_xlim(left, write_words(ax, table, left, ended))
        ax.xaxis.set_major_locator(TicksUntil(ended))
        draw_bands(ax, rows, factor, theme)
        ax.set_ylim(bottom + 0.05, -0.02)
        ax.set_yticks([top + tall / 2 for top, tall in lanes.values()], list(lanes))
        ax.tick_params(axis="y", length=0)
        grid_across(ax)
        ax.set_xlabel(with_unit(self.about, unit) if self.about else "")
        return [mark_of(look, theme) for look in self._looks(rows).values() if look.listed]

    def _looks(self, rows: pd.DataFrame) -> dict[str, Look]:
        states = column(rows, "state").replace("", None).dropna()
        return looks_of(parts_of(rows["kind"]), self.looks) | looks_of(states, self.looks)

    def _complete(self, rows: pd.DataFrame) -> pd.DataFrame:
        """The rows with every column, and with each row's look: of a kind with a state the colour, else all of it."""
        defaults: dict[str, Any] = {"state": "", "words": "", "low": 0.0, "high": 1.0}
        table = rows.reset_index(drop=True)
        table = table.assign(**{name: column(table, name, value).fillna(value) for name, value in defaults.items()})
        looks = self._looks(table)
        pairs = zip(table["kind"], table["state"], strict=True)
        rows_looks = [
            replace(looks[state], colour=looks[kind].colour) if state else looks[kind] for kind, state in pairs
        ]
        table["look"] = pd.Series(rows_looks, table.index)
        table["where"] = [
            place_of_words(look) if words else "" for look, words in zip(table["look"], table["words"], strict=True)
        ]
        return table

    def _places(self, table: pd.DataFrame) -> dict[str, tuple[float, float]]:
        """The top of each lane and its height, in inches from the top."""
        lanes = table.assign(tall=column(table, "tall", np.nan), gap=column(table, "gap", np.nan)).groupby(
            "lane", sort=False
        )
        above = lanes["where"].agg(lambda where: "above" in set(where))
        gap = lanes["gap"].max().fillna(BETWEEN + LINE * above)
        fitting = (self.most - gap.sum()) / len(gap)
        tall = lanes["tall"].max().fillna(max(min(self.lane, fitting), 0.05))
        tops = (tall + gap).cumsum() - tall
        return {str(lane): (float(tops[lane]), float(tall[lane])) for lane in tall.index}


class TicksUntil(AutoLocator):
    """Ticks up to the end of the run: beyond it are only words."""

    def __init__(self, end: float) -> None:
        super().__init__()
        self.end = end

    def tick_values(self, vmin: float, vmax: float) -> list[float]:
        return [tick for tick in super().tick_values(vmin, vmax) if tick <= self.end]


def place_of_words(look: Look) -> str:
    return "inside" if look.inside else "after" if look.shape == "words" else "above"


def draw_boxes(ax: Axes, table: pd.DataFrame, look: Look, theme: Theme, *, name: str) -> None:
    """Boxes of one look as one collection, since a run may have thousands; or moments."""
    if look.shape in MOMENTS:
        middle, mark = (table["upper"] + table["lower"]) / 2, MOMENTS[look.shape]
        ax.plot(
            table["left"],
            middle,
            mark,
            color=theme.of(look.colour),
            markersize=8,
            markeredgewidth=1.2,
            zorder=4,
            gid=name,
        )
    elif look.shape == "box":
        sides = (table[side].to_numpy() for side in ("left", "right", "upper", "lower"))
        left, right, upper, lower = sides
        corners = np.stack([np.stack([left, right, right, left], -1), np.stack([upper, upper, lower, lower], -1)], -1)
        frame = {"facecolor": "none", "edgecolor": theme.of(look.colour), "linewidth": 1.8, "zorder": 3}
        ax.add_collection(
            PolyCollection([*corners], gid=name, **({"zorder": 2} | look.face(theme) | (frame if look.hollow else {})))
        )


def write_words(ax: Axes, table: pd.DataFrame, left: float, ended: float) -> float:
    """Words above lanes, inside boxes and after them; returns where the axis ends so that they fit."""
    over, inside, after = (table[table["where"] == where] for where in ("above", "inside", "after"))
    lanes = [lane.sort_values("left") for _, lane in over.groupby("lane", sort=False)]
    right = ended
    for _ in range(3):  # the last words need room, which makes all others narrower
        letter = SMALL * (right - left) / axes_width(ax)
        written = [merged_labels(lane, right, letter) for lane in lanes]
        reach = [x + wide(words) * letter for x, words in (lane[-1] for lane in written)]
        reach += [x + (len(words) + 2) * letter for x, words in zip(after["right"], after["words"], strict=True)]
        right = max([ended, *reach])
    for lane, words in zip(lanes, written, strict=True):
        for x, text in words:
            ax.text(x, lane["top"].iloc[0] - 0.02, folded_label(text), fontsize=7.5, va="bottom", linespacing=1.0)
    for row in inside.to_dict("records"):
        room, middle = row["right"] - row["left"], (row["left"] + row["right"]) / 2
        if len(text := fitting(row["words"], room, letter)) * letter < room:
            y = (row["upper"] + row["lower"]) / 2
            ax.text(middle, y, text, fontsize=7.5, ha="center", va="center", zorder=5)
    for row in after.to_dict("records"):
        ax.text(row["right"] + letter, (row["upper"] + row["lower"]) / 2, row["words"], fontsize=8.5, va="center")
    return float(right)


def merged_labels(lane: pd.DataFrame, right: float, letter: float) -> list[tuple[float, str]]:
    """Where the words above a lane are written: each at its place, but those that would run into the ones before are joined to them."""
    written: list[tuple[float, str]] = []
    rooms = zip(lane["left"], lane["words"], [*lane["left"].iloc[1:], right], strict=True)
    for x, words, until in rooms:
        text = fitting(words, until - x, letter)
        if written and x < written[-1][0] + (wide(written[-1][1]) + 1) * letter:
            written[-1] = written[-1][0], f"{written[-1][1]}, {text}"
        else:
            written.append((x, text))
    return written


def fitting(words: str, room: float, letter: float) -> str:
    """The first of the alternatives that fits, else the last."""
    alternatives = words.split("|")
    return next((text for text in alternatives if (len(text) + 1) * letter <= room), alternatives[-1])


def folded_label(words: str) -> str:
    return textwrap.fill(words, max(LONG, len(words) // 2 + 9))


def wide(words: str) -> int:
    return max(map(len, folded_label(words).split("\n")))


def mark_of(look: Look, theme: Theme) -> Any:
    if look.shape in MOMENTS:
        return strokes({"": replace(look, marker=MOMENTS[look.shape], line=None)}, theme)[0]
    return patches({"": look}, theme)[0]
