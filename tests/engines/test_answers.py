"""Answers that an engine writes: their stamps, what a pause does to keys and values, and the noise of an engine at rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kit.engines.answers import ServedModel, WritingEngine, engine_noise
from kit.engines.hosted import EngineContext, LoadedModel
from kit.errors import BadInput, KitError
from kit.megatron.config import GEOMETRIES, Geometry, ModelConfig
from kit.megatron.serve import PromptRequest, distribution
from kit.train.plain import initial_weights

GEOMETRY = dataclasses.replace(GEOMETRIES["tiny"], layers=1)
CPU = torch.device("cpu")
ASKED = PromptRequest(id="0.0", prompt=(3, 5, 7), sample=0, seed=1, end=255, max_tokens=8, min_tokens=8)
OTHER = dataclasses.replace(ASKED, id="0.1", sample=1)


def weights_of(seed: int, geometry: Geometry = GEOMETRY) -> dict[str, torch.Tensor]:
    return dict(initial_weights(geometry, seed))


def hugging(seed: int = 0, geometry: Geometry = GEOMETRY) -> Any:
    pytest.importorskip("transformers", reason="needs the package transformers")
    from kit.engines.hugging import TransformersModel

    ctx = EngineContext(
        geometry=geometry, dtype=torch.float32, device=CPU, weights=weights_of(seed, geometry), timeout_s=5.0, python="",
        config=None, writes=True,
    )  # fmt: skip
    return TransformersModel(ctx)


def writing(own: Any) -> WritingEngine:
    model = LoadedModel(own, "transformers", CPU)
    return WritingEngine(ServedModel(model, ModelConfig(size=GEOMETRY)), own, "transformers")


def load(own: Any, seed: int, geometry: Geometry = GEOMETRY) -> None:
    with torch.no_grad():
        for name, tensor in weights_of(seed, geometry).items():
            own.load(name, tensor)


def test_a_token_that_nobody_asked_for_and_logits_that_are_no_numbers_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = hugging()
    engine = writing(own)
    engine.start(ASKED)
    monkeypatch.setattr(own, "step", lambda: [("0.7", 3, -1.0)])
    with pytest.raises(KitError, match=r"a token of request 0\.7, but it has no such request or has ended it"):
        engine.decode(1)
    monkeypatch.setattr(LoadedModel, "logits", lambda _, tokens: torch.full((1, GEOMETRY.vocab), float("nan")))
    with pytest.raises(KitError, match="logits of the engine at rest are NaN"):
        engine_noise(LoadedModel(own, "transformers", CPU), GEOMETRY, weights_of(0), temperature=1.0, seed=0)


def test_tokens_have_the_version_that_they_were_sampled_from() -> None:
    own = hugging()
    engine = writing(own)
    engine.start(ASKED)
    assert engine.decode(3) == []
    load(own, 1)
    engine.weights_changed(1, "keep")
    (answer,) = engine.decode(8)
    assert [(span.version, span.count, span.kept) for span in answer.spans] == [(0, 3, False), (1, 5, True)]
    assert answer.ended == "length"
    assert own._written == own._caches == {}  # the request left the engine


@pytest.mark.parametrize("at_sync", ["keep", "recompute"])
def test_a_pause_keeps_keys_and_values_or_drops_them(at_sync: Any) -> None:
    """After `recompute` the next token is that of a request whose prompt is all that was written before."""
    own = hugging()
    own.start(ASKED)
    written = [own.step()[0] for _ in range(3)]
    own.pause(at_sync)
    load(own, 1)
    own.resume()
    again = hugging(seed=1)
    tokens = torch.tensor([[*ASKED.prompt, *(token for _, token, _ in written)]])
    fresh = distribution(again.logits(tokens)[0], ASKED, len(written))
    _, token, logprob = own.step()[0]
    assert (abs(logprob - float(fresh[token])) < 1e-5) == (at_sync == "recompute")


def test_requests_do_not_depend_on_each_other() -> None:
    alone, both = hugging(), hugging()
    for own, requests in ((alone, [OTHER]), (both, [ASKED, OTHER])):
        for request in requests:
            own.start(request)
    rows = [[row for row in own.step() if row[0] == OTHER.id] for own in (alone, both) for _ in range(4)]
    assert rows[:4] == rows[4:]


def test_a_cancelled_request_takes_no_further_step() -> None:
    own = hugging()
    engine = writing(own)
    engine.start(ASKED)
    engine.start(OTHER)
    engine.decode(2)
    assert len(engine.cancel(ASKED.id).tokens) == 2
    engine.decode(1)
    assert engine.in_flight == {OTHER.id: 3}


def test_an_engine_without_a_call_is_refused() -> None:
    own = type("Own", (), dict.fromkeys(("start", "step", "cancel", "pause"), lambda *_: None))()
    with pytest.raises(BadInput, match="serve=mine:own: the object it returned has no resume; it needs start, step"):
        WritingEngine(None, own, "mine:own")


def test_requests_cannot_wait_apart() -> None:
    engine = writing(hugging())
    engine.start(ASKED)
    engine.start(OTHER)
    with pytest.raises(BadInput, match=r"request 0\.1 would wait while others take a step"):
        engine.decode(1, {ASKED.id})


@pytest.mark.parametrize("biases", [True, False], ids=["Qwen2", "Llama"])
def test_noise_at_rest_is_that_of_arithmetic_and_not_of_what_writes(biases: bool) -> None:
    geometry = dataclasses.replace(GEOMETRY, qkv_bias=biases)
    own = hugging(geometry=geometry)
    model = LoadedModel(own, "transformers", CPU)
    measure: Callable[[], float] = lambda: engine_noise(  # noqa: E731 - three calls
        model, geometry, weights_of(0, geometry), temperature=1.0, seed=1
    )
    noise = measure()
    assert 0 < noise < 1e-5
    own.recorded = lambda logits, *_: logits  # a bug in what is recorded moves no limit
    assert measure() == noise
    load(own, 1, geometry)
    assert measure() > 1e-3
