"""Lag of trained tokens, and how groups ended."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from matplotlib.ticker import MaxNLocator

from kit.draw.axes import marks_of, stack
from kit.draw.style import LINES
from kit.labs.stream import tables
from kit.labs.stream.pictures.times import whole_numbers
from kit.results.units import counted

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from kit.draw.plots import Scene
    from kit.draw.style import Theme

BOUNDED = ("strict", "in-order", "weight-fifo", "windowed")  # samplers that bound the lag by the window

END = {
    "cleared": (2, "trained"),
    "evicted": (1, "evicted: too old"),
    "aborted": (4, "aborted"),
    "failed": (3, "failed"),
    "dropped": (5, "dropped: equal rewards"),
    "replaced": (0, "replaced"),
}


def groups(scene: Scene) -> None:
    left, right = scene.figure.subplots(1, 2, width_ratios=(6, 5))
    data, phase = scene.data, tables.shown(scene.data.records) or ""
    window = tables.capacity(tables.ledger(data.records, phase)).get("window")
    bounded = data.config.get("sampler") in BOUNDED
    draw_lags(left, tables.lags(data.records, phase), window if bounded else None, scene.theme)
    draw_ends(right, tables.ends(data.records, phase), scene.theme)


def draw_lags(ax: Axes, table: pd.DataFrame, window: int | None, theme: Theme) -> None:
    """Trained tokens by lag; those beyond the window are wrong."""
    tokens = table.groupby("lag")["tokens"].sum()
    total = int(tokens.sum())
    for lag, count in zip(tokens.index.tolist(), tokens.tolist(), strict=True):
        late = window is not None and lag > window
        ax.bar(lag, count, 0.7, color=theme.bad if late else theme.series[0], zorder=2)
        ax.text(lag, count, f"{count}\n{count / total:.0%}", ha="center", va="bottom", fontsize=8.5)
    if window is not None:
        ax.axvline(window + 0.5, color=theme.bad, linewidth=1.4, linestyle=LINES[2])
        ax.annotate(f"limit: {counted(window, 'version')} ", (window + 0.5, 1), xycoords=("data", "axes fraction"),
                    ha="right", va="top", color=theme.bad, fontsize=8.5)  # fmt: skip
    ax.set_ylim(0, 1.35 * max(float(tokens.max()) if total else 0.0, 1.0))
    whole_numbers(ax, [0, window or 0, *table["lag"]])
    ax.set_xlabel("lag: version during training minus version of the token")
    ax.set_ylabel("trained tokens")
    mean = float((table["lag"] * table["tokens"]).sum()) / total if total else 0.0
    ax.set_title(f"Lag of {total:,} trained tokens, mean {mean:.2f} versions")


def draw_ends(ax: Axes, table: pd.DataFrame, theme: Theme) -> None:
    """Groups that ended under each version, stacked by how."""
    looks = {end: {"facecolor": theme.series[colour], "linewidth": 0} for end, (colour, _) in END.items()}
    kinds = [end for end in END if end in set(table["end"])]
    for version, rows in table.groupby("version"):
        counts = rows.set_index("end")["groups"]
        stack(ax, float(str(version)), 0.7, [(float(counts.get(end, 0)), looks[end]) for end in kinds])
    by = table.groupby("version")["groups"].sum()
    totals = table.groupby("end")["groups"].sum()
    ax.set_ylim(0, (1.15 + 0.13 * math.ceil(len(kinds) / 2)) * (float(by.max()) if len(by) else 1.0))
    whole_numbers(ax, table["version"])
    ax.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    ax.set_xlabel("version when the group ended")
    ax.set_ylabel("groups")
    ax.set_title(f"How {counted(int(totals.sum()), 'group')} ended")
    marks = {f"{END[end][1]} ({totals[end]})": looks[end] for end in kinds}
    ax.legend(handles=marks_of(marks), ncols=2, loc="upper left", columnspacing=1.1, handlelength=1.2)
