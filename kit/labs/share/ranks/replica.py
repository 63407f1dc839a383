"""A replica's ranks in the lab `share`: those of the lab `stream`, which sleep and wake between two calls.

Asleep, a replica has no requests, no KV cache and, at level 2, no weights, and its device is free. Awake again, its weights are NaN until a
sync brings the version that is due. At version 0 a sync moves nothing: the replica loads its own base weights, which are then compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.labs import rankside
from kit.labs.share.config import number_of
from kit.labs.share.ranks.part import Lease, Times, device_of, part_of
from kit.labs.stream.ranks import DIGEST, replica
from kit.measure.host import trim
from kit.megatron import shards
from kit.megatron.serve import Engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kit.labs.rankside import Context


class Replica(replica.Replica):
    """`blank`: its weights are not those of a version."""

    def __init__(self, ctx: Context) -> None:
        part = part_of(ctx)
        super().__init__(part)
        self.number = number_of(part.role)
        self.level = ctx.config.sleep_level
        self.lease = Lease(part, device_of(part, ctx.config.mapping(part.pipeline)))
        self.times = Times(part)
        self.folder = Path()
        self.blank = True
        self.kept: list[torch.Tensor] = []  # weights in host memory, at level 1

    def prepare(self, cycle: int) -> None:
        super().prepare(cycle)
        self.replica.sleep()
        self.lease.note_resident("asleep")

    def reset(self, folder: str, alone: bool) -> None:  # type: ignore[override]
        """Version 0 and empty caches; awake if the pipeline is alone. Otherwise it wakes and sleeps once, before anything depends on it."""
        self.folder = Path(folder)
        self.lease.take(self.folder, together=alone)
        self.replica.wake()
        super().reset()
        self.blank = False
        self.lease.note_resident("awake")
        if not alone:
            self.shrink()

    def vacate(self) -> None:
        """Leave the device, whatever was under way there."""
        if self.lease.held:
            self.shrink()

    def end(self, cycle: int) -> None:
        self.vacate()
        super().end(cycle)

    def pace(self, written: int) -> float:
        """As if requests were decoded one after the other, so that two replicas are twice as fast as one."""
        return float(self.config.pace_ms * written)

    # -- sleep and wake -------------------------------------------------------------------------------------------------

    def shrink(self) -> dict[str, Any]:
        """Abort every request, drop caches and weights, give the memory back, and free the device."""
        with self.times("sleep"):
            requests = [*self.engine.in_flight]
            for name in requests:
                self.engine.cancel(name)
            self.ctx.record("in_flight", len(self.engine.in_flight), replica=self.number, aborted=len(requests))
            self.engine = Engine(self.replica)
            self.attempts = {}
            if not self.replica.asleep:
                if self.level == 1:
                    self.kept = [weight.detach().to("cpu", copy=True) for weight in self.replica.chunks[0].parameters()]
                self.replica.sleep()
            self.blank = True
            trim()
        self.lease.note_resident("asleep")
        self.lease.free()
        return {"aborted": len(requests)}

    def expand(self) -> None:
        """Take the device and allocate the weights. Nothing is decoded before a sync has filled them."""
        self.lease.take(self.folder)
        with self.times("wake"):
            self.replica.wake()
            for weight, kept in zip(self.replica.chunks[0].parameters(), self.kept, strict=bool(self.kept)):
                weight.data.copy_(kept)
            self.kept = []
        self.lease.note_resident("awake")

    def sync(self, version: int, at_sync: str, replicas: Sequence[str]) -> dict[str, Any]:
        """Receive a version, and note the digest of what is served from now on."""
        with self.times("receive"):
            if self.blank and not version:
                shards.load_full(self.replica.chunks, self.base)
            super().sync(version, at_sync, replicas)
        self.blank = False
        with self.times("check"):
            table = self.digests(DIGEST)
        if self.first:
            self.ctx.record("served", None, text=rankside.digest(table), version=version, replica=self.number)
        return {}

    # -- the receiver's host --------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Called for every replica that gets a version from the cache; most are awake."""
        if self.replica.asleep:
            self.replica.wake()

    def sleep(self) -> None:
        """Called after a sync that failed: what the weights are is not known."""
        if not self.replica.asleep:
            self.replica.sleep()
