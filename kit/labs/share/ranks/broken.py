"""The faults of ranks in the lab `share`: a replica or a trainer with one bug each."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from kit.labs.rankside import Context
from kit.labs.share.lab import SEED_APART
from kit.labs.share.ranks.roles import Replica, Trainer
from kit.megatron import groups, serve
from kit.megatron.serve import Engine

LATE_S = 0.3


def replica(ctx: Context) -> Replica:
    return REPLICAS.get(ctx.fault, Replica)(seeded(ctx))


def train(ctx: Context) -> Trainer:
    return TRAINERS.get(ctx.fault, Trainer)(seeded(ctx))


def seeded(ctx: Context) -> Context:
    if ctx.fault != "shared-seed" or ctx.role.startswith("a "):
        return ctx
    return dataclasses.replace(ctx, config=dataclasses.replace(ctx.config, seed=ctx.config.seed - SEED_APART))


class SleepsBusy(Replica):
    def shrink(self) -> dict[str, Any]:
        with patch.object(Engine, "cancel"):
            return super().shrink()


class StaysResident(Replica):
    def reset(self, folder: str, alone: bool) -> None:  # type: ignore[override]
        if not self.replica.asleep:
            self.replica.sleep()
        super().reset(folder, alone)

    def shrink(self) -> dict[str, Any]:
        with patch.object(serve.Replica, "sleep"):
            return super().shrink()

    def expand(self) -> None:
        if self.replica.asleep:
            super().expand()
            return
        with patch.object(serve.Replica, "wake"):
            super().expand()


class SleepsLate(Replica):
    late: threading.Timer | None = None

    def settle(self) -> None:
        if self.late is not None:
            self.late.join()
            self.late = None

    def reset(self, folder: str, alone: bool) -> None:  # type: ignore[override]
        self.settle()
        super().reset(folder, alone)

    def shrink(self) -> dict[str, Any]:
        with patch.object(serve.Replica, "sleep"):
            found = super().shrink()
        self.late = threading.Timer(LATE_S, self.replica.sleep)
        self.late.start()
        return found

    def expand(self) -> None:
        self.settle()
        super().expand()

    def end(self, cycle: int) -> None:
        self.settle()
        super().end(cycle)


class Skewed(Replica):
    def sync(self, version: int, at_sync: str, replicas: Sequence[str]) -> dict[str, Any]:
        woke = self.blank
        found = super().sync(version, at_sync, replicas)
        if woke and version:
            self.engine.version = version - 1
        return found


class AssumesBase(Replica):
    assumes = False

    def sync(self, version: int, at_sync: str, replicas: Sequence[str]) -> dict[str, Any]:
        self.assumes = self.blank and not version
        return super().sync(version, at_sync, replicas)

    def digests(self, algorithm: str) -> dict[str, str]:
        table = super().digests(algorithm)
        if self.assumes:
            self.assumes = False
            with torch.no_grad():
                next(self.replica.chunks[0].parameters()).add_(0.01)
        return table


class LeaksGroup(Replica):
    def expand(self) -> None:
        super().expand()
        dist.new_group([*range(dist.get_world_size())], backend="gloo")


SIGN = "woke-{}"  # a file beside the devices' locks, by pipeline


class TellsOthers(Replica):
    def expand(self) -> None:
        super().expand()
        (self.folder / SIGN.format(self.lease.part.pipeline)).touch()


class Rebuilds(Trainer):
    def begin(self, step: int, update: int) -> None:
        super().begin(step, update)
        if any(self.folder.glob(SIGN.format("[!" + self.lease.part.pipeline + "]"))):
            dist.new_group([*range(dist.get_world_size())], backend="gloo")


class KeepsGroups(Trainer):
    def let_groups_go(self) -> None:
        with patch.object(groups, "destroy", return_value={"snapshot": {}}):
            super().let_groups_go()


class BuildsLate(Trainer):
    def finish(self, step: int, update: int) -> None:
        old = {key: tensor.detach().clone() for key, tensor in self.gather().items()}
        if not self.first:
            super().finish(step, update)
            return
        build = self.sender.build
        with patch.object(self.sender, "build", lambda version, _: build(version, old)):
            super().finish(step, update)


REPLICAS: Mapping[str | None, type[Replica]] = {
    "sleeps-while-decoding": SleepsBusy,
    "stays-resident": StaysResident,
    "wake-before-freed": SleepsLate,
    "version-skew": Skewed,
    "base-assumed": AssumesBase,
    "leaked-group": LeaksGroup,
    "shared-group": TellsOthers,
}
TRAINERS: Mapping[str | None, type[Trainer]] = {
    "cache-after-offload": BuildsLate,
    "keeps-groups": KeepsGroups,
    "shared-group": Rebuilds,
}
OF_BOTH = ("shared-seed",)
