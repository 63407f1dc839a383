"""Callers without the key are dropped and do no harm."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import select
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kit.errors import KitError, RankDied
from kit.tls import Certificate, EncryptedSocket, Tampered, make_certificate
from kit.world import World
from kit.world.asked import CREWS
from kit.world.channel import (
    HEADER,
    LIMIT,
    MAC,
    NONCE,
    PENDING,
    ChannelClosed,
    TamperedChannel,
    WorldLink,
    WorldListener,
    connect,
)
from kit.world.crew import Crew
from kit.world.world import Printer

pytestmark = pytest.mark.timeout(90)
KEY = b"k" * 32


@functools.cache
def certificate() -> Certificate:
    """One for all tests here."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no command openssl, which makes certificates")
    return make_certificate()


def admitted(listener: WorldListener, seconds: float = 5.0) -> list[WorldLink]:
    links: list[WorldLink] = []
    deadline = time.monotonic() + seconds
    while not links and time.monotonic() < deadline:
        select.select(listener.filenos(), [], [], 0.05)
        links += listener.welcome()
    return links


def meet(listener: WorldListener, key: bytes = KEY) -> tuple[WorldLink, WorldLink]:
    made: list[WorldLink] = []
    fingerprint = certificate().fingerprint
    thread = threading.Thread(target=lambda: made.append(connect(listener.address, key, fingerprint)))
    thread.start()
    (link,) = admitted(listener)
    thread.join()
    return link, made[0]


@pytest.fixture(params=["unix", "tcp"])
def listener(request: pytest.FixtureRequest, tmp_path: Path):
    made = WorldListener(KEY, tmp_path / "s" if request.param == "unix" else "127.0.0.1", certificate())
    yield made
    made.close()


def dial(listener: WorldListener) -> socket.socket:
    if "/" in listener.address:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(listener.address)
        return sock
    host, _, port = listener.address.rpartition(":")
    return socket.create_connection((host, int(port)))


def test_the_right_key_is_admitted_and_json_goes_both_ways(listener: WorldListener) -> None:
    here, there = meet(listener)
    there.send({"a": [1, None, "ü"]})
    assert here.recv() == {"a": [1, None, "ü"]}
    here.send({"b": 2})
    assert there.recv() == {"b": 2}
    here.close()
    with pytest.raises(ChannelClosed):
        there.recv()
    there.close()


GARBAGE = {
    "nothing": b"",
    "a browser": b"GET / HTTP/1.1\r\n\r\n",
    "as long as an answer": random.Random(1).randbytes(NONCE + MAC),
    "long": random.Random(2).randbytes(10_000),
    "zeros": b"\0" * (NONCE + MAC),
}


