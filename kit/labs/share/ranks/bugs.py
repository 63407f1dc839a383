"""The known bugs of ranks in the lab `share`: what a fault puts in place of the right code."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from kit.actors.adapters import AdapterTrainer, first_tensors
from kit.actors.replica import ReplicaActor
from kit.actors.trainer import TrainerActor, Weights
from kit.labs.rankside import Context
from kit.labs.share.lab import PipelineConfig
from kit.labs.share.ranks.adapters import AdaptersTrainer
from kit.labs.share.ranks.roles import LeasedReplica, LeasedTrainer
from kit.labs.share.ranks.side import loop_of
from kit.megatron.lora import LowRankPair
from kit.megatron.serve import ServingModel
from kit.train.protocol import Batch

take_memory, expand, sync, end = LeasedReplica.take_memory, LeasedReplica.expand, LeasedReplica.sync, LeasedReplica.end
give_memory = LeasedReplica.give_memory
begin, finish = LeasedTrainer.begin, LeasedTrainer.finish
digests = ReplicaActor.digests


def draws_as_the_first(ctx: Context, pipeline: str) -> PipelineConfig:
    return dataclasses.replace(loop_of(ctx, pipeline), seed=ctx.config.seed)


# -- a replica that falls asleep too early, too late or not at all ---------------------------------------------------------


def aborts_nothing(replica: LeasedReplica) -> int:
    return len(replica.actor.engine.in_flight)


def keeps_its_memory(replica: LeasedReplica) -> None:
    """A replica that sleeps keeps its weights."""


def keeps_all_but_a_row(replica: LeasedReplica) -> None:
    give_memory(replica)
    for kept in replica.kept[:1]:
        kept[-1] = 0


LATE_S = 0.3
timers: list[threading.Timer] = []  # of the sleep that is still to come


def settle_late() -> None:
    while timers:
        timers.pop().join()


def sleeps_late(replica: LeasedReplica) -> None:
    timers.append(threading.Timer(LATE_S, replica.actor.sleep))
    timers[-1].start()


def wakes_after_the_late_sleep(replica: LeasedReplica) -> None:
    settle_late()
    take_memory(replica)


def ends_after_the_late_sleep(replica: LeasedReplica, cycle: int) -> None:
    settle_late()
    end(replica, cycle)


# -- weights and versions -------------------------------------------------------------------------------------------------


def stamps_the_version_before(
    replica: LeasedReplica, version: int, at_sync: str, replicas: Sequence[str]
) -> dict[str, Any]:
    woke = replica.blank
    answer = sync(replica, version, at_sync, replicas)
    if woke and version:
        replica.actor.engine.version = version - 1
    return answer


assuming: set[int] = set()  # actors that woke for version 0, until their weights have been changed


def assumes_the_base(replica: LeasedReplica, version: int, at_sync: str, replicas: Sequence[str]) -> dict[str, Any]:
    if replica.blank and not version:
        assuming.add(id(replica.actor))
    return sync(replica, version, at_sync, replicas)


def changes_the_base(actor: ReplicaActor, algorithm: str) -> dict[str, str]:
    table = digests(actor, algorithm)
    if id(actor) in assuming:
        assuming.discard(id(actor))
        with torch.no_grad():
            next(actor.replica.chunks[0].parameters()).add_(0.01)
    return table


before: dict[LeasedTrainer, Weights] = {}  # the weights of trainers when their step ended, before the update


def copies_before_the_update(trainer: LeasedTrainer, step: int, update: int) -> None:
    before[trainer] = {key: tensor.detach().clone() for key, tensor in trainer.actor.gather().items()}
    finish(trainer, step, update)


def builds_late(trainer: LeasedTrainer) -> None:
    weights = before.pop(trainer)
    if trainer.actor.first:
        trainer.actor.sender.build(trainer.actor.version, weights)


# -- process groups -------------------------------------------------------------------------------------------------------

SIGN = "woke-{}"  # a file beside the devices' locks, by pipeline


def shows_that_it_woke(replica: LeasedReplica) -> None:
    expand(replica)
    (replica.folder / SIGN.format(replica.ctx.pipeline)).touch()


def rebuilds_a_group(trainer: LeasedTrainer, step: int, update: int) -> None:
    begin(trainer, step, update)
    if any(trainer.folder.glob(SIGN.format("[!" + trainer.ctx.pipeline + "]"))):
        dist.new_group([*range(dist.get_world_size())], backend="gloo")


def leaks_a_group(replica: LeasedReplica) -> None:
    expand(replica)
    dist.new_group([*range(dist.get_world_size())], backend="gloo")


def destroys_nothing(**_: Any) -> dict[str, Any]:
    return {"snapshot": {}}


# -- adapters ---------------------------------------------------------------------------------------------------------------

apply, take_turn, begin_step = ServingModel.applying, AdapterTrainer.take_turn, AdapterTrainer.begin
fill_cache, add = AdapterTrainer.fill_cache, LowRankPair.forward


def applies_the_first(replica: ServingModel, adapter: int) -> AbstractContextManager[None]:
    return apply(replica, min(adapter, 0))


def takes_the_next_turn(trainer: AdapterTrainer, version: int) -> None:
    take_turn(trainer, version + 1)


def takes_any_group(trainer: AdapterTrainer, groups: Sequence[int]) -> Batch:
    return TrainerActor.batch_of(trainer, groups)


def takes_the_optimizer_along(trainer: AdapterTrainer, step: int, update: int) -> None:
    """Adam's moments of the adapter before this one."""
    before = trainer.jobs[trainer.turn - 1]
    trainer.job.optimizer.load_state_dict(copy.deepcopy(before.optimizer.state_dict()))
    begin_step(trainer, step, update)


def moves_the_base(trainer: AdaptersTrainer) -> None:
    with torch.no_grad():
        next(trainer.actor.frozen.network.parameters()).mul_(1.001)
    trainer.actor.fill_cache()


def sends_what_never_changes(trainer: AdapterTrainer) -> None:
    adapter = (trainer.version - 1) % trainer.config.adapters
    weights = {(name, 0): tensor for name, tensor in first_tensors(trainer.config, adapter).items()}
    trainer.gather_adapter(adapter)  # collective
    if trainer.first:
        trainer.senders[adapter].build(trainer.own_version(adapter), weights)


def adds_twice_while_serving(pair: LowRankPair, x: torch.Tensor) -> torch.Tensor:
    added = add(pair, x)
    return added if torch.is_grad_enabled() else 2 * added


def forgets_adapters(replica: ServingModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    yield from replica.chunks[0].named_parameters()
