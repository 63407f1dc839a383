"""One file in memory per bucket, sent by its descriptor. One machine.
kit run sync --set transport=docs.examples.own_transport:Files"""

import mmap
import os

import torch

from kit.sync.transports import Transport


class Files(Transport):
    def send(self, index: int, buffer: torch.Tensor) -> None:
        """Sender: send a bucket to every receiver. `ahead` waits until no receiver is more than three buckets behind."""
        self.ahead(index)
        with os.fdopen(os.memfd_create(f"bucket-{index}"), "wb") as file:
            file.write(memoryview(buffer.numpy()))
            file.flush()
            for link in self.ctx.links.values():
                link.send({"kind": "bucket", "bucket": index}, [file.fileno()])

    def receive(self, index: int, into: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - read in place
        """Receiver: return the bytes in place. A copy into `into`, which has their size, is possible too."""
        _, (fd,) = self.ctx.sender.expect("bucket")
        with os.fdopen(fd):
            mapped = mmap.mmap(fd, self.ctx.sizes[index], access=mmap.ACCESS_COPY)
        return torch.frombuffer(mapped, dtype=torch.uint8)  # keeps the mapping and the file alive

    def close(self) -> None:
        """Nothing to release: a file disappears with the last tensor that reads it, even if a rank is killed."""
