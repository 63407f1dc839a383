"""The process of a vLLM engine, with another script in place of vLLM: an answer that is late, and an end without one. And requests that are
in flight in vLLM itself while its weights change."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.engines import vllm
from kit.engines.hosted import EngineContext
from kit.engines.vllm import EngineFailed, VllmModel
from kit.measure.phase import shared_memory
from kit.megatron.config import GEOMETRIES
from kit.megatron.serve import AtSync, PromptRequest, distribution
from kit.train.plain import from_weights, initial_weights
from tests.labs.parts import on_an_engine, vllm_python

SIDE = """
import json, sys, time
from multiprocessing.connection import Connection
line = Connection(int(sys.argv[1]))
line.send_bytes(json.dumps({"result": []}).encode())
while True:
    name = json.loads(line.recv_bytes())["call"]
    if name == "hang": time.sleep(1000)
    if name == "leave": sys.exit(3)
    line.send_bytes(json.dumps({"result": name}).encode())
"""
WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5)}


def context() -> EngineContext:
    return EngineContext(
        geometry=GEOMETRIES["small"], dtype=torch.float32, device=torch.device("cpu"), weights=WEIGHTS, timeout_s=5.0,
        python=sys.executable, config=None,
    )  # fmt: skip


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    side = tmp_path / "side.py"
    side.write_text(SIDE)
    monkeypatch.setattr(vllm, "SIDE", side)
    made = VllmModel(context())
    yield made
    made.close()


def test_an_engine_that_is_late_is_ended_so_no_late_answer_is_taken_for_the_next(
    engine: VllmModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.call("greet") == "greet"
    monkeypatch.setattr(vllm, "CALL_S", 0.2)
    with pytest.raises(EngineFailed, match=r"the vLLM engine did not answer within 0\.2 s"):
        engine.call("hang")
    monkeypatch.setattr(vllm, "CALL_S", 20.0)
    assert engine.process.wait(20) == -9
    with pytest.raises(EngineFailed, match=r"ended"):
        engine.call("greet")


def test_an_engine_that_ends_is_named_with_its_status(engine: VllmModel) -> None:
    with pytest.raises(EngineFailed, match=r"the vLLM engine (ended with 3|closed its line)"):
        engine.call("leave")


def test_a_tensor_lies_in_the_memory_of_the_engine_at_its_place(engine: VllmModel) -> None:
    places = {name: engine._arena.put(name, tensor) for name, tensor in WEIGHTS.items()}
    assert places["a"] % vllm.ALIGNED == places["b"] % vllm.ALIGNED == 0
    held = engine._arena._memory
    assert torch.equal(held[places["a"] :][:24].view(torch.float32).view(2, 3), WEIGHTS["a"])
    assert torch.equal(held[places["b"] :][:20].view(torch.float32), WEIGHTS["b"])
    with pytest.raises(EngineFailed, match="b has 24 bytes, but 20 in the base weights"):
        engine._arena.put("b", torch.ones(6))


def test_the_memory_for_tensors_is_mapped_once_and_goes_with_the_engine(engine: VllmModel) -> None:
    def arenas() -> int:
        return sum("kit-vllm" in shared.name for shared in shared_memory().values())

    assert arenas() == 1
    for _ in range(3):
        engine.begin()
        for name, tensor in WEIGHTS.items():
            engine.load(name, tensor)
        engine.finalize()
        assert arenas() == 1
    engine.close()
    assert arenas() == 0


def test_an_engine_that_does_not_start_leaves_no_memory_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    side = tmp_path / "side.py"
    side.write_text("raise SystemExit(5)")
    monkeypatch.setattr(vllm, "SIDE", side)
    before = set(shared_memory())
    with pytest.raises(EngineFailed):
        VllmModel(context())
    assert set(shared_memory()) == before


SHAPE = dataclasses.replace(GEOMETRIES["small"], layers=2)
BEFORE = initial_weights(SHAPE, 1)
AFTER = {name: tensor * 1.25 if tensor.dim() == 2 else tensor for name, tensor in BEFORE.items()}
EXACT = 1e-5
REQUEST = PromptRequest(
    id="0.0", prompt=tuple(range(3, 43)), sample=0, seed=5, end=1, max_tokens=12, min_tokens=12, temperature=0.8
)


@pytest.fixture(scope="module")
def real() -> Iterator[VllmModel]:
    ctx = dataclasses.replace(context(), geometry=SHAPE, weights=BEFORE, python=vllm_python(), writes=True)
    made = VllmModel(ctx)
    yield made
    made.close()


def bring(engine: VllmModel, weights: Mapping[str, torch.Tensor]) -> None:
    engine.begin()
    for name, tensor in weights.items():
        engine.load(name, tensor)
    engine.finalize()


def errors(weights: Mapping[str, torch.Tensor], tokens: list[tuple[str, int, float]], places: range) -> list[float]:
    """How far recorded log-probabilities are from those of a plain float64 model that computes each token anew."""
    plain = from_weights(SHAPE, weights, dtype=torch.float64)
    found = []
    for place in places:
        known = torch.tensor([[*REQUEST.prompt, *(token for _, token, _ in tokens[:place])]])
        with torch.no_grad():
            exact = distribution(plain(known)[0, -1], REQUEST, place)
        _, token, logprob = tokens[place]
        found.append(abs(float(exact[token]) - logprob))
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
@on_an_engine({"serve": "vllm"})
@pytest.mark.parametrize("at_sync", ["keep", "recompute", "abort"])
def test_a_request_in_flight_goes_on_with_its_keys_and_values_or_new_ones_or_ends(
    real: VllmModel, at_sync: AtSync
) -> None:
    bring(real, BEFORE)
    real.start(REQUEST)
    tokens = [token for _ in range(5) for token in real.step()]
    assert len(tokens) == 5
    assert max(errors(BEFORE, tokens, range(5))) < EXACT
    real.pause(at_sync)
    assert not real.step()
    bring(real, AFTER)
    real.resume()
    tokens += [token for _ in range(12) for token in real.step()]
    if at_sync == "abort":
        assert len(tokens) == 5
        real.start(REQUEST)  # its name is free again
        tokens = [token for _ in range(13) for token in real.step()]
        assert len(tokens) == 12
        assert max(errors(AFTER, tokens, range(12))) < EXACT
        return
    assert len(tokens) == 12
    after = errors(AFTER, tokens, range(5, 12))
    assert max(after) < EXACT if at_sync == "recompute" else max(after) > 100 * EXACT
    assert max(errors(BEFORE, tokens, range(5, 12))) > 100 * EXACT


@pytest.mark.slow
@pytest.mark.timeout(400)
@on_an_engine({"serve": "vllm"})
def test_a_forward_that_raises_leaves_no_request_in_vllm(real: VllmModel) -> None:
    """While an update is open, layers have no weights."""
    bring(real, BEFORE)
    prompts = torch.arange(96).view(2, 48)
    wanted = real.logits(prompts)
    real.begin()
    for _ in range(3):  # four requests have room
        with pytest.raises(EngineFailed, match=r"the vLLM engine raised .*meta"):
            real.logits(prompts)
    bring(real, BEFORE)
    assert torch.equal(real.logits(prompts), wanted)
