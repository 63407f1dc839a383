"""What a part of a bench or of the reference does, counted in a machine's primitives: the arithmetic behind its limit.

The counts were fitted to what the parts took on two cores (data/reference/cpu-2core), and are guesses for a GPU.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kit.bench.pace import Pace

SLACK = 2.5  # a part's limit, in predicted times
LEAST_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """How often each primitive of a Pace comes. `step` is of the tiny job: a larger one counts for several. `idle` is seconds that no
    machine changes."""

    process: float = 0
    world: float = 0
    megatron: float = 0
    job: float = 0
    step: float = 0
    group: float = 0
    copy: float = 0
    idle: float = 0

    def __add__(self, other: Cost) -> Cost:
        mine, others = asdict(self), asdict(other)
        return Cost(**{name: mine[name] + others[name] for name in mine})

    def __mul__(self, times: float) -> Cost:
        return Cost(**{name: times * count for name, count in asdict(self).items()})

    def terms(self, pace: Pace) -> dict[str, float]:
        """Seconds by primitive."""
        counts = asdict(self)
        return {name: count * (1.0 if name == "idle" else getattr(pace, f"{name}_s")) for name, count in counts.items()}

    def seconds(self, pace: Pace) -> float:
        return sum(self.terms(pace).values())

    def limit(self, pace: Pace) -> float:
        return max(LEAST_S, SLACK * self.seconds(pace))

    def told(self, pace: Pace) -> str:
        """The arithmetic in words, such as "1 process + 1 megatron + 40 step"; what takes less than 0.1 s is left out."""
        counts = asdict(self)
        return " + ".join(f"{counts[name]:.3g} {name}" for name, taken in self.terms(pace).items() if taken >= 0.1)


def total(costs: list[Cost]) -> Cost:
    return sum(costs, start=Cost())


def crowd(ranks: int) -> float:
    """How much longer ranks take to start where they are more than the cores."""
    return max(1.0, ranks / len(os.sched_getaffinity(0)))
