"""The trainer's ranks in the lab `stream`: one call for each order of the controller.

Rank 0 has the samples, computes advantages, and broadcasts each chunk to the others; every data rank trains on its share of the rows.
begin, microbatch, finish and abort must all give the number of the step; another number raises and changes nothing. The weights of every
version are kept on rank 0's host, for the recomputation.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kit.errors import KitError
from kit.labs import rankside
from kit.labs.rankside import Context
from kit.labs.stream.lab import replica_names, settings, trainer_model
from kit.labs.stream.ranks import (
    DIGEST,
    Inbox,
    Key,
    SampleRow,
    advantages,
    base_weights,
    optimizer_settings,
    place_of,
    rest,
    rows_of,
    syncs_of,
)
from kit.labs.stream.ranks.oracle import Fed, Oracle, advantage_errors, drift, previous_error, recorded_error
from kit.measure.phase import log_steps
from kit.megatron import model, shards, split, tensors
from kit.megatron.groups import destroy, snapshot
from kit.stream.ports import drifted
from kit.sync import hashes
from kit.sync.buckets import automatic, lay_out, specs_of
from kit.sync.cache import BASE, Cache
from kit.sync.link import Listener
from kit.sync.sender import Sender, Target
from kit.train.arithmetic import PAD
from kit.train.losses import ClippedPolicyGradient
from kit.train.protocol import Batch, Split, SplitContext, make_split, valid

EXACT = 1e-5  # how much a log-probability may differ from that of its version
NOISY = 16  # samples used to measure the noise of arithmetic


class RehearsedError(RuntimeError):
    """An error raised on purpose."""


class Open(NamedTuple):
    step: int
    update: int


class Trainer:
    """begin, microbatch ..., finish or abort of numbered steps, and the other calls of the trainer's ranks."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.config = ctx.config
        self.first = ctx.rank == 0
        self.scope = contextlib.ExitStack()
        self.open: Open | None = None
        self.failing = False
        self.previous: dict[Key, torch.Tensor] = {}  # by the weights when the step began
        self.reference: dict[Key, torch.Tensor] = {}
        self.version = 0  # of the weights
        self.weights: dict[int, dict[str, torch.Tensor]] = {}  # of every version, on rank 0, for the recomputation
        self.fed: list[Fed] = []  # every sample that was trained in this loop, on rank 0
        self.job: model.Training
        self.step: Split
        if self.first:  # replicas call as soon as their first phase runs
            self.inbox = Inbox(rows_of(ctx.meeting), self.config.deadline_s)
            self.scope.callback(self.inbox.close)
            self.listener = self.scope.enter_context(Listener(name=syncs_of(ctx.meeting)))

    # -- the loop's life ------------------------------------------------------------------------------------------------

    def prepare(self, cycle: int) -> None:  # noqa: ARG002 - phases are called with their cycle
        self.device = model.initialise(trainer_model(self.config))
        self.base = base_weights(self.config)
        if self.first:
            self.inbox.accept(replica_names(self.config))

    def reset(self) -> None:
        self.settle()
        self.job = model.assemble(trainer_model(self.config), self.device, optimizer_settings(self.config))
        shards.load_full(self.job.chunks, self.base)
        self.job.optimizer.reload_model_params()
        self.step = make_split(self.config.trainer, self.context(), "trainer")
        self.open = None
        self.updates, self.began = 0, 0.0
        self.weights, self.previous, self.reference, self.fed = {}, {}, {}, []
        self.keep(0)
        specs = specs_of(self.gather())
        if self.first:
            self.cache = Cache(lay_out(specs, automatic(specs)), timeout_s=self.config.deadline_s)
            self.sender = Sender(
                self.cache,
                self.listener,
                place=place_of(self.ctx, self.ctx.rank),
                rank=0,
                device=self.ctx.device,
                transport=self.config.transport,
                timeout_s=self.config.deadline_s,
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
            settings=optimizer_settings(self.config),
            groups=snapshot().get("groups", []),
            job=self.job,
        )

    def save(self) -> None:
        weights = {name: value.detach().clone() for name, value in self.job.named_parameters()}
        self.saved = weights, *copy.deepcopy((self.job.optimizer.state_dict(), self.job.scheduler.state_dict()))

    def load(self, version: int) -> None:
        """Load the saved state into the current job as this version."""
        weights, optimizer, scheduler = self.saved
        with torch.no_grad():
            for name, value in self.job.named_parameters():
                value.copy_(weights[name])
        self.job.optimizer.load_state_dict(optimizer)
        self.job.optimizer.reload_model_params()
        self.job.scheduler.load_state_dict(scheduler)
        self.weights = {}
        self.keep(version)

    def fail_next(self) -> None:
        self.failing = True

    def settle(self) -> None:
        """Give up an open step and the copies of the last loop."""
        if hasattr(self, "step"):
            self.step.abort()
        if hasattr(self, "cache"):
            self.cache.close()
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
        loss = ClippedPolicyGradient(**self.config.loss_options)
        self.step.begin(loss, settings(self.config).train_global_batch_size, self.config.micro_batch)
        self.open = Open(step, update)

    def microbatch(self, step: int, update: int, groups: Sequence[int]) -> dict[str, Any]:
        """Train on these groups. Does nothing without a valid token."""
        self._need("microbatch", step, update)
        if self.failing:
            self.failing = False
            raise RehearsedError(f"a microbatch of step {step} raises on purpose")
        began = time.monotonic()
        batch = self.batch_of(groups)
        tokens = int(valid(batch).sum())
        if tokens:
            self.step.microbatch(split.share(batch))
        if self.first:
            self.observe(self.inbox.take(self.keys(groups)), batch)
        rest(began, self.config.train_pace_ms * len(groups) * self.config.group)
        return {"tokens": tokens}

    def observe(self, rows: Sequence[SampleRow], batch: Batch) -> None:
        for place, row in enumerate(rows):
            self.fed.append(Fed(row, self.version, {name: value[place] for name, value in batch.items()}))
            digest = hashlib.sha256(repr((row.tokens, row.logprobs)).encode()).hexdigest()
            self.ctx.record("tokens_digest", None, text=digest, group=row.group, sample=row.sample)

    def finish(self, step: int, update: int) -> None:
        self._need("finish", step, update)
        result = self.step.finish()
        self.open = None
        self.updates += 1
        took = time.perf_counter() - self.began
        log_steps([result], done=self.updates, seconds=took, device=str(self.ctx.device), what=f"outer step {step}")
        if self.first:
            for metric in ("global_loss", "grad_norm"):
                self.ctx.record(metric, result[metric], step=step, update=update)

    def abort(self, step: int) -> None:
        if self.open is not None and self.open.step != step:
            raise KitError(f"abort of step {step}: step {self.open.step} is open")
        self.step.abort()
        self.open = None

    def clear(self, step: int, update: int, groups: Sequence[int]) -> int:  # noqa: ARG002 - calls have the step's number
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

    def _need(self, call: str, step: int, update: int) -> None:
        if self.open != (step, update):
            there = "no step" if self.open is None else f"step {self.open.step}, update {self.open.update}"
            raise KitError(f"{call} of step {step}, update {update}: {there} is open")

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
        advantage = advantages({row.key: row.reward for row in rows}, self.config.advantage)
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
        """Record the digest of the current weights as this version; keep a copy on rank 0's host for the recomputation. Collective."""
        self.version = version
        full = {name: tensor.detach().to("cpu", copy=True) for name, tensor in shards.full_tensors(self.job.chunks)}
        if self.first:
            if self.config.runs("verify"):
                self.weights[version] = full
            digests = {name: tensors.tensor_digest(tensor) for name, tensor in full.items()}
            self.ctx.record("digest", None, text=rankside.digest(digests), version=version)

    # -- the recomputation ----------------------------------------------------------------------------------------------

    def verify(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Recompute every trained token under the weights of every version."""
        if not self.first:
            return
        oracle = Oracle(
            trainer_model(self.config).geometry,
            self.weights,
            temperature=self.config.temperature,
            keeps=self.config.at_sync == "keep",
        )
        rows = [fed.row for fed in self.fed]
        for row in rows:
            self.ctx.record("recomputed", None, text=row.digest, **row.key._asdict(), attempt=row.attempt)
        for version, weights in self.weights.items():
            table = {name: hashes.digest(tensor, DIGEST) for name, tensor in weights.items()}
            self.ctx.record("recomputed_by", None, text=rankside.digest(table), version=version)
        noise = oracle.noise(self.weights, rows[:NOISY])
        judged = [oracle.judge(row) for row in rows]
        policies = [sample.policies(noise) for sample in judged]
        shuffled = [oracle.judge(sample) for sample in map(self.shuffled, rows[:NOISY])]
        for metric, number in {
            "noise": noise,
            "samples": len(judged),
            "samples_over_syncs": sum(len({*row.versions}) > 1 for row in rows),
            "tokens": sum(len(row.answer) for row in rows),
            "decidable": sum(sum(sample.decidable(noise)) for sample in judged),
            "wrong_stamps": sum(len(sample.wrong_stamps(noise)) for sample in judged),
            "shuffled": sum(sum(sample.decidable(noise)) for sample in shuffled),
            "shuffled_found": sum(len(sample.wrong_stamps(noise)) for sample in shuffled),
            "logprob_error": max((max(sample.nearest) for sample in judged), default=0.0),
            "of_no_version": sum(sum(error > EXACT for error in sample.nearest) for sample in judged),
            "stale_prefixes": sum(oracle.from_stale_prompt(sample, noise) for sample in judged),
            "policy_decidable": sum(shown for shown, _ in policies),
            "policy_wrong": sum(wrong for _, wrong in policies),
            "advantage_error": max(advantage_errors(self.fed, self.config.advantage), default=0.0),
            "previous_error": max((previous_error(oracle, fed, self.config.previous) for fed in self.fed), default=0.0),
            "recorded_error": max((recorded_error(fed) for fed in self.fed), default=0.0),
        }.items():
            self.ctx.record(metric, number)
        for (lag, position), differences in drift(oracle, self.fed).items():
            for metric, number in drifted(differences).items():
                self.ctx.record(metric, number, lag=lag, position=position, tokens=len(differences))

    def shuffled(self, row: SampleRow) -> SampleRow:
        """A control: the sample with every stamp moved to the next version (the last to the first), so every stamp is wrong."""
        return dataclasses.replace(row, versions=tuple((stamp + 1) % len(self.weights) for stamp in row.versions))
