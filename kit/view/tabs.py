"""The tabs of a panel: plots, verdict, tables with their export, output of the ranks, comparison of runs, and a forecast.

The verdict lists the worst results first, each with a slider for its limit. Moving a slider judges the stored rows again. Checks that
share a tolerance share its slider. Rows keep their order while a limit moves, so they do not jump; the next run sorts them.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import math
import mimetypes
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import pandas as pd

from kit.draw.album import OVERVIEW, Album, WhatIf
from kit.draw.data import read
from kit.draw.picture import SHEET, Picture, inline
from kit.errors import KitError
from kit.machine import MIB
from kit.results import Run, VerdictRow, write_trace
from kit.results.records import rank_name
from kit.results.run import run_name
from kit.results.units import amount
from kit.results.verdict import MARKS, SIGNS, beside_mark, tally, without_parts
from kit.view import look, named
from kit.view.look import Tab
from kit.view.model import BUSY, PanelLimit, PanelModel
from kit.view.progress import EndedBy

LAST = 500  # printed lines to show; thousands of lines make a page slow
ALL = "all ranks"
MOST = 200  # rows of a table on the page; a filter finds the others
GRID_SHEET = """
.kit-grid { overflow:auto; max-height:34em; }
.kit-grid table { border-collapse:collapse; font-size:.92em; font-variant-numeric:tabular-nums; }
.kit-grid th, .kit-grid td { text-align:left !important; }
.kit-grid th { position:sticky; top:0; background:var(--jp-layout-color0, Canvas); }
.kit-grid td, .kit-grid th { padding:1px 10px; white-space:nowrap; max-width:36em; overflow:hidden; text-overflow:ellipsis; }
"""
RECORDS = "records"  # the table of every record
TRACE = ".trace.json"
KINDS = {
    "CSV, provenance beside it": ".csv",
    "Parquet": ".parquet",
    "Markdown": ".md",
    "LaTeX": ".tex",
    "HTML": ".html",
    "JSON": ".json",
    "Trace for Perfetto": TRACE,
}
LINKED = 4 * MIB  # larger files get no download link
NO_RUN = "There is no run yet."
NOTHING = "There is no run yet: press Start and then Step, or Run all."


# -- plots: one at a time, in the notebook's own theme; a limit that moves is drawn again, and nothing else -------------------------------


@dataclass(slots=True)
class PlotPart:
    """A plot on the page: the drawing and its moved limits."""

    html: Any = field(default_factory=lambda: widgets.HTML(layout={"width": "100%"}))
    picture: Picture | None = None
    limits: Mapping[str, float] = field(default_factory=dict)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """A drawing makes so many objects that collecting garbage in between, through all of a kernel's, would take as long again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class PlotsTab(Tab):
    """Draws while visible: on new records, another plot, or a change of a limit in the drawing."""

    def __init__(self, model: PanelModel) -> None:
        super().__init__(model)
        self._offering = False
        self._album: Album | None = None
        self._read: tuple[Run | None, int] | None = None  # the records of the current drawing
        self._took = self._last = 0.0  # duration and time of the last drawing
        self._parts: dict[str, PlotPart] = {}
        self._chosen: str | None = None  # by the user; else the first plot with data
        self.choice = look.labelled_control(widgets.Dropdown, "Plot", "which plot to draw", width="26em")
        keep = "write this plot into the run's folder as ."
        self.png = look.button("Save PNG", "picture-o", f"{keep}png", lambda: self.save("png"))
        self.svg = look.button("Save SVG", "picture-o", f"{keep}svg", lambda: self.save("svg"))
        self.pictures = widgets.VBox(layout={"width": "100%", "min_height": "120px"})
        controls = look.flex_box(self.choice, self.png, self.svg)
        self.absent = widgets.HTML()
        self.widget = widgets.VBox([look.sheet(SHEET), controls, self.notice, self.absent, self.pictures])
        model.observe(self._changed, ["run", "revision", "tolerances", "state"])
        self.choice.observe(self._choose, "value")

    def _choose(self, change: Any) -> None:
        if not self._offering:
            self._chosen = change["new"]
            self._say("drawing ...")
            self._changed()

    def _changed(self, _: Any = None) -> None:
        if not self._visible or self._offering:
            return
        try:
            self._show()
        except KitError as error:
            self._say(str(error), bad=True)
        except Exception as error:  # noqa: BLE001 - a drawing may fail on a partial run; the panel must survive
            self._say(f"{self.choice.value} cannot be drawn for this run: {type(error).__name__}: {error}", bad=True)

    def _show(self) -> None:
        began = time.monotonic()
        run = self.model.run
        records = (run, self.model.revision)
        if self._read != records:
            if self._too_soon():
                return
            self._album = None if run is None else named.album(run)
            self._read, self._parts = records, {name: PlotPart(part.html) for name, part in self._parts.items()}
            self._offer()
        for button in (self.png, self.svg, self.choice):
            button.disabled = self._album is None
        missing = self._album is None or self._album.data.frame.empty
        # The page keeps the DOM of every picture that is taken out, so those of the last run are hidden and drawn over.
        self.pictures.layout.display = "none" if missing else None
        self.absent.layout.display = None if missing else "none"
        if self._album is None or missing:
            waits = self._album is not None or self.model.state in BUSY
            words = "There are no measurements yet." if waits else NOTHING
            self.absent.value = f"<p>{look.span_html('faint', words)}</p>"
            return
        every = [name for _, name in self.choice.options if name != OVERVIEW]
        with uncollected():
            self._draw(self._album, every if self.choice.value == OVERVIEW and every else [self.choice.value])
        self._took = time.monotonic() - began
        self._last = time.monotonic()

    def _too_soon(self) -> bool:
        """While ranks work, drawing takes at most a tenth of the kernel's time; it catches up when they are idle."""
        same = self._read is not None and self._read[0] is self.model.run
        return same and self.model.state == "running" and time.monotonic() - self._last < 10 * self._took

    def _draw(self, album: Album, names: Sequence[str]) -> None:
        """Show the plots one below the other; unchanged ones on the page are kept."""
        self._say("")
        for name in names:
            part = self._parts.setdefault(name, PlotPart())
            moved = {key: value for key, value in self.model.tolerances.items() if album.moves_with(name, {key})}
            if part.picture is None or part.limits != moved:
                part.picture, part.limits = album.draw(name, tolerances=moved, like=part.picture), moved
                part.html.value = inline(part.picture, f"{album.title(name)} of {album.data.run.id}")
        shown = tuple(self._parts[name].html for name in names)
        if self.pictures.children != shown:
            self.pictures.children = shown

    def _offer(self) -> None:
        """The plots with data; the one that the user chose is kept if possible."""
        names = [] if self._album is None else [*self._album.plots, OVERVIEW]  # the slowest last
        options = [] if self._album is None else [(self._album.title(name), name) for name in names]
        if list(self.choice.options) == options:
            return
        self._offering = True
        self.choice.options = options
        self.choice.value = self._chosen if self._chosen in names else next(iter(names), None)
        self._offering = False

    def save(self, kind: str) -> Path | None:
        if self._album is None or self.choice.value is None:
            return None
        album, name = self._album, self.choice.value
        path = album.data.run.dir / f"{name}.{kind}"
        return self._written(lambda: album.draw(name, tolerances=self.model.tolerances).save(path))


