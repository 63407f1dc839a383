"""Shared memory between ranks of one machine: a ring of anonymous segments, whose descriptors go over the links.

The sender packs into a slot, receivers apply from it: nobody copies in between. Small slots stay in the cache between the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.errors import KitError
from kit.sync.memory import Segment
from kit.sync.transports.base import DEPTH, Transport, TransportContext

if TYPE_CHECKING:
    import torch


class Shm(Transport):
    """Slots that both ends map."""

    def __init__(self, ctx: TransportContext) -> None:
        super().__init__(ctx)
        self.slots: list[Segment] = []
        if ctx.role == "receiver":
            _, fds = ctx.sender.expect("segments")
            self.slots = [Segment.attach(fd) for fd in fds]
            return
        largest = max(1, *ctx.sizes)
        self.slots = [Segment(largest, name="kit-sync") for _ in range(DEPTH)]
        for slot in self.slots:
            slot.populate()
        for link in ctx.links.values():
            link.send({"kind": "segments"}, [slot.fd for slot in self.slots])

    def slot(self, index: int) -> torch.Tensor:
        return self.slots[index % len(self.slots)].tensor[: self.ctx.sizes[index]]

    def space(self, index: int) -> torch.Tensor:
        self.wait_for(index - DEPTH)
        return self.slot(index)

    def send(self, index: int) -> None:
        for link in self.ctx.links.values():
            link.send({"kind": "shared", "bucket": index})

    def receive(self, index: int) -> torch.Tensor:
        message, _ = self.ctx.sender.expect("shared")
        if message["bucket"] != index:
            raise KitError(f"{self.ctx.sender.peer} sent bucket {message['bucket']} where bucket {index} was awaited")
        return self.slot(index)

    def close(self) -> None:
        for slot in self.slots:
            slot.close()
        self.slots = []
