"""The known bugs of the lab `split`: what a fault puts in place of the right code."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from kit.labs.split.ranks import backends
from kit.labs.split.ranks.backends import WrappedLoss
from kit.megatron import split
from kit.megatron.split import MegatronSplit
from kit.target import replaced
from kit.train import columns, protocol
from kit.train.fsdp import FsdpSplit, Steps
from kit.train.losses import ClippedPolicyGradient
from kit.train.protocol import Batch, Loss, StepResult, cut, rows

# The right code, before a fault replaces it.
begin, microbatch, abort = MegatronSplit.begin, MegatronSplit.microbatch, MegatronSplit.abort
hook, restore, give_up, pieces_of = (
    MegatronSplit._hook,
    MegatronSplit._restore,
    MegatronSplit._give_up,
    MegatronSplit._pieces,
)
metrics, step_metrics, over_ranks = MegatronSplit._metrics, MegatronSplit._step_metrics, protocol.over_ranks
normalise, reduce, update = MegatronSplit._normalise, MegatronSplit._reduce, MegatronSplit._update
raw_loss, open_step = MegatronSplit._raw_loss, MegatronSplit._open
true_counts, norm = FsdpSplit._true_counts, Steps._norm
valid, weight, assemble = protocol.valid, ClippedPolicyGradient._weight, backends.assemble


def left_out(*_: Any) -> None:
    """Nothing happens where the right code does something."""


# -- the step on Megatron ------------------------------------------------------------------------------------------------


def by_one_scalar(step: MegatronSplit, loss: Loss, gbs: int, mbs: int) -> None:
    begin(step, WrappedLoss(loss, names=dict.fromkeys(loss.normalizers(), loss.level)), gbs, mbs)


def divides_counts(step: MegatronSplit, loss: Loss, gbs: int, mbs: int) -> None:
    names = {name: by or loss.level for name, by in loss.normalizers().items()}
    begin(step, WrappedLoss(loss, names=names), gbs, mbs)


def releases_gradients(step: MegatronSplit, data: Batch) -> None:
    if step.pieces == 1:
        for buffer in step.job.chunks[0].buffers:
            storage = buffer.grad_data.untyped_storage()
            size = storage.size()
            storage.resize_(0)
            storage.resize_(size)
            buffer.grad_data.zero_()
    microbatch(step, data)


def drops_last_microbatch(step: MegatronSplit, data: Batch) -> list[Batch]:
    pieces = pieces_of(step, data)
    return pieces[:-1] if len(pieces) > 1 else pieces


def drops_remainder(step: MegatronSplit, data: Batch) -> list[Batch]:
    return pieces_of(step, cut(data, 0, rows(data) // step.mbs * step.mbs))


def keeps_no_sync(step: MegatronSplit) -> None:
    hook(step)
    step.config.no_sync_func = step.saved["no_sync_func"]


def keeps_finalize(step: MegatronSplit) -> None:
    hook(step)
    step.config.finalize_model_grads_func = step.saved["finalize_model_grads_func"]


def loses_hooks_on_error(step: MegatronSplit) -> None:
    if not step.failed:
        restore(step)


def aux_scale_of_one(step: MegatronSplit, pieces: list[Batch]) -> float:  # noqa: ARG001 - as the right one is called
    return 1.0


def sums_aux(step: MegatronSplit, sequences: float, tokens: float) -> dict[str, float]:
    table = metrics(step, sequences, tokens)
    table["moe_aux_loss"] *= step.microbatches
    return table


def makes_a_group(step: MegatronSplit, sequences: float, tokens: float) -> dict[str, float]:
    dist.new_group()
    return metrics(step, sequences, tokens)


def counts_every_replica(step: MegatronSplit, group: Any, sequences: float, tokens: float) -> dict[str, float]:  # noqa: ARG001 - as above
    return step_metrics(step, dist.group.WORLD, sequences, tokens)


def reports_own_rows(step: MegatronSplit, group: Any, sequences: float, tokens: float) -> dict[str, float]:
    table = step_metrics(step, group, sequences, tokens)
    if dist.get_rank(group) == 0 or not tokens:
        return table
    names = step.loss.normalizers()
    return protocol.normalised(protocol.of_microbatches(step.seen, names), names, tokens=tokens, sequences=sequences)


def loses_a_metric(step: MegatronSplit, group: Any, sequences: float, tokens: float) -> dict[str, float]:
    table = step_metrics(step, group, sequences, tokens)
    del table["num_unmasked_tokens"]
    return table


def divides_late(step: MegatronSplit, own: float) -> None:
    late: Any = torch.cuda.Stream(step.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(late):
        torch.cuda._sleep(10**9)  # type: ignore[no-untyped-call] # the division is late, and nothing waits for it
        normalise(step, own)


def leaves_the_routers(step: MegatronSplit) -> None:
    """As a reduction without Megatron's finalize_model_grads does, which moves their biases."""
    config, plain = step.config, step.config.moe_router_enable_expert_bias
    config.moe_router_enable_expert_bias = False
    reduce(step)
    config.moe_router_enable_expert_bias = plain


def moves_the_routers_twice(step: MegatronSplit) -> None:
    biases = [module.expert_bias for module in step.job.chunks[0].modules() if hasattr(module, "expert_bias")]
    before = [bias.clone() for bias in biases]
    reduce(step)
    for bias, old in zip(biases, before, strict=True):
        bias.add_(bias - old)


def reduces_twice(step: MegatronSplit) -> None:
    for group in split.bucket_groups(step.job.chunks[0]):
        group.start_grad_sync()
    reduce(step)


def reads_rate_late(step: MegatronSplit, sequences: float, tokens: float, table: dict[str, float]) -> StepResult:
    result = update(step, sequences, tokens, table)
    return {**result, "lr": max(float(group["lr"]) for group in step.job.optimizer.param_groups)}