# -- tables ---------------------------------------------------------------------------------------------------------------


COMPARES = re.compile(r"[=!<>]=|\w\s*[<>]\s*[-\w'\"]")  # in a query, and hardly in a word to search for


def matching_rows(frame: pd.DataFrame, words: str) -> tuple[pd.DataFrame, str]:
    """The rows that a pandas query selects (`rank == 1 and value > 3`), or that have this text; and why a query selects none."""
    if not words.strip():
        return frame, ""
    try:
        return frame.query(words), ""
    except Exception as error:  # noqa: BLE001 - a half-typed query may raise anything; it is then treated as text
        why = f"{type(error).__name__}: {error}" if COMPARES.search(words) else ""
        text = frame.select_dtypes(exclude="number")
        matches = pd.Series(data=False, index=frame.index)
        for name in text:
            matches |= text[name].isin(
                [cell_text for cell_text in text[name].unique() if words.strip().lower() in str(cell_text).lower()]
            )
        return frame[matches], why


class Grid:
    """A table to filter and sort, with its first rows. A new table keeps the order if it has the same columns."""

    def __init__(self, name: str = "table") -> None:
        self.frame: pd.DataFrame | None = None
        self.found: pd.DataFrame | None = None  # the selected rows, sorted
        self._name = name
        example = 'a word, or: metric == "groups" and rank == 1'
        which = "rows with this text, or a pandas query such as value > 3"
        self.words = look.labelled_control(widgets.Text, "Filter", which, placeholder=example, width="32em")
        self.by = look.labelled_control(widgets.Dropdown, "Sort by", "the column to sort by", width="18em")
        self.descending = look.labelled_control(
            widgets.Checkbox, "largest first", "sort in descending order", indent=False
        )
        self.count = widgets.HTML()
        self.rows = widgets.HTML(layout={"width": "100%"})
        self.copy = look.labelled_control(
            widgets.Textarea, "Markdown", "the rows shown, as Markdown to copy", width="100%"
        )
        self.copy.layout.height = "8em"
        self.folded = widgets.Accordion([self.copy], titles=("Copy as Markdown",))
        above = look.flex_box(self.words, self.by, self.descending, self.count)
        self.widget = widgets.VBox([look.sheet(GRID_SHEET), above, self.rows, self.folded], layout={"width": "100%"})
        for control in (self.words, self.by, self.descending):
            control.observe(self._draw, "value")
        self.folded.observe(self._copied, "selected_index")
        self.show(None)

    def show(self, frame: pd.DataFrame | None, *, worst: str = "", name: str = "") -> None:
        """Show another table, sorted by the column `worst`, largest first."""
        known = [] if self.frame is None else list(self.frame.columns)
        self.frame, self._name = None, name or self._name  # no drawing until the controls are set
        if frame is not None and list(frame.columns) != known:
            self.by.options = [("original order", ""), *((str(column), str(column)) for column in frame.columns)]
            self.by.value, self.descending.value, self.words.value = worst, bool(worst), ""
        self.frame = frame
        self._draw()

    def _draw(self, _: Any = None) -> None:
        for control in (self.words, self.by, self.descending):
            control.disabled = self.frame is None
        self.rows.layout.display = self.folded.layout.display = "none" if self.frame is None else None
        if self.frame is None:
            return
        matches, why = matching_rows(self.frame, self.words.value)
        if self.by.value:
            matches = matches.sort_values(self.by.value, ascending=not self.descending.value, kind="stable")
        self.found = matches
        shown = matches.head(MOST)
        html = shown.to_html(index=False, border=0, na_rep="", float_format=lambda value: f"{value:.6g}")
        self.rows.value = f'<div class="kit-grid" tabindex="0" aria-label="{look.text(self._name)}">{html}</div>'
        self.count.value = look.status_html(
            f"{len(matches):,} of {len(self.frame):,} rows"
            + (f", {MOST} shown" if len(matches) > MOST else "")
            + (f"; this query cannot be used: {why}" if why else "")
        )
        self._copied()

    def _copied(self, _: Any = None) -> None:
        """Write the Markdown, which takes as long as the table, while it is visible."""
        if self.found is None or self.folded.selected_index is None:
            return
        safe = self.found.head(MOST).replace({r"\|": r"\\|"}, regex=True)  # no cell ends early
        self.copy.value = str(safe.to_markdown(index=False, floatfmt=".6g", missingval=""))


