"""What a delta saves, as the bench of weight transfer reports it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import kit
from kit.labs.bench_sync import versions
from kit.labs.bench_sync.lab import BenchSyncConfig


def test_bytes_are_those_that_arrived_beside_what_changed() -> None:
    sent = [{"word": 2.0, "off": 1.0, "needed": 1024.0, "share": 0.02}] * 2
    arrived = [{"bytes": 1536.0}, {"bytes": 3072.0}]

    @contextlib.contextmanager
    def world(*_: Any, **__: Any) -> Iterator[Any]:
        yield SimpleNamespace(call=lambda *_, **__: [sent, arrived])

    bench: Any = SimpleNamespace(world=world, config=BenchSyncConfig(delta_model="tiny"))
    rows = {row.what: row for row in versions.changed_words(bench)}
    title = "delta=word, tiny in bfloat16 at lr=3e-06"
    needed = rows[f"{title}: bytes over what the changed words need"]
    assert (needed.metric, needed.values) == ("delta_over_needed", [1.5, 3.0])
    assert rows[f"{title}: share of changed words"].values == [2.0, 2.0]
    assert rows[f"{title}: time over a whole sync"].values == [2.0, 2.0]


@pytest.mark.slow
def test_ranks_send_what_changed_and_everything(nothing_left: None) -> None:
    with kit.World(2, device="cpu", env={"OMP_NUM_THREADS": "1"}, preload=("megatron.core",)) as world:
        asked: dict[str, Any] = {"size": "tiny", "lr": 3e-6, "rounds": 2, "meeting": f"bench-{secrets.token_hex(8)}"}
        sent, arrived = world.call(f"{versions.DELTAS}:delta_syncs", **asked)
    assert len(sent) == len(arrived) == 2
    for turn, got in zip(sent, arrived, strict=True):
        assert 0 < turn["share"] < 0.2
        assert 0 < got["bytes"] <= 2 * turn["needed"]
