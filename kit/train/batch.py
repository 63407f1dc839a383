"""A batch: ragged sequences padded to one length, with what an RL loss needs to know of every token.

Every tensor is [rows, length] but `sample_mask` and `input_lengths`, which are [rows]. Column t speaks of token t, so that
log-probabilities start in column 1: the model's own come shifted by one, [rows, length - 1].

Rows become microbatches by number, by a budget of tokens, or several sequences in one row. Rows may change places: losses are sums over
rows. The sequences are the first `input_lengths` tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from kit.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterator

Batch = dict[str, torch.Tensor]
Batching = Literal["fixed", "dynamic", "packed"]

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """The sequences of a few rows one after another, [1, tokens], and where each of their predictions stands."""

    input_ids: torch.Tensor
    positions: torch.Tensor  # they begin again with each sequence
    segments: torch.Tensor  # the sequence that a token is of
    index: torch.Tensor  # [rows, length - 1]: of which packed token a column's prediction is made
    present: torch.Tensor  # [rows, length - 1]: the column has one

    def unpack(self, following: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of what follows each packed token, [1, tokens], as [rows, length - 1]; 0.0 for padding."""
        return torch.where(self.present, following[0][self.index], 0.0)


def microbatches(batch: Batch, batching: Batching, *, mbs: int, token_budget: int) -> list[Batch]:
    """A batch in microbatches; the last of "fixed" may be smaller. A sequence that no budget carries is refused."""
    if batching == "fixed":
        return list(cuts(batch, mbs))
    lengths = batch["input_lengths"].tolist()
    longest = max(lengths, default=0)
    if longest > token_budget:
        raise BadInput(f"token_budget={token_budget} is less than the longest sequence: use at least {longest}")
    groups = alike(lengths, token_budget) if batching == "dynamic" else bins(lengths, token_budget)
    return [_trimmed(batch, group) for group in groups]


def alike(lengths: list[int], token_budget: int) -> list[list[int]]:
    """Rows of about the same length together: rows times the longest of them within the budget."""
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= token_budget:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def bins(lengths: list[int], token_budget: int) -> list[list[int]]:
    """Rows whose lengths add up to the budget at most: the longest first, each into the first bin with room."""
    groups: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        at = next((index for index, left in enumerate(room) if lengths[row] <= left), len(room))
        if at == len(room):
            groups.append([])
            room.append(token_budget)
        groups[at].append(row)
        room[at] -= lengths[row]
    return groups


def pack(batch: Batch) -> Packed:
    """All rows of a microbatch in one."""
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
    some = {name: value[index] for name, value in batch.items()}
    longest = max(2, int(some["input_lengths"].max()))  # two tokens make a prediction
    return {name: value[:, :longest] if value.dim() == 2 else value for name, value in some.items()}
