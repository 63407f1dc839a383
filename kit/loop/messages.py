"""Events and commands: a name, the pipeline that it belongs to, and ids. Frozen, hashable, and cheap to make.

An id is a whole number or a text, as in a record, so that a ledger gives back exactly what passed. Several numbers are one text:
`listed((3, 4))` is "3,4".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

Id = int | str


@dataclass(frozen=True, slots=True, init=False)
class Message:
    """Its ids are read as `message["group"]` or `message.group`; `get` gives a default where an id is missing."""

    name: str
    pipeline: str
    ids: tuple[tuple[str, Id], ...]

    def __getitem__(self, name: str) -> Any:
        for key, value in self.ids:
            if key == name:
                return value
        raise KeyError(f"{self.name} has no id {name!r}; it has {', '.join(key for key, _ in self.ids) or 'none'}")

    def __getattr__(self, name: str) -> Any:
        if name in ("name", "pipeline", "ids", "to") or name.startswith("_"):  # not set yet, as in a copy under way
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

    def __init__(self, name: str, pipeline: str = "", /, **ids: Id) -> None:
        _fill(self, name, pipeline, ids)


@dataclass(frozen=True, slots=True, init=False)
class Command(Message):
    """What a core wants done: `Command("begin", "trainer", "a", step=3)`. `to` names a port or another core."""

    to: str

    def __init__(self, name: str, to: str, pipeline: str = "", /, **ids: Id) -> None:
        _fill(self, name, pipeline, ids)
        object.__setattr__(self, "to", to)


def _fill(message: Message, name: str, pipeline: str, ids: dict[str, Id]) -> None:
    object.__setattr__(message, "name", name)
    object.__setattr__(message, "pipeline", pipeline)
    object.__setattr__(message, "ids", tuple(sorted(ids.items())))


def listed(numbers: Iterable[int]) -> str:
    """Several numbers as one id."""
    return ",".join(map(str, numbers))


def numbers(text: str) -> tuple[int, ...]:
    """The numbers of such an id."""
    return tuple(map(int, text.split(","))) if text else ()


class Map(dict[Any, Any]):
    """A mapping that does not change and can be hashed. `put` and `without` give a new one.

    A copy of 1,000 entries takes some microseconds, so a state may hold one and still be replaced with every event.
    """

    __slots__ = ()

    def put(self, key: Any, value: Any) -> Map:
        new = Map(self)
        dict.__setitem__(new, key, value)
        return new

    def without(self, key: Any) -> Map:
        new = Map(self)
        dict.__delitem__(new, key)
        return new

    def plus(self, key: Any, amount: int = 1) -> Map:
        """The map of a counter after an increment."""
        return self.put(key, self.get(key, 0) + amount)

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a Map does not change; use put or without")

    __setitem__ = __delitem__ = update = pop = popitem = clear = setdefault = __ior__ = _refuse
