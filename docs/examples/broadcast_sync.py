"""A synchroniser over plain broadcasts of torch.distributed: every tensor whole, from trainer rank 0 to the ranks that receive it.
kit run sync --set implementation=docs.examples.broadcast_sync:Broadcasts"""

from typing import Any

import torch
import torch.distributed as dist


class Broadcasts:
    """Keeps a host copy of the active version for replicas that wake; a replica has all tensors before it writes the first."""

    retries = True  # a sync that raised leaves nothing behind, so the next one may be called

    def __init__(self, ctx: Any) -> None:
        self.ctx = ctx
        everybody = tuple(sorted(ctx.awake + ctx.asleep))
        receiving = [ranks for ranks in dict.fromkeys([everybody, ctx.awake, ctx.asleep]) if ranks]
        self.groups = {ranks: dist.new_group([0, *ranks]) for ranks in receiving}  # on all ranks, in the same order
        self.kept: dict[str, torch.Tensor] = {}

    def sync(self, version: int, targets: tuple[int, ...]) -> None:
        """Bring the live weights. Every rank of the trainer is called, and every rank in `targets`."""
        if self.ctx.role == "trainer":
            self.keep({name: tensor.detach().to("cpu", copy=True) for name, tensor in self.ctx.full_tensors()})
        self.expand(version, targets)

    def keep(self, tensors: dict[str, torch.Tensor]) -> None:
        self.kept = tensors

    def expand(self, version: int, targets: tuple[int, ...]) -> None:
        """Bring the version that the last sync brought: the trainer's weights are not in its memory now."""
        if self.ctx.rank in (0, *targets):
            specs = [[(name, tensor.dtype, tensor.shape) for name, tensor in self.kept.items()]]
            dist.broadcast_object_list(specs, src=0, group=self.groups[targets])
            arrived = {}
            for name, dtype, shape in specs[0]:
                tensor = self.kept[name] if self.ctx.rank == 0 else torch.empty(shape, dtype=dtype)
                arrived[name] = tensor.to(self.ctx.device)
                dist.broadcast(arrived[name], src=0, group=self.groups[targets])
            if self.ctx.role == "replica":
                self.write(version, arrived)

    def write(self, version: int, tensors: dict[str, torch.Tensor]) -> None:
        with self.ctx.writing():  # between two forwards
            for name, tensor in tensors.items():
                self.ctx.load(name, tensor)
            self.ctx.publish(version)


class BroadcastsWithAStaleTensor(Broadcasts):
    """Packs the final norm once, and sends those bytes with every version."""

    def keep(self, tensors: dict[str, torch.Tensor]) -> None:
        self.kept = {**tensors, **{name: held for name, held in self.kept.items() if name == "model.norm.weight"}}
