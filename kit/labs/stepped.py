"""What one step measured, as a small table: a row per metric, a column per rank."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kit.results import Record
from kit.results.records import label, rank_name
from kit.results.units import amount, columns, table_html

# In the records; in the way here.
HIDDEN = (
    *("overhead_seconds", "observers_seconds", "shared_rss", "peak_rss", "file_rss", "shm_rss", "pinned_bytes"),
    *("memfds", "shared_maps", "shared_bytes", "shm_files", "temp_files", "children"),
)


@dataclass(frozen=True, slots=True, repr=False)
class Stepped:
    """One phase that every rank has run. `records` are what was appended."""

    cycle: int
    phase: str
    records: Sequence[Record]
    done: int
    planned: int
    roles: Mapping[int, str] = dataclasses.field(default_factory=dict)

    def rows(self) -> list[list[str]]:
        """The heading, then a row per metric; where a level changed, what it was before the phase."""
        ranks = sorted({record.rank for record in self.records})
        values = {(label(record.metric, record.ids), record.rank): record for record in self.records}
        found = [m for m in dict.fromkeys(m for m, _ in values) if not m.endswith("_before") and m not in HIDDEN]
        names = sorted(found, key=lambda m: m != "seconds")  # the time comes first
        body = [
            [name, *(_cell(values.get((name, rank)), values.get((f"{name}_before", rank))) for rank in ranks)]
            for name in names
        ]
        return [["", *(rank_name(rank, self.roles) for rank in ranks)], *body]

    def __repr__(self) -> str:
        return f"{self._head()}\n{columns(self.rows())}"

    def _repr_html_(self) -> str:
        head, *body = [[html.escape(cell) for cell in row] for row in self.rows()]
        return table_html(head, body, caption=html.escape(self._head()))

    def _head(self) -> str:
        return f"{self.phase}, cycle {self.cycle} (phase {self.done} of {self.planned})"


def _cell(now: Record | None, before: Record | None) -> str:
    if now is None or now.value is None:
        return (now and now.text) or "-"
    text = amount(now.value, now.unit)
    if before is None or before.value is None or amount(before.value, now.unit) == text:
        return text
    return f"{amount(before.value, now.unit)} → {text}"
