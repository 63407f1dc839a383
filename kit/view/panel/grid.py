"""A table to sort and to filter: a click on a heading, words in a field, a page of rows at a time, and a copy as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from kit.view.panel import look
from kit.view.panel.sift import PAGE, Query, Table, cell, markdown

if TYPE_CHECKING:
    import pandas as pd

SHEET = """
.kit-grid .kit-rows { overflow-x:auto; max-height:34em; overflow-y:auto; }
.kit-grid table { border-collapse:collapse; font-size:.92em; font-variant-numeric:tabular-nums; }
.kit-grid th { position:sticky; top:0; background:var(--jp-layout-color0, Canvas); padding:0; text-align:left;
  border-bottom:2px solid var(--jp-border-color1, #d0d7de); }
.kit-grid td { padding:1px 10px; white-space:nowrap; max-width:36em; overflow:hidden; text-overflow:ellipsis; }
.kit-grid tbody tr:nth-child(even) { background:var(--jp-rendermime-table-row-background, var(--jp-layout-color1, transparent)); }
.kit-grid tbody tr:hover { background:var(--jp-rendermime-table-row-hover-background, var(--jp-layout-color2, transparent)); }
.kit-grid .kit-right, .kit-grid .kit-right button { text-align:right; }
.kit-grid button { font:inherit; color:inherit; background:none; border:0; cursor:pointer; padding:2px 10px; width:100%;
  text-align:inherit; white-space:nowrap; font-weight:bold; }
.kit-grid .kit-copy button { width:auto; border:1px solid var(--jp-border-color1, #d0d7de); border-radius:3px; font-weight:normal; }
.kit-grid .kit-copy textarea { width:100%; height:8em; font-family:monospace; color:inherit; background:transparent; }
"""
# A heading is in HTML, which cannot call the kernel; it presses a button of the grid that is not shown.
PRESS = "this.closest('.kit-grid').querySelector('.kit-sort-{}').click()"
# Selecting works on every page; where the browser lets a page write to the clipboard, the copy is made too.
COPY = (
    "var box=this.parentElement.querySelector('details');box.open=true;var text=box.querySelector('textarea');"
    "text.focus();text.select();this.nextElementSibling.textContent="
    "document.execCommand('copy')?'copied':'press Ctrl+C to copy'"
)


class Grid:
    """`show` gives it another table; what a person asked of it stays where the columns do."""

    def __init__(self, frame: pd.DataFrame | None = None, *, worst: str = "", name: str = "table") -> None:
        self.table: Table | None = None
        self.query = Query()
        self._name = name
        self._busy = False
        self.words = widgets.Text(
            description="Filter",
            placeholder="words, column:word, column:>3",
            tooltip="rows that have all of these words; column:word looks in one column, column:>3 compares numbers",
            layout={"width": "24em"},
        )
        self.by = widgets.Dropdown(description="Sort by", tooltip="the column to sort by", layout={"width": "18em"})
        self.descending = widgets.Checkbox(
            description="greatest first",
            tooltip="from the greatest to the least",
            indent=False,
            layout={"width": "auto"},
        )
        self.before, self.after = (
            widgets.Button(icon=icon, tooltip=f"{word} {PAGE} rows", description=word, layout={"width": "auto"})
            for icon, word in (("chevron-left", "previous"), ("chevron-right", "next"))
        )
        self.count = widgets.HTML()
        self.rows = widgets.HTML(layout={"width": "100%"})
        self.copy = widgets.HTML(layout={"width": "100%"})
        self._sorters = widgets.Box(layout={"display": "none"})
        sheet = widgets.HTML(f"<style>{SHEET}</style>", layout={"display": "none"})
        above = look.box(self.words, self.by, self.descending)
        below = look.box(self.count, self.before, self.after)
        self.widget = look.classed(
            widgets.VBox([sheet, above, self.rows, below, self.copy, self._sorters], layout={"width": "100%"}),
            "kit-grid",
        )
        for control in (self.words, self.by, self.descending):
            control.observe(self._asked, "value")
        self.before.on_click(lambda _: self.turn(-1))
        self.after.on_click(lambda _: self.turn(1))
        self.show(frame, worst=worst, name=name)

    def show(self, frame: pd.DataFrame | None, *, worst: str = "", name: str | None = None) -> None:
        """Another table. `worst` is the column whose greatest comes first, until a person sorts otherwise."""
        known = [] if self.table is None else self.table.columns
        self.table = None if frame is None else Table(frame)
        self._name = name or self._name
        if self.table is not None and self.table.columns != known:
            self._busy = True
            self.by.options = [("as it is", ""), *((column, column) for column in self.table.columns)]
            self.by.value = worst if worst in self.table.columns else ""
            self.descending.value = bool(self.by.value)
            self.words.value = ""
            self._busy = False
            self._sorters.children = [self._sorter(index) for index in range(len(self.table.columns))]
            self.query = Query("", self.by.value, self.descending.value)
        self._draw()

    def sort(self, column: str) -> None:
        """As a click on a heading does: numbers from the greatest, text from A; once more turns it around."""
        assert self.table is not None
        again = self.query.by == column
        turned = not self.query.descending if again else self.table.numeric(column)
        self._busy = True
        self.by.value, self.descending.value = column, turned
        self._busy = False
        self._asked()

    def turn(self, pages: int) -> None:
        """Turn over so many pages."""
        self.query = Query(self.query.words, self.query.by, self.query.descending, self.query.page + pages)
        self._draw()

    def _sorter(self, index: int) -> Any:
        button = look.classed(widgets.Button(), f"kit-sort-{index}")
        button.on_click(lambda _: self.sort(self.table.columns[index]) if self.table else None)
        return button

    def _asked(self, _: Any = None) -> None:
        if self._busy:
            return
        self.query = Query(self.words.value, self.by.value or "", self.descending.value)
        self._draw()

    def _draw(self) -> None:
        table = self.table
        for part in (self.rows, self.copy, self.count, self.before, self.after):
            part.layout.display = None if table is not None else "none"
        for control in (self.words, self.by, self.descending):
            control.disabled = table is None
        if table is None:
            return
        pages = table.pages(self.query)
        page = min(max(self.query.page, 0), pages - 1)
        self.query = Query(self.query.words, self.query.by, self.query.descending, page)
        shown, found = table.page(self.query), len(table.rows(self.query))
        self.rows.value = (
            f'<div class="kit-rows" tabindex="0" aria-label="{look.text(self._name)}">{self._html(shown)}</div>'
        )
        self.count.value = f'<span role="status">{counted(found, len(table), page, pages)}</span>'
        self.before.disabled, self.after.disabled = page == 0, page == pages - 1
        self.copy.value = copied(shown)

    def _html(self, shown: pd.DataFrame) -> str:
        assert self.table is not None
        right = [self.table.numeric(column) for column in self.table.columns]
        heads = []
        for index, column in enumerate(self.table.columns):
            sorted_by = column == self.query.by
            way = ("descending" if self.query.descending else "ascending") if sorted_by else "none"
            sign = {"descending": " ▼", "ascending": " ▲", "none": ""}[way]
            heads.append(
                f'<th scope="col" aria-sort="{way}"{side(right[index])}><button title="sort by {look.text(column)}" '
                f'onclick="{PRESS.format(index)}">{look.text(column)}{sign}</button></th>'
            )
        body = "".join(
            "<tr>"
            + "".join(f"<td{side(at)}>{look.text(cell(value))}</td>" for value, at in zip(row, right, strict=True))
            + "</tr>"
            for row in shown.itertuples(index=False, name=None)
        )
        return f"<table><thead><tr>{''.join(heads)}</tr></thead><tbody>{body}</tbody></table>"


def side(right: bool) -> str:
    return ' class="kit-right"' if right else ""


def counted(found: int, of: int, page: int, pages: int) -> str:
    """37 of 10 412 rows, page 1 of 3."""
    rows = f"{spaced(found)} of {spaced(of)} rows" if found != of else f"{spaced(of)} row{'s' * (of != 1)}"
    return rows if pages == 1 else f"{rows}, page {page + 1} of {pages}"


def spaced(number: int) -> str:
    return f"{number:,}".replace(",", "\u202f")


def copied(shown: pd.DataFrame) -> str:
    """A button that selects and copies the rows that are shown, and their text for a copy by hand."""
    return (
        f'<div class="kit-copy"><button onclick="{COPY}">Copy as Markdown</button> <span role="status"></span>'
        f'<details><summary>Markdown of the rows shown</summary><textarea readonly aria-label="Markdown of the rows shown" '
        f'onfocus="this.select()">{look.text(markdown(shown))}</textarea></details></div>'
    )
