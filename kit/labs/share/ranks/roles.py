"""The ranks of a pipeline in the lab `share`: those of the lab `stream`, which enter and leave their devices between two calls.

A trainer is on its devices only from `begin` to `finish` of a step. `finish` copies the new weights from the device to the bucket cache,
then offloads everything to host memory and frees the device. A sync sends from the cache, without a device. With `release_groups` the
process groups are destroyed and remade with each move.

A sleeping replica has no requests, no KV cache and, at level 2, no weights, and its device is free. After it wakes, its weights are NaN
until a sync brings the current version. At version 0 a sync sends nothing: the replica loads its own base weights, which are then compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from kit.errors import KitError
from kit.labs import rankside
from kit.labs.rankside import Context
from kit.labs.share.ranks import Lease, part_of
from kit.labs.stream.ranks import DIGEST, replica, trainer
from kit.measure.host import trim
from kit.measure.observers.births import registered_groups
from kit.megatron import groups, shards
from kit.megatron.serve import Engine
from kit.stream.ports import replica_number
from kit.sync import hashes
from kit.sync.cache import BASE
from kit.sync.sender import Target


class Trainer(trainer.Trainer):
    """`alone`: the pipeline has its devices to itself, and its trainer stays on them."""

    def __init__(self, ctx: Context) -> None:
        part = part_of(ctx)
        super().__init__(part)
        self.lease = Lease(part)
        self.folder = Path()
        self.alone = False
        self.release_groups: bool = ctx.config.release_groups
        self.released: dict[str, Any] = {}  # descriptions of the process groups while they are destroyed
        self.host: dict[Any, torch.Tensor] = {}  # version 0, for comparison with base weights

    def prepare(self, cycle: int) -> None:
        super().prepare(cycle)
        self.let_groups_go()
        self.lease.note_resident("asleep")

    def reset(self, folder: str, alone: bool) -> None:  # type: ignore[override]
        self.folder, self.alone = Path(folder), alone
        self.lease.take(self.folder, together=alone)
        self.bring_groups_back()
        super().reset()
        self.job.mover.release()  # at least once, so its host memory does not count as growth later
        self.job.mover.restore()
        if not alone:
            self.leave()

    def settle(self) -> None:
        """Also frees the host memory of the last loop's copies."""
        super().settle()
        if hasattr(self, "job"):
            self.job.mover.close()

    def vacate(self) -> None:
        if self.lease.held:
            self.step.abort()
            self.open = None
            self.leave_anyway()

    def end(self, cycle: int) -> None:
        self.vacate()
        super().end(cycle)

    # -- the device -----------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        if not self.lease.held:
            self.lease.take(self.folder)
            with self.lease.timed("onload"):
                self.bring_groups_back()
                self.job.mover.restore()
            self.lease.note_resident("held")

    def leave(self) -> None:
        with self.lease.timed("offload"):
            if not self.job.mover.away:  # else a move failed
                self.job.mover.release()
            self.let_groups_go()
        self.lease.note_resident("asleep")
        self.lease.free()

    def leave_anyway(self) -> None:
        """The same after an error, so a failed move does not block the device forever."""
        try:
            self.leave()
        finally:
            self.lease.free()

    def let_groups_go(self) -> None:
        if not self.release_groups or self.released:
            return
        try:
            self.released = groups.destroy(timeout_s=self.config.deadline_s)["snapshot"]
        except groups.DestroyFailed as error:
            self.released = error.stats["snapshot"]
            raise
        self.ctx.record("groups_asleep", len(registered_groups()) - 1, who=self.lease.part.owner)

    def bring_groups_back(self) -> None:
        if self.released:
            groups.reload(self.released, timeout_s=self.config.deadline_s)
            self.released = {}

    # -- the step -------------------------------------------------------------------------------------------------------

    def begin(self, step: int, update: int) -> None:
        self.enter()
        super().begin(step, update)

    def finish(self, step: int, update: int) -> None:
        super().finish(step, update)
        self.keep(self.version + 1)
        with self.lease.timed("build"):
            weights = self.gather()
            if self.first:
                self.sender.build(self.version, weights)
        if not self.alone:
            self.leave()

    def abort(self, step: int) -> None:
        super().abort(step)
        if self.lease.held and not self.alone:
            self.leave_anyway()

    # -- weights --------------------------------------------------------------------------------------------------------

    def keep(self, version: int) -> None:
        """Record the digest of the current weights as this version. Collective."""
        self.version = version
        weights = self.gather()
        if self.first:
            digests = {name: hashes.digest(tensor, DIGEST) for (name, _), tensor in weights.items()}
            self.ctx.record("digest", None, text=rankside.digest(digests), version=version)
            if not version:
                self.host = {key: tensor.detach().to("cpu", copy=True) for key, tensor in weights.items()}

    def sync(self, version: int, at_sync: str, replicas: Sequence[str]) -> dict[str, Any]:  # noqa: ARG002 - replicas look at it
        """Send the cached version to these replicas; version 0 only compares digests. Skips replicas that have fallen asleep."""
        if not self.first or not replicas:
            return {}
        if version != self.version:
            raise KitError(f"cannot send version {version}: the trainer is at version {self.version}")
        with self.lease.timed("send"):
            report = self.sender.sync(version or BASE, self.targets(replicas), None if version else self.base_on_host)
        return {"bytes": report.bytes}

    def base_on_host(self) -> dict[Any, torch.Tensor]:
        return self.host

    def targets(self, replicas: Sequence[str]) -> list[Target]:
        """Every rank of these replicas. A cached version is served as to waking replicas, since some of them do wake."""
        state: Literal["asleep", "paused"] = "asleep" if self.version else "paused"
        return [dataclasses.replace(target, state=state) for target in super().targets(replicas)]


