"""What a panel's model is made of: plain data, and small questions about settings and runs."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from kit.labs.options import Field
    from kit.results import Check, Run, Verdict

LOG_LINES = 2000
COUNTS = 10.0  # a slider of counts goes at least so far
AS_IT_IS = "the lab's own"
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
    ranks: tuple[str, ...]  # waiting, running, done, failed; absent: no work for this rank
    seconds: tuple[float | None, ...]
    began: float | None = None


def marks(ranks: int, working: Collection[int], state: str) -> tuple[str, ...]:
    """A state for each rank that has work in a phase."""
    return tuple(state if rank in working else "absent" for rank in range(ranks))


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
    """What only a start found wrong. Start stays enabled: the fix may lie outside the settings."""

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


# -- limits -------------------------------------------------------------------------------------------------------------


class Limit(NamedTuple):
    """A tolerance, and the checks that share it. From `low` to `high` goes its slider: by powers of ten where low is above 0."""

    tolerance: str
    checks: tuple[str, ...]
    question: str
    default: float
    unit: str
    better: str
    low: float
    high: float


def limits_of(
    checks: Sequence[Check],
    config: Mapping[str, Any],
    verdict: Verdict | None,
    moved: Mapping[str, float],
) -> tuple[Limit, ...]:
    """The limits in the order of the checks. What was measured lies within the slider, so that every verdict can be flipped."""
    measured = {row.check.partition("/")[0]: row.measured for row in verdict or ()}
    found: dict[str, Limit] = {}
    checks = [check for check in checks if check.asked(config)]
    for check in checks:
        names = tuple(other.name for other in checks if other.tolerance == check.tolerance)
        if check.tolerance in found:
            continue
        default = check.limit_for(config)
        reach = [default, moved.get(check.tolerance, default), *(measured.get(name) or 0.0 for name in names)]
        low, high = span(default, max((abs(value) for value in reach if math.isfinite(value)), default=0.0), check.unit)
        found[check.tolerance] = Limit(
            check.tolerance, names, check.question, default, check.unit, check.better, low, high
        )
    return tuple(found.values())


def span(default: float, reach: float, unit: str) -> tuple[float, float]:
    """The ends of a slider that holds the default and all that is in reach, at round numbers."""
    if unit == "1":
        return 0.0, max(COUNTS, rounded_up(2 * reach))
    if unit == "ratio" and 0 < default < 0.1:
        return 10.0 ** (math.floor(math.log10(default)) - 3), max(1.0, rounded_up(10 * reach))
    if unit == "ratio":
        return 0.0, rounded_up(max(reach, 1e-3) * (10 if default == 0 else 1.2))
    return 0.0, rounded_up(max(4 * default, 2 * reach, 1.0))


def rounded_up(value: float) -> float:
    """The next of 1, 2 and 5 times a power of ten."""
    if value <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1.0, 2.0, 5.0, 10.0) if step * power >= value * (1 - 1e-12))
