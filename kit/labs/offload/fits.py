"""Whether a job of that size fits this machine: arithmetic on the notebook's side, before any rank starts."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from kit.errors import BadInput
from kit.labs.offload.config import KIT_MODEL, OffloadConfig, model_config
from kit.megatron.config import model_bytes
from kit.world.capacity import RANK_BYTES, available_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

GIB = 2**30
QUERY = ("nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits")


def cards() -> Sequence[int]:
    """Free bytes of each card; none where there is no driver to ask."""
    try:
        told = subprocess.run(QUERY, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) << 20 for line in told.split() if line.isdigit()]


def fits(config: OffloadConfig) -> None:
    """Refuse a job that this machine cannot hold, with the arithmetic: its memory, and the cards' where ranks get cards."""
    if config.model != KIT_MODEL:
        return  # its size is its owner's to know
    stages = [model_bytes(model_config(config), ranks=config.ranks, stage=stage) for stage in range(config.pp)]
    each = max(stages, key=lambda stage: stage["total"])
    free_on_cards = [] if config.device == "cpu" else cards()
    on_cards = len(free_on_cards) >= config.ranks
    if on_cards and each["total"] > (least := min(free_on_cards[: config.ranks])):
        raise BadInput(
            f"size {config.size} does not fit: {each['total'] / GIB:.2f} GiB of weights, gradients and optimizer for each rank, "
            f"and {least / GIB:.1f} GiB are free on a card; take a smaller size, fewer layers, or more tp or pp"
        )
    arena = sum(each[{"weights": "params"}.get(kind, kind)] for kind in config.kinds)
    job = 0 if on_cards else each["total"]
    needed = (job + arena + RANK_BYTES) * config.ranks
    free = available_bytes()
    if needed > free:
        raise BadInput(
            f"size {config.size} does not fit: {config.ranks} ranks x ({job / GIB:.2f} GiB of weights, gradients and "
            f"optimizer + {arena / GIB:.2f} GiB to keep them while released + {RANK_BYTES / GIB:.2f} GiB a process) = "
            f"{needed / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free; take a smaller size, fewer layers, or fewer ranks"
        )
