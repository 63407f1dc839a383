"""Rules: questions put to a run's rows, each with a limit that a person may move.

A rule has one name: that of its check in the verdict, of its tolerance and, where it has one, of its function.

Silence is not success. A rule is null (`passed` None) only where the machine or the config cannot have an answer. What the code
under test or a fault kept from being judged fails, with `measured` None: a rule raises `Unjudged` where it knows that, and the
judge decides it for missing rows when it is given a `suspect`. A measured NaN fails: it satisfies no limit.
"""

from __future__ import annotations

import math
import operator
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from kit.errors import KitError
from kit.results.records import Unjudged
from kit.results.verdict import Verdict, VerdictRow, checked_tolerances, number_text
from kit.target import from_outside

if TYPE_CHECKING:
    import pandas as pd


class NotMeasured(KitError):  # noqa: N818 - a check raises it for `judge`; people do not see it as an error
    """The machine or the config cannot have what a check asks for: a null row, which never fails a run."""

    cycles = 0  # how many cycles an answer needs, where too few are the reason


class Missing(NotMeasured):
    """Records that a check needs are missing: a null row, or a failed one if the run has a suspect."""


class TooFewCycles(NotMeasured):
    def __init__(self, needed: int) -> None:
        super().__init__(f"needs at least {needed} cycles")
        self.cycles = needed


@dataclass(frozen=True, slots=True)
class Measured:
    value: float | None
    why: str = ""
    of: str = ""  # of several answers: what this one is about
    if_passed: str = ""  # added to `why` only where the row passes: why a value that is not perfect is good enough
    lacking: str = ""  # records that are not there: what is there can fail the row, and cannot pass it
    suspect: str = ""  # what may have kept them away
    failed: bool = False  # without a number, and failed all the same
    cycles: int = 0  # without a number, because an answer needs this many cycles
    # By the noise that the run itself measured, in place of the rule's; a person may still move it.
    limit: float | None = None
    # Why that limit says nothing: a value within it is not measured, unless a person moved the limit.
    hidden: str = ""


Finding = Measured | Sequence[Measured]
# Yields a sentence for each violation, and returns one that sums up what was looked at.
Violations = Generator[str, None, str]
Measure = Callable[["pd.DataFrame", Mapping[str, Any]], Finding | Violations]


@dataclass(frozen=True, slots=True)
class Rule:
    """A question with a limit: `measure` gives a number, which passes at or below the limit unless `better` says otherwise.

    A `measure` that yields counts violations. One with several answers gives one row each, named `rule/of`, below a row of the rule
    itself that shows the worst. A limit that depends on the config is a function of it; one that depends on noise which the run measured
    comes with the answer (`Measured.limit`).
    A rule with `when` is asked only of runs with a config that function accepts. `cannot` returns why a config cannot have an answer,
    or an empty text, and `cycles` is how many cycles an answer needs, in a lab that has cycles. Without an answer the row is null, and a
    fault that this rule should catch is refused before any rank starts.
    """

    name: str
    question: str
    measure: Measure
    _: KW_ONLY
    limit: float | Callable[[Mapping[str, Any]], float] = 0.0
    unit: str = "1"
    better: Literal["<=", ">=", "=="] = "<="
    when: Callable[[Mapping[str, Any]], bool] | None = None
    cannot: Callable[[Mapping[str, Any]], str] | None = None
    cycles: int = 0

    def unanswerable(self, config: Mapping[str, Any]) -> NotMeasured | None:
        """Why this config cannot have an answer; None where it can."""
        if not self.asked(config):
            return NotMeasured("this config does not ask it")
        if config.get("cycles", self.cycles) < self.cycles:
            return TooFewCycles(self.cycles)
        why = self.cannot(_Config(config)) if self.cannot else ""
        return NotMeasured(why) if why else None

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


def rule(measure: Callable[..., Any], **more: Any) -> Rule:
    """The rule of a function: its name, and as the question the first line of its docstring."""
    return Rule(measure.__name__, (measure.__doc__ or "").partition("\n")[0], measure, **more)


