"""Rows, the samples that they are made of, and the table in which people read them."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kit.errors import KitError

KIT = "kit"
HEADS = ("what", "who", "median", "low", "high", "n", "unit", "at most", "aim", "ceiling", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One question and the spread of its answers: `low` and `high` are the least and the greatest of `n` samples.

    Less is better; `limit` is "at most", `aim` is what would be excellent, `ceiling` what the machine could do at best. Without samples
    `median` is None and `note` says why. `ids` say what the row is about (way, groups, ranks, ...) for programs, which do not read `what`.
    In one bench a row is known by `what` and `who`: a later one with the same replaces it."""

    what: str
    who: str = KIT
    unit: str = "s"
    median: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    limit: float | None = None
    aim: float | None = None
    ceiling: float | None = None
    note: str = ""
    ids: Mapping[str, str | int | float] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the median keeps the limit; None where there is nothing to say."""
        return None if self.median is None or self.limit is None else self.median <= self.limit

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


def row(what: str, samples: Sequence[float], **about: Any) -> Row:
    """A row from its samples, which are in the row's unit; without any it needs a note."""
    if not samples:
        return Row(what=what, **about)
    middle = statistics.median(samples)
    return Row(what=what, median=middle, low=min(samples), high=max(samples), n=len(samples), **about)


def unmeasured(what: str, why: KitError | str, **about: Any) -> Row:
    """A row without samples, with the reason in a line."""
    return Row(what=what, note=f"not measured: {first_line(why)}", **about)


def first_line(text: object) -> str:
    return str(text).partition("\n")[0]


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Turn by turn: what disturbs the machine disturbs both."""
    return [a / b for a, b in zip(above, below, strict=True)]


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def turn_by_turn(names: Sequence[str], rounds: int, timed: Callable[[str, int], float]) -> dict[str, list[float]]:
    """Seconds of each, one after another in every turn, in changing order and without garbage from before. The first turn, -1, is not
    counted: pages are supplied in it, and connections made."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.freeze()  # what is there already is not searched in every turn
    try:
        for turn in range(-1, rounds):
            for place in order(len(names), turn):
                gc.collect()
                taken = timed(names[place], turn)
                if turn >= 0:
                    seconds[names[place]].append(taken)
    finally:
        gc.unfreeze()
    return seconds


def order(count: int, turn: int) -> list[int]:
    """Who comes when: over `count` turns each stands in every place, and for even counts follows each other as often."""
    zigzag = [place // 2 + 1 if place % 2 else -(place // 2) for place in range(count)]
    return [(place + turn) % count for place in zigzag]


def progress(text: str) -> None:
    """What is being measured now; silent when nobody watches."""
    if sys.stderr.isatty():
        print(f"... {text}", file=sys.stderr)


# -- what people read ----------------------------------------------------------------------------------------------------


def seated(seat: Mapping[str, Any]) -> str:
    """Where ranks sat, in a line."""
    ranks = f"{seat['ranks']} rank{'s' * (seat['ranks'] > 1)}"
    return f"{ranks} on {', '.join(dict.fromkeys(seat['devices']))} ({seat['why']})"


def table(rows: Sequence[Row]) -> str:
    """Numbers to the right, words to the left; notes stand under the table."""
    notes = [f"{one.who}, {one.what}: {one.note}" for one in rows if one.note]
    told = columns([HEADS, *map(_cells, rows)], left={"what", "who", "unit", ""})
    return "\n".join([told, "", *notes] if notes else [told])


def columns(lines: Sequence[Sequence[str]], *, left: Collection[str] = ()) -> str:
    """A table of texts, the first line its heads; columns are pushed to the right but those whose head is in `left`."""
    from tabulate import tabulate  # here, since the ranks import benches too and need not have it

    sides = ["left" if head in left else "right" for head in lines[0]]
    told: str = tabulate(lines, tablefmt="plain", disable_numparse=True, colalign=sides)
    return told


def _cells(one: Row) -> list[str]:
    judged = {None: "", True: "met", False: "NOT MET"}[one.met]
    low, high, n = (number(one.low), number(one.high), str(one.n)) if one.n else ("", "", "")
    median = number(one.median) if one.n else "-"
    return [one.what, one.who, median, low, high, n, one.unit, *map(number, (one.limit, one.aim, one.ceiling)), judged]


def number(value: float | None) -> str:
    """Three significant digits."""
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
