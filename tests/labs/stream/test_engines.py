"""Engines as replicas of the lab `stream`: they write the answers, and the same checks judge them with a limit from measured noise."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

import kit
from kit.errors import BadInput
from kit.labs.served import VLLM_BYTES
from kit.labs.stream import lab as stream_lab
from kit.labs.stream.faults import ACROSS, SMALL
from kit.labs.stream.lab import StreamConfig
from kit.labs.stream.ranks import replica
from kit.megatron.config import model_bytes
from tests.labs.parts import failed, on_an_engine, why

VLLM = {**SMALL, **ACROSS, "serve": "vllm", "size": "small", "layers": 2}
HUGGING = {**SMALL, **ACROSS, "serve": "transformers", "layers": 1}
OF_TOKENS = {"stamps_true", "behaviour_logprob", "draws_independent", "kv_policy_kept", "no_torn_generation"}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("at_sync", ["keep", "recompute", "abort", "drain"])
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
    assert 0 < row.measured <= row.limit <= 2e-5  # above 1e-5 where a plain model has more noise
    assert "noise at rest" in why(verdict, "behaviour_logprob")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", ["engine-untempered", "engine-keeps-kv"])
@pytest.mark.parametrize("engine", [pytest.param(VLLM, marks=on_an_engine(VLLM), id="vllm")])
def test_vllms_own_defaults_are_seen(on_ranks: Callable[..., kit.Run], engine: dict[str, object], fault: str) -> None:
    more = {"engine-untempered": {"temperature": 1.3}, "engine-keeps-kv": {"at_sync": "recompute"}}[fault]
    wanted = {"engine-untempered": "behaviour_logprob", "engine-keeps-kv": "kv_policy_kept"}[fault]
    assert wanted in failed(on_ranks(fault, **engine, **more).verdict())


@pytest.mark.parametrize(("phases", "measured"), [("stream,verify", 1), ("stream", 0)])
def test_noise_is_measured_where_tokens_are_recomputed(
    monkeypatch: pytest.MonkeyPatch, phases: str, measured: int
) -> None:
    noises: list[float] = []
    own = SimpleNamespace(full_tensors=lambda: iter(()), load=None, logits=None)
    monkeypatch.setattr(replica, "engine_noise", lambda *_, **__: noises.append(1e-7) or 1e-7)
    monkeypatch.setattr(replica, "load", lambda _: lambda _: own)
    monkeypatch.setattr(replica.model, "initialise", lambda _: None)
    made = object.__new__(replica.EngineReplica)
    vars(made).update(
        ctx=SimpleNamespace(device=torch.device("cpu")),
        config=StreamConfig(serve="transformers", phases=phases),
        base={},
        scope=contextlib.ExitStack(),
    )
    made.make_model()
    assert len(noises) == measured
    assert made.noise == measured * 1e-7


@pytest.mark.parametrize(
    ("given", "per_replica"),
    [
        ({"serve": "transformers"}, lambda held: 8 * held["parameters"]),  # the model that noise is measured with
        ({"serve": "transformers", "phases": "stream"}, lambda _: 0),
        ({"serve": "vllm", "phases": "stream"}, lambda held: VLLM_BYTES + held["params"]),
    ],
)
def test_engines_and_their_noise_count_in_what_must_fit(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], per_replica: Callable[[dict[str, int]], int]
) -> None:
    monkeypatch.setattr(stream_lab, "check_engine_there", lambda _: None)
    hosts: list[int] = []
    monkeypatch.setattr(stream_lab, "check_fits", lambda _, host, **__: hosts.append(host))
    config = StreamConfig(size="small", **given)  # type: ignore[arg-type]
    stream_lab.fits(config)
    stream_lab.fits(dataclasses.replace(config, serve="megatron"))
    wanted = per_replica(model_bytes(config.replica_model, ranks=1)) * config.replicas / config.ranks
    assert hosts[0] - hosts[1] == pytest.approx(wanted, abs=1)


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
