"""Settings of the weight update and of the clipped policy gradient, and the combinations that are refused. Without torch, so that any
side can check a config."""

from __future__ import annotations

import math
from collections.abc import Iterator
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


def check_word(name: str, word: object, kind: object) -> None:
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
        check_word("level", self.level, Level)
        check_word("ratio", self.ratio, Ratio)
        check_word("importance", self.importance, Importance)
        check_word("truncation", self.truncation, Truncation)
        check_word("kl_kind", self.kl_kind, KLKind)
        for name in ("clip_low", "clip_high", "dual_clip", "band_high", "kl_input_clamp", "kl_output_clamp"):
            value, above = getattr(self, name), 1 if name == "dual_clip" else 0
            if value is not None and not (math.isfinite(value) and value > above):
                raise BadInput(f"{name}={value} is not allowed: it must be a finite number above {above}")
        for name in ("band_low", "kl", "positive_nll"):
            if not (math.isfinite(value := getattr(self, name)) and value >= 0):
                raise BadInput(f"{name}={value} is not allowed: it must be a finite number, 0 or above")
        if sentence := next(self._contradictions(), None):
            raise BadInput(sentence)

    def _contradictions(self) -> Iterator[str]:
        cut = self.truncation != "none"
        if self.ratio == "sequences" and self.level != "sequences":
            yield "ratio='sequences' needs level='sequences': a ratio per row must count once, not once per token"
        if self.cispo and self.ratio == "sequences":
            yield "cispo=True needs ratio='tokens': its weight is a token's own clipped ratio"
        if self.cispo and self.dual_clip is not None:
            yield "cispo=True and dual_clip exclude each other: dual_clip bounds -A r, which cispo does not have"
        if self.on_policy and (self.cispo or self.dual_clip is not None):
            conflicting = "cispo=True" if self.cispo else "dual_clip"
            yield f"on_policy=True and {conflicting} exclude each other: the ratio is 1, so nothing is clipped"
        if self.ratio == "none" and (self.cispo or self.on_policy or self.dual_clip is not None):
            yield "ratio='none' excludes cispo, on_policy and dual_clip: without a ratio they have no effect"
        if cut and self.importance == "none":
            yield f"truncation={self.truncation!r} needs importance='tokens' or 'sequences': without a weight nothing is truncated"
        if self.truncation == "seq-mask-tis" and self.importance == "sequences":
            yield "truncation='seq-mask-tis' needs importance='tokens': it drops rows by the mean weight of their tokens"
        if cut and self.band_high is None:
            yield f"truncation={self.truncation!r} needs band_high, the largest weight that is not truncated"
        if self.truncation in {"icepop", "seq-mask-tis"} and self.band_low <= 0:
            yield f"truncation={self.truncation!r} needs band_low above 0: it also drops weights below the band"
        if self.band_high is not None and self.band_low > self.band_high:
            yield f"band_low={self.band_low} is above band_high={self.band_high}: the band is empty"
        if not cut and (self.band_high is not None or self.band_low > 0):
            yield "band_low and band_high need truncation='tis', 'icepop' or 'seq-mask-tis'"
        if self.kl <= 0 and (self.kl_input_clamp is not None or self.kl_output_clamp is not None):
            yield "kl_input_clamp and kl_output_clamp need kl above 0: without a penalty nothing is clamped"
