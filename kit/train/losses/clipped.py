"""Clipped policy gradient in its usual kinds, with every metric that is watched beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch

from kit.errors import BadInput
from kit.train.batch import valid
from kit.train.losses import sums

if TYPE_CHECKING:
    from torch import Tensor

    from kit.train.batch import Batch
    from kit.train.losses.sums import Level
    from kit.train.protocol import Normalizer

Importance = Literal["none", "tokens", "sequences"]
Truncation = Literal["none", "tis", "icepop", "seq-mask-tis"]
KLKind = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClippedPolicyGradient:
    """-A r, clipped against steps that are too long: PPO and GRPO, DAPO's two-sided band, GSPO, CISPO.

    r = exp(cur - prev), or for ratio="sequences" exp of its mean over the row. With on_policy, prev is cur without its gradient.
    """

    level: Level = "tokens"
    clip_low: float = 0.2  # r is clipped to 1 - clip_low
    clip_high: float = 0.2  # ... 1 + clip_high
    dual_clip: float | None = None  # c: where A < 0 the loss is at most -A c
    ratio: Level = "tokens"
    cispo: bool = False
    importance: Importance = "none"  # weight exp(prev - gen), of a token or, from its sum, of a sequence
    truncation: Truncation = "none"
    band_low: float = 0.0
    band_high: float | None = None
    kl: float = 0.0  # coefficient of the penalty for leaving the reference
    kl_kind: KLKind = "k3"
    kl_input_clamp: float | None = None
    kl_output_clamp: float | None = None
    on_policy: bool = False
    metrics: bool = True  # False: nothing but the loss

    def __post_init__(self) -> None:
        sums.known("level", self.level, sums.LEVELS)
        sums.known("ratio", self.ratio, sums.LEVELS)
        sums.known("importance", self.importance, get_args(Importance))
        sums.known("truncation", self.truncation, get_args(Truncation))
        sums.known("kl_kind", self.kl_kind, get_args(KLKind))
        for name, value, above in (
            ("clip_low", self.clip_low, 0),
            ("clip_high", self.clip_high, 0),
            ("dual_clip", self.dual_clip, 1),
            ("band_high", self.band_high, 0),
            ("kl_input_clamp", self.kl_input_clamp, 0),
            ("kl_output_clamp", self.kl_output_clamp, 0),
        ):
            if value is not None and not (math.isfinite(value) and value > above):
                raise BadInput(f"{name}={value} is not allowed: it must be a finite number above {above}")
        for name, value in (("band_low", self.band_low), ("kl", self.kl)):
            if not (math.isfinite(value) and value >= 0):
                raise BadInput(f"{name}={value} is not allowed: it must be a finite number, 0 or above")
        for wrong, sentence in self._contradictions():
            if wrong:
                raise BadInput(sentence)

    def _contradictions(self) -> list[tuple[bool, str]]:
        cut, penalised = self.truncation != "none", self.kl > 0
        return [
            (
                self.ratio == "sequences" and self.level != "sequences",
                "ratio='sequences' needs level='sequences': a ratio of the whole row counts once, not once a token",
            ),
            (
                self.cispo and self.ratio == "sequences",
                "cispo=True needs ratio='tokens': its weight is a token's own clipped ratio",
            ),
            (
                self.cispo and self.dual_clip is not None,
                "cispo=True and dual_clip exclude each other: dual_clip bounds -A r, which cispo does not have",
            ),
            (
                self.on_policy and self.cispo,
                "on_policy=True and cispo=True exclude each other: the ratio is 1, so that there is nothing to clip",
            ),
            (
                self.on_policy and self.dual_clip is not None,
                "on_policy=True and dual_clip exclude each other: the ratio is 1, so that there is nothing to clip",
            ),
            (
                cut and self.importance == "none",
                f"truncation={self.truncation!r} needs importance='tokens' or 'sequences': there is no weight to truncate",
            ),
            (
                self.truncation == "seq-mask-tis" and self.importance == "sequences",
                "truncation='seq-mask-tis' needs importance='tokens': it drops rows by the mean of their tokens' weights",
            ),
            (
                cut and self.band_high is None,
                f"truncation={self.truncation!r} needs band_high, the largest weight that is left as it is",
            ),
            (
                self.truncation in {"icepop", "seq-mask-tis"} and self.band_low <= 0,
                f"truncation={self.truncation!r} needs band_low above 0: it drops what lies below as well",
            ),
            (
                self.band_high is not None and self.band_low > self.band_high,
                f"band_low={self.band_low} is above band_high={self.band_high}: no weight would lie in the band",
            ),
            (
                not cut and (self.band_high is not None or self.band_low > 0),
                "band_low and band_high need truncation='tis', 'icepop' or 'seq-mask-tis'",
            ),
            (
                not penalised and (self.kl_input_clamp is not None or self.kl_output_clamp is not None),
                "kl_input_clamp and kl_output_clamp need kl above 0: there is no penalty to clamp",
            ),
        ]

    def normalizers(self) -> dict[str, Normalizer]:
        """The normalizer of every metric, in the order in which they are given."""
        if not self.metrics:
            return {"loss": self.level}
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
            "probs_ratio_min": None,
            "probs_ratio_max": None,
            "probs_ratio_clamped_min": None,
            "probs_ratio_clamped_max": None,
        }

    def __call__(
        self, logprobs: Tensor, batch: Batch, *, tokens: float, sequences: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mask = valid(batch)
        inside = mask > 0
        length = mask.sum(1, keepdim=True)
        cur = sums.kept(logprobs, inside)
        prev = cur.detach() if self.on_policy else sums.kept(batch["prev_logprobs"][:, 1:], inside)
        pull = -sums.kept(batch["advantages"][:, 1:], inside)  # -A
        log_ratio = cur - prev
        if self.ratio == "sequences":
            log_ratio = log_ratio.sum(1, keepdim=True) / length.clamp(min=1)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        each = self._surrogate(pull, ratio, clipped, cur)
        penalty = None
        if self.metrics or self.importance != "none":
            gap = prev - sums.kept(batch["generation_logprobs"][:, 1:], inside)
            less = torch.expm1(gap)  # the weight less 1, exact where engine and trainer nearly agree
            engine = less + 1
            weight, outside = self._weight(gap, engine, length)
            if self.importance != "none":
                each = each * weight
        if self.kl:
            penalty = self._penalty(sums.kept(batch["reference_logprobs"][:, 1:], inside) - cur)
            each = each + self.kl * penalty
        rows = sums.by_row(each, length, self.level)
        loss = rows.sum() / (tokens if self.level == "tokens" else sequences)
        if not self.metrics:
            return loss, {"loss": loss.detach()}
        with torch.no_grad():
            count = length[:, 0]
            back = less / engine  # 1 - exp(-gap)
            now = ratio * engine if self.ratio == "tokens" else torch.exp(cur - prev + gap)  # exp(cur - gen)
            columns = {
                "loss": rows,
                "kl_penalty": torch.zeros_like(rows) if penalty is None else sums.by_row(penalty, length, self.level),
                "probs_ratio": (ratio * mask).sum(1),
                "probs_ratio_clamped": (clipped * mask).sum(1),
                "token_mult_prob_error": torch.maximum(less, -back).sum(1) + count,
                "gen_kl_error": (less - gap).sum(1),
                "policy_kl_error": (gap - back).sum(1),
                # log cosh(gap / 2), by way of sinh(gap / 2)^2
                "js_divergence_error": torch.mul(less, back).mul_(0.25).log1p_().sum(1) / 2,
                "approx_entropy": -now.mul_(cur).sum(1),
                "sampling_importance_ratio": self._weight_of_row(weight, mask, batch["sample_mask"]),
                "is_oob_ratio": self._outside_of_row(outside, mask, length),
                "num_valid_samples": batch["sample_mask"],
                "num_unmasked_tokens": count,
            }
            seen = sums.over_rows(columns, self.normalizers(), tokens=tokens, sequences=sequences)
            return loss, seen | sums.extremes(mask, probs_ratio=ratio, probs_ratio_clamped=clipped)

    def _surrogate(self, pull: Tensor, ratio: Tensor, clipped: Tensor, cur: Tensor) -> Tensor:
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

    def _weight(self, gap: Tensor, engine: Tensor, length: Tensor) -> tuple[Tensor, Tensor | None]:
        """The importance weight, truncated, of each token or ([rows, 1]) of each row; and what lay outside the band."""
        weight = gap.sum(1, keepdim=True).exp() if self.importance == "sequences" else engine
        if self.truncation == "none":
            return weight, None
        judged = weight
        if self.truncation == "seq-mask-tis":
            judged = (gap.sum(1, keepdim=True) / length.clamp(min=1)).exp()
        assert self.band_high is not None
        outside = (judged < self.band_low) | (judged > self.band_high)
        if self.truncation == "tis":
            return weight.clamp(self.band_low, self.band_high), outside
        return weight.masked_fill(outside, 0.0), outside

    def _weight_of_row(self, weight: Tensor, mask: Tensor, sample_mask: Tensor) -> Tensor:
        return weight[:, 0] * sample_mask if self.importance == "sequences" else (weight * mask).sum(1)

    def _outside_of_row(self, outside: Tensor | None, mask: Tensor, length: Tensor) -> Tensor:
        """How many tokens, or for seq-mask-tis whether the row: one without a valid token has nothing outside."""
        if outside is None:
            return torch.zeros_like(length[:, 0])
        if self.truncation == "seq-mask-tis":
            return (outside & (length > 0))[:, 0]
        return (outside * mask).sum(1)
