"""A run for other programs: a timeline for Perfetto or chrome://tracing, and verdicts as JUnit XML for CI.

Each rank is a process of the timeline: its phases, counters for memory, and its spans (records with a start) as asynchronous events,
which the viewer places below the phases, those of one metric together and apart where they overlap. Spans with the id `track`, which do not
overlap, are bars on a process of that name instead, named by their text. Events without a duration are marks among the phases. Times are
microseconds since the earliest start. Ranks on several nodes are placed by their own clocks.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from kit.errors import BadInput
from kit.results.records import make_folder, rank_name, to_json, write_text
from kit.results.run import Run
from kit.results.verdict import Verdict, tally

Row = dict[str, Any]

TRACKS = 1_000_000
COUNTERS = ("rss", "driver_used")


def trace(run: Run) -> dict[str, Any]:
    """The timeline as Chrome's trace JSON: complete events for timed phases and bars of tracks, asynchronous ones for other spans."""
    rows: list[Row] = [{str(key): value for key, value in row.items()} for row in run.frame().to_dict("records")]
    spans = [row for row in rows if not math.isnan(row["start"])]
    phases: dict[tuple[int, str, int], list[Row]] = defaultdict(list)
    for row in rows:
        if math.isnan(row["start"]):
            phases[row["cycle"], row["phase"], row["rank"]].append(row)
    starts = [row["time"] - row["value"] for some in phases.values() for row in some if row["metric"] == "seconds"]
    if not starts and not spans:
        raise BadInput(
            f"run {run.id!r} has no timed phases (no metric 'seconds') and no spans, so there is no timeline to draw"
        )
    zero = min(starts + [row["start"] for row in spans])
    events = [event for some in phases.values() for event in _of_phase(some, zero)]
    tracks: dict[str, int] = {}  # pids behind those of ranks
    for number, row in enumerate(spans):
        about = _about(row)
        if "track" in about:
            pid = tracks.setdefault(str(about["track"]), TRACKS + len(tracks))
            length = round((row["time"] - row["start"]) * 1e6, 3)
            events.append(
                _event(row, "X", row["start"], zero, name=row["text"] or row["metric"], dur=length, pid=pid, args=about)
            )
            continue
        ends = (("b", row["start"]), ("e", row["time"]))
        events += [_event(row, kind, moment, zero, id=number, args=about) for kind, moment in ends]
    named = {rank + 1: rank_name(rank, run.roles) for rank in sorted({row["rank"] for row in rows})}
    named |= {pid: name for name, pid in tracks.items()}
    heads = [{"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}} for pid, name in named.items()]
    ordered = sorted(events, key=lambda event: float(event["ts"]))
    return {"displayTimeUnit": "ms", "otherData": {"run": run.id}, "traceEvents": heads + ordered}


def write_trace(run: Run, path: str | Path) -> Path:
    target = Path(path).expanduser()
    make_folder(target.parent)
    write_text(target, to_json(trace(run)) + "\n")
    return target


def _of_phase(rows: list[Row], zero: float) -> Iterator[Row]:
    """The events of one phase on one rank, which may have run several times in a cycle."""
    timed = [row for row in rows if row["metric"] == "seconds"]
    for row in timed:
        begin = row["time"] - row["value"]
        others = [one for one in rows if one["metric"] != "seconds" and (len(timed) == 1 or one["time"] == row["time"])]
        args = {"cycle": row["cycle"], **{_label(one): one["value"] for one in others if not one["ids"]}}
        yield _event(row, "X", begin, zero, name=row["phase"], dur=round(row["value"] * 1e6, 3), args=args)
        values = {one["metric"]: one["value"] for one in others}
        for metric in COUNTERS:
            for name, moment in ((f"{metric}_before", begin), (metric, row["time"])):
                if name in values:
                    yield _event(row, "C", moment, zero, name=metric, args={"bytes": values[name]})
    for row in rows:
        if row["ids"] and math.isnan(row["value"]):
            yield _event(row, "i", row["time"], zero, s="t", args=_about(row))


def _about(row: Row) -> Row:
    args: Row = {"cycle": row["cycle"], "phase": row["phase"]}
    args |= json.loads(row["ids"]) if row["ids"] else {}
    args |= {"text": row["text"]} if row["text"] else {}
    return args if math.isnan(row["value"]) else {**args, _label(row): row["value"]}


def _label(row: Row) -> str:
    return f"{row['metric']} [{row['unit']}]".removesuffix(" []")


def _event(row: Row, kind: str, moment: float, zero: float, **more: object) -> Row:
    begin = round((moment - zero) * 1e6, 3)
    return {"name": row["metric"], "cat": row["lab"], "ph": kind, "ts": begin, "pid": row["rank"] + 1, "tid": 0, **more}


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
        counts = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}
        for count, kind in counts.items():
            suite.set(count, str(len(suite.findall(f".//{kind}"))))
        ET.SubElement(suite, "system-out").text = f"{tally(rows)}; {run.dir}"
    ET.indent(top)
    path = path.expanduser()
    make_folder(path.parent)
    write_text(path, ET.tostring(top, encoding="unicode", xml_declaration=True) + "\n")
    return path
