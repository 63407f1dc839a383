"""Raw bytes with their length over a socket: for receivers on other machines, and where nothing better is."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from kit.errors import KitError
from kit.sync.transports.base import Buffered

if TYPE_CHECKING:
    import torch


class Serialize(Buffered):
    """A frame a bucket, to each receiver in turn."""

    def send(self, index: int) -> None:
        buffer = self.slot(index)
        for link in self.ctx.links.values():
            link.send({"kind": "bytes", "bucket": index, "size": buffer.numel()})
            link.send_bytes(memory(buffer))

    def fetch(self, index: int, into: torch.Tensor) -> None:
        message, _ = self.ctx.sender.expect("bytes")
        if (message["bucket"], message["size"]) != (index, into.numel()):
            raise KitError(
                f"{self.ctx.sender.peer} sent {message['size']} bytes of bucket {message['bucket']} where bucket {index} of "
                f"{into.numel()} was awaited"
            )
        self.ctx.sender.receive_bytes(memory(into))


def memory(buffer: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the host, where they lie."""
    return memoryview((ctypes.c_char * buffer.numel()).from_address(buffer.data_ptr())).cast("B")
