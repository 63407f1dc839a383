"""One row of a bench: a question, the spread of its answers, and what was asked for."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

KIT = "kit"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """`low` and `high` are the least and the greatest of `n` samples. Less is better; `limit` is "at most", `aim` is what would be
    excellent, `ceiling` what the machine could do at best. Without samples `median` is None and `note` says why.

    `ids` say what the row is about (way, groups, ranks, ...) for programs, which do not read `what`. In one bench a row is known by
    `what` and `who`: a later one with the same replaces it."""

    what: str
    who: str = KIT
    unit: str = "s"
    median: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    limit: float | None = None
    aim: float | None = None
    ceiling: float | None = None
    note: str = ""
    ids: Mapping[str, str | int | float] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the median keeps the limit; None where there is nothing to say."""
        return None if self.median is None or self.limit is None else self.median <= self.limit

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


def row(what: str, samples: Sequence[float], **about: Any) -> Row:
    """A row from its samples, which are in the row's unit; without any it needs a note."""
    if not samples:
        return Row(what=what, **about)
    middle = statistics.median(samples)
    return Row(what=what, median=middle, low=min(samples), high=max(samples), n=len(samples), **about)
