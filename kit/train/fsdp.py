"""Training steps on FSDP2 (`fully_shard`, DTensor parameters): the job, the plain step, and the step that is cut into a stream.

The job is a plain model, its AdamW and its schedule, sharded over all ranks; over gloo on the host and NCCL on GPUs. All are data ranks,
or the ranks of a context group have the same rows and share their columns (kit.train.columns): rows are counted once, over the data ranks.
Gradients are sums over all ranks, never means. bfloat16 computes on copies: the parameters that are kept and updated are float32, and so
are the reductions. Limits: every rank holds the full weights while the job is built.

Sync learns the true counts first and divides each loss by them. Split runs raw sums, and divides the gradients once they are reduced. Both
reduce once, in the backward pass of the step's last microbatch: the split step holds one microbatch back, since only finish() tells which
was the last. Data ranks may have different numbers of microbatches, or no rows: dummies fill up, and nobody counts them.

Where the gradients are not finite nothing is updated and the schedule stays, as Megatron's trainer has it; the version ticks all the same.
Between the update and the result nothing is left that can fail.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from kit.errors import BadInput, KitError
from kit.measure.observers.tensors import tensor_digest
from kit.train.columns import Columns
from kit.train.options import Settings
from kit.train.plain import PlainModel, from_weights, next_logprobs, plain_logprobs
from kit.train.protocol import (
    Batch,
    Batching,
    Loss,
    Misuse,
    SplitStep,
    StepResult,
    counts,
    microbatches,
    pack,
    plain_metrics,
    step_result,
)

if TYPE_CHECKING:
    from kit.megatron.config import Geometry


class Schedule:
    """A linear warm-up, then half a cosine; `steps` is the sum of all increments. Sets the optimizer's rates at once."""

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
    """AdamW that clips at the start of its step: before that, gradients are unclipped, as with Megatron's optimizers."""

    scale = 1.0

    def step(self, closure: Any = None) -> Any:
        if self.scale < 1.0:
            torch._foreach_mul_(local_gradients(self), self.scale)
        return super().step(closure)


@dataclasses.dataclass(kw_only=True, slots=True)
class FsdpJob:
    """A live job on this rank. `group` are the data ranks: with context parallelism one rank of each context group, which has the same rows
    as the others. `everyone` are all ranks, each with its shard of every parameter."""

    model: PlainModel
    optimizer: ClippedAdamW
    scheduler: Schedule
    settings: Settings
    device: torch.device
    group: dist.ProcessGroup
    everyone: dist.ProcessGroup
    batching: Batching
    token_budget: int

    @property
    def chunks(self) -> list[PlainModel]:
        """The same attribute as a Megatron job's."""
        return [self.model]


def build_fsdp(
    geometry: Geometry,
    weights: Mapping[str, torch.Tensor],
    *,
    settings: Settings,
    dtype: torch.dtype = torch.float32,
    device: torch.device,
    batching: Batching = "fixed",
    token_budget: int = 0,
    data_group: dist.ProcessGroup | None = None,
    context_group: dist.ProcessGroup | None = None,
) -> FsdpJob:
    """The job over all ranks; every rank calls it with the same full weights. `token_budget` is for "dynamic" and "packed". With context
    parallelism, `context_group` are the ranks that get the same rows as this one, and `data_group` those at its place in the other groups.
    """
    if batching != "fixed" and token_budget < 1:
        raise BadInput(
            f"token_budget={token_budget} is not allowed with batching={batching!r}: give the most tokens of a microbatch"
        )
    parts = [dist.get_world_size(group) for group in (data_group, context_group) if group is not None]
    if parts and math.prod(parts) != dist.get_world_size():
        raise BadInput(
            f"data_group and context_group must both be given, and divide {dist.get_world_size()} ranks; these have {parts} ranks"
        )
    kept = torch.float32 if dtype == torch.bfloat16 else dtype
    model = from_weights(geometry, weights, dtype=kept, device=device)
    model.columns = Columns(context_group) if context_group is not None else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=kept) if kept != dtype else MixedPrecisionPolicy()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*model.model.layers, model):
        sharded: Any = fully_shard(module, mesh=mesh, mp_policy=policy)
        # Both: a divisor alone becomes a scaled sum, which gloo does not support.
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(1.0)
    matrices = [param for param in model.parameters() if param.dim() > 1]
    vectors = [param for param in model.parameters() if param.dim() <= 1]
    decayed = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = ClippedAdamW(decayed, lr=settings.lr, betas=settings.betas, eps=settings.eps)
    return FsdpJob(
        model=model,
        optimizer=optimizer,
        scheduler=Schedule(optimizer, settings),
        settings=settings,
        device=device,
        group=data_group or mesh.get_group(),
        everyone=mesh.get_group(),
        batching=batching,
        token_budget=token_budget,
    )


