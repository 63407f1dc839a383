"""Events, commands and the ledger: a row, with its time, for everything that passes a runner, in order.

A message is a name, its pipeline, and ids: frozen, hashable, and cheap to make. An id is what a row's id is (a text, a whole number, or a
tuple of them), so a ledger reads back exactly as written. A port or core of another system may send "3,4": read lists by `numbers`.

A row has the message's name as its metric, and no value. An event's row has the id `core` (the core that received it), a command's row the
id `to` (its address). A command to "ledger" is a note: only the ledger gets it, and its row has neither id. Commands follow the event that
caused them.
"""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass
from typing import Any, ClassVar, Protocol

from kit.errors import BadInput
from kit.results.records import Id, Row

NOTES = "ledger"  # the address of commands that are only recorded


@dataclass(frozen=True, slots=True, init=False)
class Message:
    """Read an id as `message["group"]` or `message.group`; `get` returns a default if the id is missing."""

    name: str
    pipeline: str
    ids: tuple[tuple[str, Id], ...]

    def __init__(self, name: str, pipeline: str = "", /, **ids: Id) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "pipeline", pipeline)
        object.__setattr__(self, "ids", tuple(sorted(ids.items())))

    def __getitem__(self, name: str) -> Any:
        for key, value in self.ids:
            if key == name:
                return value
        raise KeyError(f"{self.name} has no id {name!r}; it has {', '.join(key for key, _ in self.ids) or 'none'}")

    def __getattr__(self, name: str) -> Any:
        if name in ("name", "pipeline", "ids", "to") or name.startswith("_"):  # not set yet, as during a copy
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(str(error)) from None

    def get(self, name: str, default: Any = None) -> Any:
        return next((value for key, value in self.ids if key == name), default)


@dataclass(frozen=True, slots=True, init=False)
class Event(Message):
    """What happened: `Event("completed", "a", group=17, sample=3)`."""


@dataclass(frozen=True, slots=True, init=False)
class Command(Message):
    """What a core orders: `Command("begin", "trainer", "a", step=3)`. `to` names a port or another core."""

    to: str

    def __init__(self, name: str, to: str, pipeline: str = "", /, **ids: Id) -> None:
        Message.__init__(self, name, pipeline, **ids)
        object.__setattr__(self, "to", to)


class Map(dict[Any, Any]):
    """An immutable, hashable mapping. `put`, `without` and `plus` return a new one.

    Copying 1,000 entries takes a few microseconds, so a state can hold a Map and be replaced at every event.
    """

    __slots__ = ()

    def put(self, key: Any, value: Any) -> Map:
        return Map({**self, key: value})

    def without(self, key: Any) -> Map:
        new = Map(self)
        dict.__delitem__(new, key)
        return new

    def plus(self, key: Any, amount: int = 1) -> Map:
        return self.put(key, self.get(key, 0) + amount)

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a Map is immutable; use put or without")

    __setitem__ = __delitem__ = update = pop = popitem = clear = setdefault = __ior__ = _refuse


# -- the ledger -----------------------------------------------------------------------------------------------------------


class Sink(Protocol):
    """Where a runner writes its ledger. It calls `flush` before each wait and at the end."""

    def write(self, row: Row) -> None: ...
    def flush(self) -> None: ...


class Memory(list[Row]):
    def write(self, row: Row) -> None:
        self.append(row)

    def flush(self) -> None:
        pass


def event_row(event: Event, core: str, when: float, at: int = -1, since: float = 0.0) -> Row:
    ids = dict(event.ids)
    ids["pipeline"] = event.pipeline
    ids["core"] = core
    return Row(metric=event.name, time=when, ids=ids, at=at, since=since)


def command_row(command: Command, when: float, at: int = -1, since: float = 0.0) -> Row:
    ids = dict(command.ids)
    if "core" in ids or "to" in ids:
        raise BadInput(f"{command.name} has an id `core` or `to`; these are reserved for the runner, so rename the id")
    ids["pipeline"] = command.pipeline
    if command.to != NOTES:
        ids["to"] = command.to
    return Row(metric=command.name, time=when, ids=ids, at=at, since=since)


class Frozen:
    """A core's state: an immutable copy of the fields of a turn. Inherit it before the dataclass of the fields."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __init__(self, fields: Any) -> None:
        for name in self.__dataclass_fields__:
            object.__setattr__(self, name, getattr(fields, name))

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"a state is immutable: {name}")

    def __hash__(self) -> int:
        return hash(self.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.values() == other.values()

    def values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__dataclass_fields__)
