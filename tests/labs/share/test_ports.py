"""Replicas sleep and wake between two calls; what a sleeping replica still answers is not read; alarms come when they are due."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kit.errors import KitError, RankDied, RankTimeout
from kit.labs.share.drive import opened
from kit.labs.share.observer import FarWatch
from kit.labs.share.ports import AlarmClock, Live, Ranks
from kit.loop.messages import Command, Event, Memory
from kit.loop.runner import RealClock, Stalled
from kit.results import Row
from kit.stream.ports import Meter
from kit.stream.sides import LoopSide
from tests.labs.share.conftest import share


class Call:
    def __init__(self, method: str) -> None:
        self.method = method
        self.answer: Any = None

    def done(self) -> bool:
        return self.answer is not None

    def result(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Calls:
    """Stands in for a Drive and for the observer."""

    def __init__(self) -> None:
        self.config = share(deadline_s=0.5)
        self.roles = {"a trainer": (0,), "a replica 0": (1,), "a replica 1": (2,), "b trainer": (3,)}
        self.made: list[Call] = []
        self.for_desk = True
        self.held: set[str] = set()
        self.busy: KitError | None = None

    def submit(self, method: str, **_: Any) -> Call:
        if self.busy is not None:
            raise self.busy
        self.made.append(Call(method))
        return self.made[-1]

    def wait(self, _: Sequence[Call], **__: Any) -> None: ...

    def holds(self, role: str) -> bool:
        return role in self.held

    def look(self) -> list[Event]:
        return [Event("freed", "desk", who="a", device=0)]


def test_a_pipelines_meter_begins_with_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, time passes between the first rows and the loop's start."""
    rows, meter = Memory(), Meter()
    for name, now in (("time", 10.0), ("monotonic", 3.0)):
        monkeypatch.setattr(time, name, lambda now=now: now)
    side = LoopSide(clock=RealClock(), ports={}, ledger=rows, deadline_s=1.0)
    ledger = opened(side, {"a": meter}, share())
    ledger.write(Row(metric="begins", time=10.5, ids={"pipeline": "a"}))
    assert rows[0].time == 10.0
    assert meter.take()["total"] == 0.5


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def ranks(calls: Calls) -> Ranks:
    return Ranks(calls, "a", ["replica 0"], observer=calls)  # type: ignore[arg-type]


def move(name: str, replica: int = 0) -> Command:
    return Command(name, "devices", "a", replica=replica, devices=str(replica))


def generate(ranks: Ranks, replica: int = 0) -> None:
    ranks.send(Command("generate", "replica", "a", group=0, sample=0, replica=replica, attempt=0))


def names(events: Sequence[Event]) -> list[str]:
    return [event.name for event in events]


def test_a_shrink_waits_for_the_call_under_way_and_drops_what_it_says(calls: Calls, ranks: Ranks) -> None:
    generate(ranks)
    ranks.start()
    ranks.move(move("shrink"))
    ranks.start()
    assert [one.method for one in calls.made] == ["decode"]
    calls.made[0].answer = [[{"event": "completed", "group": 0, "sample": 0}]]
    assert ranks.take() == []
    ranks.start()
    assert [one.method for one in calls.made] == ["decode", "shrink"]
    calls.made[1].answer = [{}]
    assert names(ranks.take()) == ["freed", "shrunk"]  # the observation comes before the answer
    generate(ranks)  # nothing is sent to a replica that was ordered to sleep; the port would not carry it
    ranks.start()
    assert len(calls.made) == 2


def test_a_replica_decodes_once_it_is_awake(calls: Calls, ranks: Ranks) -> None:
    generate(ranks, 1)
    ranks.start()
    assert calls.made == []
    ranks.move(move("expand", 1))
    ranks.start()
    calls.made[0].answer = [{}]
    assert [(one.name, one.pipeline) for one in ranks.take()] == [("freed", "desk"), ("expanded", "desk")]
    generate(ranks, 1)
    ranks.start()
    assert [one.method for one in calls.made] == ["expand", "decode"]


def test_a_replica_that_cannot_wake_leaves_its_device_before_the_desk_hears_of_it(calls: Calls, ranks: Ranks) -> None:
    ranks.move(move("expand", 1))
    ranks.start()
    calls.made[0].answer = KitError("device 1 is held")
    assert ranks.take() == []
    assert calls.made[1].method == "vacate"
    calls.made[1].answer = [None]
    error = ranks.take()[-1]
    assert (error.name, error.pipeline, error.of, error.why) == ("error", "desk", "expand", "device 1 is held")


def test_a_replica_that_cannot_sleep_is_the_desks_to_know(calls: Calls, ranks: Ranks) -> None:
    ranks.move(move("shrink"))
    ranks.start()
    calls.made[0].answer = KitError("stuck")
    (error,) = ranks.take()
    assert (error.pipeline, error.of, error.who, error.replica) == ("desk", "shrink", "a", 0)


def test_a_replica_whose_call_raises_leaves_its_device(calls: Calls, ranks: Ranks) -> None:
    generate(ranks)
    ranks.start()
    calls.made[0].answer, calls.held = KitError("no room for rows"), {"a.replica 0"}
    assert [(one.name, one.pipeline) for one in ranks.take()] == [("died", "a")]
    assert calls.made[1].method == "vacate"
    calls.made[1].answer = [None]
    calls.held.clear()
    assert [(one.name, one.pipeline) for one in ranks.take()] == [("freed", "desk"), ("died", "desk")]


