"""Buckets arrive as they were packed, by every transport that two ends in one process can try; the sender keeps its distance."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kit.errors import KitError
from kit.sync.link import Listener, PeerSilent, call
from kit.sync.memory import segments
from kit.sync.transports.base import DEPTH, Transport, TransportContext
from kit.sync.transports.groups import Rendezvous
from kit.sync.transports.serialize import Serialize
from kit.sync.transports.shm import Shm

SIZES = [4096, 1024, 512, 4096, 0, 2048]
Act = Callable[[Transport], Any]


def bucket(index: int) -> torch.Tensor:
    return torch.randint(0, 256, (SIZES[index],), dtype=torch.uint8, generator=torch.Generator().manual_seed(index))


def between(kind: type[Transport], send: Act, *receive: Act, timeout_s: float = 5.0) -> list[Any]:
    """A sender and receivers, each on a thread; what they gave, or raised."""
    names = [f"receiver {number}" for number in range(len(receive))]
    done: list[Any] = [None] * (len(receive) + 1)

    def end(place: int, act: Act) -> None:
        shared = {
            "sizes": SIZES,
            "device": torch.device("cpu"),
            "timeout_s": timeout_s,
            "place": place,
            "config": {"size": len(done)},
        }
        try:
            if place == 0:
                links = listener.accept(names, timeout_s)
            else:
                links = {"sender": call(listener.address, names[place - 1], peer="sender", timeout_s=timeout_s)}
            context = TransportContext(
                role="receiver" if place else "sender", name=f"end {place}", links=links, **shared
            )
            with kind(context) as transport:
                done[place] = act(transport)
            for link in links.values():
                link.close()
        except KitError as error:
            done[place] = error

    with Listener() as listener:
        threads = [threading.Thread(target=end, args=(place, act)) for place, act in enumerate([send, *receive])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    return done


def send_all(transport: Transport) -> None:
    for index in range(len(SIZES)):
        transport.space(index).copy_(bucket(index))
        transport.send(index)
    transport.flush()


def receive_all(transport: Transport) -> list[torch.Tensor]:
    got = []
    for index in range(len(SIZES)):
        got.append(transport.receive(index).clone())
        transport.done(index)
    return got


@pytest.mark.parametrize("kind", [Shm, Serialize, Rendezvous])
@pytest.mark.parametrize("receivers", [1, 3])
def test_every_byte_arrives(kind: type[Transport], receivers: int) -> None:
    _, *got = between(kind, send_all, *[receive_all] * receivers)
    for received in got:
        assert all(torch.equal(one, bucket(index)) for index, one in enumerate(received))
        assert len(received) == len(SIZES)


def test_the_sender_waits_for_the_slowest() -> None:
    """It may be DEPTH buckets ahead of a receiver that does not say that it is done, and no more."""
    ahead: list[int] = []
    given_up = threading.Event()

    def eager(transport: Transport) -> None:
        for index in range(len(SIZES)):
            try:
                transport.space(index).copy_(bucket(index))
            except KitError:
                given_up.set()
                raise
            transport.send(index)
            ahead.append(index)

    def idle(transport: Transport) -> None:
        for index in range(DEPTH):
            transport.receive(index)
        given_up.wait(10)

    sender, _ = between(Serialize, eager, idle, timeout_s=0.5)
    assert isinstance(sender, PeerSilent)
    assert str(sender) == "receiver 0 did not answer within 0.5 s: done was awaited"
    assert ahead == list(range(DEPTH))


def test_another_bucket_than_the_awaited_one_is_refused() -> None:
    def skips(transport: Transport) -> None:
        transport.space(1).copy_(bucket(1))
        transport.send(1)

    _, receiver = between(Serialize, skips, lambda transport: transport.receive(0))
    assert str(receiver) == "sender sent 1024 bytes of bucket 1 where bucket 0 of 4096 was awaited"
    _, receiver = between(Shm, skips, lambda transport: transport.receive(0))
    assert str(receiver) == "sender sent bucket 1 where bucket 0 was awaited"


def test_no_segment_is_left() -> None:
    before = segments()
    between(Shm, send_all, receive_all, receive_all)
    assert segments() == before
