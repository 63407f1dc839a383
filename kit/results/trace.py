"""A run as a timeline for Perfetto or chrome://tracing: a lane per rank, an event per phase, counters for memory.

Times are microseconds since the earliest phase began. Ranks on several nodes are placed by their own clocks.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.errors import BadInput
from kit.results.files import need_folder, to_json, write_text

if TYPE_CHECKING:
    from kit.results.run import Run

Row = dict[str, Any]

COUNTERS = ("rss", "driver_used")


def trace(run: Run) -> dict[str, Any]:
    """The timeline as Chrome's trace JSON: one complete event per cycle, phase and rank that was timed."""
    timed = [(row, _companions(row, rows)) for rows in _phases(run) for row in rows if row["metric"] == "seconds"]
    if not timed:
        raise BadInput(f"run {run.id!r} has no timed phases (no metric 'seconds'), so there is no timeline to draw")
    zero = min(row["time"] - row["value"] for row, _ in timed)
    events = [_name("process_name", 0, f"{run.lab}: {run.id}")]
    for rank in sorted({row["rank"] for row, _ in timed}):
        events += [_name("thread_name", rank, f"rank {rank}"), _meta("thread_sort_index", rank, sort_index=rank)]
    spans: list[Row] = []
    for row, others in timed:
        spans.append(_span(row, others, zero))
        spans += _counters(row, others, zero)
    return {"displayTimeUnit": "ms", "traceEvents": events + sorted(spans, key=lambda event: float(event["ts"]))}


def write_trace(run: Run, path: str | Path) -> Path:
    target = Path(path).expanduser()
    need_folder(target)
    write_text(target, to_json(trace(run)) + "\n")
    return target


def _phases(run: Run) -> list[list[Row]]:
    """The records of each cycle, phase and rank."""
    groups: dict[tuple[int, str, int], list[Row]] = defaultdict(list)
    for item in run.frame().to_dict("records"):
        row = {str(key): value for key, value in item.items()}
        groups[row["cycle"], row["phase"], row["rank"]].append(row)
    return list(groups.values())


def _companions(seconds: Row, rows: list[Row]) -> list[Row]:
    """The other records of that phase; where a phase was run twice in a cycle, those of the same moment."""
    again = sum(row["metric"] == "seconds" for row in rows) > 1
    return [row for row in rows if row["metric"] != "seconds" and (not again or row["time"] == seconds["time"])]


def _span(row: Row, others: list[Row], zero: float) -> Row:
    values = {f"{other['metric']} [{other['unit']}]".removesuffix(" []"): other["value"] for other in others}
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