LARGER = {"B": ("MiB", 1 / MIB), "s": ("ms", 1e3)}  # readable units and their factors


def in_larger_units(frame: pd.DataFrame) -> pd.DataFrame:
    """Convert bytes to MiB and seconds to ms in a table with columns for value and unit."""
    if not {"value", "unit"} <= {*frame.columns}:
        return frame
    scales = [LARGER.get(unit, (unit, 1.0)) for unit in frame["unit"]]
    return frame.assign(value=frame["value"] * [by for _, by in scales], unit=[word for word, _ in scales])


class TablesTab(Tab):
    """The records of the run and the tables that its lab makes of them, read when visible; and their export to a file."""

    def __init__(self, model: PanelModel) -> None:
        super().__init__(model)
        self._shown: object = None
        self.choice = look.labelled_control(widgets.Dropdown, "Table", "which table of the run", options=[RECORDS])
        why = "show bytes as MiB and seconds as ms; otherwise as recorded"
        self.units = look.labelled_control(widgets.Checkbox, "MiB and ms", why, indent=False, value=True)
        self.kind = look.labelled_control(widgets.Dropdown, "Format", "what kind of file", width="24em", options=KINDS)
        self.path = look.labelled_control(widgets.Text, "File", "where it is written; ~ is your home")
        self.path.layout = widgets.Layout(width="auto", flex="1 1 320px")
        whole = "write the whole table, or the run's trace, to the file"
        self.go = look.button("Export", "download", whole, self.export, button_style="primary")
        self.link = widgets.HTML()
        self.grid = Grid()
        controls = look.flex_box(self.choice, self.units, self.kind, self.path, self.go, self.link)
        self.widget = widgets.VBox([controls, self.notice, self.grid.widget])
        model.observe(self._changed, ["run", "revision"])
        for control in (self.choice, self.units):
            control.observe(self._changed, "value")
        for control in (self.choice, self.kind):
            control.observe(self._name_file, "value")
        model.observe(self._name_file, "run")
        self._name_file()

    def _changed(self, _: Any = None) -> None:
        run = self.model.run
        if not self._visible or run is None:
            return
        known = named.tables(run)
        names = [RECORDS, *(name for name in known if name != RECORDS)]
        if list(self.choice.options) != names:
            self.choice.options = names
        wanted = (run, self.model.revision, self.choice.value, self.units.value)
        if self._shown == wanted:
            return
        table = known[self.choice.value]
        self._say("")
        try:
            made = table.rows(read(run))
            self.grid.show(in_larger_units(made) if self.units.value else made, worst=table.worst, name=table.title)
        except (KitError, KeyError, ValueError, IndexError) as error:  # a partial run may lack data for a table
            self.grid.show(None)
            lacking = f"this run lacks data for the table {self.choice.value}: {type(error).__name__}: "
            self._say(f"{'' if isinstance(error, KitError) else lacking}{error}")
        self._shown = wanted

    def _name_file(self, _: Any = None) -> None:
        run, kind, table = self.model.run, self.kind.value, self.choice.value
        self.go.disabled = run is None
        self.link.value = ""
        if run is None:
            self._say(NO_RUN)
            self.path.value = ""
            return
        of_table = "" if kind == TRACE or table == RECORDS else f"-{table}"
        self.path.value = str(run.dir / f"{run.dir.name}{of_table}{kind}")

    def export(self) -> Path | None:
        """Write the whole table, as recorded and without the filter; a trace is one of the run."""
        run, kind, table = self.model.run, self.kind.value, self.choice.value
        self.link.value = ""
        if run is None:
            return None
        target = self.path.value.strip()
        path = self._written(
            lambda: write_trace(run, target) if kind == TRACE else named.save_table([run], table, target)
        )
        if path is not None:
            if kind == ".csv":
                self._say(f"written: {path}; provenance: {path.name}.provenance.json in the same folder")
            self.link.value = linked(path)
        return path


