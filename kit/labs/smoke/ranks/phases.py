"""What a rank does in the smoke lab."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from kit.labs.rankside import Context, digest_of_hashes
from kit.measure.observers import births
from kit.measure.observers.births import Births

PATCHABLE = "torch.distributed"


class Plain:
    def __init__(self, ctx: Context) -> None: ...

    def make(self, ranks: Sequence[int]) -> Any:
        return dist.new_group(list(ranks))

    def destroy(self, group: Any) -> None:
        dist.destroy_process_group(group)


class Smoke:
    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.births = Births().__enter__()  # for as long as this rank works for the lab
        self.code = ctx.implementation(ctx.config.implementation)
        self.groups: list[Any] = []
        self.cycle = 0
        self.names = births.take_names(PATCHABLE)
        self.before = len(self.births.alive())

    def baseline(self, cycle: int) -> None:
        """All of it once, without faults."""
        self.make(cycle)
        for index, group in enumerate(self.groups):
            self.wrong_values(index, group, self.message(index))
        while self.groups:
            self.code.destroy(self.groups.pop())
        gc.collect()
        self.before = len(self.births.alive())

    def control(self, cycle: int) -> None:  # noqa: ARG002 - phases are called with their cycle
        """Nothing is made: how memory moves by itself."""
        gc.collect()

    def make(self, cycle: int) -> None:  # noqa: ARG002 - phases are called with their cycle
        self.groups = [self.code.make(range(self.ctx.world_size)) for _ in range(self.ctx.config.groups)]

    def talk(self, cycle: int) -> None:
        """A sum over every group; each rank knows what must come out, to the last bit."""
        self.cycle = cycle
        wrong, sums = 0, {}
        for index, group in enumerate(self.groups):
            message = self.message(index)
            wrong += self.wrong_values(index, group, message)
            sums[str(index)] = str(int(message.sum()))
        self.ctx.record("talked_groups", len(self.groups))
        self.ctx.record("shared_groups", self.shared())
        self.ctx.record("wrong_values", wrong)
        self.ctx.record("digest", None, text=digest_of_hashes(sums))

    def destroy(self, cycle: int) -> None:  # noqa: ARG002 - as above
        while self.groups:
            # The last handle goes with it: over gloo a destroyed group keeps its threads and sockets while any handle lives.
            self.code.destroy(self.groups.pop())

    def count(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """What garbage still held goes; what is open after this phase is left over."""
        gc.collect()
        self.ctx.record("groups_alive", len(self.births.alive()) - self.before)
        gone = births.replaced_names(self.names)
        self.ctx.record("names_replaced", len(gone), text=", ".join(gone[:5]))

    def end(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self.births.__exit__()

    def shared(self) -> int:
        """How many of the groups are not groups of their own: over them runs what runs over another, or over WORLD."""
        with births.doors():
            reached = [births.reach(group) for group in self.groups]
        return len(reached) + 1 - len({id(group) for group in [births.world(), *reached]})

    def message(self, index: int) -> torch.Tensor:
        return self.places(index) * (self.ctx.rank + 1)

    def wrong_values(self, index: int, group: Any, message: torch.Tensor) -> int:
        messages = [message, *([message.cpu()] if has_host_half(self.ctx.device, group) else [])]
        size, wrong = self.ctx.world_size, 0
        for own in messages:
            dist.all_reduce(own, group=group)
            expected = self.places(index).to(own.device) * (size * (size + 1) // 2)
            wrong += int((own != expected).sum())
        return wrong

    def places(self, index: int) -> torch.Tensor:
        return torch.arange(1, self.ctx.config.size + 1, device=self.ctx.device) + index


def has_host_half(device: torch.device, group: Any) -> bool:
    """Whether the group has another backend for the host, as `cpu:gloo,cuda:nccl` has."""
    return device.type != "cpu" and any(kind.type == "cpu" for kind in getattr(group, "_device_types", ()))
