"""The ledger: every event and command that passed a runner, with its time, in order. Written with the records' one writer.

A row is a name, a time in seconds and ids. An event's row has the id `core` (which core took it), a command's row the id `to` (its
address). A command to "ledger" is a note: it goes nowhere else, and its row has neither. Commands stand behind the event that they answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from kit.errors import BadInput
from kit.loop.messages import Command, Event
from kit.results.records import NOTEBOOK, Record, RecordWriter, note, parse, read_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from kit.loop.messages import Id

NOTES = "ledger"  # the address of commands that are rows and nothing else
BEGINS = "begins"  # the row before the commands with which a core begins
BATCH = 256  # rows that may wait to be written while the runner is busy


class Row(NamedTuple):
    name: str
    time: float
    ids: Mapping[str, Id]


class Ledger(Protocol):
    """Where a runner writes. `flush` comes before each wait and at the end."""

    def write(self, row: Row) -> None: ...
    def flush(self) -> None: ...


class Memory(list[Row]):
    """A ledger in memory."""

    def write(self, row: Row) -> None:
        self.append(row)

    def flush(self) -> None:
        pass


class File:
    """A ledger in a run's folder, as records without a value. What was flushed survives the death of this process."""

    def __init__(self, path: Path, *, run: str, lab: str, phase: str, cycle: int = 0) -> None:
        self._writer = RecordWriter(path)
        self._head = {"run": run, "lab": lab, "phase": phase, "cycle": cycle, "rank": NOTEBOOK}
        self._rows: list[Record] = []

    def write(self, row: Row) -> None:
        record = Record(**self._head, metric=row.name, value=None, unit="", time=row.time, ids=row.ids)  # type: ignore[arg-type]
        self._rows.append(record)
        if len(self._rows) >= BATCH:
            self.flush()

    def flush(self) -> None:
        rows, self._rows = self._rows, []
        self._writer.append(rows)

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._writer.close()


def event_row(event: Event, core: str, when: float) -> Row:
    return Row(event.name, when, {**dict(event.ids), "pipeline": event.pipeline, "core": core})


def command_row(command: Command, when: float) -> Row:
    if {"core", "to"} & dict(command.ids).keys():
        raise BadInput(
            f"{command.name} has an id `core` or `to`; these say what passed a port, and only the runner writes them"
        )
    address = {} if command.to == NOTES else {"to": command.to}
    return Row(command.name, when, {**dict(command.ids), "pipeline": command.pipeline, **address})


def read(path: Path, phase: str | None = None) -> tuple[list[Row], str]:
    """The rows of a file of records that are events, and a sentence about unreadable lines (empty without any). `phase`: only its rows."""
    columns, dropped = parse(read_bytes(path))
    events = zip(*(columns[name] for name in ("metric", "time", "ids", "value", "text", "phase")), strict=True)
    rows = [
        Row(name, when, ids)
        for name, when, ids, value, text, of in events
        if value is None and not text and phase in (None, of)
    ]
    return rows, note(path.name, dropped) if dropped else ""


def turns(rows: Iterable[Row]) -> Iterator[tuple[str, Event | None, list[Command]]]:
    """What passed, by turns: the core, the event that it took (None where it begins), and its commands."""
    turn: tuple[str, Event | None, list[Command]] | None = None
    for row in rows:
        ids = {name: value for name, value in row.ids.items() if name not in ("core", "to", "pipeline")}
        pipeline = str(row.ids.get("pipeline", ""))
        if "core" in row.ids:
            if turn is not None:
                yield turn
            turn = str(row.ids["core"]), None if row.name == BEGINS else Event(row.name, pipeline, **ids), []
        elif turn is not None:
            turn[2].append(Command(row.name, str(row.ids.get("to", NOTES)), pipeline, **ids))
    if turn is not None:
        yield turn
