"""A trainer that accepts a step in chunks. Dense models, no pipeline.
kit run split --set implementation=docs.examples.own_split:Trainer"""

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

HOOKS = {"grad_sync_func": None, "no_sync_func": contextlib.nullcontext, "finalize_model_grads_func": None}


class Trainer:
    def __init__(self, ctx: Any) -> None:
        (self.chunk,) = ctx.chunks
        self.optimizer, self.scheduler, self.device = ctx.optimizer, ctx.scheduler, ctx.device
        self.state, self.version = "closed", 0

    def begin(self, loss: Any, gbs: int, mbs: int) -> None:
        self.need("closed")
        self.loss, self.gbs, self.mbs = loss, gbs, mbs
        self.counts = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.seen: list[dict[str, torch.Tensor]] = []
        self.random = torch.get_rng_state(), get_cuda_rng_tracker().get_states()
        self.zero()
        self.state = "open"

    def microbatch(self, data: dict[str, torch.Tensor]) -> None:
        self.need("open")
        self.state = "open and broken"  # until this call succeeds
        rows = len(data["input_ids"])
        pieces = [{name: value[at : at + self.mbs] for name, value in data.items()} for at in range(0, rows, self.mbs)]
        # Undo two divisions: the schedule's by its microbatches and, if DDP averages, DDP's by its ranks.
        mean = not self.chunk.config.calculate_per_token_loss
        self.undo = len(pieces) * (parallel_state.get_data_parallel_world_size() if mean else 1)
        with self.quiet(), self.chunk.no_sync():
            self.seen += get_forward_backward_func()(
                forward_step_func=self.forward,
                data_iterator=iter(pieces),
                model=[self.chunk],
                num_microbatches=len(pieces),
                seq_length=data["input_ids"].shape[1] - 1,
                micro_batch_size=self.mbs,
                forward_only=False,
            )
        valid = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        self.counts += torch.stack([data["sample_mask"].double().sum(), valid.double().sum()]).to(self.device)
        self.state = "open"

    def finish(self) -> dict[str, Any]:
        self.need("open")
        if not self.seen:
            raise RuntimeError("the step is open but has no microbatch: call microbatch before finish")
        self.state = "open and broken"
        dist.all_reduce(self.counts, group=parallel_state.get_data_parallel_group())
        sequences, tokens = self.counts.tolist()
        by = {"tokens": max(tokens, 1.0), "sequences": max(sequences, 1.0), None: 1.0}
        metrics = {name: self.over_all(name) / by[each] for name, each in self.loss.normalizers().items()}
        self.chunk.scale_gradients(1.0 / by[self.loss.level])
        self.reduce()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        groups = self.optimizer.param_groups
        lr, wd = (max(group[name] for group in groups) for name in ("lr", "weight_decay"))
        updated, norm = False, math.nan
        if self.finite(metrics["loss"]):
            updated, norm, _ = self.optimizer.step()
            self.scheduler.step(increment=self.gbs)
        else:
            self.zero()
        self.version += 1
        self.state = "closed"
        result = {"global_loss": metrics["loss"], "grad_norm": norm, "lr": lr, "wd": wd, "metrics": metrics}
        counts = {"global_valid_seqs": sequences, "global_valid_toks": tokens}
        return {**result, **counts, "updated": updated, "version": self.version}

    def abort(self) -> None:
        if self.state != "closed":
            self.zero()
            torch.set_rng_state(self.random[0])
            get_cuda_rng_tracker().set_states(self.random[1])
            self.state = "closed"

    def need(self, state: str) -> None:
        if self.state != state:
            raise RuntimeError(f"the step is {self.state}, but this call needs it to be {state}")

    def zero(self) -> None:
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Keep schedules from reducing while a chunk of the step runs."""
        config = self.chunk.config
        kept = {name: getattr(config, name) for name in HOOKS}
        try:
            for name, value in HOOKS.items():
                setattr(config, name, value)
            yield
        finally:
            for name, value in kept.items():
                setattr(config, name, value)

    def forward(self, data: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
        batch = {name: value.to(self.device) for name, value in next(data).items()}
        ids = batch["input_ids"]
        places = torch.arange(ids.shape[1] - 1, device=self.device).expand(len(ids), -1)
        losses = model(ids[:, :-1], places, None, labels=ids[:, 1:].contiguous())

        def raw(losses: torch.Tensor) -> tuple[torch.Tensor, Any]:
            value, table = self.loss(-losses.float(), batch, tokens=1.0, sequences=1.0)
            return value * self.undo, table

        return losses, raw

    def reduce(self) -> None:
        """Reduce once: finish_grad_sync also starts the reduction, unless it overlaps with the backward pass."""
        if self.chunk.ddp_config.overlap_grad_reduce:
            self.chunk.start_grad_sync()
        finalize_model_grads([self.chunk])

    def finite(self, loss: float) -> bool:
        """Whether loss and gradients are finite on all ranks: Megatron's optimizer would update with NaN."""
        bad = torch.tensor([float(not math.isfinite(loss))], device=self.device)
        for buffer in self.chunk.buffers:
            bad += (~torch.isfinite(buffer.grad_data)).any()
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        return bad.item() == 0

    def over_all(self, name: str) -> float:
        """Combine a metric over microbatches and data ranks: minimum or maximum by its name, otherwise a sum."""
        values = torch.stack([row[name].double() for row in self.seen])
        how = {"_min": dist.ReduceOp.MIN, "_max": dist.ReduceOp.MAX}.get(name[-4:], dist.ReduceOp.SUM)
        own = {dist.ReduceOp.MIN: values.min(), dist.ReduceOp.MAX: values.max()}.get(how, values.sum())
        dist.all_reduce(own, op=how, group=parallel_state.get_data_parallel_group())
        return own.item()
