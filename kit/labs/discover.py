"""The list of labs: packages in this folder, and entry points `kit.labs` of installed packages; and the list of runs in a folder."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kit.errors import BadInput, hint
from kit.labs.configure import settled
from kit.labs.definition import Definition
from kit.labs.options import fields
from kit.results import Run, list_runs, read_verdict
from kit.results.comparison import in_words
from kit.results.run import STATUSES
from kit.results.verdict import tally, without_parts
from kit.target import load

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from kit.draw.plots import Pictures
    from kit.results import Check

GROUP = "kit.labs"


class Found(NamedTuple):
    """Labs by name, and the reason for each lab that could not be loaded."""

    labs: dict[str, Definition]
    broken: dict[str, str]


@functools.cache
def discover() -> Found:
    """Every lab. A broken third-party package is reported and does not affect the others."""
    from importlib.metadata import entry_points

    home = import_module("kit.labs")
    own = [import_module(f"kit.labs.{info.name}").LAB for info in pkgutil.iter_modules(home.__path__) if info.ispkg]
    found = Found({lab.name: lab for lab in own}, {})
    for point in entry_points(group=GROUP):
        try:
            lab = point.load()
        except Exception as error:  # noqa: BLE001 - importing a stranger's package may raise anything
            found.broken[point.name] = f"{point.value} cannot be loaded: {type(error).__name__}: {error}"
            continue
        if not isinstance(lab, Definition):
            found.broken[point.name] = f"{point.value} is not a kit.labs.definition.Definition"
        elif lab.name in found.labs:
            found.broken[point.name] = f"{point.value} has the name {lab.name!r}, which another lab uses"
        else:
            found.labs[lab.name] = lab
    return found


def find(name: str) -> Definition:
    labs, broken = discover()
    if name in labs:
        return labs[name]
    if name in broken:
        raise BadInput(f"lab {name!r}: {broken[name]}")
    raise BadInput(f"unknown lab {name!r}; {hint(name, labs)}")


def checks_of(name: str) -> Sequence[Check]:
    """The checks of a lab; for an unknown lab, such as a run recorded by your own script, those of the observers."""
    lab = discover().labs.get(name)
    unknown: Sequence[Check] = load("kit.labs.growth:OBSERVED")
    return lab.all_checks() if lab else unknown


def pictures_of(name: str) -> Pictures | None:
    lab = discover().labs.get(name)
    pictures: Pictures | None = load(lab.pictures) if lab and lab.pictures else None
    return pictures


# -- runs --------------------------------------------------------------------------------------------------------------


COLUMNS = ("run", "label", "lab", "started", "status", "answer", "verdict", "fault", "set", "dir")
ANSWERS = ("failed", "passed", "not judged")
ENDS = (*STATUSES, "interrupted", "damaged")


def described(path: Path) -> dict[str, Any]:
    """A run in a line: what sets it apart, and how it ended."""
    try:
        found = Run(path)
        stored = found.dir / "verdict.json"
        counts = tally(without_parts(read_verdict(stored))) if stored.is_file() else "not judged"
        about = {"run": str(path), "id": found.id, "label": found.label, "started": found.info().get("started")}
    except BadInput as error:
        nothing: dict[str, Any] = {"label": "", "lab": "", "set": {}, "fault": None}
        return {"run": str(path), **nothing, "status": "damaged", "answer": "not judged", "verdict": str(error)}
    judged = counts not in {"not judged", "no checks"}
    answer = "not judged" if not judged else "passed" if counts.startswith("0 ") else "failed"
    same = defaults(found.lab)  # empty for an unknown lab: then all settings count as changed
    changed = {name: value for name, value in found.config.items() if name not in same or value != same[name]}
    own = {"set": changed, "fault": found.fault, "status": found.status}
    return {**about, "lab": found.lab, **own, "answer": answer, "verdict": counts}


@functools.cache
def defaults(lab_name: str) -> Mapping[str, Any]:
    """The defaults of a lab as run.json has them; none of a lab that is not known here."""
    lab = discover().labs.get(lab_name)
    values = settled({field.name: field.default for field in fields(lab.config)}) if lab else {}
    return {name: plain(value) for name, value in values.items()}


def select(
    folders: Iterable[Path],
    *,
    lab: str | None = None,
    fault: str | None = None,
    status: str | None = None,
    verdict: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """The runs that have all of this, as `described`. A fault of "" is a run without one; settings are those of the whole config."""
    config = config or {}
    for name, value, allowed in (("verdict", verdict, ANSWERS), ("status", status, ENDS)):
        if value is not None and value not in allowed:
            raise BadInput(f"there is no {name} {value!r}; {hint(value, allowed)}")
    rows: list[dict[str, Any]] = []
    known: set[str] = set()
    for path in folders:
        row = described(path)
        asked = ((lab, row["lab"]), (fault, row["fault"] or ""), (status, row["status"]), (verdict, row["answer"]))
        if row["status"] != "damaged" and config:
            own = Run(path).config
            known |= own.keys()
            same = all(name in own and own[name] == plain(value) for name, value in config.items())
        else:
            same = not config
        if same and all(wanted is None or wanted == value for wanted, value in asked):
            rows.append(row)
    if known and (unknown := [name for name in config if name not in known]):
        raise BadInput(f"no run has a setting {unknown[0]!r}; {hint(unknown[0], sorted(known))}")
    return rows


def table(folder: Path, **asked: Any) -> pd.DataFrame:
    """Those of a folder, newest first, as a table."""
    import pandas as pd

    rows = [
        {**row, "run": row["id"], "fault": row["fault"] or "", "set": in_line(row["set"]), "dir": row["run"]}
        for row in select(list_runs(folder), **asked)
        if row["status"] != "damaged"
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def in_line(config: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={in_words(value)}" for name, value in config.items())


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
