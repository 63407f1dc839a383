"""A Megatron training step in two forms: fed piece by piece (`MegatronSplit`), and plain (`MegatronSync`).

Both work on chunks wrapped in DistributedDataParallel, with tensor, pipeline (1F1B), data and expert parallelism, with and
without overlapped reduction and the distributed optimizer. The split step accumulates raw sums under `no_sync`, learns
the true normalizer in finish(), divides, and reduces once. `logprobs` scores given tokens with the job as it is: the previous policy, or a
reference.

The load-balancing loss of experts asks for more: its gradient must be the mean over microbatches, whatever the other loss is divided
by. It is scaled by what each piece would need if all pieces were alike; where the true counts say otherwise, one more
pass over the pieces adds the difference. That pass costs a step without an update, and is left out where nothing is missing.
With the distributed optimizer a reduction leaves each data rank the sum of its own shard alone: `reduced` puts the shards of all ranks
together again, on copies.
Limits: no context or virtual pipeline parallelism, no loss scaling (float16); with experts, as many microbatches on every data rank.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol
from unittest import mock

import torch
import torch.distributed as dist

from kit.errors import BadInput
from kit.measure.phase import synchronize
from kit.megatron.handles import parallel_state
from kit.train.protocol import (
    Batch,
    Loss,
    Misuse,
    SplitContext,
    SplitStep,
    StepResult,
    counts,
    cut,
    cuts,
    plain_metrics,
    rows,
    step_result,
)

HOOKS = ("grad_sync_func", "no_sync_func", "finalize_model_grads_func")
Outputs = dict[str, torch.Tensor]


class Job(Protocol):
    """What is trained: a kit.megatron.model.Training, or any object with these attributes."""

    chunks: list[Any]
    optimizer: Any
    scheduler: Any
    device: torch.device


class Fed(NamedTuple):
    """A piece of a step: its microbatches and the scale of its experts' loss, which may need a correction."""

    pieces: list[Batch]
    scale: float


