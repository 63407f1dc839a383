"""A ledger: the rows of a run in order, each with its position and the seconds since the first; and ledgers among a run's records.

Any system may have written one. What is special to a kind of ledger (a loop's samples and steps, a desk's books) is an index over it in
its own room.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kit.errors import BadInput
from kit.results.frames import event_rows
from kit.results.records import NOTEBOOK, Row, Unjudged
from kit.results.rules import Missing

if TYPE_CHECKING:
    import pandas as pd

Read = TypeVar("Read")


class Ledger:
    """`rows` are rows, or mappings with `event`, `time` and ids. An id in `drop` is left out: all rows share it."""

    def __init__(self, rows: Iterable[Row | Mapping[str, Any]], *, drop: str = "") -> None:
        self.index(list(numbered_rows(rows, drop)))

    def index(self, rows: list[Row]) -> None:
        self.rows = rows
        self.by_event: defaultdict[str, list[Row]] = defaultdict(list)
        for row in rows:
            self.by_event[row.event].append(row)

    def of(self, *events: str) -> list[Row]:
        if len(events) == 1:
            return [*self.by_event[events[0]]]
        return [row for row in self.rows if row.event in events]

    def need(self, event: str, *ids: str) -> list[Row]:
        """Return the rows of an event. Raises `Missing` if the event or an id is absent, `Unjudged` if only some rows have an id."""
        rows = self.by_event.get(event, [])
        if not rows:
            raise Missing(f"the ledger has no `{event}` event")
        for name in ids:
            lack = [row for row in rows if name not in row.ids]
            if len(lack) == len(rows):
                raise Missing(f"no `{event}` event of the ledger has the id `{name}`")
            if lack:
                raise Unjudged(
                    f"{lack[0]} has no id `{name}`; {len(rows) - len(lack)} of {len(rows)} `{event}` events have it"
                )
        return rows


def numbered_rows(rows: Iterable[Row | Mapping[str, Any]], drop: str) -> Iterator[Row]:
    began: float | None = None
    for at, row_given in enumerate(rows):
        row = row_given if isinstance(row_given, Row) else ledger_row(at, row_given)
        began = row.time if began is None else began
        since = row.time - began
        if drop in row.ids:
            ids = {name: value for name, value in row.ids.items() if name != drop}
            yield replace(row, at=at, since=since, ids=ids)
        elif row.at == at and row.since == since:
            yield row
        else:
            yield replace(row, at=at, since=since)


def ledger_row(at: int, given: Mapping[str, Any]) -> Row:
    try:
        name, when = str(given["event"]), float(given["time"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(
            f"row {at} of the ledger is {dict(given)!r}; it needs an `event` and a `time` in seconds"
        ) from error
    ids = {name: value for name, value in given.items() if name not in ("event", "time")}
    return Row(metric=name, time=when, ids=ids)


# -- ledgers among a run's records, for labs that drive cores ------------------------------------------------------------


class PerFrame(Generic[Read]):
    """A cache of the last frame's ledgers by phase, because every check reads the same ones."""

    def __init__(self, read: Callable[[pd.DataFrame, str], Read]) -> None:
        self.read = read
        self.frame: Callable[[], pd.DataFrame | None] = lambda: None
        self.by_phase: dict[str, Read] = {}

    def of(self, frame: pd.DataFrame, phase: str) -> Read:
        if self.frame() is not frame:
            self.frame, self.by_phase = weakref.ref(frame), {}
        if phase not in self.by_phase:
            self.by_phase[phase] = self.read(frame, phase)
        return self.by_phase[phase]


def events(frame: pd.DataFrame, phase: str, *, lab: str, main: str) -> pd.DataFrame:
    """The events of a lab's cores and ports in a phase, in order. In a run of another lab, all events count as the phase `main`."""
    rows = event_rows(frame)
    if (frame["lab"] == lab).any():
        return rows[(rows["phase"] == phase) & (rows["rank"] == NOTEBOOK)]
    return rows[rows["rank"] >= 0 if phase == main else rows["rank"] < NOTEBOOK].sort_values("time", kind="stable")


def is_note(row: Row) -> bool:
    """Whether a core wrote this row about itself: neither an event that it received nor a command."""
    return not {"core", "to"} & row.ids.keys()


def by_cores(rows: Iterable[Row]) -> bool:
    """Whether the kit's cores wrote the rows. Another system may say just which core `begins`."""
    return any("core" in row.ids and row.event != "begins" for row in rows)
