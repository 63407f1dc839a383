"""The protocol of a split step and the state that all backends share: four calls, the metrics, and the result for the trainer.

begin(loss, gbs, mbs) -> microbatch(data) ... -> finish() -> result, or abort(). A backend subclasses `SplitStep` and implements how to
open, run, close and give up a step. An exception restores the job's hooks and leaves the step open; then only abort() closes it.

Metrics of microbatches become those of a step: sums over microbatches and data ranks, each by its own normalizer. Names decide what is
done: `..._min` and `..._max` are extremes, and where nothing was seen (all infinite) they are -1.0; `lr`, `wd`, `reward` and
`global_valid_...` are means; everything else is a sum.

A batch has ragged sequences padded to one length, with what an RL loss needs to know of every token. Every tensor is [rows, length] but
`sample_mask` and `input_lengths`, which are [rows]. Column t speaks of token t, so that log-probabilities start in column 1: the model's
own come shifted by one, [rows, length - 1]. Rows become microbatches by number, by a budget of tokens, or several sequences in one row.
Rows may change places: losses are sums over rows. The sequences are the first `input_lengths` tokens of a row.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict, TypeVar

import torch
import torch.distributed as dist

from kit.errors import BadInput, KitError
from kit.target import load
from kit.train.options import Settings

T = TypeVar("T")
Normalizer = Literal["tokens", "sequences"] | None


class Loss(Protocol):
    """A loss and its metrics: sums over valid tokens or sequences, divided by the given normalizer.

    With tokens = sequences = 1 they are raw sums: a step that learns the true counts at its end divides then, each metric by its
    own normalizer. One metric is `loss` itself, best summed in float64: it is what the step reports. Metrics named `..._min` and
    `..._max` are no sums; over nothing they are +inf and -inf.
    """

    @property
    def level(self) -> Literal["tokens", "sequences"]:
        """Whether the loss is a mean over valid tokens or over valid sequences."""

    def normalizers(self) -> Mapping[str, Normalizer]:
        """The normalizer of every metric of the loss."""

    def __call__(
        self, logprobs: torch.Tensor, batch: Batch, *, tokens: float, sequences: float
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """`logprobs`, [rows, length - 1], are those of input_ids[:, 1:]. Returns the scalar to differentiate, and detached metrics."""


class StepResult(TypedDict):
    """The result of finish(), the same on every rank."""

    global_loss: float
    grad_norm: float
    lr: float
    wd: float
    global_valid_seqs: float
    global_valid_toks: float
    updated: bool
    version: int
    metrics: dict[str, float]


def step_result(
    table: dict[str, float], *, norm: float, rates: tuple[float, float], counts: tuple[float, float], updated: bool
) -> StepResult:
    """A step's result without its version. `rates`: learning rate and weight decay; `counts`: valid sequences and tokens."""
    return {
        "global_loss": table["loss"],
        "grad_norm": norm,
        "lr": rates[0],
        "wd": rates[1],
        "global_valid_seqs": counts[0],
        "global_valid_toks": counts[1],
        "updated": updated,
        "version": 0,
        "metrics": table,
    }


class Split(Protocol):
    """The interface of a split step, the kit's or your own. Every rank makes the same calls."""

    @property
    def version(self) -> int: ...
    def begin(self, loss: Loss, gbs: int, mbs: int) -> None: ...
    def microbatch(self, data: Batch) -> None: ...
    def finish(self) -> StepResult: ...
    def abort(self) -> None: ...


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
    if missing := [name for name in ("begin", "microbatch", "finish", "abort", "version") if not hasattr(made, name)]:
        raise BadInput(f"{setting}={target}: the object it returned lacks {', '.join(missing)}")
    return made


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
        self.mbs = self.gbs = 0
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
        return self._guarded("finish", self._finish)

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
        total = self.counted.clone()
        dist.all_reduce(total, group=group)
        sequences, tokens = total.tolist()
        own = tokens if self.loss.level == "tokens" else sequences
        return sequences, tokens, own if own > 0 else 1.0

    def _step_metrics(self, group: dist.ProcessGroup | None, sequences: float, tokens: float) -> dict[str, float]:
        normalizers = self.loss.normalizers()
        local = of_microbatches(self.seen, normalizers)
        raw = over_ranks(local, group, self.device)
        return normalised(raw, normalizers, tokens=max(tokens, 1.0), sequences=max(sequences, 1.0))

    def _need(self, state: str, call: str) -> None:
        if self.failed:
            raise Misuse(f"{call}: the step is open and {self.failed}; call abort() first")
        if self.state != state:
            raise Misuse(f"{call}: the step is {self.state}; it must be {state}")

    def _guarded(self, call: str, work: Callable[[], T]) -> T:
        try:
            return work()
        except BaseException as error:
            self.failed = f"{call} raised {type(error).__name__}"
            self._restore()
            raise