class MegatronSplit(SplitStep):
    def __init__(self, job: Job) -> None:
        super().__init__(job.device)
        self.job = job
        self.config = job.chunks[0].config
        self.saved: dict[str, Any] = {}
        self.random: tuple[Any, ...] = ()
        self.router: list[KeptBuffer] = []
        self.fed: list[Fed] = []
        self.microbatches = 0
        if len(job.chunks) > 1:
            raise BadInput("virtual pipeline parallelism is not supported: a rank must hold one model chunk")
        if balances(self.config) and self.config.calculate_per_token_loss:
            raise BadInput(
                "experts with a load-balancing loss need DDP to average over data ranks: calculate_per_token_loss must be false"
            )

    # -- the parts of a step -----------------------------------------------------------------------------------------

    def _open(self) -> None:
        self.fed, self.microbatches = [], 0
        self.random = random_states()
        self.router = [KeptBuffer(buffer, buffer.clone()) for buffer in router_buffers(self.job.chunks).values()]
        clear_aux()
        zero_gradients(self.job)
        self._hook()

    def _hook(self) -> None:
        """Keep schedules from reducing gradients, both within a chunk of microbatches and at its end."""
        self.saved = {name: getattr(self.config, name) for name in HOOKS}
        self.config.grad_sync_func = None
        self.config.no_sync_func = contextlib.nullcontext
        self.config.finalize_model_grads_func = None

    def _restore(self) -> None:
        for name, value in self.saved.items():
            setattr(self.config, name, value)
        self.saved = {}

    def _run(self, pieces: list[Batch]) -> list[Outputs]:
        if not pieces:
            return []
        self.microbatches += len(pieces)
        if not balances(self.config):
            return self._forward_backward(pieces, self._raw_loss)
        scale = self._aux_guess(pieces)
        # Copies: the caller may reuse what it passed.
        self.fed.append(Fed([{"input_ids": piece["input_ids"].clone()} for piece in pieces], scale))
        with aux_scale(scale * data_ranks()):
            return self._forward_backward(pieces, self._raw_loss)

    def _aux_guess(self, pieces: list[Batch]) -> float:
        """Guess the scale of the experts' loss; exact if every microbatch has the same number of valid tokens (or sequences)."""
        sequences, tokens = torch.stack([counts(piece) for piece in pieces]).sum(0).tolist()
        own: float = tokens if self.loss.level == "tokens" else sequences
        return own / len(pieces)

    def _forward_backward(self, pieces: list[Batch], loss: Loss | Callable[..., Any]) -> list[Outputs]:
        with self.job.chunks[0].no_sync():
            return forward_backward(self.job, pieces, loss)

    def _raw_loss(self, logprobs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, Outputs]:
        return self.loss(logprobs, batch, tokens=1.0, sequences=1.0)

    def _close(self) -> StepResult:
        group = data_group()
        if balances(self.config):
            self._need_even(group)
        sequences, tokens, own = self._true_counts(group)
        table = self._metrics(sequences, tokens)
        self._normalise(own)
        self._reduce()
        self._synchronise()
        return self._update(sequences, tokens, table)

    def _need_even(self, group: Any) -> None:
        """Refuse uneven numbers of microbatches: Megatron's average of the experts' loss over data ranks assumes equal ones."""
        own = torch.tensor([self.microbatches, -self.microbatches], device=self.device)  # both ends in one collective
        dist.all_reduce(own, op=dist.ReduceOp.MAX, group=group)
        most, least = own[0].item(), -own[1].item()
        if most != least:
            raise Misuse(
                f"finish: the step is open, and with experts every data rank must have as many microbatches, not {least} to {most}"
            )

    def _synchronise(self) -> None:
        """Wait for the device: a norm taken while the last copies run may miss some of them."""
        synchronize(str(self.device))

    def _metrics(self, sequences: float, tokens: float) -> dict[str, float]:
        table = self._step_metrics(data_group(), sequences, tokens) if last_stage() else {}
        table = from_last_stage(table, sorted(self.loss.normalizers()), self.device)
        return {**table, **aux_metric(self.config, self.microbatches)}

    def _normalise(self, own: float) -> None:
        self.job.chunks[0].scale_gradients(1.0 / own)
        if self.fed:
            self._correct_aux(own)

    def _correct_aux(self, own: float) -> None:
        """Correct the scale of the experts' loss to the coefficient times the mean over all microbatches."""
        total = torch.tensor([float(self.microbatches)], dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=data_group())
        missing = [1.0 / total.item() - fed.scale / own for fed in self.fed]
        worst = torch.tensor([max(map(abs, missing)) * total.item()], dtype=torch.float64, device=self.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)  # all ranks decide alike: the further pass is collective
        if worst.item() < 1e-9:
            return
        for fed, scale in zip(self.fed, missing, strict=True):
            with aux_scale(scale * data_ranks()):
                self._forward_backward(fed.pieces, nothing)
        clear_aux()

    def _reduce(self) -> None:
        """Reduce once. With overlap, finishing only waits, so the reduction is started here; without, finishing starts it."""
        from megatron.core.distributed import finalize_model_grads

        chunk = self.job.chunks[0]
        if chunk.ddp_config.overlap_grad_reduce:
            chunk.start_grad_sync()
        (self.saved["finalize_model_grads_func"] or finalize_model_grads)(self.job.chunks)

    def _update(self, sequences: float, tokens: float, table: dict[str, float]) -> StepResult:
        result = step_optimizer(self.job, self.gbs, sequences, tokens, table)
        if not result["updated"]:
            restore_buffers(self.router)
        return result

    def _give_up(self) -> None:
        # A reduction that is under way would write into the buffers that are zeroed below.
        for group in bucket_groups(self.job.chunks[0]):
            if group.grad_reduce_handle is not None:
                group.grad_reduce_handle.wait()
                group.grad_reduce_handle = None
        self._restore()
        zero_gradients(self.job)
        clear_aux()
        restore_buffers(self.router)
        self.fed = []
        if self.random:
            set_random_states(self.random)


def split_step(ctx: SplitContext) -> MegatronSplit:
    """Make the kit's split step, with the signature of your own."""
    return MegatronSplit(ctx.job)


