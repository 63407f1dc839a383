"""What a transport is: how packed buckets get from a sender to its receivers. Messages and acknowledgements go over links.

The sender asks for `space` to pack a bucket into, then sends it; a receiver gets it, applies it, and says that it is done with it.
A sender may be `depth` buckets ahead of the slowest receiver: packing, sending and applying overlap.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kit.sync.link import Link

DEPTH = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportContext:
    """`ctx` for a transport of one's own: who is who, and the links between. A receiver has one link, to its sender."""

    role: Literal["sender", "receiver"]
    name: str
    links: dict[str, Link]
    sizes: Sequence[int]  # bytes of each bucket
    device: torch.device
    timeout_s: float
    ranks: tuple[int, ...] = ()  # global ranks of sender and receivers, the sender's first, where they share a World
    place: int = 0  # of this rank in that row
    pieces: Sequence[Sequence[int]] = ()  # bytes of each tensor of each bucket, for what goes one by one
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def sender(self) -> Link:
        (link,) = self.links.values()
        return link


class Transport(abc.ABC):
    """One end. Made on every rank that takes part, closed by the sender first."""

    def __init__(self, ctx: TransportContext) -> None:
        self.ctx = ctx
        self._acknowledged = dict.fromkeys(ctx.links, -1)

    # -- the sender ------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def space(self, index: int) -> torch.Tensor:
        """Bytes to pack bucket `index` into; waits until the slowest receiver leaves room."""

    @abc.abstractmethod
    def send(self, index: int) -> None:
        """Hand over what was packed."""

    def flush(self) -> None:
        """Wait until every receiver is done with everything."""
        self.wait_for(len(self.ctx.sizes) - 1)

    def wait_for(self, index: int) -> None:
        """Until every receiver is done with this bucket."""
        for name, link in self.ctx.links.items():
            while self._acknowledged[name] < index:
                message, _ = link.expect("done")
                self._acknowledged[name] = int(message["bucket"])

    # -- a receiver ------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def receive(self, index: int) -> torch.Tensor:
        """The bytes of bucket `index`, good until `done`."""

    def done(self, index: int) -> None:
        self.ctx.sender.send({"kind": "done", "bucket": index})

    # -- both ------------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def close(self) -> None:
        """Give back what was held: groups, segments, memory."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Buffered(Transport):
    """Buckets pass through memory of each end's own."""

    def __init__(self, ctx: TransportContext) -> None:
        super().__init__(ctx)
        largest = max(ctx.sizes, default=0)
        count = DEPTH if ctx.role == "sender" else 1
        self.slots = [torch.empty(largest, dtype=torch.uint8, device=self.where()) for _ in range(count)]

    def where(self) -> torch.device:
        return torch.device("cpu")

    def slot(self, index: int) -> torch.Tensor:
        return self.slots[index % len(self.slots)][: self.ctx.sizes[index]]

    def space(self, index: int) -> torch.Tensor:
        self.wait_for(index - DEPTH)
        return self.slot(index)

    def receive(self, index: int) -> torch.Tensor:
        buffer = self.slot(index)
        self.fetch(index, buffer)
        return buffer

    def close(self) -> None:
        self.slots = []

    @abc.abstractmethod
    def fetch(self, index: int, into: torch.Tensor) -> None:
        """The bytes of a bucket, into memory of this end's."""
