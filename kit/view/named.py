"""The plots of a run by name: those that every run has, and those of its lab, found through the lab's Definition.

`run.plot("drift")` draws one, `names(run)` lists them, the whole picture first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kit.draw.general import GENERAL
from kit.draw.plots import OVERVIEW, Album, read
from kit.labs.discover import pictures_of

if TYPE_CHECKING:
    from kit.draw.picture import Picture
    from kit.draw.plots import Table
    from kit.results import Run


def album(run: Run) -> Album:
    """The run's plots, ready to be drawn: reads its records once."""
    own = pictures_of(run.lab)
    return Album(read(run), *([own] if own else []), GENERAL)


def tables(run: Run) -> dict[str, Table]:
    """The tables of a run by name: those that every run has, then its lab's."""
    own = pictures_of(run.lab)
    general = {name: table for name, table in GENERAL.tables.items() if run.own or name != "numbers"}
    return {**general, **(own.tables if own else {})}


def names(run: Run) -> list[str]:
    """The plots that this run has something for."""
    return album(run).names


def plot(
    run: Run, name: str = OVERVIEW, *, theme: str = "light", tolerances: Mapping[str, float] | None = None
) -> Picture:
    """One plot of a run. `theme` is light or dark; `tolerances` move the limits that are drawn."""
    return album(run).draw(name, theme_name=theme, tolerances=tolerances)
