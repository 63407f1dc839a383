"""Forwards while weights arrive: each uses one version only, on one rank and on several; without the gate some mix two."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kit.errors import BadInput, KitError
from kit.sync.hashes import digest
from kit.sync.link import Listener
from kit.sync.serving import ALGORITHM, GateTimeout, Serving
from tests.sync.ranks.service import (
    KINDS,
    Host,
    Tensors,
    at_once,
    nothing_kept,
    receiver_of,
    sender_of,
    target,
    tensors,
)

REFRESHES = 20


def read(weights: Tensors) -> torch.Tensor:
    """Read a part of each tensor, slowly."""
    seen = []
    for name in KINDS:
        seen.append(weights[name, 0].float().flatten()[:1])
        time.sleep(0.001)
    return torch.cat(seen)


class Served(Host):
    """A replica that serves."""

    def __init__(self) -> None:
        super().__init__()
        self.serving = Serving(lambda: read(self.tensors), timeout_s=10.0)

    def writing(self) -> contextlib.AbstractContextManager[None]:
        return self.serving.writing()


class Ungated(Served):
    def writing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def hammered(host: Served) -> list[str]:
    """Return what was served while versions arrived over two transports in turn."""
    with Listener() as listener:
        sender = sender_of(listener)
        receiver = receiver_of("r1", host, listener.address)
        host.serving.start()
        try:
            for version in range(1, REFRESHES + 1):
                sender.transport = ("shm", "serialize")[version % 2]
                gave = at_once(
                    lambda version=version: sender.sync(version, [target("r1")], lambda: tensors(version)),
                    receiver.join,
                )
                assert not [each for each in gave if isinstance(each, Exception)], gave
            host.serving.next()
        finally:
            host.serving.stop()
            sender.cache.close()
    return host.serving.served


def test_every_forward_is_of_one_version_alone() -> None:
    versions = [digest(read(tensors(version)), ALGORITHM) for version in range(REFRESHES + 1)]
    with nothing_kept():
        served = [versions.index(one) for one in hammered(Served())]  # a digest of no version raises
    assert served == sorted(served)  # versions never go back
    assert {0, REFRESHES} <= set(served)


def test_without_the_gate_some_forwards_are_of_two_versions() -> None:
    """Shows that the test before can fail."""
    versions = {digest(read(tensors(version)), ALGORITHM) for version in range(REFRESHES + 1)}
    assert set(hammered(Ungated())) - versions


# -- on its own ------------------------------------------------------------------------------------------------------------


def test_the_next_forward_began_after_it_was_asked_for() -> None:
    cell, entered, go = [0], threading.Event(), threading.Event()

    def forward() -> torch.Tensor:
        value = torch.tensor(cell[0])
        entered.set()
        go.wait(10)
        return value

    serving = Serving(forward)
    serving.start()
    entered.wait(10)  # one forward runs with the old value
    cell[0] = 1
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(serving.next)
        while not serving._changed.acquire(blocking=False) or not serving._changed._waiters:  # type: ignore[attr-defined]
            with contextlib.suppress(RuntimeError):
                serving._changed.release()
        serving._changed.release()
        go.set()
        assert asked.result(10) == digest(torch.tensor(1), ALGORITHM)
    serving.stop()
    assert serving.served[0] == digest(torch.tensor(0), ALGORITHM)


def test_a_forward_that_raises_is_reported_to_whoever_waits_and_at_the_end() -> None:
    def forward() -> torch.Tensor:
        raise ValueError("no such token")

    serving = Serving(forward, timeout_s=10.0)
    serving.start()
    for act in (serving.next, serving.stop):
        with pytest.raises(KitError, match="a forward failed while weights arrived: no such token"):
            act()
    assert not serving.running
    serving.stop()
    with serving.writing():  # weights can still arrive
        pass
    serving.forward = lambda: torch.zeros(1)
    serving.start()
    assert serving.next() == digest(torch.zeros(1), ALGORITHM)
    with pytest.raises(BadInput, match="the replica serves already"):
        serving.start()
    serving.stop()


def test_who_waits_where_nobody_serves_is_reported_at_once() -> None:
    serving = Serving(lambda: torch.zeros(1))
    for _ in range(2):
        with pytest.raises(KitError, match="waited for a forward, but the replica does not serve"):
            serving.next()
        serving.start()
        serving.stop()


def test_a_forward_that_hangs_is_reported_and_is_not_forgotten() -> None:
    entered, go = threading.Event(), threading.Event()

    def forward() -> torch.Tensor:
        entered.set()
        go.wait(10)
        return torch.zeros(1)

    serving = Serving(forward, timeout_s=0.05)
    serving.start()
    entered.wait(10)
    with pytest.raises(KitError, match=r"a forward did not end within 0\.05 s"):
        serving.stop()
    with pytest.raises(BadInput, match="the replica serves already"):
        serving.start()  # otherwise two threads would run forwards
    go.set()
    serving.timeout_s = 10.0
    serving.stop()


def test_readers_wait_as_long_as_a_writer_is_inside() -> None:
    """A writer stays for many steps of a sync, and each step may take a whole deadline."""
    serving = Serving(lambda: torch.zeros(1), timeout_s=0.02)
    serving.start()
    with serving.writing():
        time.sleep(0.2)
    serving.timeout_s = 10.0
    assert serving.next() == digest(torch.zeros(1), ALGORITHM)
    serving.stop()


def test_a_reader_whose_time_is_over_while_the_writer_leaves_reads_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    serving = Serving(lambda: torch.zeros(1), timeout_s=10.0)
    reading, late = serving.gate.reading, [GateTimeout("reader", ("a writer",), 10.0)]

    @contextlib.contextmanager
    def reading_late() -> Iterator[None]:
        if late:
            raise late.pop()
        with reading():
            yield

    monkeypatch.setattr(serving.gate, "reading", reading_late)
    serving.start()
    assert serving.next() == digest(torch.zeros(1), ALGORITHM)
    serving.stop()


# -- several ranks of a replica, as threads with a group each --------------------------------------------------------------


class Replica:
    """Two ranks whose forwards meet in a collective, like those of a sharded model."""

    def __init__(self, folder: Path, deadlines: tuple[float, float] = (10.0, 10.0)) -> None:
        def join(rank: int) -> Any:
            store = dist.PrefixStore("replica", dist.FileStore(str(folder / "store"), 2))
            group: Any = dist.ProcessGroupGloo(store, rank, 2)
            return group

        self.groups = at_once(lambda: join(0), lambda: join(1))
        self.values = [torch.zeros(1), torch.zeros(1)]
        self.ranks = [Serving(self.forward(rank), timeout_s=deadlines[rank]) for rank in range(2)]
        for rank, serving in enumerate(self.ranks):
            serving._group = self.groups[rank]
            serving._all = agree(self.groups[rank])  # type: ignore[method-assign]

    def forward(self, rank: int) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            total = self.values[rank].clone()
            self.groups[rank].allreduce([total]).wait()
            return total

        return run

    def start(self) -> None:
        for serving in self.ranks:
            serving.start()

    def stop(self) -> list[Any]:
        return at_once(*(serving.stop for serving in self.ranks))


def agree(group: Any) -> Callable[[Callable[[], bool]], bool]:
    """Like `Serving._all`, but without the process's registry of groups, which cannot hold the groups of two ranks."""

    def of_all(wish: Callable[[], bool]) -> bool:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        flag = torch.tensor([int(wish())])
        group.allreduce([flag], options).wait()
        return bool(flag.item())

    return of_all


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Replica]:
    made = Replica(tmp_path)
    yield made
    made.stop()
    for group in made.groups:
        group.shutdown()


