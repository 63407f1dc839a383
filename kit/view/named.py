"""The plots and tables of a run by name: the common ones, and those of its lab from the lab's Definition.

`run.plot("drift")` draws one; `names(run)` lists them, the overview first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from kit.draw.album import OVERVIEW, Album, Table, WhatIf
from kit.draw.data import read
from kit.draw.general import GENERAL
from kit.draw.picture import Picture
from kit.errors import BadInput, hint
from kit.labs.discover import charts_of
from kit.results import Run, compare
from kit.results.comparison import UNITS, compact, informative
from kit.results.frames import PROGRAMS, export
from kit.results.units import ROW
from kit.results.verdict import UNITS as VERDICT_UNITS


def album(run: Run) -> Album:
    own = charts_of(run.lab)
    return Album(run, *([own] if own else []), GENERAL)


def tables(run: Run) -> dict[str, Table]:
    """The tables of a run by name: the common ones, then its lab's."""
    own = charts_of(run.lab)
    general = {name: table for name, table in GENERAL.tables.items() if run.own or name != "numbers"}
    return {**general, **(own.tables if own else {})}


def lab_forecast(lab: str) -> WhatIf | None:
    """A lab's forecast of runs with other settings; most labs have none."""
    own = charts_of(lab)
    return own.what_if if own else None


def names(run: Run) -> list[str]:
    return album(run).names


def plot_run(
    run: Run, name: str = OVERVIEW, *, theme: str = "light", tolerances: Mapping[str, float] | None = None
) -> Picture:
    """One plot of a run. `theme` is light or dark; `tolerances` move the drawn limits."""
    return album(run).draw(name, theme_name=theme, tolerances=tolerances)


def save_table(runs: Sequence[Run], name: str, path: str | Path) -> Path:
    """Export a table of runs: `verdict`, `compare` (two runs or more), or one of `tables`; several runs add a column `run`."""
    known = {**tables(runs[0]), "verdict": None, "compare": None}
    if name not in known:
        raise BadInput(f"there is no table {name!r}; {hint(name, list(known))}")
    about = runs[0].about() if len(runs) == 1 else {"runs": [run.about() for run in runs]}
    title = f"{name.capitalize()} of {', '.join(run.id for run in runs)}"
    if name == "compare":
        table = informative(compare(runs))
        shown = table if Path(path).suffix.lower() in PROGRAMS else compact(table)
        return export(shown, about, path, units=UNITS, title=title)
    if name == "records":
        frames, units = [run.frame() for run in runs], {"value": ROW}
    elif name == "verdict":
        frames, units = [run.shown_verdict().frame() for run in runs], VERDICT_UNITS
    else:
        made = tables(runs[0])[name]
        frames, units = [made.rows(read(run)) for run in runs], dict(made.units)
    if len(runs) > 1:
        frames = [
            frame.assign(run=run.id)[["run", *frame.columns.drop("run", errors="ignore")]]
            for frame, run in zip(frames, runs, strict=True)
        ]
    return export(pd.concat(frames, ignore_index=True), about, path, units=units, title=title)
