"""Boxes have Apex or Transformer Engine installed: the kit's model is the same there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BUILD = """
import sys
import torch.distributed as dist
from kit.megatron import model
from kit.megatron.config import ModelConfig

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
device = model.initialise(ModelConfig())
chunk = model.network(ModelConfig(), device)
from megatron.core.models.gpt import gpt_layer_specs
print(getattr(gpt_layer_specs, "HAVE_APEX", "unknown"), type(chunk.decoder.final_layernorm).__name__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stubs", [(), ("apex",)], ids=lambda stubs: "-".join(stubs) or "none")
def test_the_final_norm_is_torchs(tmp_path: Path, stubs: tuple[str, ...]) -> None:
    """Apex without Transformer Engine gives Megatron a final norm that knows no RMSNorm. A stub is enough to make it choose so."""
    for stub in stubs:
        (tmp_path / stub).mkdir()
        (tmp_path / stub / "__init__.py").write_text("")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BUILD],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-2:] == [str(bool(stubs)), "RMSNorm"]
