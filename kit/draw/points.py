"""Points by phase and rank: every sample, the range of each rank's and their median."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from kit.draw.chart import Chart, Mark, Scale, name_places, strokes, with_unit
from kit.draw.lines import log_axis
from kit.draw.style import Theme, looks_of
from kit.results.units import sample_counts

WIDE = 0.6  # of the distance between two phases
APART = 30  # a largest value this many times the least needs a logarithmic scale


@dataclass(frozen=True, kw_only=True, slots=True)
class Points(Chart):
    """A `value` is a point: its `place` (a phase) is where it is, its `lane` (a rank) the marker, its `kind` the colour.

    Samples of one place, lane and kind have a band over their range and a line at their median.
    """

    def draw(self, ax: Axes, table: pd.DataFrame, marks: Sequence[Mark], scale: Scale, theme: Theme) -> list[Any]:  # noqa: ARG002
        places = {name: float(at) for at, name in enumerate(table["place"].unique())}
        shapes, looks = looks_of(table["lane"], self.looks), looks_of(table["kind"], self.looks)
        for (place, lane, kind), rows in table.groupby(["place", "lane", "kind"], sort=False):
            look, shape, values = looks[str(kind)], shapes[str(lane)], rows["value"]
            colour = theme.of(look.colour)
            x = places[place] + (list(shapes).index(str(lane)) - (len(shapes) - 1) / 2) * WIDE / len(shapes)
            if len(values) > 1:
                band: dict[str, Any] = {"color": colour, "linewidth": 5, "alpha": 0.3, "solid_capstyle": "round"}
                ax.plot([x, x], [values.min(), values.max()], **band)
                ax.plot(x, values.median(), "_", color=theme.ink, markersize=11, markeredgewidth=1.4, zorder=3)
            # A full marker would hide a hollow one of the same value.
            hollow = {"markerfacecolor": "none", "zorder": 2.5}
            edge: dict[str, Any] = hollow if look.hollow else {"markeredgecolor": theme.paper}
            ax.plot([x] * len(values), values, shape.marker or "o", color=colour, markersize=5, **edge)

        least, most = table["value"].min(), table["value"].max()
        if least > 0 and most / least > APART:
            log_axis(ax)
        else:
            ax.set_ylim(bottom=0)
        name_places(ax, {at: name for name, at in places.items()})
        ax.set(xlim=(-0.6, len(places) - 0.4), xlabel=self.about, ylabel=with_unit(self.label, scale.unit))

        # A rank's mark is grey, unless ranks are also the kinds.
        ranks = {lane: replace(look, colour="faint", line=None) for lane, look in shapes.items() if lane not in looks}
        kinds = {kind: replace(shapes.get(kind, look), line=None) for kind, look in looks.items() if kind in self.looks}
        return strokes((ranks if len(ranks) > 1 else {}) | kinds, theme)


def counts_in_words(rows: pd.DataFrame, *by: str) -> str:
    """How many samples each group of rows has: n = 3 to 5."""
    return sample_counts(set(rows.groupby(list(by)).size()))
