"""A stand-in for torchcomms, which is not built for every machine: torch's own routing code runs, and the communicators are gloo.

It accepts torchcomms' arguments and reads the same environment (rank and size); the arguments are recorded in `CALLS`.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

CALLS: list[dict[str, Any]] = []


@dataclasses.dataclass
class Comm:
    store: Any
    rank: int
    size: int
    timeout: Any


def new_comm(backend: str, device: Any, *, name: str, store: Any, hints: dict[str, str], timeout: Any = None) -> Comm:
    rank = int(os.environ.get("TORCHCOMM_RANK") or os.environ["RANK"])
    size = int(os.environ.get("TORCHCOMM_SIZE") or os.environ["WORLD_SIZE"])
    seconds = timeout and timeout.total_seconds()
    CALLS.append(
        {"backend": backend, "device": str(device), "rank": rank, "size": size, "hints": hints, "timeout_s": seconds}
    )
    return Comm(store, rank, size, timeout)


def calls() -> list[dict[str, Any]]:
    return CALLS
