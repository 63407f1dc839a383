"""The state of a split step: closed or open, the counts so far, and the version of the weights.

A backend subclasses `SplitStep` and implements how to open, run, close and give up a step. An exception restores the job's hooks and
leaves the step open; then only abort() closes it.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

import torch

from kit.errors import KitError
from kit.train import metrics
from kit.train.batch import Batch, counts, cuts, rows

if TYPE_CHECKING:
    import torch.distributed as dist

    from kit.train.protocol import Loss, StepResult


class Misuse(KitError):  # noqa: N818 - it names what the caller did
    """A call in the wrong state of the step."""


class SplitStep(abc.ABC):
    """begin, any number of microbatch calls, then finish or abort. Every rank makes the same calls in the same order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.version = 0
        self.state = "closed"
        self.failed = ""
        self.loss: Loss
        self.mbs = 0
        self.gbs = 0
        self.counted = torch.zeros(2, dtype=torch.float64, device=device)
        self.seen: list[dict[str, torch.Tensor]] = []
        self.pieces = 0

    def begin(self, loss: Loss, gbs: int, mbs: int) -> None:
        """Open the step: gradients start from zero. `gbs` is the step's sequences over all data ranks, for the scheduler."""
        self._need("closed", "begin")
        if mbs < 1 or gbs < 1:
            raise Misuse(f"begin: gbs={gbs} and mbs={mbs} must be at least 1")
        self.loss, self.gbs, self.mbs = loss, gbs, mbs
        self.counted = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.seen, self.pieces, self.failed = [], 0, ""
        self.state = "open"
        self._guarded("begin", self._open)

    def microbatch(self, data: Batch) -> None:
        """Forward and backward of the rows in `data`, in microbatches of `mbs`; gradients are added up, nothing is reduced."""
        self._need("open", "microbatch")
        self._guarded("microbatch", lambda: self._take(data))

    def finish(self) -> StepResult:
        """Get the true counts, normalise, reduce once, update, increment the version."""
        self._need("open", "finish")
        if not self.pieces:
            raise Misuse("finish: the step is open and has no microbatch yet; call microbatch or abort first")
        result: StepResult = self._guarded("finish", self._finish)
        return result

    def abort(self) -> None:
        """Give the step up: weights and version stay. On a closed step it does nothing."""
        if self.state == "closed":
            return
        self._give_up()
        self.seen, self.failed = [], ""
        self.state = "closed"

    # -- implemented by a backend ------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _open(self) -> None:
        """Zero the gradients, save and replace the job's hooks."""

    @abc.abstractmethod
    def _run(self, pieces: list[Batch]) -> list[dict[str, torch.Tensor]]:
        """Forward and backward of microbatches with raw sums; returns their metrics on ranks that have them."""

    @abc.abstractmethod
    def _close(self) -> StepResult:
        """All of finish() except the version."""

    @abc.abstractmethod
    def _restore(self) -> None:
        """Restore the job's hooks. May be called twice."""

    @abc.abstractmethod
    def _give_up(self) -> None:
        """Restore the state before begin()."""

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _take(self, data: Batch) -> None:
        self.counted += counts(data).to(self.device)
        self.seen += self._run(self._pieces(data))
        self.pieces += 1

    def _pieces(self, data: Batch) -> list[Batch]:
        if rows(data) % self.mbs:
            raise Misuse(f"microbatch: {rows(data)} rows do not fill whole microbatches of mbs={self.mbs}")
        return list(cuts(data, self.mbs))

    def _finish(self) -> StepResult:
        result = self._close()
        self._restore()
        self.version += 1
        self.state = "closed"
        self.seen = []
        return {**result, "version": self.version}

    def _true_counts(self, group: dist.ProcessGroup | None) -> tuple[float, float, float]:
        """Valid sequences, valid tokens, and the divisor of the loss, which is 1 if the count is 0."""
        import torch.distributed as dist

        total = self.counted.clone()
        dist.all_reduce(total, group=group)
        sequences, tokens = total.tolist()
        own = tokens if self.loss.level == "tokens" else sequences
        return sequences, tokens, own if own > 0 else 1.0

    def _step_metrics(self, group: dist.ProcessGroup | None, sequences: float, tokens: float) -> dict[str, float]:
        normalizers = self.loss.normalizers()
        local = metrics.of_microbatches(self.seen, normalizers)
        raw = metrics.over_ranks(local, group, self.device)
        return metrics.normalised(raw, normalizers, tokens=max(tokens, 1.0), sequences=max(sequences, 1.0))

    def _need(self, state: str, call: str) -> None:
        if self.failed:
            raise Misuse(f"{call}: the step is open and {self.failed}; call abort() first")
        if self.state != state:
            raise Misuse(f"{call}: the step is {self.state}; it must be {state}")

    def _guarded(self, call: str, work: Any) -> Any:
        try:
            return work()
        except BaseException as error:
            self.failed = f"{call} raised {type(error).__name__}"
            self._restore()
            raise
