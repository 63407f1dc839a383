"""The verdict: questions put to a run's records, each with a limit that a person may move.

Silence is not success. A check is null (`passed` None) only where the machine or the config cannot have an answer. What the code
under test or a fault kept from being judged fails, with `measured` None: a check raises `Unjudged` where it knows that, and the
judge decides it for missing records when it is given a `suspect`. A measured NaN fails: it satisfies no limit.
"""

from __future__ import annotations

import html
import math
import operator
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

from kit.errors import BadInput, KitError, hint
from kit.results.records import WORDS, make_folder, read_json, spelled, write_json
from kit.results.units import ROW, amount, columns, table_html, unit_word

if TYPE_CHECKING:
    import pandas as pd


class NotMeasured(KitError):  # noqa: N818 - a check raises it for `judge`; people do not see it as an error
    """The machine or the config cannot have what a check asks for: a null row, which never fails a run."""


class Missing(NotMeasured):
    """Records that a check needs are missing: a null row, or a failed one if the run has a suspect."""


class Unjudged(KitError):  # noqa: N818 - as above
    """The code under test kept a check from being judged: a failed row without a number."""


@dataclass(frozen=True, slots=True)
class Measured:
    value: float | None
    why: str = ""
    of: str = ""  # of several answers: what this one is about
    if_passed: str = ""  # added to `why` only where the row passes: why a value that is not perfect is good enough
    lacking: str = ""  # records that are not there: what is there can fail the row, and cannot pass it
    suspect: str = ""  # what may have kept them away
    failed: bool = False  # without a number, and failed all the same


@dataclass(frozen=True, slots=True)
class Check:
    """A question with a limit. `tolerance` is the keyword that moves the limit; checks may share one.

    A limit that depends on the run (a coarser dtype) is a function of its config. A measure with several answers gives one row
    each, named `check/of`, below a row of the check itself that shows the worst. A check with `when` applies only to runs with a
    config that function accepts. `cannot` returns why a config cannot have an answer, or an empty text: the row is then null, and
    a fault that this check should catch is refused before any rank starts.
    """

    name: str
    question: str
    tolerance: str
    limit: float | Callable[[Mapping[str, Any]], float]
    unit: str
    better: Literal["<=", ">=", "=="]
    measure: Callable[[pd.DataFrame, Mapping[str, Any]], Measured | Sequence[Measured]]
    when: Callable[[Mapping[str, Any]], bool] | None = None
    cannot: Callable[[Mapping[str, Any]], str] | None = None

    def unanswerable(self, config: Mapping[str, Any]) -> str:
        """Why this config cannot have an answer; empty where it can."""
        if not self.asked(config):
            return "this config does not ask it"
        return self.cannot(_Config(config)) if self.cannot else ""

    def asked(self, config: Mapping[str, Any]) -> bool:
        """A config without what `when` looks at (another lab's, or an older kit's) does not ask the check."""
        try:
            return self.when is None or self.when(_Config(config))
        except NotMeasured:
            return False

    def limit_for(self, config: Mapping[str, Any]) -> float:
        return float(self.limit(_Config(config)) if callable(self.limit) else self.limit)

    def holds(self, measured: float, limit: float) -> bool:
        compare = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}[self.better]
        return bool(compare(measured, limit))


Answer = tuple[Check, Measured | Sequence[Measured]]  # a check, and what it found in the records of one run


def judge(
    frame: pd.DataFrame,
    config: Mapping[str, Any],
    checks: Sequence[Check],
    tolerances: Mapping[str, float] | None = None,
    *,
    suspect: str = "",
) -> Verdict:
    """Judge the records with every check; `tolerances` moves limits by their keyword.

    `suspect` is what may have kept records of a complete run away ("fault 'x' is on"): a check that lacks records then fails.
    """
    moved = checked_tolerances(tolerances or {}, allowed=[check.tolerance for check in checks])
    return hold(measure(frame, config, checks, suspect), config, moved)


