"""Callers that do not hold the key: they are dropped and harm nothing."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from pathlib import Path

import pytest

from kit.world.channel import HEADER, LIMIT, MAC, NONCE, PENDING, ChannelClosed, Link, Listener, connect

pytestmark = pytest.mark.timeout(20)
KEY = b"k" * 32


def admitted(listener: Listener, seconds: float = 5.0) -> list[Link]:
    links: list[Link] = []
    deadline = time.monotonic() + seconds
    while not links and time.monotonic() < deadline:
        select.select(listener.filenos(), [], [], 0.05)
        links += listener.welcome()
    return links


def meet(listener: Listener, key: bytes = KEY) -> tuple[Link, Link]:
    made: list[Link] = []
    thread = threading.Thread(target=lambda: made.append(connect(listener.address, key)))
    thread.start()
    (link,) = admitted(listener)
    thread.join()
    return link, made[0]


@pytest.fixture(params=["unix", "tcp"])
def listener(request: pytest.FixtureRequest, tmp_path: Path):
    made = Listener(KEY, path=tmp_path / "s") if request.param == "unix" else Listener(KEY, host="127.0.0.1")
    yield made
    made.close()


def dial(listener: Listener) -> socket.socket:
    if "/" in listener.address:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(listener.address)
        return sock
    host, _, port = listener.address.rpartition(":")
    return socket.create_connection((host, int(port)))


def test_the_right_key_is_admitted_and_json_goes_both_ways(listener: Listener) -> None:
    here, there = meet(listener)
    there.send({"a": [1, None, "ü"]})
    assert here.recv() == {"a": [1, None, "ü"]}
    here.send({"b": 2})
    assert there.recv() == {"b": 2}
    here.close()
    with pytest.raises(ChannelClosed):
        there.recv()
    there.close()


@pytest.mark.parametrize(
    "words", [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(NONCE + MAC), os.urandom(10_000), b"\0" * (NONCE + MAC)]
)
def test_garbage_is_dropped_and_the_real_caller_still_gets_in(listener: Listener, words: bytes) -> None:
    stranger = dial(listener)
    stranger.sendall(words)
    here, there = meet(listener)
    here.send({"ok": True})
    assert there.recv() == {"ok": True}
    stranger.close()
    here.close()
    there.close()


def test_a_wrong_key_is_refused_at_both_ends(listener: Listener) -> None:
    failed: list[Exception] = []

    def call() -> None:
        try:
            connect(listener.address, b"x" * 32)
        except (ChannelClosed, OSError) as error:
            failed.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert admitted(listener, 1.0) == []
    thread.join()
    assert failed


def test_a_flood_of_silent_callers_is_bounded(listener: Listener) -> None:
    strangers = []
    for _ in range(PENDING * 3):
        strangers.append(dial(listener))
        listener.welcome()
    assert len(listener.filenos()) <= PENDING + 1
    here, there = meet(listener)
    here.close()
    there.close()
    for sock in strangers:
        sock.close()


def test_a_listener_that_does_not_hold_the_key_is_refused() -> None:
    """A rank must not take orders from whoever sits at the address."""
    server = socket.create_server(("127.0.0.1", 0))

    def impostor() -> None:
        sock, _ = server.accept()
        sock.sendall(os.urandom(NONCE))
        sock.recv(NONCE + MAC)
        sock.sendall(os.urandom(MAC))
        sock.close()

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(ChannelClosed, match="does not hold"):
        connect(f"127.0.0.1:{server.getsockname()[1]}", KEY)
    thread.join()
    server.close()


def pair() -> tuple[Link, Link, socket.socket, socket.socket]:
    a, b = socket.socketpair()
    return Link(a, KEY, caller=True), Link(b, KEY, caller=False), a, b


def test_forged_replayed_and_reflected_frames_end_the_channel() -> None:
    for tamper in ("forged", "replayed", "reflected", "huge"):
        sender, receiver, a, b = pair()
        sender.send({"n": 1})
        frame = b.recv(1000, socket.MSG_PEEK)
        assert receiver.recv() == {"n": 1}
        if tamper == "forged":
            a.sendall(frame[:-2] + b"9}")
        elif tamper == "replayed":
            a.sendall(frame)
        elif tamper == "reflected":
            b.sendall(frame)
        else:
            a.sendall(HEADER.pack(LIMIT + 1) + b"\0" * MAC)
        with pytest.raises(ChannelClosed):
            (sender if tamper == "reflected" else receiver).recv()
        sender.close()
        receiver.close()
