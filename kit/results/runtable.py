"""All runs as one table, for the panel, `kit runs` and `kit report`.

A run's facts come from its run.json, verdict.json and label.json. Further columns are picked by name: a setting, a check (its measured
number), or PHASE/METRIC (the median over cycles and ranks, from the run's records).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.errors import BadInput, suggestion
from kit.results.comparison import in_words
from kit.results.old import current_settings
from kit.results.records import PATTERN, SEALED, flat, read_json
from kit.results.run import (
    INDEX,
    LABEL,
    Run,
    checked_info,
    early_end,
    edited_facts,
    label_in,
    lacks_seal,
    run_name,
    stamp_of,
    state_of,
    status_in,
)
from kit.results.units import amount, unit_word
from kit.results.verdict import Verdict, measured_of, read_verdict, without_parts

if TYPE_CHECKING:
    import pandas as pd

Facts = dict[str, Any]
# What every table of runs has. `differs` are the settings that are not the lab's defaults.
COMMON = ("run", "label", "lab", "differs", "fault", "status", "verdict", "started", "took [s]", "machine", "sweep")
FILES = ("run.json", "verdict.json", LABEL)
EDITED, LOST = "edited after the run ended", "records were lost after the run ended"
LISTED = 12  # names of columns in a sentence
KEPT: dict[Path, tuple[Any, Facts]] = {}  # facts of runs that ended, with the state of their files
MEDIANS: dict[tuple[Path, str], tuple[Any, tuple[float | None, str]]] = {}


def facts_on_disk(folder: Path, defaults: Callable[[str], Mapping[str, Any]]) -> Facts:
    """What is known of a run without its records. `defaults` gives a lab's settings; of an unknown lab, all settings count as changed."""
    names = [*FILES, *sorted(path.name for path in folder.glob(PATTERN))]
    stamp = tuple((name, state_of(f"{folder}/{name}")) for name in names)
    kept = KEPT.get(folder)
    if kept is not None and kept[0] == stamp:
        return kept[1]
    try:
        facts = read_facts(folder, defaults)
    except BadInput as error:
        return damaged_facts(folder, error)
    if facts["status"] not in {"running", "interrupted"}:  # these change without the files
        KEPT[folder] = stamp, facts
    return facts


def read_facts(folder: Path, defaults: Callable[[str], Mapping[str, Any]]) -> Facts:
    info = checked_info(path := folder / "run.json", read_json(path))
    lab, early = info["lab"], early_end(info)
    try:
        stored = Verdict(read_verdict(folder / "verdict.json"), ended=early)
    except BadInput:
        if (folder / "verdict.json").exists():
            raise
        stored = None
    changed = changed_since(folder, info, stored)
    stored = None if changed else stored
    config, same = flat(current_settings(lab, info.get("config") or {})), defaults(lab)
    answer = None if stored is None else stored.answer
    return {
        "run": str(folder),
        "id": info["run"],
        "name": run_name(folder),
        "label": label_in(folder / LABEL) if (folder / LABEL).is_file() else "",
        "lab": lab,
        "set": {name: value for name, value in config.items() if name not in same or value != same[name]},
        "fault": info.get("fault"),
        "status": status_in(info),
        "answer": "not judged" if answer is None else "passed" if answer else "failed",
        "verdict": changed or "not judged" if stored is None else measured_of(without_parts(stored), ended=bool(early)),
        "started": info.get("started"),
        "took": seconds_between(info.get("started"), info.get("finished")),
        "machine": machine_in_short(info.get("provenance") or {}),
        "sweep": run_name(folder.parent) if (folder.parent / INDEX).is_file() else "",
        "config": config,
        "numbers": {row.check: (row.measured, row.unit) for row in stored or () if row.measured is not None},
    }


