"""Records, frame, verdict, comparison, exports, trace: what a run leaves behind and what is made of it. No torch here.

Names load when they are first used, so that ranks can import `kit.results.records` alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.results.comparison import compare, outcomes
    from kit.results.exports import export
    from kit.results.frames import to_frame, with_ids
    from kit.results.marks import Verdict, VerdictRow, exit_code, read_verdict
    from kit.results.records import COLUMNS, Record, RecordWriter
    from kit.results.run import Run, create_run, list_runs, load, newest_run, runs_dir
    from kit.results.timeline import trace, write_trace
    from kit.results.verdict import (
        Check,
        Measured,
        Missing,
        NotMeasured,
        Unjudged,
        incomplete,
        judge,
        load_tolerances,
        save_tolerances,
        select,
    )

_MODULES = {
    "comparison": ("compare", "outcomes"),
    "exports": ("export",),
    "frames": ("to_frame", "with_ids"),
    "marks": ("Verdict", "VerdictRow", "exit_code", "read_verdict"),
    "records": ("COLUMNS", "Record", "RecordWriter"),
    "run": ("Run", "create_run", "list_runs", "load", "newest_run", "runs_dir"),
    "timeline": ("trace", "write_trace"),
    "verdict": (
        *("Check", "Measured", "Missing", "NotMeasured", "Unjudged"),
        *("incomplete", "judge", "load_tolerances", "save_tolerances", "select"),
    ),
}
_HOMES = {name: f"kit.results.{module}" for module, names in _MODULES.items() for name in names}

__all__ = [
    "COLUMNS",
    "Check",
    "Measured",
    "Missing",
    "NotMeasured",
    "Record",
    "RecordWriter",
    "Run",
    "Unjudged",
    "Verdict",
    "VerdictRow",
    "compare",
    "create_run",
    "exit_code",
    "export",
    "incomplete",
    "judge",
    "list_runs",
    "load",
    "load_tolerances",
    "newest_run",
    "outcomes",
    "read_verdict",
    "runs_dir",
    "save_tolerances",
    "select",
    "to_frame",
    "trace",
    "with_ids",
    "write_trace",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'kit.results' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value
