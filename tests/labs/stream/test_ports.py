"""The ports on live ranks: when a rank gets its next call, and with which orders."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

from kit.labs.stream.ports import Ranks, ReplicaPort
from kit.loop.messages import Command


class Call:
    """A call in flight. `settle` gives it its answer."""

    def __init__(self, args: dict[str, Any]) -> None:
        self.args = args
        self.answer: list[Any] | None = None

    def done(self) -> bool:
        return self.answer is not None

    def result(self) -> list[Any] | None:
        return self.answer


class Calls:
    """Stands in for a Drive: notes each call, and returns from a wait at once."""

    def __init__(self) -> None:
        self.roles = {"trainer": (0,), "replica 0": (1,)}
        self.config = types.SimpleNamespace(deadline_s=1.0)
        self.made: list[Call] = []

    def submit(self, _: str, *, args: dict[str, Any], **__: Any) -> Call:
        self.made.append(Call(args))
        return self.made[-1]

    def wait(self, _: Sequence[Call], **__: Any) -> None: ...


def test_orders_that_follow_from_the_same_answers_go_into_one_call() -> None:
    calls = Calls()
    ranks = Ranks(calls, ["replica 0"], pipeline="a")  # type: ignore[arg-type]
    port = ReplicaPort(ranks)

    def generate(group: int) -> None:
        port.send(Command("generate", "replica", group=group, sample=0, replica=0, attempt=0))

    generate(0)
    ranks.wait(0.0)
    first, second = ({"event": "completed", "group": 0, "sample": one} for one in (0, 1))
    calls.made[0].answer = [[first, second]]
    assert [event.sample for event in ranks.take()] == [0, 1]
    for group in (1, 2):  # the controller hears of one sample after the other, and looks for more in between
        generate(group)
        assert ranks.take() == []
    assert len(calls.made) == 1
    ranks.wait(0.0)
    assert [order["group"] for order in calls.made[1].args["orders"]] == [1, 2]
