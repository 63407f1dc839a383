"""Messages, bytes and descriptors arrive; a peer that is gone or silent is named; strangers are turned away."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from kit.errors import KitError
from kit.sync.link import HEADER, Link, Listener, PeerGone, PeerSilent, PeerTampered, call
from kit.tls import make_certificate
from tests.faults.test_strangers import certificate, shake_hands_and_leave

Pair = tuple[Link, Link]


def over_tcp(host: str = "127.0.0.1") -> Listener:
    return Listener(tcp_host=host, certificate=certificate())


@pytest.fixture(params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """The sender's and the receiver's end of a link."""
    with over_tcp() if request.param == "tcp" else Listener() as listener:
        links: dict[str, Link] = {}
        thread = threading.Thread(target=lambda: links.update(listener.accept(["receiver 1"], 5)))
        thread.start()
        theirs = call(listener.address, "receiver 1", peer="sender", timeout_s=5)
        thread.join()
    theirs.wait_at_most(0.3)
    links["receiver 1"].timeout_s = 0.3
    with links["receiver 1"], theirs:
        yield links["receiver 1"], theirs


def test_messages_in_order_both_ways(pair: Pair) -> None:
    mine, theirs = pair
    for number in range(3):
        mine.send({"kind": "bucket", "number": number})
    theirs.send({"kind": "done", "text": "ü" * 10_000})
    assert [theirs.receive()[0]["number"] for _ in range(3)] == [0, 1, 2]
    assert len(mine.expect("done")[0]["text"]) == 10_000


def test_an_end_is_seen_before_what_was_sent_is_read(pair: Pair) -> None:
    mine, theirs = pair
    mine.send({"kind": "bucket", "number": 0})
    assert not theirs.ends(0.0)
    mine.close()
    assert theirs.ends(5.0)
    assert theirs.expect("bucket")[0]["number"] == 0


def test_bytes(pair: Pair) -> None:
    mine, theirs = pair
    data = os.urandom(3_000_000)
    thread = threading.Thread(target=lambda: mine.send_bytes(memoryview(data)))
    thread.start()
    got = bytearray(len(data))
    theirs.receive_bytes(memoryview(got))
    thread.join()
    assert got == data


def test_what_is_not_awaited_is_reported_with_its_reason(pair: Pair) -> None:
    mine, theirs = pair
    mine.send({"kind": "failed", "why": "bucket 3 is torn"})
    with pytest.raises(KitError, match=r"sender failed: bucket 3 is torn \(waiting for bucket\)"):
        theirs.expect("bucket")


def test_a_message_that_is_too_large_says_its_size(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kit.sync.link.LIMIT", 2 << 20)
    with pytest.raises(KitError, match="a message of 3 MiB to receiver 1 exceeds the limit of 2 MiB"):
        pair[0].send({"kind": "x" * (3 << 20)})


def test_who_closes_is_gone(pair: Pair) -> None:
    mine, theirs = pair
    theirs.close()
    with pytest.raises(PeerGone, match=r"receiver 1 is gone \(waiting for an answer\)"):
        mine.receive("an answer")


def test_who_says_nothing_is_silent(pair: Pair) -> None:
    _, theirs = pair
    with pytest.raises(PeerSilent, match=r"sender did not answer within 0\.3 s \(waiting for bucket\)"):
        theirs.expect("bucket")


def test_descriptors() -> None:
    a, b = socket.socketpair()
    fd = os.memfd_create("test")
    os.write(fd, b"shared")
    with Link(a, "b", 1) as mine, Link(b, "a", 1) as theirs:
        mine.send({"kind": "segment"}, [fd])
        _, (got,) = theirs.expect("segment")
        assert os.pread(got, 6, 0) == b"shared"
        os.close(got)
        mine.send({"kind": "other"}, [fd])
        before = set(Path("/proc/self/fd").iterdir())
        with pytest.raises(KitError, match="'other'"):
            theirs.expect("segment")
        assert set(Path("/proc/self/fd").iterdir()) <= before  # an unwanted descriptor is closed
    os.close(fd)


@pytest.mark.parametrize("pair", ["tcp"], indirect=True)
def test_descriptors_are_refused_between_machines_and_nothing_leaves_unencrypted(pair: Pair) -> None:
    mine, theirs = pair
    with pytest.raises(KitError, match="descriptors cannot be sent to receiver 1"):
        mine.send({"kind": "segment"}, [0])
    with pytest.raises(NotImplementedError):
        socket.send_fds(mine._sock, [b"plain"], [0])
    with pytest.raises(NotImplementedError):
        mine._sock.send(b"plain")
    mine.send({"kind": "begin"})
    theirs.expect("begin")


ADDRESSES = Path("/proc/net/if_inet6")
WITHOUT_IPV6 = pytest.mark.skipif(not ADDRESSES.exists() or not ADDRESSES.read_text(), reason="this box has no IPv6")


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=WITHOUT_IPV6)])
def test_a_stranger_that_speaks_tls_and_leaves_does_not_end_the_listener(host: str) -> None:
    with over_tcp(host) as listener, ThreadPoolExecutor(2) as pool:
        stranger = pool.submit(shake_hands_and_leave, (host, listener.address["port"]))
        with pytest.raises(PeerSilent):
            listener.accept(["receiver 1"], 0.3)
        stranger.result()
        calling = pool.submit(call, listener.address, "receiver 1", peer="sender", timeout_s=5)
        with listener.accept(["receiver 1"], 5)["receiver 1"], calling.result():
            pass


def test_strangers_and_those_who_do_not_come() -> None:
    with over_tcp() as listener, ThreadPoolExecutor(3) as pool:  # a call returns once it is answered
        with socket.create_connection((listener.address["host"], listener.address["port"])) as odd:
            odd.sendall(HEADER.pack(2) + b"[]")  # not a message of the kit
        addresses = {"receiver 1": {**listener.address, "secret": "nö"}} | dict.fromkeys(
            ["receiver 7", "receiver 2"], listener.address
        )
        calls = [pool.submit(call, address, name, peer="sender", timeout_s=5) for name, address in addresses.items()]
        with pytest.raises(PeerSilent, match=r"receiver 1 did not answer within 1 s \(waiting for a call\)"):
            listener.accept(["receiver 1", "receiver 2"], 1)
        wrong, other, right = (each.result() for each in calls)
        with wrong, right, other:
            with pytest.raises(PeerGone):
                wrong.receive()
            with pytest.raises(KitError, match="sender failed: receiver 1 did not answer within"):
                right.expect("begin")
            listener.await_calls(["receiver 7"], 5)  # it called early, and is not let in yet
            (kept,) = listener.accept(["receiver 7"], 0.1).values()
            with kept:
                kept.send({"kind": "begin"})
                other.expect("begin")


@pytest.mark.parametrize("words", [b"", HEADER.pack(40), HEADER.pack(40) + b"{"])
def test_silent_strangers_delay_no_receiver(words: bytes) -> None:
    with over_tcp() as listener, contextlib.ExitStack() as strangers, ThreadPoolExecutor(1) as pool:
        for place in (("127.0.0.1", listener.address["port"]), "\0" + listener._socks[0].getsockname()[1:].decode()):
            silent = socket.socket(socket.AF_UNIX if isinstance(place, str) else socket.AF_INET)
            strangers.enter_context(silent).connect(place)
            silent.sendall(words)
        calling = pool.submit(call, listener.address, "receiver 1", peer="sender", timeout_s=4)
        with listener.accept(["receiver 1"], 20)["receiver 1"], calling.result():
            pass
        with pytest.raises(PeerSilent):
            listener.accept(["receiver 2"], 0.1)


@pytest.mark.parametrize("words", [HEADER.pack(2**20), HEADER.pack(50_000) + b"[" * 50_000, HEADER.pack(2) + b"[]"])
def test_a_stranger_with_a_wrong_first_message_is_turned_away(words: bytes) -> None:
    with Listener() as listener, socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(listener._socks[0].getsockname())
        stranger.sendall(words)
        with pytest.raises(PeerSilent):
            listener.accept(["receiver 1"], 0.1)
        assert stranger.recv(1) == b""


def test_strangers_that_send_byte_by_byte_do_not_move_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock takes it one second on, and there is always one more byte."""
    now = itertools.count()
    monkeypatch.setattr("kit.sync.link.FIRST_S", math.inf)
    monkeypatch.setattr("kit.sync.link.time", SimpleNamespace(monotonic=lambda: next(now)))
    with Listener() as listener, socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(listener._socks[0].getsockname())
        stranger.sendall(b".")
        monkeypatch.setattr(listener, "_hear", lambda _: None)
        with pytest.raises(PeerSilent):
            listener.accept(["receiver 1"], 60.0)
        assert next(now) < 100


