"""The records of the run as a table, and the tables that its lab makes of them: filtered, sorted, copied as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ipywidgets as widgets
import pandas as pd

from kit.errors import KitError
from kit.view import named
from kit.view.panel import look
from kit.view.panel.look import Tab

if TYPE_CHECKING:
    from kit.view.panel.model import PanelModel

PAGE = 100  # rows
SHEET = """
.kit-grid { overflow:auto; max-height:34em; }
.kit-grid table { border-collapse:collapse; font-size:.92em; font-variant-numeric:tabular-nums; }
.kit-grid th { position:sticky; top:0; background:var(--jp-layout-color0, Canvas); }
.kit-grid td, .kit-grid th { padding:1px 10px; white-space:nowrap; max-width:36em; overflow:hidden; text-overflow:ellipsis; }
"""


def select(frame: pd.DataFrame, words: str) -> pd.DataFrame:
    """The rows that a pandas query selects (`rank == 1 and value > 3`); other words are looked for in the columns of text."""
    if not words.strip():
        return frame
    try:
        return frame.query(words)
    except Exception:  # noqa: BLE001 - whatever a half-typed query raises: it is words then
        text = frame.select_dtypes(exclude="number")
        found = pd.Series(data=False, index=frame.index)
        for name in text:
            found |= text[name].isin([one for one in text[name].unique() if words.strip().lower() in str(one).lower()])
        return frame[found]


def markdown(frame: pd.DataFrame) -> str:
    """A pipe table, in which no cell ends early."""
    text = frame.replace({r"\|": r"\\|"}, regex=True)
    return str(text.to_markdown(index=False, floatfmt=".6g", missingval=""))


class Grid:
    """A table to filter and to sort, a page of rows at a time. Another table keeps the order where it has the same columns."""

    def __init__(self, name: str = "table") -> None:
        self.frame: pd.DataFrame | None = None
        self.found: pd.DataFrame | None = None  # the rows that are asked for, in their order
        self._name = name
        self.words = widgets.Text(
            description="Filter",
            placeholder='a word, or: metric == "groups" and rank == 1',
            tooltip="rows with this text, or a pandas query such as value > 3",
            layout={"width": "32em"},
        )
        self.by = widgets.Dropdown(description="Sort by", tooltip="the column to sort by", layout={"width": "18em"})
        self.descending = widgets.Checkbox(
            description="greatest first",
            tooltip="from the greatest to the least",
            indent=False,
            layout={"width": "auto"},
        )
        self.page = widgets.BoundedIntText(
            min=1, max=1, description="Page", tooltip=f"{PAGE} rows each", layout={"width": "11em"}
        )
        self.count = widgets.HTML()
        self.rows = widgets.HTML(layout={"width": "100%"})
        self.copy = widgets.Textarea(
            description="Markdown",
            tooltip="the rows shown, as Markdown to copy",
            layout={"width": "100%", "height": "8em"},
        )
        self.folded = widgets.Accordion([self.copy], titles=("Copy as Markdown",))
        sheet = widgets.HTML(f"<style>{SHEET}</style>", layout={"display": "none"})
        above = look.box(self.words, self.by, self.descending, self.page, self.count)
        self.widget = widgets.VBox([sheet, above, self.rows, self.folded], layout={"width": "100%"})
        for control in (self.words, self.by, self.descending, self.page):
            control.observe(self._draw, "value")
        self.show(None)

    def show(self, frame: pd.DataFrame | None, *, worst: str = "", name: str = "") -> None:
        """Another table. `worst` is the column whose greatest value comes first."""
        known = [] if self.frame is None else list(self.frame.columns)
        self.frame, self._name = None, name or self._name  # nothing is drawn until the controls are set
        if frame is not None and list(frame.columns) != known:
            self.by.options = [("as it is", ""), *((str(column), str(column)) for column in frame.columns)]
            self.by.value, self.descending.value, self.words.value = worst, bool(worst), ""
        self.frame = frame
        self._draw()

    def _draw(self, change: Any = None) -> None:
        for control in (self.words, self.by, self.descending):
            control.disabled = self.frame is None
        self.rows.layout.display = self.folded.layout.display = "none" if self.frame is None else None
        if self.frame is None:
            return
        found = select(self.frame, self.words.value)
        if self.by.value:
            found = found.sort_values(self.by.value, ascending=not self.descending.value, kind="stable")
        self.found = found
        self.page.max = max(1, -(-len(found) // PAGE))
        if change is not None and change["owner"] is not self.page:
            self.page.value = 1
        shown = found.iloc[(self.page.value - 1) * PAGE : self.page.value * PAGE]
        html = shown.to_html(index=False, border=0, na_rep="", float_format=lambda value: f"{value:.6g}")
        self.rows.value = f'<div class="kit-grid" tabindex="0" aria-label="{look.text(self._name)}">{html}</div>'
        self.count.value = look.status(f"{len(found):,} of {len(self.frame):,} rows, {self.page.max} pages")
        self.copy.value = markdown(shown)


class RecordsTab(Tab):
    """Reads when it is looked at."""

    def __init__(self, model: PanelModel) -> None:
        super().__init__()
        self.model = model
        self._shown: object = None
        self.choice = widgets.Dropdown(description="Table", options=["records"], tooltip="which table of the run")
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
        known = named.tables(run)
        names = ["records", *(name for name in known if name != "records")]
        if list(self.choice.options) != names:
            self.choice.options = names
        wanted = (run, self.model.revision, self.choice.value)
        if self._shown == wanted:
            return
        table = known[self.choice.value]
        try:
            self.grid.show(table.make(run), worst=table.worst, name=table.title)
            self._say("")
        except KitError as error:
            self._cannot(str(error))
        except (KeyError, ValueError, IndexError) as error:  # part of a run may lack what a table is made of
            self._cannot(f"this run has too little for the table {self.choice.value}: {type(error).__name__}: {error}")
        self._shown = wanted

    def _cannot(self, why: str) -> None:
        self.grid.show(None)
        self._say(why)
