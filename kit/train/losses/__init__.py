"""Losses of RL post-training and their metrics, pure torch. Formulas, normalizers and what is refused: docs/losses.md.

Masked places are replaced before anything is computed, so that what stands there, NaN included, reaches neither loss nor gradient.
Infinities at valid places are followed as IEEE arithmetic has it: a step that they spoil has a gradient norm that is not finite, and
its update is skipped. All arithmetic is in float64; the gradient has the type of the log-probabilities. Limits: masks are 0 or 1; the
KL penalty is differentiated as it is written, without a score-function term.
"""

from kit.train.losses.clipped import ClippedPolicyGradient
from kit.train.losses.likelihood import NegativeLogLikelihood

__all__ = ["ClippedPolicyGradient", "NegativeLogLikelihood"]
