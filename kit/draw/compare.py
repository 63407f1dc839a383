"""Runs compared with the first of them: what changed most against its spread, with both medians and that spread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from kit.draw.chart import Plot
from kit.draw.data import Tables
from kit.draw.matrix import Matrix
from kit.draw.picture import Picture, message, paint
from kit.draw.points import Points
from kit.draw.style import Look, theme
from kit.errors import BadInput
from kit.results import Run, compare
from kit.results.comparison import informative, labelled, warnings
from kit.results.frames import labels
from kit.results.units import amount, counted, digits, sample_counts

ROWS = 14
EVEN = 1.02  # a ratio below it counts as no change
HOT = 10.0  # a ratio that has the deepest colour


def plot_against(runs: Sequence[Run], *, theme_name: str = "light", table: pd.DataFrame | None = None) -> Picture:
    """The others are compared with the first run. `table` is what `compare(runs)` returned, if that is known."""
    if len({run.id for run in runs}) < 2:
        raise BadInput("a comparison needs at least two different runs")
    look, others = theme(theme_name), labelled(runs)
    first = others.pop(runs[0].id)
    changes = changed_most(compare(runs) if table is None else table, ROWS)
    if changes.empty:
        return message(f"nothing that both measured changed by more than {EVEN - 1:.0%} against {first}", look)
    numbers = sample_counts({*changes["n"], *changes["base_n"]})
    cells = pd.DataFrame(
        {
            "row": changes["name"],
            "column": changes["run"].map(others).astype(pd.CategoricalDtype(list(others.values()))),
            "words": [change_in_words(row) for row in changes.to_dict("records")],
            "kind": ["more" if ratio > 1 else "less" for ratio in changes["ratio"]],
            "heat": [min(math.log(ratio) / math.log(HOT), 1.0) for ratio in changes["apart"]],
        }
    )
    looks = {"more": Look(1, f"more than in {first}"), "less": Look(0)}
    about = f"Medians over cycles and their spread ({numbers})"
    warned = [f"Warning: {why}" for why in warnings(runs)]
    heading = f"{runs[0].lab} · what changed most against {first} · {counted(len(others), 'other run')}"
    plot = Plot("", [Matrix(rows=lambda _: cells, looks=looks, title=about)])
    return paint([[plot]], "\n".join([heading, *warned]), look, Tables())


def plot_over(frame: pd.DataFrame, x: str, y: str, *, theme_name: str = "light") -> Picture:
    """A number of runs over another column of their table, such as a setting: a point for each run, colours for labs."""
    look, unit = theme(theme_name), ""
    if not pd.api.types.is_numeric_dtype(frame[y]):
        raise BadInput(f"{y} has no numbers to plot")
    if y.endswith("]"):
        unit = y.rpartition("[")[2].removesuffix("]")
    kept = frame.dropna(subset=[y])
    kept = kept.sort_values(x, kind="stable", key=lambda cells: cells if is_numeric(cells) else cells.astype(str))
    if kept.empty:
        return message(f"no chosen run has a number {y}", look)
    places = kept[x].map(lambda cell: f"{cell:g}" if isinstance(cell, float) else str(cell))
    points = pd.DataFrame({"place": places, "lane": kept["lab"], "kind": kept["lab"], "value": kept[y].astype(float)})
    looks = {lab: Look(place, lab) for place, lab in enumerate(kept["lab"].unique())}
    name = y.partition(" [")[0]
    chart = Points(rows=lambda _: points, looks=looks, title=f"{name} by {x}", label=name, about=x, unit=unit)
    return paint([[Plot("", [chart])]], f"{counted(len(kept), 'run')}, one point each", look, Tables())


def is_numeric(cells: pd.Series[Any]) -> bool:
    return bool(pd.api.types.is_numeric_dtype(cells))


def changed_most(table: pd.DataFrame, rows: int) -> pd.DataFrame:
    """The phases and metrics that changed, in the table's order; of each run the rank where it did. What has no ratio is left out."""
    table = informative(table)
    if table.empty:  # runs without records
        return table
    table = table[(table["found_in"] == "both") & (table["ratio"] > 0) & (table["base"] > 0)]
    table = table.assign(metric=labels(table), apart=table["ratio"].where(table["ratio"] >= 1, 1 / table["ratio"]))
    table = table.drop_duplicates(["phase", "metric", "run"])
    table = table.assign(name=table["phase"] + "  " + table["metric"])
    names = table[table["apart"] > EVEN]["name"].unique()[:rows]
    places = {name: place for place, name in enumerate(names)}
    return table[table["name"].isin(names)].sort_values("name", key=lambda name: name.map(places), kind="stable")


def change_in_words(row: Mapping[Any, Any]) -> str:
    ratio, unit = float(row["ratio"]), str(row["unit"])
    before, after = (
        amount(float(row[name]), unit) + (f" ± {amount(float(row[spread]) / 2, unit)}" if row[spread] else "")
        for name, spread in (("base", "base_spread"), ("value", "spread"))
    )
    times = f"{digits(ratio)} x" if ratio > 1 else f"1/{digits(1 / ratio)}"
    return f"{times}: {before} → {after}, rank {row['rank']}"
