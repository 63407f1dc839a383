"""The verdict: what the rules of a run measured, compared with their limits; and the limits that a person moves (tolerances)."""

from __future__ import annotations

import hashlib
import html
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from kit.errors import BadInput, hint
from kit.results.old import Renamed, current_tolerances
from kit.results.records import WORDS, output_file, read_json, spelled_number, to_json, write_json
from kit.results.units import ROW, amount, columns, table_html, unit_word

if TYPE_CHECKING:
    import pandas as pd


# -- the rows, and how they are marked everywhere: a sign, a word and a colour ---------------------------------------------------

GOOD, BAD, FAINT = "#00704f", "#b33a00", "#57606a"  # on a light page


class VerdictMark(NamedTuple):
    sign: str
    word: str
    kind: str  # bad, open, good
    css: str  # JupyterLab's own colour, so that its light and dark themes both fit; another page gets the one after the comma

    def __str__(self) -> str:
        return f"{self.sign} {self.word}"


# By `passed`, worst first.
MARKS: dict[bool | None, VerdictMark] = {
    False: VerdictMark("✗", "FAIL", "bad", f"var(--jp-error-color1, {BAD})"),
    None: VerdictMark("-", "not measured", "open", f"var(--jp-ui-font-color2, {FAINT})"),
    True: VerdictMark("✓", "pass", "good", f"var(--jp-success-color1, {GOOD})"),
}
HEADS = 3  # failed checks that a sentence names
SIGNS = {"<=": "≤", ">=": "≥", "==": "="}


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


def folded_rows(rows: Iterable[VerdictRow]) -> list[list[VerdictRow]]:
    """The rows as people read them, worst first: what was not measured for one reason is together; parts that passed are left out."""
    groups: dict[str, list[VerdictRow]] = {}
    for row in worst_first(rows):
        if not (row.passed and "/" in row.check):
            groups.setdefault(f"because {row.why}" if row.passed is None else row.check, []).append(row)
    return list(groups.values())


def cells(rows: Sequence[VerdictRow]) -> tuple[str, str, str, str]:
    """The check, what was measured, the limit and why, of a row or of several that were not measured for one reason."""
    row = rows[0]
    if len(rows) > 1:
        names = ", ".join(row.check for row in rows)
        return f"{len(rows)} checks", "-", "", f"{row.why} ({names})"
    measured, limit = amount(row.measured, row.unit), amount(None if math.isnan(row.limit) else row.limit, row.unit)
    if measured == limit != "-" and row.measured != row.limit:  # what lies just beside its limit needs more digits
        measured = f"{row.measured!r} {unit_word(row.unit)}".rstrip()
    return row.check, measured, limit, row.why


def beside_mark(why: str) -> str:
    """The reason without the words "not measured", where the row's mark already has them."""
    return why.removeprefix("not measured: ")


def tally(rows: Sequence[VerdictRow]) -> str:
    """The numbers of checks; a check with parts counts once, and its rows are named if more of them fail."""
    heads = without_parts(rows)
    failed, unmeasured, passed = (sum(row.passed is answer for row in heads) for answer in MARKS)
    lines = sum(row.passed is False for row in rows)
    beside = f" ({lines} rows)" if lines > failed else ""
    return f"{failed} failed{beside}, {passed} passed, {unmeasured} not measured" if heads else "no checks"


def measured_of(rows: Sequence[VerdictRow], *, ended: bool = False) -> str:
    """In a table of runs: "all passed, 15 of 22 measured". Of a run that did not come to its end, nothing has passed yet."""
    measured = [row for row in rows if row.passed is not None]
    failed = sum(row.passed is False for row in measured)
    answer = f"{failed} failed, " if failed else "" if ended or not measured else "all passed, "
    so_far = ", so far" if ended and measured and not failed else ""
    return f"{answer}{len(measured)} of {len(rows)} measured{so_far}"


def headline(rows: Iterable[VerdictRow]) -> str:
    """The verdict as a sentence: "2 of 9 checks fail: fds_return, threads_return"."""
    heads = without_parts(rows)
    failed = [row.check for row in heads if row.passed is False]
    asked = sum(row.passed is not None for row in heads)
    if not asked:
        return "nothing is judged yet"
    if failed:
        omitted = f" and {len(failed) - HEADS} more" if len(failed) > HEADS else ""
        return f"{len(failed)} of {asked} checks {'fails' if len(failed) == 1 else 'fail'}: {', '.join(failed[:HEADS])}{omitted}"
    left = f"; {len(heads) - asked} could not be measured" if len(heads) > asked else ""
    return f"{f'all {asked} checks pass' if asked > 1 else 'the one check passes'}{left}"


def without_parts(rows: Iterable[VerdictRow]) -> list[VerdictRow]:
    """One row per check: the rows `check/part` have the details."""
    return [row for row in rows if "/" not in row.check]


