"""Sees which samples a trainer learns from, whatever it reports: watches the loss that each step gets and the gradients that flow back.

The gradient of a sample's log-probabilities is compared with the one that the sample itself calls for, so a row that is masked, left out
or fed twice shows. So does one whose numbers the loss got changed: advantages, masks, log-probabilities. Limits: what happens to a
gradient after it left the loss is not seen here; a sample whose gradient is zero by right (its advantage is 0, or its ratio is clipped) is
not judged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kit.actors.samples import Key
from kit.labs.stream.ranks.oracle import FedSample
from kit.megatron.handles import parallel_state
from kit.train.protocol import Batch, Loss

EXACT = 1e-5  # how much a float32 number may differ from the same one
Tokens = tuple[int, ...]

# What a loss may read of each row beside its tokens; a trainer may recompute those of the second kind.
RECOMPUTED = ("prev_logprobs", "reference_logprobs")
JUDGED = ("token_mask", "sample_mask", "advantages", "generation_logprobs", *RECOMPUTED)


class Flowed(NamedTuple):
    """What flowed back into a row: its log-probabilities [length - 1] and their gradient; and its columns of the batch."""

    tokens: Tokens
    logprobs: torch.Tensor
    gradient: torch.Tensor
    columns: Mapping[str, torch.Tensor]


class Learned(NamedTuple):
    """How often a sample moved the weights, and which of its columns the loss got changed."""

    times: int
    changed: frozenset[str]


class WatchedLoss:
    """A loss with the numbers of another one. `flowed`: the rows of every backward pass through it."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self.flowed: list[Flowed] = []

    @property
    def level(self) -> Any:
        return self.loss.level

    def normalizers(self) -> Any:
        return self.loss.normalizers()

    def __call__(
        self, logprobs: torch.Tensor, batch: Batch, *, tokens: float, sequences: float
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if logprobs.requires_grad:
            rows = [
                tuple(ids[:length].tolist())
                for ids, length in zip(batch["input_ids"], batch["input_lengths"], strict=True)
            ]
            values = logprobs.detach().cpu()
            columns = {
                name: value.detach().to("cpu", copy=True)  # the trainer may write into its batch later
                for name, value in batch.items()
                if name in JUDGED
            }
            by_row = [{name: value[place].clone() for name, value in columns.items()} for place in range(len(rows))]
            hooked: Any = logprobs
            hooked.register_hook(lambda gradient: self.note(rows, values, gradient.detach().cpu(), by_row))
        return self.loss(logprobs, batch, tokens=tokens, sequences=sequences)

    def note(
        self,
        rows: Sequence[Tokens],
        logprobs: torch.Tensor,
        gradient: torch.Tensor,
        columns: Sequence[Mapping[str, torch.Tensor]],
    ) -> None:
        # Copies, since a view is sent to other ranks with all of its storage.
        self.flowed += [
            Flowed(row, logprobs[place].clone(), gradient[place].clone(), columns[place])
            for place, row in enumerate(rows)
        ]

    def gathered(self) -> list[Flowed]:
        """The rows of every data rank; tensor ranks of a row have the same. Collective."""
        own = self.flowed if parallel_state().get_tensor_model_parallel_rank() == 0 else []
        tables: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(tables, own)
        return [row for table in tables for row in table]


def learned(loss: Loss, fed: Sequence[FedSample], flowed: Sequence[Flowed], allowed: float) -> Mapping[Key, Learned]:
    """What came of each sample that should move the weights. Of samples with the same tokens, a pass counts for one that it fits best.

    `allowed`: how much a log-probability that a trainer may recompute can differ from the one that it got.
    """
    found: dict[Key, Learned] = {}
    due: defaultdict[Tokens, list[FedSample]] = defaultdict(list)
    for sample in fed:
        passes = [row for row in flowed if row.tokens == sample.row.tokens]
        if should_learn(sample) if not passes else follows(loss, sample, passes[0]) is not None:
            found[sample.row.key] = Learned(0, frozenset())
            due[sample.row.tokens].append(sample)
    for row in flowed:
        fitting = [
            (changed_columns(loss, sample, row, allowed), sample.row.key)
            for sample in due[row.tokens]
            if follows(loss, sample, row)
        ]
        if fitting:
            changed, key = min(fitting, key=lambda fit: (len(fit[0]), found[fit[1]].times))
            found[key] = Learned(found[key].times + 1, found[key].changed | changed)
    return found


def should_learn(sample: FedSample) -> bool:
    return bool(sample.answer("advantages").any())


def batch_of(sample: FedSample) -> Batch:
    """The sample alone, with masks of its own."""
    length, begin = len(sample.row.tokens), len(sample.row.prompt)
    batch = {name: value[None, :length] if value.dim() else value[None] for name, value in sample.batch.items()}
    mask = torch.zeros(1, length)
    mask[:, begin:] = 1.0
    return batch | {"token_mask": mask, "sample_mask": torch.ones(1)}


def changed_columns(loss: Loss, sample: FedSample, row: Flowed, allowed: float) -> frozenset[str]:
    """The columns that the loss got with other numbers than the sample's, of those that its gradient depends on."""
    own = batch_of(sample)
    counts = own["token_mask"][0] > 0

    def differs(name: str, got: torch.Tensor) -> bool:
        wanted = own[name][0]
        if got.dim():
            # Column 0 has no log-probability, so no loss reads it; masks count in prompts too.
            got, wanted = (value[1:] if name == "token_mask" else value[counts] for value in (got, wanted))
        rounding = torch.finfo(got.dtype).eps if got.is_floating_point() else 0.0
        least = allowed if name in RECOMPUTED else EXACT
        return not torch.allclose(got.double(), wanted.double(), rtol=rounding, atol=least)

    got = {name: value[: len(counts)] if value.dim() else value for name, value in row.columns.items()}
    return frozenset(name for name, column in got.items() if differs(name, column) and is_read(loss, own, name, row))


def is_read(loss: Loss, batch: Batch, name: str, row: Flowed) -> bool:
    """Whether the gradient of the loss depends on this column."""
    unknown = {**batch, name: torch.full_like(batch[name], torch.nan)}
    return not torch.equal(gradient_of(loss, batch, row), gradient_of(loss, unknown, row))


def gradient_of(loss: Loss, batch: Batch, row: Flowed) -> torch.Tensor:
    """The gradient of the loss of this batch for the row's log-probabilities, [length - 1]."""
    with torch.enable_grad():
        logprobs = row.logprobs[None, : len(row.tokens) - 1].clone().requires_grad_()
        value, _ = loss(logprobs, batch, tokens=1.0, sequences=1.0)
        (gradient,) = torch.autograd.grad(value, logprobs)
    return gradient[0]


def follows(loss: Loss, sample: FedSample, row: Flowed) -> bool | None:
    """Whether the gradient points where the sample's own does; None if the sample has none."""
    wanted = gradient_of(loss, batch_of(sample), row)
    if not wanted.any():
        return None
    return bool((row.gradient[: len(row.tokens) - 1].double() * wanted.double()).sum() > 0)
