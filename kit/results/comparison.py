"""Runs side by side: each run's verdict, and its medians aligned by phase, rank, metric and ids, against the first run's.

And what named machines recorded of a bench, each shown with its machine, so that it is not taken for a measurement of this one.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kit.errors import BadInput
from kit.results.frames import labels, with_ids
from kit.results.records import flat, read_json, to_json
from kit.results.run import Run
from kit.results.units import ROW, amount, columns, table_html
from kit.results.verdict import MARKS, VerdictRow, without_parts
from kit.target import shipped

if TYPE_CHECKING:
    import pandas as pd

# The outcome of a job, as the name of a metric or as the id `name`: identical to the last bit in two runs that did the same.
OUTCOMES = {"loss": "losses", "global_loss": "losses", "grad_norm": "gradient norms", "digest": "digests"}
# Metrics with these endings are noise: what the phase before left, and the meter's own time.
NOISE = ("_before", "overhead_seconds", "observers_seconds")
# By how much of itself a measured amount may differ between two runs that did the same: with several readings, and with one.
EVEN, EVEN_SINGLE = 0.02, 0.25
NAMED = 3  # settings in the label of a run
MEASURED = ("s", "B", "B/s")  # units of such amounts; all else is counted, and differs or does not
KEYS = ["phase", "rank", "metric", "ids", "unit"]
COLUMNS = [*KEYS, "base_run", "run", "base", "value", "difference", "ratio", "base_n", "n"]
COLUMNS += ["base_spread", "spread", "found_in"]
UNITS = dict.fromkeys(("base", "value", "difference", "base_spread", "spread"), ROW)


def compare(runs: Sequence[Run]) -> pd.DataFrame:
    """One row per phase, rank, metric, ids and later run; what changed most against its spread comes first, the kit's own overhead last.

    `base` and `value` are medians over the cycles, `n` counts them, `spread` is largest minus smallest. A metric that was ever below 0
    has no `ratio`. Rows that only one run has come after all others, with `found_in` naming the side that has it.
    """
    import pandas as pd

    if len(runs) < 2:
        raise BadInput(f"a comparison needs two runs or more, not {len(runs)}")
    base, *compared = [_medians(run) for run in runs]
    table = pd.concat(
        [_against(base, values, runs[0].id, run.id) for values, run in zip(compared, runs[1:], strict=True)]
    )
    order = table.assign(
        _against=_against_spread(table),
        _change=[_change(*pair) for pair in zip(table["base"], table["value"], strict=True)],
        _single=table["found_in"] != "both",
        _noise=table["metric"].str.endswith(NOISE),
    )
    keys = ["_single", "_noise", "_against", "_change", *KEYS]
    order = order.sort_values(keys, ascending=[True, True, False, False, *[True] * len(KEYS)])
    return order[COLUMNS].reset_index(drop=True)


class Comparison:
    """Runs and the first of them, as the command line, the panel and a report show it: computed once, in the same words."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.table = compare(runs)  # once: it reads every run, and a page shows it as two pictures and a table
        self.settings = settings_of_runs(runs)
        self.warnings = warnings(runs)

    @property
    def same_lab(self) -> bool:
        return "lab" not in self.settings

    @property
    def settings_in_words(self) -> dict[str, list[str]]:
        """The settings that differ, with their values in the order of the runs; none where the labs differ, since all would."""
        return {name: list(map(in_words, values)) for name, values in self.settings.items() if self.same_lab}

    @property
    def notes(self) -> list[str]:
        """What a reader of the numbers should know of single runs."""
        notes = [f"{run.id}: {note}" for run in self.runs for note in run.notes]
        return notes + [f"{run.id}: there are no records" for run in self.runs if run.frame().empty]

    @property
    def changed(self) -> pd.DataFrame:
        return changed_rows(self.table)

    @property
    def answers(self) -> dict[str, list[str]]:
        """Per later run the checks with another answer, in words; only runs that have some."""

        def word(row: VerdictRow | None) -> str:
            return MARKS[row.passed].word if row else "not present"

        by_run = {run.id: answers_changed(self.runs[0], run) for run in self.runs[1:]}
        return {
            name: [f"{check}: {word(was)} → {word(now)}" for check, was, now in rows]
            for name, rows in by_run.items()
            if rows
        }

    @property
    def alone(self) -> int:
        """The number of rows that only one of the two runs has; they come last."""
        return int((self.table["found_in"] != "both").sum())


