"""A verdict: its rows, how they are marked everywhere (a sign, a word and a colour), and how they are shown and kept."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from kit.errors import BadInput
from kit.results.files import read_json, spelled, write_json
from kit.results.units import ROW, amount, unit_word

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

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


def tally(rows: Sequence[VerdictRow]) -> str:
    """1 failed, 30 passed, 2 not measured."""
    failed, unmeasured, passed = (sum(row.passed is answer for row in rows) for answer in MARKS)
    return f"{failed} failed, {passed} passed, {unmeasured} not measured" if rows else "no checks"


def without_parts(rows: Iterable[VerdictRow]) -> list[VerdictRow]:
    """One row per check: the rows `check/part` say what it is about in detail."""
    return [row for row in rows if "/" not in row.check]


class Verdict(tuple[VerdictRow, ...]):
    """The rows in the order of the lab's checks; shown worst first."""

    __slots__ = ()

    @property
    def passed(self) -> bool:
        """No check failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[VerdictRow, ...]:
        return tuple(row for row in self if row.passed is False)

    def to_json(self) -> list[dict[str, Any]]:
        return [spelled(asdict(row)) for row in self]

    def write(self, path: Path) -> None:
        write_json(path, self.to_json())

    def frame(self) -> pd.DataFrame:
        """The rows as a table, worst first."""
        import pandas as pd

        rows = [asdict(row) for row in worst_first(self)]
        return pd.DataFrame(rows, columns=[field.name for field in fields(VerdictRow)]).astype({"measured": "float64"})

    def save(self, path: str | Path) -> Path:
        """Write the rows to .csv, .parquet, .md, .tex, .html or .json."""
        from kit.results.exports import export

        return export(self.frame(), {}, path, units=UNITS, title=self.summary())

    def __repr__(self) -> str:
        table = [_HEAD, *map(_cells, worst_first(self))]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if 2 <= index <= 3 else cell.ljust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in table
        ]
        return "\n".join([self.summary(), *(lines if self else [])])

    def _repr_html_(self) -> str:
        rows = [[_marked(row), *map(html.escape, _amounts(row))] for row in worst_first(self)]
        return table_html(("", "check", "measured", "limit", "why"), rows, right=(2, 3), caption=self.summary())

    def changes(self, before: Verdict) -> list[str]:
        """What differs from an earlier verdict of the same records, a sentence for each check."""
        rows = {row.check: row for row in before}
        found = []
        for row in self:
            old = rows.pop(row.check, None)
            if old is None:
                found.append(f"{row.check}: {_in_short(row)}; the stored verdict does not have this check")
            elif _in_short(old) != _in_short(row):
                found.append(f"{row.check}: {_in_short(row)}; stored: {_in_short(old)}")
        return [*found, *(f"{name}: not asked now; stored: {_in_short(old)}" for name, old in rows.items())]

    def summary(self) -> str:
        """How many failed, passed and were not measured."""
        return tally(self)


UNITS = {"measured": ROW, "limit": ROW}  # of the columns of a verdict's table
_HEAD = ("", "check", "measured", "limit", "unit", "why")


def _cells(row: VerdictRow) -> tuple[str, ...]:
    mark = "-" if row.passed is None else MARKS[row.passed].word
    measured = "-" if row.measured is None else number(row.measured)
    return mark, row.check, measured, number(row.limit), unit_word(row.unit), row.why.replace("\n", " ")


def _marked(row: VerdictRow) -> str:
    mark = MARKS[row.passed]
    return f'<b style="color:{mark.css};white-space:nowrap">{mark}</b>'


def _amounts(row: VerdictRow) -> tuple[str, ...]:
    measured = "" if row.measured is None else amount(row.measured, row.unit)
    return row.check, measured, amount(row.limit, row.unit), row.why


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
    """0 where no check failed, 1 where one did."""
    return 0 if verdict.passed else 1


def table_html(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = (), caption: str = ""
) -> str:
    """An HTML table. Cells must be escaped already; `right` numbers the right-aligned columns."""
    sides = ["right" if index in right else "left" for index in range(len(head))]

    def line(tag: str, cells: Sequence[str]) -> str:
        return "".join(
            f'<{tag} style="text-align:{side}">{cell}</{tag}>' for side, cell in zip(sides, cells, strict=True)
        )

    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    above = f'<caption style="text-align:left">{caption}</caption>' if caption else ""
    return f"<table>{above}<thead><tr>{line('th', head)}</tr></thead><tbody>{body}</tbody></table>"
