"""The table of all runs: a tab of the panel, a page, and the head of a report.

The grid is DataTables, by itables: its script comes with the library, so a page works without a network.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import pandas as pd

from kit.draw.compare import plot_against, plot_over
from kit.draw.picture import SHEET, inline
from kit.labs.discover import describe_folder, rules_of
from kit.results import Run, list_runs, runs_dir
from kit.results.comparison import Comparison, compact
from kit.results.frames import export
from kit.results.records import output_file, write_text
from kit.results.runtable import Facts, pickable, run_frame, sweep_frame
from kit.view import look
from kit.view.look import Tab
from kit.view.model import BUSY, PanelModel
from kit.view.tabs import Grid, linked

LINES = [10, 25, 100, {"label": "all", "value": -1}]  # of a page of the table
# A menu in each head: sort, and tick the values to show.
HEADS = ["order", ["orderAsc", "orderDesc", "orderClear", "spacer", "searchList", "colVisDropdown"]]
FACES = """
.kit-runs table.dataTable { font-size:.9em; font-variant-numeric:tabular-nums; }
.kit-runs div.dt-container { background:none; width:100%; min-height:21em; overflow-x:auto; } /* room for a head's menu */
"""


def grid_options(frame: pd.DataFrame, hidden: Sequence[str] = ()) -> dict[str, Any]:
    """The grid's options. Empty columns and `hidden` ones are shown by the menu in a head."""
    unseen = [at for at, name in enumerate(frame) if name in hidden or is_empty(frame[name])]
    return {
        "columnControl": HEADS,
        "ordering": {"indicators": False, "handler": False},
        "lengthMenu": LINES,
        "pageLength": LINES[0],
        "maxBytes": 0,
        "showIndex": False,
        "format_floats_in_python": False,  # needs JavaScript in strings, which a report's page forbids
        "classes": "display compact nowrap",
        "style": "width:100%;margin:0",
        "layout": {"topStart": "search", "topEnd": None, "bottomStart": "info", "bottomEnd": ["pageLength", "paging"]},
        "language": {"info": "_START_ to _END_ of _TOTAL_ rows", "infoFiltered": "(of _MAX_)"},
        "columnDefs": [{"targets": unseen, "visible": False}],
    }


def rounded(frame: pd.DataFrame) -> pd.DataFrame:
    """Four digits, for the page; an export has them all."""
    made = frame.copy()
    for name in frame:
        if frame[name].dtype.kind == "f":
            made[name] = frame[name].map(lambda value: float(f"{value:.4g}"))
    return made


def is_empty(cells: pd.Series[Any]) -> bool:
    return bool((cells.isna() | (cells == "")).all())


# The grid's style follows a class of the page.
DARK = "<script>document.documentElement.classList.toggle('dark', matchMedia('(prefers-color-scheme: dark)').matches)</script>"


def grid_html(frame: pd.DataFrame, hidden: Sequence[str] = ()) -> str:
    """The table with its script and style, for a page without a network."""
    from itables.javascript import generate_init_offline_itables_html, to_html_datatable
    from itables.options import dt_bundle

    options = {**grid_options(frame, hidden), "display_logo_when_loading": False, "connected": False}
    script = generate_init_offline_itables_html(dt_bundle)
    return f'<div class="kit-runs">{DARK}{script}{to_html_datatable(rounded(frame), **options)}</div>'


def save_runs(frame: pd.DataFrame, path: str | Path) -> Path:
    """Write the table; as .html, a page to sort, filter and search it."""
    if Path(path).suffix.lower() != ".html":
        return export(frame.drop(columns=[name for name in frame if is_empty(frame[name])]), {}, path, title="Runs")
    target = output_file(path)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
    body = f"<style>body {{ font:15px system-ui, sans-serif; margin:16px; }}{FACES}</style>{grid_html(frame)}"
    write_text(
        target, f'<!DOCTYPE html>\n<html lang="en"><head>{head}<title>Runs</title></head><body>{body}</body></html>\n'
    )
    return target