def settings_of_runs(runs: Sequence[Run]) -> dict[str, list[Any]]:
    configs: list[Mapping[str, Any]] = [{**flat(run.config), "fault": run.fault, "lab": run.lab} for run in runs]
    names = dict.fromkeys(name for config in configs for name in config)
    values_by_name = {name: [config.get(name) for config in configs] for name in names}
    return {name: values for name, values in values_by_name.items() if any(value != values[0] for value in values)}


def size_settings(apart: Mapping[str, Sequence[Any]]) -> list[str]:
    """The settings among those that differ which make runs different in size: whole numbers, and those that name a size."""
    whole = {name for name, values in apart.items() if any(type(value) is int for value in values)}
    sized = (whole - {"cycles", "seed"}) | {"size", "dtype", "device"}
    return [name for name in apart if name in sized]


def warnings(runs: Sequence[Run]) -> list[str]:
    apart = settings_of_runs(runs)
    if "lab" in apart:
        return [f"these are runs of different labs: {', '.join(dict.fromkeys(map(str, apart['lab'])))}"]
    if not (names := ", ".join(size_settings(apart))):
        return []
    return [f"these runs differ in size ({names}): their times and memory cannot be compared"]


def run_differences(runs: Sequence[Run]) -> list[str]:
    """What sets each run apart from the others of its lab, in words: the settings that differ, a few of them, and its fault."""

    def apart(run: Run) -> str:
        differing = settings_of_runs([run, *(candidate for candidate in runs if candidate.lab == run.lab)])
        words = [f"{name}={in_words(values[0])}" for name, values in differing.items() if name != "fault"]
        omitted = [f"{len(words) - NAMED} more settings"] if len(words) > NAMED else []
        return ", ".join([*words[:NAMED], *omitted, *([f"fault {run.fault}"] if run.fault else [])])

    return [apart(run) for run in runs]


def labelled(runs: Sequence[Run]) -> dict[str, str]:
    """Each run's label or id with what sets it apart: what legends, headings and lists call it."""
    words = zip(runs, run_differences(runs), strict=True)
    return {run.id: ", ".join(filter(None, [run.label or run.id, text])) for run, text in words}


def in_words(value: Any) -> str:
    return value if isinstance(value, str) else to_json(value)


def answers_changed(base: Run, run: Run) -> list[tuple[str, VerdictRow | None, VerdictRow | None]]:
    """The checks with another answer in `run`: their name and both rows, failures first; None where a run does not ask one."""
    before, after = ({row.check: row for row in without_parts(of_run.shown_verdict())} for of_run in (base, run))
    pairs = [(name, before.get(name), after.get(name)) for name in {**before, **after}]
    pairs = [(name, was, now) for name, was, now in pairs if not (was and now and was.passed is now.passed)]
    return sorted(pairs, key=lambda row: row[2] is None or row[2].passed is not False)


def informative(table: pd.DataFrame) -> pd.DataFrame:
    return table[~table["metric"].str.endswith(NOISE)]


def compact(table: pd.DataFrame, *, several: bool = False) -> pd.DataFrame:
    """The columns of a comparison that fit a screen, with the ids in the metric's name. With `several` each row names its run."""
    run = ["run"] if several or table["run"].nunique() > 1 else []
    return table.assign(metric=labels(table), ratio=table["ratio"].round(3))[
        [*run, "phase", "metric", "rank", "base", "value", "ratio", "n", "unit"]
    ]


