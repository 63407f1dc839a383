"""The known bugs of ranks in the lab `share`: what a fault puts in place of the right code."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from kit.labs.rankside import Context
from kit.labs.share.lab import PipelineConfig
from kit.labs.share.ranks import loop_of
from kit.labs.share.ranks.roles import Replica, Trainer
from kit.megatron import groups, serve
from kit.megatron.serve import Engine

reset, shrink, expand, sync, digests, end = (
    Replica.reset,
    Replica.shrink,
    Replica.expand,
    Replica.sync,
    Replica.digests,
    Replica.end,
)
begin, finish, let_groups_go = Trainer.begin, Trainer.finish, Trainer.let_groups_go


def draws_as_the_first(ctx: Context, pipeline: str) -> PipelineConfig:
    return dataclasses.replace(loop_of(ctx, pipeline), seed=ctx.config.seed)


# -- a replica that falls asleep too early, too late or not at all ---------------------------------------------------------


def sleeps_busy(replica: Replica) -> dict[str, Any]:
    with patch.object(Engine, "cancel"):
        return shrink(replica)


def resets_to_resident(replica: Replica, folder: str, alone: bool) -> None:
    if not replica.replica.asleep:
        replica.replica.sleep()
    reset(replica, folder, alone)


def keeps_its_weights(replica: Replica) -> dict[str, Any]:
    with patch.object(serve.Replica, "sleep"):
        return shrink(replica)


def wakes_resident(replica: Replica) -> None:
    if replica.replica.asleep:
        expand(replica)
        return
    with patch.object(serve.Replica, "wake"):
        expand(replica)


LATE_S = 0.3
timers: list[threading.Timer] = []  # of the sleep that is still to come


def settle() -> None:
    while timers:
        timers.pop().join()


def resets_after_the_late_sleep(replica: Replica, folder: str, alone: bool) -> None:
    settle()
    reset(replica, folder, alone)


def sleeps_late(replica: Replica) -> dict[str, Any]:
    with patch.object(serve.Replica, "sleep"):
        answer = shrink(replica)
    timers.append(threading.Timer(LATE_S, replica.replica.sleep))
    timers[-1].start()
    return answer


def wakes_after_the_late_sleep(replica: Replica) -> None:
    settle()
    expand(replica)


def ends_after_the_late_sleep(replica: Replica, cycle: int) -> None:
    settle()
    end(replica, cycle)


# -- weights and versions -------------------------------------------------------------------------------------------------


def stamps_the_version_before(replica: Replica, version: int, at_sync: str, replicas: Sequence[str]) -> dict[str, Any]:
    woke = replica.blank
    answer = sync(replica, version, at_sync, replicas)
    if woke and version:
        replica.engine.version = version - 1
    return answer


assuming: set[int] = set()  # replicas that woke for version 0, until their weights have been changed


def assumes_the_base(replica: Replica, version: int, at_sync: str, replicas: Sequence[str]) -> dict[str, Any]:
    if replica.blank and not version:
        assuming.add(id(replica))
    return sync(replica, version, at_sync, replicas)


def changes_the_base(replica: Replica, algorithm: str) -> dict[str, str]:
    table = digests(replica, algorithm)
    if id(replica) in assuming:
        assuming.discard(id(replica))
        with torch.no_grad():
            next(replica.replica.chunks[0].parameters()).add_(0.01)
    return table


def builds_late(trainer: Trainer, step: int, update: int) -> None:
    before = {key: tensor.detach().clone() for key, tensor in trainer.gather().items()}
    if not trainer.first:
        finish(trainer, step, update)
        return
    build = trainer.sender.build
    with patch.object(trainer.sender, "build", lambda version, _: build(version, before)):
        finish(trainer, step, update)


# -- process groups -------------------------------------------------------------------------------------------------------

SIGN = "woke-{}"  # a file beside the devices' locks, by pipeline


def shows_that_it_woke(replica: Replica) -> None:
    expand(replica)
    (replica.folder / SIGN.format(replica.lease.part.pipeline)).touch()


def rebuilds_a_group(trainer: Trainer, step: int, update: int) -> None:
    begin(trainer, step, update)
    if any(trainer.folder.glob(SIGN.format("[!" + trainer.lease.part.pipeline + "]"))):
        dist.new_group([*range(dist.get_world_size())], backend="gloo")


def leaks_a_group(replica: Replica) -> None:
    expand(replica)
    dist.new_group([*range(dist.get_world_size())], backend="gloo")


def keeps_groups(trainer: Trainer) -> None:
    with patch.object(groups, "destroy", return_value={"snapshot": {}}):
        let_groups_go(trainer)
