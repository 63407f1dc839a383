"""Losses by the names in common use, as options of the kit's loss. The loss itself is made on the ranks."""

from __future__ import annotations

from typing import Any, Literal

Recipe = Literal[
    "grpo", "dapo", "gspo", "cispo", "tis", "icepop", "seq-mask-tis", "on-policy", "reinforce", "vapo", "nll"
]

# Options of kit.train.losses.ClippedPolicyGradient; nll is the negative log-likelihood, which has none.
RECIPES: dict[Recipe, dict[str, Any]] = {
    "grpo": {"kl": 0.05},
    "dapo": {"clip_high": 0.28, "dual_clip": 3.0},
    "gspo": {"ratio": "sequences", "clip_low": 0.03, "clip_high": 0.04},
    "cispo": {"cispo": True, "clip_high": 0.28},
    "tis": {"importance": "tokens", "truncation": "tis", "band_high": 2.0},
    "icepop": {"importance": "tokens", "truncation": "icepop", "band_low": 0.5, "band_high": 2.0},
    "seq-mask-tis": {"importance": "tokens", "truncation": "seq-mask-tis", "band_low": 0.9, "band_high": 1.1},
    "on-policy": {"on_policy": True, "importance": "sequences", "kl": 0.05, "kl_kind": "k2"},
    "reinforce": {"ratio": "none", "kl": 0.05, "kl_kind": "k2"},
    "vapo": {"clip_high": 0.28, "positive_nll": 0.1},
    "nll": {},
}
