"""The job, loss and rows of a run: two training backends under one interface; the loss of the recipe, or your own with its declared
metrics checked; rollouts made once on rank 0, sent to all ranks, divided over data-parallel ranks. `split_step(ctx)` is the code under test
unless `implementation` names another.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from kit.errors import BadInput
from kit.labs.split.faults import KIT_LOSS, KIT_MODEL
from kit.labs.split.lab import NORMALIZERS, SplitConfig, loss_settings, model_config
from kit.megatron import model, observe, shards, split, tensors
from kit.megatron.split import counting_collectives, reduced
from kit.target import load
from kit.train import fsdp, rollout
from kit.train.losses import ClippedPolicyGradient, NegativeLogLikelihood
from kit.train.options import Level, Settings
from kit.train.protocol import Batch, Loss, Normalizer, Split, SplitContext, cut, cuts, rows, valid

Tensors = dict[str, torch.Tensor]
ANSWERS = 4  # per prompt
WARM = 24  # supervised updates of the tiny model; for a large model they would take longer than the lab


@dataclass(kw_only=True, slots=True)
class OwnContext:
    rank: int
    world_size: int
    device: torch.device
    config: SplitConfig


@dataclass(kw_only=True, slots=True)
class ModelContext(OwnContext):
    """For your own model. Megatron's groups exist already; `settings` are those of the kit's optimizer."""

    settings: Settings


@dataclass(kw_only=True, slots=True)
class LossContext(OwnContext):
    """For your own loss, which is made once for each level of the run."""

    level: Level


# -- the loss ----------------------------------------------------------------------------------------------------------------


def of_recipe(ctx: LossContext) -> Loss:
    if ctx.config.recipe == "nll":
        return NegativeLogLikelihood(level=ctx.level)
    return ClippedPolicyGradient(level=ctx.level, **loss_settings(ctx.config))


class WrappedLoss:
    """A loss that is called through another function, or has other normalizers."""

    def __init__(
        self, loss: Loss, call: Callable[..., Any] | None = None, names: Mapping[str, Normalizer] | None = None
    ) -> None:
        self.level = loss.level
        self.call = call or loss
        self.names = loss.normalizers() if names is None else names

    def normalizers(self) -> Mapping[str, Normalizer]:
        return self.names

    def __call__(self, logprobs: torch.Tensor, batch: Batch, **counts: float) -> Any:
        return self.call(logprobs, batch, **counts)


def make_loss(ctx: LossContext) -> Loss:
    """The loss of the config; your own is checked against the level and the metrics that it declares."""
    target = ctx.config.loss
    loss: Any = load(target)(ctx)
    if target == KIT_LOSS:
        return loss  # type: ignore[no-any-return]
    if missing := [name for name in ("level", "normalizers", "__call__") if not hasattr(loss, name)]:
        raise BadInput(f"loss={target}: the object it returned lacks {', '.join(missing)}")
    if loss.level != ctx.level:
        raise BadInput(
            f"loss={target}: its level is {loss.level!r} but ctx.level is {ctx.level!r}; use level={loss.level}"
        )
    names: dict[str, Normalizer] = dict(loss.normalizers())
    if wrong := {name: by for name, by in names.items() if by not in NORMALIZERS}:
        raise BadInput(
            f"loss={target}: normalizers() returned {wrong}; a normalizer must be 'tokens', 'sequences' or None"
        )
    if "loss" not in names:
        raise BadInput(f"loss={target}: normalizers() lacks 'loss', the metric that every step reports")

    def call(logprobs: torch.Tensor, batch: Batch, **counts: float) -> Any:
        value, seen = loss(logprobs, batch, **counts)
        if odd := sorted(set(seen) ^ set(names)):
            raise BadInput(
                f"loss={target}: normalizers() and the returned metrics differ in {', '.join(odd)}; they must have the same names"
            )
        return value, {name: torch.as_tensor(number) for name, number in seen.items()}

    return WrappedLoss(loss, call, names)


# -- the two backends --------------------------------------------------------------------------------------------------------


def visible_settings(config: SplitConfig) -> Settings:
    """Settings with a visible effect: the learning rate changes in every step, gradients are clipped, weights decay visibly."""
    return Settings(
        first_lr=1e-4,
        last_lr=2e-4,
        weight_decay=0.1,
        betas=(0.8, 0.95),
        eps=1e-6,
        clip=0.1,
        warmup=2 * config.batch,
        decay=8 * config.batch,
    )


def own_job(target: str, built: Any, device: torch.device) -> Any:
    if missing := [name for name in ("chunks", "optimizer", "scheduler") if not hasattr(built, name)]:
        raise BadInput(f"model={target}: the object it returned lacks {', '.join(missing)}")
    chunks = list(built.chunks)
    if not all(hasattr(chunk, "scale_gradients") for chunk in chunks):
        raise BadInput(
            f"model={target}: chunks are not wrapped in Megatron's DistributedDataParallel; wrap each of them"
        )
    if any(chunk.config.finalize_model_grads_func is None for chunk in chunks):
        raise BadInput(
            f"model={target}: finalize_model_grads_func in the config of a chunk is None, so gradients would not be reduced; "
            "set it to megatron.core.distributed.finalize_model_grads"
        )
    return SimpleNamespace(chunks=chunks, optimizer=built.optimizer, scheduler=built.scheduler, device=device)


def assemble(ctx: ModelContext) -> model.Training:
    return model.assemble_job(model_config(ctx.config), ctx.device, visible_settings(ctx.config))


class Megatron:
    """kit.megatron.model on groups that are created once. `fresh` makes a job on the starting weights."""

    sync, hooks = staticmethod(split.MegatronSync), staticmethod(split.step_hooks)

    def __init__(self, config: SplitConfig, weights: Tensors) -> None:
        self.config = config
        self.weights = weights
        self.model_config = model_config(config)
        self.device = model.initialise(self.model_config)
        self.merge = shards.merge if config.model == KIT_MODEL else shards.by_rank

    def fresh(self) -> Any:
        target = self.config.model
        built = load(target)(
            ModelContext(
                rank=dist.get_rank(),
                world_size=dist.get_world_size(),
                device=self.device,
                config=self.config,
                settings=visible_settings(self.config),
            )
        )
        if target != KIT_MODEL:
            return own_job(target, built, self.device)
        if self.weights:
            shards.load_full(built.chunks, self.weights)
            built.optimizer.reload_model_params()
        return built

    def parameters(self, job: Any) -> Tensors:
        """Full tensors by their Hugging Face names, on the host. Collective."""
        return self.merge(job.chunks, lambda param: param.data)

    def gradients(self, job: Any) -> Tensors:
        """The gradients that the optimizer gets. Collective."""
        return self.merge(job.chunks, reduced(job.chunks[0]))

    def counted(self, job: Any) -> contextlib.AbstractContextManager[dict[str, int]]:
        return counting_collectives(job.chunks[0])

    def state(self, job: Any) -> dict[str, str]:
        named = tensors.hashes(job.chunks, job.optimizer, ("weights", "optimizer"))
        return {**named, "scheduler": repr(job.scheduler.state_dict()), "random": str(observe.random_state())}

    def nonzero_gradients(self, job: Any) -> int:
        chunk = job.chunks[0]
        buffers = [*chunk.buffers, *chunk.expert_parallel_buffers]
        return sum(int(torch.count_nonzero(buffer.grad_data)) for buffer in buffers)


class Fsdp2:
    """kit.train.fsdp over all ranks, with the same methods."""

    sync, hooks, state = staticmethod(fsdp.FsdpSync), staticmethod(fsdp.hooks), staticmethod(fsdp.state)
    parameters, gradients = staticmethod(fsdp.full_parameters), staticmethod(fsdp.full_gradients)
    counted, nonzero_gradients = staticmethod(fsdp.counted_reductions), staticmethod(fsdp.nonzero_gradients)

    def __init__(self, config: SplitConfig, weights: Tensors, device: torch.device) -> None:
        # Megatron's groups deal the rows for both backends. Without cp all ranks are data ranks, and no other group is needed.
        groups = {"data_group": split.data_group(), "context_group": split.context_group()} if config.cp > 1 else {}
        self.fresh = functools.partial(
            fsdp.build_fsdp,
            model_config(config).geometry,
            weights,
            settings=visible_settings(config),
            dtype=model.DTYPES[config.dtype],
            device=device,
            batching=config.batching,
            token_budget=config.token_budget,
            **groups,
        )


Backend = Megatron | Fsdp2


def split_step(ctx: SplitContext) -> Split:
    if ctx.config.backend == "fsdp2":
        return fsdp.FsdpSplit(ctx.job)
    return split.MegatronSplit(ctx.job)


def chunks_of(data: Batch, chunks: int, mbs: int) -> list[Batch]:
    """The rows of a step in `chunks` parts of whole microbatches, as even as possible; 0: one microbatch per part."""
    total = rows(data) // mbs
    count = chunks or total
    ends = [total * index // count * mbs for index in range(count + 1)]
    return [cut(data, start, end) for start, end in itertools.pairwise(ends)]


def buffers_of_routers(job: Any) -> Tensors:
    """Copies of what this rank's routers keep beside their weights, found by the lab itself: every buffer of every router."""
    modules = [(name, module) for chunk in job.chunks for name, module in chunk.named_modules()]
    routers = [(name, module) for name, module in modules if name.endswith("mlp.router")]
    named = [(f"{name}.{kind}", buffer) for name, module in routers for kind, buffer in module.named_buffers()]
    return {name: buffer.detach().cpu().clone() for name, buffer in named}


