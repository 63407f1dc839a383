"""Time of a sync by bytes and by receivers, from the output of `kit bench sync --json`.

`python -m docs.pictures.growth BENCH.json --out docs/images` draws it for light and dark pages. Error bars span the smallest to the largest
sample.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import pandas as pd
from matplotlib.ticker import StrMethodFormatter

from kit.draw.plots import Picture
from kit.draw.style import LINES, MARKERS, THEMES, theme
from kit.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes

    from kit.draw.style import Theme

IDS = ("megabytes", "receivers", "way")
MS = 1e3


def growth(bench: dict[str, Any]) -> pd.DataFrame:
    """Return a table with megabytes, receivers, way, and seconds: median, low, high."""
    rows = [
        {key: row["ids"][key] for key in IDS} | {key: row[key] for key in ("median", "low", "high")}
        for row in bench["rows"]
        if "megabytes" in row["ids"] and row["median"] is not None
    ]
    if bench.get("bench") != "sync" or not rows:
        raise BadInput("the file has no rows of `kit bench sync --json` with megabytes")
    return pd.DataFrame(rows).drop_duplicates(list(IDS))


def plot_growth(bench: dict[str, Any], *, theme_name: str = "light") -> Picture:
    """Left: time by bytes, to one receiver. Right: time by receivers, for the same bytes."""
    table, look = growth(bench), theme(theme_name)
    with mpl.rc_context(look.rc()):
        picture = Picture(3.6)
        left, right = picture.subplots(1, 2)
        left.set(xscale="log", yscale="log", xlabel="MB to one receiver", ylabel="time [ms]")
        lines(left, table[table["receivers"] == 1], "megabytes", look)
        left.set_title("By size of the model")
        some = table[table["receivers"] > 1]["megabytes"]
        same = table[table["megabytes"] == (some.iloc[0] if len(some) else table["megabytes"].iloc[0])]
        lines(right, same, "receivers", look)
        right.set(xlabel=f"receivers of {same['megabytes'].iloc[0]} MB", ylabel="time [ms]", ylim=(0, None))
        right.set_title("By receivers, on the same cores")
    return picture


def lines(ax: Axes, table: pd.DataFrame, by: str, look: Theme) -> None:
    for index, (way, rows) in enumerate(table.groupby("way", sort=False)):
        ordered = rows.sort_values(by)
        middle = ordered["median"] * MS
        spread = [middle - ordered["low"] * MS, ordered["high"] * MS - middle]
        ax.errorbar(
            ordered[by],
            middle,
            yerr=spread,
            label=str(way),
            color=look.colour(index),
            marker=MARKERS[index],
            linestyle=LINES[index],
            markersize=5.5,
            capsize=3,
        )
    places = sorted(table[by].unique())
    ax.set_xticks(places, [f"{place:g}" for place in places])
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.legend(loc="upper left")


def read(path: Path) -> dict[str, Any]:
    """Read a bench's JSON object from a file that holds only this, or also a printed table before it."""
    text = path.read_text()
    found: dict[str, Any] = json.loads(text if text.startswith("{") else text.splitlines()[-1])
    return found


def together(files: Sequence[Path]) -> dict[str, Any]:
    """Join the rows of several files of one bench; references have one file per part."""
    benches = [read(file) for file in files]
    return benches[0] | {"rows": [row for bench in benches for row in bench["rows"]]}


def draw(bench: str, plot: Callable[..., Picture], stem: str) -> None:
    """Draw one picture for light and one for dark pages, as a module's command line."""
    parser = argparse.ArgumentParser(description=f"Draw the results of `kit bench {bench}`.")
    parser.add_argument("bench", type=Path, nargs="+", help=f"one or more output files of `kit bench {bench} --json`")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder for the pictures")
    arguments = parser.parse_args()
    results = together(arguments.bench)
    for theme_name in THEMES:
        suffix = "" if theme_name == "light" else f"-{theme_name}"
        print(plot(results, theme_name=theme_name).save(arguments.out / f"{stem}{suffix}.png"))


if __name__ == "__main__":
    draw("sync", plot_growth, "sync-growth")