def measure(
    frame: pd.DataFrame, config: Mapping[str, Any], checks: Sequence[Check], suspect: str = "", *, whole: bool = True
) -> list[Answer]:
    """What each check found in the records. Limits play no part, so that they may move without measuring again.

    `whole`: the run came to its end. On the records of one that broke a check may raise anything, and is null then.
    """
    return [(check, _ask(check, frame, config, suspect, whole=whole)) for check in checks]


def asked(checks: Sequence[Check], config: Mapping[str, Any]) -> list[Check]:
    return [check for check in checks if check.asked(config)]


def suspect_in(config: Mapping[str, Any], fault: str | None) -> str:
    """What in a run could keep records from a check: a fault, or code from outside the kit; empty where there is neither."""
    own = [f"{name}={value}" for name, value in config.items() if isinstance(value, str) and _OWN_CODE.fullmatch(value)]
    return " and ".join([*([f"fault {fault!r}"] if fault else []), *own])


def hold(answers: Sequence[Answer], config: Mapping[str, Any], moved: Mapping[str, float]) -> Verdict:
    """Compare what was found with the limits; `moved` has the limits that a person moved, by keyword."""
    rows: list[VerdictRow] = []
    for check, measured in answers:
        try:
            limit = moved[check.tolerance] if check.tolerance in moved else check.limit_for(config)
        except NotMeasured as missing:  # a config of an older kit: neither the limit nor the answer is to be had
            limit, measured = math.nan, Measured(None, str(missing))  # noqa: PLW2901
        if isinstance(measured, Measured):
            rows.append(_row(check, measured, limit))
        else:
            parts = [_row(check, one, limit) for one in measured]
            rows += [_worst_of(check, parts, limit), *parts]
    return Verdict(rows)


def select(frame: pd.DataFrame, **wanted: object) -> pd.DataFrame:
    """The rows that have what is wanted, e.g. `select(frame, phase="reload", metric="rss")`; none: `Missing`.

    Mind that pandas' own max, median and the like pass over NaN: a check of numbers that may be NaN must look for it.
    """
    for column, value in wanted.items():
        frame = frame[frame[column] == value]
    if frame.empty:
        raise Missing("no records with " + ", ".join(f"{column} {value!r}" for column, value in wanted.items()))
    return frame


def incomplete(what: str) -> None:
    """Called by a check that lacks records and continues with the others: these can fail it, and cannot pass it."""
    _LACKS.get().append(what)


_LACKS: ContextVar[list[str]] = ContextVar("lacks")  # of the check that is being asked


def _ask(
    check: Check, frame: pd.DataFrame, config: Mapping[str, Any], suspect: str, *, whole: bool
) -> Measured | Sequence[Measured]:
    lacks: list[str] = []
    _LACKS.set(lacks)
    found: Measured | Sequence[Measured]
    try:
        if reason := check.unanswerable(config):
            return Measured(None, reason)
        found = check.measure(frame, _Config(config)) or _lacking("there was nothing to ask about", suspect)
    except Missing as missing:
        found = _lacking(str(missing), suspect)
    except NotMeasured as missing:
        found = Measured(None, str(missing))
    except Unjudged as kept:
        found = Measured(None, str(kept), failed=True)
    except Exception as error:  # noqa: BLE001 - checks may be anybody's, records too, and one must not hide the answers of the others
        raised = f"{type(error).__name__}: {error}"
        if whole and not lacks:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"at {last.filename.rpartition('/')[2]}:{last.lineno}"
            return Measured(None, f"the check raised {raised} {where}", failed=True)
        found = Measured(None, f"the records of this run lack what the check needs ({raised})")
    if not lacks:
        return found
    why = "; ".join(dict.fromkeys(lacks))
    if isinstance(found, Measured):
        return replace(found, lacking=why, suspect=suspect)
    return [replace(one, lacking=why, suspect=suspect) for one in found]


def _lacking(what: str, suspect: str) -> Measured:
    return Measured(None, f"{what}; {suspect} may have kept them away" if suspect else what, failed=bool(suspect))