# -- the rows ----------------------------------------------------------------------------------------------------------------


def rollouts(config: SplitConfig, device: torch.device) -> tuple[Tensors, Batch]:
    """Initial weights and the rows of all steps, made on rank 0."""
    total = config.batch * config.steps
    group = math.gcd(ANSWERS, total)
    made: tuple[Tensors, Batch] = ({}, {})
    if dist.get_rank() == 0:
        made = rollout.prepare_rollout(
            model_config(config).geometry,
            seed=config.seed,
            prompts=total // group,
            group=group,
            length=config.length,
            warm_steps=WARM if config.size == "tiny" else 0,
            device=device,
        )
    weights, batch = (everywhere(tensors, device) for tensors in made)
    if config.masks == "ragged":
        batch = edges(batch)
    if config.masks == "full":
        batch["sample_mask"] = torch.ones_like(batch["sample_mask"])
        batch["token_mask"] = torch.ones_like(batch["token_mask"])
        batch["input_lengths"] = torch.full_like(batch["input_lengths"], config.length)
    return weights, batch


def edges(batch: Batch) -> Batch:
    """Of four rows, the first has its first column marked as trained on, and the last two their last column. Nothing predicts the first
    column, so it must not count; a count that is shifted by one column counts it and misses the last ones, and as these are more, the
    errors cannot cancel. In the second row the first token of the answer has an advantage of exactly 0, neither positive nor negative."""
    made = {name: value.clone() for name, value in batch.items()}
    made["token_mask"][0::4, 0] = 1.0
    second = made["token_mask"][1::4]
    made["advantages"][1::4].scatter_(1, second[:, 1:].argmax(1, keepdim=True) + 1, 0.0)
    ends = torch.arange(rows(batch)) % 4 >= 2
    inside = made["token_mask"][ends, 1:-1].sum(1).clamp(min=1)
    made["token_mask"][ends, -1] = 1.0
    made["advantages"][ends, -1] = made["advantages"][ends].sum(1) / inside
    ended = made["input_lengths"][ends] < made["token_mask"].shape[1]
    for place, name in enumerate(("prev_logprobs", "generation_logprobs", "reference_logprobs")):
        made[name][ends, -1] = torch.where(ended, -5.0 - 0.1 * place, made[name][ends, -1])
    made["input_lengths"][ends] = made["token_mask"].shape[1]
    return made


