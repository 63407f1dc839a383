"""Records, frame, verdict, compare, export, trace: what a run leaves behind and what is made of it. No torch here.

Importing this is light; pandas is loaded by the functions that need it.
"""

from kit.results.compare import compare, outcomes
from kit.results.create import RunWriter, create_run, runs_dir
from kit.results.export import Exported, export, read_export
from kit.results.records import COLUMNS, Loaded, Record, RecordWriter, read_records, to_frame
from kit.results.run import Run, list_runs, load, newest_run
from kit.results.tolerances import load_tolerances, save_tolerances
from kit.results.trace import trace, write_trace
from kit.results.verdict import (
    Check,
    Measured,
    NotMeasured,
    Verdict,
    VerdictRow,
    exit_code,
    judge,
    read_verdict,
    select,
)

__all__ = [
    "COLUMNS",
    "Check",
    "Exported",
    "Loaded",
    "Measured",
    "NotMeasured",
    "Record",
    "RecordWriter",
    "Run",
    "RunWriter",
    "Verdict",
    "VerdictRow",
    "compare",
    "create_run",
    "exit_code",
    "export",
    "judge",
    "list_runs",
    "load",
    "load_tolerances",
    "newest_run",
    "outcomes",
    "read_export",
    "read_records",
    "read_verdict",
    "runs_dir",
    "save_tolerances",
    "select",
    "to_frame",
    "trace",
    "write_trace",
]
