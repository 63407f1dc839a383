"""The ports on live ranks: when a rank gets its next call, and with which orders."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import pytest

from kit.errors import Cancelled, KitError, RankDied, RankTimeout
from kit.loop.messages import Command
from kit.stream.live import LiveRanks


class Call:
    """A call in flight, until a test sets its `answer`."""

    def __init__(self, args: dict[str, Any]) -> None:
        self.args = args
        self.answer: Any = None

    def done(self) -> bool:
        return self.answer is not None

    def result(self) -> list[Any] | None:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def cancel(self) -> bool:
        self.answer = Cancelled("cancelled")
        return True


class Calls:
    """Stands in for a Drive: records each call, and returns from a wait at once."""

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
    ranks = LiveRanks(calls, ["replica 0"], pipeline="a")  # type: ignore[arg-type]
    port = ranks

    def generate(group: int) -> None:
        port.send(Command("generate", "replica", group=group, sample=0, replica=0, attempt=0))

    generate(0)
    ranks.wait(0.0)
    first, second = ({"event": "completed", "group": 0, "sample": one} for one in (0, 1))
    calls.made[0].answer = [[first, second]]
    assert [event.sample for event in ranks.take()] == [0, 1]
    for group in (1, 2):  # the samples reach the controller one by one, and it looks for more in between
        generate(group)
        assert ranks.take() == []
    assert len(calls.made) == 1
    ranks.wait(0.0)
    assert [order["group"] for order in calls.made[1].args["orders"]] == [1, 2]


@pytest.mark.parametrize(("trainer", "ends"), [((0,), True), ((0, 1), False)])
def test_a_trainer_that_waits_for_a_dead_replica_is_interrupted_once(trainer: tuple[int, ...], ends: bool) -> None:
    """With several trainer ranks, one waits in a collective, where nothing can interrupt it."""
    calls = Calls()
    calls.roles = {"trainer": trainer, "replica 0": (2,), "replica 1": (3,)}
    ranks = LiveRanks(calls, ["replica 0", "replica 1"], pipeline="a")  # type: ignore[arg-type]
    ranks.send(Command("sync", "sync", "a", version=1, at_sync="keep", replicas="0,1"))
    ranks.wait(0.0)
    calls.made[1].answer = RankDied("rank 3 was killed", rank=3, phase="stream", signal="SIGKILL")
    assert [event.name for event in ranks.take()] == ["died"]
    assert ranks.patient(60.0) <= (0.1 if ends else 60.0)
    if ends:
        ranks.in_vain = (0.0, calls.made[2])  # its time to give up is over
    assert ranks.take() == []
    assert isinstance(calls.made[2].answer, Cancelled) is ends
    assert calls.made[0].answer is None  # the trainer tells the other replica
    calls.made[0].answer = KitError("the trainer gave up")
    assert [(event.name, event.of) for event in ranks.take()] == ([("error", "sync")] if ends else [])


def test_a_stopped_loop_waits_for_its_calls_and_drops_what_they_answer() -> None:
    calls = Calls()
    ranks = LiveRanks(calls, ["replica 0"], pipeline="a")  # type: ignore[arg-type]
    ranks.send(Command("generate", "replica", group=0, sample=0, replica=0, attempt=0))
    ranks.send(Command("begin", "trainer", step=0, update=0))
    ranks.wait(0.0)
    decode, begin = sorted(calls.made, key=lambda call: "orders" not in call.args)
    ranks.send(Command("microbatch", "trainer", step=0, update=0, groups=(0,)))  # no call has begun for it
    waits = iter([decode, begin])

    def answers(*_: Any, **__: Any) -> None:
        call = next(waits)
        call.answer = [[]] if call is decode else [{}]

    calls.wait = answers  # type: ignore[method-assign]
    ranks.settle()
    assert (ranks.flying, ranks.take(), len(calls.made)) == ({}, [], 2)


def test_a_rank_that_did_not_answer_is_the_reason_and_gets_no_call() -> None:
    calls = Calls()
    calls.roles = {"trainer": (0,), "replica 0": (1,), "replica 1": (2,)}
    ranks = LiveRanks(calls, ["replica 0", "replica 1"], pipeline="a")  # type: ignore[arg-type]
    for replica in (0, 1):
        ranks.send(Command("generate", "replica", group=0, sample=replica, replica=replica, attempt=0))
    ranks.wait(0.0)
    calls.made[0].answer = RankTimeout("no answer", phase="stream", ranks=(1,), culprits=(1,), stacks={})
    with pytest.raises(RankTimeout):  # which a runner makes an event
        ranks.take()
    ranks.send(Command("generate", "replica", group=1, sample=0, replica=0, attempt=0))
    with pytest.raises(RankTimeout, match="no answer"):
        ranks.wait(0.0)
    assert len(calls.made) == 2
    calls.made[1].answer = RankTimeout("no answer either", phase="stream", ranks=(2,), culprits=(2,), stacks={})
    assert ranks.take() == []  # nor is the next one looked at
    with pytest.raises(RankTimeout, match=r"no answer$"):
        ranks.settle()


def test_a_sync_that_waits_for_a_lost_rank_names_that_rank() -> None:
    """Each role has a call of its own, and that of the rank that waits is over first."""
    calls = Calls()
    ranks = LiveRanks(calls, ["replica 0"], pipeline="a")  # type: ignore[arg-type]
    ranks.send(Command("sync", "sync", "a", version=1, at_sync="keep", replicas="0"))
    ranks.wait(0.0)
    waits, lost = (
        RankTimeout(f"no answer from rank {rank}", phase="stream", ranks=(rank,), culprits=culprits, stacks={})
        for rank, culprits in ((1, ()), (0, (0,)))
    )
    calls.made[0].answer, calls.made[1].answer = waits, lost
    with pytest.raises(RankTimeout, match="no answer from rank 0"):
        ranks.take()
    assert ranks.stuck is lost
