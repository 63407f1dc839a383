"""A trainer and replicas of several low-rank adapters on one frozen base. The adapters train in turn, one step each.

Version v of the loop is the base with every adapter after v steps in all; adapter `v % adapters` trains next. A step's groups belong to
one adapter: groups are numbered in order, so each follows from its number. Each adapter has its own job (optimizer, scheduler, step count)
and its own sender and receivers. Versions count its steps. Adapters at their version 0 are not sent: both sides make them from
the seed, as they make the base.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from kit.actors.common import ActorContext, address_for, listen, optimizer_settings
from kit.actors.replica import ReplicaActor
from kit.actors.samples import Key
from kit.actors.trainer import TrainerActor
from kit.errors import KitError
from kit.megatron import lora, model, shards
from kit.megatron.serve import PromptRequest
from kit.megatron.tensors import Mover
from kit.sync.buckets import Cut, specs_of
from kit.sync.hashes import digest
from kit.sync.link import Listener
from kit.sync.receiver import Receiver
from kit.sync.sender import Sender
from kit.train.protocol import Batch, Split, make_split

SEEDS_APART = 7_919  # between the first weights of two adapters
ADAPTER = "adapter"  # begins the names of their tensors


def adapter_of_group(config: Any, group: int) -> int:
    adapter: int = group // config.groups % config.adapters
    return adapter


def steps_of_adapter(version: int, adapter: int, adapters: int) -> int:
    """The steps of one adapter after this many steps of all."""
    return len(range(adapter, version, adapters))


def first_tensors(config: Any, adapter: int) -> dict[str, torch.Tensor]:
    """An adapter at its version 0."""
    full = lora.initial_adapter(config.trainer_model.geometry, config.lora, config.seed + SEEDS_APART * (adapter + 1))
    return {name: tensor.to(model.DTYPES[config.trainer_model.dtype]) for name, tensor in full.items()}


def named_in_loop(adapter: int, name: str) -> str:
    """The name of an adapter's tensor among those of the base and of all adapters."""
    return f"{ADAPTER}{adapter}.{name}"


class AdapterTrainer(TrainerActor):
    """`job` and `step` are those of the adapter that trains next, `turn`."""

    def __init__(self, ctx: ActorContext, **options: Any) -> None:
        super().__init__(ctx, **options)
        self.turn = 0
        self.jobs: list[model.Training] = []
        self.steps: list[Split] = []
        self.senders: list[Sender] = []
        self.listeners: list[Listener] = []
        self.held: dict[str, list[int]] = {}  # the versions of the adapters on each replica
        if self.first:
            for adapter in range(self.config.adapters):
                self.listeners.append(self.scope.enter_context(listen(ctx, f"{ADAPTER}{adapter}")))

    def build_jobs(self) -> None:
        self.frozen = lora.FrozenBase(model.network(self.config.trainer_model, self.device), self.device)
        shards.load_full([self.frozen.network], self.base)
        made = [self.new_job(adapter) for adapter in range(self.config.adapters)]
        self.jobs, self.steps = [job for job, _ in made], [step for _, step in made]
        self.take_turn(0)

    def new_job(self, adapter: int) -> tuple[model.Training, Split]:
        """An adapter at version 0, with its own optimizer."""
        config = self.config
        settings = optimizer_settings(config, steps_of_adapter(config.steps, adapter, config.adapters))
        self.job = lora.assemble_adapter(
            self.frozen, config.trainer_model, config.lora, first_tensors(config, adapter), settings
        )
        return self.job, make_split(config.trainer, self.context(), "trainer")

    def take_turn(self, version: int) -> None:
        self.turn = version % self.config.adapters
        self.job, self.step = self.jobs[self.turn], self.steps[self.turn]

    @property
    def movers(self) -> list[Mover]:
        return [self.frozen.mover, *(job.mover for job in self.jobs)]

    def build_senders(self) -> None:
        self.senders, self.held = [], {name: [0] * self.config.adapters for name in self.config.replica_names}
        specs = [specs_of(self.gather_adapter(adapter)) for adapter in range(self.config.adapters)]
        if self.first:
            self.senders = [
                self.sender_of(tensors, listener) for tensors, listener in zip(specs, self.listeners, strict=True)
            ]

    # -- the step -------------------------------------------------------------------------------------------------------

    def batch_of(self, groups: Sequence[int]) -> Batch:
        for group in groups:
            if (owner := adapter_of_group(self.config, group)) != self.turn:
                raise KitError(
                    f"a microbatch holds rows of one adapter: group {group} is adapter {owner}'s, adapter {self.turn} trains"
                )
        return super().batch_of(groups)

    def keep(self, version: int) -> None:
        super().keep(version)
        self.take_turn(version)

    # -- weights --------------------------------------------------------------------------------------------------------

    def gather(self) -> dict[Any, torch.Tensor]:
        """Full tensors of the base and of all adapters, on rank 0. Collective."""
        full: dict[Any, torch.Tensor] = {
            (name, 0): tensor for name, tensor in shards.full_tensors([self.frozen.network])
        }
        for adapter in range(self.config.adapters):
            full |= {
                (named_in_loop(adapter, name), 0): tensor for (name, _), tensor in self.gather_adapter(adapter).items()
            }
        return full

    def gather_adapter(self, adapter: int) -> dict[Any, torch.Tensor]:
        return {(name, 0): tensor for name, tensor in shards.full_tensors(self.jobs[adapter].chunks)}

    def fill_cache(self) -> None:
        """Copy the adapter that trained last to its sender's cache. Collective."""
        adapter = (self.version - 1) % self.config.adapters
        weights = self.gather_adapter(adapter)
        if self.first:
            self.senders[adapter].build(self.own_version(adapter), weights)

    def own_version(self, adapter: int) -> int:
        return steps_of_adapter(self.version, adapter, self.config.adapters)

    def send(self, replicas: Sequence[str], woke: Sequence[str]) -> int:
        """Send each replica the adapters that it lacks: those trained since its last sync, and all trained ones if it woke. Returns the
        bytes."""
        sent = 0
        self.held |= {name: [0] * self.config.adapters for name in woke}
        for adapter, sender in enumerate(self.senders):
            version = self.own_version(adapter)
            lacking = [name for name in replicas if self.held[name][adapter] != version]
            if lacking:
                targets = [dataclasses.replace(target, state="asleep") for target in self.targets(lacking)]
                sent += sender.sync(version, targets).bytes
                for name in lacking:
                    self.held[name][adapter] = version
        return sent


