"""The part of the bench of weight transfer with a real engine: a row says that none is there; a sync brings other weights in every turn."""

from __future__ import annotations

import dataclasses
import secrets
import sys
from typing import Any

import pytest

import kit
from kit.errors import RankError
from kit.labs.bench_sync import engine
from kit.labs.bench_sync.lab import LOADED, SYNCED, BenchSyncConfig
from tests.labs.parts import on_an_engine, vllm_python

VLLM = {"serve": "vllm"}


@pytest.mark.parametrize("python", ["", sys.executable])
def test_a_row_says_that_no_engine_is_there(monkeypatch: pytest.MonkeyPatch, python: str) -> None:
    monkeypatch.setenv("KIT_VLLM_PYTHON", python)
    bench: Any = dataclasses.make_dataclass("Asked", ["config"])(BenchSyncConfig())
    (row,) = engine.engine_sync(bench)
    assert not row.values
    assert "make env-vllm" in row.note


def turns(world: kit.World, **asked: Any) -> dict[str, Any]:
    meeting = f"bench-{secrets.token_hex(8)}"
    answer: dict[str, Any] = world.call(
        f"{engine.RANKS}:engine_seconds", layers=1, rounds=2, python=vllm_python(), meeting=meeting, **asked
    )[0]
    return answer


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.ranks
@on_an_engine(VLLM)
def test_both_ways_take_turns_and_the_digests_are_compared() -> None:
    with kit.World(2, device="cpu", timeout_s=300) as world:
        answer = turns(world)
        assert {name: len(values) for name, values in answer["seconds"].items()} == {SYNCED: 2, LOADED: 2}
        world.run("from kit.engines.vllm import VllmModel\nVllmModel.finish = lambda engine: None")
        with pytest.raises(RankError):
            turns(world)