class MegatronSync:
    """The plain step: all microbatches at once, true normalizers known in advance. The split step is compared with it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.version = 0

    def run(self, loss: Loss, data: Batch, gbs: int, mbs: int) -> StepResult:
        job, group = self.job, data_group()
        total = counts(data).to(job.device)
        dist.all_reduce(total, group=group)
        sequences, tokens = (max(value, 1.0) for value in total.tolist())
        clear_aux()
        zero_gradients(job)
        pieces = list(cuts(data, mbs))
        seen = forward_backward(
            job, pieces, lambda logprobs, batch: loss(logprobs, batch, tokens=tokens, sequences=sequences)
        )
        table = plain_metrics(seen, loss, group, job.device) if last_stage() else {}
        table = from_last_stage(table, sorted(loss.normalizers()), job.device)
        table |= aux_metric(job.chunks[0].config, len(pieces))
        synchronize(str(job.device))
        result = step_optimizer(job, gbs, float(total[0]), float(total[1]), table)
        self.version += 1
        return {**result, "version": self.version}


# -- what both do ----------------------------------------------------------------------------------------------------


def forward_backward(job: Job, pieces: list[Batch], loss: Callable[..., Any]) -> list[Outputs]:
    """Run Megatron's schedule over these microbatches. `loss` is summed: divisions by the schedule and DDP are undone. Ranks of a context
    group have the same whole rows: the schedule multiplies by their number, as if each had a part, and DDP sums over them too."""
    alike = dist.get_world_size(context_group())
    summed = job.chunks[0].config.calculate_per_token_loss
    undo = len(pieces) * (1 / alike if summed else data_ranks()) / alike

    def forward(data: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
        batch = {name: value.to(job.device) for name, value in next(data).items()}

        def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, Outputs]:
            value, table = loss(-losses.float(), batch)
            return value * undo, table

        return token_losses(model, batch["input_ids"]), loss_of

    return schedule(job, forward, pieces, forward_only=False)


def token_losses(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the last stage's output: the negative log-probability of each next token."""
    places = torch.arange(ids.shape[1] - 1, device=ids.device).expand(ids.shape[0], -1)
    losses: torch.Tensor = model(ids[:, :-1], places, None, labels=ids[:, 1:].contiguous())
    return losses


def schedule(job: Job, forward: Callable[..., Any], pieces: list[Batch], **how: bool) -> list[Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    return list(
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(pieces),
            model=job.chunks,
            num_microbatches=len(pieces),
            seq_length=pieces[0]["input_ids"].shape[1] - 1,
            micro_batch_size=rows(pieces[0]),
            **how,
        )
    )


def nothing(logprobs: torch.Tensor, _: Batch) -> tuple[torch.Tensor, Outputs]:
    """Return a zero loss that still runs the model."""
    return logprobs.sum() * 0.0, {}


def step_optimizer(job: Job, gbs: int, sequences: float, tokens: float, table: dict[str, float]) -> StepResult:
    """Step the optimizer and the scheduler. If loss or gradient is not finite, skip both."""
    groups = job.optimizer.param_groups
    lr = max(float(group["lr"]) for group in groups)
    wd = max(float(group["weight_decay"]) for group in groups)
    updated = finite_gradients(job) and math.isfinite(table["loss"])
    norm = math.nan
    if updated:
        ok, grad_norm, _ = job.optimizer.step()
        updated, norm = bool(ok), float(grad_norm) if grad_norm is not None else math.nan
    else:
        zero_gradients(job)
    if updated:
        job.scheduler.step(increment=gbs)
    return step_result(table, norm=norm, rates=(lr, wd), counts=(sequences, tokens), updated=updated)


def finite_gradients(job: Job) -> bool:
    """Whether the gradients of all ranks are finite. Every rank gets the same answer, since an update is collective."""
    chunk = job.chunks[0]
    total = torch.zeros(1, dtype=torch.float64, device=job.device)
    for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
        total += buffer.grad_data.sum(dtype=torch.float64)
    broken = (~torch.isfinite(total)).int()
    dist.all_reduce(broken, op=dist.ReduceOp.MAX)
    return not broken.item()


