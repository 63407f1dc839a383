"""A trainer with its own calls, and the adapter through which the split lab drives it. Dense Megatron models, no pipeline.
kit run split --set implementation=docs.examples.step_trainer:Adapter"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import get_cuda_rng_tracker


class StepTrainer:
    """Three calls: begin_train_step, train_microbatch for each batch, finish_train_step. It cannot abort a step."""

    def __init__(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.train_steps = 0

    def begin_train_step(self, loss_fn: Any) -> None:
        self.loss_fn, self.metrics, self.counts = loss_fn, [], torch.zeros(2, dtype=torch.float64)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def train_microbatch(self, data: dict[str, torch.Tensor]) -> None:
        with self.no_reduction(self.model.config), self.model.no_sync():
            self.metrics += get_forward_backward_func()(
                forward_step_func=self.forward,
                data_iterator=iter([data]),
                model=[self.model],
                num_microbatches=1,
                seq_length=data["input_ids"].shape[1] - 1,
                micro_batch_size=len(data["input_ids"]),
                forward_only=False,
            )
        self.counts += self.count(data)

    def finish_train_step(self, global_batch_size: int) -> dict[str, Any]:
        seqs, toks = self.over_data_ranks(self.counts).tolist()
        self.model.scale_gradients(self.scale(seqs, toks))
        self.reduce()
        lr, wd = (max(group[name] for group in self.optimizer.param_groups) for name in ("lr", "weight_decay"))
        norm = self.grad_norm()
        loss = self.over_data_ranks(torch.stack([row["loss"].double() for row in self.metrics]).sum())
        updated = self.may_update(norm + float(loss))
        if updated:
            _, norm, _ = self.optimizer.step()
            self.scheduler.step(increment=global_batch_size)
        self.train_steps += 1
        used = {"lr": lr, "wd": wd}
        return {
            "grad_norm": norm,
            **used,
            "seqs": seqs,
            "toks": toks,
            "updated": updated,
            "all_mb_metrics": self.metrics,
        }

    # -- the parts ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_reduction(self, config: Any) -> Iterator[None]:
        """Keep the schedule from reducing at the end of a microbatch; only the end of the step reduces."""
        hooks = config.no_sync_func, config.finalize_model_grads_func
        config.no_sync_func, config.finalize_model_grads_func = contextlib.nullcontext, None
        try:
            yield
        finally:
            config.no_sync_func, config.finalize_model_grads_func = hooks

    def forward(self, data: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
        batch = {name: value.cuda() for name, value in next(data).items()}
        ids = batch["input_ids"]
        positions = torch.arange(ids.shape[1] - 1, device=ids.device).expand(len(ids), -1)
        losses = model(ids[:, :-1], positions, None, labels=ids[:, 1:].contiguous())
        mean = not model.config.calculate_per_token_loss  # then DDP divides by the number of data ranks
        return losses, lambda losses: self.sums(-losses.float(), batch, self.data_ranks() if mean else 1)

    def sums(self, logprobs: torch.Tensor, batch: dict[str, torch.Tensor], undo: int) -> tuple[torch.Tensor, Any]:
        """Raw sums: their divisor is known only at the end of the step."""
        loss, metrics = self.loss_fn(logprobs, batch, tokens=1.0, sequences=1.0)
        return loss * undo, metrics

    def count(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        valid = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        return torch.stack([data["sample_mask"].double().sum(), valid.double().sum()]).cpu()

    def scale(self, seqs: float, toks: float) -> float:
        return 1.0 / max(toks if self.loss_fn.level == "tokens" else seqs, 1.0)

    def reduce(self) -> None:
        """finish_grad_sync also starts the reduction, unless it overlaps with the backward pass."""
        if self.model.ddp_config.overlap_grad_reduce:
            self.model.start_grad_sync()
        finalize_model_grads([self.model])

    def grad_norm(self) -> float:
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def may_update(self, found: float) -> bool:
        return math.isfinite(found)

    def data_ranks(self) -> int:
        return parallel_state.get_data_parallel_world_size()

    def over_data_ranks(self, values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        there = values.cuda()
        dist.all_reduce(there, op=op, group=parallel_state.get_data_parallel_group())
        return there.cpu()


class Adapter:
    """Implements the lab's four calls with the three calls of a trainer."""

    trainer = StepTrainer

    def __init__(self, ctx: Any) -> None:
        self.steps = self.trainer(*ctx.chunks, ctx.optimizer, ctx.scheduler)
        self.open = False

    @property
    def version(self) -> int:
        return self.steps.train_steps

    def begin(self, loss: Any, gbs: int, mbs: int) -> None:
        self.need(opened=False)
        self.loss, self.gbs, self.mbs, self.fed = loss, gbs, mbs, 0
        self.random = torch.get_rng_state(), get_cuda_rng_tracker().get_states()
        self.steps.begin_train_step(loss)
        self.open = True

    def microbatch(self, data: dict[str, torch.Tensor]) -> None:
        self.need(opened=True)
        self.fed, before = math.nan, self.fed  # NaN until this call succeeds
        rows = len(data["input_ids"])
        for at in range(0, rows, self.mbs):
            self.steps.train_microbatch({name: value[at : at + self.mbs] for name, value in data.items()})
        self.fed = before + rows

    def finish(self) -> dict[str, Any]:
        self.need(opened=True)
        if not self.fed > 0:
            raise RuntimeError("the step is open but has no microbatch: call microbatch before finish")
        self.fed = math.nan
        done = self.steps.finish_train_step(self.gbs)
        self.open = False
        by = {"tokens": max(done["toks"], 1.0), "sequences": max(done["seqs"], 1.0), None: 1.0}
        metrics = {name: self.total(name, done) / by[each] for name, each in self.loss.normalizers().items()}
        result = {name: done[name] for name in ("grad_norm", "lr", "wd", "updated")}
        counts = {"global_valid_seqs": done["seqs"], "global_valid_toks": done["toks"]}
        return {**result, **counts, "global_loss": metrics["loss"], "metrics": metrics, "version": self.version}

    def abort(self) -> None:
        if self.open:
            self.steps.begin_train_step(self.loss)  # sets gradients to zero again
            self.put_back()
            self.open = False

    def put_back(self) -> None:
        torch.set_rng_state(self.random[0])
        get_cuda_rng_tracker().set_states(self.random[1])

    def need(self, *, opened: bool) -> None:
        if self.open != opened or (opened and math.isnan(self.fed)):
            raise RuntimeError(f"the step is {'open' if self.open else 'closed'}, and this call is not allowed then")

    def total(self, name: str, done: dict[str, Any]) -> float:
        """Combine a metric over microbatches and data ranks: minimum or maximum by its name, otherwise a sum."""
        values = torch.stack([row[name].double() for row in done["all_mb_metrics"]])
        low, high = name.endswith("_min"), name.endswith("_max")
        own = values.min() if low else values.max() if high else values.sum()
        op = dist.ReduceOp.MIN if low else dist.ReduceOp.MAX if high else dist.ReduceOp.SUM
        return float(self.steps.over_data_ranks(own, op))


