"""Calls in flight on ranks as a port: a command starts a call, its answer becomes events. Of a World only `submit`'s result is known.

A call that raises becomes an `error` event with the command's ids. Nothing moves while nobody waits: `wait_for(ports)` is the real clock's
wait, for all ports at once.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from kit.loop.messages import Command, Event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class Call(Protocol):
    """What `submit` returns: `done()` never waits; `result()` returns a value per rank, or raises."""

    def done(self) -> bool: ...
    def result(self) -> list[Any]: ...


class Calls:
    """`submit(command)` starts a call, `answers(command, values)` gives its events and may start another call by `follow`.

    `failed(command, error)` may name what happened, such as a replica that died; without it, or where it returns None, it is an `error`.
    """

    def __init__(
        self,
        submit: Callable[[Command], Call],
        answers: Callable[[Command, list[Any]], Iterable[Event]],
        failed: Callable[[Command, BaseException], Iterable[Event] | None] = lambda _, __: None,
    ) -> None:
        self._submit = submit
        self._answers = answers
        self._failed = failed
        self.under_way: list[tuple[Command, Call]] = []

    def send(self, command: Command) -> Iterable[Event]:
        self.follow(command, self._submit(command))
        return ()

    def follow(self, command: Command, call: Call) -> None:
        """Take a call's answer as that of a command."""
        self.under_way.append((command, call))

    def take(self) -> Iterable[Event]:
        """The events of calls that are over, in the order in which these were started."""
        ready = [(command, call) for command, call in self.under_way if call.done()]
        self.under_way = [one for one in self.under_way if one not in ready]
        return [event for command, call in ready for event in self._events(command, call)]

    def _events(self, command: Command, call: Call) -> Iterable[Event]:
        try:
            return list(self._answers(command, call.result()))
        except Exception as error:  # noqa: BLE001 - whatever a rank raises is an event for the core
            events = self._failed(command, error)
            if events is not None:
                return events
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            return [Event("error", command.pipeline, **{**dict(command.ids), "of": command.name, "why": why})]


def wait_for(
    ports: Sequence[Calls], wait: Callable[..., object], *, longest_s: float = 1.0
) -> Callable[[float], object]:
    """A wait for `RealClock`: until the first call of any port is over. `wait` is `kit.wait`, or anything with its arguments."""

    def waiting(seconds: float) -> None:
        calls = [call for port in ports for _, call in port.under_way]
        if calls:
            wait(calls, first=True, timeout_s=min(seconds, longest_s))
        else:
            time.sleep(min(seconds, 0.01))

    return waiting
