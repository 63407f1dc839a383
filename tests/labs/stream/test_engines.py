"""Engines as replicas of the lab `stream`: they write the answers, and the same checks judge them with a limit from measured noise."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import kit
from kit.errors import BadInput
from kit.labs.stream.faults import ACROSS, SMALL
from kit.labs.stream.lab import StreamConfig
from tests.labs.parts import failed, on_an_engine, why

VLLM = {**SMALL, **ACROSS, "serve": "vllm", "size": "small", "layers": 2}
HUGGING = {**SMALL, **ACROSS, "serve": "transformers", "layers": 1}
OF_TOKENS = {"stamps_true", "behaviour_logprob", "draws_independent", "kv_policy_kept", "no_torn_generation"}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("at_sync", ["keep", "recompute"])
@pytest.mark.parametrize(
    "engine", [pytest.param(one, marks=on_an_engine(one), id=str(one["serve"])) for one in (HUGGING, VLLM)]
)
def test_an_engine_writes_answers_that_pass_every_check(
    on_ranks: Callable[..., kit.Run], engine: dict[str, object], at_sync: str
) -> None:
    verdict = on_ranks(**engine, at_sync=at_sync).verdict()
    assert failed(verdict) == set()
    assert {row.check for row in verdict if row.passed} >= OF_TOKENS
    row = next(row for row in verdict if row.check == "behaviour_logprob")
    assert 0 < row.measured <= row.limit <= 1e-5
    assert "noise at rest" in why(verdict, "behaviour_logprob")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", ["engine-untempered", "engine-keeps-kv"])
@pytest.mark.parametrize("engine", [pytest.param(VLLM, marks=on_an_engine(VLLM), id="vllm")])
def test_vllms_own_defaults_are_seen(on_ranks: Callable[..., kit.Run], engine: dict[str, object], fault: str) -> None:
    more = {"engine-untempered": {"temperature": 1.3}, "engine-keeps-kv": {"at_sync": "recompute"}}[fault]
    wanted = {"engine-untempered": "behaviour_logprob", "engine-keeps-kv": "kv_policy_kept"}[fault]
    assert wanted in failed(on_ranks(fault, **engine, **more).verdict())


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"serve": "transformers", "infer_tp": 2, "ranks": 5}, "puts a whole model on each rank, but infer_tp=2"),
        ({"serve": "vllm"}, "heads whose width is a multiple of 32, but those of size=tiny have 16: use size=small"),
        ({"serve": "transformers", "tail": True, "tools": 1}, "tools=1 needs serve=megatron"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        StreamConfig(**given)  # type: ignore[arg-type]
