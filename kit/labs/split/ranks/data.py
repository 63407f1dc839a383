"""Rows for every step: rollouts made once on rank 0, sent to all ranks, divided over data-parallel ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from kit.labs.split.config import model_config
from kit.megatron import split
from kit.train import rollout
from kit.train.batch import Batch, cut, cuts, rows, valid

if TYPE_CHECKING:
    from kit.labs.split.config import SplitConfig
    from kit.labs.split.ranks.backends import Megatron, Tensors

ANSWERS = 4  # per prompt
WARM = 24  # supervised updates of the tiny model; for a large model they would take longer than the lab


def rollouts(config: SplitConfig, device: torch.device) -> tuple[Tensors, Batch]:
    """Initial weights and the rows of all steps, made on rank 0."""
    total = config.batch * config.steps
    group = math.gcd(ANSWERS, total)
    made: tuple[Tensors, Batch] = ({}, {})
    if dist.get_rank() == 0:
        made = rollout.prepare(
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
    """Mark the first and last column as trained on in one row of four. Nothing predicts the first one, so it must not count. In the
    next row the first token of the answer has an advantage of exactly 0, which is neither positive nor negative."""
    made = {name: value.clone() for name, value in batch.items()}
    some = slice(0, None, 4)
    made["token_mask"][some, [0, -1]] = 1.0
    made["advantages"][some, -1] = made["advantages"][some].sum(1) / made["token_mask"][some, 1:-1].sum(1).clamp(min=1)
    others = made["token_mask"][1::4]
    made["advantages"][1::4].scatter_(1, others[:, 1:].argmax(1, keepdim=True) + 1, 0.0)
    ended = made["input_lengths"][some] < made["token_mask"].shape[1]
    for place, name in enumerate(("prev_logprobs", "generation_logprobs", "reference_logprobs")):
        made[name][some, -1] = torch.where(ended, -5.0 - 0.1 * place, made[name][some, -1])
    made["input_lengths"][some] = made["token_mask"].shape[1]
    return made


def everywhere(tensors: Tensors, device: torch.device) -> Tensors:
    """Rank 0's tensors on every rank, on the host."""
    specs: list[Any] = [[(name, tuple(value.shape), value.dtype) for name, value in tensors.items()]]
    dist.broadcast_object_list(specs, src=0)
    found = {}
    for name, shape, dtype in specs[0]:
        value = tensors[name].to(device) if tensors else torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(value, src=0)
        found[name] = value.cpu()
    return found


def steps(config: SplitConfig, whole: Batch) -> list[Batch]:
    """The rows of each step over all data-parallel ranks."""
    found = list(cuts(whole, config.batch))
    return [rollout.uneven(step, config.data_ranks) for step in found] if config.masks == "empty-rank" else found


def share(config: SplitConfig, step: Batch) -> Batch:
    """This rank's rows of a step."""
    each = config.batch // config.data_ranks
    start = dist.get_rank(split.data_group()) * each
    return cut(step, start, start + each)


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
    """The share of valid tokens whose log-probabilities differ between engine and trainer; at 0 the ratios would not be tested."""
    apart = (batch["prev_logprobs"] - batch["generation_logprobs"])[:, 1:].abs() > 1e-4
    mask = valid(batch) > 0
    return float((apart & mask).sum() / mask.sum().clamp(min=1))
