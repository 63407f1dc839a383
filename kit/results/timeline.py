"""A run as a timeline for Perfetto or chrome://tracing: a lane per rank, an event per phase, counters for memory.

Spans (records with a start) have lanes of their own below the rank's phases, one per metric; those that overlap without
nesting are drawn on further lanes, since a lane shows nested events only. Events without a duration are marks among the
phases. Times are microseconds since the earliest start. Ranks on several nodes are placed by their own clocks.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.errors import BadInput
from kit.results.files import need_folder, to_json, write_text
from kit.results.records import rank_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kit.results.run import Run

Row = dict[str, Any]

COUNTERS = ("rss", "driver_used")


def trace(run: Run) -> dict[str, Any]:
    """The timeline as Chrome's trace JSON: a complete event for each timed phase and for each span."""
    rows: list[Row] = [{str(key): value for key, value in row.items()} for row in run.frame().to_dict("records")]
    spans = [row for row in rows if not math.isnan(row["start"])]
    plain = [row for row in rows if math.isnan(row["start"])]
    timed = [
        (row, _companions(row, others)) for others in _phases(plain) for row in others if row["metric"] == "seconds"
    ]
    if not timed and not spans:
        raise BadInput(
            f"run {run.id!r} has no timed phases (no metric 'seconds') and no spans, so there is no timeline to draw"
        )
    zero = min([row["time"] - row["value"] for row, _ in timed] + [row["start"] for row in spans])
    events: list[Row] = []
    for row, others in timed:
        events.append(_phase(row, others, zero))
        events += _counters(row, others, zero)
    events += [_mark(row, zero) for row in plain if row["ids"] and math.isnan(row["value"])]
    ranks = sorted({row["rank"] for row in [*spans, *(row for row, _ in timed)]})
    drawn, lanes = _spans(spans, zero, run.roles, first=max(ranks) + 1)
    heads = [_name("process_name", 0, f"{run.lab}: {run.id}")]
    for rank in ranks:
        for lane, name in ((rank, rank_name(rank, run.roles)), *lanes[rank]):
            heads += [_name("thread_name", lane, name), _meta("thread_sort_index", lane, sort_index=len(heads))]
    return {
        "displayTimeUnit": "ms",
        "traceEvents": heads + sorted(events + drawn, key=lambda event: float(event["ts"])),
    }


def write_trace(run: Run, path: str | Path) -> Path:
    target = Path(path).expanduser()
    need_folder(target)
    write_text(target, to_json(trace(run)) + "\n")
    return target


def _phases(rows: list[Row]) -> list[list[Row]]:
    """The records of each cycle, phase and rank."""
    groups: dict[tuple[int, str, int], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["cycle"], row["phase"], row["rank"]].append(row)
    return list(groups.values())


def _companions(seconds: Row, rows: list[Row]) -> list[Row]:
    """The other records of that phase; if it ran twice in a cycle, those of the same time."""
    again = sum(row["metric"] == "seconds" for row in rows) > 1
    return [row for row in rows if row["metric"] != "seconds" and (not again or row["time"] == seconds["time"])]


def _phase(row: Row, others: list[Row], zero: float) -> Row:
    values = {_label(other): other["value"] for other in others if not other["ids"]}
    return {
        "name": row["phase"],
        "cat": row["lab"],
        "ph": "X",
        "ts": _micros(row["time"] - row["value"], zero),
        "dur": round(row["value"] * 1e6, 3),
        "pid": 0,
        "tid": row["rank"],
        "args": {"cycle": row["cycle"], **values},
    }


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
                again = f" ({place + 1})" if place else ""
                lanes[rank].append(
                    (first + sum(map(len, lanes.values())), f"{rank_name(rank, roles)}: {metric}{again}")
                )
            open_ends[place].append(end)
            lane = lanes[rank][place - len(open_ends)][0]
            drawn.append(_about(row, ph="X", ts=begin, dur=round(max(end - begin, 0), 3), tid=lane))
    return drawn, lanes


def _fits(ends: list[float], begin: float, end: float) -> bool:
    """Whether a span lies within what is open in a lane, or after it."""
    while ends and ends[-1] <= begin:
        ends.pop()
    return not ends or end <= ends[-1]


def _mark(row: Row, zero: float) -> Row:
    return _about(row, ph="i", s="t", ts=_micros(row["time"], zero), tid=row["rank"])


def _about(row: Row, **event: object) -> Row:
    """An event with all that its record says: the value, the text and the ids."""
    args: Row = {"cycle": row["cycle"], "phase": row["phase"]}
    args |= json.loads(row["ids"]) if row["ids"] else {}
    args |= {"text": row["text"]} if row["text"] else {}
    args |= {} if math.isnan(row["value"]) else {_label(row): row["value"]}
    return {"name": row["metric"], "cat": row["lab"], "pid": 0, **event, "args": args}


def _label(row: Row) -> str:
    return f"{row['metric']} [{row['unit']}]".removesuffix(" []")


def _counters(row: Row, others: list[Row], zero: float) -> list[Row]:
    moments = {"_before": row["time"] - row["value"], "": row["time"]}
    values = {other["metric"]: other["value"] for other in others}
    return [
        {
            "name": f"rank {row['rank']} {metric}",
            "ph": "C",
            "ts": _micros(moment, zero),
            "pid": 0,
            "tid": row["rank"],
            "args": {"bytes": values[metric + suffix]},
        }
        for metric in COUNTERS
        for suffix, moment in moments.items()
        if metric + suffix in values
    ]


def _name(kind: str, tid: int, name: str) -> Row:
    return _meta(kind, tid, name=name)


def _meta(kind: str, tid: int, **args: object) -> Row:
    return {"name": kind, "ph": "M", "pid": 0, "tid": tid, "args": args}


def _micros(moment: float, zero: float) -> float:
    return round((moment - zero) * 1e6, 3)
