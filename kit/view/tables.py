"""Tables in a notebook: verdicts once `%load_ext kit` has run, and the recorded results of named machines.

Failures are marked in colour and in words; text is left-aligned, numbers right.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kit.draw.style import CSS
from kit.results import recorded as records
from kit.results.marks import MARKS, tally, worst_first
from kit.results.units import amount

if TYPE_CHECKING:
    from pathlib import Path

    from kit.results.recorded import Recorded

MET = {None: "", True: "met", False: "not met"}


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = (), caption: str = "") -> str:
    """An HTML table. Cells must be escaped already; `right` numbers the right-aligned columns."""
    sides = ["right" if index in right else "left" for index in range(len(head))]

    def line(tag: str, cells: Sequence[str]) -> str:
        return "".join(
            f'<{tag} style="text-align:{side}">{cell}</{tag}>' for side, cell in zip(sides, cells, strict=True)
        )

    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    above = f'<caption style="text-align:left">{caption}</caption>' if caption else ""
    return f"<table>{above}<thead><tr>{line('th', head)}</tr></thead><tbody>{body}</tbody></table>"


def verdict_html(verdict: Any) -> str:
    """A row per check, the failed ones first."""
    rows = []
    for row in worst_first(verdict):
        mark = MARKS[row.passed]
        shown = f'<b style="color:{CSS[mark.kind]};white-space:nowrap">{mark}</b>'
        measured = "" if row.measured is None else amount(row.measured, row.unit)
        cells = (row.check, measured, amount(row.limit, row.unit), row.why)
        rows.append([shown, *map(html.escape, cells)])
    return table(("", "check", "measured", "limit", "why"), rows, right=(2, 3), caption=tally(verdict))


def install(ipython: Any) -> None:
    """Have the shell show verdicts this way; they are registered by name, so that nothing is loaded for it."""
    formatter = ipython.display_formatter.formatters["text/html"]
    formatter.for_type_by_name("kit.results.verdict", "Verdict", verdict_html)


# -- recorded results ----------------------------------------------------------------------------------------------------


class Shown:
    """A table per machine, under the machine's name, apart from the reader's own numbers."""

    def __init__(self, found: list[Recorded]) -> None:
        self.found = found

    def __repr__(self) -> str:
        lines = []
        for one in self.found:
            head, cells = cells_of(one)
            lines += [one.head, *(" | ".join(filter(None, row)) for row in [list(head), *cells]), ""]
        return "\n".join(lines).rstrip()

    def _repr_html_(self) -> str:
        tables = []
        for one in self.found:
            head, cells = cells_of(one)
            rows = [[html.escape(cell) for cell in row] for row in cells]
            right = (2, 3, 4, 5) if one.bench else (2, 3)
            tables.append(table(head, rows, right=right, caption=f"<i>{html.escape(one.head)}</i>"))
        return "".join(tables)


def recorded(part: str, containing: str = "", *, folder: Path = records.FOLDER) -> Shown:
    """What the machines of data/reference recorded of a part ("bench-sync", "lab-split"), all of it or the rows that contain a text."""
    return Shown(records.recorded(part, containing, folder=folder))


def cells_of(one: Recorded) -> tuple[tuple[str, ...], list[list[str]]]:
    if one.bench:
        return ("what", "who", "median", "low to high", "n", "at most", ""), [_bench_row(row) for row in one.rows]
    return ("", "check", "measured", "limit", "why"), [_check_row(row) for row in one.rows]


def _bench_row(row: dict[str, Any]) -> list[str]:
    unit = "" if row["unit"] == "1" else f" {row['unit']}"
    if row["median"] is None:
        return [row["what"], row["who"], "-", "", "", "", row["note"]]
    spread = f"{row['low']:.3g} to {row['high']:.3g}"
    limit = "" if row["limit"] is None else f"{row['limit']:.3g}"
    return [row["what"], row["who"], f"{row['median']:.3g}{unit}", spread, str(row["n"]), limit, MET[row["met"]]]


def _check_row(row: dict[str, Any]) -> list[str]:
    measured = "" if row["measured"] is None else amount(row["measured"], row["unit"])
    return [MARKS[row["passed"]].word, row["check"], measured, amount(row["limit"], row["unit"]), row["why"]]
