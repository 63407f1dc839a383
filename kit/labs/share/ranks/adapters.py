"""The ranks of a pipeline that trains adapters in turn, and how their numbers are checked: each adapter is trained again alone,
and each sample is recomputed by a plain model with the merged weights of its adapter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from kit.actors.adapters import (
    ADAPTER,
    AdapterReplica,
    AdapterTrainer,
    adapter_of_group,
    named_in_loop,
    steps_of_adapter,
)
from kit.actors.common import DIGEST
from kit.actors.samples import Key, SampleRow
from kit.actors.trainer import Weights
from kit.labs import rankside
from kit.labs.rankside import Context
from kit.labs.share.ranks.roles import LeasedReplica, LeasedTrainer
from kit.labs.share.ranks.side import PipelineContext
from kit.megatron import lora, shards, split
from kit.megatron.serve import NO_ADAPTER
from kit.megatron.shards import Tensors
from kit.sync import hashes
from kit.train.arithmetic import END
from kit.train.plain import PlainModel, from_weights
from kit.train.protocol import Batch


class AdaptersTrainer(LeasedTrainer):
    actor: AdapterTrainer

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx, AdapterTrainer, on_samples=self.note_samples)
        self.forget()

    def forget(self) -> None:
        self.rows: defaultdict[int, dict[Key, SampleRow]] = defaultdict(dict)  # by the number of their step
        # By version, on rank 0, in host memory: the adapters; of version 0 the base too.
        self.kept: dict[int, Tensors] = {}

    def reset(self, folder: str, alone: bool) -> None:
        self.forget()
        super().reset(folder, alone)

    def note_version(self, version: int, weights: Weights) -> None:
        super().note_version(version, weights)
        table = {name: hashes.digest(tensor, DIGEST) for (name, _), tensor in weights.items()}
        record_parts(self.ctx, table, version=version, where=self.ctx.role)
        self.kept[version] = {
            name: tensor.detach().to("cpu", copy=True)
            for (name, _), tensor in weights.items()
            if not version or name.startswith(ADAPTER)
        }

    def begin(self, step: int, update: int) -> None:
        # An attempt before this one was aborted, and may have had other groups.
        self.rows.pop(self.actor.version, None)
        super().begin(step, update)

    def note_samples(self, rows: Sequence[SampleRow], _: Batch) -> None:
        for row in rows:
            self.rows[self.actor.version][row.key] = row
            self.ctx.record("trained_row", None, group=row.group, sample=row.sample, adapter=self.actor.turn)

    def fill_cache(self) -> None:
        self.actor.fill_cache()

    def sync(
        self,
        version: int,
        at_sync: str,  # noqa: ARG002 - replicas look at it
        replicas: Sequence[str],
        woke: Sequence[str] = (),
    ) -> dict[str, Any]:
        if not self.actor.first or not replicas:
            return {}
        self.refuse_other_version(version)
        with self.lease.timed("send"):
            return {"bytes": self.actor.send(replicas, woke)}

    # -- the numbers ----------------------------------------------------------------------------------------------------

    def verify(self, cycle: int) -> None:  # noqa: ARG002 - phases are called with their cycle
        """After the loop, off the devices: on the CPU that is the same memory."""
        self.bring_groups_back()
        for mover in self.actor.movers:
            mover.restore()
        batches = self.batches()
        for adapter in range(self.ctx.config.adapters):
            self.train_alone(adapter, batches)
        if self.actor.first:
            for step, rows in sorted(self.rows.items()):
                self.recompute(step, [*rows.values()])
        for mover in self.actor.movers:
            mover.release()
        self.let_groups_go()

    def batches(self) -> dict[int, Batch]:
        """The rows of each step, on every rank. Collective."""
        made: list[Any] = [None]
        if self.actor.first:
            made = [{step: self.actor.assemble([*rows.values()]) for step, rows in self.rows.items()}]
        torch.distributed.broadcast_object_list(made, 0)
        batches: dict[int, Batch] = made[0]
        return batches

    def train_alone(self, adapter: int, batches: dict[int, Batch]) -> None:
        """Train this adapter from its version 0 on its own rows, with no other adapter, and compare every version."""
        config = self.ctx.config
        job, step = self.actor.new_job(adapter)
        for number in range(adapter, len(batches), config.adapters):
            step.begin(self.actor.loss(), config.update_samples, config.micro_batch)
            step.microbatch(split.rank_share(batches[number]))
            step.finish()
            own = dict(shards.full_tensors(job.chunks))
            if self.actor.first:
                kept = self.kept[number + 1]
                apart = [name for name, tensor in own.items() if not tensor.equal(kept[named_in_loop(adapter, name)])]
                self.ctx.record("apart_from_alone", len(apart), adapter=adapter, step=number)

    def recompute(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Record how far a step's samples are from a plain model with the merged weights of their own adapter, and how far that is from
        the nearest of the base and the other adapters, once the adapter has been trained."""
        config = self.ctx.config
        models = [self.merged(step, adapter) for adapter in (*range(config.adapters), NO_ADAPTER)]
        for row in rows:
            own = adapter_of_group(config, row.group)
            recorded = torch.tensor(row.logprobs, dtype=torch.float64)
            known = [logprobs_of(plain, row, config.temperature) for plain in models]
            ids: dict[str, Any] = {"group": row.group, "sample": row.sample, "adapter": own}
            self.ctx.record("own_adapter_error", float((known[own] - recorded).abs().max()), **ids)
            gaps = [float((other - known[own]).abs().max()) for place, other in enumerate(known) if place != own]
            if steps_of_adapter(step, own, config.adapters):
                self.ctx.record("other_adapter_gap", min(gaps), **ids)

    def merged(self, step: int, adapter: int) -> PlainModel:
        start, weights = named_in_loop(adapter, ""), self.kept[step]
        base = {name: tensor for name, tensor in self.kept[0].items() if not name.startswith(ADAPTER)}
        own = {name.removeprefix(start): tensor for name, tensor in weights.items() if name.startswith(start)}
        config = self.ctx.config
        full = lora.merged_weights(base, own, config.lora)  # that of NO_ADAPTER is the base
        return from_weights(config.trainer_model.geometry, full, dtype=torch.float64)


