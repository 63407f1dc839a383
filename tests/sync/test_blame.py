"""The peer that failed is named even where a transport raises an error of its own that does not name it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kit.errors import KitError
from kit.sync.link import Listener, PeerFailed
from kit.sync.receiver import CONSEQUENCE_S, Call, TransportFailed
from kit.sync.sender import Sender, SyncFailed
from kit.sync.transports import GRACE_S, make
from tests.sync.ranks.service import Host, at_once, receiver_of, sender_of, target, tensors

WORDS = "connection reset by somebody"


class Scene:
    """A sender and two receivers, with a user's transport."""

    def __init__(self, listener: Listener) -> None:
        self.sender: Sender = sender_of(listener, transport="serialize")
        self.receivers = {name: receiver_of(name, Host(), listener.address) for name in ("r1", "r2")}

    def fails(self) -> tuple[SyncFailed, list[Any]]:
        error, *others = at_once(
            lambda: self.sender.sync(1, [target(name) for name in self.receivers], lambda: tensors(1)),
            *(receiver.join for receiver in self.receivers.values()),
        )
        assert isinstance(error, SyncFailed), error
        assert "version -1 stays active" in str(error)
        return error, others


@pytest.fixture
def scene() -> Iterator[Scene]:
    with Listener() as listener:
        made = Scene(listener)
        yield made
        made.sender.cache.close()


def own(**calls: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `make` whose transports have some calls replaced; each replacement gets the original first."""

    def made(*given: Any, **named: Any) -> Any:
        transport = make(*given, **named)
        for name, act in calls.items():
            plain = getattr(transport, name)
            setattr(transport, name, lambda *args, act=act, plain=plain: act(transport, plain, *args))
        return transport

    return made


def raises(*_: Any) -> None:
    raise OSError(WORDS)


def swallows(_: Any, plain: Callable[..., Any], *args: Any) -> None:
    """Drop the links' error, and raise one of its own."""
    try:
        plain(*args)
    except KitError:
        raise OSError(WORDS) from None


@pytest.mark.parametrize("kind", ["shm", "serialize"])
def test_a_receiver_whose_transport_raises_is_named(scene: Scene, kind: str) -> None:
    """Its link may still hold messages of later buckets, or their raw bytes."""

    def second(transport: Any, plain: Callable[..., Any], index: int, into: Any) -> Any:
        if index:
            while not transport.ctx.sender.waits():
                pass
            raises()
        return plain(index, into)

    scene.sender.transport = kind
    scene.receivers["r2"].make = own(receive=second)
    error, (first, second) = scene.fails()
    assert error.peer == "r2"
    assert f"r2 failed: r2's end of the transport {kind} raised OSError: {WORDS}" in str(error)
    assert isinstance(second, TransportFailed)
    assert isinstance(second.__cause__, OSError)
    assert "the sender gave up: r2 failed" in str(first)


def test_a_sender_whose_transport_swallows_what_receivers_say_names_the_one_that_failed(scene: Scene) -> None:
    scene.receivers["r2"].make = own(receive=raises)
    scene.sender.make = own(send=swallows, flush=swallows)
    error, _ = scene.fails()
    assert error.peer == "r2"


@pytest.mark.parametrize("call", ["send", "flush"])
def test_a_transport_that_raises_with_nobody_else_to_blame(scene: Scene, call: str) -> None:
    scene.sender.make = own(**{call: raises})
    error, (first, _) = scene.fails()
    assert error.peer is None
    assert f"the sender's end of the transport serialize raised OSError: {WORDS}" in str(error)
    assert isinstance(error.__cause__, KitError)
    assert isinstance(error.__cause__.__cause__, OSError)  # the cause keeps its traceback
    assert "the sender gave up" in str(first)


def test_a_receiver_whose_transport_raises_because_the_sender_gave_up_tells_the_senders_reason(scene: Scene) -> None:
    def late(transport: Any, plain: Callable[..., Any], index: int, into: Any) -> Any:
        if index:
            while not transport.ctx.sender.waits():
                pass
            raise OSError("the other end is gone")
        return plain(index, into)

    def fails(_: Any, plain: Callable[..., Any], index: int, buffer: Any) -> None:
        if index:
            raise OSError(WORDS)
        plain(index, buffer)

    scene.sender.make = own(send=fails)
    for receiver in scene.receivers.values():
        receiver.make = own(receive=late)
    _, others = scene.fails()
    for error in others:
        assert isinstance(error, PeerFailed)
        assert WORDS in str(error)
        assert isinstance(error.__cause__, TransportFailed)


def test_a_reason_that_the_transport_has_read_is_not_lost_while_the_receiver_still_closes(scene: Scene) -> None:
    ended = threading.Event()

    def late(_: Any, plain: Callable[..., Any]) -> None:
        ended.wait(10)
        plain()

    sync = scene.sender.sync

    def ends(*args: Any) -> Any:
        try:
            return sync(*args)
        finally:
            ended.set()

    scene.sender.sync = ends  # type: ignore[method-assign]
    scene.receivers["r2"].make = own(receive=raises, close=late)
    scene.sender.make = own(send=swallows, flush=swallows)
    error, _ = scene.fails()
    assert error.peer == "r2"


def test_a_receiver_whose_transport_breaks_because_of_another_is_not_blamed(scene: Scene) -> None:
    """As in a process group: whoever leaves breaks it for all. r1 is asked before r2."""
    left = threading.Event()

    def leaves(_: Any, plain: Callable[..., Any]) -> None:
        plain()
        left.set()

    def breaks(*_: Any) -> None:
        left.wait(10)
        raise RuntimeError("connection closed by peer")

    scene.sender.transport = "shm"
    scene.receivers["r2"].make = own(receive=raises, close=leaves)
    scene.receivers["r1"].make = own(done=breaks)
    scene.sender.make = own(flush=breaks)
    error, (first, _) = scene.fails()
    assert error.peer == "r2"
    assert "the sender gave up: r2 failed" in str(first)


def test_the_others_hear_who_is_gone(scene: Scene) -> None:
    class Leaves(Call):
        def store(self, message: dict[str, Any]) -> None:
            self.link.close()
            raise OSError(WORDS)

    scene.receivers["r2"].calls = Leaves
    error, (first, _) = scene.fails()
    assert error.peer == "r2"
    assert "the sender gave up: r2 is gone" in str(first)


def test_a_receiver_waits_for_the_reason_longer_than_the_sender_needs_for_it() -> None:
    assert CONSEQUENCE_S > GRACE_S
