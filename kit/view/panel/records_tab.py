"""The records of the run as a table, and the tables that its lab makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from kit.errors import KitError
from kit.labs.split import parity
from kit.labs.sync import tables
from kit.view.panel import look
from kit.view.panel.grid import Grid
from kit.view.panel.tab import Tab

if TYPE_CHECKING:
    import pandas as pd

    from kit.results import Run
    from kit.view.panel.model import PanelModel

Make = Callable[["Run"], "pd.DataFrame"]


def records(run: Run) -> pd.DataFrame:
    """Every record, in the order of time. Run and lab are the same in each; times are seconds since the first."""
    frame = run.frame().drop(columns=["run", "lab"])
    return frame.assign(time=(frame["time"] - frame["time"].min()).round(3)).rename(columns={"time": "at [s]"})


def times(run: Run) -> pd.DataFrame:
    """Seconds of each phase and rank: how many, median, least and most."""
    frame = run.frame()
    seconds = frame[frame["metric"] == "seconds"].groupby(["phase", "rank"], sort=False)["value"]
    found = seconds.agg(["count", "median", "min", "max"]).reset_index()
    return found.rename(columns={"count": "n", "median": "median [s]", "min": "min [s]", "max": "max [s]"})


# What each table is called, what makes it, and the column whose greatest is the worst, if one is.
GENERAL: dict[str, tuple[Make, str]] = {"records": (records, ""), "times": (times, "median [s]")}
OF_LAB: dict[str, dict[str, tuple[Make, str]]] = {
    "sync": {
        "syncs": (lambda run: tables.syncs(run.frame()), "wall"),
        "stages": (lambda run: tables.stages(run.frame()), ""),
        "transports": (lambda run: tables.transports(run.frame()), ""),
        "digests": (lambda run: tables.digests(run.frame()), "differ"),
    },
    "split": {
        "metrics": (lambda run: parity.metrics(run.frame(), run.config), "error"),
        "tensors": (lambda run: parity.tensors(run.frame(), run.config), "gradient_error"),
    },
}


def tables_of(run: Run) -> dict[str, tuple[Make, str]]:
    return {**GENERAL, **OF_LAB.get(run.lab, {})}


class RecordsTab(Tab):
    """Reads when it is looked at."""

    def __init__(self, model: PanelModel) -> None:
        self.model = model
        self._shown: object = None
        self.choice = widgets.Dropdown(description="Table", options=list(GENERAL), tooltip="which table of the run")
        self.said = widgets.HTML()
        self.grid = Grid()
        self.widget = widgets.VBox([look.box(self.choice), self.said, self.grid.widget])
        model.observe(self._changed, ["run", "revision"])
        self.choice.observe(self._changed, "value")

    def _changed(self, _: Any = None) -> None:
        run = self.model.run
        if not self._visible:
            return
        if run is None:
            self._say("There is no run yet.")
            return
        known = tables_of(run)
        if list(self.choice.options) != list(known):
            self.choice.options = list(known)
        wanted = (run, self.model.revision, self.choice.value)
        if self._shown == wanted:
            return
        make, worst = known[self.choice.value]
        try:
            self.grid.show(make(run), worst=worst, name=self.choice.value)
            self._say("")
        except KitError as error:
            self.grid.show(None)
            self._say(str(error))
        except (KeyError, ValueError, IndexError) as error:  # part of a run may lack what a table is made of
            self.grid.show(None)
            self._say(f"this run has too little for the table {self.choice.value}: {type(error).__name__}: {error}")
        self._shown = wanted

    def _say(self, words: str) -> None:
        self.said.value = f'<p role="status">{look.span("faint", words)}</p>' if words else ""
