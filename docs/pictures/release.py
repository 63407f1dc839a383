"""Release modes side by side, from the output of `kit bench release --json`.

`python -m docs.pictures.release BENCH.json --out docs/images` draws it for light and for dark pages. Bars span the smallest to the
largest sample.
"""

from __future__ import annotations

import textwrap
from typing import Any

import pandas as pd

from docs.pictures.growth import draw
from kit.draw.chart import Plot
from kit.draw.data import Tables, with_attrs
from kit.draw.levels import Levels
from kit.draw.lines import Lines
from kit.draw.matrix import Matrix
from kit.draw.picture import Picture, paint
from kit.draw.style import Look, theme
from kit.errors import BadInput
from kit.labs.offload.charts import WAYS

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
    table = measured(bench)
    ranks = int(table.drop_duplicates(["ranks", "groups"])["ranks"].value_counts().index[0])
    table = table[table["ranks"] == ranks]
    counts, most = table.groupby("what")["n"].max(), table["groups"].max()
    cycles = counts["release"] // counts["left groups"]
    times = Lines(
        rows=lambda _: times_by_groups(table),
        heading="{panel}",
        looks=LOOKS,
        label="time [ms]",
        about="groups per rank",
        scale="log",
        bars=True,
        height=3.2,
    )
    released = Levels(
        rows=lambda _: bytes_by_way(table[table["groups"] == most]), heading="{panel}", looks=LOOKS, legend=False
    )
    below = f"With {most} groups per rank: released; hatched: growth after {cycles} cycles"
    sentences = [below, *not_measured(bench, ranks)]
    notes = pd.DataFrame(
        {"row": range(len(sentences)), "column": "", "start": 0.0, "words": sentences, "tone": "faint"}
    )
    rows = [
        [Plot("", [times])],
        [Plot("", [released])],
        [Plot("", [Matrix(rows=lambda _: notes, heading=" ", heads=False)])],
    ]
    title = f"kit bench release · {ranks} ranks · {gpus(bench)} · median, minimum and maximum (n = {counts['release']})"
    return paint(rows, title, theme(theme_name), Tables())


LOOKS = {way: Look(place) for place, way in enumerate(WAYS)}
LOOKS |= {f"{way}, left": Look(place, hatch="////", alpha=0.5) for place, way in enumerate(WAYS)}


def times_by_groups(table: pd.DataFrame) -> pd.DataFrame:
    """A line per mode, each shifted a little, so that modes with equal times stay visible."""
    places = sorted(table["groups"].unique())
    shift = 0.018 * (places[-1] - places[0] or 1)
    rows = table[table["what"].isin(TIMES)].sort_values(["what", "groups"], key=by_order, kind="stable")
    x = rows["groups"] + (rows["way"].map(WAYS.index) - 2) * shift
    rows = rows.assign(x=x, value=rows["median"], panel=rows["what"].map(TIMES), kind=rows["way"].astype(ORDER))
    return with_attrs(rows, ticks={place: f"{place:g}" for place in places})


ORDER = pd.CategoricalDtype(list(WAYS))


def by_order(values: pd.Series[Any]) -> pd.Series[Any]:
    return values.map(list(TIMES).index) if values.name == "what" else values


def bytes_by_way(table: pd.DataFrame) -> pd.DataFrame:
    """Two bars per mode: what a release freed, and the growth from beginning to end."""
    bars = []
    sources = [source for source in SOURCES if f"freed {source}" in set(table["what"])][:ROOM]
    values = table.set_index(["what", "way"])
    for source in sources:
        unit = table.loc[table["what"] == f"freed {source}", "unit"].iloc[0]
        title = source[0].upper() + source[1:] + ("" if unit == "1" else f" [{unit}]")
        for way in [way for way in WAYS if ("release", way) in values.index]:
            for side in ("freed", "left"):
                if (f"{side} {source}", way) in values.index:
                    value = float(values["median"][f"{side} {source}", way])
                    kind, words = (
                        way if side == "freed" else f"{way}, left",
                        f"{value:g}" if unit == "1" else f"{value:.1f}",
                    )
                    bars.append(
                        {"panel": title, "place": way, "side": side, "kind": kind, "value": value, "words": words}
                    )
    return pd.DataFrame(bars)


def gpus(bench: dict[str, Any]) -> str:
    names = [gpu["name"] for gpu in bench["provenance"]["gpu"]["gpus"]]
    return ", ".join(dict.fromkeys(names)) or "no GPU"


def not_measured(bench: dict[str, Any], ranks: int) -> list[str]:
    """Return the modes that were not measured, with reasons."""
    lines = {
        f"{row['who']} {row['note']}"
        for row in bench["rows"]
        if row["median"] is None and row["ids"].get("ranks") == ranks
    }
    return [textwrap.shorten(line, 170, placeholder=" ...") for line in sorted(lines)]


if __name__ == "__main__":
    draw("release", plot_release, "release-ways")
