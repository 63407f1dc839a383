"""The load-balancing loss of experts in float64 from the inputs of the routers, independent of the code that reports it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from kit.megatron import split
from kit.megatron.balance import clear_aux
from kit.train.batch import cuts

if TYPE_CHECKING:
    from kit.train.batch import Batch

METRIC = "moe_aux_loss"


def balance(hidden: torch.Tensor, weight: torch.Tensor, choices: int) -> float:
    """E * sum(f P) for the router of one layer and one microbatch: f is the share of choices of each of the E experts, P the mean of
    its softmax probability."""
    tokens = hidden.double().flatten(0, -2)
    chances = torch.softmax(tokens @ weight.double().T, dim=-1)
    chosen = chances.argsort(dim=-1, descending=True)[:, :choices]
    share = torch.bincount(chosen.flatten(), minlength=len(weight)).double() / chosen.numel()
    return float(len(weight) * torch.dot(share, chances.mean(0)))


def balance_of_step(job: Any, batch: Batch, micro_batch: int) -> float:
    """The mean over layers, microbatches and data-parallel ranks, on the initial weights. Every rank calls it with its own rows."""
    found: list[float] = []

    def look(router: Any, given: Any) -> None:
        found.append(balance(given[0].detach(), router.weight.detach(), router.topk))

    modules = [module for chunk in job.chunks for name, module in chunk.named_modules() if name.endswith("mlp.router")]
    hooks = [module.register_forward_pre_hook(look) for module in modules]
    split.forward_backward(job, list(cuts(batch, micro_batch)), split.nothing)
    for hook in hooks:
        hook.remove()
    clear_aux()
    total = torch.tensor([sum(found), len(found)], dtype=torch.float64, device=job.device)
    dist.all_reduce(total)
    return float(total[0] / total[1])
