"""Rows, frame, verdict, comparison, exports, trace: what a run leaves behind and what is made of it. No torch here.

Names load when they are first used, so that ranks can import `kit.results.records` alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.results.comparison import compare, outcomes
    from kit.results.frames import export, with_ids
    from kit.results.records import COLUMNS, Row, RowWriter, Unjudged
    from kit.results.rules import Measured, Missing, NotMeasured, Rule, incomplete, judge, rule, select
    from kit.results.run import Run, create_run, list_runs, newest_run, runs_dir, to_frame, trace, write_trace
    from kit.results.verdict import Verdict, VerdictRow, exit_code, load_tolerances, read_verdict, save_tolerances

__all__ = ["COLUMNS", "Row", "RowWriter", "compare", "export", "outcomes", "trace", "with_ids", "write_trace"]
__all__ += ["Run", "create_run", "list_runs", "newest_run", "runs_dir", "to_frame"]
__all__ += ["Measured", "Missing", "NotMeasured", "Rule", "Unjudged", "Verdict", "VerdictRow", "exit_code", "rule"]
__all__ += ["incomplete", "judge", "load_tolerances", "read_verdict", "save_tolerances", "select"]

_HOMES = {
    **dict.fromkeys(("compare", "outcomes"), "comparison"),
    **dict.fromkeys(("COLUMNS", "Row", "RowWriter", "Unjudged"), "records"),
    **dict.fromkeys(
        ("Run", "create_run", "list_runs", "newest_run", "runs_dir", "to_frame", "trace", "write_trace"), "run"
    ),
    **dict.fromkeys(("export", "with_ids"), "frames"),
    **dict.fromkeys(("Measured", "Missing", "NotMeasured", "Rule", "incomplete", "judge", "rule", "select"), "rules"),
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module 'kit.results' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"kit.results.{_HOMES.get(name, 'verdict')}"), name)
    return value
