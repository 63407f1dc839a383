"""Recorded results in a notebook: each machine's table under its own name, apart from the reader's numbers."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from kit.results import recorded as records
from kit.view.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from kit.results.recorded import Recorded

WORDS = {None: "", True: "met", False: "not met"}
PASSED = {None: "not measured", True: "pass", False: "FAIL"}


class Shown:
    """As many tables as there are machines."""

    def __init__(self, found: list[Recorded]) -> None:
        self.found = found

    def __repr__(self) -> str:
        lines = []
        for one in self.found:
            head, cells = cells_of(one)
            lines += [one.head, *(" | ".join(filter(None, row)) for row in [list(head), *cells]), ""]
        return "\n".join(lines).rstrip()

    def _repr_html_(self) -> str:
        return "".join(_html(one) for one in self.found)


def recorded(part: str, containing: str = "", *, folder: Path = records.FOLDER) -> Shown:
    """What the machines of data/reference recorded of a part ("bench-sync", "lab-split"), and if wanted only some of its rows."""
    return Shown(records.recorded(part, containing, folder=folder))


def _html(one: Recorded) -> str:
    head, cells = cells_of(one)
    escaped = [[html.escape(cell) for cell in row] for row in cells]
    return table(head, escaped, right=(2, 3, 4, 5) if one.bench else (2, 3), caption=f"<i>{html.escape(one.head)}</i>")


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
    return [row["what"], row["who"], f"{row['median']:.3g}{unit}", spread, str(row["n"]), limit, WORDS[row["met"]]]


def _check_row(row: dict[str, Any]) -> list[str]:
    unit = "" if row["unit"] == "1" else f" {row['unit']}"
    measured = "" if row["measured"] is None else f"{row['measured']:.6g}{unit}"
    return [PASSED[row["passed"]], row["check"], measured, f"{row['limit']:.6g}{unit}", row["why"]]
