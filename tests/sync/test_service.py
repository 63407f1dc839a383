"""A sender and its receivers: versions arrive over every transport at once, and any failure, on either end, at any step, is named and
undone."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kit.sync.sender as module
from kit.errors import BadInput, KitError
from kit.sync.buckets import Bound
from kit.sync.cache import BASE
from kit.sync.hashes import Digests
from kit.sync.link import Listener, PeerFailed, PeerSilent
from kit.sync.receiver import Call
from kit.sync.sender import Report, Sending, SyncFailed
from kit.sync.transports import Shm, TransportContext
from tests.faults.test_strangers import certificate
from tests.holdings import wait_for
from tests.sync.ranks.service import (
    HERE,
    KINDS,
    LAYOUT,
    THERE,
    Host,
    at_once,
    held,
    nothing_kept,
    receiver_of,
    sender_of,
    target,
    tensors,
)

ROOT = Path(__file__).parents[2]


class Scene:
    """A sender and two receivers, `r1` and `r2`; `r2` is the one that fails."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.sender = sender_of(listener)
        self.hosts = {"r1": Host(), "r2": Host(cut=True)}
        self.receivers = {name: receiver_of(name, host, listener.address) for name, host in self.hosts.items()}
        self.transports = dict.fromkeys(self.hosts, HERE)
        self.replicas = dict.fromkeys(self.hosts, "")  # receivers with equal names here are ranks of one replica

    def sync(self, version: int, state: str = "serving", *names: str, **config: Any) -> list[Any]:
        """Return the results or errors of the sender and each receiver. `gather` replaces the source of weights; it may be None."""
        names = names or tuple(self.receivers)
        gather = config.pop("gather", lambda: tensors(version))
        targets = [target(name, self.transports[name], state, self.replicas[name]) for name in names]
        act = functools.partial(self.sender.sync, version, targets, gather, **config)
        return at_once(act, *(self.receivers[name].join for name in names))

    def works(self, version: int, state: str = "serving", *names: str, **config: Any) -> Report:
        report, *received = self.sync(version, state, *names, **config)
        assert isinstance(report, Report), report
        for name, one in zip(names or tuple(self.receivers), received, strict=True):
            assert not isinstance(one, Exception), one
            assert (self.receivers[name].version, self.receivers[name].routed) == (version, True)
            assert self.hosts[name].has(version)
        return report

    def fails(self, version: int, state: str = "serving", *names: str, **config: Any) -> tuple[SyncFailed, list[Any]]:
        """Run a sync that fails: no receiver has the version, and serving replicas are as before."""
        active, before = self.sender.version, {n: (r.version, r.routed) for n, r in self.receivers.items()}
        error, *received = self.sync(version, state, *names, **config)
        assert isinstance(error, SyncFailed), error
        assert f"version {active} stays active" in str(error)
        assert self.sender.version == active
        for name in (names or tuple(self.receivers)) if state == "serving" else ():
            assert (self.receivers[name].version, self.receivers[name].routed) == before[name]
            assert self.hosts[name].has(before[name][0])
        return error, received


@pytest.fixture(scope="module")
def gloo() -> None:
    """Open the pipe that the process's first group keeps, before anything is counted."""
    with Listener() as listener:
        scene = Scene(listener)
        scene.sender.transport = "rendezvous"
        scene.works(1)
        scene.sender.cache.close()


@pytest.fixture
def scene(gloo: None) -> Iterator[Scene]:
    """Check that no sync leaves a descriptor, thread, group or segment behind."""
    with nothing_kept(), Listener() as listener:
        made = Scene(listener)
        yield made
        made.sender.cache.close()


def failing(step: str, error: Callable[[], Exception], *, after: bool = False) -> type[Call]:
    """Return a kind of Call that fails at a step."""

    def act(self: Any, *given: Any) -> None:
        if after:
            getattr(Call, step)(self, *given)
        raise error()

    return type("Failing", (Call,), {step: act})


def trouble() -> KitError:
    return KitError("the disk is on fire")


# -- what goes well --------------------------------------------------------------------------------------------------------


