"""Over process groups that live for one sync: of ranks that share a World, or of two Worlds that meet at a store of their own."""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from kit.errors import BadInput
from kit.sync.transports.base import Buffered, TransportContext


class Grouped(Buffered):
    """A broadcast a bucket, on the ranks' device."""

    def where(self) -> torch.device:
        return self.ctx.device

    def send(self, index: int) -> None:
        self.broadcast(index, self.slot(index))

    def fetch(self, index: int, into: torch.Tensor) -> None:
        self.broadcast(index, into)

    def broadcast(self, index: int, buffer: torch.Tensor) -> None:  # noqa: ARG002 - one by one needs to know which
        self.share(buffer)

    def share(self, buffer: torch.Tensor) -> None:
        raise NotImplementedError


class Broadcast(Grouped):
    """A temporary group of sender and receivers in their World: a proper part of it, of a name of its own, destroyed each time."""

    def __init__(self, ctx: TransportContext) -> None:
        super().__init__(ctx)
        if len(ctx.ranks) >= dist.get_world_size():
            raise BadInput(
                f"broadcast needs a rank that takes no part: {len(ctx.ranks)} of {dist.get_world_size()} would be the whole World"
            )
        name = agree(ctx, "group", f"kit-sync-{secrets.token_hex(4)}")
        self.group: Any = dist.new_group(
            sorted(ctx.ranks),
            timeout=timedelta(seconds=ctx.timeout_s),
            use_local_synchronization=True,
            group_desc=name,
        )

    def share(self, buffer: torch.Tensor) -> None:
        dist.broadcast(buffer, src=self.ctx.ranks[0], group=self.group)

    def close(self) -> None:
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None
        super().close()


class PerTensor(Broadcast):
    """The plain way: a broadcast for every tensor."""

    def broadcast(self, index: int, buffer: torch.Tensor) -> None:
        place = 0
        for size in self.ctx.pieces[index]:
            self.share(buffer[place : place + size])
            place += size


class Rendezvous(Grouped):
    """A group of its own over a fresh store: for sender and receivers that share no World."""

    def __init__(self, ctx: TransportContext) -> None:
        super().__init__(ctx)
        wait = timedelta(seconds=ctx.timeout_s)
        host = ctx.config.get("host", "127.0.0.1")
        if ctx.role == "sender":
            self.store: Any = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=wait)
            place = agree(ctx, "store", self.store.port)
        else:
            place = agree(ctx, "store", 0)
            self.store = TCPStore(host, int(place), is_master=False, wait_for_workers=False, timeout=wait)
        size = int(ctx.config["size"])
        made: Any = dist.ProcessGroupNCCL if ctx.device.type == "cuda" else dist.ProcessGroupGloo
        self.group: Any = made(self.store, ctx.place, size, wait)

    def share(self, buffer: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self.group.broadcast([buffer], options).wait()

    def close(self) -> None:
        if self.group is not None:
            self.group.shutdown()
            self.group = self.store = None
        super().close()


def agree(ctx: TransportContext, what: str, value: Any) -> Any:
    """The sender's value on every end."""
    if ctx.role == "receiver":
        return ctx.sender.expect(what)[0]["value"]
    for link in ctx.links.values():
        link.send({"kind": what, "value": value})
    return value
