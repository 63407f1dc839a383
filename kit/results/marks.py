"""How the answers of checks are marked, everywhere: a sign, a word and a kind. Each place has one colour for a kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Mark(NamedTuple):
    sign: str
    word: str
    kind: str  # bad, open, good

    def __str__(self) -> str:
        return f"{self.sign} {self.word}"


# By `passed`, worst first.
MARKS: dict[bool | None, Mark] = {
    False: Mark("✗", "FAIL", "bad"),
    None: Mark("-", "not measured", "open"),
    True: Mark("✓", "pass", "good"),
}


@dataclass(frozen=True, slots=True)
class VerdictRow:
    """One check's answer. `passed` is None where it was not measured."""

    check: str
    measured: float | None
    limit: float
    unit: str
    passed: bool | None
    why: str


def worst_first(rows: Iterable[VerdictRow]) -> list[VerdictRow]:
    return sorted(rows, key=lambda row: list(MARKS).index(row.passed))


def tally(rows: Sequence[VerdictRow]) -> str:
    """1 failed, 30 passed, 2 not measured."""
    failed, unmeasured, passed = (sum(row.passed is answer for row in rows) for answer in MARKS)
    return f"{failed} failed, {passed} passed, {unmeasured} not measured" if rows else "no checks"


def without_parts(rows: Iterable[VerdictRow]) -> list[VerdictRow]:
    """One row per check: the rows `check/part` say what it is about in detail."""
    return [row for row in rows if "/" not in row.check]
