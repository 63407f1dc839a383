"""What the process group of a sync does on GPUs, with stand-ins for them: its first words, its deadlines, and how it is given up.

`assumed`: the behaviour of torch's group over NCCL is read off ProcessGroupNCCL.cpp of 2.9 to 2.13; no GPU has confirmed it. Links,
stores, threads and the transport are real, and gloo carries the bytes.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from kit.errors import KitError
from kit.sync import groups
from kit.sync.groups import Rendezvous, hurried, wait_on_gpu, within
from kit.sync.link import PeerSilent
from tests.sync.ranks.transports import SIZES, receive, send
from tests.sync.test_transports import between

SOON = timedelta(seconds=0.2)


class Work:
    """A collective as torch shows it: complete after `looks` looks; `wait` with a deadline raises if it is not complete."""

    def __init__(self, looks: float) -> None:
        self.looks = looks
        self.waits: list[timedelta] = []

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks <= 0

    def wait(self, timeout: timedelta) -> None:
        self.waits.append(timeout)
        if self.looks > 0:
            raise dist.DistBackendError("Watchdog caught collective operation timeout")


def test_a_collective_that_ends_soon_is_over_before_torchs_slow_wait() -> None:
    work = Work(looks=50)
    wait_on_gpu(work, SOON)
    assert (work.looks, work.waits) == (0, [SOON])


def test_a_late_one_is_left_to_torchs_wait_which_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "SPIN_S", 0.0)
    work = Work(looks=float("inf"))
    with pytest.raises(dist.DistBackendError, match="timeout"):
        wait_on_gpu(work, SOON)
    assert work.waits == [SOON]


def test_what_does_not_come_to_its_end_is_given_up() -> None:
    message: list[str] = []
    within(timedelta(seconds=30), lambda: message.append(threading.current_thread().name))
    assert message == ["kit-sync-start"]
    with pytest.raises(OSError, match="no route"):
        within(timedelta(seconds=30), lambda: (_ for _ in ()).throw(OSError("no route")))
    never = threading.Event()
    with pytest.raises(RuntimeError, match=r"timed out after 0\.2 s: a peer did not join"):
        within(SOON, lambda: never.wait() and None)
    never.set()


def test_an_absent_peers_id_is_waited_for_no_longer_than_the_syncs_deadline() -> None:
    """The store has a prefix in front of the World's store, as under `init_process_group`."""
    world = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=1800))
    store = PrefixStore("default_pg", world)
    own = hurried(store, SOON)
    with pytest.raises(dist.DistStoreError, match="timeout"):
        own.get("0")
    store.set("0", "the id")
    assert own.get("0") == b"the id"
    assert (store.timeout, world.timeout) == (timedelta(seconds=1800),) * 2


class OnGpu(Rendezvous):
    """The transport as on a GPU; it logs the calls on its group."""

    silent = False

    def join(self, offer: dict[str, Any]) -> None:
        self.log: list[str] = []
        super().join(offer)
        inner, log = self.group, self.log

        def noted(name: str) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                log.append(name)
                return getattr(inner, name)(*args)

            return call

        self.group = SimpleNamespace(**{name: noted(name) for name in ("allreduce", "broadcast", "abort", "shutdown")})

    def first_words(self) -> None:
        if self.silent:
            threading.Event().wait(2.0)
        super().first_words()

    def leave(self, group: Any) -> None:
        super().leave(group)
        LOGS[self.ctx.place] = self.log


class Silent(OnGpu):
    """Says that it joins, and does not. It waits longer than its peer, which might otherwise hear first that it gave up."""

    def join(self, offer: dict[str, Any]) -> None:
        super().join(offer)
        self.wait = timedelta(seconds=20)

    silent = True


LOGS: dict[int, list[str]] = {}


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device "cuda" and torch's calls for it, without a GPU."""
    LOGS.clear()
    stream = SimpleNamespace(synchronize=lambda: None)
    cuda = SimpleNamespace(set_device=lambda _: None, current_stream=lambda _: stream)

    def on_host(size: int, *, dtype: torch.dtype | None = None, device: torch.device) -> torch.Tensor:
        assert device == torch.device("cuda", 0)
        return torch.zeros(size, dtype=dtype)

    stand_in = SimpleNamespace(cuda=cuda, empty=on_host, zeros=on_host, uint8=torch.uint8)
    monkeypatch.setattr(groups, "torch", stand_in)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", dist.ProcessGroupGloo, raising=False)


def on_gpus(kind: Any, *acts: Any, timeout_s: float = 5.0) -> list[Any]:
    return between(kind, *acts, timeout_s=timeout_s, device=torch.device("cuda", 0))


def test_the_communicator_is_made_before_the_first_bucket_and_destroyed_after_the_last() -> None:
    _, differ = on_gpus(OnGpu, send, receive)
    assert differ == []
    whole = ["allreduce", *["broadcast"] * len(SIZES), "shutdown"]
    assert [LOGS[0], LOGS[1]] == [whole, whole]


def test_a_group_that_did_not_carry_all_is_aborted_before_it_is_given_back() -> None:
    def gives_up(transport: Any) -> None:
        receive(transport, range(2))
        raise KitError("out of memory")

    sender, receiver = on_gpus(OnGpu, send, gives_up)
    assert isinstance(sender, KitError)
    assert "out of memory" in str(receiver)
    for log in LOGS.values():
        assert log[0] == "allreduce"
        assert log[-2:] == ["abort", "shutdown"]
        assert log.count("abort") == 1


def test_a_peer_that_does_not_come_to_make_the_communicator_is_named_within_the_deadline() -> None:
    def kinds(ctx: Any) -> Any:
        return (OnGpu if ctx.role == "sender" else Silent)(ctx)

    sender, _ = on_gpus(kinds, send, receive, timeout_s=0.5)
    assert isinstance(sender, PeerSilent)
    assert sender.peer == "receiver 0"
    assert LOGS[0] == ["allreduce", "abort", "shutdown"]


def test_an_error_of_the_first_words_keeps_nothing_alive() -> None:
    """The garbage collector is off: a group that waits for a collection still has its sockets and threads."""
    gc.collect()
    gc.disable()
    try:
        held = Work(looks=0)
        there = weakref.ref(held)

        def fails(mine: Work) -> None:
            raise dist.DistBackendError(f"{mine.looks} looks")

        try:
            within(timedelta(seconds=30), functools.partial(fails, held))
        except dist.DistBackendError as error:
            words = str(error)
        del held
        assert words == "0 looks"
        assert there() is None
    finally:
        gc.enable()
