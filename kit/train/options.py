"""Settings of the weight update and of the clipped policy gradient, and the combinations that are refused. Without torch, so that any
side can check a config."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from kit.errors import BadInput

Level = Literal["tokens", "sequences"]
Ratio = Literal["tokens", "sequences", "none"]
Importance = Literal["none", "tokens", "sequences"]
Truncation = Literal["none", "tis", "icepop", "seq-mask-tis"]
KLKind = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How both backends update weights: AdamW with clipping, a warm-up and a cosine.

    `warmup` and `decay` count what the scheduler is stepped by: steps, or sequences where that is the step's batch size.
    """

    lr: float = 1e-3
    first_lr: float = 0.0
    last_lr: float = 1e-4
    weight_decay: float = 0.01  # of matrices; biases and norms have none
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip: float = 1.0
    warmup: int = 2
    decay: int = 1000


DEFAULTS = Settings()


def known(name: str, word: object, kind: object) -> None:
    """Refuse a word that is not one of the Literal."""
    words = get_args(kind)
    if word not in words:
        raise BadInput(f"{name}={word!r} is unknown: use one of {', '.join(words)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClippedOptions:
    """The settings of `kit.train.losses.ClippedPolicyGradient`; formulas in docs/losses.md."""

    level: Level = "tokens"
    clip_low: float = 0.2  # r is clipped to 1 - clip_low
    clip_high: float = 0.2  # ... 1 + clip_high
    dual_clip: float | None = None  # c: where A < 0 the loss is at most -A c
    ratio: Ratio = "tokens"  # none: REINFORCE, RLOO
    cispo: bool = False
    importance: Importance = "none"  # weight exp(prev - gen), of a token or, from its sum, of a sequence
    truncation: Truncation = "none"
    band_low: float = 0.0
    band_high: float | None = None
    kl: float = 0.0  # coefficient of the penalty for leaving the reference
    kl_kind: KLKind = "k3"
    kl_input_clamp: float | None = None
    kl_output_clamp: float | None = None
    positive_nll: float = 0.0  # coefficient of the negative log-likelihood of tokens with A > 0
    on_policy: bool = False
    metrics: bool = True  # False: nothing but the loss

    def __post_init__(self) -> None:
        known("level", self.level, Level)
        known("ratio", self.ratio, Ratio)
        known("importance", self.importance, Importance)
        known("truncation", self.truncation, Truncation)
        known("kl_kind", self.kl_kind, KLKind)
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
        for name, value in (("band_low", self.band_low), ("kl", self.kl), ("positive_nll", self.positive_nll)):
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
                "ratio='sequences' needs level='sequences': a ratio per row must count once, not once per token",
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
                "on_policy=True and cispo=True exclude each other: the ratio is 1, so nothing is clipped",
            ),
            (
                self.on_policy and self.dual_clip is not None,
                "on_policy=True and dual_clip exclude each other: the ratio is 1, so nothing is clipped",
            ),
            (
                self.ratio == "none" and (self.cispo or self.on_policy or self.dual_clip is not None),
                "ratio='none' excludes cispo, on_policy and dual_clip: without a ratio they have no effect",
            ),
            (
                cut and self.importance == "none",
                f"truncation={self.truncation!r} needs importance='tokens' or 'sequences': without a weight nothing is truncated",
            ),
            (
                self.truncation == "seq-mask-tis" and self.importance == "sequences",
                "truncation='seq-mask-tis' needs importance='tokens': it drops rows by the mean weight of their tokens",
            ),
            (
                cut and self.band_high is None,
                f"truncation={self.truncation!r} needs band_high, the largest weight that is not truncated",
            ),
            (
                self.truncation in {"icepop", "seq-mask-tis"} and self.band_low <= 0,
                f"truncation={self.truncation!r} needs band_low above 0: it also drops weights below the band",
            ),
            (
                self.band_high is not None and self.band_low > self.band_high,
                f"band_low={self.band_low} is above band_high={self.band_high}: the band is empty",
            ),
            (
                not cut and (self.band_high is not None or self.band_low > 0),
                "band_low and band_high need truncation='tis', 'icepop' or 'seq-mask-tis'",
            ),
            (
                not penalised and (self.kl_input_clamp is not None or self.kl_output_clamp is not None),
                "kl_input_clamp and kl_output_clamp need kl above 0: without a penalty nothing is clamped",
            ),
        ]
