"""Records, frame, verdict, comparison, exports, trace: what a run leaves behind and what is made of it. No torch here.

Names load when they are first used, so that ranks can import `kit.results.records` alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.results.comparison import compare as compare
    from kit.results.comparison import outcomes as outcomes
    from kit.results.exports import export as export
    from kit.results.frames import with_ids as with_ids
    from kit.results.records import COLUMNS as COLUMNS
    from kit.results.records import Record as Record
    from kit.results.records import RecordWriter as RecordWriter
    from kit.results.run import Run as Run
    from kit.results.run import create_run as create_run
    from kit.results.run import list_runs as list_runs
    from kit.results.run import load as load
    from kit.results.run import newest_run as newest_run
    from kit.results.run import runs_dir as runs_dir
    from kit.results.run import to_frame as to_frame
    from kit.results.timeline import trace as trace
    from kit.results.timeline import write_trace as write_trace
    from kit.results.verdict import Check as Check
    from kit.results.verdict import Measured as Measured
    from kit.results.verdict import Missing as Missing
    from kit.results.verdict import NotMeasured as NotMeasured
    from kit.results.verdict import Unjudged as Unjudged
    from kit.results.verdict import Verdict as Verdict
    from kit.results.verdict import VerdictRow as VerdictRow
    from kit.results.verdict import exit_code as exit_code
    from kit.results.verdict import incomplete as incomplete
    from kit.results.verdict import judge as judge
    from kit.results.verdict import load_tolerances as load_tolerances
    from kit.results.verdict import read_verdict as read_verdict
    from kit.results.verdict import save_tolerances as save_tolerances
    from kit.results.verdict import select as select

_MODULES = {
    "comparison": ("compare", "outcomes"),
    "exports": ("export",),
    "frames": ("with_ids",),
    "records": ("COLUMNS", "Record", "RecordWriter"),
    "run": ("Run", "create_run", "list_runs", "load", "newest_run", "runs_dir", "to_frame"),
    "timeline": ("trace", "write_trace"),
    "verdict": (
        *("Check", "Measured", "Missing", "NotMeasured", "Unjudged", "Verdict", "VerdictRow", "exit_code"),
        *("incomplete", "judge", "load_tolerances", "read_verdict", "save_tolerances", "select"),
    ),
}
_HOMES = {name: f"kit.results.{module}" for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'kit.results' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value
