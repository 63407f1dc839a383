"""TLS between machines: a certificate made for one World or lab, which callers know by its fingerprint; no authority is asked.

Only making a certificate needs the openssl command. The rest is standard library, for both sides.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kit.errors import BadInput, KitError

CONFIG = "[req]\ndistinguished_name = name\n[name]\n"  # openssl's own may be missing
OPENSSL = "openssl req -config /dev/stdin -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj /CN=kit"
OPENSSL_S = 30.0
RAW = 1 << 16  # bytes of one read from the network: what they decrypt to is less than any reader of all of it asks for
PART = 1 << 20  # bytes encrypted at once
PLAIN = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNEXPECTED_MESSAGE", "NOT_SSL_RECORD_LAYER")


class Tampered(OSError):  # noqa: N818 - a state of the connection
    """What arrived was not encrypted by the end that holds the certificate and the keys agreed with it."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """`pem` holds its private key too; `fingerprint` is all that a caller needs."""

    pem: str = field(repr=False)
    fingerprint: str

    def context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # nothing but answers comes after the handshake
        fd = os.memfd_create("certificate")  # it is loaded from a file only, and leaves none
        try:
            os.write(fd, self.pem.encode())
            context.load_cert_chain(f"/dev/fd/{fd}")
        finally:
            os.close(fd)
        return context


def check_openssl() -> None:
    if shutil.which("openssl") is None:
        raise BadInput("several machines need the command openssl here, which makes the certificate; install openssl")


def make_certificate() -> Certificate:
    check_openssl()
    command = [*OPENSSL.split(), "-keyout", "/dev/stdout", "-out", "/dev/stdout"]
    try:
        done = subprocess.run(command, input=CONFIG, capture_output=True, text=True, timeout=OPENSSL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KitError(f"openssl could not make a certificate: {error}") from None
    if done.returncode:
        raise KitError(f"openssl could not make a certificate: {done.stderr.strip()}")
    _, begin, certificate = done.stdout.partition("-----BEGIN CERTIFICATE-----")
    return Certificate(done.stdout, fingerprint_of(ssl.PEM_cert_to_DER_cert(begin + certificate.strip())))


def fingerprint_of(der: bytes) -> str:
    return hashlib.sha256(der).hexdigest()


class EncryptedSocket(socket.socket):
    """A TCP connection under TLS. One thread may receive while others send, one after the other.

    Python's own SSLSocket must not be used by two threads at once, and hides from poll() what it has decrypted already: here one read
    decrypts all that has arrived, and `held` says whether some of it was not taken.
    """

    def __init__(self, sock: socket.socket, wrap: Callable[[ssl.MemoryBIO, ssl.MemoryBIO], ssl.SSLObject]) -> None:
        timeout = sock.gettimeout()
        super().__init__(fileno=sock.detach())
        self.settimeout(timeout)
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = wrap(self._arrived, self._leaving)
        self._guard = threading.Lock()
        self._agreed = False
        self._early = bytearray()  # sent before the handshake was over
        self._failure = ""  # after it nothing can be received

    @classmethod
    def answering(cls, sock: socket.socket, context: ssl.SSLContext) -> EncryptedSocket:
        """The listener's end. The handshake goes on whenever something is received, so that it never blocks a socket that must not."""
        return cls(sock, lambda arrived, leaving: context.wrap_bio(arrived, leaving, server_side=True))

    @classmethod
    def calling(cls, sock: socket.socket, fingerprint: str) -> EncryptedSocket:
        """The caller's end, after the handshake."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the fingerprint is what counts
        connection = cls(sock, context.wrap_bio)
        try:
            connection._step()
            while not connection._agreed:
                connection._take_in(0)
        except BaseException:
            connection.close()
            raise
        presented = fingerprint_of(connection._tls.getpeercert(binary_form=True) or b"")
        if not hmac.compare_digest(presented, fingerprint):
            connection.close()
            raise Tampered("the listener's certificate is another than this World's: tampered or wrong key")
        return connection

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        while not (data := self._decrypt(bufsize)):
            try:
                self._take_in(flags)
            except EOFError:
                return b""
        return data

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        view = memoryview(buffer).cast("B")
        data = self.recv(nbytes or len(view), flags)
        view[: len(data)] = data
        return len(data)

    def sendall(self, data: Any, flags: int = 0) -> None:
        view = memoryview(data).cast("B")
        if not self._agreed:
            self._early += view
            return
        while view:
            with self._guard:
                view = view[self._tls.write(view[:PART]) :]
                records = self._leaving.read()
            super().sendall(records, flags)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            "an encrypted connection has only sendall, recv and recv_into: these would not be encrypted"
        )

    send = sendmsg = sendto = sendfile = recvmsg = recvfrom = _refuse

    @property
    def held(self) -> bool:
        """Whether something was read from the network that `recv` has not returned."""
        return bool(self._arrived.pending or self._tls.pending())

    def _take_in(self, flags: int) -> None:
        """Read once, and go on with the handshake."""
        chunk = super().recv(RAW, flags)
        if not chunk:
            if not self._agreed:
                raise ConnectionResetError("the other end ended the handshake")
            raise EOFError
        with self._guard:
            self._arrived.write(chunk)
        self._step()

    def _step(self) -> None:
        if self._agreed:
            return
        try:
            with self._guard, contextlib.suppress(ssl.SSLWantReadError):
                self._tls.do_handshake()
                self._agreed = True
        except ssl.SSLError as error:
            raise self._broken(error) from None
        self._flush()
        if self._agreed and self._early:
            self.sendall(self._early)
            self._early.clear()

    def _flush(self) -> None:
        if records := self._leaving.read():
            super().sendall(records)

    def _decrypt(self, most: int) -> bytes:
        data = b""
        if self._failure:
            raise Tampered(self._failure)
        try:
            with self._guard, contextlib.suppress(ssl.SSLWantReadError):
                while self._agreed and len(data) < most:
                    part = self._tls.read(most - len(data))
                    if not part:
                        raise ssl.SSLEOFError(0, "the other end has ended the encryption")
                    data += part
        except ssl.SSLError as error:
            broken = self._broken(error)
            self._failure = str(broken)
            raise broken from None
        return data

    def _broken(self, error: ssl.SSLError) -> Tampered:
        with contextlib.suppress(OSError):
            self._flush()  # the alert that lets the other end know
        reason = getattr(error, "reason", None) or str(error)  # only OpenSSL's own errors have one
        if reason in PLAIN and not self._agreed:
            return Tampered("the other end does not speak TLS")
        return Tampered(f"tampered or wrong key ({reason.lower().replace('_', ' ')})")
