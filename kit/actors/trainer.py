"""The trainer's ranks: one call for each order of the controller.

Rank 0 has the samples, computes advantages, and broadcasts each chunk to the others; every data rank trains on its share of the rows.
begin, microbatch, finish and abort must all give the number of the step; another number raises and changes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kit.actors.common import (
    ActorContext,
    base_weights,
    listen,
    optimizer_settings,
    place_of,
    rest,
)
from kit.actors.samples import Inbox, Key, SampleRow, advantages
from kit.errors import KitError
from kit.measure.phase import log_steps
from kit.megatron import model, shards, split
from kit.megatron.groups import destroy, snapshot
from kit.megatron.tensors import Mover
from kit.sync.buckets import Spec, automatic, lay_out, specs_of
from kit.sync.cache import BASE, Cache
from kit.sync.link import Listener
from kit.sync.sender import Sender, Target
from kit.train.arithmetic import PAD
from kit.train.losses import ClippedPolicyGradient
from kit.train.protocol import Batch, Loss, Split, SplitContext, make_split, valid

# Results of an update that are recorded where the split step gives them, beside its loss and gradient norm.
LOGGED = ("lr", "gen_kl_error", "kl_penalty", "approx_entropy", "sampling_importance_ratio")


class Open(NamedTuple):
    step: int
    update: int


Weights = Mapping[tuple[str, int], torch.Tensor]


class TrainerActor:
    """begin, microbatch ..., finish or abort of numbered steps, and the other calls of the trainer's ranks.

    `on_version` is called on rank 0 with each new version of the full weights; `on_samples` with the samples of each microbatch, after it.
    """

    def __init__(
        self,
        ctx: ActorContext,
        *,
        on_version: Callable[[int, Weights], None],
        on_samples: Callable[[Sequence[SampleRow], Batch], None] = lambda *_: None,
    ) -> None:
        self.ctx = ctx
        self.config = ctx.config
        self.on_version, self.on_samples = on_version, on_samples
        self.first = ctx.rank == 0
        self.scope = contextlib.ExitStack()
        self.open: Open | None = None
        self.previous: dict[Key, torch.Tensor] = {}  # by the weights when the step began
        self.reference: dict[Key, torch.Tensor] = {}
        self.version = 0  # of the weights
        self.caches: list[Cache] = []
        self.job: model.Training
        self.step: Split
        if self.first:  # replicas call as soon as their first phase runs
            self.inbox = Inbox(listen(ctx, "rows"), self.config.deadline_s)
            self.scope.callback(self.inbox.close)
            self.listener = self.scope.enter_context(listen(ctx, "sync"))

    # -- the loop's life ------------------------------------------------------------------------------------------------

    def prepare(self, cycle: int) -> None:  # noqa: ARG002 - phases are called with their cycle
        self.device = model.initialise(self.config.trainer_model)
        self.base = base_weights(self.config)
        if self.first:
            self.inbox.accept(self.config.replica_names)

    def reset(self) -> None:
        self.settle()
        self.build_jobs()
        self.open = None
        self.updates, self.began, self.advantage_s = 0, 0.0, 0.0
        self.previous, self.reference = {}, {}
        self.keep(0)
        self.build_senders()

    def build_jobs(self) -> None:
        self.job = model.assemble_job(
            self.config.trainer_model, self.device, optimizer_settings(self.config, self.config.steps)
        )
        shards.load_full(self.job.chunks, self.base)
        self.job.optimizer.reload_model_params()
        self.step = make_split(self.config.trainer, self.context(), "trainer")

    @property
    def movers(self) -> list[Mover]:
        """Of all jobs, in the order in which they come to the device."""
        return [self.job.mover]

    def build_senders(self) -> None:
        specs = specs_of(self.gather())
        if self.first:
            self.sender = self.sender_of(specs, self.listener)

    def sender_of(self, specs: Sequence[Spec], listener: Listener) -> Sender:
        """A sender of tensors of this layout, with its own cache; `settle` closes it."""
        cache = Cache(lay_out(specs, automatic(specs)), timeout_s=self.config.deadline_s)
        self.caches.append(cache)
        return Sender(
            cache,
            listener,
            place=place_of(self.ctx, self.ctx.rank),
            rank=0,
            device=self.ctx.device,
            transport=self.config.transport,
            timeout_s=self.config.deadline_s,
            config={"host": self.ctx.host} if self.ctx.host else {},
        )

    def context(self) -> SplitContext:
        return SplitContext(
            rank=self.ctx.rank,
            world_size=self.config.trainer_ranks,
            device=self.device,
            config=self.config,
            chunks=self.job.chunks,
            optimizer=self.job.optimizer,
            scheduler=self.job.scheduler,
            settings=optimizer_settings(self.config, self.config.steps),
            groups=snapshot().get("groups", []),
            job=self.job,
        )

    def settle(self) -> None:
        """Give up an open step, the copies of the last loop, and the host memory of what was moved."""
        if hasattr(self, "step"):
            self.give_up()
            for mover in self.movers:
                mover.close()
        while self.caches:
            self.caches.pop().close()
        if self.first:
            self.inbox.clear({key.group for key in self.inbox.stored})

    def end(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self.settle()
        self.scope.close()
        destroy()

    def sync(self, version: int, at_sync: str, replicas: Sequence[str]) -> dict[str, Any]:  # noqa: ARG002 - replicas look at it
        """Send the current weights to these replicas as this version; version 0 only compares digests."""
        if version > self.version:
            self.keep(version)
        if not self.first:
            self.gather()
            return {}
        return {"bytes": self.sender.sync(version or BASE, self.targets(replicas), self.gather).bytes}

    def gather(self) -> dict[Any, torch.Tensor]:
        """Full tensors of the live weights, on rank 0. Collective."""
        return {(name, 0): tensor for name, tensor in shards.full_tensors(self.job.chunks)}

    def targets(self, replicas: Sequence[str]) -> list[Target]:
        """Every rank of these replicas; they pause while they wait for the weights."""
        return [
            Target(name=f"rank {rank}", rank=rank, place=place_of(self.ctx, rank), state="paused", replica=name)
            for name in replicas
            for rank in self.ctx.roles[name]
        ]

    # -- the step -------------------------------------------------------------------------------------------------------

    def begin(self, step: int, update: int) -> None:
        if self.open is not None:
            raise KitError(
                f"begin of step {step}, update {update}: step {self.open.step}, update {self.open.update} is open"
            )
        self.began = time.perf_counter()
        self.step.begin(self.loss(), self.config.update_samples, self.config.micro_batch)
        self.open = Open(step, update)
        self.advantage_s = 0.0

    def loss(self) -> Loss:
        return ClippedPolicyGradient(**self.config.loss_options)

    def microbatch(self, step: int, update: int, groups: Sequence[int]) -> dict[str, Any]:
        """Train on these groups. Does nothing without a valid token."""
        self.need("microbatch", step, update)
        began = time.monotonic()
        batch = self.batch_of(groups)
        tokens = int(valid(batch).sum())
        if tokens:
            given = {name: value.clone() for name, value in batch.items()}  # own code may write into what it gets
            self.step.microbatch(split.rank_share(given))
        if self.first:
            self.observe(self.inbox.take(self.keys(groups)), batch)
        rest(began, self.config.train_pace_ms * len(groups) * self.config.group)
        return {"tokens": tokens}

    def observe(self, rows: Sequence[SampleRow], batch: Batch) -> None:
        for row in rows:
            digest = hashlib.sha256(repr((row.tokens, row.logprobs)).encode()).hexdigest()
            self.ctx.record("tokens_digest", None, text=digest, group=row.group, sample=row.sample)
        self.on_samples(rows, batch)

    def finish(self, step: int, update: int) -> None:
        self.need("finish", step, update)
        result = self.step.finish()
        self.open = None
        self.updates += 1
        took = time.perf_counter() - self.began
        log_steps([result], done=self.updates, seconds=took, device=str(self.ctx.device), what=f"outer step {step}")
        if self.first:
            for metric in ("global_loss", "grad_norm"):
                self.ctx.record(metric, result[metric], step=step, update=update)
            more = {**result.get("metrics", {}), "lr": result.get("lr")}  # own code may leave them out
            for metric in LOGGED:
                if isinstance(value := more.get(metric), (int, float)):
                    self.ctx.record(metric, value, step=step, update=update)
            self.ctx.record("advantage_seconds", self.advantage_s, "s", step=step, update=update)

    def abort(self, step: int) -> None:
        if self.open is not None and self.open.step != step:
            raise KitError(f"abort of step {step}: step {self.open.step} is open")
        self.give_up()

    def give_up(self) -> None:
        """Give up the step that is open, if any."""
        self.step.abort()
        self.open = None

    def clear(self, step: int, groups: Sequence[int], update: int = 0) -> int:  # noqa: ARG002 - calls have the step's number
        """Drop the samples of these trained groups; returns how many were dropped."""
        return self.drop(groups)

    def discard(self, group: int) -> int:
        return self.drop([group])

    def drop(self, groups: Sequence[int]) -> int:
        gone = set(groups)
        for kept in (self.previous, self.reference):
            for key in [key for key in kept if key.group in gone]:
                del kept[key]
        return self.inbox.clear(gone) if self.first else 0

    def need(self, call: str, step: int, update: int) -> None:
        if self.open != (step, update):
            opened = "no step" if self.open is None else f"step {self.open.step}, update {self.open.update}"
            raise KitError(f"{call} of step {step}, update {update}: {opened} is open")

    # -- samples --------------------------------------------------------------------------------------------------------

    def logprobs(self, step: int, groups: Sequence[int], which: str) -> None:  # noqa: ARG002 - as above
        """Recompute the previous policy's (`previous`) or the reference's log-probabilities of these groups with the current weights."""
        scored = split.logprobs(self.job, self.batch_of(groups), self.config.micro_batch)
        kept = self.previous if which == "previous" else self.reference
        kept.update(zip(self.keys(groups), scored, strict=True))

    def keys(self, groups: Sequence[int]) -> list[Key]:
        return [Key(group, sample) for group in groups for sample in range(self.config.group)]

    def batch_of(self, groups: Sequence[int]) -> Batch:
        """All samples of these groups, on every rank. Collective."""
        made: list[Any] = [None]
        if self.first:
            try:
                made = [self.assemble(self.inbox.take(self.keys(groups)))]
            except KitError as error:  # raised on every rank, so none waits for the others
                made = [str(error)]
        dist.broadcast_object_list(made, 0)
        if isinstance(made[0], str):
            raise KitError(made[0])
        batch: Batch = made[0]
        return batch

    def assemble(self, rows: Sequence[SampleRow]) -> Batch:
        count, length = len(rows), self.config.length
        ids = torch.full((count, length), PAD)
        numbers = {name: torch.zeros(count, length) for name in ("token_mask", "advantages", "generation_logprobs")}
        began = time.perf_counter()
        advantage = advantages({row.key: row.reward for row in rows})
        self.advantage_s += time.perf_counter() - began
        for place, row in enumerate(rows):
            begin, end = len(row.prompt), len(row.tokens)
            ids[place, :end] = torch.tensor(row.tokens)
            numbers["token_mask"][place, begin:end] = 1.0
            numbers["advantages"][place, begin:end] = advantage[row.key]
            numbers["generation_logprobs"][place, begin:end] = torch.tensor(row.logprobs)
        recorded = numbers["generation_logprobs"]
        return {
            "input_ids": ids,
            "input_lengths": torch.tensor([len(row.tokens) for row in rows]),
            "sample_mask": torch.ones(count),
            **numbers,
            **{  # as recomputed, else as recorded
                name: torch.stack([kept.get(row.key, recorded[place]) for place, row in enumerate(rows)])
                for name, kept in (("prev_logprobs", self.previous), ("reference_logprobs", self.reference))
            },
        }

    # -- weights --------------------------------------------------------------------------------------------------------

    def keep(self, version: int) -> None:
        """Call the current weights this version. Collective."""
        self.version = version
        weights = self.gather()
        if self.first:
            self.on_version(version, weights)