@overload
def settle(found: Measured | Violations) -> Measured: ...
@overload
def settle(found: Finding | Violations) -> Finding: ...
def settle(found: Finding | Violations) -> Finding:
    """The number of violations and the first of them; without any, the summary. A rule that stops at its first violation says so."""
    if not isinstance(found, Generator):
        return found
    violations: list[str] = []
    stopped = ""
    while True:
        try:
            violations.append(next(found))
        except StopIteration as end:
            if not violations:
                return Measured(0.0, str(end.value))
            break
        except Exception as error:
            if not violations:
                raise
            stopped = f"; the rule went no further: {error or type(error).__name__}"
            break
    omitted = f"; {len(violations) - 1} more" if len(violations) > 1 else ""
    return Measured(float(len(violations)), violations[0] + omitted + stopped)


Answer = tuple[Rule, Finding]  # a rule, and what it found in the rows of one run


def judge(
    frame: pd.DataFrame,
    config: Mapping[str, Any],
    rules: Sequence[Rule],
    tolerances: Mapping[str, float] | None = None,
    *,
    suspect: str = "",
) -> Verdict:
    """Judge the records with every check; `tolerances` moves limits by their keyword.

    `suspect` is what may have kept records of a complete run away ("fault 'x' is on"): a check that lacks records then fails.
    """
    moved = checked_tolerances(tolerances or {}, allowed=[rule.name for rule in rules])
    return hold_limits(measure_checks(frame, config, rules, suspect), config, moved)


def measure_checks(
    frame: pd.DataFrame, config: Mapping[str, Any], rules: Sequence[Rule], suspect: str = "", *, whole: bool = True
) -> list[Answer]:
    """What each check found in the records. Limits play no part, so that they may move without measuring again.

    `whole`: the run came to its end. On the records of one that broke a check may raise anything, and is null then.
    """
    return [(rule, _ask(rule, frame, config, suspect, whole=whole)) for rule in rules]


def applicable(rules: Sequence[Rule], config: Mapping[str, Any]) -> list[Rule]:
    return [rule for rule in rules if rule.asked(config)]


def suspect_in(config: Mapping[str, Any], fault: str | None) -> str:
    """What in a run could keep records from a check: a fault, or code from outside the kit; empty where there is neither."""
    own = [f"{name}={value}" for name, value in config.items() if from_outside(value)]
    return " and ".join([*([f"fault {fault!r}"] if fault else []), *own])


def hold_limits(answers: Sequence[Answer], config: Mapping[str, Any], moved: Mapping[str, float]) -> Verdict:
    """Compare what was found with the limits; `moved` has the limits that a person moved, by keyword."""
    rows: list[VerdictRow] = []
    for rule, measured in answers:
        own = rule.name not in moved
        try:
            limit = rule.limit_for(config) if own else moved[rule.name]
        except NotMeasured as missing:  # a config of an older kit: neither the limit nor the answer is to be had
            limit, measured = math.nan, Measured(None, str(missing))  # noqa: PLW2901
        if isinstance(measured, Measured):
            rows.append(_row(rule, measured, limit, own=own))
        else:
            parts = [_row(rule, part, limit, own=own) for part in measured]
            rows += [_worst_of(rule, parts), *parts]
    return Verdict(rows)


def select(frame: pd.DataFrame, **wanted: object) -> pd.DataFrame:
    """The rows that have what is wanted, e.g. `select(frame, phase="reload", metric="rss")`; none: `Missing`.

    Mind that pandas' own max, median and the like pass over NaN: a check of numbers that may be NaN must look for it.
    """
    import numpy as np

    has_all = np.ones(len(frame), dtype=bool)
    for column, value in wanted.items():
        has_all &= (frame[column] == value).to_numpy(dtype=bool)
    rows = frame[has_all]  # cut once: each cut copies every column
    if rows.empty and "phase" in wanted and not (frame["phase"] == wanted["phase"]).any():
        # One reason for all checks of a phase that never ended, so that they share a line.
        raise Missing(f"nothing was recorded in phase {wanted['phase']!r}")
    if rows.empty:
        raise Missing("no records with " + ", ".join(f"{column} {value!r}" for column, value in wanted.items()))
    return rows


def null(why: NotMeasured, of: str = "") -> Measured:
    return Measured(None, str(why), of, cycles=why.cycles)


