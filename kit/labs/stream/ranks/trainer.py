"""The trainer of the lab `stream`: that of a loop, which can be saved and loaded, and whose every token can be recomputed.

The weights of every version are kept on rank 0's host, for the recomputation.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from kit.actors.common import DIGEST
from kit.actors.samples import SampleRow
from kit.actors.trainer import TrainerActor, Weights
from kit.errors import RehearsedError
from kit.labs import rankside
from kit.labs.rankside import Context
from kit.labs.stream.ranks.draws import Drawn, evidence, mean_evidence
from kit.labs.stream.ranks.learned import EXACT, WatchedLoss, learned
from kit.labs.stream.ranks.oracle import (
    FedSample,
    Oracle,
    advantage_errors,
    previous_error,
    recorded_error,
    token_drift,
)
from kit.megatron import model, tensors
from kit.stream.ports import drifted
from kit.sync import hashes
from kit.train.protocol import Batch, Loss

MOST_NOISE = {
    torch.float32: EXACT,
    torch.bfloat16: 0.1,
}  # the most that noise of an engine at rest excuses, unless a plain model has more
NOISY = 16  # samples used to measure the noise of arithmetic


class Trainer(TrainerActor):
    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx, on_version=self.note_version, on_samples=self.note_samples)
        self.failing = False
        self.weights: dict[int, dict[str, torch.Tensor]] = {}  # of every version, on rank 0, for the recomputation
        self.fed: list[FedSample] = []  # every sample that was trained in this loop, on rank 0
        self.of_update = 0  # where those of the open update begin
        self.engine_noise = 0.0  # of the replicas' log-probabilities at rest, where an engine serves

    @property
    def dtype(self) -> torch.dtype:
        return model.DTYPES[self.config.dtype]

    def reset(self) -> None:
        self.weights, self.fed, self.of_update = {}, [], 0
        super().reset()

    def allow(self, noise: float) -> None:
        self.engine_noise = noise

    def note_version(self, version: int, weights: Weights) -> None:
        """Record the digest of a version, and keep a copy of it in host memory where it is recomputed."""
        full = {name: tensor.detach().to("cpu", copy=True) for (name, _), tensor in weights.items()}
        if self.config.runs("verify"):
            self.weights[version] = full
        digests = {name: tensors.tensor_digest(tensor) for name, tensor in full.items()}
        self.ctx.record("digest", None, text=rankside.digest_of_hashes(digests), version=version)

    def note_samples(self, rows: Sequence[SampleRow], batch: Batch) -> None:
        for place, row in enumerate(rows):
            self.fed.append(FedSample(row, self.version, {name: value[place] for name, value in batch.items()}))

    def loss(self) -> Loss:
        self.watched = WatchedLoss(super().loss())
        self.of_update = len(self.fed)
        return self.watched

    def finish(self, step: int, update: int) -> None:
        """Finish the update, and record which samples moved the weights."""
        super().finish(step, update)
        flowed = self.watched.gathered()
        if self.first:
            samples = learned(self.watched.loss, self.fed[self.of_update :], flowed, MOST_NOISE[self.dtype])
            self.ctx.record("learning", len(samples), step=step, update=update, passes=len(flowed))
            for key, (times, changed) in samples.items():
                self.ctx.record(
                    "learned", times, text=", ".join(sorted(changed)), step=step, update=update, **key._asdict()
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
        self.job.optimizer.load_state_dict(optimizer)  # with its master copies, where the weights are bfloat16
        self.job.scheduler.load_state_dict(scheduler)
        self.weights = {}
        self.keep(version)

    def fail_next(self) -> None:
        self.failing = True

    def microbatch(self, step: int, update: int, groups: Sequence[int]) -> dict[str, Any]:
        self.need("microbatch", step, update)
        if self.failing:
            self.failing = False
            raise RehearsedError(f"a microbatch of step {step} raises on purpose")
        return super().microbatch(step, update, groups)

    # -- the recomputation ----------------------------------------------------------------------------------------------

    def verify(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Recompute every trained token under the weights of every version."""
        if not self.first:
            return
        oracle = Oracle(
            self.config.trainer_model.geometry,
            self.weights,
            temperature=self.config.temperature,
            keeps=self.config.at_sync == "keep",
            sampled_in=self.dtype,
        )
        rows = [fed.row for fed in self.fed]
        for row in rows:
            self.ctx.record("recomputed", None, text=row.digest, **row.key._asdict(), attempt=row.attempt)
        for version, weights in self.weights.items():
            table = {name: hashes.digest(tensor, DIGEST) for name, tensor in weights.items()}
            self.ctx.record("recomputed_by", None, text=rankside.digest_of_hashes(table), version=version)
        plain_noise = oracle.noise(self.weights, rows[:NOISY])
        noise = max(plain_noise, self.engine_noise)
        allowed = oracle.apart * noise if self.engine_noise or self.dtype is not torch.float32 else EXACT
        if self.engine_noise:
            allowed = min(allowed, max(MOST_NOISE[self.dtype], oracle.apart * plain_noise))
            self.ctx.record("engine_noise", self.engine_noise)
        judged = [oracle.judge(row) for row in rows]
        policies = [sample.policies(noise) for sample in judged]
        shuffled = [oracle.judge(sample) for sample in map(self.shuffled, rows[:NOISY])]
        for metric, number in {
            "noise": noise,
            "allowed": allowed,
            "samples": len(judged),
            "samples_over_syncs": sum(len({*row.versions}) > 1 for row in rows),
            "tokens": sum(len(row.answer) for row in rows),
            "decidable": sum(sum(sample.decidable(noise)) for sample in judged),
            "wrong_stamps": sum(len(sample.wrong_stamps(noise)) for sample in judged),
            "shuffled": sum(sum(sample.decidable(noise)) for sample in shuffled),
            "shuffled_found": sum(len(sample.wrong_stamps(noise)) for sample in shuffled),
            "logprob_error": max((max(sample.nearest) for sample in judged), default=0.0),
            "of_no_version": sum(sum(error > allowed for error in sample.nearest) for sample in judged),
            "stale_prefixes": sum(oracle.from_stale_prompt(sample, noise) for sample in judged),
            "policy_decidable": sum(shown for shown, _ in policies),
            "policy_wrong": sum(wrong for _, wrong in policies),
            "advantage_error": max(advantage_errors(self.fed), default=0.0),
            "previous_error": max((previous_error(oracle, fed, self.config.previous) for fed in self.fed), default=0.0),
            "recorded_error": max((recorded_error(fed) for fed in self.fed), default=0.0),
        }.items():
            self.ctx.record(metric, number)
        self.note_draws(oracle, rows, noise)
        for (lag, position), differences in token_drift(oracle, self.fed).items():
            for metric, number in drifted(differences).items():
                self.ctx.record(metric, number, lag=lag, position=position, tokens=len(differences))

    def note_draws(self, oracle: Oracle, rows: Sequence[SampleRow], noise: float) -> None:
        drawn: defaultdict[int, list[Drawn]] = defaultdict(list)
        for row in rows:
            drawn[row.group].append(Drawn(oracle.distributions(row), row.answer))
        logs = evidence(drawn, noise)
        self.ctx.record("evidence", mean_evidence(logs.values()))
        for suspicion, value in logs.items():
            self.ctx.record("evidence_for", value, suspicion=suspicion)

    def shuffled(self, row: SampleRow) -> SampleRow:
        """A control: the sample with every stamp moved to the next version (the last to the first), so every stamp is wrong."""
        return dataclasses.replace(row, versions=tuple((stamp + 1) % len(self.weights) for stamp in row.versions))