def local_gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """This rank's shards of the reduced gradients, to be changed in place."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    with torch.no_grad():
        return [param.grad.to_local() for param in params if isinstance(param.grad, DTensor)]


def sharded(model: torch.nn.Module) -> list[Any]:
    return [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]


def forget_gradients(job: FsdpJob) -> None:
    """Drop gradients, also unreduced ones, and the state that an interrupted pass left in FSDP; nothing else changes.

    Unreduced sums have no public name: they are FSDP's own, per parameter. True for torch 2.8 to 2.13.
    """
    job.optimizer.zero_grad(set_to_none=True)
    model: Any = job.model
    states = sharded(model)
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
    """Do what newer torch does after an exception: end the pass and shard the parameters."""
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
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


# -- what is looked at -------------------------------------------------------------------------------------------------------


def full_parameters(job: FsdpJob) -> dict[str, torch.Tensor]:
    """Return every full parameter on the host in its stored dtype (float32 or float64); every rank calls it."""
    return {name: _whole(param.detach()) for name, param in job.model.named_parameters()}


def full_gradients(job: FsdpJob) -> dict[str, torch.Tensor]:
    """The reduced gradients, whole: until the optimizer takes its step as it finds them, afterwards clipped. Every rank calls it."""
    return {name: _whole(param.grad) for name, param in job.model.named_parameters() if param.grad is not None}


def nonzero_gradients(job: FsdpJob) -> int:
    """Elements of this rank's gradients that are not zero, reduced or still waiting to be."""
    gradients = [_local(param.grad) for param in job.model.parameters() if param.grad is not None]
    for state in sharded(job.model):
        for group in param_groups(state):
            for param in group.fsdp_params:
                waiting = (
                    param.unsharded_accumulated_grad,
                    getattr(getattr(param, "_unsharded_param", None), "grad", None),
                )
                gradients += [_local(gradient) for gradient in waiting if gradient is not None]
    return sum(int(torch.count_nonzero(gradient)) for gradient in gradients)


@contextlib.contextmanager
def counted_reductions(job: FsdpJob) -> Iterator[dict[str, int]]:
    """How often the gradients of each sharded module are reduced while this is open. FSDP calls a parameter's hooks for each reduction
    that reaches it, and for nothing else."""
    seen: dict[str, int] = {}
    hooks = []
    for state in sharded(job.model):
        first = param_groups(state)[0].fsdp_params[0].sharded_param
        name = next(name for name, param in job.model.named_parameters() if param is first)
        seen[name] = 0

        def count(_: torch.Tensor, name: str = name) -> None:
            seen[name] += 1

        hooks.append(first.register_post_accumulate_grad_hook(count))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def hooks(job: FsdpJob) -> tuple[bool, ...]:
    """Whether a backward pass reduces gradients, of each sharded module, and which modules are in training mode: what steps switch, and
    put back."""
    reduces = (bool(group.reduce_grads) for state in sharded(job.model) for group in param_groups(state))
    return *reduces, *(module.training for module in job.model.modules())


def state(job: FsdpJob) -> dict[str, str]:
    """SHA-256 of this rank's shards of weights and optimizer state, and of its random state; the schedule as it prints."""
    table = {name: tensor_digest(_local(param)) for name, param in job.model.named_parameters()}
    for name, param in job.model.named_parameters():
        for key, value in job.optimizer.state.get(param, {}).items():
            table[f"{name}/{key}"] = tensor_digest(_local(value))
    rates = [(group["lr"], group["weight_decay"]) for group in job.optimizer.param_groups]
    table["scheduler"] = repr((job.scheduler.state_dict(), rates))
    table["random"] = tensor_digest(torch.get_rng_state())
    if job.device.type == "cuda":
        table["random/device"] = tensor_digest(torch.cuda.get_rng_state(job.device))
    return table


def _whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).cpu()


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


DUMMY: Batch = {}  # a microbatch of a rank that has fewer than the others


