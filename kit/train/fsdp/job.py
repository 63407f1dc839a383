"""A plain model under `fully_shard`, its AdamW and its schedule: what a training step works on, and what is looked at in it.

Over gloo on the host and NCCL on GPUs; one group of ranks, all of them data ranks. Gradients are sums over the ranks, never means.
bfloat16 computes on copies: the parameters that are kept and updated are float32, and so are the reductions. Limits: every rank
holds the full weights while the job is built.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from kit.errors import BadInput
from kit.measure.observers.tensors import digest
from kit.train.plain import PlainModel, from_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch.distributed as dist

    from kit.megatron.config import Geometry
    from kit.train.batch import Batching
    from kit.train.options import Settings


class Schedule:
    """A linear warm-up, then half a cosine; `steps` counts what step() was given. Sets the optimizer's rates at once."""

    def __init__(self, optimizer: torch.optim.Optimizer, settings: Settings) -> None:
        self.optimizer, self.settings = optimizer, settings
        self.steps = 0
        self.step(0)

    def step(self, increment: int) -> None:
        self.steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.steps)

    def rate(self, steps: int) -> float:
        s = self.settings
        if s.warmup > 0 and steps <= s.warmup:
            return s.first_lr + (s.lr - s.first_lr) * steps / s.warmup
        if steps > s.decay:
            return s.last_lr
        done = (steps - s.warmup) / (s.decay - s.warmup)
        return s.last_lr + (s.lr - s.last_lr) * 0.5 * (1.0 + math.cos(math.pi * done))

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.steps = state["steps"]
        self.step(0)


class ClippedAdamW(torch.optim.AdamW):
    """Scales gradients as it begins to use them: who looks at them before sees them whole, as with Megatron's optimizers."""

    scale = 1.0

    def step(self, closure: Any = None) -> Any:
        if self.scale < 1.0:
            torch._foreach_mul_(local_gradients(self), self.scale)
        return super().step(closure)


@dataclasses.dataclass(kw_only=True, slots=True)
class FsdpJob:
    """A live job on this rank. `group` are the data ranks, which are all."""

    model: PlainModel
    optimizer: ClippedAdamW
    scheduler: Schedule
    settings: Settings
    device: torch.device
    group: dist.ProcessGroup
    batching: Batching
    token_budget: int

    @property
    def chunks(self) -> list[PlainModel]:
        """As a Megatron job has them."""
        return [self.model]


def build(
    geometry: Geometry,
    weights: Mapping[str, torch.Tensor],
    *,
    settings: Settings,
    dtype: torch.dtype = torch.float32,
    device: torch.device,
    batching: Batching = "fixed",
    token_budget: int = 0,
) -> FsdpJob:
    """The job over all ranks; every rank calls it with the same full weights. `token_budget` is for "dynamic" and "packed"."""
    import torch.distributed as dist

    if batching != "fixed" and token_budget < 1:
        raise BadInput(
            f"token_budget={token_budget} is not allowed with batching={batching!r}: give the most tokens of a microbatch"
        )
    kept = torch.float32 if dtype == torch.bfloat16 else dtype
    model = from_weights(geometry, weights, dtype=kept, device=device)
    policy = MixedPrecisionPolicy()
    if kept != dtype:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=kept)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*model.model.layers, model):
        sharded: Any = fully_shard(module, mesh=mesh, mp_policy=policy)
        # Both: a divisor alone becomes a scaled sum, which gloo does not know.
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(1.0)
    matrices = [param for param in model.parameters() if param.dim() > 1]
    vectors = [param for param in model.parameters() if param.dim() <= 1]
    optimizer = ClippedAdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
    )
    return FsdpJob(
        model=model,
        optimizer=optimizer,
        scheduler=Schedule(optimizer, settings),
        settings=settings,
        device=device,
        group=mesh.get_group(),
        batching=batching,
        token_budget=token_budget,
    )


def local_gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """This rank's shards of the reduced gradients, to be changed in place."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    with torch.no_grad():
        return [param.grad.to_local() for param in params if isinstance(param.grad, DTensor)]


def sharded_modules(model: torch.nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def forget_gradients(job: FsdpJob) -> None:
    """Drop gradients, those not yet reduced too, and what a pass that broke off left in FSDP; nothing else changes.

    Unreduced sums have no public name: they are FSDP's own, per parameter. Told from torch 2.8 to 2.13.
    """
    job.optimizer.zero_grad(set_to_none=True)
    model: Any = job.model
    states = [module._get_fsdp_state() for module in sharded_modules(model)]
    root = model._get_fsdp_state()
    if root._is_root is None:
        return  # no pass has run yet
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
    else:
        _reset(root, states)
    for state in states:
        for group in param_groups(state):
            for param in group.fsdp_params:
                param.unsharded_accumulated_grad = None
                if hasattr(param, "_unsharded_param"):
                    param._unsharded_param.grad = None


def _reset(root: Any, states: list[Any]) -> None:
    """What newer torch does itself after an exception: no pass is under way, parameters are sharded."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    context, talk = root._state_ctx, root._comm_ctx
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False
    talk.post_forward_order.clear()
    talk.all_gather_state = None
    if hasattr(talk, "reduce_scatter_states"):
        talk.reduce_scatter_states.clear()
    else:
        talk.reduce_scatter_state = None
    for state in states:
        state._training_state = TrainingState.IDLE
        for group in param_groups(state):
            group.wait_for_unshard()
            group._training_state = TrainingState.IDLE
            group._post_forward_indices.clear()
            group._to_sharded()


def param_groups(state: Any) -> list[Any]:
    """FSDP's own record of a sharded module's parameters."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


# -- what is looked at -------------------------------------------------------------------------------------------------------


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
