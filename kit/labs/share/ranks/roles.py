"""The ranks of a pipeline in the lab `share`: each has an actor of a loop and a lease, and enters and leaves its device between two calls.

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

from kit.actors.common import DIGEST
from kit.actors.replica import Happened, ReplicaActor
from kit.actors.trainer import TrainerActor, Weights
from kit.errors import KitError
from kit.labs import rankside
from kit.labs.rankside import Context
from kit.labs.share.ranks.side import DeviceLock, context_of
from kit.measure.host import trim
from kit.measure.observers.births import registered_groups
from kit.megatron import groups, shards
from kit.megatron.serve import Engine
from kit.stream.ports import replica_number
from kit.sync import hashes
from kit.sync.cache import BASE
from kit.sync.sender import Target


class LeasedTrainer:
    """A trainer with a lease. `alone`: the pipeline has its devices to itself, and its trainer stays on them."""

    def __init__(self, ctx: Context, actor: type[TrainerActor] = TrainerActor, **options: Any) -> None:
        self.ctx = context_of(ctx)
        self.actor = actor(self.ctx, on_version=self.note_version, **options)
        self.lease = DeviceLock(self.ctx)
        self.folder = Path()
        self.alone = False
        self.release_groups: bool = ctx.config.release_groups
        self.released: dict[str, Any] = {}  # descriptions of the process groups while they are destroyed
        self.host: dict[tuple[str, int], torch.Tensor] = {}  # version 0, for comparison with base weights

    def prepare(self, cycle: int) -> None:
        self.actor.prepare(cycle)
        self.let_groups_go()
        self.lease.note_resident("asleep")

    def reset(self, folder: str, alone: bool) -> None:
        self.folder, self.alone = Path(folder), alone
        self.lease.take(self.folder, together=alone)
        self.bring_groups_back()
        self.actor.reset()
        for mover in self.actor.movers:
            mover.release()  # at least once, so its host memory does not count as growth later
            mover.restore()
        if not alone:
            self.leave()

    def vacate(self) -> None:
        if self.lease.held:
            self.actor.give_up()
            self.leave_anyway()

    def end(self, cycle: int) -> None:
        self.vacate()
        self.actor.end(cycle)

    # -- the device -----------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        if not self.lease.held:
            self.lease.take(self.folder)
            with self.lease.timed("onload"):
                self.bring_groups_back()
                for mover in self.actor.movers:
                    mover.restore()
            self.lease.note_resident("held")

    def leave(self) -> None:
        with self.lease.timed("offload"):
            for mover in self.actor.movers:
                if not mover.away:  # else a move failed
                    mover.release()
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
            self.released = groups.destroy(timeout_s=self.ctx.config.deadline_s)["snapshot"]
        except groups.DestroyFailed as error:
            self.released = error.stats["snapshot"]
            raise
        self.ctx.record("groups_asleep", len(registered_groups()) - 1, who=self.ctx.owner)

    def bring_groups_back(self) -> None:
        if self.released:
            groups.reload(self.released, timeout_s=self.ctx.config.deadline_s)
            self.released = {}

    # -- the step -------------------------------------------------------------------------------------------------------

    def begin(self, step: int, update: int) -> None:
        self.enter()
        self.actor.begin(step, update)

    def logprobs(self, step: int, groups: Sequence[int], which: str) -> None:
        self.actor.logprobs(step, groups, which)

    def microbatch(self, step: int, update: int, groups: Sequence[int]) -> dict[str, Any]:
        return self.actor.microbatch(step, update, groups)

    def finish(self, step: int, update: int) -> None:
        self.actor.finish(step, update)
        self.actor.keep(self.actor.version + 1)
        with self.lease.timed("build"):
            self.fill_cache()
        if not self.alone:
            self.leave()

    def abort(self, step: int) -> None:
        self.actor.abort(step)
        if self.lease.held and not self.alone:
            self.leave_anyway()

    def clear(self, step: int, groups: Sequence[int], update: int = 0) -> int:
        return self.actor.clear(step, groups, update)

    def discard(self, group: int) -> int:
        return self.actor.discard(group)

    # -- weights --------------------------------------------------------------------------------------------------------

    def note_version(self, version: int, weights: Weights) -> None:
        """Record the digest of a version."""
        digests = {name: hashes.digest(tensor, DIGEST) for (name, _), tensor in weights.items()}
        self.ctx.record("digest", None, text=rankside.digest_of_hashes(digests), version=version)
        if not version:
            self.host = {key: tensor.detach().to("cpu", copy=True) for key, tensor in weights.items()}

    def fill_cache(self) -> None:
        """Copy the current weights to the cache of the sender. Collective."""
        weights = self.actor.gather()
        if self.actor.first:
            self.actor.sender.build(self.actor.version, weights)

    def sync(self, version: int, at_sync: str, replicas: Sequence[str]) -> dict[str, Any]:  # noqa: ARG002 - replicas look at it
        """Send the cached version to these replicas; version 0 only compares digests. Skips replicas that have fallen asleep."""
        if not self.actor.first or not replicas:
            return {}
        self.refuse_other_version(version)
        with self.lease.timed("send"):
            weights = None if version else self.base_on_host
            report = self.actor.sender.sync(version or BASE, self.targets(replicas), weights)
        return {"bytes": report.bytes}

    def refuse_other_version(self, version: int) -> None:
        if version != self.actor.version:
            raise KitError(f"cannot send version {version}: the trainer is at version {self.actor.version}")

    def base_on_host(self) -> dict[tuple[str, int], torch.Tensor]:
        return self.host

    def targets(self, replicas: Sequence[str]) -> list[Target]:
        """Every rank of these replicas. A cached version is served as to waking replicas, since some of them do wake."""
        state: Literal["asleep", "paused"] = "asleep" if self.actor.version else "paused"
        return [dataclasses.replace(target, state=state) for target in self.actor.targets(replicas)]


class LeasedReplica:
    """A replica with a lease. `blank`: its weights belong to no version."""

    def __init__(self, ctx: Context, actor: type[ReplicaActor] = ReplicaActor) -> None:
        self.ctx = context_of(ctx)
        self.actor = actor(self.ctx, sequential=True)
        self.number = replica_number(self.ctx.role)
        self.level = ctx.config.sleep_level
        self.lease = DeviceLock(self.ctx)
        self.folder = Path()
        self.blank = True
        self.kept: list[torch.Tensor] = []  # weights in host memory, at level 1

    def prepare(self, cycle: int) -> None:
        self.actor.prepare(cycle)
        self.actor.sleep()
        self.lease.note_resident("asleep")

    def reset(self, folder: str, alone: bool) -> None:
        """Version 0 and empty caches; awake if the pipeline is alone. Otherwise it wakes and sleeps once as a warm-up."""
        self.folder = Path(folder)
        self.lease.take(self.folder, together=alone)
        self.take_memory()
        self.actor.reset()
        self.blank = False
        self.lease.note_resident("awake")
        if not alone:
            self.shrink()

    def vacate(self) -> None:
        if self.lease.held:
            self.shrink()

    def end(self, cycle: int) -> None:
        self.vacate()
        self.actor.end(cycle)

    def decode(self, orders: Sequence[dict[str, Any]]) -> list[Happened]:
        return self.actor.decode(orders)

    # -- sleep and wake -------------------------------------------------------------------------------------------------

    def shrink(self) -> dict[str, Any]:
        actor = self.actor
        self.note_kept("sleeps")
        with self.lease.timed("sleep"):
            aborted = self.abort_requests()
            self.ctx.record("in_flight", len(actor.engine.in_flight), replica=self.number, aborted=aborted)
            actor.engine = Engine(actor.replica)
            actor.attempts = {}
            self.give_memory()
            self.blank = True
            trim()
        self.lease.note_resident("asleep")
        self.lease.free()
        return {"aborted": aborted}

    def abort_requests(self) -> int:
        requests = [*self.actor.engine.in_flight]
        for name in requests:
            self.actor.engine.cancel(name)
        return len(requests)

    def give_memory(self) -> None:
        """Free the device's memory; at level 1 the weights stay in host memory."""
        replica = self.actor.replica
        if self.level == 1 and not replica.asleep:
            self.kept = [weight.detach().to("cpu", copy=True) for _, weight in replica.named_parameters()]
        self.actor.sleep()

    def take_memory(self) -> None:
        self.actor.wake()

    def expand(self) -> None:
        """Take the device and allocate the weights. Nothing is decoded before a sync has filled them."""
        self.lease.take(self.folder)
        with self.lease.timed("wake"):
            self.take_memory()
            weights = [weight for _, weight in self.actor.replica.named_parameters()]
            for weight, kept in zip(weights, self.kept, strict=bool(self.kept)):
                weight.data.copy_(kept)
            self.kept = []
        self.note_kept("wakes")
        self.lease.note_resident("awake")

    def note_kept(self, when: str) -> None:
        """At level 1, record the digest of this rank's weights: a sync comes before the next request and would hide that they were lost."""
        if self.level == 1:
            weights = self.actor.replica.named_parameters()
            with self.lease.timed("check"):
                table = {name: hashes.digest(weight.detach(), DIGEST) for name, weight in weights}
            self.ctx.record("kept", None, text=rankside.digest_of_hashes(table), when=when, replica=self.number)

    def sync(self, version: int, at_sync: str, replicas: Sequence[str]) -> dict[str, Any]:
        with self.lease.timed("receive"):
            if self.blank:
                self.fill_blank(version)
            self.actor.sync(version, at_sync, replicas)
        self.blank = False
        with self.lease.timed("check"):
            table = self.actor.digests(DIGEST)
        if self.actor.first:
            self.note_served(table, version)
        return {}

    def fill_blank(self, version: int) -> None:
        """Load what no sync brings after a wake: version 0, which is not sent."""
        if not version:
            shards.load_full(self.actor.replica.chunks, self.actor.base)

    def note_served(self, table: dict[str, str], version: int) -> None:
        self.ctx.record("served", None, text=rankside.digest_of_hashes(table), version=version, replica=self.number)