def everywhere(tensors: Tensors, device: torch.device) -> Tensors:
    """Rank 0's tensors on every rank, on the host."""
    specs: list[Any] = [[(name, tuple(value.shape), value.dtype) for name, value in tensors.items()]]
    dist.broadcast_object_list(specs, src=0)
    received = {}
    for name, shape, dtype in specs[0]:
        value = tensors[name].to(device) if tensors else torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(value, src=0)
        received[name] = value.cpu()
    return received


def shifted(megatron: Megatron, step: Batch) -> Batch:
    """For experts, which no plain model supports: log-probabilities keep their distances, around those of the job itself."""
    job = megatron.fresh()
    seen: list[torch.Tensor] = []

    def keep(logprobs: torch.Tensor, _: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        seen.append(logprobs.detach().cpu())
        return split.nothing(logprobs, _)

    split.forward_backward(job, list(cuts(step, megatron.config.micro_batch)), keep)
    own = torch.zeros(rows(step), step["input_ids"].shape[1])
    if seen:
        own[:, 1:] = torch.cat(seen)
    dist.all_reduce(own_on := own.to(megatron.device), op=dist.ReduceOp.MIN)
    own = own_on.cpu() * (step["token_mask"] > 0)
    distance = own - step["prev_logprobs"]
    names = ("prev_logprobs", "generation_logprobs", "reference_logprobs")
    return {**step, **{name: step[name] + distance for name in names}}


def ratios_off_one(batch: Batch) -> float:
    """The share of valid tokens with different log-probabilities in engine and trainer; at 0 the ratios would not be tested."""
    apart = (batch["prev_logprobs"] - batch["generation_logprobs"])[:, 1:].abs() > 1e-4
    mask = valid(batch) > 0
    return float((apart & mask).sum() / mask.sum().clamp(min=1))
