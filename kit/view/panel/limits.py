"""The limits that a person may move in a panel, and from where to where their sliders go."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kit.results import Check, Verdict

COUNTS = 10.0  # a slider of counts goes at least so far


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
