"""The faults of the split lab: the kit's split steps with one bug each, and losses that the plain and the split step share."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import torch
import torch.distributed as dist

from kit.errors import BadInput
from kit.labs.split.config import KIT_SPLIT
from kit.labs.split.ranks.losses import WrappedLoss
from kit.megatron import split
from kit.train import fsdp, protocol
from kit.train.losses import ClippedPolicyGradient
from kit.train.protocol import Batch, cut, rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kit.labs.rankside import Context
    from kit.labs.split.config import SplitConfig
    from kit.train.protocol import Loss, Normalizer, Split, SplitContext, StepResult

IN_THE_LOSS = frozenset({"mask-not-shifted", "weights-cancel", "masks-multiply"})
ELSEWHERE = IN_THE_LOSS | {"unclipped"}  # faults that work with any implementation
NUMBERS = ("global_loss", "grad_norm", "lr", "wd", "global_valid_seqs", "global_valid_toks", "updated")


def make_split(ctx: Context, given: SplitContext) -> Split:
    """The configured split step; the kit's own with the fault, if one is on."""
    target = given.config.implementation
    if ctx.fault is None or ctx.fault in ELSEWHERE:
        return protocol.make_split(target, given, "implementation")
    if target != KIT_SPLIT:
        raise BadInput(f"fault {ctx.fault!r} is a bug of the kit's own split step: leave out implementation={target}")
    if given.config.backend == "fsdp2":
        if ctx.fault != "dummy-bins-counted":
            raise BadInput(f"fault {ctx.fault!r} is a bug of the Megatron split step: leave out backend=fsdp2")
        return DummiesCounted(given.job)
    if ctx.fault == "dummy-bins-counted":
        raise BadInput("fault 'dummy-bins-counted' is a bug of the FSDP2 split step: set backend=fsdp2")
    return BrokenMegatron(given.job, ctx.fault)


def whole_result(config: SplitConfig, result: Any) -> StepResult:
    """The result of finish(), if it is complete."""
    required = f"implementation={config.implementation}: finish() must return a dict with {', '.join(NUMBERS)}, version, metrics"
    if not isinstance(result, dict):
        raise BadInput(f"{required}; it returned {type(result).__name__}")
    if missing := [name for name in (*NUMBERS, "version", "metrics") if name not in result]:
        raise BadInput(f"{required}; it lacks {', '.join(missing)}")
    table = result["metrics"]
    if not isinstance(table, dict):
        raise BadInput(f"{required}; metrics is a {type(table).__name__} and must be a dict from names to numbers")
    values = {name: result[name] for name in (*NUMBERS, "version")} | table
    if odd := [f"{name}={value!r}" for name, value in values.items() if not is_number(value)]:
        raise BadInput(f"{required}; not a number: {', '.join(odd)}")
    return cast("StepResult", result)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def broken_loss(fault: str | None, loss: Loss) -> Loss:
    """The loss with its fault, if one is on."""
    if fault == "mask-not-shifted":
        return NotShifted(loss)
    if fault == "masks-multiply":
        return Multiplied(loss)
    if fault == "weights-cancel":
        if not isinstance(loss, ClippedPolicyGradient):
            raise BadInput("fault 'weights-cancel' is a bug of the kit's clipped loss: leave out loss and recipe=nll")
        return Cancelling(**{field.name: getattr(loss, field.name) for field in dataclasses.fields(loss)})
    return loss


def broken_job(fault: str | None, job: Any) -> Any:
    """The job with its fault, if one is on."""
    if fault == "unclipped":
        if not hasattr(job.optimizer, "config"):
            raise BadInput("fault 'unclipped' is a bug of a Megatron job: leave out backend=fsdp2")
        job.optimizer.config.clip_grad = 0.0
    return job


class NotShifted(WrappedLoss):
    """A loss that does not shift the token mask: off by one in the plain and in the split step."""

    def __call__(self, logprobs: torch.Tensor, batch: Batch, **counts: float) -> Any:
        return self.loss(logprobs, {**batch, "token_mask": batch["token_mask"].roll(1, dims=1)}, **counts)


