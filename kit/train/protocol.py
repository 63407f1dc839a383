"""What a split step is: four calls, three words for how metrics are normalised, and the result that a trainer expects.

begin(loss, gbs, mbs) -> microbatch(data) ... -> finish() -> result, or abort(). `SplitStep` keeps the state; a backend adds how.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict

from kit.errors import BadInput
from kit.target import load

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from kit.train.batch import Batch
    from kit.train.options import Settings

Normalizer = Literal["tokens", "sequences"] | None


class Loss(Protocol):
    """A loss and its metrics, both as sums over valid tokens or sequences divided by the normalizer that it is given.

    With tokens = sequences = 1 they are raw sums: a step that learns the true counts at its end divides then, each metric by its
    own normalizer. One metric is `loss` itself, best summed in float64: it is what the step reports. Metrics named `..._min` and
    `..._max` are no sums; over nothing they are +inf and -inf.
    """

    @property
    def level(self) -> Literal["tokens", "sequences"]:
        """Whether the loss is a mean over valid tokens or over valid sequences."""

    def normalizers(self) -> Mapping[str, Normalizer]:
        """The normalizer of every metric that the loss gives."""

    def __call__(
        self, logprobs: torch.Tensor, batch: Batch, *, tokens: float, sequences: float
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """`logprobs`, [rows, length - 1], are those of input_ids[:, 1:]. Returns the scalar to differentiate, and detached metrics."""


class StepResult(TypedDict):
    """What finish() gives, the same on every rank."""

    global_loss: float
    grad_norm: float
    lr: float
    wd: float
    global_valid_seqs: float
    global_valid_toks: float
    updated: bool
    version: int
    metrics: dict[str, float]


class Split(Protocol):
    """A split step as the lab drives it: ours, or the person's own. Every rank makes the same calls."""

    @property
    def version(self) -> int: ...
    def begin(self, loss: Loss, gbs: int, mbs: int) -> None: ...
    def microbatch(self, data: Batch) -> None: ...
    def finish(self) -> StepResult: ...
    def abort(self) -> None: ...


CALLS = ("begin", "microbatch", "finish", "abort", "version")


@dataclass(kw_only=True, slots=True)
class SplitContext:
    """`ctx` for a split step. `settings` are those of the kit's optimizers, with clipping; `groups` are Megatron's as JSON."""

    rank: int
    world_size: int
    device: torch.device
    config: Any
    chunks: list[Any]
    optimizer: Any
    scheduler: Any
    settings: Settings
    groups: list[dict[str, Any]]
    job: Any


def make_split(target: str, ctx: SplitContext, setting: str) -> Split:
    """The split step that a lab's setting names as module:attr."""
    made: Split = load(target)(ctx)
    if missing := [name for name in CALLS if not hasattr(made, name)]:
        raise BadInput(f"{setting}={target}: the object it returned lacks {', '.join(missing)}")
    return made