def changed_since(folder: Path, info: Mapping[str, Any], stored: Verdict | None) -> str:
    """What accidents have changed since the run ended, as far as it shows without its rows; `Run.alterations` looks at these too."""
    sealed = info.get(SEALED)
    if not sealed or info["status"] == "running":
        return EDITED if lacks_seal(info) else ""
    # Older kits did not write the size of a file.
    grown = [
        state_of(f"{folder}/{name}")[0] - wrote.get("bytes", math.inf) for name, wrote in sealed["records"].items()
    ]
    if any(-math.inf < more < 0 for more in grown):
        return LOST
    edited = edited_facts(info) or any(more > 0 for more in grown)
    return EDITED if edited or (stored is not None and sealed.get("verdict", stored.digest) != stored.digest) else ""


def damaged_facts(folder: Path, error: Exception) -> Facts:
    nothing: Facts = {
        "id": "",
        "label": "",
        "lab": "",
        "set": {},
        "fault": None,
        "answer": "not judged",
        "started": None,
    }
    nothing |= {"took": None, "machine": "", "sweep": "", "config": {}, "numbers": {}}
    return {"run": str(folder), "name": run_name(folder), **nothing, "status": "damaged", "verdict": str(error)}


def seconds_between(started: str | None, finished: str | None) -> float | None:
    try:
        begin, end = (datetime.fromisoformat(moment) if moment else None for moment in (started, finished))
        return (end - begin).total_seconds() if begin and end else None
    except (ValueError, TypeError):  # no dates, or one with a time zone and one without
        return None


def machine_in_short(provenance: Mapping[str, Any]) -> str:
    """Host and GPUs, or cores: "box-7, 8x NVIDIA H100"."""
    on = provenance.get("rank0") or provenance
    gpus = [str(device.get("name")) for device in (on.get("gpu") or {}).get("gpus") or ()]
    cores = (on.get("cpu") or {}).get("affinity")
    parts = [str(on.get("host") or ""), *(f"{gpus.count(name)}x {name}" for name in dict.fromkeys(gpus))]
    return ", ".join(filter(None, [*parts, f"{cores} cores" if cores and not gpus else ""]))


# -- picked columns --------------------------------------------------------------------------------------------------


def pickable(rows: Sequence[Facts]) -> list[str]:
    """The names of further columns: settings, those that differ first; checks with a number; metrics by phase of the newest run."""
    settings, apart = dict.fromkeys(name for row in rows for name in row["config"]), settings_apart(rows)
    checks = dict.fromkeys(name for row in rows for name in row["numbers"] if "/" not in name)
    newest = next((Path(row["run"]) for row in rows if row["status"] != "damaged"), None)
    return list(dict.fromkeys([*apart, *checks, *settings, *(metrics_by_phase(newest) if newest else ())]))


def settings_apart(rows: Sequence[Facts]) -> list[str]:
    """The settings in which these runs differ from each other."""
    names = dict.fromkeys(name for row in rows for name in row["config"])
    return [name for name in names if any(row["config"].get(name) != rows[0]["config"].get(name) for row in rows)]


def metrics_by_phase(folder: Path) -> list[str]:
    frame = Run(folder).frame().dropna(subset=["value"])
    return [f"{phase}/{metric}" for phase, metric in frame[["phase", "metric"]].drop_duplicates().to_numpy().tolist()]


def picked_cell(row: Facts, name: str) -> tuple[Any, str]:
    """A run's value in a picked column, and its unit; None where it has none."""
    if name in row["config"]:
        return row["config"][name], ""
    if name in row["numbers"]:
        value, unit = row["numbers"][name]
        return value, str(unit)
    phase, slash, metric = name.partition("/")
    return phase_median(Path(row["run"]), phase, metric) if slash and row["status"] != "damaged" else (None, "")


def phase_median(folder: Path, phase: str, metric: str) -> tuple[float | None, str]:
    stamp = stamp_of(sorted(folder.glob("records*.jsonl")))
    kept = MEDIANS.get((folder, f"{phase}/{metric}"))
    if kept is not None and kept[0] == stamp:
        return kept[1]
    frame = Run(folder).frame()
    rows = frame[(frame["phase"] == phase) & (frame["metric"] == metric)].dropna(subset=["value"])
    median = (float(rows["value"].median()), str(rows["unit"].iloc[0])) if len(rows) else (None, "")
    MEDIANS[folder, f"{phase}/{metric}"] = stamp, median
    return median