class Verdict(tuple[VerdictRow, ...]):  # noqa: SLOT001 - a tuple cannot have slots of its own
    """The rows in the order of the lab's checks; shown worst first. `ended`: the status of a run that did not come to its end."""

    ended: str

    def __new__(cls, rows: Iterable[VerdictRow] = (), *, ended: str = "") -> Self:
        verdict = super().__new__(cls, rows)
        verdict.ended = ended
        return verdict

    @property
    def answer(self) -> bool | None:
        """False if a check failed. None if nothing was measured, or if the run ended early: later records might have failed a check."""
        if self.failed:
            return False
        return None if self.ended or not any(row.passed for row in self) else True

    @property
    def passed(self) -> bool:
        return self.answer is True

    @property
    def failed(self) -> tuple[VerdictRow, ...]:
        return tuple(row for row in self if row.passed is False)

    def to_json(self) -> list[dict[str, Any]]:
        return [spelled_number(asdict(row)) for row in self]

    def write(self, path: Path) -> None:
        write_json(path, self.to_json())

    @property
    def digest(self) -> str:
        """Changes with every answer, and not with the spelling of its file."""
        return hashlib.sha256(to_json(self.to_json()).encode(errors="backslashreplace")).hexdigest()

    def frame(self) -> pd.DataFrame:
        import pandas as pd

        rows = [asdict(row) for row in worst_first(self)]
        return pd.DataFrame(rows, columns=[field.name for field in fields(VerdictRow)]).astype({"measured": "float64"})

    def save(self, path: str | Path) -> Path:
        from kit.results.frames import export

        return export(self.frame(), {}, path, units=UNITS, title=self.summary())

    def __repr__(self) -> str:
        words = {answer: "-" if answer is None else mark.word for answer, mark in MARKS.items()}
        table = [_HEAD, *((words[group[0].passed], *cells(group)) for group in folded_rows(self))]
        return "\n".join([self.summary(), *([columns(table, right=(2, 3))] if self else [])])

    def _repr_html_(self) -> str:
        rows = []
        for group in folded_rows(self):
            mark, (*about, why) = MARKS[group[0].passed], cells(group)
            words = map(html.escape, [*about, beside_mark(why)])
            rows.append([f'<b style="color:{mark.css};white-space:nowrap">{mark}</b>', *words])
        return table_html(_HEAD, rows, right=(2, 3), caption=self.summary())

    def changes(self, before: Verdict) -> list[str]:
        """What differs from an earlier verdict of the same records, a sentence for each check."""
        stored, now = ({row.check: _in_short(row) for row in rows} for rows in (before, self))
        missing = "the stored verdict does not have this check"
        return [
            *(
                f"{name}: {short}; {f'stored: {stored[name]}' if name in stored else missing}"
                for name, short in now.items()
                if stored.get(name) != short
            ),
            *(f"{name}: not asked now; stored: {short}" for name, short in stored.items() if name not in now),
        ]

    summary = tally


UNITS = {"measured": ROW, "limit": ROW}  # of the columns of a verdict's table
_HEAD = ("", "check", "measured", "limit", "why")


def _in_short(row: VerdictRow) -> str:
    measured = "" if row.measured is None else f" at {row.measured!r}"
    return f"{MARKS[row.passed].word}{measured}, limit {row.limit!r} {unit_word(row.unit)}".rstrip()


def number_text(value: float) -> str:
    """Whole numbers with all their digits, others with six."""
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.6g}"


def read_verdict(path: Path) -> Verdict:
    data = read_json(path)
    try:
        return Verdict(
            VerdictRow(
                check=_text(row["check"]),
                measured=None if row["measured"] is None else float(row["measured"]),
                limit=float(row["limit"]),
                unit=_text(row["unit"]),
                passed={True: True, False: False, None: None}[row["passed"]],
                why=_text(row["why"]),
            )
            for row in data
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{path} is not a verdict: {error!r}") from error


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def exit_code(verdict: Verdict, *, strict: bool = False) -> int:
    """0 if no check failed and one was measured. `strict`: a check that was not measured counts as a failed one."""
    unmeasured = [row for row in verdict if row.passed is None]
    return 1 if not verdict.passed or (strict and unmeasured) else 0


# -- tolerances: the limits that a person moves ----------------------------------------------------------------------------


def checked_tolerances(tolerances: Mapping[str, Any], allowed: Sequence[str] | None = None) -> dict[str, float]:
    """The tolerances as floats, by the names of their rules. An unknown name or a value that is not a number is a `BadInput`; a name of an
    older kit is accepted, with a warning that has the new one."""
    if not isinstance(tolerances, Mapping):
        raise BadInput(f'tolerances must be names and numbers like {{"memory_drift": 50}}, not {tolerances!r}')
    checked: dict[str, float] = {}
    for name, value in tolerances.items():
        names = [name]
        if allowed is not None and name not in allowed:
            names = [new for new in current_tolerances(name) if new in allowed]
            if not names:
                raise BadInput(f"unknown tolerance {name!r}; {hint(name, allowed)}")
            warnings.warn(f"tolerance {name} is now called {' and '.join(names)}", Renamed, stacklevel=3)
        if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
            raise BadInput(f"tolerance {name!r} is {value!r}; it must be a number")
        checked |= dict.fromkeys(names, float(value))
    return checked


def load_tolerances(path: Path) -> dict[str, float]:
    data = read_json(path)
    if not isinstance(data, dict):
        raise BadInput(f'{path} has no tolerances; it must be one JSON object like {{"memory_drift": 50}}')
    texts = {name: WORDS.get(value, value) for name, value in data.items() if isinstance(value, str)}
    return checked_tolerances({**data, **texts})


def save_tolerances(path: Path, tolerances: Mapping[str, float]) -> None:
    """The file that `load_tolerances` and `kit run --tolerances` take."""
    write_json(output_file(path), checked_tolerances(tolerances))