def linked(path: Path) -> str:
    """A download link that contains the file, for a browser on another machine; none for a large file."""
    size, name = path.stat().st_size, look.text(path.name)
    if size > LINKED:
        words = f"{size / MIB:.0f} MiB is too large for a download link; copy the file from its folder"
        return look.span_html("faint", words)
    kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
    data = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    return f'<a style="text-decoration:underline" download="{name}" href="{data}">Download {name}</a>'


# -- what the run would have been with other settings: a lab's forecast as a table that follows its controls -----------


class WhatIfTab(Tab):
    """Reads the run when visible; then each change of a control shows a new forecast."""

    def __init__(self, model: PanelModel, declared: WhatIf) -> None:
        super().__init__(model)
        self._declared = declared
        self._read: tuple[Run, int] | None = None
        self._forecast: Callable[..., pd.DataFrame] | None = None
        self._setting = False
        self.controls: dict[str, Any] = {
            **{
                name: look.labelled_control(widgets.Dropdown, name, f"another {name}", width="22em", options=[*options])
                for name, options in declared.names.items()
            },
            **{
                name: look.labelled_control(widgets.IntSlider, name, f"another {name}", width="28em", min=low, max=high)
                for name, (low, high) in declared.numbers.items()
            },
        }
        self.grid = Grid(declared.title)
        self.widget = widgets.VBox([look.flex_box(*self.controls.values()), self.notice, self.grid.widget])
        model.observe(self._changed, ["run", "revision"])
        for control in self.controls.values():
            control.observe(self._changed, "value")
        self.grid.show(None)

    def _changed(self, _: Any = None) -> None:
        if not self._visible or self._setting:
            return
        self._say("")
        self.grid.show(self._attempt(self._table), name=self._declared.title)

    def _table(self) -> pd.DataFrame | None:
        run = self.model.run
        if run is None:
            self._say(NO_RUN)
            return None
        wanted = (run, self.model.revision)
        if self._read != wanted:
            another = self._read is None or self._read[0] is not run
            self._read, self._forecast = wanted, None
            if another:
                self._take_settings(run)
            self._forecast = self._declared.prepare(run)
        if self._forecast is None:  # the run could not be read
            return None
        return self._forecast(**{name: control.value for name, control in self.controls.items()})

    def _take_settings(self, run: Run) -> None:
        """Controls start with the settings of the run."""
        self._setting = True
        for name, control in self.controls.items():
            value = run.config.get(name)
            options = self._declared.names.get(name)
            if value is not None and (options is None or value in options):
                control.value = value
        self._setting = False


