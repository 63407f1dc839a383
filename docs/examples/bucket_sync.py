"""A synchroniser in the manner of checkpoint-engine: host buckets that are broadcast one by one into paused engines.
kit run sync --set implementation=docs.examples.bucket_sync:HostBuckets"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

BUCKET = 2**17  # bytes; checkpoint-engine's are gigabytes


class HostBuckets:
    """Packs live weights into host memory once; an update broadcasts each bucket, and the engine loads it before the next arrives."""

    def __init__(self, ctx: Any) -> None:
        self.ctx = ctx
        everybody = tuple(sorted(ctx.awake + ctx.asleep))
        receiving = [ranks for ranks in dict.fromkeys([everybody, ctx.awake, ctx.asleep]) if ranks]
        self.groups = {ranks: dist.new_group([0, *ranks]) for ranks in receiving}
        self.buckets: list[tuple[list[Any], torch.Tensor]] = []  # on rank 0: names, dtypes and shapes; bytes

    def sync(self, version: int, targets: tuple[int, ...]) -> None:
        if self.ctx.role == "trainer":
            self.buckets = list(packed(self.ctx.full_tensors()))
        self.expand(version, targets)

    def expand(self, version: int, targets: tuple[int, ...]) -> None:
        if self.ctx.rank == 0:
            for about, bucket in [*self.buckets, ([], torch.empty(0, dtype=torch.uint8))]:
                dist.broadcast_object_list([(about, len(bucket))], src=0, group=self.groups[targets])
                dist.broadcast(bucket.to(self.ctx.device), src=0, group=self.groups[targets])
        elif self.ctx.role == "replica":
            with self.ctx.writing():  # requests are paused throughout
                while tensors := self.received(self.groups[targets]):
                    for name, tensor in tensors:
                        self.ctx.load(name, tensor)
                self.ctx.publish(version)

    def received(self, group: Any) -> list[tuple[str, torch.Tensor]]:
        header: list[Any] = [None]
        dist.broadcast_object_list(header, src=0, group=group)
        about, size = header[0]
        bucket = torch.empty(size, dtype=torch.uint8, device=self.ctx.device)
        dist.broadcast(bucket, src=0, group=group)
        parts = bucket.split([dtype.itemsize * shape.numel() for _, dtype, shape in about]) if about else ()
        return [(name, part.view(dtype).view(shape)) for (name, dtype, shape), part in zip(about, parts, strict=True)]


def packed(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[list[Any], torch.Tensor]]:
    held = [(name, tensor.detach().cpu().contiguous()) for name, tensor in tensors]
    while held:
        sizes = torch.tensor([tensor.nbytes for _, tensor in held]).cumsum(0)
        count = max(1, int((sizes <= BUCKET).sum()))
        first, held = held[:count], held[count:]
        yield (
            [(name, tensor.dtype, tensor.shape) for name, tensor in first],
            torch.cat([tensor.view(-1).view(torch.uint8) for _, tensor in first]),
        )
