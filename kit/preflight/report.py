"""What a probe reports: a line of JSON for each finding, at once, so that a probe that is cut keeps what it had measured."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import traceback
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from kit.world import leftovers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

Result = Literal["pass", "fail", "not measurable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One finding. `value` is a number with its unit, where there is one; `why` says what was compared, or what is missing."""

    what: str
    result: Result
    value: float | None = None
    unit: str = ""
    why: str = ""

    def text(self) -> str:
        return self.what if self.value is None else f"{self.what} {shown(self.value)} {self.unit}".rstrip()


@dataclass(kw_only=True, slots=True)
class Findings:
    """All that a probe reported before it ended."""

    rows: list[Row] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=dict)
    pids: list[int] = field(default_factory=list)  # of ranks, for what has to be cleaned after them
    at: str = "start"
    failed: str = ""
    done: bool = False

    def hear(self, line: str) -> None:
        """Take in a line; what is not a report is skipped."""
        try:
            message: dict[str, Any] = json.loads(line)
            kind, value = message["kind"], message["value"]
        except (ValueError, KeyError, TypeError):
            return
        if kind == "row":
            self.rows.append(Row(**value))
        elif kind == "time":
            self.times |= value
        elif kind == "pids":
            self.pids += value
        elif kind in {"at", "failed", "done"}:
            setattr(self, kind, value)


class Report:
    """The probe's side of it."""

    def __init__(self, out: TextIO) -> None:
        self.out = out

    def say(self, kind: str, value: Any) -> None:
        print(json.dumps({"kind": kind, "value": value}), file=self.out, flush=True)

    def at(self, what: str) -> None:
        """What begins now: the place that is named if it does not end."""
        self.say("at", what)

    def row(self, what: str, passed: bool | None, why: str = "", value: float | None = None, unit: str = "") -> None:
        if value is not None and not math.isfinite(value):
            value, why = None, f"measured {value}; {why}".removesuffix("; ")
        result: Result = "not measurable" if passed is None else "pass" if passed else "fail"
        self.say("row", asdict(Row(what=what, result=result, value=value, unit=unit, why=why)))

    def needs_gpu(self, *what: str) -> None:
        for one in what:
            self.row(one, None, why="it needs a GPU, and these ranks work on the host")

    def time(self, **seconds: float) -> None:
        """Seconds of one of each: a World, a group, a step."""
        self.say("time", seconds)

    def pids(self, pids: Sequence[int]) -> None:
        self.say("pids", list(pids))


def shown(value: float) -> str:
    """Three digits that count; whole numbers as they are."""
    return f"{value:.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"


def main(target: str, device: str, settings: str) -> int:
    leftovers.die_with_parent()
    report = Report(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
    module, _, name = target.partition(":")
    try:
        getattr(importlib.import_module(module), name)(report, device, json.loads(settings))
    except Exception as error:  # noqa: BLE001 - whatever it raises is what the probe found
        lines = str(error).strip().splitlines() or [""]
        first, last = lines[0].strip(), lines[-1].strip()
        words = first if first == last else f"{first} {last}"
        report.say("failed", f"{type(error).__name__}: {words}"[:600])
        traceback.print_exc()
        return 1
    report.say("done", value=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
