"""Sees which samples a trainer learns from, whatever it reports: watches the loss that each step gets and the gradients that flow back.

The gradient of a sample's log-probabilities is compared with the one that the sample itself calls for, so a row that is masked, left out
or fed twice shows. Limits: a trainer that uses the gradients and then drops them is not seen here; a sample whose gradient is zero by
right (its advantage is 0, or its ratio is clipped) is not judged.
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

Tokens = tuple[int, ...]


class Flowed(NamedTuple):
    """What flowed back into a row: its log-probabilities [length - 1] and their gradient."""

    tokens: Tokens
    logprobs: torch.Tensor
    gradient: torch.Tensor


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
            hooked: Any = logprobs
            hooked.register_hook(lambda gradient: self.note(rows, values, gradient.detach().cpu()))
        return self.loss(logprobs, batch, tokens=tokens, sequences=sequences)

    def note(self, rows: Sequence[Tokens], logprobs: torch.Tensor, gradient: torch.Tensor) -> None:
        self.flowed += [Flowed(*row) for row in zip(rows, logprobs, gradient, strict=True)]

    def gathered(self) -> list[Flowed]:
        """The rows of every data rank; tensor ranks of a row have the same. Collective."""
        own = self.flowed if parallel_state().get_tensor_model_parallel_rank() == 0 else []
        tables: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(tables, own)
        return [row for table in tables for row in table]


def times_learned(loss: Loss, fed: Sequence[FedSample], flowed: Sequence[Flowed]) -> Mapping[Key, int]:
    """How often each sample that should move the weights did so. Of samples with the same tokens, a pass counts for one that it fits."""
    times: dict[Key, int] = {}
    due: defaultdict[Tokens, list[FedSample]] = defaultdict(list)
    for sample in fed:
        passes = [row for row in flowed if row.tokens == sample.row.tokens]
        if should_learn(sample) if not passes else follows(loss, sample, passes[0]) is not None:
            times[sample.row.key] = 0
            due[sample.row.tokens].append(sample)
    for row in flowed:
        if fitting := [sample.row.key for sample in due[row.tokens] if follows(loss, sample, row)]:
            times[min(fitting, key=times.__getitem__)] += 1
    return times


def should_learn(sample: FedSample) -> bool:
    return bool(sample.answer("advantages").any())


def follows(loss: Loss, sample: FedSample, row: Flowed) -> bool | None:
    """Whether the gradient points where the sample's own does; None if the sample has none."""
    length, begin = len(sample.row.tokens), len(sample.row.prompt)
    batch = {name: value[None, :length] if value.dim() else value[None] for name, value in sample.batch.items()}
    mask = torch.zeros(1, length)
    mask[:, begin:] = 1.0
    batch |= {"token_mask": mask, "sample_mask": torch.ones(1)}
    with torch.enable_grad():
        logprobs = row.logprobs[None, : length - 1].clone().requires_grad_()
        value, _ = loss(logprobs, batch, tokens=1.0, sequences=1.0)
        (wanted,) = torch.autograd.grad(value, logprobs)
    if not wanted.any():
        return None
    return bool((row.gradient[: length - 1].double() * wanted[0].double()).sum() > 0)
