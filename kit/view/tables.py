"""Tables as a notebook shows them once `%load_ext kit` has run: failures in colour and in words, text left, numbers right.

Colours are JupyterLab's own, so that light and dark themes both fit; another page gets the ones behind the comma.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

MARKS = {
    False: ("✗ FAIL", "var(--jp-error-color1, #b33a00)"),
    None: ("- not measured", "inherit"),
    True: ("✓ pass", "var(--jp-success-color1, #00704f)"),
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = (), caption: str = "") -> str:
    """An HTML table. Cells must be escaped already; `right` numbers the columns that are aligned so."""
    sides = ["right" if index in right else "left" for index in range(len(head))]

    def line(tag: str, cells: Sequence[str]) -> str:
        return "".join(
            f'<{tag} style="text-align:{side}">{cell}</{tag}>' for side, cell in zip(sides, cells, strict=True)
        )

    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    above = f'<caption style="text-align:left">{caption}</caption>' if caption else ""
    return f"<table>{above}<thead><tr>{line('th', head)}</tr></thead><tbody>{body}</tbody></table>"


def verdict_html(verdict: Any) -> str:
    """A row per check, the failed ones first."""
    worst_first = sorted(verdict, key=lambda row: list(MARKS).index(row.passed))
    counts = [sum(row.passed is passed for row in verdict) for passed in MARKS]
    rows = []
    for row in worst_first:
        word, colour = MARKS[row.passed]
        mark = f'<b style="color:{colour};white-space:nowrap">{word}</b>'
        unit = "" if row.unit == "1" else f" {html.escape(row.unit)}"
        measured = "" if row.measured is None else f"{row.measured:.6g}{unit}"
        rows.append([mark, html.escape(row.check), measured, f"{row.limit:.6g}{unit}", html.escape(row.why)])
    caption = "{} failed, {} not measured, {} passed".format(*counts)
    return table(("", "check", "measured", "limit", "why"), rows, right=(2, 3), caption=caption)


def install(ipython: Any) -> None:
    """Have the shell show verdicts this way; they are registered by name, so that nothing is loaded for it."""
    formatter = ipython.display_formatter.formatters["text/html"]
    formatter.for_type_by_name("kit.results.verdict", "Verdict", verdict_html)
