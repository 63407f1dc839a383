"""How weights are updated: AdamW with clipping, a warm-up and a cosine. One place for both backends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """`warmup` and `decay` count what the scheduler is stepped by: steps, or sequences where that is the step's batch size."""

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
