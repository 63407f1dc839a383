"""Levels by phase or by another place: stacked bars."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from kit.draw.chart import (
    LETTER,
    Chart,
    Mark,
    Scale,
    axes_width,
    column,
    draw_marks,
    grid_across,
    name_places,
    parts_of,
    patches,
    with_unit,
)
from kit.draw.style import LINES, Theme, looks_of

Place = tuple[str, Any]  # of a section
BAR = 0.72  # of the distance between two places
GAP = 0.35  # between two sections, in places
TICKS = 10  # places that have numbers
FEWEST = 4  # places on an axis: fewer bars are not as wide as the plot


@dataclass(frozen=True, kw_only=True, slots=True)
class Levels(Chart):
    """A bar at each `place`; rows of one place with another `side` stand beside each other.

    Its parts are the columns that `looks` names, from the bottom; or there is a row for each part, with its `kind` and `value`. Columns
    that rows may have: `section` is a stretch of the axis with a name; `mark` is a line across the bar, such as a peak, that `mark_word`
    names; `low` and `high` are the ends of a thin line, such as a range; `words` stand at the end of the bar; `tone` is a colour of the
    theme in place of the part's. Whole numbers keep their distance. With `across`, bars lie. Attrs: `edge` (place, words) is a limit
    between two places.
    """

    mark_word: str = ""
    across: bool = False

    def draw(self, ax: Axes, table: pd.DataFrame, marks: Sequence[Mark], scale: Scale, theme: Theme) -> list[Any]:
        columns = [name for name in (*self.looks, "value") if name in table]
        names = parts_of(table["kind"]) if "kind" in table else columns
        looks = looks_of(names, self.looks)
        table = table.assign(section=column(table, "section"), side=column(table, "side"), tone=column(table, "tone"))
        places = bar_places(list(table[["section", "place"]].itertuples(index=False, name=None)))
        sides = list(table["side"].unique())
        width = BAR / len(sides)
        at = [places[key] for key in zip(table["section"], table["place"], strict=True)]
        table["at"] = np.array(at) + (table["side"].map(sides.index) - (len(sides) - 1) / 2) * width
        bars = stack(table, names)

        for (kind, tone), part in bars.groupby(["kind", "tone"], sort=False):
            face = looks[str(kind)].face(theme) | ({"facecolor": theme.of(str(tone)), "hatch": "////"} if tone else {})
            if self.across:
                ax.barh(part["at"], part["size"], width * 0.94, left=part["foot"], zorder=2, **face)
            else:
                ax.bar(part["at"], part["size"], width * 0.94, bottom=part["foot"], zorder=2, **face)
        over = [name for name in ("high", "mark") if name in table]
        tops = (bars["foot"] + bars["size"].clip(lower=0)).groupby(bars["at"]).max()
        table["end"] = table[over].assign(top=table["at"].map(tops).fillna(0.0)).max(axis=1)
        for row in table.to_dict("records"):
            self._row(ax, row, width, theme)
        draw_marks(ax, marks, theme, upright=self.across)

        words = [str(text) for text in column(table, "words").fillna("")]
        self._values_axis(ax, [*zip(table["end"], words, strict=True), *((mark.value, "") for mark in marks)])
        self._places_axis(ax, places, theme)
        if "edge" in table.attrs:
            place, words_of_edge = table.attrs["edge"]
            draw_edge(ax, place, words_of_edge, theme)
        values, others = with_unit(self.label, scale.unit), self.about
        ax.set(xlabel=values if self.across else others, ylabel=others if self.across else values)
        drawn = {kind: look for kind, look in looks.items() if (bars["kind"] == kind).any() and kind != "value"}
        peak = [Line2D([], [], label=self.mark_word, color=theme.ink, linewidth=1.8)] if self.mark_word else []
        return [*patches(drawn, theme), *peak]

    def _row(self, ax: Axes, row: Mapping[Any, Any], width: float, theme: Theme) -> None:
        """The thin line, the mark and the words of a bar."""
        at, half = row["at"], width / 2
        lines = {
            1.1: ([at, at], [row.get("low"), row.get("high")]),
            1.8: ([at - half, at + half], [row.get("mark")] * 2),
        }
        for thick, (places, values) in lines.items():
            if pd.notna(values[1]):
                ax.plot(
                    *((values, places) if self.across else (places, values)), color=theme.ink, linewidth=thick, zorder=3
                )
        if pd.notna(row.get("words")):
            lying: dict[str, Any] = {"xy": (row["end"], at), "xytext": (4, 0), "va": "center"}
            standing: dict[str, Any] = {"xy": (at, row["end"]), "xytext": (0, 2), "ha": "center", "va": "bottom"}
            look: dict[str, Any] = {
                "color": theme.of(row["tone"] or "ink"),
                "fontsize": 8,
                "textcoords": "offset points",
            }
            ax.annotate(row["words"], **look, **(lying if self.across else standing))

    def _values_axis(self, ax: Axes, ends: Sequence[tuple[float, str]]) -> None:
        """Room for the words at the ends of bars."""
        highest = max(end for end, _ in ends) or 1.0
        if self.across:
            inches = [LETTER * max(map(len, words.split("\n"))) + 0.1 for _, words in ends]
            parts = [max(1 - inch / axes_width(ax), 0.2) for inch in inches]
            ax.set_xlim(0, max(end / part for (end, _), part in zip(ends, parts, strict=True)))
            ax.set_xticks([tick for tick in ax.get_xticks() if tick <= 1.05 * highest])
            grid_across(ax)
        else:
            lines, lowest = max(words.count("\n") + bool(words) for _, words in ends), min(0.0, ax.get_ylim()[0])
            ax.set_ylim(lowest, highest + (0.05 + 0.08 * lines) * (highest - lowest))

    def _places_axis(self, ax: Axes, places: Mapping[Place, float], theme: Theme) -> None:
        at, names = list(places.values()), [name for _, name in places]
        if self.across:
            ax.set_yticks(at, names)
            ax.set_ylim(max(at[-1], 2) + 0.6, -0.6)
            return
        if are_numbers(names):
            ax.set_xticks(range(min(names), max(names) + 1, math.ceil((max(names) - min(names) + 1) / TICKS)))
        else:
            name_places(ax, dict(zip(at, map(str, names), strict=True)))
            ax.tick_params(axis="x", length=0)
        ax.set_xlim(min(at) - 0.7, max(*at, min(at) + FEWEST - 1) + 0.7)

        low, high = ax.get_ylim()
        look: dict[str, Any] = {"ha": "center", "va": "top", "color": theme.faint, "fontsize": 8.5}
        for number, section in enumerate(dict.fromkeys(section for section, _ in places if section)):
            inside = [x for (name, _), x in places.items() if name == section]
            ax.text(sum(inside) / len(inside), 0.98, section, transform=ax.get_xaxis_transform(), **look)
            ax.set_ylim(low, high + 0.1 * (high - low))
            if number % 2:
                ax.axvspan(inside[0] - 0.5, inside[-1] + 0.5, color=theme.shade, zorder=0, linewidth=0)


def are_numbers(names: Iterable[Any]) -> bool:
    return all(isinstance(name, int | np.integer) for name in names)


def bar_places(keys: Sequence[Place]) -> dict[Place, float]:
    """Where each place of a section is: whole numbers where they say, others one after the other with a gap between sections."""
    keys = list(dict.fromkeys(keys))
    if are_numbers(name for _, name in keys):
        return {key: float(key[1]) for key in keys}
    gaps = [GAP * (before[0] != key[0]) for before, key in zip(keys[:1] + keys, keys, strict=False)]
    return dict(zip(keys, np.arange(len(keys)) + np.cumsum(gaps), strict=True))


def stack(table: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """A row for each part of a bar: kind, tone, at, size, and its foot, where the part below it ends."""
    if "kind" in table:
        parts = table.assign(kind=table["kind"].map(str), size=table["value"])
    else:
        parts = pd.concat(
            [table.iloc[:0].assign(kind="", size=0.0), *(table.assign(kind=name, size=table[name]) for name in names)]
        )
    parts = parts[["at", "tone", "kind", "size"]]
    parts = parts[parts["size"].fillna(0.0) != 0]
    height = parts["size"].clip(lower=0)
    return parts.assign(foot=height.groupby(parts["at"]).cumsum() - height)


def draw_edge(ax: Axes, place: float, words: str, theme: Theme) -> None:
    """A limit between two places, with room for its words above the bars."""
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + 0.16 * (high - low))
    ax.axvline(place, color=theme.bad, linewidth=1.4, linestyle=LINES[2])
    look: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "ha": "right", "va": "top", "fontsize": 8.5}
    ax.annotate(f"{words} ", (place, 1), color=theme.bad, **look)
