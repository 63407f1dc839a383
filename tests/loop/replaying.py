"""A ledger on disk, and its events replayed through the cores: the same commands, or the first turn that differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kit.loop.messages import NOTES, Command, Event
from kit.loop.runner import BEGINS, Core
from kit.results.records import NOTEBOOK, Row, RowWriter


class File:
    """A ledger in a run's folder, written as records without a value."""

    def __init__(self, path: Path, *, phase: str) -> None:
        self._writer = RowWriter(path)
        self._head: dict[str, Any] = {"run": "r", "lab": "stream", "phase": phase, "cycle": 0, "rank": NOTEBOOK}

    def write(self, row: Row) -> None:
        self._writer.append([dataclasses.replace(row, **self._head)])

    def flush(self) -> None:
        """Do nothing: every row is written at once."""

    def close(self) -> None:
        self._writer.close()


def turns(rows: Iterable[Row]) -> Iterator[tuple[str, Event | None, list[Command]]]:
    """Yield the turns: the core, the event that it received (None when it begins), and its commands."""
    turn: tuple[str, Event | None, list[Command]] | None = None
    for row in rows:
        ids = {name: value for name, value in row.ids.items() if name not in ("core", "to", "pipeline")}
        pipeline = str(row.ids.get("pipeline", ""))
        if "core" in row.ids:
            if turn is not None:
                yield turn
            turn = str(row.ids["core"]), None if row.event == BEGINS else Event(row.event, pipeline, **ids), []
        elif turn is not None:
            turn[2].append(Command(row.event, str(row.ids.get("to", NOTES)), pipeline, **ids))
    if turn is not None:
        yield turn


class Difference(NamedTuple):
    """The turn (from 0) in which a core's commands differ from the ledger's."""

    turn: int
    core: str
    event: Event | None
    recorded: tuple[Command, ...]
    replayed: tuple[Command, ...]


def replay(core: Core[Any], events: Iterable[Event]) -> tuple[Any, list[Command]]:
    """Return the state after the events, and every command on the way."""
    state, first = core.begin()
    commands = list(first)
    for event in events:
        state, more = core.step(state, event)
        commands += more
    return state, commands


def replay_rows(cores: Mapping[str, Core[Any]], rows: Iterable[Row]) -> Difference | None:
    """Compare a ledger's commands with those that the cores give for its events. None: all are the same, in the same order."""
    states: dict[str, Any] = {}
    for number, (name, event, recorded) in enumerate(turns(rows)):
        core = cores[name]
        states[name], found = core.begin() if event is None else core.step(states[name], event)
        if tuple(recorded) != tuple(found):
            return Difference(number, name, event, tuple(recorded), tuple(found))
    return None
