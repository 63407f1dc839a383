"""The function that test_shards.py calls about adapters: it runs on all ranks and returns JSON."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.func import functional_call
from torch.nn import functional

from kit.megatron import lora, model, ownership, shards
from kit.megatron.config import LoraOptions, ModelConfig
from kit.train.options import Settings
from tests.megatron.ranks.shards import Tensors, _far, _gradients, _logits, plain, random, unequal

FAST = Settings(lr=0.1, first_lr=0.1, last_lr=0.1, warmup=0)


def drawn(config: ModelConfig, options: LoraOptions, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    first = lora.initial_adapter(config.geometry, options, seed)
    return {name: torch.randn(value.shape, generator=generator) * 0.1 for name, value in first.items()}


def adapted(targets: str, **settings: Any) -> dict[str, Any]:
    """Compare two adapters on one base with plain models of the merged weights: logits, gradients, and one step of the first."""
    config, options = ModelConfig(**settings), LoraOptions(rank=4, alpha=6.0, targets=targets)  # type: ignore[arg-type]
    tokens, labels = torch.randint(0, config.geometry.vocab, (2, 2, 16), generator=torch.Generator().manual_seed(4))
    with ownership.as_found():
        device = model.initialise(config)
        base = lora.FrozenBase(model.network(config, device), device)
        full, adapters = random(config), [drawn(config, options, seed) for seed in (1, 2)]
        shards.load_full([base.network], full)
        jobs = [lora.assemble_adapter(base, config, options, adapter, FAST) for adapter in adapters]
        result: dict[str, Any] = {
            "base_trains": [name for name, p in base.network.named_parameters() if p.requires_grad]
        }
        reference, oracle = plain(config), [{name: p.requires_grad_() for name, p in each.items()} for each in adapters]
        result["loaded"] = [unequal(shards.merge(job.chunks), each) for job, each in zip(jobs, adapters, strict=True)]
        result["logits"], outputs = [], []
        for job, adapter in zip(jobs, oracle, strict=True):
            merged = {name: value.float() for name, value in lora.merged_weights(full, adapter, options).items()}
            outputs.append(functional_call(reference, merged, (tokens,)))
            result["logits"] += [_far(each, outputs[-1].detach()) for each in _logits(job, tokens)]
        result["apart"] = _far(outputs[0].detach(), outputs[1].detach())
        full_again = dict(full)
        lora.merge_into_base(base, jobs[1].chunks[0].module)
        merged_job = model.Training(config=config, chunks=[base.network], optimizer=None, scheduler=None, device=device)
        result["merged"] = [_far(each, outputs[1].detach()) for each in _logits(merged_job, tokens)]
        shards.load_full([base.network], full_again)
        functional.cross_entropy(outputs[0].flatten(0, 1), labels.flatten()).backward()
        gradients = _gradients(jobs[0], tokens, labels)
        result["gradients"] = {
            name: _far(gradients[name], p.grad) for name, p in oracle[0].items() if p.grad is not None
        }
        result["norm"] = float(torch.stack([p.grad.norm() for p in oracle[0].values() if p.grad is not None]).norm())
        result["stepped"], result["grad_norm"], _ = jobs[0].optimizer.step()
        after = [shards.merge(job.chunks) for job in jobs]
        result["trained"] = len(unequal(after[0], adapters[0])) == len(adapters[0])
        result["other"] = unequal(after[1], {name: value.detach() for name, value in adapters[1].items()})
        result["base"] = (
            unequal(dict(shards.full_tensors([base.network])), full)
            if dist.get_rank() == 0
            else list(shards.full_tensors([base.network]))
        )
        return result