def norm_of_sums(step: MegatronSplit, sequences: float, tokens: float, table: dict[str, float]) -> StepResult:
    result = update(step, sequences, tokens, table)
    count = tokens if step.loss.level == "tokens" else sequences
    return {**result, "grad_norm": result["grad_norm"] * count}


def schedules_by_steps(step: MegatronSplit, sequences: float, tokens: float, table: dict[str, float]) -> StepResult:
    return split.step_optimizer(step.job, 1, sequences, tokens, table)


def clips_to_half(step: MegatronSplit, sequences: float, tokens: float, table: dict[str, float]) -> StepResult:
    config = step.job.optimizer.config
    limit, config.clip_grad = config.clip_grad, config.clip_grad / 2
    result = update(step, sequences, tokens, table)
    config.clip_grad = limit
    return result


def scales_up_to_the_limit(step: MegatronSplit, sequences: float, tokens: float, table: dict[str, float]) -> StepResult:
    """The factor of clipping, limit over norm, is not kept at 1 or less."""
    chunk, limit = step.job.chunks[0], step.job.optimizer.config.clip_grad
    norm = sum(float(buffer.grad_data.double().square().sum()) for buffer in chunk.buffers) ** 0.5
    if 0 < norm < limit:
        chunk.scale_gradients(limit / norm)
    return update(step, sequences, tokens, table)


def restores_only_after_errors(step: MegatronSplit, call: str, work: Any) -> Any:
    """An interrupt is none."""
    try:
        return work()
    except Exception as error:
        step.failed = f"{call} raised {type(error).__name__}"
        step._restore()
        raise


def divides_by_the_ranks_again(step: MegatronSplit, own: float) -> None:
    normalise(step, own * 2)


def keeps_every_loss(step: MegatronSplit, logprobs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, split.Outputs]:
    value, seen = raw_loss(step, logprobs, batch)
    vars(step).setdefault("losses", []).append(value)
    return value, seen


def adds_a_hook(step: MegatronSplit) -> None:
    step.job.chunks[0].register_forward_hook(left_out)
    open_step(step)


def gives_up_in_eval(step: MegatronSplit) -> None:
    give_up(step)
    step.job.chunks[0].eval()


def gives_up_with_an_open_file(step: MegatronSplit) -> None:
    """It is closed when the job ends."""
    give_up(step)
    weakref.finalize(step.job.chunks[0], os.close, os.open(os.devnull, os.O_RDONLY))


def applies_nan(step: MegatronSplit, sequences: float, tokens: float, table: dict[str, float]) -> StepResult:
    with replaced({"kit.megatron.split:finite_gradients": f"{__name__}:always_finite"}):
        return update(step, sequences, tokens, table)


def always_finite(job: split.Job) -> bool:  # noqa: ARG001 - as above
    return True


def ticks_on_abort(step: MegatronSplit) -> None:
    was_open = step.state == "open"
    abort(step)
    step.version += was_open


def abort_keeps_gradients(step: MegatronSplit) -> None:
    restore(step)


def abort_keeps_random(step: MegatronSplit) -> None:
    step.random = ()
    give_up(step)


def adds_up_means(
    local: Mapping[str, float], group: dist.ProcessGroup | None, device: torch.device
) -> dict[str, float]:
    ranks = dist.get_world_size(group)
    means = over_ranks(local, group, device)
    return {name: value * ranks if protocol.kind(name) == "mean" else value for name, value in means.items()}


def counts_one_column_early(batch: Batch) -> torch.Tensor:
    sequences = batch["sample_mask"].double().sum()
    tokens = (batch["token_mask"][:, :-1] * batch["sample_mask"][:, None]).double().sum()
    return torch.stack([sequences, tokens])


# -- the step on FSDP2 ---------------------------------------------------------------------------------------------------


def pads_with_real_rows(step: Any, pieces: list[Batch], most: int) -> list[Batch]:  # noqa: ARG001 - as above
    return pieces + pieces[:1] * (most - len(pieces))


def holds_the_callers_rows(step: Any, pieces: list[Batch]) -> list[dict[str, torch.Tensor]]:
    ready: list[Batch] = [*step.held, *pieces]
    step.held = [ready.pop()]
    seen: list[dict[str, torch.Tensor]] = []
    for piece in ready:
        seen += step.forward_backward(piece, step.loss, tokens=1.0, sequences=1.0, sync=False)
    return seen


def keeps_its_own_part(slope: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    return columns.part_of(slope, group, dim)


def sums_whole_slopes(slope: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    return columns.part_of(slope, group, dim) * dist.get_world_size(group)


def counts_context_ranks(step: FsdpSplit, group: dist.ProcessGroup) -> tuple[float, float, float]:  # noqa: ARG001 - as above
    return true_counts(step, dist.group.WORLD)


def leaves_out_context_ranks(step: Steps) -> float:
    kept, step.job.everyone = step.job.everyone, step.job.group
    try:
        return norm(step)
    finally:
        step.job.everyone = kept


# -- the loss and the job, which the plain and the split step share ------------------------------------------------------


def mask_not_shifted(batch: Batch) -> torch.Tensor:
    return valid({**batch, "token_mask": batch["token_mask"].roll(1, dims=1)})


def multiplies_masks(values: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    return values.double() * inside


def cancelling_weight(
    loss: ClippedPolicyGradient, gap: torch.Tensor, length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The importance weight as expm1(gap) + 1 in float32."""
    lossy = (gap.float().expm1() + 1).double().log()
    return weight(loss, lossy, length)


def without_clipping(ctx: backends.ModelContext) -> Any:
    job = assemble(ctx)
    job.optimizer.config.clip_grad = 0.0
    return job
