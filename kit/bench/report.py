"""The output of a bench: a table for people, the machine in one line, and with --json one JSON object as the last line."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kit.bench.rows import Row
from kit.results.recorded import machine

HEADS = ("what", "who", "median", "low", "high", "n", "unit", "at most", "aim", "ceiling", "")


def tell(
    bench: str,
    rows: Sequence[Row],
    provenance: dict[str, Any] | None,
    *,
    as_json: bool,
    shown: str | None = None,
    seats: Sequence[Mapping[str, Any]] = (),
    parts: Mapping[str, float] | None = None,
) -> None:
    """`shown` in place of the table, for a bench whose rows are the cells of a better one."""
    print(table(rows) if shown is None else shown)
    print()
    if provenance is not None:
        print(machine(provenance))
    for seat in seats:
        print(f"seats: {seated(seat)}")
    if as_json:
        said = {"bench": bench, "rows": [one.to_json() for one in rows], "provenance": provenance}
        print(json.dumps({**said, "seats": list(seats), "parts": dict(parts or {})}))


def seated(seat: Mapping[str, Any]) -> str:
    """Where ranks sat, in a line."""
    ranks = f"{seat['ranks']} rank{'s' * (seat['ranks'] > 1)}"
    return f"{ranks} on {', '.join(dict.fromkeys(seat['devices']))} ({seat['why']})"


def progress(text: str) -> None:
    """What is being measured now; silent when nobody watches."""
    if sys.stderr.isatty():
        print(f"... {text}", file=sys.stderr)


def table(rows: Sequence[Row]) -> str:
    """Numbers to the right, words to the left; notes about rows are under the table."""
    cells = [list(HEADS), *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(_pad(*one) for one in enumerate(zip(line, widths, strict=True))).rstrip() for line in cells]
    notes = [f"{one.who}, {one.what}: {one.note}" for one in rows if one.note]
    return "\n".join([*lines, "", *notes] if notes else lines)


def _cells(one: Row) -> list[str]:
    judged = {None: "", True: "met", False: "NOT MET"}[one.met]
    low, high, n = (number(one.low), number(one.high), str(one.n)) if one.n else ("", "", "")
    median = number(one.median) if one.n else "-"
    return [one.what, one.who, median, low, high, n, one.unit, *map(number, (one.limit, one.aim, one.ceiling)), judged]


def _pad(column: int, cell: tuple[str, int]) -> str:
    text, width = cell
    return text.ljust(width) if HEADS[column] in {"what", "who", "unit", ""} else text.rjust(width)


def number(value: float | None) -> str:
    """Three significant digits."""
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
