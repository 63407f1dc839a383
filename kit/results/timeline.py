"""A run for other programs: a timeline for Perfetto or chrome://tracing, and verdicts as JUnit XML for CI.

The timeline has a lane per rank, an event per phase, and counters for memory.

Spans (records with a start) have lanes of their own below the rank's phases, one per metric; those that overlap without
nesting are drawn on further lanes, since a lane shows nested events only. Events without a duration are marks among the
phases. Times are microseconds since the earliest start. Ranks on several nodes are placed by their own clocks.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from kit.errors import BadInput
from kit.results.files import make_folder, to_json, write_text
from kit.results.records import rank_name
from kit.results.verdict import tally

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kit.results.run import Run
    from kit.results.verdict import Verdict

Row = dict[str, Any]

COUNTERS = ("rss", "driver_used")


def trace(run: Run) -> dict[str, Any]:
    """The timeline as Chrome's trace JSON: a complete event for each timed phase and for each span."""
    rows: list[Row] = [{str(key): value for key, value in row.items()} for row in run.frame().to_dict("records")]
    spans = [row for row in rows if not math.isnan(row["start"])]
    plain = [row for row in rows if math.isnan(row["start"])]
    phases: dict[tuple[int, str, int], list[Row]] = defaultdict(list)
    for row in plain:
        phases[row["cycle"], row["phase"], row["rank"]].append(row)
    timed = [(row, _companions(row, some)) for some in phases.values() for row in some if row["metric"] == "seconds"]
    if not timed and not spans:
        raise BadInput(
            f"run {run.id!r} has no timed phases (no metric 'seconds') and no spans, so there is no timeline to draw"
        )
    zero = min([row["time"] - row["value"] for row, _ in timed] + [row["start"] for row in spans])
    events = [event for row, others in timed for event in (_phase(row, others, zero), *_counters(row, others, zero))]
    marks = (row for row in plain if row["ids"] and math.isnan(row["value"]))
    events += [_event(row, "i", _micros(row["time"], zero), row["rank"], s="t", args=_about(row)) for row in marks]
    ranks = sorted({row["rank"] for row in [*spans, *(row for row, _ in timed)]})
    drawn, lanes = _spans(spans, zero, run.roles, first=max(ranks) + 1)
    heads = [_head("process_name", 0, name=f"{run.lab}: {run.id}")]
    for rank in ranks:
        for lane, name in ((rank, rank_name(rank, run.roles)), *lanes[rank]):
            heads += [_head("thread_name", lane, name=name), _head("thread_sort_index", lane, sort_index=len(heads))]
    ordered = sorted(events + drawn, key=lambda event: float(event["ts"]))
    return {"displayTimeUnit": "ms", "traceEvents": heads + ordered}


def write_trace(run: Run, path: str | Path) -> Path:
    target = Path(path).expanduser()
    make_folder(target.parent)
    write_text(target, to_json(trace(run)) + "\n")
    return target


def _companions(seconds: Row, rows: list[Row]) -> list[Row]:
    """The other records of that phase; if it ran twice in a cycle, those of the same time."""
    again = sum(row["metric"] == "seconds" for row in rows) > 1
    return [row for row in rows if row["metric"] != "seconds" and (not again or row["time"] == seconds["time"])]


def _phase(row: Row, others: list[Row], zero: float) -> Row:
    values = {_label(other): other["value"] for other in others if not other["ids"]}
    took = round(row["value"] * 1e6, 3)
    begin = _micros(row["time"] - row["value"], zero)
    return _event(row, "X", begin, row["rank"], name=row["phase"], dur=took, args={"cycle": row["cycle"], **values})


def _counters(row: Row, others: list[Row], zero: float) -> list[Row]:
    """Memory before and after a phase."""
    rank, values = row["rank"], {other["metric"]: other["value"] for other in others}
    moments = {"_before": _micros(row["time"] - row["value"], zero), "": _micros(row["time"], zero)}
    return [
        _event(row, "C", moment, rank, name=f"rank {rank} {metric}", args={"bytes": values[metric + suffix]})
        for metric in COUNTERS
        for suffix, moment in moments.items()
        if metric + suffix in values
    ]