# -- metrics -----------------------------------------------------------------------------------------------------------

MEANS = ("lr", "wd", "reward")
NOTHING = -1.0  # an extreme over no values


def kind(name: str) -> str:
    if name.endswith("_min"):
        return "min"
    if name.endswith("_max"):
        return "max"
    return "mean" if name in MEANS or name.startswith("global_valid_") else "sum"


def of_microbatches(seen: Sequence[Mapping[str, torch.Tensor]], names: Iterable[str]) -> dict[str, float]:
    """This rank's metrics in float64 over its microbatches. A name without values gets its kind's result for no values."""
    return {name: _over([float(row[name]) for row in seen if name in row], kind(name)) for name in names}


def plain_metrics(
    seen: Sequence[Mapping[str, torch.Tensor]], loss: Loss, group: dist.ProcessGroup | None, device: torch.device
) -> dict[str, float]:
    """Metrics of a plain step: its microbatches are already divided by the true counts."""
    raw = over_ranks(of_microbatches(seen, loss.normalizers()), group, device)
    return normalised(raw, {}, tokens=1.0, sequences=1.0)


def over_ranks(local: Mapping[str, float], group: dist.ProcessGroup | None, device: torch.device) -> dict[str, float]:
    """The same over the ranks of a group of data ranks; one replica of tensor and pipeline ranks is in it, so none counts twice."""
    names = sorted(local)
    done: dict[str, float] = {}
    for how, op in (
        ("sum", dist.ReduceOp.SUM),
        ("mean", dist.ReduceOp.SUM),
        ("min", dist.ReduceOp.MIN),
        ("max", dist.ReduceOp.MAX),
    ):
        chosen = [name for name in names if kind(name) == how]
        if not chosen:
            continue
        values = torch.tensor([local[name] for name in chosen], dtype=torch.float64, device=device)
        dist.all_reduce(values, op=op, group=group)
        if how == "mean":
            values /= dist.get_world_size(group)
        done |= dict(zip(chosen, values.tolist(), strict=True))
    return done


def normalised(
    raw: Mapping[str, float], normalizers: Mapping[str, Normalizer], *, tokens: float, sequences: float
) -> dict[str, float]:
    """Divide each sum by its own true count; extremes over no values become -1.0."""
    by = {"tokens": tokens, "sequences": sequences, None: 1.0}
    done = {}
    for name, value in raw.items():
        if kind(name) in {"min", "max"}:
            done[name] = NOTHING if math.isinf(value) else value
        else:
            done[name] = value / by[normalizers.get(name)]
    return done


def _over(values: list[float], how: str) -> float:
    if how in {"min", "max"} and any(map(math.isnan, values)):
        return math.nan  # Python's own min and max would depend on the order
    if how == "min":
        return min(values, default=math.inf)
    if how == "max":
        return max(values, default=-math.inf)
    total = _sum(values)
    return total / len(values) if how == "mean" and values else total


