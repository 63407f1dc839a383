"""A process's numerical precision is set by name, and restored."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.utils.deterministic

from kit.train.plain import Numerics, deterministic, full_float32


@pytest.fixture(autouse=True)
def as_before() -> Iterator[Numerics]:
    found = Numerics.now()
    yield found
    found.restore()
    assert Numerics.now() == found


def test_deterministic_kernels_fill_no_memory(as_before: Numerics) -> None:
    assert as_before == Numerics(deterministic=False, warn_only=False, filling=True, precision="highest")
    deterministic()
    assert Numerics.now() == Numerics(deterministic=True, warn_only=False, filling=False, precision="highest")


def test_a_callers_own_settings_come_back() -> None:
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.set_float32_matmul_precision("high")
    mine = Numerics.now()
    deterministic()
    full_float32()
    assert Numerics.now() != mine
    mine.restore()
    assert Numerics.now() == mine


def test_tf32_is_off_whichever_name_switched_it_on(as_before: Numerics) -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    full_float32()
    assert not torch.backends.cuda.matmul.allow_tf32
    matmul: object = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):  # torch 2.9 and newer, beside the older name; torch refuses to read a mixture
        matmul.fp32_precision = "tf32"
        assert Numerics.now().precision is None
        full_float32()
        assert not torch.backends.cuda.matmul.allow_tf32
