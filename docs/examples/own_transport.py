"""A file in memory for each bucket, its descriptor over the link: kit run sync --set transport=own_transport:Files. One machine."""

import mmap
import os
from typing import Any

import torch

from kit.sync.transports.base import Transport


class Files(Transport):
    def __init__(self, ctx: Any) -> None:
        super().__init__(ctx)
        print(f"{ctx.name} is a {ctx.role} of {len(ctx.sizes)} buckets, linked to {', '.join(ctx.links)}")

    def send(self, index: int, buffer: torch.Tensor) -> None:
        """Sender: hand over a bucket to every receiver. `ahead` waits until none is more than three buckets behind."""
        self.ahead(index)
        with os.fdopen(os.memfd_create(f"bucket-{index}"), "wb") as file:
            file.write(memoryview(buffer.numpy()))
            file.flush()
            for link in self.ctx.links.values():
                link.send({"kind": "bucket", "bucket": index}, [file.fileno()])

    def receive(self, index: int, into: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - it has a place already
        """Receiver: the bytes, where they lie. They could as well be copied into `into`, which has room for just these."""
        _, (fd,) = self.ctx.sender.expect("bucket")
        with os.fdopen(fd):
            mapped = mmap.mmap(fd, self.ctx.sizes[index], access=mmap.ACCESS_COPY)
        return torch.frombuffer(mapped, dtype=torch.uint8)  # it keeps the map, which keeps the file

    def close(self) -> None:
        """Nothing is held: files go with the last tensor that reads them, also where a rank is killed."""
