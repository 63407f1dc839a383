"""Results of named machines that come with the kit, as `kit reference` and `kit bench --json` write them.

They are told with the machine they were recorded on, so that nobody takes them for what was measured here.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.errors import BadInput
from kit.results.files import read_json
from kit.results.units import amount, table_html, unit_word
from kit.results.verdict import MARKS
from kit.version import shipped

MET = {None: "", True: "met", False: "not met"}
FOLDER = shipped("data/reference")


@dataclass(frozen=True, slots=True)
class Recorded:
    """What one machine recorded of a bench (its rows), or of a lab (its verdict's)."""

    folder: str
    provenance: dict[str, Any]
    rows: list[dict[str, Any]]
    bench: bool

    @property
    def head(self) -> str:
        return f"recorded on {self.folder}, not here: {machine(self.provenance)}"

    def table(self) -> list[list[str]]:
        """The names of the columns, then the rows."""
        if self.bench:
            return [["what", "who", "median", "low to high", "n", "at most", ""], *map(_bench_row, self.rows)]
        return [["", "check", "measured", "limit", "why"], *map(_check_row, self.rows)]


class Shown(list[Recorded]):
    """A table per machine, under the machine's name, apart from the reader's own numbers."""

    def __repr__(self) -> str:
        lines = ([one.head, *(" | ".join(filter(None, row)) for row in one.table())] for one in self)
        return "\n\n".join(map("\n".join, lines))

    def _repr_html_(self) -> str:
        tables = []
        for one in self:
            head, *rows = [[html.escape(cell) for cell in row] for row in one.table()]
            right = (2, 3, 4, 5) if one.bench else (2, 3)
            tables.append(table_html(head, rows, right=right, caption=f"<i>{html.escape(one.head)}</i>"))
        return "".join(tables)


def recorded(part: str, containing: str = "", *, folder: Path = FOLDER) -> Shown:
    """What each machine recorded of a part, such as "bench-sync" or "lab-split": the rows whose name contains a text.

    A bench may have a file for each of its parts, as "bench-sync.model"; their rows come together."""
    found = Shown()
    for machine_folder in sorted({path.parent for path in folder.glob("*/*.json")}):
        told = [
            read_json(path) for name in (f"{part}.json", f"{part}.*.json") for path in sorted(machine_folder.glob(name))
        ]
        bench = any("rows" in one for one in told)
        rows = [row for one in told for row in one.get("rows") or one.get("verdict") or []]
        chosen = [row for row in rows if containing in row["what" if bench else "check"]]
        if chosen:
            provenance = next(one["provenance"] for one in told if one.get("provenance"))
            found.append(Recorded(machine_folder.name, provenance, chosen, bench))
    if not found:
        there = sorted({path.stem.partition(".")[0] for path in folder.glob("*/*-*.json")})
        what = f"{part!r} with a row that contains {containing!r}" if containing else repr(part)
        raise BadInput(f"no reference in {folder} has {what}; there is {', '.join(there) or 'none at all'}")
    return found


def machine(provenance: dict[str, Any]) -> str:
    """The box and the software in one line."""
    cpu, versions = provenance["cpu"], provenance["versions"]
    gpus = [gpu["name"] for gpu in provenance["gpu"]["gpus"]]
    git = provenance["git"]
    commit = f"commit {git['commit'][:12]}{' with changes' if git['dirty'] else ''}" if git["commit"] else ""
    parts = [
        f"{cpu['affinity']} of {cpu['cores']} cores",
        cpu["model"] or "",
        ", ".join(gpus) or "no GPU",
        f"Python {provenance['python']}",
        *(f"{name} {version}" for name, version in versions.items() if version),
        f"kit {provenance['kit']}",
        commit,
        provenance["time"],
    ]
    return "; ".join(part for part in parts if part)


def _bench_row(row: dict[str, Any]) -> list[str]:
    if row["median"] is None:
        return [row["what"], row["who"], "-", "", "", "", row["note"]]
    median = f"{row['median']:.3g} {unit_word(row['unit'])}".rstrip()
    spread = f"{row['low']:.3g} to {row['high']:.3g}"
    limit = "" if row["limit"] is None else f"{row['limit']:.3g}"
    return [row["what"], row["who"], median, spread, str(row["n"]), limit, MET[row["met"]]]


def _check_row(row: dict[str, Any]) -> list[str]:
    measured = "" if row["measured"] is None else amount(row["measured"], row["unit"])
    return [MARKS[row["passed"]].word, row["check"], measured, amount(row["limit"], row["unit"]), row["why"]]