def test_a_replica_that_can_neither_decode_nor_leave_is_the_desks_to_know(calls: Calls, ranks: Ranks) -> None:
    """With several ranks, one may raise while another is still in the call."""
    generate(ranks)
    ranks.start()
    calls.made[0].answer, calls.busy = KitError("no room for rows"), KitError("rank 2 still in phase 'shared'")
    died, error, *_ = ranks.take()
    assert (died.name, died.pipeline) == ("died", "a")
    assert (error.pipeline, error.of, error.replica) == ("desk", "shrink", 0)
    assert "still in phase" in error.why


def test_a_dead_replica_is_an_event_for_the_pipeline_and_for_the_desk(calls: Calls, ranks: Ranks) -> None:
    ranks.move(move("expand", 1))
    ranks.start()
    calls.made[0].answer = died(2)
    calls.held = {"a.replica 1"}  # another rank of it still holds the device for a moment
    assert [(one.name, one.pipeline) for one in ranks.take()] == [("died", "a")]
    calls.held.clear()
    assert [(one.name, one.pipeline) for one in ranks.take()] == [("freed", "desk"), ("died", "desk")]
    ranks.move(move("shrink", 1))
    ranks.start()
    assert len(calls.made) == 1


@pytest.mark.parametrize("in_flight", ["begin", "microbatch", "finish", "abort", "clear"])
def test_a_pipeline_without_its_trainer_leaves_its_devices_before_the_desk_hears_of_it(
    calls: Calls, ranks: Ranks, in_flight: str
) -> None:
    trainer = ranks
    trainer.send(Command(in_flight, "trainer", "a", step=0, update=0, groups="0"))
    ranks.start()
    calls.made[0].answer = died(0)
    assert ranks.take() == []  # with the call's error the pipeline would end before the desk hears why
    trainer.send(Command("microbatch", "trainer", "a", step=0, update=0, groups="1"))
    assert ranks.take() == []
    ranks.start()
    assert [one.method for one in calls.made[1:]] == ["vacate", "vacate"]
    for one in calls.made[1:]:
        one.answer = [None]
    assert ranks.take() == []
    ranks.start()
    arrived = ranks.take()
    assert arrived[0].name == "freed"
    assert [(one.name, one.pipeline, one.get("of")) for one in arrived if one.name != "freed"] == [
        ("died", "desk", None),
        ("error", "a", "trainer"),
        ("error", "a", in_flight),  # which the pipeline still waits for
        ("error", "a", "microbatch"),
    ]
    assert ranks.gone
    trainer.send(Command("abort", "trainer", "a", step=0))
    assert ranks.take()[-1].of == "abort"


@pytest.mark.parametrize("name", ["shrink", "expand", "sync"])
def test_a_call_past_its_deadline_ends_the_run_with_its_own_error(calls: Calls, ranks: Ranks, name: str) -> None:
    """It does not end with the error of the next call, which finds the rank busy."""
    if name == "sync":
        ids = {"version": 1, "at_sync": "wait", "replicas": "0"}
        ranks.send(Command("sync", "sync", "a", **ids))
    else:
        ranks.move(move(name))
    ranks.start()
    late = RankTimeout(f"rank 1 is in {name}", phase="shared", ranks=(1,), culprits=(1,), stacks={1: "here"})
    calls.made[0].answer = late
    with pytest.raises(RankTimeout):
        ranks.take()
    assert ranks.stuck is late


def test_an_observer_that_does_not_answer_ends_the_run_with_its_own_error(
    calls: Calls, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = RankTimeout("no answer from rank 6", phase="shared", ranks=(6,), culprits=(6,), stacks={})

    def holds(_: str) -> bool:
        raise late

    monkeypatch.setattr(calls, "holds", holds)
    ranks.late = [("replica 0", [])]
    with pytest.raises(RankTimeout):
        ranks.take()
    assert ranks.stuck is late


def died(rank: int) -> RankDied:
    return RankDied(f"rank {rank} was killed", rank=rank, phase="shared", signal="SIGKILL")


def test_without_a_call_under_way_the_wait_ends_at_the_deadline(calls: Calls, ranks: Ranks) -> None:
    live = Live(SimpleNamespace(config=calls.config), [ranks])  # type: ignore[arg-type]
    live.wait(0.0)
    live.heard -= calls.config.deadline_s
    with pytest.raises(Stalled, match="no call is in flight"):
        live.wait(0.0)


def test_alarms_come_when_they_are_due() -> None:
    clock = AlarmClock()
    clock.send(Command("after", "clock", "desk", number=2, ms=60_000))
    clock.send(Command("after", "clock", "a", number=1, ms=0))
    assert clock.left() == 0.0
    assert [(one.pipeline, one.number) for one in clock.take()] == [("a", 1)]
    assert 59 < clock.left() <= 60
    time.sleep(0)
    assert clock.take() == []


@pytest.mark.parametrize(("off", "right"), [(0.0, True), (0.2, False), (-0.2, False)])
def test_another_machine_s_clock_that_is_off_is_refused(off: float, right: bool) -> None:
    def submit(method: str, **_: object) -> SimpleNamespace:
        return SimpleNamespace(result=lambda: [time.time() + off if method == "clock" else "/the/folder"])

    drive: Any = SimpleNamespace(config=SimpleNamespace(timeout_s=60.0), submit=submit)
    if right:
        assert FarWatch(drive, {}, 1, on_gpus=False).folder == Path("/the/folder")
    else:
        with pytest.raises(KitError, match=r"the clock of machine 1 is off by \d+ ms or more"):
            FarWatch(drive, {}, 1, on_gpus=False)
