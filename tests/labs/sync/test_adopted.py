"""With refresh=adopted, replicas have the sender's memory as their weights; right code passes in every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import kit
from tests.labs.parts import failed, passed


@pytest.mark.slow
@pytest.mark.drawn(1, of="adoptions")
@pytest.mark.parametrize(
    "config",
    [
        {"arena": "cache"},
        {"worlds": "two"},
        {"pp": 2, "tp": 1, "dtype": "bfloat16"},
        {"placement": "apart", "ranks": 4, "replicas": 2},
        {"kv_scales": True, "transport": "shm"},
        {"experts": 4, "tp": 1, "dtype": "float32"},
        {"bucket_mib": 0.01, "prewarm": True, "verify": "none"},
    ],
    ids=repr,
)
def test_right_code_passes(sync: Callable[..., kit.Run], config: dict[str, Any]) -> None:
    verdict = sync(refresh="adopted", **config).verdict()
    assert failed(verdict) == set(), verdict
    assert all(passed(verdict, check) for check in ("weights_adopted", "cache_bounded", "bit_exact", "no_torn_reads"))
