"""Losses of RL post-training and their metrics, pure torch. Formulas, normalizers and what is refused: docs/losses.md.

Masked places are replaced before anything is computed, so that what stands there, NaN included, reaches neither loss nor gradient.
Infinities at valid places are followed as IEEE arithmetic has it: a step that they spoil has a gradient norm that is not finite, and
its update is skipped. All arithmetic is in float64: log-probabilities far apart neither cancel nor overflow, and a metric is the same
to the last few bits however rows are dealt out over microbatches and ranks. The gradient has the type of the log-probabilities. Nothing
waits for the device. Limits: masks are 0 or 1; the KL penalty is differentiated as it is written, without a score-function term.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kit.train.options import ClippedOptions, Level, check_word
from kit.train.protocol import Batch, Normalizer, valid


@dataclass(frozen=True, kw_only=True, slots=True)
class ClippedPolicyGradient(ClippedOptions):
    """-A r, with clipping: PPO and GRPO, DAPO's two-sided band, GSPO, CISPO; without r: REINFORCE.

    r = exp(cur - prev), or for ratio="sequences" exp of its mean over the row. With on_policy, prev is cur without its gradient.
    """

    def normalizers(self) -> dict[str, Normalizer]:
        if not self.metrics:
            return {"loss": self.level}
        positive: dict[str, Normalizer] = {"positive_nll_loss": None} if self.positive_nll else {}
        return {
            "loss": self.level,
            "kl_penalty": self.level,
            "probs_ratio": "tokens",
            "probs_ratio_clamped": "tokens",
            "token_mult_prob_error": "tokens",
            "gen_kl_error": "tokens",
            "policy_kl_error": "tokens",
            "js_divergence_error": "tokens",
            "approx_entropy": "tokens",
            "sampling_importance_ratio": "sequences" if self.importance == "sequences" else "tokens",
            "is_oob_ratio": "sequences" if self.truncation == "seq-mask-tis" else "tokens",
            "num_valid_samples": None,
            "num_unmasked_tokens": None,
            **positive,
            "probs_ratio_min": None,
            "probs_ratio_max": None,
            "probs_ratio_clamped_min": None,
            "probs_ratio_clamped_max": None,
        }

    def __call__(
        self, logprobs: Tensor, batch: Batch, *, tokens: float, sequences: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        inside = valid(batch) > 0
        length = inside.sum(1, keepdim=True)
        cur = kept_inside(logprobs, inside)
        prev = cur.detach() if self.on_policy else kept_inside(batch["prev_logprobs"][:, 1:], inside)
        pull = -kept_inside(batch["advantages"][:, 1:], inside)  # -A
        log_ratio = cur - prev
        if self.ratio == "sequences":
            log_ratio = kept_inside((log_ratio.sum(1, keepdim=True) / length.clamp(min=1)).expand_as(cur), inside)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        by_token = self._surrogate(pull, ratio, clipped, cur)
        penalty = positive = None
        if self.metrics or self.importance != "none":
            gen = kept_inside(batch["generation_logprobs"][:, 1:], inside)
            gap = prev - gen
            weight, outside = self._weight(gap, length)
            if self.importance != "none":
                # An infinite weight of a row must not meet the 0 that stands at a masked place.
                by_token = by_token * torch.where(inside, weight, 1.0)
        if self.kl:
            penalty = self._penalty(kept_inside(batch["reference_logprobs"][:, 1:], inside) - cur)
            by_token = by_token + self.kl * penalty
        if self.positive_nll:
            positive = kept_inside(-cur, pull < 0)
            by_token = by_token + self.positive_nll * positive
        rows = by_row(by_token, length, self.level)
        loss = rows.sum() / (tokens if self.level == "tokens" else sequences)
        if not self.metrics:
            return loss, {"loss": loss.detach()}
        with torch.no_grad():
            apart, lost = gap.abs(), outside & inside
            by_sequence = self.importance == "sequences"
            by_weight = weight[:, 0] * batch["sample_mask"] if by_sequence else kept_inside(weight, inside).sum(1)
            columns = {
                "loss": rows,
                "kl_penalty": torch.zeros_like(rows) if penalty is None else by_row(penalty, length, self.level),
                "probs_ratio": kept_inside(ratio, inside).sum(1),
                "probs_ratio_clamped": kept_inside(clipped, inside).sum(1),
                "token_mult_prob_error": kept_inside(apart.exp(), inside).sum(1),
                "gen_kl_error": (gap.expm1() - gap).sum(1),
                "policy_kl_error": ((-gap).expm1() + gap).sum(1),
                # log cosh(gap / 2), which does not overflow in this form
                "js_divergence_error": (apart / 2 + ((-apart).expm1() / 2).log1p()).sum(1),
                "approx_entropy": -((cur - gen).exp() * cur).sum(1),
                "sampling_importance_ratio": by_weight,
                # Tokens, or for seq-mask-tis rows: one without a valid token has nothing outside.
                "is_oob_ratio": lost.any(1) if self.truncation == "seq-mask-tis" else lost.sum(1),
                "num_valid_samples": batch["sample_mask"],
                "num_unmasked_tokens": length[:, 0],
            }
            if positive is not None:
                columns["positive_nll_loss"] = positive.sum(1)
            seen = over_rows(columns, self.normalizers(), tokens=tokens, sequences=sequences)
            return loss, seen | extremes(inside, probs_ratio=ratio, probs_ratio_clamped=clipped)

    def _surrogate(self, pull: Tensor, ratio: Tensor, clipped: Tensor, cur: Tensor) -> Tensor:
        if self.ratio == "none":
            return pull * cur
        if self.cispo:
            return pull * clipped.detach() * cur
        worst = torch.maximum(pull * ratio, pull * clipped)
        if self.dual_clip is None:
            return worst
        return torch.where(pull > 0, torch.minimum(worst, pull * self.dual_clip), worst)

    def _penalty(self, apart: Tensor) -> Tensor:
        """The estimate of KL(cur || reference) of each token, from reference - cur."""
        if self.kl_input_clamp is not None:
            apart = apart.clamp(-self.kl_input_clamp, self.kl_input_clamp)
        if self.kl_kind == "k1":
            estimate = -apart
        elif self.kl_kind == "k2":
            estimate = apart * apart / 2
        else:
            estimate = torch.expm1(apart) - apart
        if self.kl_output_clamp is not None:
            estimate = estimate.clamp(-self.kl_output_clamp, self.kl_output_clamp)
        return estimate

    def _weight(self, gap: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Return the truncated importance weight of each token or of each row ([rows, 1]), and what lay outside the band."""
        weight = gap.sum(1, keepdim=True).exp() if self.importance == "sequences" else gap.exp()
        if self.truncation == "none":
            return weight, torch.zeros_like(weight, dtype=torch.bool)
        judged = weight
        if self.truncation == "seq-mask-tis":
            judged = (gap.sum(1, keepdim=True) / length.clamp(min=1)).exp()
        assert self.band_high is not None
        outside = (judged < self.band_low) | (judged > self.band_high)
        if self.truncation == "tis":
            return weight.clamp(self.band_low, self.band_high), outside
        return weight.masked_fill(outside, 0.0), outside


