"""Calls as a port: answers in order, errors with the command's ids. With stand-ins for `submit`; the lab's tests use ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kit.errors import RankDied
from kit.loop.calls import Calls, wait_for
from kit.loop.clock import RealClock
from kit.loop.messages import Command, Event


class Call:
    def __init__(self, value: Any, *, over: bool = False) -> None:
        self.value, self.over = value, over

    def done(self) -> bool:
        return self.over

    def result(self) -> list[Any]:
        if isinstance(self.value, BaseException):
            raise self.value
        return [self.value]


def died(command: Command, error: BaseException) -> Iterable[Event] | None:
    return [Event("died", command.pipeline, replica=command.replica)] if isinstance(error, RankDied) else None


def test_calls_answer_when_they_are_over() -> None:
    calls = {
        1: Call("a"),
        2: Call("b", over=True),
        3: Call(ValueError("no\nmore")),
        4: Call(RankDied("x", rank=0, phase="p")),
    }
    port = Calls(
        lambda command: calls[command.replica],
        lambda command, values: [Event("done", command.pipeline, replica=command.replica, value=values[0])],
        died,
    )
    for number in calls:
        assert port.send(Command("decode", "replica", "a", replica=number)) == ()
    assert list(port.take()) == [Event("done", "a", replica=2, value="b")]
    for call in calls.values():
        call.over = True
    assert list(port.take()) == [
        Event("done", "a", replica=1, value="a"),
        Event("error", "a", replica=3, of="decode", why="ValueError: no"),
        Event("died", "a", replica=4),
    ]
    assert list(port.take()) == []


def test_a_wait_is_for_every_call_of_every_port() -> None:
    ports = [Calls(lambda command: Call(command.n), lambda *_: []) for _ in range(2)]
    seen: list[Any] = []
    clock = RealClock(wait_for(ports, lambda calls, **more: seen.append(([call.value for call in calls], more))))
    assert clock.wait(0.001)
    assert seen == [], "nothing is under way: it only sleeps"
    for number, port in enumerate(ports):
        port.send(Command("x", "p", n=number))
    clock.wait(30.0)
    assert seen == [([0, 1], {"first": True, "timeout_s": 1.0})]
