"""The verdict: questions put to a run's records, each with a limit that a person may move.

A check that finds no records is `None`, never a pass and never a failure. A measured NaN fails: it holds no limit.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from kit.errors import BadInput, KitError
from kit.results.files import read_json, spelled, write_json
from kit.results.tolerances import checked_tolerances

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import pandas as pd


class NotMeasured(KitError):  # noqa: N818 - a check says it to `judge`; people do not see it as an error
    """A check found no records to judge."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a check measured; `None` and why where it could not."""

    value: float | None
    why: str = ""
    of: str = ""  # of several answers: what this one is about


@dataclass(frozen=True, slots=True)
class Check:
    """A question with a limit. `tolerance` is the keyword that moves the limit; checks may share one.

    A limit that hangs on the run (a coarser type of numbers) is a function of its config. A measure that gives several answers
    gives a row of the verdict for each, named `check/of`, below a row of the check's own that is the worst of them. A check with
    `when` is asked only of runs whose config that function takes.
    """

    name: str
    question: str
    tolerance: str
    limit: float | Callable[[Mapping[str, Any]], float]
    unit: str
    better: Literal["<=", ">=", "=="]
    measure: Callable[[pd.DataFrame, Mapping[str, Any]], Measured | Sequence[Measured]]
    when: Callable[[Mapping[str, Any]], bool] | None = None

    def asked(self, config: Mapping[str, Any]) -> bool:
        return self.when is None or self.when(config)

    def limit_for(self, config: Mapping[str, Any]) -> float:
        return float(self.limit(config) if callable(self.limit) else self.limit)

    def holds(self, measured: float, limit: float) -> bool:
        if self.better == "<=":
            return measured <= limit
        return measured >= limit if self.better == ">=" else measured == limit


@dataclass(frozen=True, slots=True)
class Answer:
    """A check and what it found in the records of one run."""

    check: Check
    found: Measured | Sequence[Measured]


@dataclass(frozen=True, slots=True)
class VerdictRow:
    """One check's answer. `passed` is None where it was not measured."""

    check: str
    measured: float | None
    limit: float
    unit: str
    passed: bool | None
    why: str


