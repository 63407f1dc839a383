"""Buckets arrive as packed, over every transport that two ends in one process can try; the sender does not run too far ahead."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kit.errors import BadInput, KitError
from kit.sync import transports
from kit.sync.cache import KeptMappings, Segment
from kit.sync.groups import Grouped
from kit.sync.link import Listener, PeerFailed, PeerGone, PeerSilent
from kit.sync.transports import DEPTH, GRACE_S, NAMES, Ipc, RankPlace, Transport, best_transport, by_name
from tests.holdings import memory_files
from tests.sync.ranks.transports import SIZES, Act, as_receiver, as_sender, bucket, context, receive, send


def between(kind: Any, send: Act, *receive: Act, timeout_s: float = 5.0, **more: Any) -> list[Any]:
    """Run a sender and receivers, each on a thread; return their results or errors."""
    names = [f"receiver {number}" for number in range(len(receive))]
    done: list[Any] = [None] * (len(receive) + 1)

    def end(place: int, act: Act) -> None:
        try:
            if place == 0:
                done[0] = as_sender(kind, listener, names, timeout_s, act, place=0, **more)
            else:
                done[place] = as_receiver(kind, listener.address, names[place - 1], timeout_s, act, place=place, **more)
        except KitError as error:
            done[place] = error.with_traceback(None)

    with Listener() as listener:
        threads = [threading.Thread(target=end, args=(place, act)) for place, act in enumerate([send, *receive])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
    return done


def mapped() -> int:
    """Count the segments that are held by more than an error's frames."""
    gc.collect()
    return len(memory_files())


@pytest.mark.parametrize("kind", ["shm", "serialize", "rendezvous"])
@pytest.mark.parametrize("receivers", [1, 3])
def test_every_byte_arrives(kind: str, receivers: int) -> None:
    before = mapped()
    _, *differ = between(kind, send, *[receive] * receivers)
    assert differ == [[]] * receivers
    assert mapped() == before


def test_shared_memory_is_not_copied() -> None:
    """A receiver's bucket is the sender's memory: a later write shows there."""
    written = threading.Event()

    def writes(transport: Transport) -> None:
        send(transport)
        assert transport.ctx.segment is not None
        transport.ctx.segment.tensor.fill_(7)
        written.set()

    def reads(transport: Transport) -> set[int]:
        got = []
        for index, size in enumerate(SIZES):
            got.append(transport.receive(index, torch.zeros(size, dtype=torch.uint8)))
            transport.done(index)
        assert written.wait(5)
        return {value for one in got for value in one.unique().tolist()}

    assert between("shm", writes, reads)[1] == {7}


def test_mappings_that_are_kept_are_used_again_and_not_too_many() -> None:
    before, kept = mapped(), KeptMappings()
    segments_ = [Segment(4096) for _ in range(3)]
    first, second, again, third = (kept.attach(os.dup(segments_[place].fd)) for place in (0, 1, 0, 2))
    assert first is again
    assert first.tensor.data_ptr() == again.tensor.data_ptr()
    assert first is not second
    with pytest.raises(BadInput, match="closed"):  # the least recently used one
        _ = second.tensor
    kept.close()
    for segment in [*segments_, third]:
        segment.close()
    del first, second, again, third, segments_, segment
    assert mapped() == before


def test_a_kept_mapping_shows_the_next_syncs_bytes() -> None:
    before, kept = mapped(), KeptMappings()

    def twice(kind: str) -> list[Any]:
        return between(kind, send, receive, kept=kept)[1:]

    assert [twice("shm"), twice("shm")] == [[[]], [[]]]
    assert mapped() == before + 2  # each sync here has its own segment
    kept.close()
    assert mapped() == before


@pytest.mark.parametrize("kind", ["serialize", "rendezvous"])
def test_other_transports_fill_what_they_are_given(kind: str) -> None:
    def takes(transport: Transport) -> bool:
        into = torch.zeros(SIZES[0], dtype=torch.uint8)
        got = transport.receive(0, into)
        transport.done(0)
        receive(transport, range(1, len(SIZES)))
        return got.data_ptr() == into.data_ptr() and torch.equal(into, bucket(0))

    assert between(kind, send, takes)[1] is True


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "depth"), [("serialize", DEPTH), ("rendezvous", DEPTH), ("shm", transports.MESSAGES)])
def test_the_sender_waits_for_the_slowest(kind: str, depth: int) -> None:
    """The sender gets `depth` buckets ahead of a receiver that does not report done, and no further."""
    sent: list[int] = []
    given_up = threading.Event()
    many = {"sizes": [512] * (depth + 2), "starts": [0] * (depth + 2)}

    def eager(transport: Transport) -> None:
        assert transport.ctx.segment is not None
        try:
            for index in range(depth + 2):
                transport.send(index, transport.ctx.segment.tensor[:512])
                sent.append(index)
        finally:
            given_up.set()

    def idle(transport: Transport) -> None:
        for index in range(depth):
            transport.receive(index, torch.zeros(512, dtype=torch.uint8))
        given_up.wait(10)

    sender, _ = between(kind, eager, idle, timeout_s=2.0, **many)
    assert isinstance(sender, PeerSilent)
    assert str(sender) == "receiver 0 did not answer within 2 s (waiting for done)"
    assert sent == list(range(depth))


def test_another_bucket_than_the_awaited_one_is_refused() -> None:
    def skips(transport: Transport) -> None:
        send(transport, [1])

    def takes(transport: Transport) -> None:
        receive(transport, [0])

    assert str(between("serialize", skips, takes)[1]) == (
        f"the sender sent {SIZES[1]} bytes of bucket 1 instead of 4096 bytes of bucket 0"
    )
    assert str(between("shm", skips, takes)[1]) == "the sender sent bucket 1 instead of bucket 0"