def _worst_of(check: Check, rows: Sequence[VerdictRow], limit: float) -> VerdictRow:
    """The summary of one check's rows: failed if one failed, else not measured if one was not measured."""
    failed = sum(row.passed is False for row in rows)
    passed = False if failed else None if any(row.passed is None for row in rows) else True
    farthest = min if check.better == ">=" else max
    alike = [row for row in rows if row.passed is passed]
    worst = farthest(alike, key=lambda row: 0.0 if row.measured is None else row.measured)
    count = f"{failed} of {len(rows)} fail" if failed else f"{len(rows)} compared"
    return VerdictRow(check.name, worst.measured, limit, check.unit, passed, f"{count}; worst: {worst.why}")


def _row(check: Check, measured: Measured, limit: float) -> VerdictRow:
    passed: bool | None
    if measured.lacking and not measured.failed:
        there = math.nan if measured.value is None else float(measured.value)
        if math.isnan(there):
            measured = _lacking(measured.lacking, measured.suspect)
        elif check.holds(there, limit):
            measured = _lacking(f"{measured.lacking}; those that are there hold ({number(there)})", measured.suspect)
    if measured.failed:
        value, passed, why = None, False, f"could not be judged: {measured.why}"
    elif measured.value is None:
        value, passed, why = None, None, f"not measured: {measured.why or 'no records for it'}"
    else:
        value = float(measured.value)
        passed = check.holds(value, limit)
        why = measured.why or ("measured NaN, which never satisfies a limit" if math.isnan(value) else "")
        if passed and measured.if_passed:
            why = f"{why}; {measured.if_passed}" if why else measured.if_passed
    name = f"{check.name}/{measured.of}" if measured.of else check.name
    return VerdictRow(name, value, limit, check.unit, passed, why)


_OWN_CODE = re.compile(r"(?!kit[.:])[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")  # module:attr from outside the kit


class _Config(dict[str, Any]):
    """A run's config. Where it lacks what a check asks for (an older kit wrote it), that check is not measured."""

    def __missing__(self, key: str) -> NoReturn:
        raise NotMeasured(f"the run's config has no {key!r}")


# -- the rows, and how they are marked everywhere: a sign, a word and a colour ---------------------------------------------------

GOOD, BAD, FAINT = "#00704f", "#b33a00", "#57606a"  # on a light page


class Mark(NamedTuple):
    sign: str
    word: str
    kind: str  # bad, open, good
    css: str  # JupyterLab's own colour, so that its light and dark themes both fit; another page gets the one after the comma

    def __str__(self) -> str:
        return f"{self.sign} {self.word}"