# -- what ranks printed --------------------------------------------------------------------------------------------------


class LogsTab(Tab):
    def __init__(self, model: PanelModel) -> None:
        super().__init__(model)
        narrow = {"description_width": "initial"}
        self.rank = look.labelled_control(
            widgets.Dropdown, "lines of", "which ranks' lines to show", options=[ALL], style=narrow
        )
        self.lines = widgets.HTML()
        self.widget = widgets.VBox([look.flex_box(self.rank), self.lines])
        self.rank.observe(self._changed, "value")
        model.observe(self._changed, ["log", "failure"])
        model.observe(self._ranks, ["size", "roles"])
        self._ranks()

    def _ranks(self, _: Any = None) -> None:
        before = self.rank.value
        self.rank.options = [ALL, *(rank_name(rank, self.model.roles) for rank in range(self.model.size))]
        if before in self.rank.options:
            self.rank.value = before

    def _changed(self, _: Any = None) -> None:
        if self._visible:
            rank = None if self.rank.value == ALL else int(self.rank.value.split()[1])
            self.lines.value = log_html(self.model.log, self.model.failure, rank=rank)


def log_html(log: Sequence[tuple[int, str]], failure: EndedBy | None, *, rank: int | None) -> str:
    """The newest lines at the bottom, where the box is scrolled to."""
    wanted = [(of, line) for of, line in log if rank is None or of == rank]
    shown = wanted[-LAST:]
    rows = [f"{look.span_html('faint', f'[{of}]')} {look.text(line)}" for of, line in shown]
    if failure is not None and (rank is None or rank in failure.ranks or not failure.ranks):
        rows.append(look.span_html("bad", f"✗ {failure.kind}: {failure.message}"))
    if not rows:
        return '<p class="kit-faint">Nothing was printed.</p>'
    count = f"{len(shown)} of {len(wanted)} lines" if len(shown) < len(wanted) else f"{len(wanted)} lines"
    count = count if wanted else "nothing was printed"
    body = "\n".join(rows)
    lines = f'<pre tabindex="0" role="log" aria-label="lines of ranks">{body}</pre>'
    return f'<p class="kit-faint">{count}</p><div class="kit-log">{lines}</div>'


# -- the verdict, and the sliders of its limits --------------------------------------------------------------------------

ORDER = list(MARKS)
PLACES = 400
DECADE = 20  # slider places per power of ten, including the power itself
FEW = 6  # rows to list for a check with many answers
FILE = "tolerances.json"