def changed_rows(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of a comparison that changed by more than the spread, each metric at the rank where it changed most."""
    table = informative(table)
    changed = (_against_spread(table) > 1) & (table["found_in"] == "both")
    return table[changed].drop_duplicates(["run", "phase", "metric", "ids"])


def _against_spread(table: pd.DataFrame) -> pd.Series[float]:
    """How many times the spread of its readings each row changed; infinite where something changed that had none."""
    share = [
        0 if unit not in MEASURED else EVEN if min(counts) > 1 else EVEN_SINGLE
        for unit, *counts in zip(table["unit"], table["base_n"], table["n"], strict=True)
    ]
    noise = (table["base_spread"] + table["spread"]) / 2  # about where both ranges of readings begin to overlap
    return (table["difference"].abs() / noise.clip(lower=table["base"].abs() * share)).fillna(0.0)


class ComparedOutcomes(NamedTuple):
    """How many outcomes both runs have, how many of these differ, what they are ("losses and digests"), and how many only one run has."""

    total: int
    differ: int
    kinds: str
    single: int = 0

    def __str__(self) -> str:
        single = f"; {self.single} more {'is' if self.single == 1 else 'are'} in one run only" if self.single else ""
        return f"{self.differ} of {self.total} {self.kinds} differ{single}"


def outcomes(base: Run, run: Run) -> ComparedOutcomes:
    """Compare to the last bit. NaN always differs."""
    before, after = (_outcomes(of_run) for of_run in (base, run))
    keys = before.keys() & after.keys()
    differ = sum(_differ(before[key], after[key]) for key in keys)
    found = {kind for kind, *_ in before.keys() | after.keys()}
    *kinds, last = [kind for kind in dict.fromkeys(OUTCOMES.values()) if kind in found] or [""]
    words = f"{', '.join(kinds)} and {last}" if kinds else last
    return ComparedOutcomes(len(keys), differ, words, len(before.keys() ^ after.keys()))


def _outcomes(run: Run) -> dict[tuple[object, ...], tuple[str, float]]:
    """By the kind of outcome and its place."""
    frame = run.frame()
    names = with_ids(frame, "name")["name"].reindex(frame.index)
    kinds = frame["metric"].map(OUTCOMES).fillna(names.map(OUTCOMES))
    rows = frame.assign(kind=kinds)[kinds.notna()]
    keys = zip(*(rows[name] for name in ("kind", "cycle", "phase", "rank", "metric", "ids")), strict=True)
    return dict(zip(keys, zip(rows["text"], rows["value"].tolist(), strict=True), strict=True))


def _differ(before: tuple[str, float], after: tuple[str, float]) -> bool:
    """Whether an outcome differs. Equal texts may both have no value; NaN without a text always differs."""
    (text, value), (other_text, other_value) = before, after
    if text != other_text:
        return True
    without_values = text and math.isnan(value) and math.isnan(other_value)
    return not without_values and value != other_value


def _medians(run: Run) -> pd.DataFrame:
    table = run.frame().groupby(KEYS)["value"].agg(["median", "count", "max", "min"]).reset_index()
    table = table.rename(columns={"median": "value", "count": "n", "min": "least"})
    return table.assign(spread=table["max"] - table["least"]).drop(columns="max")


def _against(base: pd.DataFrame, other: pd.DataFrame, base_label: str, label: str) -> pd.DataFrame:
    first = base.rename(columns={"value": "base", "n": "base_n", "spread": "base_spread", "least": "base_least"})
    table = first.merge(other, on=KEYS, how="outer", indicator="found_in")
    sides = {"both": "both", "left_only": "base_run", "right_only": "run"}
    table["found_in"] = [sides[side] for side in table["found_in"]]
    table[["base_n", "n"]] = table[["base_n", "n"]].fillna(0).astype("int64")
    signed = table[["base_least", "least"]].min(axis=1) < 0
    signed = signed.groupby(table["metric"]).transform("any")
    ratio = (table["value"] / table["base"]).mask(signed)
    differ = {"difference": table["value"] - table["base"], "ratio": ratio}
    return table.assign(base_run=base_label, run=label, **differ)


def _change(base: float, value: float) -> float:
    """How far apart two medians are: the size of the ratio's logarithm; infinite where there is none."""
    if base == value or (math.isnan(base) and math.isnan(value)):
        return 0.0
    if not (math.isfinite(base) and math.isfinite(value)) or base * value <= 0:
        return math.inf
    return abs(math.log(abs(value)) - math.log(abs(base)))


# -- bench results of named machines that come with the kit, as `kit reference` and `kit bench --json` write them ----------

MET = {None: "", True: "met", False: "not met"}
FOLDER = shipped("data/reference")
HEAD = ("what", "who", "median", "low to high", "n", "at most", "")


@dataclass(frozen=True, slots=True)
class Recorded:
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
        subjects = [*dict.fromkeys(row["what"] for row in self.rows)]
        if len(subjects) * len(who) > 1.5 * len(self.rows) or len(who) == 1:
            return HEAD, list(map(_cells, self.rows))
        cells = [[subject, *(_median(by.get((subject, way))) for way in who)] for subject in subjects]
        return ("what, median", *who), cells


class Shown(list[Recorded]):
    """A table per machine, under the machine's name, apart from the reader's own numbers."""

    def __repr__(self) -> str:
        tables = ((shown_table.head, *shown_table.table) for shown_table in self)
        return "\n\n".join("\n".join([about, columns([[*head], *rows])]) for about, head, rows in tables)

    def _repr_html_(self) -> str:
        return "".join(
            table_html(
                head,
                [list(map(html.escape, cells)) for cells in rows],
                right=range(1 + (head is HEAD), len(head)),
                caption=f"<i>{html.escape(about)}</i>",
            )
            for about, head, rows in ((shown_table.head, *shown_table.table) for shown_table in self)
        )


def recorded(bench: str, containing: str = "", *, folder: Path = FOLDER) -> Shown:
    """What each machine recorded of a bench, such as "bench-sync": the rows whose name contains a text.

    A bench may have a file for each of its parts, such as "bench-sync.model"; their rows come together."""
    shown = Shown()
    for home in sorted({path.parent for path in folder.glob("*/*.json")}):
        files = [path for name in (f"{bench}.json", f"{bench}.*.json") for path in sorted(home.glob(name))]
        parts = [read_json(path) for path in files]
        rows = [row for part in parts for row in part.get("rows") or () if containing in row["what"]]
        if rows:
            shown.append(Recorded(home.name, next(filter(None, (part.get("provenance") for part in parts))), rows))
    if not shown:
        there = sorted({path.stem.partition(".")[0] for path in folder.glob("*/bench-*.json")})
        wanted = f"{bench!r} with a row that contains {containing!r}" if containing else repr(bench)
        raise BadInput(f"no reference in {folder} has {wanted}; it has {', '.join(there) or 'none'}")
    return shown


def machine(provenance: Mapping[str, Any]) -> str:
    cpu, gpu, git = (provenance.get(name) or {} for name in ("cpu", "gpu", "git"))
    gpus = ", ".join(str(device.get("name")) for device in gpu.get("gpus") or ())
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
    return "" if row is None else amount(row["median"], row["unit"]) + (" (not met)" if row["met"] is False else "")


def _cells(row: dict[str, Any]) -> list[str]:
    if row["median"] is None:
        return [row["what"], row["who"], "-", "", "", "", row["note"]]
    median, low, high, limit = (amount(row[name], row["unit"]) for name in ("median", "low", "high", "limit"))
    limit, spread = "" if row["limit"] is None else limit, f"{low} to {high}"
    return [row["what"], row["who"], median, spread, str(row["n"]), limit, MET[row["met"]]]