class Verdict(Sequence[VerdictRow]):
    """The rows in the order of the lab's checks; shown worst first."""

    __slots__ = ("rows",)

    def __init__(self, rows: Iterable[VerdictRow]) -> None:
        self.rows = tuple(rows)

    @overload
    def __getitem__(self, index: int) -> VerdictRow: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[VerdictRow, ...]: ...
    def __getitem__(self, index: int | slice) -> VerdictRow | tuple[VerdictRow, ...]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Verdict) and self.rows == other.rows

    def __hash__(self) -> int:
        return hash(self.rows)

    @property
    def passed(self) -> bool:
        """No check failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[VerdictRow, ...]:
        return tuple(row for row in self.rows if row.passed is False)

    def to_json(self) -> list[dict[str, Any]]:
        return [spelled(asdict(row)) for row in self.rows]

    def write(self, path: Path) -> None:
        write_json(path, self.to_json())

    def __repr__(self) -> str:
        table = [_HEAD, *map(_cells, self._worst_first())]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if 2 <= index <= 3 else cell.ljust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in table
        ]
        return "\n".join([self.summary(), *(lines if self.rows else [])])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{cell}</th>" for cell in _HEAD)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(row)) + "</tr>"
            for row in self._worst_first()
        )
        return f"<div><p>{self.summary()}</p><table><tr>{head}</tr>{body}</table></div>"

    def _worst_first(self) -> list[VerdictRow]:
        return sorted(self.rows, key=lambda row: {False: 0, None: 1, True: 2}[row.passed])

    def summary(self) -> str:
        """How many failed, passed and were not measured."""
        if not self.rows:
            return "no checks"
        passed = sum(row.passed is True for row in self.rows)
        unmeasured = sum(row.passed is None for row in self.rows)
        return f"{len(self.failed)} failed, {passed} passed, {unmeasured} not measured"


def judge(
    frame: pd.DataFrame,
    config: Mapping[str, Any],
    checks: Sequence[Check],
    tolerances: Mapping[str, float] | None = None,
) -> Verdict:
    """Put every check to the records; `tolerances` moves limits by their keyword."""
    moved = checked_tolerances(tolerances or {}, allowed=[check.tolerance for check in checks])
    return hold(measure(frame, config, checks), config, moved)


def measure(frame: pd.DataFrame, config: Mapping[str, Any], checks: Sequence[Check]) -> list[Answer]:
    """What each check found in the records. Limits have no part in it, so that they may be moved without asking again."""
    return [Answer(check, _ask(check, frame, config)) for check in checks]


def hold(answers: Sequence[Answer], config: Mapping[str, Any], moved: Mapping[str, float]) -> Verdict:
    """Hold what was found against the limits; `moved` are those by keyword that a person moved."""
    return Verdict([row for answer in answers for row in _held(answer, config, moved)])


def select(frame: pd.DataFrame, **wanted: object) -> pd.DataFrame:
    """The rows that have what is wanted, e.g. `select(frame, phase="reload", metric="rss")`; none: `NotMeasured`.

    Mind that pandas' own max, median and the like pass over NaN: a check of numbers that may be NaN must look for it.
    """
    for column, value in wanted.items():
        frame = frame[frame[column] == value]
    if frame.empty:
        raise NotMeasured("no records with " + ", ".join(f"{column} {value!r}" for column, value in wanted.items()))
    return frame


def read_verdict(path: Path) -> Verdict:
    data = read_json(path)
    try:
        return Verdict(
            VerdictRow(
                check=row["check"],
                measured=None if row["measured"] is None else float(row["measured"]),
                limit=float(row["limit"]),
                unit=row["unit"],
                passed={True: True, False: False, None: None}[row["passed"]],
                why=row["why"],
            )
            for row in data
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{path} is not a verdict: {error!r}") from error


def exit_code(verdict: Verdict) -> int:
    """0 where no check failed, 1 where one did."""
    return 0 if verdict.passed else 1


def _ask(check: Check, frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured | Sequence[Measured]:
    try:
        return check.measure(frame, _Config(config))
    except NotMeasured as missing:
        return Measured(None, str(missing))


def _held(answer: Answer, config: Mapping[str, Any], moved: Mapping[str, float]) -> list[VerdictRow]:
    check, measured = answer.check, answer.found
    limit = moved.get(check.tolerance, check.limit_for(config))
    if isinstance(measured, Measured):
        return [_row(check, measured, limit)]
    rows = [_row(check, one, limit) for one in measured]
    return [_worst_of(check, rows, limit), *rows]


def _worst_of(check: Check, rows: Sequence[VerdictRow], limit: float) -> VerdictRow:
    """What the rows of one check come to: failed where one failed, not measured where one was not."""
    if not rows:
        return _row(check, Measured(None, "there was nothing to ask about"), limit)
    by_answer: dict[bool | None, list[VerdictRow]] = {answer: [] for answer in (False, None, True)}
    for row in rows:
        by_answer[row.passed].append(row)
    passed = next(answer for answer, some in by_answer.items() if some)
    farthest = min if check.better == ">=" else max
    worst = farthest(by_answer[passed], key=lambda row: 0.0 if row.measured is None else row.measured)
    count = f"{len(by_answer[False])} of {len(rows)} fail, worst" if by_answer[False] else f"{len(rows)}, worst"
    return VerdictRow(check.name, worst.measured, limit, check.unit, passed, f"{count} {worst.why}")


def _row(check: Check, measured: Measured, limit: float) -> VerdictRow:
    passed: bool | None
    if measured.value is None:
        value, passed, why = None, None, f"not measured: {measured.why or 'no records for it'}"
    else:
        value = float(measured.value)
        passed = bool(check.holds(value, limit))
        why = measured.why or ("measured NaN, which holds no limit" if math.isnan(value) else "")
    name = f"{check.name}/{measured.of}" if measured.of else check.name
    return VerdictRow(name, value, limit, check.unit, passed, why)


class _Config(dict[str, Any]):
    """A run's config. Where it lacks what a check asks for (an older kit wrote it), that check is not measured."""

    def __missing__(self, key: str) -> NoReturn:
        raise NotMeasured(f"the run's config has no {key!r}")


_HEAD = ("", "check", "measured", "limit", "unit", "why")


def _cells(row: VerdictRow) -> tuple[str, ...]:
    mark = {True: "pass", False: "FAIL", None: "-"}[row.passed]
    measured = "-" if row.measured is None else _number(row.measured)
    return mark, row.check, measured, _number(row.limit), row.unit, row.why.replace("\n", " ")


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.6g}"
