"""With arena=cache an offloaded trainer's weights stay in the buckets that were sent; right code passes in every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import kit
from tests.labs.parts import failed, passed


@pytest.mark.slow
@pytest.mark.drawn(1, of="arenas")
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"tp": 1},
        {"pp": 2, "tp": 1, "dtype": "bfloat16"},
        {"worlds": "two"},
        {"kv_scales": True},
        {"transport": "serialize"},
    ],
    ids=repr,
)
def test_right_code_passes(sync: Callable[..., kit.Run], config: dict[str, Any]) -> None:
    verdict = sync(arena="cache", **config).verdict()
    assert failed(verdict) == set(), verdict
    assert all(passed(verdict, check) for check in ("trainer_restored", "weights_once", "bit_exact"))
