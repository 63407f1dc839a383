"""How exactly this process computes, set by name: deterministic kernels, and float32 products without TF32. No GPU has confirmed it yet.

Whatever is set here is put back by whoever set it: `Numerics.now()` before, `restore()` at the end.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.utils.deterministic

_filling: Any = torch.utils.deterministic


def deterministic() -> None:
    """Deterministic kernels, and nothing else: with them torch fills every `torch.empty`, on the CPU too, which costs time and hides
    reads of memory that nothing has written (torch.utils.deterministic.fill_uninitialized_memory is True by default)."""
    torch.use_deterministic_algorithms(mode=True)
    _filling.fill_uninitialized_memory = False


def full_float32() -> None:
    """float32 products in float32. Images of NVIDIA's switch TF32 on by TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1, which this call undoes."""
    torch.set_float32_matmul_precision("highest")


@dataclasses.dataclass(frozen=True, slots=True)
class Numerics:
    """The settings as they were. `precision` is None where torch cannot tell: its old and new names for it were mixed."""

    deterministic: bool
    warn_only: bool
    filling: bool
    precision: str | None

    @classmethod
    def now(cls) -> Numerics:
        try:
            precision = torch.get_float32_matmul_precision()
        except RuntimeError:
            precision = None
        return cls(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            bool(_filling.fill_uninitialized_memory),
            precision,
        )

    def restore(self) -> None:
        torch.use_deterministic_algorithms(mode=self.deterministic, warn_only=self.warn_only)
        _filling.fill_uninitialized_memory = self.filling
        if self.precision is not None:
            torch.set_float32_matmul_precision(self.precision)