def _sum(values: list[float]) -> float:
    """An exact sum, or plain addition if infinities or an overflow prevent one: an error on one rank would stop the others."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return sum(values)


# -- batches -----------------------------------------------------------------------------------------------------------

Batch = dict[str, torch.Tensor]
Batching = Literal["fixed", "dynamic", "packed"]

KEYS = (
    "input_ids",
    "input_lengths",  # how many tokens of a row are no padding
    "token_mask",  # 1.0 for a token that is trained on: in the answer, not in the prompt or padding
    "sample_mask",  # 1.0 for a row that counts
    "advantages",
    "prev_logprobs",  # under the trainer's weights at the start of the step
    "generation_logprobs",  # by the engine that wrote the answer
    "reference_logprobs",
)


def rows(batch: Batch) -> int:
    return int(batch["input_ids"].shape[0])


def cut(batch: Batch, start: int, stop: int) -> Batch:
    """Rows start to stop, as views."""
    return {name: value[start:stop] for name, value in batch.items()}


def cuts(batch: Batch, size: int) -> Iterator[Batch]:
    """The batch in pieces of `size` rows; the last may be smaller."""
    for start in range(0, rows(batch), size):
        yield cut(batch, start, start + size)


def valid(batch: Batch) -> torch.Tensor:
    """1.0 for each predicted token that counts, [rows, length - 1]: masks speak of tokens, predictions come one before."""
    return batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]


def counts(batch: Batch) -> torch.Tensor:
    """Valid sequences and valid tokens, float64: sums of many microbatches stay exact."""
    sequences = batch["sample_mask"].double().sum()
    return torch.stack([sequences, valid(batch).double().sum()])


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """The sequences of a few rows one after another, [1, tokens], and the position of each of their predictions."""

    input_ids: torch.Tensor
    positions: torch.Tensor  # they begin again with each sequence
    segments: torch.Tensor  # the sequence that a token is of
    index: torch.Tensor  # [rows, length - 1]: of which packed token a column's prediction is made
    present: torch.Tensor  # [rows, length - 1]: the column has one

    def unpack(self, following: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of what follows each packed token, [1, tokens], as [rows, length - 1]; 0.0 for padding."""
        return torch.where(self.present, following[0][self.index], 0.0)


def microbatches(batch: Batch, batching: Batching, *, mbs: int, token_budget: int) -> list[Batch]:
    """Cut a batch into microbatches; the last of "fixed" may be smaller. A sequence that exceeds the budget is refused."""
    if batching == "fixed":
        return list(cuts(batch, mbs))
    lengths = batch["input_lengths"].tolist()
    longest = max(lengths, default=0)
    if longest > token_budget:
        raise BadInput(f"token_budget={token_budget} is less than the longest sequence: use at least {longest}")
    groups = alike(lengths, token_budget) if batching == "dynamic" else bins(lengths, token_budget)
    return [_trimmed(batch, group) for group in groups]


def alike(lengths: list[int], token_budget: int) -> list[list[int]]:
    """Group rows of similar length: number of rows times the longest of them stays within the budget."""
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= token_budget:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def bins(lengths: list[int], token_budget: int) -> list[list[int]]:
    """Group rows with a total length of at most the budget: longest first, each into the first bin with room."""
    groups: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        at = next((index for index, left in enumerate(room) if lengths[row] <= left), len(room))
        if at == len(room):
            groups.append([])
            room.append(token_budget)
        groups[at].append(row)
        room[at] -= lengths[row]
    return groups


def pack(batch: Batch) -> Packed:
    ids, lengths = batch["input_ids"], batch["input_lengths"]
    column = torch.arange(ids.shape[1], device=ids.device)[None]
    inside = column < lengths[:, None]
    row = torch.arange(len(lengths), device=ids.device)[:, None].expand_as(ids)
    present = inside[:, 1:]
    index = (lengths.cumsum(0) - lengths)[:, None] + column[:, :-1]
    return Packed(
        input_ids=ids[inside][None],
        positions=column.expand_as(ids)[inside][None],
        segments=row[inside][None],
        index=torch.where(present, index, 0),
        present=present,
    )


def _trimmed(batch: Batch, chosen: list[int]) -> Batch:
    index = torch.tensor(chosen, device=batch["input_ids"].device)
    picked = {name: value[index] for name, value in batch.items()}
    longest = max(2, int(picked["input_lengths"].max()))  # two tokens make a prediction
    return {name: value[:, :longest] if value.dim() == 2 else value for name, value in picked.items()}
