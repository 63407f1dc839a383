"""A matrix: cells of a table with words, or a heat map with numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from kit.draw.chart import Chart, Mark, Scale, column, parts_of, patches
from kit.draw.style import Look, Theme, looks_of

LINE = 0.21  # inches of a row
BEYOND = Look("bad")
FULL = 0.7  # opacity of a cell with the most heat


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix(Chart):
    """A cell with `words` for each row and column, in the order in which they come.

    `tone` is the words' colour in the theme, `bold` their weight. With a column `heat`, from 0 to 1, cells are filled in the colour of
    their `kind`, or of what is wrong where `value` is above the limit. A column `start` is where words begin, as a part of the width;
    without it columns are equally wide and words are in their middle. Without `heads`, rows and columns are not named.
    """

    heads: bool = True

    def inches(self, rows: pd.DataFrame) -> float:
        decoration = 0.7 if self.heads else 0.1
        return LINE * rows["row"].nunique() + decoration

    def draw(self, ax: Axes, table: pd.DataFrame, marks: Sequence[Mark], scale: Scale, theme: Theme) -> list[Any]:  # noqa: ARG002
        lines = {name: line for line, name in enumerate(dict.fromkeys(table["row"]))}
        heads = {name: place for place, name in enumerate(parts_of(table["column"]))}
        wide = 1 / len(heads)
        looks = looks_of(column(table, "kind"), self.looks)
        limits = [mark for mark in marks if mark.colour == "bad"]
        limit = min((mark.value for mark in limits), default=math.inf)
        for row in table.to_dict("records"):
            place, line = heads[row["column"]], lines[row["row"]]
            is_wrong = row.get("value", 0.0) > limit
            if is_wrong or row.get("heat", 0.0) > 0:
                look = BEYOND if is_wrong else looks[row["kind"]]
                face = look.face(theme) | {"alpha": 0.12 + (FULL - 0.12) * row["heat"]}
                ax.add_patch(Rectangle((place * wide, line - 0.5), wide, 1, **face))
            words = f"✗ {row['words']}" if is_wrong else row["words"]
            ax.text(
                row.get("start", (place + 0.5) * wide),
                line,
                words,
                ha="left" if "start" in row else "center",
                va="center_baseline",
                fontsize=8.5,
                color=theme.of(row["tone"] if pd.notna(row.get("tone")) else "ink"),
                fontweight="bold" if row.get("bold") is True or is_wrong else "normal",
            )
        top = 0.0
        if self.heads:
            top = 0.3 + 0.65 * max(name.count("\n") + 1 for name in heads)
            for name, place in heads.items():
                colour = theme.of(self.looks[name].colour if name in self.looks else "ink")
                ax.text((place + 0.5) * wide, -0.6, name, ha="center", fontsize=8.5, color=colour, fontweight="bold")
        ax.set(xlim=(0, 1), ylim=(len(lines) - 0.5, -0.5 - top))
        if self.heads:
            ax.grid(visible=False)
            ax.spines[["left", "bottom"]].set_visible(False)
            ax.tick_params(length=0)
            ax.set_xticks([])
            ax.set_yticks(list(lines.values()), list(lines))
        else:
            ax.set_axis_off()
        beyond = {mark.words: replace(BEYOND, word=mark.words) for mark in limits}
        return patches({name: look for name, look in looks.items() if name} | beyond, theme)