class Steps:
    def __init__(self, job: FsdpJob) -> None:
        self.job = job

    def cut(self, data: Batch, mbs: int) -> list[Batch]:
        """This rank's rows as microbatches, filled up with dummies to the number that the fullest rank has. Collective."""
        pieces: list[Batch] = []
        refused: KitError | None = None
        try:
            pieces = microbatches(data, self.job.batching, mbs=mbs, token_budget=self.job.token_budget)
        except KitError as error:
            refused = error
        most, any_refused = self._over([len(pieces), refused is not None], dist.ReduceOp.MAX, self.job.everyone)
        if refused:
            raise refused
        if any_refused:
            raise Misuse("microbatch: another rank refused its rows, so no rank ran its rows")
        return self.fill(pieces, int(most))

    def fill(self, pieces: list[Batch], most: int) -> list[Batch]:
        return pieces + [DUMMY] * (most - len(pieces))

    def forward_backward(
        self, piece: Batch, loss: Loss, *, tokens: float, sequences: float, sync: bool
    ) -> list[dict[str, torch.Tensor]]:
        """One microbatch; its metrics, or none of a dummy. With `sync` the gradients of all so far are reduced."""
        model, device = self.job.model, self.job.device
        self.reduce_next(on=sync)
        if not piece:
            nothing = plain_logprobs(model, torch.zeros(1, 2, dtype=torch.long, device=device))
            (nothing * 0.0).sum().backward()  # type: ignore[no-untyped-call]
            return []
        rows = {name: value.to(device) for name, value in piece.items()}
        if self.job.batching == "packed":
            packed = pack(rows)
            scored = packed.unpack(next_logprobs(model, packed.input_ids, packed.positions, packed.segments))
        else:
            scored = plain_logprobs(model, rows["input_ids"])
        value, seen = loss(scored, rows, tokens=tokens, sequences=sequences)
        value.backward()  # type: ignore[no-untyped-call]
        return [seen]

    def reduce_next(self, *, on: bool) -> None:
        self.job.model.set_requires_gradient_sync(on)  # type: ignore[operator]

    def update(self, table: dict[str, float], sequences: float, tokens: float, gbs: int) -> StepResult:
        """Update weights and schedule, or neither if loss or gradients are not finite. The rates returned are the ones used."""
        optimizer, limit = self.job.optimizer, self.job.settings.clip
        lr, wd = (float(optimizer.param_groups[0][name]) for name in ("lr", "weight_decay"))
        norm = self._norm()
        updated = math.isfinite(norm) and math.isfinite(table["loss"])
        optimizer.scale = limit / (norm + 1e-6) if limit > 0 else 1.0
        if updated:
            optimizer.step()
            self.job.scheduler.step(gbs)
        else:
            optimizer.zero_grad()
        return step_result(table, norm=norm, rates=(lr, wd), counts=(sequences, tokens), updated=updated)

    def _norm(self) -> float:
        """Of the gradients over all ranks: those of a context group have different shards."""
        own = [
            torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in local_gradients(self.job.optimizer)
        ]
        return math.sqrt(self._over([float(torch.stack(own).square().sum())], dist.ReduceOp.SUM, self.job.everyone)[0])

    def _over(self, values: list[float], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> list[float]:
        own = torch.tensor(values, dtype=torch.float64, device=self.job.device)
        dist.all_reduce(own, op=op, group=group)
        done: list[float] = own.tolist()
        return done


class FsdpSync(Steps):
    """The plain step: all rows are known before it begins."""

    version = 0

    def run(self, loss: Loss, data: Batch, gbs: int, mbs: int) -> StepResult:
        """One step on this rank's rows. If it raises, weights, optimizer and schedule are as before."""
        try:
            forget_gradients(self.job)
            sequences, tokens = self._over(counts(data).tolist(), dist.ReduceOp.SUM, self.job.group)
            by = {"tokens": max(tokens, 1.0), "sequences": max(sequences, 1.0)}
            pieces = self.cut(data, mbs) or [DUMMY]
            seen = []
            for index, piece in enumerate(pieces):
                seen += self.forward_backward(piece, loss, **by, sync=index == len(pieces) - 1)
            done = plain_metrics(seen, loss, self.job.group, self.job.device)
            result = self.update(done, sequences, tokens, gbs)
        except BaseException:
            forget_gradients(self.job)
            raise
        finally:
            self.reduce_next(on=True)
        self.version += 1
        return {**result, "version": self.version}


class FsdpSplit(Steps, SplitStep):
    """begin, any number of microbatch calls, finish or abort. Every rank makes the same calls; a rank may have fewer rows, or none."""

    def __init__(self, job: FsdpJob) -> None:
        Steps.__init__(self, job)
        SplitStep.__init__(self, job.device)
        self.held: list[Batch] = []
        self.randomness: list[torch.Tensor] = []

    def drop(self) -> None:
        """Drop all that remains of the step: gradients and the microbatch held back."""
        self.held = []
        forget_gradients(self.job)

    def _open(self) -> None:
        self.randomness = [torch.get_rng_state()]
        if self.device.type == "cuda":
            self.randomness.append(torch.cuda.get_rng_state(self.device))
        self.drop()

    def _pieces(self, data: Batch) -> list[Batch]:
        return self.cut(data, self.mbs)

    def _run(self, pieces: list[Batch]) -> list[dict[str, torch.Tensor]]:
        seen = []
        ready, self.held = self.held + pieces, []
        if ready:
            # A copy: the caller may reuse what it passed.
            self.held = [{name: value.clone() for name, value in ready.pop().items()}]
        for piece in ready:
            seen += self.forward_backward(piece, self.loss, tokens=1.0, sequences=1.0, sync=False)
        return seen

    def _close(self) -> StepResult:
        last = self.held.pop() if self.held else DUMMY  # its backward pass has the step's one reduction
        self.seen += self.forward_backward(last, self.loss, tokens=1.0, sequences=1.0, sync=True)
        sequences, tokens, normalizer = self._true_counts(self.job.group)
        done = self._step_metrics(self.job.group, sequences, tokens)
        torch._foreach_div_(local_gradients(self.job.optimizer), normalizer)
        return self.update(done, sequences, tokens, self.gbs)

    def _restore(self) -> None:
        self.reduce_next(on=True)

    def _give_up(self) -> None:
        self._restore()
        self.drop()
        torch.set_rng_state(self.randomness[0])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(self.randomness[1], self.device)
