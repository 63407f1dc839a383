"""The events of a ledger once more through the cores: the same commands, or the first turn in which they differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kit.loop.ledger import turns

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kit.loop.ledger import Row
    from kit.loop.messages import Command, Event
    from kit.loop.runner import Core


class Difference(NamedTuple):
    """The turn (from 0) in which a core gave other commands than the ledger has."""

    turn: int
    core: str
    event: Event | None
    recorded: tuple[Command, ...]
    replayed: tuple[Command, ...]


def replay(core: Core[Any], events: Iterable[Event]) -> tuple[Any, list[Command]]:
    """The state after the events, and every command on the way."""
    state, first = core.begin()
    commands = list(first)
    for event in events:
        state, more = core.step(state, event)
        commands += more
    return state, commands


def replay_rows(cores: Mapping[str, Core[Any]], rows: Iterable[Row]) -> Difference | None:
    """Compare a ledger with what the cores do with its events. None: every command is the same, in the same order."""
    states: dict[str, Any] = {}
    for number, (name, event, recorded) in enumerate(turns(rows)):
        core = cores[name]
        states[name], found = core.begin() if event is None else core.step(states[name], event)
        if tuple(recorded) != tuple(found):
            return Difference(number, name, event, tuple(recorded), tuple(found))
    return None