@pytest.mark.drawn(2, of="paths")
@pytest.mark.parametrize("kind", ["auto", "serialize", "rendezvous"])
def test_versions_come_by_every_path(scene: Scene, kind: str) -> None:
    scene.sender.transport = kind
    base = [each.cut for each in scene.hosts.values()]
    assert base == [False, True]
    for version, state in enumerate(("serving", "serving", "paused"), start=1):
        report = scene.works(version, state)
        assert (report.path, report.answered, report.verified) == (
            "stream" if state == "paused" else "refresh",
            2,
            len(KINDS),
        )
        assert report.copies <= 2
    scene.hosts["r1"].sleep()
    report = scene.works(3, "asleep", "r1", gather=None)
    assert (report.path, report.answered) == ("expand", 1)
    assert scene.hosts["r1"].does[-3:] == ["sleep", "wake", "finalize"]


def test_receivers_of_one_sync_at_different_places(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.transports["r2"] = THERE
    for version, other in enumerate(("rendezvous", "serialize", "rendezvous"), start=1):
        monkeypatch.setattr(module, "best_transport", lambda here, there, by=other, **_: "shm" if there == here else by)
        assert scene.works(version, "paused" if version == 3 else "serving").transports == {"shm": 1, other: 1}
    # Where one of two transports breaks, both are given back.
    scene.receivers["r2"].calls = failing("look", trouble)
    error, (first, _) = scene.fails(4)
    assert error.peer == "r2"
    assert "the disk is on fire" in str(first)


def test_a_link_between_machines_carries_no_shared_memory_to_a_receiver_beside_the_sender(gloo: None) -> None:
    with nothing_kept(), Listener(tcp_host="127.0.0.1", certificate=certificate()) as listener:
        scene = Scene(listener)
        assert scene.works(1).transports == {"rendezvous": 2}
        scene.sender.cache.close()


def test_the_base_is_published_where_it_is_equal(scene: Scene) -> None:
    scene.receivers["r1"].version, scene.receivers["r1"].routed = BASE, False
    names = scene.hosts["r1"].tensors
    report, received = scene.sync(BASE, "serving", "r1", gather=lambda: dict(names))
    assert (report.path, report.verified, received.path) == ("base", len(KINDS), "base")
    assert (scene.receivers["r1"].version, scene.receivers["r1"].routed) == (BASE, True)
    other = {**names, ("half", 0): names["half", 0] + 1}
    error, _ = scene.sync(BASE, "serving", "r1", gather=lambda: other)
    assert str(error).startswith(
        "the base with version -1 failed: r1's base weights differ from the trainer's: 1 of 6 tensors, half first; "
    )
    assert (error.peer, error.tensors) == ("r1", ("half",))
    other["one", 0] = names["one", 0] + 1
    error, _ = scene.sync(BASE, "serving", "r1", gather=lambda: other)
    assert "2 of 6 tensors, half first; " in str(error)


@pytest.mark.slow
def test_memory_is_kept_from_version_to_version(scene: Scene) -> None:
    seen = set()
    for version in range(1, 7):
        scene.works(version)
        seen.add(scene.sender.cache.segment(version).tensor.data_ptr())
        if version == 2:
            before = held()
    assert len(seen) == 2
    assert wait_for(lambda: held() == before)


def test_a_version_that_was_built_without_receivers_reaches_those_that_wake(scene: Scene) -> None:
    scene.sender.build(1, tensors(1))
    assert scene.sender.version == 1
    for name in scene.hosts:
        scene.hosts[name].sleep()
        report = scene.works(1, "asleep", name, gather=None)
        assert (report.path, report.verified) == ("expand", len(LAYOUT.specs))
    with pytest.raises(BadInput, match="version 1 cannot be built: version 1 exists"):
        scene.sender.build(1, tensors(1))
    assert scene.sender.version == 1


def test_an_expansion_needs_no_live_weights(scene: Scene) -> None:
    live = tensors(1)
    scene.works(1, "serving", "r2", gather=lambda: live)
    for tensor in live.values():
        tensor.untyped_storage().resize_(0)
    scene.hosts["r1"].sleep()
    scene.works(1, "asleep", "r1", gather=None)
    error, _ = scene.fails(2, "serving", "r2", gather=lambda: live)
    assert "the storage of small, half, eighth, large, one and 1 more is empty" in str(error)


def test_a_tensor_that_is_not_gathered(scene: Scene) -> None:
    scene.works(1)
    gone = {key: tensor for key, tensor in tensors(2).items() if key[0] != "small"}
    assert "small (shard 0) is missing" in str(scene.fails(2, gather=lambda: gone)[0])
    scene.works(3)


def test_bytes_that_are_not_those_of_the_live_weights_are_found(scene: Scene) -> None:
    class Stale(Bound):
        def pack(self, index: int, out: torch.Tensor, **how: Any) -> None:
            super().pack(index, out, **how)
            out[0] += index == 1

    scene.works(1)
    error, _ = scene.fails(2, gather=lambda: Stale(LAYOUT, tensors(2)))
    assert error.bucket == 1
    assert error.tensors[0] in str(error)
    scene.works(3)


# -- failures of a receiver ------------------------------------------------------------------------------------------------

STEPS = ("begin", "look", "verify", "apply_bucket", "apply", "teardown", "finalize", "publish")


@pytest.mark.drawn(4, of="steps")
@pytest.mark.parametrize("step", STEPS)
def test_a_receiver_that_fails_at_any_step(scene: Scene, step: str) -> None:
    """All receivers have their earlier version again, and the next sync works. At the last step all others have published."""
    version = 1
    scene.works(version)
    for state, after in itertools.product(("serving", "paused"), (False, True) if step != "publish" else (False,)):
        scene.receivers["r2"].calls = failing(step, trouble, after=after)
        error, (first, second) = scene.fails(version + 1, state)
        assert error.peer == "r2"
        assert "r2 failed: the disk is on fire" in str(error)
        assert isinstance(first, PeerFailed)
        assert "the sender gave up: r2 failed: the disk is on fire" in str(first)
        assert str(second) == "the disk is on fire"
        if state == "paused":
            assert not any(receiver.routed for receiver in scene.receivers.values())
        scene.receivers["r2"].calls = Call
        version += 2
        scene.works(version, state)


def test_a_refresh_that_fails_twice_and_then_works(scene: Scene) -> None:
    scene.works(1)
    for step in ("finalize", "look"):
        scene.receivers["r2"].calls = failing(step, trouble)
        scene.fails(2)
    scene.receivers["r2"].calls = Call
    scene.works(2)


@pytest.mark.parametrize(("step", "after"), [("publish", True), ("activate", False)])
def test_a_failure_after_the_publication_keeps_the_version_where_it_arrived(
    scene: Scene, step: str, *, after: bool
) -> None:
    scene.works(1)
    scene.receivers["r2"].calls = failing(step, trouble, after=after)
    error, first, _ = scene.sync(2)
    assert re.fullmatch(  # it may have left before or after it hears
        r"the refresh with version 2 failed: r2 failed: the disk is on fire \(waiting for activated?\); version 2 is already active",
        str(error),
    )
    assert scene.sender.version == 2
    assert isinstance(first, PeerFailed)
    assert (scene.receivers["r1"].version, scene.receivers["r1"].routed) == (2, True)
    assert scene.hosts["r1"].has(2)
    assert (scene.receivers["r2"].version, scene.hosts["r2"].has(1)) == (1, True)  # old weights, old version number
    scene.receivers["r2"].calls = Call
    scene.works(3)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["serving", "paused", "asleep"])
