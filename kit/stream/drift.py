"""How far the trainer's policy has moved from the one that generated some tokens. Standard library only: ranks use it too."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def drifted(differences: Sequence[float]) -> dict[str, float]:
    """Of tokens with these differences, the trainer's log-probability minus the engine's.

    `drift_ratio` is the mean importance weight, `drift_kl` the estimate of KL(engine, trainer) that is never below 0.
    """
    count = len(differences)
    ratios = [math.exp(min(one, 700.0)) for one in differences]
    return {
        "drift_mean": math.fsum(differences) / count,
        "drift_mismatch": math.fsum(map(abs, differences)) / count,
        "drift_ratio": math.fsum(ratios) / count,
        "drift_kl": math.fsum(ratio - 1 - one for ratio, one in zip(ratios, differences, strict=True)) / count,
    }