def test_a_writer_comes_between_the_same_two_forwards_on_every_rank(replica: Replica) -> None:
    replica.start()

    def write(rank: int, value: int) -> None:
        with replica.ranks[rank].writing():
            time.sleep(0.001 * rank)  # ranks need not be equally fast
            replica.values[rank] = torch.full((1,), float(value))

    for value in range(1, 11):
        assert at_once(lambda value=value: write(0, value), lambda value=value: write(1, value)) == [None, None]
    at_once(*(serving.next for serving in replica.ranks))
    assert replica.stop() == [None, None]
    whole = {digest(torch.full((1,), 2.0 * value), ALGORITHM) for value in range(11)}
    assert set(replica.ranks[0].served) <= whole
    assert replica.ranks[0].served == replica.ranks[1].served


def test_a_writer_that_gives_up_does_not_hold_forwards_off(replica: Replica) -> None:
    """Only one rank's writer comes, and it times out. When both come later, everything works as before."""
    replica.start()
    replica.ranks[0].timeout_s = 0.1
    with (
        pytest.raises(KitError, match=r"a gap between two forwards did not come within 0\.1 s"),
        replica.ranks[0].writing(),
    ):
        pass
    assert not replica.ranks[0]._wanted
    replica.ranks[0].timeout_s = 10.0

    def write(rank: int) -> None:
        with replica.ranks[rank].writing():
            pass

    assert at_once(lambda: write(0), lambda: write(1)) == [None, None]
    assert [isinstance(each, str) for each in at_once(*(serving.next for serving in replica.ranks))] == [True, True]
    assert replica.stop() == [None, None]


def test_a_writer_that_waits_when_the_serving_stops_gets_in(replica: Replica) -> None:
    replica.start()
    waiting = threading.Event()
    serving = replica.ranks[0]
    plain = serving._await

    def heard(there: Callable[[], bool], what: str) -> None:
        waiting.set()
        plain(there, what)

    serving._await = heard  # type: ignore[method-assign]

    def write() -> str:
        with serving.writing():
            return "inside"

    def stop() -> Any:
        waiting.wait(10)
        return replica.stop()

    assert at_once(write, stop) == ["inside", [None, None]]