@pytest.mark.parametrize("words", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_dropped_and_the_real_caller_still_gets_in(listener: WorldListener, words: bytes) -> None:
    stranger = dial(listener)
    stranger.sendall(words)
    here, there = meet(listener)
    here.send({"ok": True})
    assert there.recv() == {"ok": True}
    stranger.close()
    here.close()
    there.close()


def test_a_wrong_key_is_refused_at_both_ends(listener: WorldListener) -> None:
    failed: list[Exception] = []

    def call() -> None:
        try:
            connect(listener.address, b"x" * 32, certificate().fingerprint)
        except (ChannelClosed, OSError) as error:
            failed.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert admitted(listener, 1.0) == []
    thread.join()
    assert failed


def test_a_flood_of_silent_callers_is_bounded(listener: WorldListener) -> None:
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
    """A rank must not take orders from an arbitrary process at the address."""
    context = certificate().context()
    server = socket.create_server(("127.0.0.1", 0))

    def impostor() -> None:
        accepted, _ = server.accept()
        sock = EncryptedSocket.answering(accepted, context)
        sock.sendall(os.urandom(NONCE))
        sock.recv(NONCE + MAC)
        sock.sendall(os.urandom(MAC))
        sock.close()

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(ChannelClosed, match="does not hold"):
        connect(f"127.0.0.1:{server.getsockname()[1]}", KEY, certificate().fingerprint)
    thread.join()
    server.close()


@pytest.fixture
def tcp_listener() -> Iterator[WorldListener]:
    listener = WorldListener(KEY, "127.0.0.1", certificate())
    yield listener
    listener.close()


def test_another_certificate_is_refused_before_anything_is_sent(tcp_listener: WorldListener) -> None:
    """Whoever answers at the address of a World, even with its key, is not its notebook without the certificate."""
    failed: list[Exception] = []

    def call() -> None:
        try:
            connect(tcp_listener.address, KEY, make_certificate().fingerprint)
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert admitted(tcp_listener, 1.0) == []
    thread.join()
    assert [str(error) for error in failed] == [
        "the listener's certificate is another than this World's: tampered or wrong key"
    ]


def shake_hands_and_leave(address: tuple[str, int]) -> None:
    """Speak TLS as anybody can, and end it in order."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(address, 5) as sock,
        context.wrap_socket(sock) as encrypted,
        contextlib.suppress(OSError),  # the listener closes at once
    ):
        encrypted.unwrap()


def test_a_stranger_that_speaks_tls_and_leaves_does_not_end_the_listener(tcp_listener: WorldListener) -> None:
    host, _, port = tcp_listener.address.rpartition(":")
    thread = threading.Thread(target=shake_hands_and_leave, args=((host, int(port)),))
    thread.start()
    while thread.is_alive():
        assert tcp_listener.welcome() == []
    here, there = meet(tcp_listener)
    here.close()
    there.close()


def test_a_listener_that_leaves_in_the_handshake_has_not_tampered() -> None:
    fingerprint = certificate().fingerprint
    with socket.create_server(("127.0.0.1", 0)) as server:

        def leave() -> None:
            sock, _ = server.accept()
            sock.recv(1 << 16)
            sock.close()

        thread = threading.Thread(target=leave)
        thread.start()
        with pytest.raises(ConnectionResetError, match="the other end ended the handshake"):
            EncryptedSocket.calling(socket.create_connection(server.getsockname()), fingerprint)
        thread.join()


def test_why_a_handshake_broke_is_said_although_its_caller_has_left() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(bytes([22, 3, 1, 0, 5, 1, 0, 0, 1, 0]))  # a client's greeting that is too short
    theirs.close()
    context = certificate().context()
    with EncryptedSocket.answering(ours, context) as sock, pytest.raises(Tampered, match="tampered or wrong key"):
        sock.recv(1)


def test_an_openssl_that_hangs_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    certificate()
    monkeypatch.setattr("kit.tls.OPENSSL_S", 0.0)
    with pytest.raises(KitError, match=r"openssl could not make a certificate: .*timed out"):
        make_certificate()


def test_a_broken_link_is_the_reason_of_its_own_ranks_only() -> None:
    crew = Crew.__new__(Crew)
    crew._broken_links, crew._launched, crew.agents = {}, [], {}
    members: list[Any] = [SimpleNamespace(rank=rank, node=rank // 2) for rank in range(4)]
    crew._note_tampering(TamperedChannel("wrong key"), "rank", 0)
    crew._note_tampering(ChannelClosed("it left"), "rank", 1)
    crew._note_tampering(TamperedChannel("a flipped bit"), "agent", 1)
    assert [crew.why_lost(member).rpartition(": ")[2] for member in members] == [
        "wrong key",
        "",
        "a flipped bit",
        "a flipped bit",
    ]


def test_a_listener_without_tls_is_refused() -> None:
    fingerprint = certificate().fingerprint
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer_in_plain() -> None:
            caller, _ = server.accept()
            with caller:
                # What is unread when it closes would reset the connection, and the caller calls again.
                caller.recv(1 << 16)
                # Not random: one text of a thousand looks like the head of a record, and the caller waits for its rest.
                caller.sendall(bytes(NONCE))

        thread = threading.Thread(target=answer_in_plain)
        thread.start()
        with pytest.raises(OSError, match=r"the other end does not speak TLS|tampered or wrong key"):
            connect(f"127.0.0.1:{server.getsockname()[1]}", KEY, fingerprint)
        thread.join()


class Proxy:
    """Passes on what goes between a caller and a listener, and keeps it; flips a bit of the next part towards `flip`."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.target = (host, int(port))
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.server.getsockname()[1]}"
        self.passed = bytearray()
        self.flip = ""
        self.thread = threading.Thread(target=self.pass_on)
        self.thread.start()

    def pass_on(self) -> None:
        caller, _ = self.server.accept()
        self.server.close()
        listener = socket.create_connection(self.target)
        back = threading.Thread(target=self.copy, args=(listener, caller, "caller"))
        back.start()
        self.copy(caller, listener, "listener")
        back.join()
        caller.close()
        listener.close()

    def copy(self, source: socket.socket, target: socket.socket, towards: str) -> None:
        with contextlib.suppress(OSError):
            while part := bytearray(source.recv(1 << 16)):
                self.passed += part
                if self.flip == towards:
                    part[-1] ^= 1
                    self.flip = ""
                target.sendall(part)
            target.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("towards", ["caller", "listener"])
def test_a_changed_bit_ends_both_ends_with_the_reason_and_nothing_is_readable(
    tcp_listener: WorldListener, towards: str
) -> None:
    proxy = Proxy(tcp_listener.address)
    made: list[WorldLink] = []
    thread = threading.Thread(target=lambda: made.append(connect(proxy.address, KEY, certificate().fingerprint)))
    thread.start()
    (here,) = admitted(tcp_listener)
    thread.join()
    (there,) = made
    there.send({"secret": "from the rank"})
    assert here.recv() == {"secret": "from the rank"}
    here.send({"secret": "x" * 100_000})  # many records, and all of them are there after one look
    assert there.recv() == {"secret": "x" * 100_000}
    assert b"secret" not in proxy.passed
    proxy.flip = towards
    sender, receiver = (here, there) if towards == "caller" else (there, here)
    sender.send({"n": 1})
    for link in (receiver, sender):  # TLS lets the other end know
        with pytest.raises(TamperedChannel, match="receiving failed: tampered or wrong key"):
            link.recv()
        link.close()
    proxy.thread.join()