def run_frame(rows: Sequence[Facts], picks: Iterable[str] = ()) -> pd.DataFrame:
    """A row for each run, in their order. Its attr `picks` has the heads of the picked columns."""
    import pandas as pd

    picks = tuple(dict.fromkeys(picks))
    cells = [[picked_cell(row, name) for name in picks] for row in rows]
    units = {name: next((row[at][1] for row in cells if row[at][1]), "") for at, name in enumerate(picks)}
    for at, name in enumerate(picks):
        known = any(name in row["config"] or name in row["numbers"] for row in rows)
        if rows and not known and all(row[at][0] is None for row in cells):
            raise BadInput(f"no run has a setting, check or PHASE/METRIC {name!r}; {column_hint(name, pickable(rows))}")
    heads = {name: f"{name} [{unit_word(unit)}]" if unit_word(unit) else name for name, unit in units.items()}
    apart = settings_apart(rows)
    table = [
        {
            **{name: row[name] for name in ("label", "lab", "status", "verdict", "machine", "sweep")},
            "run": row["name"],
            # A narrow terminal cuts the end of a cell, and the settings that all runs share are the ones to miss.
            "differs": in_line(
                {name: row["set"][name] for name in dict.fromkeys([*apart, *row["set"]]) if name in row["set"]}
            ),
            "fault": row["fault"] or "",
            "started": str(row["started"] or "")[:19].replace("T", " "),
            "took [s]": row["took"],
            **{heads[name]: plain_cell(value) for name, (value, _) in zip(picks, values, strict=True)},
        }
        for row, values in zip(rows, cells, strict=True)
    ]
    frame = pd.DataFrame(table, columns=[*COMMON, *heads.values()])
    frame["took [s]"] = frame["took [s]"].astype("float64")
    frame.attrs = {"picks": list(heads.values())}
    return frame


def column_hint(name: str, names: Sequence[str]) -> str:
    """The closest name and the first ones: a lab has hundreds."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    where = "; `kit labs LAB` lists settings, `kit show` checks and phases" if more else ""
    return f"{suggestion(name, names)}allowed are {', '.join(names[:LISTED])}{more}{where}"


def plain_cell(value: Any) -> Any:
    return value if value is None or type(value) in (int, float, str) else in_words(value)


def sweep_frame(rows: Sequence[Facts], picks: Iterable[str] = ()) -> pd.DataFrame:
    """A row for each combination of settings of each sweep: how many runs it has, how many passed, and the spread of every number.

    Its attr `folders` has the runs of each row.
    """
    import pandas as pd

    swept = [row for row in rows if row["sweep"]]
    frame = run_frame(swept, picks)
    frame["passed"] = [row["answer"] == "passed" for row in swept]
    numbers = [name for name in ("took [s]", *frame.attrs["picks"]) if pd.api.types.is_numeric_dtype(frame[name])]
    table, folders = [], []
    for (sweep, differs, fault), group in frame.groupby(["sweep", "differs", "fault"], sort=False):
        count = len(group)
        line = {
            "sweep": sweep,
            "differs": differs,
            "fault": fault,
            "runs": count,
            "runs that passed": f"{group['passed'].sum()} of {count}",
        }
        table.append(line | {name: spread_of(group[name].dropna()) for name in numbers})
        folders.append([swept[at]["run"] for at in group.index])
    made = pd.DataFrame(table, columns=["sweep", "differs", "fault", "runs", "runs that passed", *numbers])
    made.attrs = {"folders": folders}
    return made


def spread_of(values: pd.Series[float]) -> str:
    """The median, and the range of several values."""
    if values.empty:
        return ""
    middle, low, high = (amount(value) for value in (values.median(), values.min(), values.max()))
    return middle if low == high else f"{middle} ({low} to {high})"


def in_line(config: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={in_words(value)}" for name, value in config.items())
