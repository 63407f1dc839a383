"""The channel between the notebook and its ranks: authenticated frames of JSON, nothing else.

Both ends hold a key made for one World. A connection opens with a handshake in which each end proves the key over fresh nonces:

    listener  -> caller    nonce
    caller    -> listener  nonce, proof("caller")
    listener  -> caller    proof("listener")
    then, both ways        length | mac | JSON          mac = HMAC-SHA256(session key, direction, sequence number, JSON)

so a frame cannot be forged, replayed, reordered or read as anything but JSON. Between machines all of it is under TLS, with a certificate
made for one World, which a caller compares with its fingerprint. Standard library only; both sides use it.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.errors import KitError
from kit.tls import Certificate, EncryptedSocket, Tampered

Message = dict[str, Any]

NONCE = 32
MAC = 32  # bytes of a SHA-256
HEADER = struct.Struct("!I")
# One frame. A bigger result does not belong on a control channel; the sender gets a sentence, not a broken World.
LIMIT = 64 * 2**20
HANDSHAKE_S = 5.0  # a caller that has not proved the key by then only holds a place that a rank may need
PENDING = 64  # callers that have not proved the key yet
PATIENCE_S = 0.25  # how long such a caller is safe from being dropped for a newer one
ATTEMPTS = 3  # a listener that strangers flood drops ranks too


class ChannelClosed(KitError):  # noqa: N818 - it is a state, reported as such
    """The other end is gone, or could not prove the key."""


class TamperedChannel(ChannelClosed):
    """What arrived is not what the other end sent, or that end has another key."""


class Malformed(KitError):  # noqa: N818 - reported with the rank that sent it
    """A message that breaks the protocol, from an end that holds the key."""


class Dropped(ChannelClosed):
    """The listener ended the handshake."""


def proof(key: bytes, who: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(key, who + first + second, "sha256")


def readable_message(fds: Iterable[int], seconds: float) -> set[int]:
    """Those that have something to read, or have ended; closed ones are passed over. Unlike select(), it takes any number."""
    poll = select.poll()
    for fd in fds:
        if fd >= 0:
            poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(seconds * 1000)}


# In the kernel's struct tcp_info: milliseconds since the last data, and since the last acknowledgement.
LAST_DATA, LAST_ACK = slice(52, 56), slice(56, 60)
SILENCE_S = 25  # a machine that has sent nothing for so long is lost
ASKED_S = 5  # the kernel asks an idle one so often


def end_with_the_other_machine(sock: socket.socket) -> None:
    """A machine that is lost closes nothing: the kernel asks an idle one, and its silence ends the connection."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ASKED_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASKED_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def closed(doing: str, error: OSError) -> ChannelClosed:
    return (TamperedChannel if isinstance(error, Tampered) else ChannelClosed)(f"{doing}: {error}")


class TooLargeError(ValueError):
    """A message beyond the channel's limit. Nothing of it was sent."""


def encoded(message: Message) -> bytes:
    payload = json.dumps(message, separators=(",", ":")).encode()
    if len(payload) > LIMIT:
        raise TooLargeError(
            f"{len(payload) / 2**20:.0f} MiB of JSON do not fit the channel (limit {LIMIT // 2**20} MiB)"
        )
    return payload


