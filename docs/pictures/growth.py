"""Time of a sync by bytes and by receivers, from the output of `kit bench sync --json`.

`python -m docs.pictures.growth BENCH.json --out docs/images` draws it for light and dark pages. Bars span the smallest to the largest
sample.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from kit.draw.chart import Plot
from kit.draw.data import Tables, with_attrs
from kit.draw.lines import Lines
from kit.draw.picture import Picture, paint
from kit.draw.style import THEMES, theme
from kit.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

IDS = ("megabytes", "receivers", "way")


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
    table = growth(bench)
    several = table[table["receivers"] > 1]["megabytes"]
    same = table[table["megabytes"] == (several.iloc[0] if len(several) else table["megabytes"].iloc[0])]
    by_size = lines(table[table["receivers"] == 1], "megabytes")
    by_receivers = lines(same, "receivers")
    charts = [
        Lines(
            rows=lambda _: by_size,
            heading="By size of the model",
            about="MB to one receiver",
            scale="log",
            x_log=True,
            **LOOK,
        ),
        Lines(
            rows=lambda _: by_receivers,
            heading="By receivers, on the same cores",
            about=f"receivers of {same['megabytes'].iloc[0]} MB",
            zero=True,
            **LOOK,
        ),
    ]
    return paint([[Plot("", charts)]], "kit bench sync", theme(theme_name), Tables())


LOOK: dict[str, Any] = {"label": "time", "unit": "s", "bars": True, "height": 3.6}


def lines(table: pd.DataFrame, by: str) -> pd.DataFrame:
    rows = table.sort_values(by, kind="stable").rename(columns={by: "x", "way": "kind", "median": "value"})
    kinds = pd.CategoricalDtype(list(table["way"].unique()))
    return with_attrs(rows.assign(kind=rows["kind"].astype(kinds)), ticks={place: f"{place:g}" for place in rows["x"]})


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
