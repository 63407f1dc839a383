"""Results of named machines that come with the kit, as `kit reference` and `kit bench --json` write them.

They are told with the machine they were recorded on, so that nobody takes them for what was measured here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.errors import BadInput
from kit.results.files import read_json

FOLDER = Path(__file__).resolve().parents[2] / "data" / "reference"


@dataclass(frozen=True, slots=True)
class Recorded:
    """One part of one machine's reference: the rows of a bench, or of a lab's verdict."""

    folder: str
    provenance: dict[str, Any]
    rows: list[dict[str, Any]]
    bench: bool

    @property
    def head(self) -> str:
        return f"recorded on {self.folder}, not here: {machine(self.provenance)}"


def recorded(part: str, containing: str = "", *, folder: Path = FOLDER) -> list[Recorded]:
    """What each machine recorded of a part, such as "bench-sync" or "lab-split": the rows whose name contains a text."""
    found = []
    for path in sorted(folder.glob(f"*/{part}.json")):
        told = read_json(path)
        bench = "rows" in told
        rows = told.get("rows") or told.get("verdict") or []
        chosen = [row for row in rows if containing in row["what" if bench else "check"]]
        if chosen:
            found.append(Recorded(path.parent.name, told["provenance"], chosen, bench))
    if not found:
        there = sorted({path.stem for path in folder.glob("*/*-*.json")})
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
