"""Boxes have Apex or Transformer Engine installed: the kit's model is the same there, and trains with device=cpu."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = """
import sys
import torch.distributed as dist
from kit.megatron import model
from kit.megatron.config import ModelConfig

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
job = model.build(ModelConfig())
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core import optimizer
has = [name for name in ("APEX", "TE") if getattr(gpt_layer_specs, f"HAVE_{name}", False)]
norm = job.chunks[0].module.decoder.final_layernorm
print(has, type(norm).__name__, job.step(2))
"""
STANDINS = Path(__file__).parents[1] / "standins" / "te"


def train(*path: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRAIN],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), *sys.path]), "CUDA_VISIBLE_DEVICES": ""},
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1].split(maxsplit=2)


@pytest.mark.slow
def test_the_final_norm_and_the_optimizer_are_torchs(tmp_path: Path) -> None:
    """Apex without Transformer Engine gives Megatron a final norm that knows no RMSNorm; a stub is enough to make it choose so.
    Transformer Engine's optimizer and its kernels for gradients need a GPU."""
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("")
    plain, apex, engine = train(), train(tmp_path), train(STANDINS)
    assert [plain[0], apex[0], engine[0]] == ["[]", "['APEX']", "['TE']"]
    assert plain[1] == "RMSNorm"
    assert plain[1:] == apex[1:] == engine[1:]
