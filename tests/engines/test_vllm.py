"""The process of a vLLM engine, with another script in place of vLLM: an answer that is late, and an end without one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.engines import vllm
from kit.engines.hosted import EngineContext
from kit.engines.vllm import EngineFailed, VllmModel
from kit.megatron.config import GEOMETRIES

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


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    side = tmp_path / "side.py"
    side.write_text(SIDE)
    monkeypatch.setattr(vllm, "SIDE", side)
    ctx = EngineContext(
        geometry=GEOMETRIES["small"], dtype=torch.float32, device=torch.device("cpu"), weights=WEIGHTS, timeout_s=5.0,
        python=sys.executable, config=None,
    )  # fmt: skip
    made = VllmModel(ctx)
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
