"""A plain PyTorch loop over an FSDP2 model.
kit run split --set backend=fsdp2 --set implementation=docs.examples.fsdp_loop:Loop"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


class Loop:
    """Microbatches accumulate gradients without reducing. A last backward pass over nothing reduces them all at once."""

    def __init__(self, ctx: Any) -> None:
        (self.model,) = ctx.chunks
        self.optimizer, self.scheduler, self.device = ctx.optimizer, ctx.scheduler, ctx.device
        self.max_norm = ctx.settings.clip
        self.version, self.state = 0, "closed"

    def begin(self, loss: Any, gbs: int, mbs: int) -> None:
        self.need("closed")
        self.loss, self.gbs, self.mbs = loss, gbs, mbs
        self.metrics: list[dict[str, torch.Tensor]] = []
        self.counts = torch.zeros(2, dtype=torch.float64)
        self.random = torch.get_rng_state()
        self.optimizer.zero_grad()
        self.state = "open"

    def microbatch(self, data: dict[str, torch.Tensor]) -> None:
        self.need("open")
        self.state = "open and broken"
        with self.no_reduction():
            for at in range(0, len(data["input_ids"]), self.mbs):
                self.one({name: value[at : at + self.mbs].to(self.device) for name, value in data.items()})
        self.state = "open"

    @contextlib.contextmanager
    def no_reduction(self) -> Iterator[None]:
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def one(self, batch: dict[str, torch.Tensor]) -> None:
        value, metrics = self.loss(self.logprobs(batch["input_ids"]), batch, tokens=1.0, sequences=1.0)
        value.backward()
        valid = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
        self.counts += torch.stack([batch["sample_mask"].double().sum(), valid.double().sum()]).cpu()
        self.metrics.append(metrics)

    def logprobs(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.model(ids)[:, :-1].float()
        return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)

    def finish(self) -> dict[str, Any]:
        self.need("open")
        if not self.metrics:
            raise RuntimeError("the step is open but has no microbatch: call microbatch before finish")
        self.state = "open and broken"
        self.reduce()
        sequences, tokens = self.over_ranks(self.counts).tolist()
        by = {"tokens": max(tokens, 1.0), "sequences": max(sequences, 1.0), None: 1.0}
        metrics = {name: self.total(name) / by[each] for name, each in self.loss.normalizers().items()}
        norm = self.divide(by[self.loss.level])
        lr, wd = (self.optimizer.param_groups[0][name] for name in ("lr", "weight_decay"))
        updated = math.isfinite(norm) and math.isfinite(metrics["loss"])
        if updated:
            self.optimizer.step()
            self.scheduler.step(self.gbs)
        self.version += 1
        self.state = "closed"
        result = {"global_loss": metrics["loss"], "grad_norm": norm, "lr": lr, "wd": wd, "metrics": metrics}
        counts = {"global_valid_seqs": sequences, "global_valid_toks": tokens}
        return {**result, **counts, "updated": updated, "version": self.version}

    def abort(self) -> None:
        if self.state != "closed":
            self.reduce()  # FSDP2 keeps unreduced sums, which must not reach the next step
            self.optimizer.zero_grad()
            torch.set_rng_state(self.random)
            self.state = "closed"

    def reduce(self) -> None:
        (self.logprobs(torch.zeros(1, 2, dtype=torch.long, device=self.device)) * 0.0).sum().backward()

    def divide(self, normalizer: float) -> float:
        """Divide gradients by the true count and clip them; return the norm before clipping."""
        for param in self.model.parameters():
            param.grad.div_(normalizer)
        return self.clip()

    def clip(self) -> float:
        """Set the scale with which `ctx.optimizer` clips in its step, so that the lab observes unclipped gradients."""
        norm = torch.nn.utils.get_total_norm([param.grad for param in self.model.parameters()]).full_tensor()
        self.optimizer.scale = self.max_norm / (float(norm) + 1e-6)
        return float(norm)

    def need(self, state: str) -> None:
        if self.state != state:
            raise RuntimeError(f"the step is {self.state}, but this call needs it to be {state}")

    def total(self, name: str) -> float:
        values = torch.stack([row[name].double().cpu() for row in self.metrics])
        low, high = name.endswith("_min"), name.endswith("_max")
        own = values.min() if low else values.max() if high else values.sum()
        return float(
            self.over_ranks(own, dist.ReduceOp.MIN if low else dist.ReduceOp.MAX if high else dist.ReduceOp.SUM)
        )

    def over_ranks(self, values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        there = values.to(self.device)
        dist.all_reduce(there, op=op)
        return there.cpu()


class LoopThatClipsFirst(Loop):
    """Correct too: clips gradients before the optimizer's step, as most loops do."""

    def clip(self) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm).full_tensor())


# -- with one bug each ---------------------------------------------------------------------------------------------------


class LoopThatReducesEveryMicrobatch(Loop):
    """Does not switch reduction off: the sum is correct, but costs one reduction per microbatch."""

    def one(self, batch: dict[str, torch.Tensor]) -> None:
        self.model.set_requires_gradient_sync(True)
        super().one(batch)


class LoopThatDividesByItsOwnCount(Loop):
    """Each rank divides by its own tokens, as a loss with reduction="mean" does."""

    def over_ranks(self, values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        return values * dist.get_world_size() if values is self.counts else super().over_ranks(values, op)


class LoopThatLeavesReductionOff(Loop):
    """A microbatch that raises leaves the model without reduction, because there is no finally."""

    @contextlib.contextmanager
    def no_reduction(self) -> Iterator[None]:
        self.model.set_requires_gradient_sync(False)
        yield
        self.model.set_requires_gradient_sync(True)
