"""A slider that only has places, and what they stand for.

A browser rounds a slider's number to its steps and sends it back at once, as if a person had moved it: a limit of 1e-06 would
come back as 9.83e-07. Places are whole numbers, so nothing is rounded; the exact number stands in the field beside.
"""

from __future__ import annotations

import math
from typing import NamedTuple

PLACES = 400
DECADE = 20  # places to a power of ten, which itself is one of them


class Scale(NamedTuple):
    """From `low` to `high` in so many steps: each a whole number, or by powers, or even."""

    low: float
    high: float
    steps: int
    kind: str  # whole, powers, even

    def value(self, place: int) -> float:
        if self.kind == "whole":
            return self.low + place
        if place <= 0 or place >= self.steps:
            return self.low if place <= 0 else self.high
        if self.kind == "powers":
            return float(f"{self.low * 10 ** (place / DECADE):.3g}")
        return float(f"{self.low + (self.high - self.low) * place / self.steps:.4g}")

    def place(self, value: float) -> int:
        """The place that is nearest; a value beyond the ends is shown at the end."""
        inside = min(max(value, self.low), self.high)
        if self.kind == "whole":
            return round(inside - self.low)
        if self.kind == "powers":
            return self.steps if inside == self.high else round(DECADE * math.log10(inside / self.low))
        return round(self.steps * (inside - self.low) / (self.high - self.low)) if self.steps else 0


def scale(low: float, high: float, *, whole: bool = False) -> Scale:
    """By powers where the range spans them, each number where they are few and whole, else even."""
    if whole and high - low <= PLACES:
        return Scale(low, high, round(high - low), "whole")
    if low > 0 and high / low >= 100:
        return Scale(low, high, math.floor(DECADE * math.log10(high / low) + 1e-9), "powers")
    return Scale(low, high, PLACES if high > low else 0, "even")