class Multiplied(WrappedLoss):
    """A loss that multiplies masked places by 0 instead of replacing them."""

    def __call__(self, logprobs: torch.Tensor, batch: Batch, **counts: float) -> Any:
        value, seen = self.loss(logprobs, batch, **counts)
        return value + (logprobs * 0.0).sum(), seen


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cancelling(ClippedPolicyGradient):
    """A loss that computes the importance weight as expm1(gap) + 1 in float32."""

    def _weight(self, gap: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lossy = (gap.float().expm1() + 1).double().log()
        return super(Cancelling, self)._weight(lossy, length)


class OneScalar(WrappedLoss):
    """A loss that reports one normalizer for all metrics."""

    def __init__(self, loss: Loss, wrong: Mapping[str, Normalizer]) -> None:
        super().__init__(loss)
        self.wrong = wrong

    def normalizers(self) -> Mapping[str, Normalizer]:
        return self.wrong


class BrokenMegatron(split.MegatronSplit):
    """The kit's step on Megatron with one bug."""

    def __init__(self, job: split.Job, fault: str) -> None:
        super().__init__(job)
        self.fault = fault

    def begin(self, loss: Loss, gbs: int, mbs: int) -> None:
        right = loss.normalizers()
        if self.fault == "one-scalar-metrics":
            loss = OneScalar(loss, dict.fromkeys(right, loss.level))
        elif self.fault == "counts-normalised":
            loss = OneScalar(loss, {name: by or loss.level for name, by in right.items()})
        super().begin(loss, gbs, mbs)

    def microbatch(self, data: Batch) -> None:
        if self.fault == "release-mid-step" and self.pieces == 1:
            for buffer in self.job.chunks[0].buffers:
                storage = buffer.grad_data.untyped_storage()
                size = storage.size()
                storage.resize_(0)
                storage.resize_(size)
                buffer.grad_data.zero_()
        super().microbatch(data)

    def abort(self) -> None:
        opened = self.state == "open"
        super().abort()
        if self.fault == "ticks-on-abort" and opened:
            self.version += 1

    def _hook(self) -> None:
        super()._hook()
        if self.fault == "no-sync-leak":
            self.config.no_sync_func = self.saved["no_sync_func"]
        elif self.fault == "per-chunk-finalize":
            self.config.finalize_model_grads_func = self.saved["finalize_model_grads_func"]

    def _restore(self) -> None:
        if self.fault == "hooks-lost-on-error" and self.failed:
            return
        super()._restore()

    def _pieces(self, data: Batch) -> list[Batch]:
        if self.fault == "drops-remainder":
            data = cut(data, 0, rows(data) // self.mbs * self.mbs)
        pieces = super()._pieces(data)
        return pieces[:-1] if self.fault == "drops-last-microbatch" and len(pieces) > 1 else pieces

    def _aux_guess(self, pieces: list[Batch]) -> float:
        return 1.0 if self.fault == "moe-aux-unscaled" else super()._aux_guess(pieces)

    def _correct_aux(self, own: float) -> None:
        if self.fault != "moe-aux-unscaled":
            super()._correct_aux(own)

    def _metrics(self, sequences: float, tokens: float) -> dict[str, float]:
        if self.fault == "group-per-step":
            self.own_group = dist.new_group()
        table = super()._metrics(sequences, tokens)
        if self.fault == "moe-aux-summed":
            table["moe_aux_loss"] *= self.microbatches
        return table

    def _step_metrics(self, group: Any, sequences: float, tokens: float) -> dict[str, float]:
        if self.fault == "replicas-counted-n-times":
            group = dist.group.WORLD
        table = super()._step_metrics(group, sequences, tokens)
        if self.fault == "metrics-on-rank-0-alone" and dist.get_rank(group) and tokens:
            names = self.loss.normalizers()
            own = protocol.of_microbatches(self.seen, names)
            table = protocol.normalised(own, names, tokens=tokens, sequences=sequences)
        if self.fault == "loses-a-metric":
            del table["num_unmasked_tokens"]
        return table

    def _normalise(self, own: float) -> None:
        if self.fault == "missing-sync":
            late: Any = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(late):
                torch.cuda._sleep(10**9)  # type: ignore[no-untyped-call] # the division is late, and nothing waits for it
                super()._normalise(own)
        else:
            super()._normalise(own)

    def _synchronise(self) -> None:
        if self.fault != "missing-sync":
            super()._synchronise()

    def _reduce(self) -> None:
        if self.fault == "no-reduce":
            return
        if self.fault == "double-reduce":
            for group in split.bucket_groups(self.job.chunks[0]):
                group.start_grad_sync()
        super()._reduce()

    def _update(self, sequences: float, tokens: float, table: dict[str, float]) -> StepResult:
        if self.fault == "nan-applied":
            with mock.patch.object(split, "finite_gradients", return_value=True):
                return super()._update(sequences, tokens, table)
        if self.fault == "schedule-by-steps":
            return split.update(self.job, 1, sequences, tokens, table)
        result = super()._update(sequences, tokens, table)
        if self.fault == "late-lr":
            result["lr"] = max(float(group["lr"]) for group in self.job.optimizer.param_groups)
        elif self.fault == "norm-of-sums":
            result["grad_norm"] *= tokens if self.loss.level == "tokens" else sequences
        return result

    def _give_up(self) -> None:
        if self.fault == "abort-keeps-grads":
            self._restore()
            return
        if self.fault == "abort-keeps-random":
            self.random = ()
        super()._give_up()


class DummiesCounted(fsdp.FsdpSplit):
    """The kit's FSDP2 step that pads with real rows and counts them."""

    def fill(self, pieces: list[Batch], most: int) -> list[Batch]:
        return pieces + pieces[:1] * (most - len(pieces))