def test_a_stranger_that_says_nothing_is_turned_away_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kit.sync.link.FIRST_S", -1.0)
    with Listener() as listener, socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(listener._socks[0].getsockname())
        for _ in range(2):
            listener.accept([], 0.1)
        assert stranger.recv(1) == b""


def test_a_caller_that_has_not_said_its_name_counts_as_waiting() -> None:
    with Listener() as listener, socket.socket(socket.AF_UNIX) as caller:
        caller.connect(listener._socks[0].getsockname())
        assert listener.accept([], 0.1) == {}
        assert listener.waiting == 1


def test_another_certificate_is_refused() -> None:
    with over_tcp() as listener, ThreadPoolExecutor(1) as pool:
        address = {**listener.address, "certificate": make_certificate().fingerprint}
        calling = pool.submit(call, address, "receiver 1", peer="sender", timeout_s=5)
        with pytest.raises(PeerSilent):
            listener.accept(["receiver 1"], 0.5)
        with pytest.raises(PeerTampered, match=r"the connection to sender is broken: .*wrong key \(waiting for a conn"):
            calling.result()


@pytest.mark.parametrize("pair", ["tcp"], indirect=True)
def test_what_somebody_else_wrote_into_the_connection_is_named_at_both_ends(pair: Pair) -> None:
    mine, theirs = pair
    mine.send({"kind": "begin"})
    theirs.expect("begin")
    record = bytes([23, 3, 3, 0, 32]) + os.urandom(32)  # TLS application data, with another key
    socket.socket.sendall(mine._sock, record)
    with pytest.raises(PeerTampered, match=r"the connection to sender is broken: tampered or wrong key"):
        theirs.receive_bytes(memoryview(bytearray(7)))
    for _ in range(2):  # nothing can be read any more, and no reader waits or spins
        with pytest.raises(PeerTampered, match=r"the connection to receiver 1 is broken: tampered or wrong key"):
            mine.expect("done")


def test_of_two_calls_under_one_name_the_later_counts_and_who_has_left_did_not_call() -> None:
    with Listener() as listener:
        first, second = (call(listener.address, "receiver 1", peer="sender", timeout_s=5) for _ in range(2))
        call(listener.address, "receiver 2", peer="sender", timeout_s=5).close()
        with pytest.raises(PeerSilent, match="receiver 2 did not answer"):
            listener.accept(["receiver 2"], 0.1)
        with first, second, listener.accept(["receiver 1"], 5)["receiver 1"] as link:
            link.send({"kind": "begin"})
            second.expect("begin")
            with pytest.raises(KitError, match="sender failed: a second receiver has the name receiver 1"):
                first.expect("begin")


def test_nobody_listens() -> None:
    with Listener() as listener:
        address = listener.address
    with pytest.raises(PeerGone, match=r"sender is gone \(waiting for a connection\)"):
        call(address, "receiver", peer="sender", timeout_s=1)


def test_a_closed_listener_says_so_at_once() -> None:
    listener = Listener()
    listener.close()
    with pytest.raises(KitError, match="the listener is closed"):
        listener.await_calls(["anybody"], 5.0)
