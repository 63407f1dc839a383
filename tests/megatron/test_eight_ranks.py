"""Layouts for eight ranks, which this machine cannot start: each rank's place and the size of its job, over torch's backend `fake`.

One process is each of the ranks in turn, and builds the real job on the CPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from kit.megatron.config import ModelConfig, model_bytes

RANKS = 8
BUILD = """
import json, sys
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from kit.megatron import model
from kit.megatron.config import ModelConfig
from megatron.core import parallel_state as state

layouts = json.loads(sys.argv[1])
for sizes in layouts:
    config = ModelConfig(gloo_groups=False, **sizes)
    ranks = []
    for rank in range(8):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
        job = model.build(config)
        parameters = [one for chunk in job.chunks for one in chunk.parameters()]
        groups = {
            "tp": state.get_tensor_model_parallel_group(),
            "pp": state.get_pipeline_model_parallel_group(),
            "dp": state.get_data_parallel_group(),
        }
        ranks.append({
            "stage": state.get_pipeline_model_parallel_rank(),
            "parameters": sum(one.numel() for one in parameters),
            "params": sum(one.numel() * one.element_size() for one in parameters),
            "groups": {name: dist.get_process_group_ranks(group) for name, group in groups.items()},
        })
        state.destroy_model_parallel()
        dist.destroy_process_group()
    print(json.dumps(ranks))
"""
LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "pp": 2},
    {"tp": 2, "pp": 4, "dtype": "bfloat16"},
    {"tp": 2, "pp": 2, "vpp": 2},
    {"pp": 2, "ep": 2, "experts": 4},
]


@pytest.mark.slow
def test_eight_ranks_have_their_places_and_the_sizes_that_a_config_promises() -> None:
    command = [sys.executable, "-W", "ignore", "-c", BUILD, json.dumps(LAYOUTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    for sizes, line in zip(LAYOUTS, done.stdout.splitlines()[-len(LAYOUTS) :], strict=True):
        ranks, config = json.loads(line), ModelConfig(**sizes)
        for rank, built in enumerate(ranks):
            promised = model_bytes(config, ranks=RANKS, stage=built["stage"])
            assert {name: built[name] for name in ("parameters", "params")} == {
                name: promised[name] for name in ("parameters", "params")
            }
            assert built["groups"] == placed(rank, config)


def placed(rank: int, config: ModelConfig) -> dict[str, list[int]]:
    """Megatron's default order, counted by hand: tensor parallel ranks are neighbours, then data parallel, then the stages."""
    dp = RANKS // (config.tp * config.pp)
    tensor, replica, stage = rank % config.tp, rank // config.tp % dp, rank // (config.tp * dp)
    number = [[[t + config.tp * (d + dp * p) for t in range(config.tp)] for d in range(dp)] for p in range(config.pp)]
    return {
        "tp": number[stage][replica],
        "pp": [number[p][replica][tensor] for p in range(config.pp)],
        "dp": [number[stage][d][tensor] for d in range(dp)],
    }