def zero_gradients(job: Job) -> None:
    for chunk in job.chunks:
        chunk.zero_grad_buffer()
    job.optimizer.zero_grad()


def step_hooks(job: Job) -> tuple[Any, ...]:
    """The hooks that a step replaces while it is open, and which modules are in training mode."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    config = job.chunks[0].config
    return *(getattr(config, name) for name in HOOKS), MoEAuxLossAutoScaler.set_loss_scale, modes(job.chunks)


def modes(chunks: list[Any]) -> tuple[bool, ...]:
    return tuple(module.training for chunk in chunks for module in chunk.modules())


def data_group() -> Any:
    """The ranks with other rows: one of each replica, and of each context group."""
    return parallel_state().get_data_parallel_group()


def context_group() -> Any:
    return parallel_state().get_context_parallel_group()


def data_ranks() -> int:
    return dist.get_world_size(data_group())


def last_stage() -> bool:
    return bool(parallel_state().is_pipeline_last_stage())


def from_last_stage(table: dict[str, float], names: list[str], device: torch.device) -> dict[str, float]:
    """Send the metrics from the last pipeline stage, which alone sees the loss, to the others."""
    stages = parallel_state()
    if stages.get_pipeline_model_parallel_world_size() == 1:
        return table
    values = torch.tensor([table.get(name, 0.0) for name in names], dtype=torch.float64, device=device)
    last = stages.get_pipeline_model_parallel_last_rank()
    dist.broadcast(values, last, group=stages.get_pipeline_model_parallel_group())
    return dict(zip(names, values.tolist(), strict=True))


# -- the bias of routers ---------------------------------------------------------------------------------------------


class KeptBuffer(NamedTuple):
    """A buffer, and its values at some moment."""

    live: torch.Tensor
    values: torch.Tensor


def router_buffers(chunks: list[Any]) -> dict[str, torch.Tensor]:
    """The biases of routers that balance experts without a loss, and the tokens that each expert has got since the last update."""
    modules = [(name, module) for chunk in chunks for name, module in chunk.named_modules()]
    routers = [(name, module) for name, module in modules if getattr(module, "expert_bias", None) is not None]
    kinds = ("expert_bias", "local_tokens_per_expert")
    return {f"{name}.{kind}": getattr(module, kind) for name, module in routers for kind in kinds}


def restore_buffers(state: list[KeptBuffer]) -> None:
    for buffer, values in state:
        buffer.copy_(values)


# -- random numbers ----------------------------------------------------------------------------------------------------


def random_states() -> tuple[Any, ...]:
    """Every generator that a forward pass may draw from."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    tracker = {name: value.clone() for name, value in get_cuda_rng_tracker().get_states().items()}
    return torch.get_rng_state(), cuda, tracker


def set_random_states(states: tuple[Any, ...]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    cpu, cuda, tracker = states
    get_cuda_rng_tracker().set_states(tracker)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)
    torch.set_rng_state(cpu)


def rank_share(batch: Batch) -> Batch:
    rows_of_rank = rows(batch) // data_ranks()
    data_rank = dist.get_rank(data_group())
    return cut(batch, data_rank * rows_of_rank, (data_rank + 1) * rows_of_rank)


@torch.no_grad()
def logprobs(job: Job, batch: Batch, mbs: int) -> torch.Tensor:
    """[rows, length] float32 on every rank's host; 0.0 in column 0. Collective; rows must fill whole microbatches on each data rank."""
    pieces = list(cuts(rank_share(batch), mbs))
    logprobs = torch.cat([_forward(job, piece) for piece in pieces]) if pieces else None
    tables: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(tables, (dist.get_rank(data_group()), logprobs) if last_stage() else None)
    by_share: dict[int, torch.Tensor] = dict(filter(None, tables))
    whole = torch.cat([by_share[place] for place in sorted(by_share)])
    return torch.nn.functional.pad(whole, (1, 0))


