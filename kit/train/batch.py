"""A batch: ragged sequences padded to one length, with what an RL loss needs to know of every token.

Every tensor is [rows, length] but `sample_mask` and `input_lengths`, which are [rows]. Column t speaks of token t, so that
log-probabilities start in column 1: the model's own come shifted by one, [rows, length - 1].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

Batch = dict[str, torch.Tensor]

KEYS = (
    "input_ids",
    "input_lengths",  # how many tokens of a row are no padding
    "token_mask",  # 1.0 for a token that is trained on: of the answer, not of the prompt or padding
    "sample_mask",  # 1.0 for a row that counts
    "advantages",
    "prev_logprobs",  # by the trainer's weights when the step began
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
