"""A synchroniser over plain broadcasts of torch.distributed: every tensor whole, from trainer rank 0 to the ranks that receive it.
kit run sync --set implementation=docs.examples.broadcast_sync:Broadcasts"""

import contextlib
from typing import Any

import torch
import torch.distributed as dist


class Broadcasts:
    """Keeps a host copy of the active version for replicas that wake. All replicas have all tensors before one writes the first."""

    retries = True  # a sync that raised leaves nothing behind, so the next one may be called

    def __init__(self, ctx: Any) -> None:
        self.ctx, self.kept = ctx, dict[str, torch.Tensor]()
        self.gate = ctx.writing if ctx.role == "replica" else contextlib.nullcontext
        receiving = dict.fromkeys([tuple(sorted(ctx.awake + ctx.asleep)), ctx.awake, ctx.asleep])
        self.groups = {ranks: dist.new_group([0, *ranks]) for ranks in receiving}  # on all ranks, in the same order

    def sync(self, version: int, targets: tuple[int, ...]) -> None:
        """Bring the live weights. Every rank of the trainer is called, and every rank in `targets`."""
        live = self.ctx.full_tensors() if self.ctx.role == "trainer" else ()
        sent = {name: tensor.detach().to("cpu", copy=True) for name, tensor in live}
        self.expand(version, targets, sent)
        self.kept = sent  # only now: a replica that wakes after a sync that failed gets the version before

    def expand(self, version: int, targets: tuple[int, ...], sent: dict[str, torch.Tensor] | None = None) -> None:
        """Without `sent`, bring the version that the last sync brought: the trainer's weights are not in its memory now."""
        if self.ctx.rank in (0, *targets):
            group, here, arrived, tensors = self.groups[targets], self.ctx.device, {}, sent or self.kept
            specs = [[(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]]
            dist.broadcast_object_list(specs, src=0, group=group)
            for name, dtype, shape in specs[0]:
                arrived[name] = (tensors[name] if self.ctx.rank == 0 else torch.empty(shape, dtype=dtype)).to(here)
                dist.broadcast(arrived[name], src=0, group=group)
            with contextlib.ExitStack() as gate:  # between two forwards
                closed = torch.zeros(1, device=here)
                try:
                    gate.enter_context(self.gate())
                    closed += 1
                finally:  # all replicas write the version, or none does and all ends raise
                    dist.all_reduce(closed, dist.ReduceOp.MIN, group=group)
                if not closed:
                    raise RuntimeError("a replica failed")
                if self.ctx.role == "replica":
                    self.write(version, arrived)

    def write(self, version: int, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self.ctx.load(name, tensor)
        self.ctx.publish(version)


class BroadcastsWithAStaleTensor(Broadcasts):
    """Loads the final norm with the base only."""

    def write(self, version: int, tensors: dict[str, torch.Tensor]) -> None:
        super().write(version, {name: tensors[name] for name in tensors if version < 0 or name != "model.norm.weight"})
