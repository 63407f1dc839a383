"""What a panel's model is made of: plain data, and small questions about settings and runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from kit.labs.options import Field
    from kit.results import Run

LOG_LINES = 2000
AS_IT_IS = "as the lab has it"
CAN = {
    "idle": {"start", "step", "run"},
    "starting": {"stop"},
    "ready": {"step", "run", "stop", "restart"},
    "running": {"stop"},
    "stopping": set[str](),
    "finished": {"start", "step", "run", "restart"},
    "failed": {"start", "step", "run", "restart"},
}
BUSY = {"starting", "running", "stopping"}
FRESH = {"start", "restart"}  # of these, and of step and run where no ranks live, new ranks come


class PhaseState(NamedTuple):
    """One phase of the plan on every rank. `began` is time.monotonic() of its start while it runs."""

    cycle: int
    phase: str
    status: str  # to do, next, running, done, failed
    ranks: tuple[str, ...]  # waiting, running, done, failed
    seconds: tuple[float | None, ...]
    began: float | None = None


class Failure(NamedTuple):
    """What ended a run. `ranks` are those that are to blame, `detail` a traceback or what ranks were doing."""

    kind: str  # raised, died, timeout, stopped, error
    message: str
    ranks: tuple[int, ...]
    phase: str
    detail: str


class Progress(NamedTuple):
    """Phases, and seconds; `left` is None where nothing is known of what is to come."""

    done: int = 0
    total: int = 0
    elapsed: float = 0.0
    left: float | None = None


class Late(NamedTuple):
    """What only a start found wrong. It keeps nobody from starting again: the cure may lie outside of the settings."""

    field: str
    sentence: str


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON has them: tuples are lists. What JSON has no word for stays, for the check to refuse by name."""
    try:
        result: dict[str, Any] = json.loads(json.dumps(dict(values)))
    except (TypeError, ValueError):
        return dict(values)
    return result


def choices(field: Field) -> Sequence[Any]:
    """The values among which a drop-down or a checkbox of the field lets a person choose."""
    if field.choices:
        return field.choices
    if field.kind is bool:
        return (True, False)
    return (None,) if field.optional else ()


def first_new(found: Mapping[str, str], known: Mapping[str, str]) -> str:
    """The first complaint that is not there already: what the choice itself would bring."""
    return next((text for text in found.values() if text not in known.values()), "")


def described(run: Run) -> str:
    fault = f", fault {run.fault}" if run.fault else ""
    status = "not finished" if run.status == "running" else run.status
    return f"{run.dir.name} ({status}{fault})"


def count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
