"""Raw bytes with their length over a link: for receivers that can meet the sender in no group and share no memory with it."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from kit.errors import KitError
from kit.sync.transports.base import Transport

if TYPE_CHECKING:
    from kit.sync.transports.base import TransportContext


class Serialize(Transport):
    """A frame a bucket, to each receiver in turn."""

    def __init__(self, ctx: TransportContext) -> None:
        super().__init__(ctx)
        self._host: torch.Tensor | None = None

    def send(self, index: int, buffer: torch.Tensor) -> None:
        self.ahead(index)
        self.say({"kind": "bytes", "bucket": index, "size": buffer.numel()}, data=memory(buffer))

    def receive(self, index: int, into: torch.Tensor) -> torch.Tensor:
        message, _ = self.ctx.sender.expect("bytes")
        if (message["bucket"], message["size"]) != (index, into.numel()):
            raise KitError(
                f"{self.ctx.sender.peer} sent {message['size']} bytes of bucket {message['bucket']} instead of "
                f"{into.numel()} bytes of bucket {index}"
            )
        there = self.host(into)
        self.ctx.sender.receive_bytes(memory(there))
        return into if there is into else into.copy_(there)

    def skip(self, message: dict[str, Any]) -> None:
        if message.get("kind") == "bytes":
            self.ctx.sender.receive_bytes(memoryview(bytearray(message["size"])))

    def host(self, into: torch.Tensor) -> torch.Tensor:
        """Where bytes can come to from a socket."""
        if into.is_cpu:
            return into
        if self._host is None:
            self._host = torch.empty(max(self.ctx.sizes), dtype=torch.uint8)
        return self._host[: into.numel()]

    def close(self) -> None:
        self._host = None


def memory(buffer: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the host, where they lie."""
    return memoryview((ctypes.c_char * buffer.numel()).from_address(buffer.data_ptr())).cast("B")
