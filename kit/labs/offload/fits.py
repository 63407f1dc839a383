"""Whether the job and what is kept of it while released fit this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.errors import BadInput
from kit.gpu import free_bytes
from kit.labs.fits import check_fits
from kit.labs.offload.config import KIT_MODEL, model_config
from kit.megatron.config import model_bytes

if TYPE_CHECKING:
    from kit.labs.offload.config import OffloadConfig


def fits(config: OffloadConfig) -> None:
    if config.mode == "suspend" and not free_bytes():
        raise BadInput(
            "mode=suspend needs CUDA: only NCCL can suspend communicators, and this machine has no GPU driver"
        )
    if config.model != KIT_MODEL:
        return  # its size is its owner's to know
    stages = [model_bytes(model_config(config), ranks=config.ranks, stage=stage) for stage in range(config.pp)]
    each = max(stages, key=lambda stage: stage["total"])
    arena = sum(each[{"weights": "params"}.get(kind, kind)] for kind in config.kinds)
    check_fits(
        config.size, config.ranks, config.device, job=each["total"], host=arena, kept="to keep them while released"
    )