def test_a_segment_that_is_too_small_is_refused() -> None:
    def short(ctx: Any) -> Transport:
        with closing(Segment(4096)) as segment:
            return transports.Shm(context("sender", ctx.links, 5.0, segment=segment))

    class Ends:
        def __call__(self, ctx: Any) -> Transport:
            return short(ctx) if ctx.role == "sender" else transports.Shm(ctx)

    before = mapped()
    _, receiver = between(Ends(), lambda _: None, receive)
    assert str(receiver).startswith("the sender sent a segment of 4096 bytes, but the buckets need ")
    assert mapped() == before


@pytest.mark.parametrize("kind", ["shm", "serialize", "rendezvous"])
def test_a_receiver_that_goes_is_named(kind: str) -> None:
    def leaves(transport: Transport) -> None:
        receive(transport, [0])

    sender, *_ = between(kind, send, leaves, receive)
    assert isinstance(sender, PeerGone)
    assert sender.peer == "receiver 0"


def test_who_waits_in_the_group_hears_why_the_sender_gave_up() -> None:
    """The reason on the link counts, not the error of the broken group."""

    def gives_up(transport: Transport) -> None:
        send_one = transport.ctx.segment
        assert send_one is not None
        transport.send(0, send_one.tensor[: SIZES[0]])
        for link in transport.ctx.links.values():
            link.send({"kind": "failed", "why": "the disk is full"})

    _, receiver = between("rendezvous", gives_up, receive)
    assert isinstance(receiver, PeerFailed)
    assert str(receiver).startswith("the sender failed: the disk is full")


def test_who_is_gone_comes_before_who_failed_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Receiver 0 complains, but receiver 1, which is asked later, is the one that left."""
    left, complained, heard = threading.Event(), threading.Event(), threading.Event()

    def complains(transport: Transport) -> None:
        transport.ctx.sender.send({"kind": "failed", "why": "the group broke"})
        complained.set()
        heard.wait(5)

    def waits(transport: Transport) -> None:
        left.wait(5)
        complained.wait(5)
        try:
            transport.wait_for(0)
        finally:
            heard.set()

    def leaves(transport: Transport) -> None:
        transport.ctx.sender.close()
        left.set()

    sender, *_ = between("shm", waits, complains, leaves)
    assert isinstance(sender, PeerGone)
    assert sender.peer == "receiver 1"


def test_who_says_why_and_leaves_is_not_just_gone() -> None:
    def complains(transport: Transport) -> None:
        receive(transport, [0])
        transport.ctx.sender.send({"kind": "failed", "why": "the disk is full"})

    sender, _ = between("serialize", send, complains)
    assert isinstance(sender, PeerFailed)
    assert sender.message["why"] == "the disk is full"


@pytest.mark.parametrize(
    ("receiver", "expected"),
    [
        (RankPlace("a", 0, "GPU-1"), "ipc"),
        (RankPlace("a", 1, "GPU-1"), "ipc"),
        (RankPlace("a", 0, "GPU-2"), "shm"),
        (RankPlace("a", 1), "shm"),
        (RankPlace("b", 0, "GPU-1"), "broadcast"),
        (RankPlace("b", 1, "GPU-1"), "rendezvous"),
    ],
)
def test_the_choice(receiver: RankPlace, expected: str) -> None:
    assert best_transport(RankPlace("a", 0, "GPU-1"), receiver) == expected


def test_hosts_without_gpus_share_memory() -> None:
    assert best_transport(RankPlace("a", 0), RankPlace("a", 0)) == "shm"
    assert best_transport(RankPlace("a", 0), RankPlace("a", 0), fds=False) == "rendezvous"


def test_names() -> None:
    for name in NAMES:
        assert issubclass(by_name(name), Transport)  # type: ignore[arg-type]
    assert by_name("kit.sync.transports:Transport") is Transport
    with pytest.raises(BadInput, match=r"unknown transport 'telepathy': use shm, broadcast, .* or module:attr"):
        by_name("telepathy")
    with pytest.raises(BadInput, match=r"transport kit\.sync:no cannot be loaded on this rank: module 'kit.sync'"):
        by_name("kit.sync:no")
    with pytest.raises(BadInput, match="cannot be called with a TransportContext"):
        by_name("kit.sync.transports:DEPTH")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_handles_without_a_gpu() -> None:
    with pytest.raises(BadInput, match="ipc shares GPU memory, but sender is on cpu: use shm"):
        Ipc(context("sender", {}, 1.0))


def test_a_peer_that_breaks_the_group_and_leaves_later_is_named() -> None:
    """On a busy machine its link closes long after the group's connection."""

    def leaves(transport: Transport) -> None:
        group, transport.group = transport.group, None
        group.shutdown()
        del group
        gc.collect()
        threading.Event().wait(2 * GRACE_S)
        raise KitError("out of memory")

    _, receiver = between("rendezvous", leaves, receive)
    assert isinstance(receiver, PeerGone)
    assert receiver.peer == "the sender"


@pytest.mark.parametrize(
    ("ranks", "silent"), [((0, 1), "the sender"), ((0, 1, 2), "the sender or a receiver in between")]
)
def test_a_receiver_names_others_only_where_there_are_some(ranks: tuple[int, ...], silent: str) -> None:
    ctx = SimpleNamespace(role="receiver", ranks=ranks, sender=SimpleNamespace(peer="the sender"), timeout_s=2.0)
    group = cast("Grouped", SimpleNamespace(ctx=ctx, trouble=lambda _: None))
    error = Grouped.explained(group, "bucket 1", "Timed out", 1)
    assert str(error).startswith(f"{silent} did not answer within 2 s")