# By `passed`, worst first.
MARKS: dict[bool | None, Mark] = {
    False: Mark("✗", "FAIL", "bad", f"var(--jp-error-color1, {BAD})"),
    None: Mark("-", "not measured", "open", f"var(--jp-ui-font-color2, {FAINT})"),
    True: Mark("✓", "pass", "good", f"var(--jp-success-color1, {GOOD})"),
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


def folded(rows: Iterable[VerdictRow]) -> list[list[VerdictRow]]:
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
        names = ", ".join(one.check for one in rows)
        return f"{len(rows)} checks", "-", "", f"{row.why} ({names})"
    measured, limit = amount(row.measured, row.unit), amount(row.limit, row.unit)
    if measured == limit and row.measured != row.limit:  # what lies just beside its limit needs more digits
        measured = f"{row.measured!r} {unit_word(row.unit)}".rstrip()
    return row.check, measured, limit, row.why


def tally(rows: Sequence[VerdictRow]) -> str:
    failed, unmeasured, passed = (sum(row.passed is answer for row in rows) for answer in MARKS)
    return f"{failed} failed, {passed} passed, {unmeasured} not measured" if rows else "no checks"


def headline(rows: Iterable[VerdictRow]) -> str:
    """The verdict as a sentence: "2 of 9 checks fail: fds_return, threads_return"."""
    heads = without_parts(rows)
    failed = [row.check for row in heads if row.passed is False]
    asked = sum(row.passed is not None for row in heads)
    if not asked:
        return "nothing is judged yet"
    if failed:
        more = f" and {len(failed) - HEADS} more" if len(failed) > HEADS else ""
        return f"{len(failed)} of {asked} checks {'fails' if len(failed) == 1 else 'fail'}: {', '.join(failed[:HEADS])}{more}"
    left = f"; {len(heads) - asked} could not be measured" if len(heads) > asked else ""
    return f"{f'all {asked} checks pass' if asked > 1 else 'the one check passes'}{left}"


def without_parts(rows: Iterable[VerdictRow]) -> list[VerdictRow]:
    """One row per check: the rows `check/part` have the details."""
    return [row for row in rows if "/" not in row.check]


class Verdict(tuple[VerdictRow, ...]):
    """The rows in the order of the lab's checks; shown worst first."""

    __slots__ = ()

    @property
    def passed(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> tuple[VerdictRow, ...]:
        return tuple(row for row in self if row.passed is False)

    def to_json(self) -> list[dict[str, Any]]:
        return [spelled(asdict(row)) for row in self]

    def write(self, path: Path) -> None:
        write_json(path, self.to_json())

    def frame(self) -> pd.DataFrame:
        import pandas as pd

        rows = [asdict(row) for row in worst_first(self)]
        return pd.DataFrame(rows, columns=[field.name for field in fields(VerdictRow)]).astype({"measured": "float64"})

    def save(self, path: str | Path) -> Path:
        from kit.results.frames import export

        return export(self.frame(), {}, path, units=UNITS, title=self.summary())

    def __repr__(self) -> str:
        words = {answer: "-" if answer is None else mark.word for answer, mark in MARKS.items()}
        table = [_HEAD, *((words[group[0].passed], *cells(group)) for group in folded(self))]
        return "\n".join([self.summary(), *([columns(table, right=(2, 3))] if self else [])])

    def _repr_html_(self) -> str:
        rows = []
        for group in folded(self):
            mark = MARKS[group[0].passed]
            rows.append([f'<b style="color:{mark.css};white-space:nowrap">{mark}</b>', *map(html.escape, cells(group))])
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
    return f"{MARKS[row.passed].word}{measured}, limit {row.limit!r} {row.unit}".rstrip()


def number(value: float) -> str:
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


def exit_code(verdict: Verdict) -> int:
    return 0 if verdict.passed else 1


# -- tolerances: the limits that a person moves ----------------------------------------------------------------------------


def checked_tolerances(tolerances: Mapping[str, Any], allowed: Sequence[str] | None = None) -> dict[str, float]:
    """The tolerances as floats; an unknown name or a value that is not a number is a `BadInput`."""
    if not isinstance(tolerances, Mapping):
        raise BadInput(f'tolerances must be names and numbers like {{"drift_mib": 50}}, not {tolerances!r}')
    for name, value in tolerances.items():
        if allowed is not None and name not in allowed:
            raise BadInput(f"unknown tolerance {name!r}; {hint(name, allowed)}")
        if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
            raise BadInput(f"tolerance {name!r} is {value!r}; it must be a number")
    return {name: float(value) for name, value in tolerances.items()}


def load_tolerances(path: Path) -> dict[str, float]:
    data = read_json(path)
    if not isinstance(data, dict):
        raise BadInput(f'{path} holds no tolerance set; it must be one JSON object like {{"drift_mib": 50}}')
    texts = {name: WORDS.get(value, value) for name, value in data.items() if isinstance(value, str)}
    return checked_tolerances({**data, **texts})


def save_tolerances(path: Path, tolerances: Mapping[str, float]) -> None:
    """The file that `load_tolerances` and `kit run --tolerances` take."""
    make_folder(path.parent)
    write_json(path, checked_tolerances(tolerances))
