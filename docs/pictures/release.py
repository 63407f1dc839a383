"""Release modes side by side, from the output of `kit bench release --json`.

`python -m docs.pictures.release BENCH.json --out docs/images` draws it for light and for dark pages. Error bars span the smallest to the
largest sample.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import pandas as pd
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from docs.pictures.growth import draw
from kit.draw.plots import Picture
from kit.draw.style import LINES, MARKERS, theme
from kit.errors import BadInput
from kit.labs.offload.pictures import WAYS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kit.draw.style import Theme

TIMES = {
    "release": "Time to release",
    "back": "Time to reload",
    "first collective": "First collective afterwards",
}
# Sources on the GPU come before those on the host; the first ROOM are drawn.
SOURCES = ("groups", "driver", "communicators", "sockets", "threads", "host memory")
ROOM = 4


def measured(bench: dict[str, Any]) -> pd.DataFrame:
    """Return a table with groups, ranks, way, what, median, low, high, n, unit."""
    rows = [
        {key: row["ids"][key] for key in ("groups", "ranks", "way")}
        | {key: row[key] for key in ("median", "low", "high", "n", "unit")}
        | {"what": row["ids"].get("of") or row["ids"]["what"]}  # older files say what
        for row in bench["rows"]
        if {"of", "what"} & row["ids"].keys() and row["median"] is not None
    ]
    if bench.get("bench") != "release" or not rows:
        raise BadInput("the file has no rows of `kit bench release --json`")
    return pd.DataFrame(rows)


def plot_release(bench: dict[str, Any], *, theme_name: str = "light") -> Picture:
    """Above: times by number of groups. Below, for the largest number: what was released by source, and what remained at the end."""
    table, look = measured(bench), theme(theme_name)
    counts = table.drop_duplicates(["ranks", "groups"])["ranks"].value_counts()
    ranks = int(counts.index[0])
    table = table[table["ranks"] == ranks]
    most = table["groups"].max()
    sources = [source for source in SOURCES if f"freed {source}" in set(table["what"])][:ROOM]
    with mpl.rc_context(look.rc()):
        picture = Picture(6.6)
        above, below = picture.subfigures(2, 1, squeeze=False)[:, 0]
        axes = above.subplots(1, len(TIMES), sharey=True)
        for ax, (what, title) in zip(axes, TIMES.items(), strict=True):
            times(ax, table[table["what"] == what], look)
            ax.set(title=title, xlabel="groups per rank")
        axes[0].set_ylabel("time [ms]")
        above.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=len(WAYS))
        for ax, source in zip(below.subplots(1, len(sources)), sources, strict=True):
            weighed(ax, table[table["groups"] == most], source, look)
            ax.set_title(source[0].upper() + source[1:])
        of = table.groupby("what")["n"].max()
        samples, cycles = of["release"], of["release"] // of["left groups"]
        picture.suptitle(
            f"kit bench release · {ranks} ranks · {gpus(bench)} · median, minimum and maximum (n = {samples})",
            x=0.01,
            ha="left",
            fontsize=11.5,
        )
        below.suptitle(
            f"With {most} groups per rank: released; hatched: growth after {cycles} cycles",
            x=0.01,
            ha="left",
            fontsize=10,
        )
        if lines := not_measured(bench, ranks):
            below.supxlabel(lines, x=0.01, ha="left", fontsize=8, color=look.faint)
    return picture


def times(ax: Axes, table: pd.DataFrame, look: Theme) -> None:
    """Draw one line per mode, each shifted a little, so that modes with equal times stay visible."""
    places = sorted(table["groups"].unique())
    step = 0.018 * (places[-1] - places[0] or 1)
    for index, way in enumerate(WAYS):
        rows = table[table["way"] == way].sort_values("groups")
        if rows.empty:
            continue
        ax.errorbar(
            rows["groups"] + (index - 2) * step,
            rows["median"],
            yerr=[rows["median"] - rows["low"], rows["high"] - rows["median"]],
            label=way,
            color=look.colour(index),
            marker=MARKERS[index],
            linestyle=LINES[index % len(LINES)],
            linewidth=1.4,
            markersize=5.5,
            capsize=3,
        )
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_xticks(places, [f"{place:g}" for place in places])


def weighed(ax: Axes, table: pd.DataFrame, source: str, look: Theme) -> None:
    """Draw two bars per mode: what a release freed, and the growth from beginning to end."""
    values = table.set_index(["what", "way"])["median"]
    there = [way for way in WAYS if ("release", way) in values.index]
    unit = table.loc[table["what"] == f"freed {source}", "unit"].iloc[0]
    for place, way in enumerate(there):
        colour = look.colour(WAYS.index(way))
        for side, what in ((-0.2, f"freed {source}"), (0.2, f"left {source}")):
            value = values.get((what, way))
            if value is None:
                continue
            with mpl.rc_context({"hatch.color": colour}):
                if side < 0:
                    ax.bar(place + side, value, 0.36, color=colour)
                else:
                    ax.bar(place + side, value, 0.36, facecolor=look.paper, edgecolor=colour, hatch="////")
            ax.annotate(
                f"{value:g}" if unit == "1" else f"{value:.1f}",
                (place + side, max(value, 0)),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=7.5,
            )
    ax.set_ylabel("" if unit == "1" else f"[{unit}]")
    ax.axhline(0, color=look.faint, linewidth=1.0, zorder=1)
    ax.set_xticks(range(len(there)), there)
    ax.margins(y=0.12)


def gpus(bench: dict[str, Any]) -> str:
    names = [gpu["name"] for gpu in bench["provenance"]["gpu"]["gpus"]]
    return ", ".join(dict.fromkeys(names)) or "no GPU"


def not_measured(bench: dict[str, Any], ranks: int) -> str:
    """Return the modes that were not measured, with reasons."""
    lines = {
        f"{row['who']} {row['note']}"
        for row in bench["rows"]
        if row["median"] is None and row["ids"].get("ranks") == ranks
    }
    return "\n".join(textwrap.shorten(line, 170, placeholder=" ...") for line in sorted(lines))


if __name__ == "__main__":
    draw("release", plot_release, "release-ways")