def incomplete(what: str) -> None:
    """Called by a check that lacks records and continues with the others: these can fail it, and cannot pass it."""
    _LACKS.get().append(what)


# A context variable and not an argument, so that a measure that calls another one need not hand it on.
_LACKS: ContextVar[list[str]] = ContextVar("lacks")  # of the check that is being asked


def _ask(rule: Rule, frame: pd.DataFrame, config: Mapping[str, Any], suspect: str, *, whole: bool) -> Finding:
    lacks: list[str] = []
    _LACKS.set(lacks)
    finding: Finding
    try:
        if reason := rule.unanswerable(config):
            return null(reason)
        finding = settle(rule.measure(frame, _Config(config))) or _lacking("the check returned no measurement", suspect)
    except Missing as missing:
        finding = _lacking(str(missing), suspect)
    except NotMeasured as missing:
        finding = null(missing)
    except Unjudged as kept:
        finding = Measured(None, str(kept), failed=True)
    except Exception as error:  # noqa: BLE001 - checks may be anybody's, records too, and one must not hide the answers of the others
        raised = f"{type(error).__name__}: {error}"
        if whole and not lacks:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"at {last.filename.rpartition('/')[2]}:{last.lineno}"
            return Measured(None, f"the check raised {raised} {where}", failed=True)
        finding = Measured(None, f"the records of this run lack what the check needs ({raised})")
    if not lacks:
        return finding
    why = "; ".join(dict.fromkeys(lacks))
    if isinstance(finding, Measured):
        return replace(finding, lacking=why, suspect=suspect)
    return [replace(part, lacking=why, suspect=suspect) for part in finding]


def _lacking(what: str, suspect: str) -> Measured:
    return Measured(None, f"{what}; {suspect} may have kept them away" if suspect else what, failed=bool(suspect))


def _worst_of(rule: Rule, rows: Sequence[VerdictRow]) -> VerdictRow:
    """The summary of one check's rows: failed if one failed, else not measured if one was not measured."""
    failed = sum(row.passed is False for row in rows)
    passed = False if failed else None if any(row.passed is None for row in rows) else True
    farthest = min if rule.better == ">=" else max
    alike = [row for row in rows if row.passed is passed]
    worst = farthest(alike, key=lambda row: 0.0 if row.measured is None else row.measured)
    count = f"{failed} of {len(rows)} fail" if failed else f"{len(rows)} compared"
    return VerdictRow(rule.name, worst.measured, worst.limit, rule.unit, passed, f"{count}; worst: {worst.why}")


def _row(rule: Rule, measured: Measured, limit: float, *, own: bool) -> VerdictRow:
    """`own`: no person moved the limit."""
    passed: bool | None
    if own and (by_noise := measured.limit) is not None:
        if measured.hidden and measured.value is not None and rule.holds(float(measured.value), by_noise):
            measured = replace(measured, value=None, why=measured.hidden)
        else:
            limit = by_noise
    if measured.lacking and not measured.failed:
        there = math.nan if measured.value is None else float(measured.value)
        if math.isnan(there):
            measured = _lacking(measured.lacking, measured.suspect)
        elif rule.holds(there, limit):
            measured = _lacking(
                f"{measured.lacking}; those that are there hold ({number_text(there)})", measured.suspect
            )
    if measured.failed:
        value, passed, why = None, False, f"could not be judged: {measured.why}"
    elif measured.value is None:
        value, passed, why = None, None, f"not measured: {measured.why or 'no records for it'}"
    else:
        value = float(measured.value)
        passed = rule.holds(value, limit)
        why = measured.why or ("measured NaN, which never satisfies a limit" if math.isnan(value) else "")
        if passed and measured.if_passed:
            why = f"{why}; {measured.if_passed}" if why else measured.if_passed
    name = f"{rule.name}/{measured.of}" if measured.of else rule.name
    return VerdictRow(name, value, limit, rule.unit, passed, why)


class _Config(dict[str, Any]):
    """A run's config. Where it lacks what a check asks for (an older kit wrote it), that check is not measured."""

    def __missing__(self, key: str) -> NoReturn:
        raise NotMeasured(f"the run's config has no {key!r}")
