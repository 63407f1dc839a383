"""What is looked at in a job on FSDP2: whole tensors, hashes, how often gradients were reduced."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from kit.measure.observers.tensors import digest
from kit.train.fsdp.job import param_groups, sharded_modules

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.train.fsdp.job import FsdpJob


def full_parameters(job: FsdpJob) -> dict[str, torch.Tensor]:
    """Every parameter whole, on the host, as it is kept (float32, or float64); every rank calls it."""
    return {name: _whole(param.detach()) for name, param in job.model.named_parameters()}


def full_gradients(job: FsdpJob) -> dict[str, torch.Tensor]:
    """The reduced gradients, whole: until the optimizer takes its step as it finds them, afterwards clipped. Every rank calls it."""
    return {name: _whole(param.grad) for name, param in job.model.named_parameters() if param.grad is not None}


def nonzero_gradients(job: FsdpJob) -> int:
    """Elements of this rank's gradients that are not zero, reduced or still waiting to be."""
    found = [_local(param.grad) for param in job.model.parameters() if param.grad is not None]
    for module in sharded_modules(job.model):
        for group in param_groups(module._get_fsdp_state()):
            for param in group.fsdp_params:
                waiting = (
                    param.unsharded_accumulated_grad,
                    getattr(getattr(param, "_unsharded_param", None), "grad", None),
                )
                found += [_local(each) for each in waiting if each is not None]
    return sum(int(torch.count_nonzero(each)) for each in found)


def reduction_groups(job: FsdpJob) -> int:
    """How many reduce-scatters make one reduction of all gradients."""
    return len(list(sharded_modules(job.model)))


class Reductions:
    """How often the gradients of each sharded module were reduced since the last reset."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def reset(self) -> None:
        self.counts = dict.fromkeys(self.counts, 0)


@contextlib.contextmanager
def counted(job: FsdpJob) -> Iterator[Reductions]:
    """Counts while it is open. FSDP tells a parameter's hooks of every reduction that reaches it, and of nothing else."""
    seen = Reductions()
    hooks = []
    for module in sharded_modules(job.model):
        first = param_groups(module._get_fsdp_state())[0].fsdp_params[0].sharded_param
        name = next(name for name, param in job.model.named_parameters() if param is first)
        seen.counts[name] = 0

        def count(_: torch.Tensor, name: str = name) -> None:
            seen.counts[name] += 1

        hooks.append(first.register_post_accumulate_grad_hook(count))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def hooks(job: FsdpJob) -> tuple[bool, ...]:
    """Whether a backward pass reduces gradients, of each sharded module: what steps switch, and put back."""
    states = [module._get_fsdp_state() for module in sharded_modules(job.model)]
    return tuple(bool(group.reduce_grads) for state in states for group in param_groups(state))


def state(job: FsdpJob) -> dict[str, str]:
    """SHA-256 of this rank's shards of weights and optimizer state, and of its random state; the schedule as it prints."""
    found = {name: digest(_local(param)) for name, param in job.model.named_parameters()}
    for name, param in job.model.named_parameters():
        for key, value in job.optimizer.state.get(param, {}).items():
            found[f"{name}/{key}"] = digest(_local(value))
    rates = [(group["lr"], group["weight_decay"]) for group in job.optimizer.param_groups]
    found["scheduler"] = repr((job.scheduler.state_dict(), rates))
    found["random"] = digest(torch.get_rng_state())
    if job.device.type == "cuda":
        found["random/device"] = digest(torch.cuda.get_rng_state(job.device))
    return found


def _whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).cpu()


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
