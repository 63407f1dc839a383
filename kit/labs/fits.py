"""Whether jobs of that size fit this machine: arithmetic on the notebook's side, before any rank starts."""

from __future__ import annotations

import functools
import subprocess
import time
from typing import TYPE_CHECKING

from kit.errors import BadInput
from kit.world.capacity import RANK_BYTES, available_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

GIB = 2**30
FRESH_S = 3.0
QUERY = ("nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits")
JOB = "weights, gradients and optimizer"


def cards() -> Sequence[int]:
    """Free bytes of each card, asked for every few seconds at most; none where there is no driver to ask."""
    return _asked(int(time.monotonic() / FRESH_S))


@functools.lru_cache(maxsize=1)
def _asked(when: int) -> Sequence[int]:  # noqa: ARG001 - a new time is a new question
    try:
        told = subprocess.run(QUERY, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) << 20 for line in told.split() if line.isdigit()]


def check_fits(size: str, ranks: int, device: str, *, job: int, host: int, kept: str) -> None:
    """Refuse what this machine cannot hold. `job` are bytes of a rank where it works, `host` those it keeps in memory besides: `kept`."""
    free_on_cards = [] if device == "cpu" else cards()
    on_cards = len(free_on_cards) > 0
    if on_cards:
        sharing = -(-ranks // len(free_on_cards))  # ranks on the fullest card
        least = min(free_on_cards[:ranks])
        if sharing * job > least:
            many = f" on each of {sharing} ranks that share a card" if sharing > 1 else " for each rank"
            raise BadInput(
                f"size {size} does not fit: {job / GIB:.2f} GiB of {JOB}{many}, "
                f"and {least / GIB:.1f} GiB are free on a card; take a smaller size, fewer layers, or more tp or pp"
            )
    here = 0 if on_cards else job
    needed = (here + host + RANK_BYTES) * ranks
    free = available_bytes()
    if needed > free:
        raise BadInput(
            f"size {size} does not fit: {ranks} ranks x ({here / GIB:.2f} GiB of {JOB} + {host / GIB:.2f} GiB {kept} "
            f"+ {RANK_BYTES / GIB:.2f} GiB a process) = "
            f"{needed / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free; take a smaller size, fewer layers, or fewer ranks"
        )