class AdapterReplica(ReplicaActor):
    """Serves all adapters at once: each request runs with its own."""

    def prepare(self, cycle: int) -> None:
        super().prepare(cycle)
        self.replica.adapt(self.config.lora, self.config.adapters)

    def reset(self) -> None:
        super().reset()
        self.load_first()
        self.receivers = [
            Receiver(
                f"rank {self.ctx.rank}",
                lambda adapter=adapter: self.weights_of(adapter),  # type: ignore[misc]
                self,
                address=address_for(self.ctx, f"{ADAPTER}{adapter}"),
                device=self.ctx.device,
                timeout_s=self.config.deadline_s,
            )
            for adapter in range(self.config.adapters)
        ]

    def load_first(self) -> None:
        """The base, and every adapter at its version 0, from this rank's own copies."""
        shards.load_full(self.replica.chunks, self.base)
        for adapter, network in enumerate(self.replica.adapters):
            shards.load_full([network], first_tensors(self.config, adapter))
        self.held = [0] * self.config.adapters

    def weights_of(self, adapter: int) -> Cut:
        network = self.replica.adapters[adapter]
        return Cut(shards.destinations([network]), [param.data for param in network.parameters()])

    def request(self, key: Key) -> PromptRequest:
        if self.config.lora_merged:
            return super().request(key)
        return dataclasses.replace(super().request(key), adapter=adapter_of_group(self.config, key.group))

    def sync(self, version: int, at_sync: str, replicas: Sequence[str]) -> dict[str, Any]:  # noqa: ARG002 - as the trainer's
        """Receive the adapters that this replica lacks. A base that has the last version merged into it is loaded again first."""
        if self.config.lora_merged:
            shards.load_full(self.replica.chunks, self.base)
        for adapter, receiver in enumerate(self.receivers):
            own_version = steps_of_adapter(version, adapter, self.config.adapters)
            if self.held[adapter] != own_version:
                receiver.join()
                self.held[adapter] = own_version
        if version:
            self.engine.weights_changed(version, at_sync)  # type: ignore[arg-type]
        return {}

    def merge(self) -> None:
        """Merge the only adapter into the base, if that is asked for."""
        if self.config.lora_merged:
            assert self.replica.base is not None
            lora.merge_into_base(self.replica.base, self.replica.adapters[0])

    def digests(self, algorithm: str) -> dict[str, str]:
        table = super().digests(algorithm)
        for adapter, network in enumerate(self.replica.adapters):
            own = {name: digest(tensor, algorithm) for name, tensor in shards.full_tensors([network])}
            table |= {named_in_loop(adapter, name): value for name, value in own.items()}
        return table
