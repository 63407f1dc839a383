"""Calls in flight on real ranks: submit, wait, cancel, news; Worlds that fail independently."""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kit
from kit.errors import BadInput, Cancelled, KitError, RankDied, RankError, RankTimeout
from kit.world import World, channel
from kit.world.world import Printer, Worlds
from tests.holdings import wait_for

pytestmark = pytest.mark.timeout(180)

FLIGHT = "tests.world.ranks.flight"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """For tests that leave the World usable."""
    with World(2, device="cpu", logs=tmp_path_factory.mktemp("logs")) as made:
        yield made


@pytest.fixture
def usable(world: World) -> Iterator[World]:
    """For tests that break the World; it is restarted afterwards."""
    yield world
    world.restart()
    assert world.eval("rank") == [0, 1]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    with Worlds((1, 2), isolate=True, device="cpu", logs=tmp_path_factory.mktemp("logs")) as made:
        yield made


def test_a_call_in_flight_has_its_result_later(world: World, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    pending = world.submit(f"{FLIGHT}:wait_for", args={"gate": str(gate)})
    assert not pending.done()
    assert (pending.ranks, pending.phase) == ([0, 1], "wait_for")
    with pytest.raises(RankTimeout, match=r"no answer from ranks 0, 1 within 0\.01 s"):
        pending.result(0.01)
    gate.touch()
    assert pending.result() == [0, 1]
    assert pending.done()
    assert pending.result() == [0, 1]
    assert world.state == "idle"


def test_a_request_too_large_for_the_channel_is_refused_before_it_is_sent(
    world: World, alone: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "LIMIT", 2**20)
    for ranks, numbers in ((world, [0, 1]), (alone, [0, 1, 2])):
        with pytest.raises(BadInput, match=r"^2 MiB of JSON .* \(limit 1 MiB\); pass large arguments in a file"):
            ranks.call(f"{FLIGHT}:wait_for", gate="x" * 2**21)
        assert ranks.state == "idle"
        assert ranks.call(f"{FLIGHT}:number") == numbers
    with pytest.raises(BadInput, match="limit 1 MiB"):
        world.run(f"text = {'x' * 2**21!r}")
    assert world.eval("rank") == [0, 1]


def test_calls_on_disjoint_ranks_run_at_the_same_time(world: World, tmp_path: Path) -> None:
    args = {"folder": str(tmp_path), "parties": 2}
    pendings = [world.submit(f"{FLIGHT}:meet", args=args, ranks=[rank]) for rank in (0, 1)]
    assert {one.result()[0] for one in pendings} == {0, 1}


def test_a_busy_rank_is_refused_with_a_sentence(world: World, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    pending = world.submit(f"{FLIGHT}:wait_for", args={"gate": str(gate)}, ranks=[1])
    for again in (lambda: world.submit(f"{FLIGHT}:number", ranks=[1]), lambda: world.call(f"{FLIGHT}:number")):
        with pytest.raises(KitError, match=r"rank 1 still in phase 'wait_for', sent \d s ago"):
            again()
    assert world.call(f"{FLIGHT}:number", ranks=[0]) == [0]
    gate.touch()
    assert pending.result() == [1]


def test_wait_gives_the_first_and_then_all(world: World, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    slow = world.submit(f"{FLIGHT}:wait_for", args={"gate": str(gate)}, ranks=[0])
    quick = world.submit(f"{FLIGHT}:number", ranks=[1])
    assert kit.wait([slow, quick]) == [quick]
    assert kit.wait([slow], timeout_s=0.01) == []
    gate.touch()
    assert kit.wait([slow, quick], first=False) == [slow, quick]
    assert kit.wait([]) == []
    with pytest.raises(BadInput, match=r"submit\(\) returned"):
        kit.wait([1])  # type: ignore[list-item]


def test_a_deadline_ends_a_wait_and_a_late_answer_is_still_a_result(world: World, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    late = world.submit(f"{FLIGHT}:wait_for", args={"gate": str(gate)}, ranks=[1], timeout_s=0.05)
    assert kit.wait([late]) == [late]
    assert late.done()
    with pytest.raises(RankTimeout, match=r"no answer from rank 1 within 0\.05 s") as info:
        late.result()
    assert (info.value.ranks, info.value.phase) == ((1,), "wait_for")
    gate.touch()
    assert late.result(10) == [1]


def test_a_call_ends_once_for_its_observer_however_often_its_result_is_asked_for(world: World, tmp_path: Path) -> None:
    class Ends(Printer):
        count = 0

        def ended(self) -> None:
            self.count += 1

    gate, observer = tmp_path / "gate", Ends()
    pending = world.submit(f"{FLIGHT}:wait_for", args={"gate": str(gate)}, ranks=[0], observer=observer)
    counts = []
    for _ in range(2):
        with pytest.raises(RankTimeout):
            pending.result(0.01)
        counts.append(observer.count)
    gate.touch()
    assert pending.result() == [0]
    assert [*counts, observer.count] == [1, 1, 1]


@pytest.mark.parametrize("stuck", ["code", "device"])
def test_a_hang_of_a_pipeline_is_blamed_on_the_stage_that_does_not_send(
    world: World, tmp_path: Path, stuck: str
) -> None:
    gate = tmp_path / "gate"
    pending = world.submit(f"{FLIGHT}:pipeline", args={"stuck": stuck, "gate": str(gate)})

    def is_blocked() -> bool:
        stacks = world.stacks()
        return "synchronize()" in stacks[0] and {"code": "wait_for(", "device": "synchronize()"}[stuck] in stacks[1]

    assert wait_for(is_blocked)
    with pytest.raises(RankTimeout) as info:
        pending.result(0.01)
    assert info.value.culprits == (1,)
    gate.touch()
    assert pending.result() == [0, 1]


def test_what_a_destroyed_group_did_does_not_count_for_one_of_its_name(world: World) -> None:
    world.run("""
from kit.megatron.handles import adopt
from kit.world import rankside
def make(name):  # a name that comes again from torch has the same keys in the store, where a rank may read those of the first group
    group = dist.new_group([0, 1])
    group._set_group_name(name)
    dist.distributed_c10d._world.pg_names[group] = name
    return group
def send(group, times):
    for _ in range(times):
        dist.send(torch.ones(1), 1, group=group) if rank == 0 else dist.recv(torch.ones(1), 0, group=group)
def counts():
    sent, received = (rankside.transfer_counts(kind, 0).get(f"{name}/{1 - rank}", 0) for kind in ("send", "recv"))
    return [rankside.collective_counts()[name], sent, received]
name = "again"
group = make(name)
send(group, 5)
""")
    assert world.eval("counts()") == [[0, 5, 0], [0, 0, 5]]
    world.run("dist.destroy_process_group(group); group = make(name)")
    assert world.eval("counts()") == [[0, 0, 0]] * 2
    world.run("group = adopt(group, maker='test'); send(group, 2)")
    assert world.eval("counts()") == [[0, 2, 0], [0, 0, 2]]
    world.run("dist.destroy_process_group(group)")


def test_an_error_is_of_its_call_alone(world: World, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    other = world.submit(f"{FLIGHT}:wait_for", args={"gate": str(gate)}, ranks=[0])
    bad = world.submit(f"{FLIGHT}:fail", ranks=[1])
    with pytest.raises(RankError, match="rank 1 fails on purpose"):
        bad.result()
    with pytest.raises(RankError, match="rank 1 fails on purpose"):
        bad.result()
    gate.touch()
    assert other.result() == [0]


def test_cancel_interrupts_the_ranks(world: World) -> None:
    pids = world.pids
    for _ in range(20):  # cancelled at once, so that some orders have not begun
        pending = world.submit(f"{FLIGHT}:nap")
        assert pending.cancel() is True
        with pytest.raises(Cancelled, match="phase 'nap' on ranks 0, 1 was cancelled"):
            pending.result()
        assert pending.done()
    assert world.call(f"{FLIGHT}:number") == [0, 1]
    assert world.pids == pids
    assert issubclass(kit.Cancelled, kit.KitError)


def test_an_interrupt_that_is_lost_comes_again(world: World, tmp_path: Path) -> None:
    pids = world.pids
    pending = world.submit(f"{FLIGHT}:deaf_once", args={"begun": str(tmp_path / "begun")}, ranks=[0])
    assert wait_for((tmp_path / "begun").exists)
    assert pending.cancel() is True
    with pytest.raises(Cancelled):
        pending.result()
    assert world.call(f"{FLIGHT}:number") == [0, 1]
    assert world.pids == pids


def test_what_cleans_up_is_interrupted_only_once(world: World, tmp_path: Path) -> None:
    begun, tidied = tmp_path / "begun", tmp_path / "tidied"
    pending = world.submit(f"{FLIGHT}:tidy", args={"begun": str(begun), "tidied": str(tidied)}, ranks=[1])
    assert wait_for(begun.exists)
    assert pending.cancel() is True
    with pytest.raises(Cancelled):
        pending.result()
    assert tidied.exists()
    assert world.call(f"{FLIGHT}:number") == [0, 1]


def test_what_is_over_cannot_be_cancelled(world: World) -> None:
    pending = world.submit(f"{FLIGHT}:number")
    kit.wait([pending])
    assert pending.cancel() is False
    assert pending.result() == [0, 1]


def test_a_rank_that_does_not_stop_ends_with_its_world(
    usable: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pending = usable.submit(f"{FLIGHT}:stubborn", args={"begun": str(tmp_path / "begun")}, ranks=[1])
    assert wait_for((tmp_path / "begun").exists)  # wait for the start: an order that has not begun is simply dropped
    other = usable.submit(f"{FLIGHT}:nap", ranks=[0])
    assert pending.cancel() is True
    with pytest.raises(Cancelled):
        pending.result()
    assert usable.state == "dead"
    assert "rank 1 did not stop within 3 s" in capsys.readouterr().out
    with pytest.raises(KitError, match="this World is dead: it was interrupted and rank 1 did not stop"):
        other.result()


def test_a_death_ends_every_call_of_its_world(usable: World) -> None:
    pendings = [usable.submit(f"{FLIGHT}:nap", ranks=[rank]) for rank in (0, 1)]
    os.kill(usable.pids[1], signal.SIGKILL)
    for one in pendings:
        with pytest.raises(RankDied) as info:
            one.result()
        assert (info.value.rank, info.value.signal, info.value.phase) == (1, "SIGKILL", "nap")
    assert usable.state == "dead"


def test_a_restart_ends_what_is_in_flight(world: World) -> None:
    pending = world.submit(f"{FLIGHT}:nap")
    world.restart()
    with pytest.raises(KitError, match="restarted while the call was in flight"):
        pending.result()
    assert world.eval("rank") == [0, 1]


def test_arguments_may_have_the_names_of_our_own(world: World) -> None:
    args = {"ranks": [9], "phase": "p", "timeout_s": 1}
    assert world.call(f"{FLIGHT}:echo", args=args, ranks=[0]) == [[[9], "p", 1]]
    assert world.submit(f"{FLIGHT}:echo", args=args, ranks=[1]).result() == [[[9], "p", 1]]
    with pytest.raises(BadInput, match="in args= or as keywords, not both; keywords given: size"):
        world.call(f"{FLIGHT}:echo", args={}, size=1)
    for wrong in ([1], {1: 2}):
        with pytest.raises(BadInput, match="args must map parameter names to values"):
            world.submit(f"{FLIGHT}:echo", args=wrong)  # type: ignore[arg-type]


def test_news_arrives_while_a_function_runs_and_in_order(world: World, tmp_path: Path) -> None:
    gate, seen = tmp_path / "gate", []

    def note(rank: int, values: list[Any]) -> None:
        seen.extend((rank, value) for value in values)
        if "first" in values:
            gate.touch()

    args = {"gate": str(gate), "many": 200}
    assert world.submit(f"{FLIGHT}:report", args=args, ranks=[1], on_news=note).result() == ["done"]
    assert seen == [(1, "first"), *((1, {"index": index}) for index in range(200))]


def test_news_of_a_function_that_raises_is_not_lost(world: World) -> None:
    seen: list[Any] = []
    pending = world.submit(f"{FLIGHT}:report_and_fail", on_news=lambda rank, values: seen.append((rank, *values)))
    with pytest.raises(RankError, match="after it was published"):
        pending.result()
    assert sorted(seen) == [(0, "seen"), (1, "seen")]
    assert world.call(f"{FLIGHT}:number") == [0, 1]  # a later call receives none of these news


def test_isolated_worlds_fail_alone(alone: Worlds) -> None:
    first = alone.submit(f"{FLIGHT}:nap", ranks=[0])
    second = alone.submit(f"{FLIGHT}:nap", args={"seconds": 0.5}, ranks=[1, 2])
    os.kill(alone.pids[0], signal.SIGKILL)
    with pytest.raises(RankDied, match="rank 0 ") as info:
        kit.wait([first, second])[0].result()
    assert info.value.rank == 0
    assert second.result() == [1, 2]
    assert [world.state for world in alone.worlds] == ["dead", "idle"]
    assert alone.call(f"{FLIGHT}:number", ranks=[1, 2]) == [1, 2]
    with pytest.raises(KitError, match="this World is dead: rank 0"):
        alone.call(f"{FLIGHT}:number")
    alone.worlds[0].restart()
    assert alone.call(f"{FLIGHT}:number") == [0, 1, 2]


def test_a_deadline_in_an_isolated_world_leaves_the_others(alone: Worlds, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    hangs = alone.submit(f"{FLIGHT}:wait_for", args={"gate": str(gate)}, ranks=[0], timeout_s=0.05)
    with pytest.raises(RankTimeout):
        hangs.result()
    assert alone.call(f"{FLIGHT}:number", ranks=[1, 2]) == [1, 2]
    gate.touch()
    assert hangs.result(10) == [0]


def test_pendings_of_several_worlds_are_waited_for_together(world: World, alone: Worlds, tmp_path: Path) -> None:
    args = {"folder": str(tmp_path), "parties": 3}
    pendings = [world.submit(f"{FLIGHT}:meet", args=args, ranks=[1])]
    pendings += [alone.submit(f"{FLIGHT}:meet", args=args, ranks=[rank]) for rank in (0, 2)]
    assert [one.result() for one in kit.wait(pendings, first=False)] == [[1], [0], [2]]


def test_descriptors_beyond_a_thousand_are_no_limit(world: World, tmp_path: Path) -> None:
    """select() refuses descriptors of 1,024 or more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"this machine allows a process {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    taken = [socket.socket() for _ in range(1100)]
    try:
        with World(1, device="cpu", logs=tmp_path) as high:
            assert min(high._crew.members[0].work.fileno(), high._crew.members[0].watch.fileno()) > 1024
            pendings = [high.submit(f"{FLIGHT}:number"), world.submit(f"{FLIGHT}:number")]
            assert [one.result() for one in pendings] == [[0], [0, 1]]
            assert high.stacks() == {0: "idle"}
    finally:
        for one in taken:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_ranks_can_be_placed_on_devices(tmp_path: Path) -> None:
    """On the CPU a device is only a number, so two Worlds may use the same one."""
    with Worlds((1, 1), devices=[[3], [3]], device="cpu", logs=tmp_path) as placed:
        assert [(row["device"], row["seat"]) for row in placed.status()] == [("cpu", 3), ("cpu", 3)]


def test_a_world_among_others_can_be_on_the_cpu(tmp_path: Path) -> None:
    with Worlds((1, 1), devices=[[], None], device="auto", logs=tmp_path) as placed:
        assert [row["why"] == "asked for" for row in placed.status()] == [False, True]


@pytest.mark.parametrize("devices", [[0], [0, -1], [0, True], ["0", "1"], 0])
def test_places_that_cannot_be(devices: Any, nothing_left: None) -> None:
    with pytest.raises(BadInput, match="devices"):
        World(2, devices=devices)