class RunsTab(Tab):
    """All runs and sweeps: sort, filter, pick columns; show a chosen run, compare or plot several, export the table."""

    def __init__(self, model: PanelModel) -> None:
        super().__init__(model)
        self.frame: pd.DataFrame | None = None
        self.grid: Any = None  # made when it is first seen, because its script is large
        self._rows: list[Facts] = []
        self._folders: list[list[str]] = []  # the runs of each row of the grid
        self._filling = False
        self.sweeps = look.labelled_control(
            widgets.Checkbox, "by sweep", "the settings of each sweep, with the spread of every number", indent=False
        )
        which = (
            "further columns: settings, checks (their number), metrics by phase (the median); Ctrl or Shift for several"
        )
        self.columns = look.labelled_control(widgets.SelectMultiple, "Columns", which, width="100%", rows=8)
        self.more = widgets.Accordion([self.columns], titles=("Columns",))
        self.show = look.button("Show", "eye", "show the chosen run in this panel", self.show_chosen)
        primary = {"button_style": "primary"}
        self.go = look.button("Compare", "exchange", "compare the chosen runs with the oldest", self.compare, **primary)
        self.y = look.labelled_control(widgets.Dropdown, "Plot", "the number to plot", width="18em")
        self.x = look.labelled_control(
            widgets.Dropdown, "over", "what to plot it over, such as a setting", width="18em"
        )
        self.draw = look.button("Plot", "line-chart", "plot the chosen runs, or all if none is chosen", self.plot)
        self.path = look.labelled_control(widgets.Text, "File", "where the table is written", value="runs.html")
        self.write = look.button("Export", "download", "write the table to the file", self.export)
        self.link = widgets.HTML()
        self.place = look.classed(widgets.VBox(layout={"width": "100%", "min_height": "80px"}), "kit-runs")
        self.picture = widgets.HTML(layout={"width": "100%"})
        self.changes = Grid("largest changes")
        self.changes.widget.layout.display = "none"
        acts = look.flex_box(self.show, self.go, self.y, self.x, self.draw, self.path, self.write, self.link)
        parts = [look.sheet(SHEET + FACES), look.flex_box(self.sweeps), self.more, self.place, acts, self.notice]
        self.widget = widgets.VBox([*parts, self.picture, self.changes.widget])
        self.sweeps.observe(self._picked, "value")
        self.columns.observe(self._picked, "value")
        model.observe(self._changed, ["run", "state"])
        self._count()

    @property
    def chosen(self) -> list[Path]:
        """The folders of the chosen rows, oldest first."""
        if self.grid is None or self.frame is None:
            return []
        folders = [folder for at in self.grid.selected_rows for folder in self._folders[at]]
        places = {row["run"]: place for place, row in enumerate(self._rows)}
        return [Path(folder) for folder in sorted(folders, key=lambda folder: -places[folder])]

    def _changed(self, _: Any = None) -> None:
        if not self._visible or self.model.state in BUSY:
            return
        before = self.chosen
        rows = [row for path in list_runs(runs_dir()) if (row := describe_folder(path))["status"] != "damaged"]
        if self.grid is not None and rows == self._rows:
            return
        self._rows = rows
        self._filling = True
        kept, names = self.columns.value, pickable(self._rows)
        if list(self.columns.options) != names:
            self.columns.options = names
            self.columns.value = [name for name in kept if name in names]
        self._filling = False
        self._fill(before)

    def _picked(self, _: Any) -> None:
        if not self._filling:
            self._fill(self.chosen)

    def _fill(self, chosen: Sequence[Path]) -> None:
        from itables.widget import ITable

        made = self._attempt(lambda: (sweep_frame if self.sweeps.value else run_frame)(self._rows, self.columns.value))
        if made is None:
            return
        self.frame = made
        self._offer(self.y, [str(name) for name in made if pd.api.types.is_numeric_dtype(made[name])])
        self._offer(
            self.x,
            [name for name in (*made.attrs.get("picks", ()), "differs", "fault", "label", "started") if name in made],
        )
        wanted = {str(path) for path in chosen}
        self._folders = made.attrs.pop("folders", [[row["run"]] for row in self._rows])
        rows = [at for at, folders in enumerate(self._folders) if wanted.issuperset(folders)]
        if self.grid is None:
            self.grid = ITable(rounded(made), select="multi", selected_rows=rows, **grid_options(made))
            self.grid.observe(self._count, "selected_rows")
            self.place.children = (self.grid,)
        else:
            self.grid.update(rounded(made), selected_rows=rows, **grid_options(made))
        self._count()

    def _offer(self, control: Any, names: list[str]) -> None:
        before = control.value
        if list(control.options) != names:
            control.options = names
            control.value = before if before in names else next(iter(names), None)

    def _count(self, _: Any = None) -> None:
        count = len(self.chosen)
        self.show.disabled = count != 1
        self.go.disabled = count < 2
        self.draw.disabled = not self.y.options or self.sweeps.value
        words = "" if count > 1 else "Click rows to choose them: one to show, two or more to compare."
        self._say(words if self._rows else f"There is no run in {runs_dir()}.")

    def show_chosen(self) -> None:
        if self.model.state in BUSY | {"ready"}:
            self._say("While ranks live, their own run is shown.")
        elif self.chosen:
            self.model.pick(self.chosen[0])

    def compare(self) -> pd.DataFrame | None:
        """Compare the chosen runs with the oldest of them; returns the table, or None if that failed."""
        compared = self._attempt(self._compare)
        if compared is None:
            return None
        settings = compared.settings_in_words
        differ = "; ".join(f"{name}: {' / '.join(values)}" for name, values in settings.items())
        words = [f"Checks that changed in {run}: {', '.join(rows)}." for run, rows in compared.answers.items()]
        words += [f"Settings that differ: {differ}."] if differ else []
        words += ["The settings are the same."] if not compared.settings else []
        words += [f"Warning: {why}." for why in (*compared.warnings, *compared.notes)]
        words += [f"{compared.alone} rows exist in only one run; they are last."] if compared.alone else []
        self._say(" ".join(words))
        return compared.table

    def _compare(self) -> Comparison:
        """Compare the chosen runs and show what changed."""
        compared = Comparison([Run(folder, rules=rules_of) for folder in self.chosen])
        picture = plot_against(compared.runs, table=compared.table)
        self.picture.value = inline(picture, f"Largest changes from {compared.runs[0].id}")
        self.changes.show(compact(compared.table), name="largest changes")
        self.changes.widget.layout.display = None
        return compared

    def plot(self) -> None:
        if (frame := self.frame) is None or self.y.value is None or self.x.value is None:
            return
        rows = sorted(self.grid.selected_rows) or range(len(frame))
        title = f"{self.y.value} over {self.x.value}"
        picture = self._attempt(lambda: plot_over(frame.iloc[list(rows)], self.x.value, self.y.value))
        if picture is not None:
            self.picture.value = inline(picture, title)
            self.changes.widget.layout.display = "none"

    def export(self) -> Path | None:
        self.link.value = ""
        if self.frame is None:
            return None
        frame = self.frame
        path = self._written(lambda: save_runs(frame, self.path.value.strip()))
        if path is not None:
            self.link.value = linked(path)
        return path
