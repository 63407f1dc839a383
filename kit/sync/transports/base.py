"""The base class of transports, which move packed buckets from a sender to its receivers. Messages and acknowledgements use links.

The sender sends one bucket after another; its bytes stay until every receiver is done with them. A receiver gets each bucket, applies or
stores it, and acknowledges it. The sender is at most `DEPTH` buckets ahead of the slowest receiver, so that packing, sending and applying
overlap and no link fills up.
"""

from __future__ import annotations

import abc
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from kit.errors import KitError
from kit.sync.link import FAILED, PeerFailed, PeerGone, PeerSilent, ready

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kit.sync.cache import Kept, Segment
    from kit.sync.link import Link

DEPTH = 3
GRACE_S = 0.3  # within this time the link shows that a peer has died


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportContext:
    """`ctx` for a transport: the role of this end and its links. A receiver has one link, to its sender."""

    role: Literal["sender", "receiver"]
    name: str
    links: dict[str, Link]
    sizes: Sequence[int]  # bytes of each bucket
    device: torch.device
    timeout_s: float
    starts: Sequence[int] = ()  # where each bucket begins in the sender's memory
    segment: Segment | None = None  # the sender's: all buckets lie in it
    ranks: tuple[int, ...] = ()  # global ranks of sender and receivers, the sender's first, where they share a World
    place: int = 0  # the position of this rank in `ranks`
    pieces: Sequence[Sequence[int]] = ()  # bytes of each tensor of each bucket, as they lie in it
    pack: Callable[[int, torch.Tensor], None] | None = None  # the sender's: packs a bucket of live weights on their GPU
    kept: Kept | None = None  # a receiver's: mappings that stay from sync to sync
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def sender(self) -> Link:
        (link,) = self.links.values()
        return link


class Transport(abc.ABC):
    """One end of a transport. The sender closes first; closing twice does nothing.

    `on_device`: bytes arrive on the receiver's device, so buckets should be received there.
    """

    on_device = False

    def __init__(self, ctx: TransportContext) -> None:
        self.ctx = ctx
        self._acknowledged = dict.fromkeys(ctx.links, -1)
        self._reached = dict.fromkeys(ctx.links, -1.0)  # a half where it waits for the next bucket

    # -- the sender ------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def send(self, index: int, buffer: torch.Tensor) -> None:
        """Send bucket `index`: bytes on the host, which do not change until every receiver is done with it."""

    def flush(self) -> None:
        """Wait until every receiver is done with everything."""
        self.wait_for(len(self.ctx.sizes) - 1)

    def ahead(self, index: int, depth: int = DEPTH) -> None:
        """Wait until bucket `index` is not too far ahead of the slowest receiver."""
        self.wait_for(index - depth)

    def wait_for(self, index: int) -> None:
        """Wait until every receiver is done with this bucket. A failure is noticed even while another receiver is slow."""
        links = self.ctx.links
        while late := [name for name in links if self._acknowledged[name] < index]:
            there = ready([links[name] for name in late], self.ctx.timeout_s)
            if not there:
                raise PeerSilent(", ".join(links[name].peer for name in late), "done", self.ctx.timeout_s)
            for name in [name for name in late if links[name] in there]:
                try:
                    self._hear(name)
                except PeerFailed as error:
                    gone = self.trouble(f"done with bucket {index}", 0.0, but=name)
                    raise (gone if isinstance(gone, PeerGone) else error) from None

    # -- a receiver ------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def receive(self, index: int, into: torch.Tensor) -> torch.Tensor:
        """The bytes of bucket `index`: in `into`, which has exactly their size, or where they already are; then they stay until `close`."""

    def done(self, index: int) -> None:
        self.say({"kind": "done", "bucket": index})

    # -- both ------------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def close(self) -> None:
        """Release groups, segments and memory, without waiting for the other ends."""

    def say(self, message: dict[str, Any], fds: list[int] | None = None, data: memoryview | None = None) -> None:
        """Send to every other end in turn. If one is gone, raise the reason that it sent before it left."""
        for link in self.ctx.links.values():
            try:
                link.send(message, fds)
                if data is not None:
                    link.send_bytes(data)
            except PeerGone as error:
                raise (self.trouble(f"room for {message['kind']}", 0.0) or error) from None

    def trouble(self, awaited: str, seconds: float = GRACE_S, but: str = "") -> KitError | None:
        """The failure that the links report within `seconds`, except of peer `but`: gone peers first, because others fail as a consequence;
        a peer that sent its reason and then left counts as failed."""
        end = time.monotonic() + seconds
        gone: list[KitError] = []
        failed: list[KitError] = []
        over = {but}
        while True:
            for name in [name for name in self.ctx.links if name not in over]:
                link = self.ctx.links[name]
                try:
                    while link.waits():
                        self._hear(name)
                except PeerGone:
                    over.add(name)
                    if self._acknowledged[name] < len(self.ctx.sizes) - 1:  # else it has all, and may leave
                        gone.append(PeerGone(link.peer, awaited))
                except PeerFailed as error:
                    over.add(name)
                    failed.append(error)
            if gone or time.monotonic() >= end:
                return next(iter(gone + failed), None)
            time.sleep(0.005)

    def absent(self, index: int) -> list[str]:
        """The receivers that did not announce that they join for this bucket."""
        return [self.ctx.links[name].peer for name, last in self._reached.items() if last < index - 0.5]

    def _hear(self, name: str) -> None:
        link = self.ctx.links[name]
        message = link.message("done")
        kind, bucket = message.get("kind"), int(message.get("bucket", -1))
        if kind == "done":
            self._acknowledged[name] = bucket
        elif self.ctx.role == "receiver" and kind != FAILED:
            self.skip(message)
            return
        elif kind != "here":
            raise PeerFailed(link.peer, "done", message)
        self._reached[name] = bucket if kind == "done" else bucket - 0.5

    def skip(self, message: dict[str, Any]) -> None:  # noqa: B027 - most have nothing to do
        """Drop a message that the sender sent before it left, with the bytes that follow it."""


def received(transport: Transport, index: int, into: torch.Tensor) -> torch.Tensor:
    """Receive a bucket and check that the transport returned exactly its bytes."""
    got: object = transport.receive(index, into)
    if not isinstance(got, torch.Tensor) or got.dtype != torch.uint8 or got.shape != into.shape:
        what = f"{got.dtype} of {list(got.shape)}" if isinstance(got, torch.Tensor) else type(got).__name__
        raise KitError(f"receive returned {what} for bucket {index} instead of torch.uint8 of [{len(into)}]")
    return got
