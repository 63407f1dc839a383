"""Changes in place of versions in the sync lab: its own comparison of two versions, its check of bytes, and runs of right code."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch

import kit
from kit.engines.changes import BLOCK, ChangedTensor, ChangeOracle, position_bits
from kit.labs.sync.rules import delta_bytes
from kit.results import Missing, NotMeasured
from tests.labs.parts import failed, passed, why

SLOWLY = {"dtype": "bfloat16", "lr": 3e-6, "cycles": 3}


def test_the_oracle_counts_changed_words_by_their_bytes() -> None:
    oracle = ChangeOracle()
    tensors = {"a": torch.zeros(4, 3), "b": torch.zeros(5, dtype=torch.bfloat16)}
    assert oracle.compare(tensors) == []
    oracle.remember(tensors)
    tensors["a"][1, 2] = -0.0
    tensors["a"][3, 0] = 1.0
    assert oracle.compare(tensors) == [
        ChangedTensor(name="a", words=12, changed=2, size=4),
        ChangedTensor(name="b", words=5, changed=0, size=2),
    ]
    assert oracle.names(tensors) == ["a"]


def test_what_changes_need() -> None:
    assert position_bits(1, 1024) == pytest.approx(10)
    assert position_bits(0, 1024) == position_bits(1024, 1024) == 0
    assert position_bits(2, 4) == pytest.approx(math.log2(6))
    few = ChangedTensor(name="a", words=100_000, changed=1_000, size=2)
    assert few.needed("tensor") == 200_192
    assert few.needed("word") == (4 + 2) * BLOCK  # 2,000 bytes of words, 1,010 of positions
    assert few.needed("word") < ChangedTensor(name="a", words=100_000, changed=99_900, size=2).needed("word") == 200_192
    assert ChangedTensor(name="a", words=9, changed=0, size=2).needed("word") == 0


def rows(
    *, arrived: float, base: float | None = 1.0, needed: float = 1000.0, ranks: tuple[int, ...] = (4,)
) -> pd.DataFrame:
    """Two versions; the first one comes whole."""
    made: list[tuple[int, str, int, str, float | None, dict[str, Any]]] = []
    for cycle in (1, 2):
        made += [
            (cycle, "train", 0, "bytes_needed", needed, {}),
            (cycle, "train", 0, "words_changed", 1.0, {"of": 100}),
        ]
        for rank in ranks:
            made.append((cycle, "refresh", rank, "bytes_arrived", arrived if cycle > 1 else 10_000.0, {}))
            made.append((cycle, "refresh", rank, "base_named", base if cycle > 1 else None, {"was": cycle - 1}))
    made.append((1, "refresh", 0, "bytes", 10_000.0, {}))
    frame = pd.DataFrame(made, columns=["cycle", "phase", "rank", "metric", "value", "ids"])
    return frame.assign(ids=[json.dumps(ids) for ids in frame["ids"]], unit="1", text="")


CONFIG = {"cycles": 2, "delta": "word"}


def test_bytes_beyond_what_changed_and_another_base_are_seen() -> None:
    assert delta_bytes(rows(arrived=1500.0), CONFIG).value == 1.5
    assert delta_bytes(rows(arrived=10_000.0, base=None), CONFIG).value == 10.0
    wrong = delta_bytes(rows(arrived=1500.0, base=0.0), CONFIG)
    assert wrong.value == math.inf
    assert wrong.why == "version 0 was named as the one that is changed, but rank 4 had 1"
    with pytest.raises(NotMeasured, match="what changed needs 90% of all bytes"):
        delta_bytes(rows(arrived=10_000.0, needed=9000.0), CONFIG)
    with pytest.raises(Missing):
        delta_bytes(rows(arrived=1500.0, ranks=()), CONFIG)
    with pytest.raises(NotMeasured, match="no word changed: use a larger lr"):
        delta_bytes(rows(arrived=0.0, needed=0.0), CONFIG)
    assert delta_bytes(rows(arrived=1500.0, needed=0.0), CONFIG).value == math.inf


@pytest.mark.slow
@pytest.mark.drawn(1, of="deltas")
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"placement": "apart", "ranks": 4, "replicas": 2, "refresh": "paused", "transport": "broadcast"},
        {"ranks": 6, "replicas": 2, "infer_tp": 2, "bucket_mib": 0.0078125},
        {"worlds": "two", "transport": "rendezvous"},
        {"kv_scales": True},
        {"delta": "tensor", "serve": "transformers"},
        {"delta": "tensor", "receiver": "kit.sync.protocols:VllmCalls"},
    ],
    ids=repr,
)
def test_right_code_passes(sync: Callable[..., kit.Run], config: dict[str, Any]) -> None:
    verdict = sync(**{**SLOWLY, "delta": "word", **config}).verdict()
    assert failed(verdict) == set(), verdict
    if "delta" not in config:
        assert passed(verdict, "delta_bytes")
        assert "2 of 2 syncs sent changes" in why(verdict, "delta_bytes") or "of 4 syncs" in why(verdict, "delta_bytes")
        assert ", lost, " in why(verdict, "failure_is_clean")
