"""What a rule of the judge is: a generator of violations, made into a check."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING

from kit.results.verdict import Measured, NotMeasured, Unjudged
from kit.stream.history import Id, Row

if TYPE_CHECKING:
    from typing import ParamSpec

    P = ParamSpec("P")

NO_AGE_LIMIT = ("ready-first", "capacity")  # samplers that bound admission only
REACTION = 0.005  # seconds that a controller may take to see that it can go on


Finding = Generator[str, None, str]  # yields violations, returns what was judged


def counted(rule: Callable[P, Finding]) -> Callable[P, Measured]:
    """A rule as a check. What keeps it from going on (`Missing`, `Unjudged`) counts only if it found no violation before."""

    @functools.wraps(rule)
    def check(*args: P.args, **kwargs: P.kwargs) -> Measured:
        found: list[str] = []
        finding = rule(*args, **kwargs)
        while True:
            try:
                found.append(next(finding))
            except StopIteration as end:
                if not found:
                    return Measured(0.0, str(end.value))
                break
            except (NotMeasured, Unjudged):
                if not found:
                    raise
                break
        return Measured(float(len(found)), found[0] + (f"; {len(found) - 1} more" if len(found) > 1 else ""))

    return check


def by(rows: Iterable[Row], name: str) -> dict[Id, list[Row]]:
    """Rows by an id; those without it are left out."""
    found: defaultdict[Id, list[Row]] = defaultdict(list)
    for row in rows:
        if name in row.ids:
            found[row[name]].append(row)
    return found


def many(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
