"""The state of a step that is fed piece by piece: closed or open, what was counted, which version the weights are.

A backend inherits and says how to open, how to run a piece, how to close and how to give up. An exception anywhere leaves the
job as usable as it was (its hooks put back) and the step open: only abort() closes it then.
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


class Misuse(KitError):  # noqa: N818 - it is what the person did
    """A call that does not fit the state that the step is in."""


class SplitStep(abc.ABC):
    """begin, microbatch as often as one likes, finish or abort. Every rank makes the same calls in the same order."""

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
        """Learn the true counts, normalise, reduce once, update, tick the version."""
        self._need("open", "finish")
        if not self.pieces:
            raise Misuse("finish: the step is open and has seen no microbatch; feed one, or abort")
        result: StepResult = self._guarded("finish", self._finish)
        return result

    def abort(self) -> None:
        """Give the step up: nothing was learnt, the version stays. Closed already: nothing to do."""
        if self.state == "closed":
            return
        self._give_up()
        self.seen, self.failed = [], ""
        self.state = "closed"

    # -- what a backend says -----------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _open(self) -> None:
        """Zero the gradients, save and replace the job's hooks."""

    @abc.abstractmethod
    def _run(self, pieces: list[Batch]) -> list[dict[str, torch.Tensor]]:
        """Forward and backward of microbatches with raw sums; their metrics on ranks that have them, else nothing."""

    @abc.abstractmethod
    def _close(self) -> StepResult:
        """All of finish() but the version."""

    @abc.abstractmethod
    def _restore(self) -> None:
        """Put the job's hooks back. May be called again."""

    @abc.abstractmethod
    def _give_up(self) -> None:
        """Everything as it was before begin()."""

    # -- how ---------------------------------------------------------------------------------------------------------

    def _take(self, data: Batch) -> None:
        self.counted += counts(data).to(self.device)
        self.seen += self._run(self._pieces(data))
        self.pieces += 1

    def _pieces(self, data: Batch) -> list[Batch]:
        if rows(data) % self.mbs:
            raise Misuse(f"microbatch: {rows(data)} rows are no whole number of microbatches of mbs={self.mbs}")
        return list(cuts(data, self.mbs))

    def _finish(self) -> StepResult:
        result = self._close()
        self._restore()
        self.version += 1
        self.state = "closed"
        self.seen = []
        return {**result, "version": self.version}

    def _true_counts(self, group: dist.ProcessGroup | None) -> tuple[float, float, float]:
        """Valid sequences, valid tokens, and the loss's own normalizer; none at all count as 1 for dividing."""
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
            raise Misuse(f"{call}: the step is open and {self.failed}; abort() it first")
        if self.state != state:
            raise Misuse(f"{call}: the step is {self.state}; it must be {state}")

    def _guarded(self, call: str, work: Any) -> Any:
        try:
            return work()
        except BaseException as error:
            self.failed = f"{call} raised {type(error).__name__}"
            self._restore()
            raise