class WorldLink:
    """One authenticated connection. `send` may be called from several threads, receiving from one."""

    def __init__(self, sock: socket.socket, session: bytes, *, caller: bool) -> None:
        self._sock = sock
        self._out, self._in = (session + b"c", session + b"l") if caller else (session + b"l", session + b"c")
        self._sent = self._received = 0
        self._buffer = bytearray()
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Message) -> None:
        self.send_encoded(encoded(message))

    def send_encoded(self, payload: bytes) -> None:
        with self._lock:
            mac = hmac.digest(self._out, self._sent.to_bytes(8, "big") + payload, "sha256")
            self._sent += 1
            try:
                self._sock.sendall(HEADER.pack(len(payload)) + mac + payload)
            except OSError as error:
                raise closed("sending failed", error) from error

    def recv(self) -> Message:
        while (message := self._take()) is None:
            self._fill()
        return message

    def arrived(self) -> list[Message]:
        """What is complete after one read, which does not wait: another thread may have read what was announced."""
        with contextlib.suppress(BlockingIOError):
            self._fill(socket.MSG_DONTWAIT)
        return list(iter(self._take, None))

    def _fill(self, flags: int = 0) -> None:
        try:
            chunk = self._sock.recv(1 << 18, flags)
        except BlockingIOError:
            raise
        except OSError as error:
            raise closed("receiving failed", error) from error
        if not chunk:
            raise ChannelClosed("the other end closed the channel")
        self._buffer += chunk

    def _take(self) -> Message | None:
        start = HEADER.size + MAC
        if len(self._buffer) < start:
            return None
        (length,) = HEADER.unpack_from(self._buffer)
        if length > LIMIT:
            raise ChannelClosed("a frame beyond the limit")
        end = start + length
        if len(self._buffer) < end:
            return None
        mac, payload = bytes(self._buffer[HEADER.size : start]), bytes(self._buffer[start:end])
        del self._buffer[:end]
        if not hmac.compare_digest(mac, hmac.digest(self._in, self._received.to_bytes(8, "big") + payload, "sha256")):
            raise TamperedChannel("a frame with a wrong signature: tampered or wrong key")
        self._received += 1
        try:
            message: Message = json.loads(payload)
        except ValueError as error:
            raise Malformed(f"it is not JSON: {error}") from None
        if type(message) is not dict:
            raise Malformed(f"it is not an object: {payload[:80]!r}")
        return message

    def limit_sending(self, seconds: int) -> None:
        """Give up sending to an end that does not read. The kernel keeps the time: Python's timeouts cost a call more each way."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))

    @property
    def peer(self) -> str:
        """The address of the other end; empty within one machine."""
        return "" if self._sock.family == socket.AF_UNIX else str(self._sock.getpeername()[0])

    def silence(self) -> float:
        """Seconds since the other machine's kernel was last heard; 0 within one machine. Unlike the kernel's own limits it goes on counting
        when a message is sent into the silence."""
        if self._sock.family == socket.AF_UNIX:
            return 0.0
        info = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LAST_ACK.stop)
        return min(int.from_bytes(info[since], sys.byteorder) for since in (LAST_DATA, LAST_ACK)) / 1000

    def limit_silence(self) -> None:
        """Also end with messages on their way. Not for links of ranks: an end that is busy may leave a large message unread for long."""
        if self._sock.family != socket.AF_UNIX:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.close()


# -- what a function on a rank reports while it runs: the notebook asks for it twice a second, and the answer brings the rest ------------

reporting = threading.Lock()  # held while reports are taken and sent, so that an answer never overtakes them
_reports: list[str] = []


def publish(row: Any) -> None:
    """Report a JSON value. It reaches the caller's `on_news` in order, at the latest with the answer."""
    text = json.dumps(row)
    with reporting:
        _reports.append(text)


def take_reports() -> list[str]:
    """What was reported since the last call. The caller holds the lock."""
    rows = _reports[:]
    _reports.clear()
    return rows


# -- the handshake -------------------------------------------------------------------------------------------------------


def read_exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (chunk := sock.recv(size - len(data))):
            raise Dropped("the other end closed the channel during the handshake")
        data += chunk
    return data


def connect(address: str, key: bytes, fingerprint: str = "") -> WorldLink:
    """Call a listener: a path of a Unix socket, or host:port, where `fingerprint` is that of its certificate. Call again if it drops us, as
    it may while strangers flood it."""
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(Dropped, BrokenPipeError, ConnectionResetError):
            return call_once(address, key, fingerprint)
    return call_once(address, key, fingerprint)


def call_once(address: str, key: bytes, fingerprint: str) -> WorldLink:
    if "/" in address:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(address)
    else:
        host, _, port = address.rpartition(":")
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout=30)
        end_with_the_other_machine(sock)
        sock = EncryptedSocket.calling(sock, fingerprint)
    try:
        return greet(sock, key)
    except BaseException:
        sock.close()
        raise


def greet(sock: socket.socket, key: bytes) -> WorldLink:
    sock.settimeout(HANDSHAKE_S * 6)  # the listener may be busy with others
    theirs = read_exactly(sock, NONCE)
    nonce = secrets.token_bytes(NONCE)
    sock.sendall(nonce + proof(key, b"caller", theirs, nonce))
    if not hmac.compare_digest(read_exactly(sock, MAC), proof(key, b"listener", theirs, nonce)):
        raise TamperedChannel("the listener does not hold this World's key: tampered or wrong key")
    sock.settimeout(None)
    return WorldLink(sock, proof(key, b"session", theirs, nonce), caller=True)


@dataclass
class Stranger:
    """A caller that has not proved the key yet."""

    sock: socket.socket
    nonce: bytes
    since: float
    data: bytearray = field(default_factory=bytearray)


