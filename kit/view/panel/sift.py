"""The rows of a table that are asked for: filtered by words, sorted, a page at a time. No widget is needed.

Words stand apart and must all be found: `reload rank:0 value:>1e6 "two words"`. A bare word is looked for in every column,
`column:word` in one, `column:3`, `column:>3` and the like compare numbers.
"""

from __future__ import annotations

import functools
import operator
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

PAGE = 100
COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
}


@dataclass(frozen=True, slots=True)
class Query:
    """What is asked of a table. `page` counts from 0; without a column the rows stay in their order."""

    words: str = ""
    by: str = ""
    descending: bool = False
    page: int = 0


class Table:
    """A frame with its text, made once for each column: asking again is quick, for 100,000 rows too."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self.frame = frame.reset_index(drop=True)
        self.columns = [str(name) for name in frame.columns]
        self.frame.columns = self.columns
        self._text: dict[str, tuple[np.ndarray[Any, Any], list[str]]] = {}
        self._order: tuple[Query, np.ndarray[Any, Any]] | None = None

    def __len__(self) -> int:
        return len(self.frame)

    def numeric(self, column: str) -> bool:
        return self.frame[column].dtype.kind in "iuf"

    def rows(self, query: Query) -> np.ndarray[Any, Any]:
        """The places of all rows that are asked for, in the order that is asked for."""
        same = Query(query.words, query.by, query.descending)
        if self._order is None or self._order[0] != same:
            found = self.frame.loc[self._mask(query.words)]
            if query.by in self.columns:
                found = found.sort_values(query.by, ascending=not query.descending, kind="stable", na_position="last")
            self._order = same, found.index.to_numpy()
        return self._order[1]

    def page(self, query: Query) -> pd.DataFrame:
        """The rows of one page."""
        places = self.rows(query)
        return self.frame.loc[places[query.page * PAGE : (query.page + 1) * PAGE]]

    def pages(self, query: Query) -> int:
        return max(1, -(-len(self.rows(query)) // PAGE))

    def _mask(self, words: str) -> np.ndarray[Any, Any]:
        import numpy as np

        mask = np.ones(len(self.frame), dtype=bool)
        for word in terms(words):
            mask &= self._has(word)
        return mask

    def _has(self, word: str) -> np.ndarray[Any, Any]:
        import numpy as np

        name, colon, wanted = word.partition(":")
        column = next((known for known in self.columns if known.lower() == name.lower()), None)
        if colon and column is not None:
            return self._compared(column, wanted)
        return functools.reduce(np.logical_or, [self._contains(known, word) for known in self.columns])

    def _compared(self, column: str, wanted: str) -> np.ndarray[Any, Any]:
        parts = re.fullmatch(r"(>=|<=|>|<|=)?(.*)", wanted)
        assert parts is not None
        sign, text = parts[1], parts[2]
        if self.numeric(column) and (number := as_number(text)) is not None:
            found: np.ndarray[Any, Any] = COMPARED[sign or "="](self.frame[column], number).fillna(False).to_numpy(bool)
            return found
        if sign == "=":
            return self._texts(column, lambda one: one == text.lower())
        return self._contains(column, wanted)

    def _contains(self, column: str, word: str) -> np.ndarray[Any, Any]:
        small = word.lower()
        return self._texts(column, lambda one: small in one)

    def _texts(self, column: str, holds: Callable[[str], bool]) -> np.ndarray[Any, Any]:
        """Ask each different text of a column once."""
        import numpy as np
        import pandas as pd

        if column not in self._text:
            codes, values = pd.factorize(self.frame[column], use_na_sentinel=False)
            self._text[column] = codes, [cell(value).lower() for value in values.tolist()]
        codes, texts = self._text[column]
        yes = np.fromiter(map(holds, texts), dtype=bool, count=len(texts))
        return yes[codes] if len(texts) else np.zeros(len(codes), dtype=bool)


def terms(words: str) -> list[str]:
    try:
        return shlex.split(words)
    except ValueError:  # a quote that is not closed yet
        return words.replace('"', " ").replace("'", " ").split()


def as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def cell(value: Any) -> str:
    """A value as a table shows it; what is missing is empty."""
    if value is None or value != value or str(value) == "<NA>":  # noqa: PLR0124 - NaN differs from itself
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.6g}"
    return str(value)


def markdown(frame: pd.DataFrame) -> str:
    """Rows as a Markdown table of what is shown, numbers to the right."""

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(re.sub(r"([\\|`*_<>\[\]])", r"\\\1", one).replace("\n", " ") for one in cells) + " |"

    sides = ["---:" if frame[name].dtype.kind in "iuf" else "---" for name in frame.columns]
    rows = [line([cell(value) for value in row]) for row in frame.itertuples(index=False, name=None)]
    return "\n".join([line([str(name) for name in frame.columns]), f"|{'|'.join(sides)}|", *rows]) + "\n"
