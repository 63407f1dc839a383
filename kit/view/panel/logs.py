"""What ranks printed: the last lines, of all ranks or of one, and the error in red. Nothing is printed into a cell for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from kit.results.records import rank_name
from kit.view.panel import look
from kit.view.panel.look import Tab

if TYPE_CHECKING:
    from kit.view.panel.model import Failure, PanelModel

LAST = (50, 200, 1000)  # lines; a page of many thousand lines is slow
ALL = "all ranks"


class LogsTab(Tab):
    """Observes the log and the failure; draws only while it is looked at."""

    def __init__(self, model: PanelModel) -> None:
        super().__init__()
        self.model = model
        narrow = {"description_width": "initial"}
        self.rank = widgets.Dropdown(
            options=[ALL], description="lines of", style=narrow, tooltip="which ranks' lines to show"
        )
        self.last = widgets.Dropdown(
            options=LAST, value=LAST[1], description="last", style=narrow, tooltip="how many lines to show"
        )
        self.follow = widgets.Checkbox(
            True,
            description="follow",
            indent=False,
            tooltip="show new lines as they arrive",
            layout={"width": "auto"},
        )
        for drop in (self.rank, self.last):
            drop.layout.width = "auto"
        self.lines = widgets.HTML()
        self.widget = widgets.VBox([look.box(self.rank, self.last, self.follow), self.lines])
        for control in (self.rank, self.last, self.follow):
            control.observe(self._changed, "value")
        model.observe(self._grown, ["log", "failure"])
        model.observe(self._ranks, ["size", "roles"])
        self._ranks()

    def _ranks(self, _: Any = None) -> None:
        before = self.rank.value
        self.rank.options = [ALL, *(rank_name(rank, self.model.roles) for rank in range(self.model.size))]
        if before in self.rank.options:
            self.rank.value = before

    def _grown(self, _: Any) -> None:
        if self.follow.value:
            self._changed()

    def _changed(self, _: Any = None) -> None:
        if self._visible:
            rank = None if self.rank.value == ALL else int(self.rank.value.split()[1])
            self.lines.value = log_html(self.model.log, self.model.failure, rank=rank, last=self.last.value)


def log_html(log: Sequence[tuple[int, str]], failure: Failure | None, *, rank: int | None, last: int) -> str:
    """The newest lines at the bottom, which is where the box stands when it is drawn."""
    wanted = [(of, line) for of, line in log if rank is None or of == rank]
    shown = wanted[-last:]
    rows = [f"{look.span('faint', f'[{of}]')} {look.text(line)}" for of, line in shown]
    if failure is not None and (rank is None or rank in failure.ranks or not failure.ranks):
        rows.append(look.span("bad", f"✗ {failure.kind}: {failure.message}"))
    if not rows:
        return '<p class="kit-faint">Nothing has been printed yet.</p>'
    count = f"{len(shown)} of {len(wanted)} lines" if len(shown) < len(wanted) else f"{len(wanted)} lines"
    count = count if wanted else "nothing was printed"
    body = "\n".join(rows)
    lines = f'<pre tabindex="0" role="log" aria-label="lines of ranks">{body}</pre>'
    return f'<p class="kit-faint">{count}</p><div class="kit-log">{lines}</div>'
