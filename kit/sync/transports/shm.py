"""Shared memory between ranks of one machine: the sender's own segment, whose descriptor goes over the links once.

Receivers map the memory that the sender packs into, so that nothing is copied in between: not even what a receiver stores until
all is there is a copy. A small message tells that a bucket is packed. Where pages are small, a new mapping costs about as much as a copy
of the bytes, for each page is looked up once; so a receiver may keep its mappings from sync to sync.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kit.errors import BadInput, KitError
from kit.sync.memory import Segment
from kit.sync.transports.base import Transport, TransportContext

if TYPE_CHECKING:
    import torch

DEPTH = 64  # nothing is written over, so that this only keeps links from filling up


class Shm(Transport):
    """Views of the sender's segment. The segment itself is the caller's."""

    segment: Segment | None = None

    def __init__(self, ctx: TransportContext) -> None:
        super().__init__(ctx)
        if ctx.role == "receiver":
            self.segment = attach(ctx)
            return
        if ctx.segment is None:
            raise BadInput("shm needs ctx.segment, the memory that holds the buckets")
        self.say({"kind": "segment"}, [ctx.segment.fd])

    def send(self, index: int, buffer: torch.Tensor) -> None:  # noqa: ARG002 - it lies in the segment
        self.ahead(index, DEPTH)
        self.say({"kind": "packed", "bucket": index})

    def receive(self, index: int, into: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - the bytes are there already
        message, _ = self.ctx.sender.expect("packed")
        if message["bucket"] != index:
            raise KitError(f"{self.ctx.sender.peer} sent bucket {message['bucket']} instead of bucket {index}")
        if self.segment is None:
            raise KitError("the transport is closed")
        start = self.ctx.starts[index]
        return self.segment.tensor[start : start + self.ctx.sizes[index]]

    def close(self) -> None:
        segment, self.segment = self.segment, None
        if segment is not None and self.ctx.kept is None:
            segment.close()


def attach(ctx: TransportContext) -> Segment:
    """The sender's segment, mapped here."""
    _, fds = ctx.sender.expect("segment")
    try:
        (fd,) = fds
        segment = Segment.attach(fd) if ctx.kept is None else ctx.kept.attach(fd)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    needed = max((start + size for start, size in zip(ctx.starts, ctx.sizes, strict=True)), default=0)
    if segment.size < needed:
        if ctx.kept is None:
            segment.close()
        raise KitError(f"{ctx.sender.peer} sent a segment of {segment.size} bytes, but the buckets need {needed}")
    return segment