class Replica(replica.Replica):
    """`blank`: its weights belong to no version."""

    def __init__(self, ctx: Context) -> None:
        part = part_of(ctx)
        super().__init__(part)
        self.number = replica_number(part.role)
        self.level = ctx.config.sleep_level
        self.lease = Lease(part)
        self.folder = Path()
        self.blank = True
        self.kept: list[torch.Tensor] = []  # weights in host memory, at level 1

    def prepare(self, cycle: int) -> None:
        super().prepare(cycle)
        self.replica.sleep()
        self.lease.note_resident("asleep")

    def reset(self, folder: str, alone: bool) -> None:  # type: ignore[override]
        """Version 0 and empty caches; awake if the pipeline is alone. Otherwise it wakes and sleeps once as a warm-up."""
        self.folder = Path(folder)
        self.lease.take(self.folder, together=alone)
        self.replica.wake()
        super().reset()
        self.blank = False
        self.lease.note_resident("awake")
        if not alone:
            self.shrink()

    def vacate(self) -> None:
        if self.lease.held:
            self.shrink()

    def end(self, cycle: int) -> None:
        self.vacate()
        super().end(cycle)

    def pace(self, written: int) -> float:
        """The pace of sequential decoding, so two replicas are twice as fast as one."""
        return float(self.config.pace_ms * written)

    # -- sleep and wake -------------------------------------------------------------------------------------------------

    def shrink(self) -> dict[str, Any]:
        with self.lease.timed("sleep"):
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
        with self.lease.timed("wake"):
            self.replica.wake()
            for weight, kept in zip(self.replica.chunks[0].parameters(), self.kept, strict=bool(self.kept)):
                weight.data.copy_(kept)
            self.kept = []
        self.lease.note_resident("awake")

    def sync(self, version: int, at_sync: str, replicas: Sequence[str]) -> dict[str, Any]:
        with self.lease.timed("receive"):
            if self.blank and not version:
                shards.load_full(self.replica.chunks, self.base)
            super().sync(version, at_sync, replicas)
        self.blank = False
        with self.lease.timed("check"):
            table = self.digests(DIGEST)
        if self.first:
            self.ctx.record("served", None, text=rankside.digest(table), version=version, replica=self.number)
        return {}

    # -- the receiver's host --------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Called for every replica that gets a version from the cache; most of them are awake."""
        if self.replica.asleep:
            self.replica.wake()

    def sleep(self) -> None:
        """Called after a failed sync: the weights are unknown."""
        if not self.replica.asleep:
            self.replica.sleep()
