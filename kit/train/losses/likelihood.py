"""Negative log-likelihood: supervised training, and what reinforces good answers alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kit.train.batch import valid
from kit.train.losses import sums
from kit.train.options import Level, known

if TYPE_CHECKING:
    from torch import Tensor

    from kit.train.batch import Batch
    from kit.train.protocol import Normalizer


@dataclass(frozen=True, kw_only=True, slots=True)
class NegativeLogLikelihood:
    """-cur, as a mean over valid tokens, or over rows of each one's mean."""

    level: Level = "tokens"
    metrics: bool = True  # False: nothing but the loss

    def __post_init__(self) -> None:
        known("level", self.level, Level)

    def normalizers(self) -> dict[str, Normalizer]:
        """The normalizer of every metric, in the order in which they are given."""
        if not self.metrics:
            return {"loss": self.level}
        return {"loss": self.level, "num_valid_samples": None, "num_unmasked_tokens": None, "positive_nll_loss": None}

    def __call__(
        self, logprobs: Tensor, batch: Batch, *, tokens: float, sequences: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        inside = valid(batch) > 0
        length = inside.sum(1, keepdim=True)
        each = -sums.kept(logprobs, inside)
        rows = sums.by_row(each, length, self.level)
        loss = rows.sum() / (tokens if self.level == "tokens" else sequences)
        if not self.metrics:
            return loss, {"loss": loss.detach()}
        with torch.no_grad():
            columns = {
                "loss": rows,
                "num_valid_samples": batch["sample_mask"],
                "num_unmasked_tokens": length[:, 0],
                "positive_nll_loss": sums.kept(each, inside & (batch["advantages"][:, 1:] > 0)).sum(1),
            }
            return loss, sums.over_rows(columns, self.normalizers(), tokens=tokens, sequences=sequences)
