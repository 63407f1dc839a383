"""Several runs of a lab in one folder: every combination of some settings' values, each as often as it is asked for.

The folder has a run in each of its folders `01`, `02`, ... and an `index.json`: each run with its settings and its outcome, and the
spread of times and of measured values over the repeats.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import kit
from kit.errors import BadInput
from kit.labs.definition import Definition
from kit.labs.discover import complaints, find_fault, from_text
from kit.results.frames import plain
from kit.results.records import read_json, write_json
from kit.results.run import INDEX, list_runs, runs_dir, unique
from kit.results.verdict import without_parts

BETWEEN = re.compile(r",(?![^\[]*\])")  # commas, but not those of a list
INTERRUPTED = 130
Ended = tuple[int, dict[str, Any]]  # the exit status of a run, and its JSON


class Point(NamedTuple):
    """One combination of the values that are swept, and which of its repeats it is."""

    swept: dict[str, Any]
    repeat: int

    def __str__(self) -> str:
        return " ".join([*(f"{name}={json.dumps(value)}" for name, value in self.swept.items()), f"#{self.repeat}"])


def points(lab: Definition, sweeps: Mapping[str, str], repeat: int) -> list[Point]:
    """Every combination, the repeats of all of them one after the other, so that a slow drift of the machine touches all alike."""
    texts = [[(name, text) for text in BETWEEN.split(values)] for name, values in sweeps.items()]
    swept = [from_text(lab, dict(pairs)) for pairs in itertools.product(*texts)]
    return [Point(one, number) for number in range(1, repeat + 1) for one in swept]


def check(lab: Definition, given: Mapping[str, Any], found: Sequence[Point], fault: str | None) -> None:
    """Refuse a sweep with a run that could not start, before the first one does."""
    for point in found:
        wrong = complaints(lab, {**given, **point.swept}, find_fault(lab, fault))
        if wrong:
            raise BadInput(f"{point}: {'; '.join(dict.fromkeys(wrong.values()))}")


def sweep(
    lab: str, found: Sequence[Point], out: Path | None, run: Callable[[dict[str, Any], Path], Ended]
) -> tuple[int, Path]:
    """Run every point. Ends with the worst that a run ended with; an interrupt ends the sweep, and the index has what ran."""
    folder = (out or runs_dir() / f"{lab}-sweep-{unique()}").expanduser().absolute()
    if (folder / INDEX).exists():
        raise BadInput(f"{folder} already holds a sweep; choose another folder")
    rows: list[dict[str, Any]] = []
    for number, point in enumerate(found, start=1):
        print(f"run {number} of {len(found)}: {point}", flush=True)
        status, said = run(point.swept, folder / f"{number:02}")
        rows.append({"dir": f"{number:02}", "set": point.swept, "repeat": point.repeat, **said})
        write_json(folder / INDEX, {"lab": lab, "planned": len(found), "runs": rows, "spread": spread(folder, rows)})
        if status == INTERRUPTED:
            break
    return max(row["exit"] for row in rows), folder


def spread(folder: Path, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each combination the median, lowest and highest over its repeats: of each phase's median time, and of each check's number."""
    import pandas as pd

    found = []
    for row in rows:
        run = kit.load(folder / row["dir"])
        frame = run.frame()
        times = frame[frame["metric"] == "seconds"].groupby("phase", sort=False)["value"].median()
        numbers = [(f"{phase}: time", "s", seconds) for phase, seconds in times.items()]
        checks = without_parts(run.shown_verdict())
        numbers += [(f"check {one.check}", one.unit, one.measured) for one in checks if one.measured is not None]
        found += [(json.dumps(row["set"]), *number) for number in numbers]
    table = pd.DataFrame(found, columns=["set", "what", "unit", "value"])
    grouped = table.groupby(["set", "what", "unit"], sort=False)["value"].agg(["median", "min", "max", "count"])
    return [{**row, "set": json.loads(row["set"])} for row in plain(grouped.reset_index())]


def runs_of(folder: Path) -> list[Path]:
    """The runs of a sweep in their order; the folder itself where it is no sweep."""
    if not (folder / INDEX).is_file():
        return [folder]
    return sorted(list_runs(folder))


def read_settings(path: Path) -> dict[str, Any]:
    kind = path.suffix.lower()
    if kind not in {".json", ".yaml", ".yml"}:
        raise BadInput(f"{path.name!r} has no known ending; settings are read from .json, .yaml or .yml")
    try:
        found = read_json(path) if kind == ".json" else yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise BadInput(f"{path} is damaged: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise BadInput(f"{path} holds no settings; it must be one object such as {{cycles: 5}}")
    return found
