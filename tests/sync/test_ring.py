"""Versions stream through a few places: none is overwritten while a receiver needs it, every bit arrives, and no lost version is sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kit.errors import BadInput, KitError
from kit.sync import buckets
from kit.sync.buckets import Bound
from kit.sync.cache import Ring, starts
from kit.sync.link import Listener
from kit.sync.receiver import Call
from kit.sync.sender import Report, Sender, SyncFailed
from tests.sync.ranks.service import LAYOUT, Host, at_once, nothing_kept, receiver_of, sender_of, target, tensors

NAMES = ("r1", "r2")


@pytest.fixture
def sender() -> Iterator[Sender]:
    """A sender with a ring; at the end it holds nothing."""
    with nothing_kept(), Listener() as listener:
        made = sender_of(listener, cache=Ring(LAYOUT, timeout_s=5.0))
        yield made
        made.cache.close()


def stream(sender: Sender, version: int, calls: type[Call] = Call) -> tuple[list[Any], list[Host]]:
    """Sync a version to two paused receivers; the second one cuts its weights and uses `calls`."""
    hosts = [Host(), Host(cut=True)]
    address = sender.listener.address
    receivers = [receiver_of("r1", hosts[0], address), receiver_of("r2", hosts[1], address, calls)]
    targets = [target(name, state="paused") for name in NAMES]
    act = lambda: sender.sync(version, targets, lambda: tensors(version))  # noqa: E731 - it is handed on
    return at_once(act, *(receiver.join for receiver in receivers)), hosts


@pytest.mark.parametrize("transport", ["shm", "serialize"])
@pytest.mark.parametrize("slots", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_versions_arrive_through_memory_for_a_few_buckets(sender: Sender, transport: str, slots: int) -> None:
    sender.cache.close()
    sender.cache, sender.transport = Ring(LAYOUT, slots=slots), transport
    places = set()
    for version in (1, 2, 3):
        (report, *_), hosts = stream(sender, version)
        assert isinstance(report, Report), report
        assert (report.path, report.answered) == ("stream", 2)
        assert all(host.has(version) for host in hosts)
        places.add(sender.cache.segment(version).tensor.data_ptr())
    assert len(LAYOUT.buckets) > slots
    assert sender.cache.nbytes == slots * 4096
    assert sender.cache.copies == report.copies == 0  # a ring holds no whole model
    assert len(places) == 1


def test_a_place_is_packed_again_when_all_are_done_with_it(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[int] = []
    early: list[int] = []
    pack, apply_bucket = Bound.pack, Call.apply_bucket

    def packing(self: Bound, index: int, out: torch.Tensor, **how: Any) -> None:
        if index >= 2 and applied.count(index - 2) < len(NAMES):
            early.append(index)
        pack(self, index, out, **how)

    def applying(self: Call, index: int, buffer: torch.Tensor) -> None:
        apply_bucket(self, index, buffer)
        applied.append(index)

    monkeypatch.setattr(Bound, "pack", packing)
    monkeypatch.setattr(Call, "apply_bucket", applying)
    (report, *_), _ = stream(sender, 1)
    assert isinstance(report, Report), report
    assert sorted(applied) == sorted([*range(len(LAYOUT.buckets))] * len(NAMES))
    assert early == []


@pytest.mark.slow
@pytest.mark.parametrize("step", ["look", "verify", "finalize"])
def test_after_a_failure_the_next_version_arrives(sender: Sender, step: str) -> None:
    def fails(self: Call, *_: Any) -> None:
        raise KitError("the disk is on fire")

    assert isinstance(stream(sender, 1)[0][0], Report)
    (error, *_), _ = stream(sender, 2, type("Failing", (Call,), {step: fails}))
    assert isinstance(error, SyncFailed)
    assert (error.peer, sender.version) == ("r2", 1)
    (report, *_), hosts = stream(sender, 3)
    assert isinstance(report, Report), report
    assert all(host.has(3) for host in hosts)


def test_receivers_that_serve_or_wake_are_refused(sender: Sender) -> None:
    for version, state in ((1, "serving"), (0, "asleep")):
        with pytest.raises(
            BadInput, match=f"version {version} is refused: a ring keeps no copy, and r1 is {state}; all receivers must"
        ):
            sender.sync(version, [target("r1", state=state)], lambda: tensors(1))
    with pytest.raises(BadInput, match="a ring of 0 slots is too small"):
        Ring(LAYOUT, slots=0)


def test_places_come_by_turns() -> None:
    assert starts((5000, 100, 4096, 1), 2) == ((0, 8192, 0, 8192), 16384)


def test_hot_buckets_have_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pieces are small here, so that tensors are cut."""
    monkeypatch.setattr(buckets, "HOT", 1000)
    bound = Bound(LAYOUT, tensors(1))
    for index, size in enumerate(LAYOUT.sizes):
        plain, hot = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        bound.pack(index, plain)
        bound.pack(index, hot, hot=True)
        assert plain.any()
        assert torch.equal(plain, hot)


def test_a_transport_of_ones_own_without_ahead_is_refused_by_a_ring(sender: Sender) -> None:
    """A place is written again when every receiver is done with it, which only `ahead` can report."""
    sender.transport = "tests.sync.test_service:Plain"
    (error, *_), _ = stream(sender, 1)
    assert isinstance(error, SyncFailed)
    assert "the object it returned lacks ahead, which a ring needs" in str(error)