@pytest.mark.parametrize(("step", "after"), [("activate", False), ("publish", True)])
def test_a_replica_runs_one_version_whichever_of_its_ranks_fails(
    scene: Scene, step: str, state: str, *, after: bool
) -> None:
    """`r2` fails after the version is active: `r1`, of the same replica, goes back with it, and `r3` keeps the version."""
    scene.hosts["r3"], scene.transports["r3"] = Host(), HERE
    scene.receivers["r3"] = receiver_of("r3", scene.hosts["r3"], scene.listener.address)
    scene.replicas = {"r1": "one", "r2": "one", "r3": "other"}
    scene.works(1)
    version, gather = 2, {}
    if state == "asleep":
        version, gather = 1, {"gather": None}
        for host in scene.hosts.values():
            host.sleep()
    scene.receivers["r2"].calls = failing(step, trouble, after=after)
    error, *received = scene.sync(version, state, **gather)
    assert error.peer == "r2"
    for name in ("r1", "r2"):
        host, receiver = scene.hosts[name], scene.receivers[name]
        assert (receiver.version, receiver.routed) == (1, state == "serving"), name
        assert host.has(1) if state == "serving" else state == "paused" or host.does[-1] == "sleep", name
    assert (scene.receivers["r3"].version, scene.receivers["r3"].routed) == (version, True)
    assert scene.hosts["r3"].has(version)
    assert all(isinstance(one, KitError) for one in received)  # each hears that the sync failed
    assert "the sender gave up: r2 failed: the disk is on fire" in str(received[0])
    scene.receivers["r2"].calls = Call
    if state == "asleep":
        scene.works(1, state, "r1", "r2", gather=None)
    else:
        scene.works(3, state)