class WorldListener:
    """Accepts callers that hold the key; drops everyone else without harm. Open only while a caller is expected."""

    def __init__(self, key: bytes, place: Path | str, certificate: Certificate | None = None) -> None:
        """`place` is the path of a Unix socket, or a host, which needs a certificate."""
        self._key = key
        self._tls = certificate.context() if certificate is not None else None
        if isinstance(place, Path):
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._sock.bind(str(place))
            place.chmod(0o600)
            self.address = str(place)
        else:
            self._sock = socket.socket(socket.AF_INET6 if ":" in place else socket.AF_INET, socket.SOCK_STREAM)
            self._sock.bind((place, 0))
            self.address = f"{f'[{place}]' if ':' in place else place}:{self._sock.getsockname()[1]}"
        self._sock.listen(128)
        self._sock.setblocking(False)
        self._strangers: dict[int, Stranger] = {}

    def filenos(self) -> list[int]:
        return [self._sock.fileno(), *self._strangers]

    def welcome(self) -> list[WorldLink]:
        """Callers that have proved the key since the last call. Never blocks."""
        self._accept()
        links = []
        for fd, stranger in list(self._strangers.items()):
            proved = self._hear(stranger)
            if proved is None and time.monotonic() - stranger.since < HANDSHAKE_S:
                continue
            del self._strangers[fd]
            if proved:
                nonce, theirs = stranger.nonce, bytes(stranger.data[:NONCE])
                stranger.sock.setblocking(True)
                stranger.sock.sendall(proof(self._key, b"listener", nonce, theirs))
                links.append(WorldLink(stranger.sock, proof(self._key, b"session", nonce, theirs), caller=False))
            else:
                stranger.sock.close()
        return links

    def _accept(self) -> None:
        """Take in a bounded number of callers: a flood must neither keep us here nor push out a caller that is about to answer."""
        with contextlib.suppress(OSError):  # no caller, the caller is gone again, or no descriptor is left
            for _ in range(PENDING):
                if len(self._strangers) >= PENDING:
                    oldest = next(iter(self._strangers))
                    if time.monotonic() - self._strangers[oldest].since < PATIENCE_S:
                        return
                    self._strangers.pop(oldest).sock.close()
                sock, _ = self._sock.accept()
                sock.setblocking(False)
                if sock.family != socket.AF_UNIX:
                    assert self._tls is not None
                    end_with_the_other_machine(sock)
                    sock = EncryptedSocket.answering(sock, self._tls)
                nonce = secrets.token_bytes(NONCE)
                with contextlib.suppress(OSError):
                    sock.sendall(nonce)
                self._strangers[sock.fileno()] = Stranger(sock, nonce, time.monotonic())

    def _hear(self, stranger: Stranger) -> bool | None:
        """Whether it proved the key; None: more of its answer has to come."""
        try:
            if not (chunk := stranger.sock.recv(NONCE + MAC - len(stranger.data))):
                return False
        except BlockingIOError:
            return None
        except OSError:
            return False
        stranger.data += chunk
        if len(stranger.data) < NONCE + MAC:
            return None
        nonce, theirs = stranger.nonce, bytes(stranger.data[:NONCE])
        return hmac.compare_digest(bytes(stranger.data[NONCE:]), proof(self._key, b"caller", nonce, theirs))

    def close(self, *, forked: bool = False) -> None:
        """`forked`: only this process's copy; the other one listens on."""
        for stranger in self._strangers.values():
            stranger.sock.close()
        self._strangers.clear()
        self._sock.close()
        if "/" in self.address and not forked:
            Path(self.address).unlink(missing_ok=True)


# -- the processes at the ends of a World's links ---------------------------------------------------------------------


HELLO = ("rank", "node", "pid", "started", "device", "why", "host", "seat")  # what a rank reports of itself
MALFORMED = (Malformed, KeyError, TypeError, ValueError)  # what a message of an unknown kind leads to


def malformed(who: str, error: Exception) -> KitError:
    return KitError(
        f"{who} sent a malformed message ({type(error).__name__}: {error}); is it the same version of the kit?"
    )


@dataclass(slots=True)
class WorldMember:
    rank: int
    node: int
    pid: int
    started: int
    device: str
    why: str
    host: str
    work: WorldLink
    watch: WorldLink
    seat: int | None
    phase: str = "idle"
    call: Any = None  # the `kit.world.calls.WorldCall` that it has not answered
    since: float = 0.0
    log: int = 0  # how much of its log was shown
    asked: float = 0.0  # for news, when; 0 once it has answered
    news: list[str] = field(default_factory=list)  # what it reported, not handed on yet

    @property
    def busy(self) -> bool:
        return self.call is not None

    def hear_watch(self) -> list[Message]:
        """Take in what the side thread sent: keep the news and return the rest."""
        messages = self.watch.arrived()
        for message in messages:
            if "news" in message:
                self.asked, self.news = 0.0, [*self.news, *message["news"]]
        return [message for message in messages if "news" not in message]


@dataclass(slots=True)
class Exit:
    """How a rank's process ended, as its node's agent saw it. `at` orders the ends on one node."""

    rank: int
    status: int | None  # None: not seen; torchrun's own account follows
    at: float

    @property
    def victim(self) -> bool:
        """torchrun ends the others with SIGTERM when one has failed."""
        return self.status == -signal.SIGTERM


@dataclass(slots=True)
class AgentEnd:
    node: int
    link: WorldLink
    address: str = ""  # of its machine, for others
    ended: int = -1  # the last generation of ranks that ended, as torchrun reported
    error: str = ""  # torchrun's account of it
    statuses: dict[int, int] = field(default_factory=dict)
    answers: dict[int, Any] = field(default_factory=dict)
