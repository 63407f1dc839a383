"""Whether the jobs, and the gradients of every step that are kept for comparison, fit this machine."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from kit.labs.fits import check_fits
from kit.labs.split.config import KIT_MODEL, model_config
from kit.megatron.config import model_bytes

if TYPE_CHECKING:
    from kit.labs.split.config import SplitConfig

STEPS = 2  # the gradients of the plain and the split step are kept


def fits(config: SplitConfig) -> None:
    if config.model != KIT_MODEL:
        return  # the kit does not know the size of your own model
    job = model_config(config)
    stages = [model_bytes(job, ranks=config.ranks, stage=stage)["total"] for stage in range(config.pp)]
    whole = model_bytes(dataclasses.replace(job, tp=1, pp=1, ep=1, dtype="float32"), ranks=1)["params"]
    kept = whole * (STEPS * (config.steps + 2) + 2)  # on rank 0; and the float64 model
    check_fits(
        config.size,
        config.ranks,
        config.device,
        job=max(stages),
        host=kept // config.ranks,
        kept=f"for the gradients of {config.steps} steps, kept for comparison",
    )