@pytest.mark.parametrize("replica", ["one", ""])
def test_a_sender_that_is_gone_as_it_activates_leaves_no_route_to_half_a_replica(
    scene: Scene, replica: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Leaves(Sending):
        def tell(self, kind: str, *given: Any, **message: Any) -> None:
            if kind != "end":
                super().tell(kind, *given, **message)
                return
            self.links["r1"].send({"kind": "end"})
            for link in self.links.values():
                link.close()
            raise KitError("the sender is gone")

    scene.replicas = dict.fromkeys(scene.hosts, replica)
    scene.works(1)
    monkeypatch.setattr("kit.sync.sender.Sending", Leaves)
    scene.sync(2)
    first, second = scene.receivers.values()
    assert (first.version, first.routed, scene.hosts["r1"].has(2)) == (2, True, True)
    assert (second.version, second.routed, scene.hosts["r2"].has(1)) == (1, not replica, True)


def test_an_expansion_after_a_refresh_that_failed(scene: Scene) -> None:
    """A waking replica is compared with the digests of the version that it gets, not of the one that failed."""
    scene.works(1)
    scene.receivers["r2"].calls = failing("finalize", trouble)
    scene.fails(2)
    scene.hosts["r1"].sleep()
    scene.works(1, "asleep", "r1", gather=None)


def test_an_expansion_that_fails_sleeps_again_and_one_that_could_not_wake_is_left_alone(scene: Scene) -> None:
    scene.works(1)
    host, receiver = scene.hosts["r1"], scene.receivers["r1"]

    def awake() -> None:
        raise KitError("this replica is awake already")

    host.wake = awake  # type: ignore[method-assign]
    error, _ = scene.fails(1, "asleep", "r1", gather=None)
    assert "awake already" in str(error)
    assert "sleep" not in host.does
    assert (receiver.routed, host.has(1)) == (True, True)
    del host.wake
    host.sleep()
    receiver.calls = failing("verify", trouble)
    scene.fails(1, "asleep", "r1", gather=None)
    assert host.does[-2:] == ["wake", "sleep"]
    assert not receiver.routed


def test_an_error_that_is_not_the_kits_is_reported_with_its_type_and_the_gate_opens(scene: Scene) -> None:
    scene.works(1)
    scene.receivers["r2"].calls = failing("finalize", lambda: KeyError("bias"))
    assert "r2 failed: KeyError: 'bias' (waiting for finalized)" in str(scene.fails(2)[0])
    host = scene.hosts["r2"]
    assert host.does.count("in") == host.does.count("out") == 2


def test_the_gate_opens_although_a_transport_breaks_at_its_close(scene: Scene) -> None:
    scene.works(1)
    scene.sender.transport = f"{__name__}:Breaking"
    error, *_ = scene.sync(2)
    assert "RuntimeError: destroy_process_group" in str(error)
    for host in scene.hosts.values():
        assert host.does.count("in") == host.does.count("out") == 2
    scene.sender.transport = "auto"
    scene.works(3)


class Breaking(Shm):
    """Gives back what it holds, then raises as a process group may."""

    def close(self) -> None:
        super().close()
        if self.ctx.role == "receiver":
            raise RuntimeError("destroy_process_group")


def test_all_transports_are_closed_although_one_breaks(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.transports["r2"] = THERE
    kinds = {HERE: f"{__name__}:Refusing", THERE: f"{__name__}:Noting"}
    monkeypatch.setattr(module, "best_transport", lambda _, there, **__: kinds[there])
    Noting.closed.clear()
    error, *_ = scene.sync(1)
    assert "it does not close" in str(error)
    assert Noting.closed == ["sender"]


class Refusing(Shm):
    def close(self) -> None:
        super().close()
        if self.ctx.role == "sender":
            raise KitError("it does not close")


class Noting(Shm):
    closed: list[str] = []  # noqa: RUF012 - what a test looks at

    def close(self) -> None:
        if self.ctx.role == "sender":
            self.closed.append("sender")
        super().close()


class Plain:
    """A user's transport without the kit's base class."""

    def __init__(self, ctx: TransportContext) -> None:
        self.ctx = ctx

    def send(self, index: int, buffer: torch.Tensor) -> None:
        for link in self.ctx.links.values():
            link.send({"kind": "bytes", "bucket": index})
            link.send_bytes(memoryview(buffer.numpy()))
        for link in self.ctx.links.values():
            link.expect("done")

    def receive(self, index: int, into: torch.Tensor) -> Any:
        assert self.ctx.sender.expect("bytes")[0]["bucket"] == index
        self.ctx.sender.receive_bytes(memoryview(into.numpy()))
        return into

    def done(self, index: int) -> None:
        self.ctx.sender.send({"kind": "done", "bucket": index})

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Short(Plain):
    def receive(self, index: int, into: torch.Tensor) -> Any:
        return super().receive(index, into)[:-1]


class Nothing(Plain):
    def receive(self, index: int, into: torch.Tensor) -> Any:
        super().receive(index, into)


class Half:
    def __init__(self, ctx: object) -> None: ...

    def send(self, index: int, buffer: torch.Tensor) -> None: ...

    def close(self) -> None: ...


class Pouring(Plain):
    """Its sender never listens: it sends until the receiver, which fails at once, is gone."""

    def send(self, index: int, buffer: torch.Tensor) -> None:
        while True:
            self.ctx.links["r2"].send_bytes(memoryview(bytes(2**16)))

    def receive(self, index: int, into: torch.Tensor) -> Any:
        raise ValueError("my own mistake")


def test_a_transport_of_ones_own_needs_no_base_class_and_its_mistakes_are_named(scene: Scene) -> None:
    scene.sender.transport = f"{__name__}:Plain"
    scene.works(1)
    for own, text in {
        "Short": r"r2 failed: receive returned torch\.uint8 of \[\d+\] for bucket 0 instead of torch\.uint8 of \[4096\]",
        "Nothing": r"r2 failed: receive returned NoneType for bucket 0 instead of torch\.uint8 of",
        "Half": r"Half: the object it returned lacks flush, receive, done",
        "Pouring": r"r2 failed: r2's end of the transport .*Pouring raised ValueError: my own mistake",
    }.items():
        scene.sender.transport = f"{__name__}:{own}"
        error, _ = scene.fails(2, "serving", "r2")
        assert re.search(text, str(error)), (own, str(error))
    scene.sender.transport = "auto"
    scene.works(2)


def test_what_cannot_be_undone_is_not_routed_to(scene: Scene) -> None:
    scene.works(1)
    host, receiver = scene.hosts["r2"], scene.receivers["r2"]

    def broken() -> None:
        raise KitError("no scales for half")

    host.finalize = broken  # type: ignore[method-assign]
    error, *_ = scene.sync(2)
    assert "r2 failed: no scales for half; the undo failed too, and this receiver has no route any more" in str(error)
    assert (receiver.version, receiver.routed) == (1, False)
    assert host.has(1)
    del host.finalize
    scene.works(3)


def test_who_reported_why_and_left_is_not_merely_gone(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """`r2` acknowledges every bucket and leaves before the sender says anything to it."""
    left = threading.Event()
    plain = Digests.table

    def late(self: Digests) -> dict[str, list[str]]:
        if threading.current_thread().name == "act 0":
            left.wait(10)
        return plain(self)

    monkeypatch.setattr(Digests, "table", late)

    def join() -> None:
        try:
            scene.receivers["r2"].join()
        finally:
            left.set()

    scene.receivers["r2"].calls = failing("store", trouble, after=True)
    targets = [target("r1"), target("r2")]
    error, *_ = at_once(lambda: scene.sender.sync(1, targets, lambda: tensors(1)), scene.receivers["r1"].join, join)
    assert "r2 failed: the disk is on fire" in str(error)


@pytest.mark.drawn(1, of="stalls")
@pytest.mark.parametrize("step", ["apply", "publish"])
def test_a_receiver_that_stalls_is_named_on_both_ends_in_one_deadline(scene: Scene, step: str) -> None:
    """`r1` waits longer than the sender, so it hears the reason. Two receivers that stall share one deadline."""
    scene.works(1)
    over = threading.Event()
    scene.sender.timeout_s = 2
    scene.receivers["r1"].timeout_s = 2
    stalling = type("Stalling", (Call,), {step: lambda *_: over.wait(20)})
    for name in ("r2", "r3"):
        scene.hosts[name], scene.transports[name] = Host(1), HERE
        scene.receivers[name] = receiver_of(name, scene.hosts[name], scene.listener.address, stalling)
        scene.receivers[name].version = 1

    def sync() -> Any:
        try:
            return scene.sender.sync(2, [target(name) for name in scene.receivers], lambda: tensors(2))
        finally:
            over.set()

    error, first, *_ = at_once(sync, *(receiver.join for receiver in scene.receivers.values()))
    what = {"apply": "applied", "publish": "published"}[step]
    assert f"r2, r3 did not answer within 2 s (waiting for {what}); version 1 stays active" in str(error)
    assert isinstance(first, PeerFailed)
    assert f"the sender gave up: r2, r3 did not answer within 2 s (waiting for {what})" in str(first)
    for name, receiver in scene.receivers.items():
        assert (receiver.version, receiver.routed, scene.hosts[name].has(1)) == (1, True, True), name


def test_a_receiver_that_is_late_hears_why_the_sender_has_left(scene: Scene) -> None:
    over = threading.Event()

    def sync() -> Any:
        try:
            return scene.sender.sync(2, [target("r1"), target("r2")], lambda: tensors(2))
        finally:
            over.set()

    scene.works(1)
    scene.hosts["r1"].finalize = lambda: over.wait(10)  # type: ignore[method-assign,assignment,return-value]
    scene.receivers["r2"].calls = failing("finalize", trouble)
    _, first, _ = at_once(sync, *(receiver.join for receiver in scene.receivers.values()))
    assert isinstance(first, PeerFailed), first
    assert "the sender gave up: r2 failed: the disk is on fire" in str(first)
    assert (scene.receivers["r1"].version, scene.hosts["r1"].has(1)) == (1, True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shm", "serialize"])
def test_what_was_on_its_way_when_the_sender_left_does_not_hide_why(scene: Scene, kind: str) -> None:
    """`r2` fails at once; `r1` reads on when all is over, with buckets still unread."""
    over = threading.Event()

    class Late(Call):
        def look(self, index: int, buffer: torch.Tensor) -> None:
            over.wait(10)
            super().look(index, buffer)

    def sync() -> Any:
        try:
            return scene.sender.sync(1, [target("r1"), target("r2")], lambda: tensors(1))
        finally:
            over.set()

    scene.sender.transport = kind
    scene.receivers["r1"].calls, scene.receivers["r2"].calls = Late, failing("look", trouble)
    _, first, _ = at_once(sync, *(receiver.join for receiver in scene.receivers.values()))
    assert isinstance(first, PeerFailed), first
    assert "the sender gave up: r2 failed: the disk is on fire" in str(first)


def test_wrong_bytes_name_bucket_tensors_and_receiver(scene: Scene) -> None:
    class Flips(Call):
        def look(self, index: int, buffer: torch.Tensor) -> None:
            if index == 1:
                buffer = buffer.clone()
                buffer[0] ^= 1
            super().look(index, buffer)

    scene.works(1)
    scene.receivers["r2"].calls = Flips
    error, _ = scene.fails(2)
    (name,) = error.tensors
    assert name == LAYOUT.specs[LAYOUT.buckets[1][0].spec].name
    assert (error.peer, error.bucket) == ("r2", 1)
    assert f"r2 failed: bucket 1 differs from what was sent: {name} (waiting for verified)" in str(error)


def test_a_tensor_that_is_not_sent_or_not_known_is_named(scene: Scene) -> None:
    scene.works(1)
    host = scene.hosts["r1"]
    host.tensors["extra", 0] = torch.zeros(3)
    error, _, _ = scene.sync(2)
    assert (error.peer, error.bucket, error.tensors) == ("r1", None, ("extra",))
    assert "r1 failed: extra (shard 0) is not sent" in str(error)
    del host.tensors["extra", 0]
    kept = host.tensors.pop(("half", 0))
    error, _, _ = scene.sync(2)
    assert (error.peer, error.tensors) == ("r1", ("half",))
    host.tensors["half", 0] = kept


# -- who calls, and when ---------------------------------------------------------------------------------------------------


def test_who_never_calls_is_named_to_those_who_did(scene: Scene) -> None:
    scene.sender.timeout_s = 0.3
    error, received = at_once(
        lambda: scene.sender.sync(1, [target("r1"), target("r2")], lambda: tensors(1)), scene.receivers["r1"].join
    )
    assert isinstance(error, SyncFailed)
    assert error.peer == "r2"
    assert "r2 did not answer within 0.3 s (waiting for a call)" in str(received)
    scene.sender.timeout_s = 5.0
    scene.works(1)


def test_a_receiver_that_called_and_gave_up_is_not_taken_for_itself(scene: Scene) -> None:
    """No sync heard the receiver that waited. Its old call must not count for the next sync."""
    receiver = scene.receivers["r1"]
    receiver.timeout_s = 0.05
    with pytest.raises(PeerSilent):
        receiver.join()
    receiver.timeout_s = 5.0
    scene.works(1)


def test_two_of_one_name(scene: Scene) -> None:
    with pytest.raises(BadInput, match="several receivers have the name r1: names must be unique"):
        scene.sender.sync(1, [target("r1"), target("r2"), target("r1")], lambda: tensors(1))
    first, second = threading.Event(), threading.Event()
    twin = receiver_of("r1", Host(), scene.listener.address, calling(second))
    scene.receivers["r1"].calls = calling(first)

    def later() -> Any:
        first.wait(5)
        return twin.join()

    def sync() -> Any:
        second.wait(5)
        return scene.sender.sync(1, [target("r1")], lambda: tensors(1))

    report, older, newer = at_once(sync, scene.receivers["r1"].join, later)
    assert isinstance(report, Report), report
    assert "a second receiver has the name r1" in str(older)
    assert newer.version == 1
    assert (scene.receivers["r1"].version, scene.receivers["r1"].routed, scene.hosts["r1"].has(0)) == (0, True, True)


def calling(called: threading.Event) -> type[Call]:
    """Return a kind of Call that sets an event when the listener has been called."""

    class Calling(Call):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            called.set()

    return Calling


def test_two_syncs_at_once_go_one_after_the_other(scene: Scene) -> None:
    """The second sync's receiver calls before the first sync's."""
    called, gathering = threading.Event(), threading.Event()
    scene.receivers["r2"].calls = calling(called)

    def gather() -> Any:
        gathering.set()
        return tensors(1)

    def first() -> Any:
        return scene.sender.sync(1, [target("r1")], gather)

    def second() -> Any:
        gathering.wait(5)
        return scene.sender.sync(2, [target("r2")], lambda: tensors(2))

    def join() -> Any:
        called.wait(5)
        return scene.receivers["r1"].join()

    given = at_once(first, second, join, scene.receivers["r2"].join)
    assert [each.version for each in given] == [1, 2, 1, 2]
    assert scene.hosts["r1"].has(1)
    assert scene.hosts["r2"].has(2)


def test_who_waits_too_long_for_another_sync_is_reported_for_which(scene: Scene) -> None:
    scene.sender.cache.timeout_s = 0.05
    with scene.sender.cache.held("the sync of version 1"):
        (error,) = at_once(lambda: scene.sender.sync(2, [target("r1")], lambda: tensors(2)))
    assert isinstance(error, SyncFailed)
    assert "0.05 s for the bucket cache, which is held for the sync of version 1 (MainThread); version -1 stays" in str(
        error
    )


def test_an_expansion_that_waited_until_its_version_was_old_is_refused(scene: Scene) -> None:
    """The version that is active when its turn comes counts, and no receiver is asked."""
    scene.works(1)
    gathering, waiting = threading.Event(), threading.Event()
    cache = scene.sender.cache
    plain = cache.held

    def heard(purpose: str, timeout_s: float | None = None) -> Any:
        if purpose == "the sync of version 1":
            waiting.set()
        return plain(purpose, timeout_s)

    cache.held = heard  # type: ignore[method-assign]

    def gather() -> Any:
        gathering.set()
        waiting.wait(5)
        return tensors(2)

    def late() -> Any:
        gathering.wait(5)
        return scene.sender.sync(1, [target("r1", state="asleep")])

    _, refused, _ = at_once(lambda: scene.sender.sync(2, [target("r2")], gather), late, scene.receivers["r2"].join)
    assert isinstance(refused, BadInput)
    assert "an expansion with version 1 is refused: the active version is 2" in str(refused)


def test_an_expansion_before_there_is_a_version_is_refused(scene: Scene) -> None:
    with pytest.raises(BadInput, match="an expansion with version 1 is refused: there is no copy of the base"):
        scene.sender.sync(1, [target("r1", state="asleep")])


# -- the dead --------------------------------------------------------------------------------------------------------------


def killed(folder: Path, transport: str, dies: str) -> dict[str, Any]:
    """Run three processes, of which one is killed in version 2, and return what the others report. No process is left."""
    meeting = secrets.token_hex(8)
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.sync.ranks.service", str(folder), meeting]
    started = {
        who: subprocess.Popen([*command, who, transport, dies], cwd=ROOT, env=env)
        for who in ("sender", "receiver 1", "receiver 2")
    }
    victim = "sender" if dies == "sender" else "receiver 2"
    try:
        codes = {who: process.wait(60) for who, process in started.items()}
    finally:
        for process in started.values():
            process.kill()
            process.wait()
    assert codes == dict.fromkeys(started, 0) | {victim: -9}
    text = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert set(text) == set(started) - {victim}
    for each in text.values():
        assert each["seconds"] < 15  # the deadline is 20 s
        assert each["left"] == {}
    return text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "dies"),
    [
        ("shm", "early"),
        pytest.param("serialize", "late", marks=pytest.mark.slow),
        pytest.param("rendezvous", "early", marks=pytest.mark.slow),
    ],
)
def test_a_receiver_that_is_killed_is_named_and_the_others_go_back(transport: str, dies: str, tmp_path: Path) -> None:
    text = killed(tmp_path, transport, dies)
    name, words, peer = text["sender"]["error"]
    assert (name, peer) == ("SyncFailed", "receiver 2"), words
    assert words.startswith("the refresh with version 2 failed: receiver 2 is gone (waiting for ")
    assert (text["sender"]["version"], text["sender"]["copies"] <= 2) == (1, True)
    other = text["receiver 1"]
    assert (other["version"], other["routed"], other["old"]) == (1, True, True)
    assert "receiver 2 is gone" in other["error"][1] or transport == "rendezvous", other["error"]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "serialize"])
def test_receivers_of_a_sender_that_is_killed_before_it_publishes_go_back(transport: str, tmp_path: Path) -> None:
    for each in killed(tmp_path, transport, "sender").values():
        assert each["error"] == [
            "PeerGone",
            "the sender is gone (waiting for the sender's next step)",
            "the sender",
        ]
        assert (each["version"], each["routed"], each["old"]) == (1, True, True)
        assert each["does"] == ["in", "finalize", "out", "in", "finalize", "finalize", "out"]  # undone inside the gate