@torch.no_grad()
def logprobs_of(plain: PlainModel, row: SampleRow, temperature: float) -> torch.Tensor:
    """The log-probability of each token of an answer."""
    begin = len(row.prompt)
    logits = plain(torch.tensor([row.tokens]))[0, begin - 1 : -1] / temperature
    logits[: row.minimum, END] = -torch.inf  # an answer could not end there
    written: torch.Tensor = logits.log_softmax(-1).gather(1, torch.tensor(row.answer)[:, None])[:, 0]
    return written


class AdaptersReplica(LeasedReplica):
    actor: AdapterReplica

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx, AdapterReplica)

    def shrink(self) -> dict[str, Any]:
        answer = super().shrink()
        size = sum(
            weight.untyped_storage().nbytes()
            for adapter in self.actor.replica.adapters
            for weight in adapter.parameters()
        )
        self.ctx.record("adapter_bytes_asleep", size, "B", replica=self.number)
        return answer

    def sync(
        self,
        version: int,
        at_sync: str,
        replicas: Sequence[str],
        woke: Sequence[str] = (),  # noqa: ARG002 - as the trainer's
    ) -> dict[str, Any]:
        answer = super().sync(version, at_sync, replicas)
        self.actor.merge()
        return answer

    def fill_blank(self, version: int) -> None:  # noqa: ARG002 - the base and first adapters are never sent
        self.actor.load_first()

    def note_served(self, table: dict[str, str], version: int) -> None:
        super().note_served(table, version)
        record_parts(self.ctx, table, version=version, where=self.ctx.role)


def record_parts(ctx: PipelineContext, table: dict[str, str], **ids: Any) -> None:
    """Record the digests of the base and of each adapter, from those of all tensors."""
    base = {name: value for name, value in table.items() if not name.startswith(ADAPTER)}
    ctx.record("base_digest", None, text=rankside.digest_of_hashes(base), **ids)
    for adapter in range(ctx.config.adapters):
        start = named_in_loop(adapter, "")
        own = {name: value for name, value in table.items() if name.startswith(start)}
        ctx.record("adapter_digest", None, text=rankside.digest_of_hashes(own), adapter=adapter, **ids)