def _spans(
    rows: list[Row], zero: float, roles: Mapping[int, str], *, first: int
) -> tuple[list[Row], dict[int, list[tuple[int, str]]]]:
    """The spans as events, and the lanes that they need on each rank, with their names. `first` is the first free lane."""
    drawn: list[Row] = []
    lanes: dict[int, list[tuple[int, str]]] = defaultdict(list)
    kinds: dict[tuple[int, str], list[Row]] = defaultdict(list)
    for row in rows:
        kinds[row["rank"], row["metric"]].append(row)
    for (rank, metric), some in sorted(kinds.items()):
        edges = [(_micros(row["start"], zero), _micros(row["time"], zero), row) for row in some]
        open_ends: list[list[float]] = []  # of each lane of this kind, what is not over yet, the innermost last
        for begin, end, row in sorted(edges, key=lambda edge: (edge[0], -edge[1])):
            place = next((place for place, ends in enumerate(open_ends) if _fits(ends, begin, end)), len(open_ends))
            if place == len(open_ends):
                open_ends.append([])
                name = f"{rank_name(rank, roles)}: {metric}" + (f" ({place + 1})" if place else "")
                lanes[rank].append((first + sum(map(len, lanes.values())), name))
            open_ends[place].append(end)
            lane = lanes[rank][place - len(open_ends)][0]
            drawn.append(_event(row, "X", begin, lane, dur=round(max(end - begin, 0), 3), args=_about(row)))
    return drawn, lanes


def _fits(ends: list[float], begin: float, end: float) -> bool:
    """Whether a span lies within what is open in a lane, or after it."""
    while ends and ends[-1] <= begin:
        ends.pop()
    return not ends or end <= ends[-1]


def _about(row: Row) -> Row:
    """All that a record says: the value, the text and the ids."""
    args: Row = {"cycle": row["cycle"], "phase": row["phase"]}
    args |= json.loads(row["ids"]) if row["ids"] else {}
    args |= {"text": row["text"]} if row["text"] else {}
    return args if math.isnan(row["value"]) else {**args, _label(row): row["value"]}


def _label(row: Row) -> str:
    return f"{row['metric']} [{row['unit']}]".removesuffix(" []")


def _event(row: Row, kind: str, begin: float, lane: int, **more: object) -> Row:
    return {"name": row["metric"], "cat": row["lab"], "ph": kind, "ts": begin, "pid": 0, "tid": lane, **more}


def _head(kind: str, lane: int, **args: object) -> Row:
    return {"name": kind, "ph": "M", "pid": 0, "tid": lane, "args": args}


def _micros(moment: float, zero: float) -> float:
    return round((moment - zero) * 1e6, 3)


# -- JUnit XML: a suite for each run, a case for each check ----------------------------------------------------------------

NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_junit(runs: Sequence[tuple[Run, Verdict]], path: Path) -> Path:
    """A check that failed is a failure, one that was not measured is skipped, and a run that broke has an error."""
    top = ET.Element("testsuites", name="Lifecycle Kit")
    for run, rows in runs:
        suite = ET.SubElement(top, "testsuite", name=f"{run.lab} {run.id}")
        for row in rows:
            case = ET.SubElement(suite, "testcase", classname=run.lab, name=row.check)
            if row.passed is not True:
                kind = "skipped" if row.passed is None else "failure"
                ET.SubElement(case, kind, message=NOT_XML.sub("", row.why))
        if run.status != "finished":
            case = ET.SubElement(suite, "testcase", classname=run.lab, name="run")
            ET.SubElement(case, "error", message=NOT_XML.sub("", "; ".join(run.notes)))
        for count, kind in (
            ("tests", "testcase"),
            ("failures", "failure"),
            ("errors", "error"),
            ("skipped", "skipped"),
        ):
            suite.set(count, str(len(suite.findall(f".//{kind}"))))
        ET.SubElement(suite, "system-out").text = f"{tally(rows)}; {run.dir}"
    ET.indent(top)
    path = path.expanduser()
    make_folder(path.parent)
    write_text(path, ET.tostring(top, encoding="unicode", xml_declaration=True) + "\n")
    return path