class LimitRow:
    """One rule, with its slider and its field for the exact number."""

    def __init__(self, model: PanelModel, limit: PanelLimit) -> None:
        self.model, self.limit = model, limit
        self._taking = False
        self.html = widgets.HTML()
        self.slider: Any = None
        self.exact: Any = None
        parts: list[Any] = [self.html]
        if limit.better != "==":
            # The check's name stands above, whole. It is the limit's keyword elsewhere: run.verdict(memory_drift=50), --tolerances.
            self.exact = widgets.FloatText(
                value=limit.default,
                step=None,
                description="limit",
                tooltip=f"{limit.rule}: {limit.question} Exact limit",
                continuous_update=False,
                style={"description_width": "initial"},
                layout={"width": "120px"},
            )
            self.slider = widgets.IntSlider(readout=False, tooltip=self.exact.tooltip, layout={"width": "120px"})
            parts.append(look.flex_box(self.exact, self.slider))
            self.slider.observe(self._moved, "value")
            self.exact.observe(self._moved, "value")
        self.widget = look.flex_box(*parts, names=("kit-check",))
        self.aim(limit)

    def aim(self, limit: PanelLimit) -> None:
        """Show another run's limit: its default and the ends of its slider."""
        self.limit = limit
        counts = limit.unit == "1" and all(float(end).is_integer() for end in (limit.low, limit.high))
        self.scale = slider_scale(limit.low, limit.high, whole=counts)
        if self.slider is not None:
            self._taking = True
            self.slider.max = len(self.scale) - 1
            self._taking = False

    def _moved(self, change: Any) -> None:
        if not self._taking and math.isfinite(change["new"]):
            value = self.scale[change["new"]] if change["owner"] is self.slider else change["new"]
            self.model.move(self.limit.rule, value)

    def show(self, rows: Sequence[VerdictRow]) -> None:
        moved = self.model.tolerances.get(self.limit.rule)
        value = self.limit.default if moved is None else moved
        self.html.value = check_html(self.limit, rows, moved=moved is not None)
        if self.slider is None:
            return
        self._taking = True
        try:
            if self.exact.value != value:
                self.exact.value = value
            self.slider.value = nearest(self.scale, value)
        finally:
            self._taking = False


class VerdictTab(Tab):
    """Observes the verdict and the tolerances. Its rows, nearly half of a panel's widgets, are made when it first becomes visible."""

    def __init__(self, model: PanelModel, *, visible: bool = True) -> None:
        super().__init__(model)
        self._visible = self._made = visible
        self.rows: dict[str, LimitRow] = {}
        self.head = widgets.HTML()
        wide, named = {"description_width": "initial"}, "a named set of limits"
        sets = [("choose...", ""), *zip(model.presets, model.presets, strict=True)]
        self.preset = look.labelled_control(widgets.Dropdown, "tolerances", named, options=sets, style=wide)
        file = "a JSON file of tolerances, which kit run --tolerances also reads"
        self.path = look.labelled_control(widgets.Text, "file", file, value=FILE, style=wide)
        self.path.layout = widgets.Layout(width="auto", flex="1 1 160px", max_width="360px")
        written = "write the moved tolerances to the file"
        self.save = look.button("Save", "download", written, lambda: self._file(save=True))
        self.load = look.button("Load", "upload", "load the tolerances from the file", lambda: self._file(save=False))
        self.body = widgets.VBox()
        controls = look.flex_box(self.preset, self.path, self.save, self.load)
        self.widget = widgets.VBox([self.head, controls, self.notice, self.body])
        self.preset.observe(self._preset, "value")
        model.observe(self._show, ["verdict", "tolerances"])
        model.observe(self._order, ["run", "state"])
        self._order()

    def _changed(self, _: Any = None) -> None:
        if self._visible and not self._made:  # afterwards hidden rows are updated too, which is cheap
            self._made = True
            self._order()

    def _preset(self, change: Any) -> None:
        if change["new"]:
            self.model.take(self.model.presets[change["new"]])
            self._say(f"{len(self.model.tolerances)} limits differ from the lab's defaults")

    def _file(self, *, save: bool) -> None:
        path = self.path.value.strip() or FILE
        words = self._attempt(lambda: self._save_limits(path) if save else self._load_limits(path))
        if words is not None:
            self._say(words)

    def _save_limits(self, path: str) -> str:
        return f"saved {len(self.model.tolerances)} tolerances to {self.model.save_tolerances(path)}"

    def _load_limits(self, path: str) -> str:
        self.model.load_tolerances(path)
        return f"loaded {len(self.model.tolerances)} tolerances from {path}"

    def _order(self, _: Any = None) -> None:
        """The worst first. Limits and slider ends depend on the run and stay fixed until it changes."""
        limits = self.model.limits if self._made else []
        for limit in limits:
            if limit.rule not in self.rows:  # a check that applies to some runs only
                self.rows[limit.rule] = LimitRow(self.model, limit)
            elif self.rows[limit.rule].limit != limit:
                self.rows[limit.rule].aim(limit)
        asked = [self.rows[limit.rule] for limit in limits]
        # The page keeps the DOM of every row that is put elsewhere, so rows move only when a verdict says so.
        if self.model.verdict is None and {row.widget for row in asked} == {*self.body.children}:
            self._show()
            return
        ordered = sorted(
            asked, key=lambda row: min((ORDER.index(answer.passed) for answer in self._answers(row.limit)), default=1)
        )
        children = tuple(row.widget for row in ordered)
        if self.body.children != children:
            self.body.children = children
        self._show()

    def _answers(self, limit: PanelLimit) -> list[VerdictRow]:
        verdict = self.model.verdict or ()
        return [row for row in verdict if row.check.partition("/")[0] == limit.rule]

    def _show(self, change: Any = None) -> None:
        if change is not None and change["name"] == "verdict" and change["old"] is None:
            self._order()
            return
        self.head.value = head_html(self.model.verdict, self.model.run)
        for row in self.rows.values():
            row.show(self._answers(row.limit))
        if self.preset.value and self.model.tolerances != self.model.presets[self.preset.value]:
            self.preset.value = ""