def pair() -> tuple[WorldLink, WorldLink, socket.socket, socket.socket]:
    a, b = socket.socketpair()
    return WorldLink(a, KEY, caller=True), WorldLink(b, KEY, caller=False), a, b


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


FLOOD = """
import socket, sys, threading
def flood():
    kept = []
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(sys.argv[1])
        except OSError:
            continue
        kept.append(sock)
        if len(kept) > 200:
            kept.pop(0).close()
for _ in range(4):
    threading.Thread(target=flood).start()
"""


class AtStart(Printer):
    """Act once, as soon as a starting World listens."""

    def __init__(self, act: Callable[[Crew], None]) -> None:
        self.act: Callable[[Crew], None] | None = act

    def tick(self, answered: object) -> None:
        for crew in CREWS:
            if self.act is not None and crew._listener is not None:
                act, self.act = self.act, None
                act(crew)


def test_a_flood_of_the_start_socket_does_not_end_the_start(tmp_path: Path) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def flood(crew: Crew) -> None:
        assert crew._listener is not None
        started.append(subprocess.Popen([sys.executable, "-c", FLOOD, crew._listener.address]))

    try:
        with World(2, device="cpu", logs=tmp_path, observer=AtStart(flood)) as world:
            assert world.eval("rank") == [0, 1]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert started


def speak(frame: Callable[[WorldLink], object], held: list[WorldLink]) -> Callable[[Crew], None]:
    """Connect as a process that holds the key of the starting World."""

    def act(crew: Crew) -> None:
        assert crew._listener is not None
        address, key = crew._listener.address, crew._key

        def call() -> None:
            held.append(connect(address, key))
            frame(held[0])

        threading.Thread(target=call).start()

    return act


def half(link: WorldLink) -> None:
    link._sock.sendall(HEADER.pack(100) + b"\0" * MAC + b"{")


def test_half_a_frame_and_then_silence_meets_the_deadline(tmp_path: Path, nothing_left: None) -> None:
    held: list[WorldLink] = []
    with pytest.raises(KitError, match=r"have joined; missing: 0 after 3 s"):
        World(
            1,
            device="cpu",
            logs=tmp_path,
            start_timeout_s=3,
            preload=["this_hangs"],
            env=hangs(tmp_path),
            observer=AtStart(speak(half, held)),
        )
    held[0].close()


def hangs(folder: Path) -> dict[str, str]:
    (folder / "this_hangs.py").write_text(
        "import os, time\nif 'RANK' not in os.environ: raise ImportError\ntime.sleep(60)"
    )
    return {"PYTHONPATH": str(folder)}


HELLO = {
    "role": "work",
    "rank": 1,
    "node": 0,
    "pid": 1,
    "started": 1,
    "device": "cpu",
    "why": "",
    "host": "",
    "seat": None,
}


@pytest.mark.parametrize(
    ("message", "who"),
    [
        ({"role": "work", "rank": 1}, "rank 1"),
        ({**HELLO, "rank": 7}, "rank 7"),
        ({**HELLO, "role": "king"}, "rank 1"),
        ({**HELLO, "pid": "1"}, "rank 1"),
        ({"role": "agent", "node": 3, "pid": 1}, "a process of this World"),
        ({}, "a process of this World"),
        ([1], "a process of this World"),
    ],
)
def test_a_malformed_greeting_is_refused_with_its_rank(
    tmp_path: Path, nothing_left: None, message: Any, who: str
) -> None:
    held: list[WorldLink] = []
    with pytest.raises(KitError, match=rf"^{who} sent a malformed message"):
        World(2, device="cpu", logs=tmp_path, observer=AtStart(speak(lambda link: link.send(message), held)))
    held[0].close()


LIES = {
    "no id": "work.send({})",
    "no value": "work.send({'id': rank_side.RANK.call})",
    "no object": "work.send([1])",
    "news": "work.send({'id': rank_side.RANK.call, 'value': 1, 'log': 0, 'lost': 0, 'news': 5})",
    "no JSON": "import json; work._out, dumps, json.dumps = work._out, json.dumps, lambda *_, **__: '{'; work.send({})",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_malformed_answer_is_refused_with_its_rank(tmp_path: Path, nothing_left: None, lie: str) -> None:
    find = (
        "import gc, sys, time\nfrom kit.world.channel import WorldLink as Link\nrank_side = sys.modules['kit.world.rankside']\n"
        "work = sys._getframe()\nwhile 'work' not in work.f_locals or work.f_code.co_name != 'serve': work = work.f_back\n"
        "work = work.f_locals['work']\n"
    )
    with World(2, device="cpu", logs=tmp_path) as world:
        with pytest.raises(KitError, match=r"^rank 1 sent a malformed message") as refused:
            world.run(f"{find}if rank == 1: {LIES[lie]}\ntime.sleep(5)")
        assert not isinstance(refused.value, RankDied)
        assert world.state == "dead"
        world.restart()
        assert world.eval("rank") == [0, 1]
