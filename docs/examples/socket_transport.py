"""Weights over TCP sockets, one for each receiver.
kit run sync --set transport=docs.examples.socket_transport:Sockets"""

import socket
from typing import Any

import torch

from kit.sync.transports import Transport


class Sockets(Transport):
    """The sender listens on its own port. Links carry the port and the acknowledgements, sockets the bytes."""

    def __init__(self, ctx: Any) -> None:
        super().__init__(ctx)
        self.sockets: list[socket.socket] = []
        if ctx.role == "sender":
            with socket.create_server(("127.0.0.1", 0)) as server:
                server.settimeout(ctx.timeout_s)
                self.say({"kind": "port", "port": server.getsockname()[1]})
                self.sockets = [server.accept()[0] for _ in ctx.links]
        else:
            port = ctx.sender.expect("port")[0]["port"]
            self.sockets = [socket.create_connection(("127.0.0.1", port), ctx.timeout_s)]

    def send(self, index: int, buffer: torch.Tensor) -> None:
        self.ahead(index)
        for each in self.sockets:
            each.sendall(buffer.numpy())

    def receive(self, index: int, into: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - buckets come in order
        left = memoryview(into.numpy())
        while left:
            left = left[self.some(left) :]
        return into

    def some(self, left: memoryview) -> int:
        count = self.sockets[0].recv_into(left)
        if not count:
            raise ConnectionError("the sender closed its socket in the middle of a bucket")
        return count

    def close(self) -> None:
        for each in self.sockets:
            each.close()
        self.sockets = []


# -- with one bug each ---------------------------------------------------------------------------------------------------


class SocketsReadOnce(Sockets):
    """Calls recv once per bucket: bytes that arrive later are left, and every later bucket starts at the wrong place."""

    def receive(self, index: int, into: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - as above
        self.some(memoryview(into.numpy())[: 1 << 16])
        return into


class SocketsThatDropTheLastBucket(Sockets):
    """Off by one: the last bucket is never sent, and receivers keep their old bytes."""

    def send(self, index: int, buffer: torch.Tensor) -> None:
        if index < len(self.ctx.sizes) - 1 or index == 0:
            super().send(index, buffer)

    def receive(self, index: int, into: torch.Tensor) -> torch.Tensor:
        return super().receive(index, into) if index < len(self.ctx.sizes) - 1 or index == 0 else into


class SocketsInHalfPrecision(Sockets):
    """Saves half the bytes by sending numbers as bfloat16."""

    def send(self, index: int, buffer: torch.Tensor) -> None:
        super().send(index, buffer.view(torch.float32).bfloat16().view(torch.uint8))

    def receive(self, index: int, into: torch.Tensor) -> torch.Tensor:
        half = torch.empty(len(into) // 2, dtype=torch.uint8)
        super().receive(index, half)
        return into.copy_(half.view(torch.bfloat16).float().view(torch.uint8))


class SocketsThatStayOpen(Sockets):
    """Never closes the sockets of a finished sync."""

    opened: list[socket.socket] = []  # noqa: RUF012 - as real code often has it

    def close(self) -> None:
        self.opened.extend(self.sockets)
        self.sockets = []
