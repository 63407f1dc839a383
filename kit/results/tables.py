"""Tables for people: Markdown, LaTeX and HTML, escaped, with the provenance at the end."""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pandas as pd

_TEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{char: "\\" + char for char in "&%$#_"},
    **dict.fromkeys("\r\n", " "),
}


def markdown(frame: pd.DataFrame, provenance: str, title: str) -> str:  # noqa: ARG001 - the three writers are called alike
    """A pipe table; the provenance is an indented block, which nothing inside it can end."""
    rows = ["| " + " | ".join(row) + " |" for row in _rows(frame, _md_escape)]
    rule = "|" + "|".join(["---"] * len(frame.columns)) + "|"
    indented = [f"    {line}" for line in provenance.splitlines()]
    return "\n".join([rows[0], rule, *rows[1:], "", "Provenance:", "", *indented]) + "\n"


def tex(frame: pd.DataFrame, provenance: str, title: str) -> str:  # noqa: ARG001 - the three writers are called alike
    """A longtable to be \\input; needs the package of that name."""
    rows = [" & ".join(row) + r" \\" for row in _rows(frame, _tex_escape)]
    numbers = ["r" if frame[name].dtype.kind in "if" else "l" for name in frame.columns]
    body = [rf"\begin{{longtable}}{{{''.join(numbers)}}}", rows[0], r"\hline", r"\endhead", *rows[1:]]
    comments = [f"% {line}" for line in provenance.splitlines()]
    return "\n".join([*body, r"\end{longtable}", "% Provenance:", *comments]) + "\n"


def html_page(frame: pd.DataFrame, provenance: str, title: str) -> str:
    """A page that needs nothing else."""
    head, *body = _rows(frame, html.escape)
    names = "".join(f"<th>{cell}</th>" for cell in head)
    lines = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in body)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title></head><body>\n"
        f"<table>\n<thead><tr>{names}</tr></thead>\n<tbody>\n{lines}\n</tbody>\n</table>\n"
        f"<footer><h2>Provenance</h2><pre>{html.escape(provenance)}</pre></footer>\n</body></html>\n"
    )


def _rows(frame: pd.DataFrame, escape: Callable[[str], str]) -> Iterator[list[str]]:
    """The heading and the rows as escaped text; a missing value is an empty cell."""
    yield [escape(str(name)) for name in frame.columns]
    for row in frame.itertuples(index=False, name=None):
        yield ["" if item is None or item != item else escape(str(item)) for item in row]  # noqa: PLR0124 - NaN is the one value that differs from itself


def _md_escape(text: str) -> str:
    """No cell ends early, and none becomes markup."""
    return re.sub(r"([\\|`*_<>\[\]])", r"\\\1", text).replace("\r", " ").replace("\n", " ")


def _tex_escape(text: str) -> str:
    return "".join(_TEX.get(char, char) for char in text)