def head_html(verdict: Any, run: Run | None) -> str:
    if run is None or verdict is None or not len(verdict):
        return '<p class="kit-faint">Not judged yet: run the lab to its end.</p>'
    mark = MARKS[verdict.answer]
    answer = look.span_html(mark.kind, f"{mark.sign} {tally(verdict)}")
    return f"<div role='status' aria-live='polite'>{answer} {look.text(run_name(run.dir))}</div>"


def check_html(limit: PanelLimit, rows: Sequence[VerdictRow], *, moved: bool) -> str:
    """A check's answer; for one with many answers also the worst failed ones."""
    heads = without_parts(rows)
    held = f"limit {SIGNS[limit.better]} {amount(limit.default, limit.unit)}"
    parts = [look.span_html("faint", f"{limit.rule}: not judged yet, {held}")] if not rows else []
    for row in heads:
        below = [part for part in rows if part.check.startswith(f"{row.check}/")]
        failed = [part for part in below if part.passed is False]
        parts.append(row_html(limit, row, moved=moved))
        parts += [f"&emsp;{row_html(limit, part, moved=False, brief=True)}" for part in failed[:FEW]]
        if below:
            left = len(failed) - FEW
            parts.append(look.span_html("faint", f"{len(below)} answers" + (f", {left} more fail" if left > 0 else "")))
    asked = look.span_html("faint", limit.question)
    return "".join(f"<div>{part}</div>" for part in [*parts, asked])


def row_html(limit: PanelLimit, row: VerdictRow, *, moved: bool, brief: bool = False) -> str:
    mark = MARKS[row.passed]
    measured = "" if row.measured is None else amount(row.measured, row.unit)
    held = f"{measured} {SIGNS[limit.better]} {amount(row.limit, row.unit)}" if measured else ""
    if row.passed is False:
        held = f"{measured}, limit {SIGNS[limit.better]} {amount(row.limit, row.unit)}"
    lab = look.span_html("busy", f" (lab: {amount(limit.default, limit.unit)})") if moved else ""
    name = row.check.partition("/")[2] if brief else row.check
    why = look.span_html("faint", beside_mark(row.why)) if row.why else ""
    return f'<b class="kit-{mark.kind}">{mark}</b> <b>{look.text(name)}</b> {look.text(held)}{lab} {why}'


# -- sliders ------------------------------------------------------------------------------------------------------------
# A browser rounds a slider's number to its steps and sends it back as if the user had moved it: a limit of 1e-06 would come
# back as 9.83e-07. So a slider has only integer places on a scale; the exact number is in the field next to it.


def slider_scale(low: float, high: float, *, whole: bool = False) -> list[float]:
    """The number at each place: powers of ten if the range spans them, every integer if they are few, else even steps."""
    if whole and high - low <= PLACES:
        return [low + place for place in range(round(high - low) + 1)]
    if low > 0 and high / low >= 100:
        steps = math.floor(DECADE * math.log10(high / low) + 1e-9)
        inner = [float(f"{low * 10 ** (place / DECADE):.3g}") for place in range(1, steps)]
    else:
        inner = [float(f"{low + (high - low) * place / PLACES:.4g}") for place in range(1, PLACES)]
    return sorted({low, *inner, high})


def nearest(numbers: Sequence[float], value: float) -> int:
    """The place of the nearest number; a value beyond the range is shown at its end."""
    inside = min(max(value, numbers[0]), numbers[-1])
    return min(range(len(numbers)), key=lambda place: abs(numbers[place] - inside))
