"""Bench results of named machines that come with the kit, as `kit reference` and `kit bench --json` write them.

Each is shown with the machine it was recorded on, so that nobody takes it for a measurement of this one.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.errors import BadInput
from kit.results.records import read_json
from kit.results.units import amount, columns, table_html
from kit.target import shipped

MET = {None: "", True: "met", False: "not met"}
FOLDER = shipped("data/reference")
HEAD = ("what", "who", "median", "low to high", "n", "at most", "")


@dataclass(frozen=True, slots=True)
class Recorded:
    """The rows that one machine recorded of a bench."""

    folder: str
    provenance: dict[str, Any]
    rows: list[dict[str, Any]]

    @property
    def head(self) -> str:
        return f"recorded on {self.folder}, not here: {machine(self.provenance)}"

    @property
    def table(self) -> tuple[Sequence[str], list[list[str]]]:
        """A row for each measurement; where several did the same, a row for what was measured and a column for each of them."""
        who = [*dict.fromkeys(row["who"] for row in self.rows)]
        by = {(row["what"], row["who"]): row for row in self.rows}
        what = [*dict.fromkeys(row["what"] for row in self.rows)]
        if len(what) * len(who) > 1.5 * len(self.rows) or len(who) == 1:
            return HEAD, list(map(_cells, self.rows))
        cells = [[one, *(_median(by.get((one, each))) for each in who)] for one in what]
        return ("what, median", *who), cells


class Shown(list[Recorded]):
    """A table per machine, under the machine's name, apart from the reader's own numbers."""

    def __repr__(self) -> str:
        tables = ((one.head, *one.table) for one in self)
        return "\n\n".join("\n".join([about, columns([[*head], *rows])]) for about, head, rows in tables)

    def _repr_html_(self) -> str:
        return "".join(
            table_html(
                head,
                [list(map(html.escape, cells)) for cells in rows],
                right=range(1 + (head is HEAD), len(head)),
                caption=f"<i>{html.escape(about)}</i>",
            )
            for about, head, rows in ((one.head, *one.table) for one in self)
        )


def recorded(bench: str, containing: str = "", *, folder: Path = FOLDER) -> Shown:
    """What each machine recorded of a bench, such as "bench-sync": the rows whose name contains a text.

    A bench may have a file for each of its parts, such as "bench-sync.model"; their rows come together."""
    found = Shown()
    for home in sorted({path.parent for path in folder.glob("*/*.json")}):
        files = [path for name in (f"{bench}.json", f"{bench}.*.json") for path in sorted(home.glob(name))]
        parts = [read_json(path) for path in files]
        rows = [row for part in parts for row in part.get("rows") or () if containing in row["what"]]
        if rows:
            found.append(Recorded(home.name, next(filter(None, (part.get("provenance") for part in parts))), rows))
    if not found:
        there = sorted({path.stem.partition(".")[0] for path in folder.glob("*/bench-*.json")})
        what = f"{bench!r} with a row that contains {containing!r}" if containing else repr(bench)
        raise BadInput(f"no reference in {folder} has {what}; there is {', '.join(there) or 'none at all'}")
    return found


def machine(provenance: Mapping[str, Any]) -> str:
    """The box and the software in one line, as far as they are known."""
    cpu, gpu, git = (provenance.get(name) or {} for name in ("cpu", "gpu", "git"))
    gpus = ", ".join(str(one.get("name")) for one in gpu.get("gpus") or ())
    versions = {"Python": provenance.get("python"), **(provenance.get("versions") or {}), "kit": provenance.get("kit")}
    commit = git.get("commit")
    parts = [
        f"{cpu['affinity']} of {cpu.get('cores')} cores" if cpu.get("affinity") else "",
        cpu.get("model"),
        gpus or ("no GPU" if gpu else ""),
        *(f"{name} {version}" for name, version in versions.items() if version),
        f"commit {commit[:12]}{' with changes' if git.get('dirty') else ''}" if commit else "",
        provenance.get("time"),
    ]
    return "; ".join(filter(None, parts))


def _median(row: dict[str, Any] | None) -> str:
    """With a word where it fell short."""
    if row is None or row["median"] is None:
        return "" if row is None else "-"
    return amount(row["median"], row["unit"]) + (" (not met)" if row["met"] is False else "")


def _cells(row: dict[str, Any]) -> list[str]:
    if row["median"] is None:
        return [row["what"], row["who"], "-", "", "", "", row["note"]]
    median, low, high, limit = (amount(row[name], row["unit"]) for name in ("median", "low", "high", "limit"))
    limit, spread = "" if row["limit"] is None else limit, f"{low} to {high}"
    return [row["what"], row["who"], median, spread, str(row["n"]), limit, MET[row["met"]]]
