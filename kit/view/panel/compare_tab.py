"""Two runs or more out of the runs' folder, side by side: what changed most as a picture, and all of it as a table."""

from __future__ import annotations

import secrets
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from kit.draw.against import plot_against
from kit.draw.picture import SHEET, inline
from kit.errors import KitError
from kit.labs.discover import checks_of
from kit.results import Run, compare, list_runs, runs_dir
from kit.results.comparison import settings
from kit.results.frames import without_empty
from kit.view.panel import look
from kit.view.panel.look import Tab
from kit.view.panel.records_tab import Grid

if TYPE_CHECKING:
    import pandas as pd

    from kit.view.panel.model import PanelModel

MANY = 300  # runs that are listed; a word finds older ones
LEFT_OUT = ["base_run", "found_in", "base_n", "difference", "base_spread"]


@lru_cache(maxsize=4096)
def run_line(folder: Path, stamp: int) -> str:
    """A run in a line, from run.json alone; empty where it cannot be read. `stamp` is when that was written."""
    try:
        run = Run(folder)
    except KitError:
        return ""
    fault = f"fault {run.fault}" if run.fault else ""
    when = f"{datetime.fromtimestamp(stamp / 1e9).astimezone():%Y-%m-%d %H:%M:%S}"
    return " · ".join(part for part in (run.lab, when, run.status, fault, folder.name) if part)


def listed(folder: Path, words: str = "") -> list[tuple[str, str]]:
    """The runs whose line has all of these words, newest first, with their folders."""
    found = []
    for path in list_runs(folder):
        try:
            line = run_line(path, (path / "run.json").stat().st_mtime_ns)
        except OSError:  # it was taken away meanwhile
            continue
        if line and all(word.lower() in line.lower() for word in words.split()):
            found.append((line, str(path)))
        if len(found) == MANY:
            break
    return found


class CompareTab(Tab):
    """The list is read when it is looked at; runs are compared when a person asks for it."""

    def __init__(self, model: PanelModel, folder: Path | None = None) -> None:
        super().__init__()
        self.model = model
        self.folder = folder
        self._salt = secrets.token_hex(4)
        self.words = widgets.Text(
            description="Search",
            placeholder="lab, fault, status, date, name",
            value=model.definition.name,
            tooltip="runs that have all of these words",
            layout={"width": "26em"},
        )
        self.again = widgets.Button(
            description="Refresh", icon="refresh", tooltip="read the folder again", layout={"width": "auto"}
        )
        self.runs = widgets.SelectMultiple(
            description="Runs",
            rows=8,
            tooltip="two runs or more: Ctrl or Shift with a click or with the arrows",
            layout={"width": "100%"},
        )
        self.base = widgets.Dropdown(
            description="Against", tooltip="the run that the others are compared with", layout={"width": "100%"}
        )
        self.go = widgets.Button(
            description="Compare", icon="exchange", button_style="primary", disabled=True, layout={"width": "auto"}
        )
        self.picture = widgets.HTML(layout={"width": "100%"})
        self.grid = Grid("what changed most")
        sheet = widgets.HTML(f"<style>{SHEET}</style>", layout={"display": "none"})
        self.widget = widgets.VBox(
            [
                sheet,
                look.box(self.words, self.again),
                self.runs,
                self.base,
                look.box(self.go),
                self.said,
                self.picture,
                self.grid.widget,
            ]
        )
        self.words.observe(self._changed, "value")
        self.again.on_click(self._changed)
        self.runs.observe(self._chosen, "value")
        self.go.on_click(lambda _: self.compare())
        model.observe(self._changed, ["run", "state"])
        self.grid.widget.layout.display = "none"
        self._chosen()

    def _changed(self, _: Any = None) -> None:
        if not self._visible:
            return
        chosen = set(self.runs.value)
        found = listed(self.folder or runs_dir(), self.words.value)
        if list(self.runs.options) != found:
            self.runs.options = found
            self.runs.value = [path for _, path in found if path in chosen]
        if not found:
            self._say(f"No run in {self.folder or runs_dir()} has these words.")

    def _chosen(self, _: Any = None) -> None:
        """The others are compared with the oldest, until a person chooses another."""
        names = {path: line for line, path in self.runs.options}
        options = [(names[path], path) for path in self.runs.value]
        before = self.base.value
        self.base.options = options
        if options:
            self.base.value = before if before in self.runs.value else options[-1][1]
        self.go.disabled = self.base.disabled = len(options) < 2
        if len(options) < 2:
            self._say("Choose two runs or more, with Ctrl or Shift held down.")
        else:
            self._say("")

    def compare(self) -> pd.DataFrame | None:
        """Compare the chosen runs; the table, or None where they could not be."""
        folders = [self.base.value, *(path for path in reversed(self.runs.value) if path != self.base.value)]
        try:
            runs = [Run(Path(folder), checks=checks_of) for folder in folders]
            table = compare(runs)
            picture = plot_against(runs, table=table)
        except KitError as error:
            self._say(str(error), bad=True)
            return None
        self.picture.value = inline(picture, f"What changed most against {runs[0].id}", salt=self._salt)
        table = without_empty(table)
        self.grid.show(table.drop(columns=LEFT_OUT if len(runs) > 2 else [*LEFT_OUT, "run"]), name="what changed most")
        self.grid.widget.layout.display = None
        differ = "; ".join(f"{name}: {' / '.join(map(str, values))}" for name, values in settings(runs).items())
        alone = int((table["found_in"] != "both").sum())
        only = f" {alone} rows are of one run only, and stand last." if alone else ""
        self._say((f"Settings that differ: {differ}." if differ else "The settings are the same.") + only)
        return table
