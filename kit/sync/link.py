"""A connection between a sender of weights and one receiver. It carries small JSON messages, raw bytes and file descriptors.

On one machine it is an abstract Unix socket, which leaves no file behind and accepts callers of the same user only; between machines it is
TCP under TLS, where a caller must know the secret and compares the certificate with its fingerprint. Every wait has a deadline, and an
error names the end that did not answer and the awaited message.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterable
from typing import Any, NamedTuple, Self

from kit.errors import KitError
from kit.tls import Certificate, EncryptedSocket, Tampered

HEADER = struct.Struct("!I")  # length of the JSON; descriptors come with the first byte
LIMIT = 64 * 2**20
FDS = 8
BRIEF_S = 0.1
FIRST_LIMIT = 2**16  # bytes of a first message: whoever sends it has not shown the secret yet
FIRST_S = 5.0  # a connection whose first message takes longer is closed
NAMELESS = 256  # connections whose first message has not arrived; of more than these, the oldest is closed
FAILED = "failed"  # kind of the message that says why this end cannot continue
_PLACE = b"\0kit-sync-"
CREDENTIALS = struct.Struct("3i")


class PeerGone(KitError):  # noqa: N818 - it is a state, reported as such
    """The other end closed the connection, or died."""

    def __init__(self, peer: str, waiting_for: str) -> None:
        super().__init__(f"{peer} is gone (waiting for {waiting_for})")
        self.peer = peer


class PeerTampered(PeerGone):
    """What arrived is not what the other end sent, or that end has another key."""

    def __init__(self, peer: str, waiting_for: str, why: Tampered) -> None:
        KitError.__init__(self, f"the connection to {peer} is broken: {why} (waiting for {waiting_for})")
        self.peer = peer


class PeerSilent(KitError):  # noqa: N818 - as above
    """The other end is alive but did not answer in time."""

    def __init__(self, peer: str, waiting_for: str, seconds: float) -> None:
        super().__init__(f"{peer} did not answer within {seconds:g} s (waiting for {waiting_for})")
        self.peer = peer


class PeerFailed(KitError):  # noqa: N818 - as above
    """The other end reports that it cannot continue, or sent another message than expected: `message`."""

    def __init__(self, peer: str, waiting_for: str, message: dict[str, Any]) -> None:
        happened = f"failed: {message.get('why')}" if message.get("kind") == FAILED else f"sent {message.get('kind')!r}"
        super().__init__(f"{peer} {happened} (waiting for {waiting_for})")
        self.peer = peer
        self.message = message


class Link:
    """One end of a connection. `peer` is the name of the other end in errors; `timeout_s` is the longest wait."""

    def __init__(self, sock: socket.socket, peer: str, timeout_s: float) -> None:
        self.peer = peer
        self.timeout_s = timeout_s
        self.hello: dict[str, Any] = {}  # a caller's first message
        self._sock = sock
        sock.settimeout(timeout_s)

    def wait_at_most(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._sock.settimeout(timeout_s)

    @property
    def carries_fds(self) -> bool:
        return not isinstance(self._sock, EncryptedSocket)

    def send(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        data = json.dumps(message, separators=(",", ":")).encode()
        if len(data) > LIMIT:
            size = f"{len(data) / 2**20:.0f} MiB"
            raise KitError(f"a message of {size} to {self.peer} exceeds the limit of {LIMIT >> 20} MiB")
        fds = fds or []
        if fds and not self.carries_fds:
            raise KitError(f"descriptors cannot be sent to {self.peer}: its connection is one between machines")
        with self._named(f"room for {message.get('kind', 'a message')}"):
            rest = HEADER.pack(len(data)) + data
            if fds:
                rest = rest[socket.send_fds(self._sock, [rest], fds) :]
            if rest:  # once everything is sent, the other end may close: that is not a send failure
                self._sock.sendall(rest)

    def receive(self, waiting_for: str = "a message") -> tuple[dict[str, Any], list[int]]:
        """Return the next message and the descriptors with it, which the caller must close."""
        with self._named(waiting_for):
            fds: list[int] = []
            head = b""
            while len(head) < HEADER.size:
                left = HEADER.size - len(head)
                if self.carries_fds:
                    more, got, _, _ = socket.recv_fds(self._sock, left, FDS)
                    fds += got
                else:
                    more = self._sock.recv(left)
                if not more:
                    raise EOFError
                head += more
            (length,) = HEADER.unpack(head)
            if length > LIMIT:
                raise KitError(f"{self.peer} sent a message of more than {LIMIT >> 20} MiB")
            body = bytearray(length)
            self._fill(memoryview(body))
        message: dict[str, Any] = json.loads(body)
        return message, fds

    def message(self, waiting_for: str) -> dict[str, Any]:
        """Return the next message without its descriptors, which are closed."""
        message, fds = self.receive(waiting_for)
        for fd in fds:
            os.close(fd)
        return message

    def expect(self, kind: str) -> tuple[dict[str, Any], list[int]]:
        """Return a message of this kind; raise `PeerFailed` if the other end sends another one, such as an error."""
        message, fds = self.receive(kind)
        if message.get("kind") != kind:
            for fd in fds:
                os.close(fd)
            raise PeerFailed(self.peer, kind, message)
        return message, fds

    def waits(self) -> bool:
        """Whether a message or the end of the connection can be received."""
        return bool(ready([self], 0.0))

    def ends(self, within_s: float) -> bool:
        """Whether the other end closes the connection in this time. What it sent before can still be received."""
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        return bool(poll.poll(within_s * 1000))

    def last_words(self, awaited: str, within_s: float = math.inf, patience_s: float = 0.0) -> PeerFailed | None:
        """Return why the other end left or cannot continue, if it sent a reason, or sends one within `patience_s`. Only `send` works on the
        link afterwards. `within_s` limits the search if the other end may still be connected and send more."""
        self.wait_at_most(BRIEF_S)  # the next bytes may be raw ones, which are no message
        start = time.monotonic()
        end, patient = start + within_s, start + patience_s
        with contextlib.suppress(KitError, ValueError):
            while ready([self], patient - time.monotonic()) and time.monotonic() < end:
                message = self.message(awaited)
                if isinstance(message, dict) and message.get("kind") == FAILED:
                    return PeerFailed(self.peer, awaited, message)
        return None

    def send_bytes(self, data: memoryview) -> None:
        with self._named("room for bytes"):
            self._sock.sendall(data)

    def receive_bytes(self, into: memoryview) -> None:
        with self._named(f"{len(into)} bytes"):
            self._fill(into)

    def close(self) -> None:
        self._sock.close()

    def _fill(self, into: memoryview) -> None:
        while into:
            count = self._sock.recv_into(into)
            if not count:
                raise EOFError
            into = into[count:]

    @contextlib.contextmanager
    def _named(self, waiting_for: str) -> Any:
        try:
            yield
        except TimeoutError:
            raise PeerSilent(self.peer, waiting_for, self.timeout_s) from None
        except Tampered as error:
            raise PeerTampered(self.peer, waiting_for, error) from None
        except (OSError, EOFError):
            raise PeerGone(self.peer, waiting_for) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ready(links: Iterable[Link], timeout_s: float) -> list[Link]:
    """Return the links with a message or the end of the connection to receive: as soon as any has one, or at the timeout."""
    links = list(links)
    if decrypted := [link for link in links if isinstance(link._sock, EncryptedSocket) and link._sock.held]:
        return decrypted
    poll, by_fd = select.poll(), {}
    for link in links:
        poll.register(link._sock, select.POLLIN)
        by_fd[link._sock.fileno()] = link
    return [by_fd[fd] for fd, _ in poll.poll(max(0.0, timeout_s * 1000))]


def tcp_family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def address_of(name: str) -> dict[str, Any]:
    """The address of the listener with this name on this machine."""
    return {"unix": (_PLACE[1:] + name.encode()).decode(), "secret": name}


class Nameless(NamedTuple):
    """A connection whose first message has not arrived, or only this part of it."""

    sock: socket.socket
    until: float
    data: bytearray


class Listener:
    """The sender's end, which receivers call at `address`; knowing the address is enough. With a `name` that both ends know, the address
    need not be sent to callers on this machine: it is `address_of(name)`, also if callers of other machines are let in at `tcp_host`."""

    def __init__(
        self, *, tcp_host: str | None = None, certificate: Certificate | None = None, name: str | None = None
    ) -> None:
        self._tls = certificate.context() if certificate is not None else None
        self._secret = name or secrets.token_hex(16)
        remote = []
        if tcp_host is not None:
            remote = [socket.create_server((tcp_host, 0), family=tcp_family(tcp_host), backlog=64)]
        local = socket.socket(socket.AF_UNIX)
        local.bind(_PLACE + (name or secrets.token_hex(8)).encode())
        local.listen(64)
        self._socks = [local, *remote]  # callers on this machine are let in first
        place: dict[str, Any] = {"unix": local.getsockname()[1:].decode()}
        for sock in remote:
            assert certificate is not None
            place = {"host": tcp_host, "port": sock.getsockname()[1], "certificate": certificate.fingerprint}
        for sock in self._socks:
            sock.setblocking(False)
        self._called: dict[str, Link] = {}
        self._nameless: dict[int, Nameless] = {}
        self.address: dict[str, Any] = {**place, "secret": self._secret}

    def accept(self, names: list[str], timeout_s: float) -> dict[str, Link]:
        """Return a link to each of these receivers, in whatever order they call; the error names those that do not. A caller that has left
        does not count; of two calls under one name the later one counts. Strangers are refused; other callers wait for the next
        `accept`."""
        self.await_calls(names, timeout_s)
        links = {name: self._called.pop(name) for name in dict.fromkeys(names)}
        for link in links.values():
            link.wait_at_most(timeout_s)
        return links

    def await_calls(self, names: list[str], timeout_s: float) -> None:
        """Wait until these receivers have called; a later `accept` returns them."""
        end = time.monotonic() + timeout_s
        try:
            while True:
                # After its first message a caller waits for the sender: anything to receive is the end of the connection.
                self._forget(*(name for name, link in self._called.items() if link.waits()))
                missing = [name for name in names if name not in self._called]
                if (caller := self._next_caller(missing, end, timeout_s)) is None:
                    break
                sock, hello = caller
                name = str(hello["name"])
                self._forget(name, why=f"a second receiver has the name {name}")
                self._called[name] = Link(sock, name, timeout_s)
                self._called[name].hello = hello
        except BaseException as error:
            self._forget(*names, why=str(error))
            raise

    @property
    def waiting(self) -> int:
        """The number of connections that wait for the next `accept`."""
        return len(self._called) + len(self._nameless)

    def _forget(self, *names: str, why: str = "") -> None:
        for name in names:
            link = self._called.pop(name, None)
            if link is not None:
                with contextlib.suppress(KitError):
                    link.send({"kind": FAILED, "why": why})
                link.close()

    def _next_caller(
        self, missing: list[str], end: float, timeout_s: float
    ) -> tuple[socket.socket, dict[str, Any]] | None:
        """The next connection that knows the secret, with its first message; None if nobody calls and nobody is missing. A connection that
        sends nothing, or stops in its message, delays no other."""
        if self._socks[0].fileno() < 0:
            raise KitError("the listener is closed")
        listening = {sock.fileno(): sock for sock in self._socks}
        while True:
            late = [fd for fd, stranger in self._nameless.items() if time.monotonic() > stranger.until]
            for fd in late:
                self._nameless.pop(fd).sock.close()
            poll = select.poll()
            for fd in [*listening, *self._nameless]:
                poll.register(fd, select.POLLIN)
            calling = {fd for fd, _ in poll.poll(max(0.001, end - time.monotonic()) * 1000 if missing else 0)}
            for fd in calling & listening.keys():
                with contextlib.suppress(BlockingIOError):  # it has left again
                    self._let_in(listening[fd].accept()[0])
            for fd in calling & self._nameless.keys():
                stranger = self._nameless.pop(fd)
                try:
                    hello = self._hear(stranger)
                except (OSError, EOFError, ValueError, RecursionError):
                    stranger.sock.close()
                    continue
                if hello is not None:
                    return stranger.sock, hello
                self._nameless[fd] = stranger
            if missing and (not calling or time.monotonic() > end):
                raise PeerSilent(", ".join(missing), "a call", timeout_s)
            if not missing and not calling & listening.keys():
                return None

    def _let_in(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family == socket.AF_UNIX:
            _, uid, _ = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
            if uid != os.getuid():
                sock.close()
                return
        else:
            assert self._tls is not None
            sock = EncryptedSocket.answering(sock, self._tls)
        if len(self._nameless) >= NAMELESS:
            self._nameless.pop(next(iter(self._nameless))).sock.close()
        self._nameless[sock.fileno()] = Nameless(sock, time.monotonic() + FIRST_S, bytearray())

    def _hear(self, stranger: Nameless) -> dict[str, Any] | None:
        """The first message; None: more of it has to come. Raises if it is not that of a caller who knows the secret."""
        data = stranger.data
        while len(data) < (size := HEADER.size + (HEADER.unpack_from(data)[0] if len(data) >= HEADER.size else 0)):
            if size > FIRST_LIMIT:
                raise ValueError("this is too long for a first message")
            try:
                chunk = stranger.sock.recv(size - len(data))
            except BlockingIOError:
                return None
            if not chunk:
                raise EOFError
            data += chunk
        hello = json.loads(data[HEADER.size :])
        if not isinstance(hello, dict) or "name" not in hello:
            raise ValueError("this is no caller's first message")
        if not hmac.compare_digest(str(hello.get("secret", "")).encode(), self._secret.encode()):
            raise ValueError("this is another secret")
        return hello

    def close(self) -> None:
        self._forget(*self._called, why="the listener was closed")
        for sock in [*self._socks, *(stranger.sock for stranger in self._nameless.values())]:
            sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def call(
    address: dict[str, Any], name: str, *, peer: str, timeout_s: float, hello: dict[str, Any] | None = None
) -> Link:
    """Call a listener under a name that it expects. `hello` is added to the first message."""
    unix = "unix" in address
    place: Any = b"\0" + address["unix"].encode() if unix else (address["host"], address["port"])
    sock = socket.socket(socket.AF_UNIX if unix else tcp_family(address["host"]))
    sock.settimeout(timeout_s)
    try:
        sock.connect(place)
        if not unix:
            sock = EncryptedSocket.calling(sock, address["certificate"])
    except Tampered as error:
        raise PeerTampered(peer, "a connection", error) from None
    except OSError:
        sock.close()
        raise PeerGone(peer, "a connection") from None
    link = Link(sock, peer, timeout_s)
    link.send({**(hello or {}), "name": name, "secret": address["secret"]})
    return link
