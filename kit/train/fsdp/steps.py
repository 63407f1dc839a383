"""The plain step and the split step on FSDP2. They share how a microbatch is run and how weights are updated.

Sync learns the true counts first and divides each loss by them. Split runs raw sums, and divides the gradients once they are reduced.
Both reduce once, in the backward pass of the step's last microbatch: the split step holds one microbatch back, since only finish() tells
which was the last. Ranks may have different numbers of microbatches, or no rows: dummies fill up, and nobody counts them.

Where the gradients are not finite nothing is updated and the schedule stays, as Megatron's trainer has it; the version ticks all the same.
Between the update and the result nothing is left that can fail.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from kit.errors import KitError
from kit.train import metrics
from kit.train.batch import Batch, counts, microbatches, pack
from kit.train.fsdp.job import FsdpJob, forget_gradients, local_gradients
from kit.train.plain import logprobs, next_logprobs
from kit.train.stream import Misuse, SplitStep

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.train.protocol import Loss, StepResult

DUMMY: Batch = {}  # a microbatch of a rank that has fewer than others


class Steps:
    """What both steps do with a job."""

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
        most, any_refused = self._over_ranks([len(pieces), refused is not None], dist.ReduceOp.MAX)
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
        device = self.job.device
        self.reduce_next(on=sync)
        if not piece:
            model = self.job.model
            nothing = logprobs(model, torch.zeros(1, 2, dtype=torch.long, device=device))
            (nothing * 0.0).sum().backward()  # type: ignore[no-untyped-call]
            return []
        here = {name: value.to(device) for name, value in piece.items()}
        value, seen = loss(self.logprobs(here), here, tokens=tokens, sequences=sequences)
        value.backward()  # type: ignore[no-untyped-call]
        return [seen]

    def logprobs(self, piece: Batch) -> torch.Tensor:
        if self.job.batching != "packed":
            return logprobs(self.job.model, piece["input_ids"])
        packed = pack(piece)
        return packed.unpack(next_logprobs(self.job.model, packed.input_ids, packed.positions, packed.segments))

    def reduce_next(self, *, on: bool) -> None:
        """Whether the next backward pass reduces gradients."""
        self.job.model.set_requires_gradient_sync(on)  # type: ignore[operator]

    def divide(self, normalizer: float) -> None:
        """Reduced gradients by the true count."""
        torch._foreach_div_(local_gradients(self.job.optimizer), normalizer)

    def grad_norm(self) -> float:
        """Over all parameters, before clipping; the same on every rank. Collective."""
        own = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in local_gradients(self.job.optimizer)]
        return math.sqrt(self._over_ranks([float(torch.stack(own).square().sum())], dist.ReduceOp.SUM)[0])

    def rates(self) -> tuple[float, float]:
        """Learning rate and weight decay of the coming update."""
        group = self.job.optimizer.param_groups[0]
        return float(group["lr"]), float(group["weight_decay"])

    def update(self, table: dict[str, float], sequences: float, tokens: float, gbs: int) -> StepResult:
        """Weights and schedule move, or neither where loss or gradients are not finite. Rates are those that were used."""
        lr, wd = self.rates()
        norm = self.grad_norm()
        updated = math.isfinite(norm) and math.isfinite(table["loss"])
        limit = self.job.settings.clip
        self.job.optimizer.scale = limit / (norm + 1e-6) if limit > 0 else 1.0
        if updated:
            self.job.optimizer.step()
            self.job.scheduler.step(gbs)
        else:
            self.job.optimizer.zero_grad()
        return {
            "global_loss": table["loss"],
            "grad_norm": norm,
            "lr": lr,
            "wd": wd,
            "global_valid_seqs": sequences,
            "global_valid_toks": tokens,
            "updated": updated,
            "version": 0,
            "metrics": table,
        }

    def _over_ranks(self, values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        own = torch.tensor(values, dtype=torch.float64, device=self.job.device)
        dist.all_reduce(own, op=op, group=self.job.group)
        done: list[float] = own.tolist()
        return done


class FsdpSync(Steps):
    """The plain step: everything is known before it begins."""

    version = 0

    def run(self, loss: Loss, data: Batch, gbs: int, mbs: int) -> StepResult:
        """One step on this rank's rows. If it raises, weights, optimizer and schedule are as before."""
        with self._hooks():
            forget_gradients(self.job)
            sequences, tokens = self._over_ranks(counts(data).tolist(), dist.ReduceOp.SUM)
            by = {"tokens": max(tokens, 1.0), "sequences": max(sequences, 1.0)}
            pieces = self.cut(data, mbs) or [DUMMY]
            seen = []
            for index, piece in enumerate(pieces):
                seen += self.forward_backward(piece, loss, **by, sync=index == len(pieces) - 1)
            names = loss.normalizers()
            raw = metrics.over_ranks(metrics.of_microbatches(seen, names), self.job.group, self.job.device)
            done = metrics.normalised(raw, {}, tokens=1.0, sequences=1.0)
            result = self.update(done, sequences, tokens, gbs)
        self.version += 1
        return {**result, "version": self.version}

    @contextlib.contextmanager
    def _hooks(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            forget_gradients(self.job)
            raise
        finally:
            self.reduce_next(on=True)


class FsdpSplit(Steps, SplitStep):
    """begin, microbatch as often as one likes, finish or abort. Every rank makes the same calls; rows may be uneven, or none."""

    def __init__(self, job: FsdpJob) -> None:
        Steps.__init__(self, job)
        SplitStep.__init__(self, job.device)
        self.held: list[Batch] = []
        self.randomness: list[torch.Tensor] = []

    def drop(self) -> None:
        """Nothing of the step remains: no gradients, no microbatch held back."""
        self.held = []
        forget_gradients(self.job)

    def flush(self) -> list[dict[str, torch.Tensor]]:
        """The microbatch that was held back, and with it the step's one reduction."""
        last = self.held.pop() if self.held else DUMMY
        return self.forward_backward(last, self.loss, tokens=1.0, sequences=1.0, sync=True)

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
        self.seen += self.flush()
        sequences, tokens, normalizer = self._true_counts(self.job.group)
        done = self._step_metrics(self.job.group, sequences, tokens)
        self.divide(normalizer)
        return self.update(done, sequences, tokens, self.gbs)

    def _restore(self) -> None:
        self.reduce_next(on=True)

    def _give_up(self) -> None:
        self._restore()
        self.drop()
        torch.set_rng_state(self.randomness[0])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(self.randomness[1], self.device)