def _forward(job: Job, piece: Batch) -> torch.Tensor:
    """Return one microbatch's values, [rows, length - 1], on the last stage; the values of other stages are meaningless."""

    def forward(data: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
        return token_losses(model, next(data)["input_ids"].to(job.device)), lambda losses, **_: -losses.float()

    outputs = schedule(job, forward, [piece], forward_only=True, collect_non_loss_data=True)
    synchronize(str(job.device))
    return outputs[0].cpu() if last_stage() else torch.empty(0)


# -- gradients ---------------------------------------------------------------------------------------------------------


def reduced(chunk: Any) -> Callable[[Any], torch.Tensor]:
    """Return a lookup of each parameter's whole reduced gradient, as copies. Collective over data ranks."""
    if not chunk.ddp_config.use_distributed_optimizer:
        return lambda param: param.main_grad.detach()
    before_step: dict[Any, torch.Tensor] = {}
    for group in bucket_groups(chunk):
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            whole = bucket.grad_data.clone()
            shards = list(whole.chunk(dist.get_world_size(ranks)))
            dist.all_gather(shards, shards[dist.get_rank(ranks)].clone(), group=ranks)
            for param, (start, end) in bucket.param_to_index.items():
                before_step[param] = whole[start:end].view(param.shape)
    return lambda param: before_step[param]


def bucket_groups(chunk: Any) -> list[Any]:
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


@contextlib.contextmanager
def counting_collectives(chunk: Any) -> Iterator[dict[str, int]]:
    """Count the collectives over data ranks that each gradient bucket enters, whoever calls them.

    A tied embedding may have its own bucket, which pipeline stages also sum: that is not a reduction over data ranks.
    """
    from megatron.core.distributed import param_and_grad_buffer as buffers

    buckets = [bucket for group in bucket_groups(chunk) for bucket in group.buckets]
    seen = {f"bucket {number}": 0 for number in range(len(buckets))}
    between_stages = parallel_state().get_embedding_group(check_initialized=False)

    def spy(plain: Callable[..., Any], place: int, keyword: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor: Any = args[place] if len(args) > place else kwargs.get(keyword)
            among_data = between_stages is None or all(
                group is not between_stages for group in (*args, kwargs.get("group"))
            )
            if among_data and isinstance(tensor, torch.Tensor):
                for name, bucket in zip(seen, buckets, strict=True):
                    # Looked up now: memory that was released in between may have moved.
                    now = bucket.grad_data.data_ptr(), bucket.grad_data.numel()
                    seen[name] += (tensor.data_ptr(), tensor.numel()) == now
            return plain(*args, **kwargs)

        return call

    scattered = spy(buffers.dist_reduce_scatter_func, 1, "input")
    with (
        mock.patch.object(dist, "all_reduce", spy(dist.all_reduce, 0, "tensor")),
        mock.patch.object(buffers, "dist_reduce_scatter_func", scattered),
    ):
        yield seen


AUX_METRIC = "moe_aux_loss"


def balances(config: Any) -> bool:
    return bool(config.num_moe_experts) and bool(config.moe_aux_loss_coeff)


@contextlib.contextmanager
def aux_scale(scale: float) -> Iterator[None]:
    """Scale the gradient of the experts' loss by this factor, whatever the schedule sets."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    plain = MoEAuxLossAutoScaler.set_loss_scale
    scaled = staticmethod(lambda given: plain(torch.full_like(given, scale)))
    with mock.patch.object(MoEAuxLossAutoScaler, "set_loss_scale", scaled):
        yield


def clear_aux() -> None:
    from megatron.core.transformer.moe import moe_utils

    moe_utils.clear_aux_losses_tracker()


def aux_metric(config: Any, microbatches: int) -> dict[str, float]:
    """The experts' loss of the step: mean over layers, microbatches and data ranks, without its coefficient."""
    if not balances(config):
        return {}
    from megatron.core.transformer.moe import moe_utils

    moe_utils.reduce_aux_losses_tracker_across_ranks()
    values = moe_utils.get_moe_layer_wise_logging_tracker()["load_balancing_loss"]["values"]
    value = float(values.double().mean()) / microbatches
    clear_aux()
    return {AUX_METRIC: value}
