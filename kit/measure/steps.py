"""A line of a rank's log for each training step, as trainers write it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kit import machine
from kit.results.records import STEP_LINE


def log_steps(results: Sequence[Mapping[str, Any]], *, done: int, seconds: float, device: str, what: str = "") -> None:
    """Print a line for each of these steps, the last of which is step `done`; together they took `seconds`.

    It reads the allocator's counter, or the resident memory, and never waits for the device: about 30 us a line.
    """
    each = f"{1e3 * seconds / max(len(results), 1):.1f} ms"
    for step, result in enumerate(results, start=done - len(results) + 1):
        numbers = [f"{word} {result[name]:.6g}" for name, word in WORDS.items() if name in result]
        of = f" ({what})" if what else ""
        print(f"{STEP_LINE}{step}{of}: {', '.join([*numbers, memory(device), each])}")


WORDS = {"loss": "loss", "global_loss": "loss", "grad_norm": "grad norm"}


def memory(device: str) -> str:
    on_gpu = device.startswith("cuda")
    held = sys.modules["torch"].cuda.memory_allocated(device) if on_gpu else machine.status()["VmRSS"]
    return f"{'allocated' if on_gpu else 'resident'} {held / 2**20:.1f} MiB"
