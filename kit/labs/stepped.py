"""What one step measured, as a small table: a row per metric, a column per rank."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from kit.results import Record

HIDDEN = ("overhead_seconds", "shared_rss", "peak_rss")  # in the records; in the way here


@dataclass(frozen=True, slots=True, repr=False)
class Stepped:
    """One phase that every rank has run. `records` are what was appended."""

    cycle: int
    phase: str
    records: Sequence[Record]
    done: int
    planned: int

    def rows(self) -> list[list[str]]:
        """The heading, then a row per metric; where a level changed, what it was before the phase."""
        ranks = sorted({record.rank for record in self.records})
        values = {(record.metric, record.rank): record for record in self.records}
        names = [
            m for m in dict.fromkeys(r.metric for r in self.records) if not m.endswith("_before") and m not in HIDDEN
        ]
        body = [
            [name, *(_cell(values.get((name, rank)), values.get((f"{name}_before", rank))) for rank in ranks)]
            for name in names
        ]
        return [["", *(f"rank {rank}" for rank in ranks)], *body]

    def __repr__(self) -> str:
        rows = self.rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
        return "\n".join([self._head(), *lines])

    def _repr_html_(self) -> str:
        head, *body = self.rows()
        lines = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in body)
        return (
            f"<div><p>{html.escape(self._head())}</p><table>"
            f"<tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>{lines}</table></div>"
        )

    def _head(self) -> str:
        return f"{self.phase}, cycle {self.cycle} (phase {self.done} of {self.planned})"


def _cell(now: Record | None, before: Record | None) -> str:
    if now is None or now.value is None:
        return "-"
    text = show(now.value, now.unit)
    if before is None or before.value is None or show(before.value, now.unit) == text:
        return text
    return f"{show(before.value, now.unit)} → {text}"


def show(value: float, unit: str) -> str:
    """A number for people: milliseconds, MiB, counts."""
    if unit == "s":
        return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
    if unit == "B":
        return f"{value / 2**20:.1f} MiB"
    return f"{value:.6g}" if unit in {"", "1"} else f"{value:.6g} {unit}"