@dataclass(frozen=True, kw_only=True, slots=True)
class NegativeLogLikelihood:
    """-cur, as a mean over valid tokens, or over rows of each one's mean."""

    level: Level = "tokens"
    metrics: bool = True  # False: nothing but the loss

    def __post_init__(self) -> None:
        check_word("level", self.level, Level)

    def normalizers(self) -> dict[str, Normalizer]:
        if not self.metrics:
            return {"loss": self.level}
        return {"loss": self.level, "num_valid_samples": None, "num_unmasked_tokens": None, "positive_nll_loss": None}

    def __call__(
        self, logprobs: Tensor, batch: Batch, *, tokens: float, sequences: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        inside = valid(batch) > 0
        length = inside.sum(1, keepdim=True)
        by_token = -kept_inside(logprobs, inside)
        rows = by_row(by_token, length, self.level)
        loss = rows.sum() / (tokens if self.level == "tokens" else sequences)
        if not self.metrics:
            return loss, {"loss": loss.detach()}
        with torch.no_grad():
            columns = {
                "loss": rows,
                "num_valid_samples": batch["sample_mask"],
                "num_unmasked_tokens": length[:, 0],
                "positive_nll_loss": kept_inside(by_token, inside & (batch["advantages"][:, 1:] > 0)).sum(1),
            }
            return loss, over_rows(columns, self.normalizers(), tokens=tokens, sequences=sequences)


def kept_inside(values: Tensor, inside: Tensor) -> Tensor:
    """Return the values in float64, with 0 in masked places. Multiplying would not do: NaN times 0 is NaN, forward and backward."""
    return torch.where(inside, values.double(), 0.0)


def by_row(by_token: Tensor, length: Tensor, level: Level) -> Tensor:
    """Return each row's share of a loss, [rows]: the sum or the mean of its tokens; 0 for a row without a valid token."""
    total = by_token.sum(1)
    return total if level == "tokens" else total / length[:, 0].clamp(min=1)


def over_rows(
    columns: Mapping[str, Tensor], normalizers: Mapping[str, Normalizer], *, tokens: float, sequences: float
) -> dict[str, Tensor]:
    """Sums over rows, each divided by its own normalizer; float64 scalars."""
    groups = {by: [name for name in columns if normalizers[name] == by] for by in ("tokens", "sequences", None)}
    totals = torch.stack([columns[name].double() for names in groups.values() for name in names]).sum(1)
    tokenwise, rowwise, plain = torch.split(totals, [len(names) for names in groups.values()])
    divided = (*(tokenwise / tokens).unbind(), *(rowwise / sequences).unbind(), *plain.unbind())
    return dict(zip((name for names in groups.values() for name in names), divided, strict=True))


def extremes(inside: Tensor, **values: Tensor) -> dict[str, Tensor]:
    """The least and the largest valid value of each, as `..._min` and `..._max`; +inf and -inf if there is none."""
    seen = {}
    for name, value in values.items():
        for end, nothing, find in (("min", math.inf, torch.amin), ("max", -math.inf, torch.amax)):
            seen_values = torch.where(inside, value, nothing)
            seen[f"{name}_{end}"] = find(seen_values) if seen_values.numel() else value.new_full((), nothing)
    return seen