# -- with one bug each ---------------------------------------------------------------------------------------------------


class NormalizesEachMicrobatch(StepTrainer):
    def sums(self, logprobs: torch.Tensor, batch: dict[str, torch.Tensor], undo: int) -> tuple[torch.Tensor, Any]:
        loss, metrics = super().sums(logprobs, batch, undo)
        seqs, toks = self.count(batch).tolist()
        return loss / max(toks if self.loss_fn.level == "tokens" else seqs, 1.0), metrics

    def scale(self, seqs: float, toks: float) -> float:  # noqa: ARG002 - a mean over microbatches and ranks
        return 1.0 / len(self.metrics) / self.data_ranks()


class AdapterOfPerMicrobatchNormalizers(Adapter):
    """Divides each microbatch by its own count and averages: short answers weigh more than long ones."""

    trainer = NormalizesEachMicrobatch


class ReducesTwice(StepTrainer):
    def reduce(self) -> None:
        self.model.start_grad_sync()
        finalize_model_grads([self.model])


class AdapterThatReducesTwice(Adapter):
    """Starts the reduction although it is not overlapped; finishing starts it again."""

    trainer = ReducesTwice


class LosesHooks(StepTrainer):
    @contextlib.contextmanager
    def no_reduction(self, config: Any) -> Iterator[None]:
        hooks = config.no_sync_func, config.finalize_model_grads_func
        config.no_sync_func, config.finalize_model_grads_func = contextlib.nullcontext, None
        yield
        config.no_sync_func, config.finalize_model_grads_func = hooks


class AdapterThatLosesHooks(Adapter):
    """A microbatch that raises leaves Megatron's hooks replaced, because there is no finally."""

    trainer = LosesHooks


class CountsPrompts(StepTrainer):
    def count(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        valid = data["token_mask"] * data["sample_mask"][:, None]  # token t is predicted in column t - 1
        return torch.stack([data["sample_mask"].double().sum(), valid.double().sum()]).cpu()


class AdapterWithAnUnshiftedMask(Adapter):
    """Counts the first token of a row too, which nothing predicts."""

    trainer = CountsPrompts


class AlwaysUpdates(StepTrainer):
    def may_update(self, found: float) -> bool:  # noqa: ARG002 - always updates
        return True


class AdapterThatAlwaysUpdates(Adapter):
    """Applies gradients that are not finite."""

    trainer = AlwaysUpdates


class AdapterThatDropsARemainder(Adapter):
    """Ignores rows after the last whole microbatch."""

    def microbatch(self, data: dict[str, torch.Tensor]) -> None:
        whole = len(data["input_ids"]) // self.mbs * self.mbs
        super().microbatch({name: value[:whole] for name, value in data.items()})


class AdapterThatForgetsRandomState(Adapter):
    """An aborted step has drawn random numbers, and their state is not restored."""

    def put_back(self) -> None: ...


class AdapterThatReportsOneRank(Adapter):
    """Reports metrics of the rank's own rows only."""

    def total(self, name: str, done: dict[str, Any]) -> float:
        data_ranks = self.steps.over_data_ranks
        self.steps.over_data_ranks = lambda values, _: values * self.steps.data_ranks()
        try:
            return super().total(name, done)
        finally:
            self.steps.over_data_ranks = data_ranks


class MakesAGroup(StepTrainer):
    def finish_train_step(self, global_batch_size: int) -> dict[str, Any]:
        self.group = dist.new_group()  # the previous group is never destroyed
        dist.barrier(self.group)
        return super().finish_train_step(global_batch_size)


class AdapterThatLeaksAGroup(Adapter):
    """Every step makes a group for a meeting and never destroys it."""

    trainer = MakesAGroup
