"""On a GPU labs train in PyTorch's deterministic mode, which refuses some operations. None of them is in a step of a lab's job.

The jobs run on the CPU, where nothing is refused, and their operations are written down.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

# The second list in the documentation of torch.use_deterministic_algorithms: refused on CUDA. Sums of whole numbers are exact,
# and of NLLLoss only the kernel for images asks for it (ATen/native/cuda/NLLLoss2d.cu).
REFUSED = (
    *(
        "cumsum",
        "histc",
        "put",
        "bincount",
        "median",
        "kthvalue",
        "nll_loss2d",
        "_ctc_loss",
        "embedding_bag",
        "scatter_reduce",
    ),
    *("avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "fractional_max_pool2d"),
    *("fractional_max_pool3d", "max_unpool2d", "max_unpool3d", "upsample", "reflection_pad", "grid_sampler"),
)
TRACE = """
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from kit.megatron import model
from kit.megatron.config import ModelConfig
from megatron.core import parallel_state
from kit.train.fsdp import FsdpSync
from tests.train.ranks import steps

class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        if any(tensor.is_floating_point() for tensor in tensors):
            print(func)
        return func(*args, **(kwargs or {}))

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for sizes in ({"dropout": 0.1}, {"dtype": "bfloat16"}, {"experts": 4, "aux_loss": 0.1}, {"experts": 4, "router_bias": True}):
    job = model.build(ModelConfig(**sizes))
    with Operations():
        job.step()
    parallel_state.destroy_model_parallel()
for batching in ("fixed", "packed"):
    job = FsdpSync(steps.job(batching))
    with Operations():
        job.run(steps.a_loss("tokens"), steps.mine(), steps.SHARE, steps.MBS)
"""


@pytest.mark.slow
def test_no_step_has_an_operation_that_deterministic_mode_refuses() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", TRACE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    operations = {line.split(".")[1] for line in done.stdout.splitlines() if line.startswith("aten.")}
    assert {"embedding_dense_backward", "masked_scatter", "nll_loss_forward"} <= operations  # of every kind of job
    refused = {name for name in operations for word in REFUSED if re.fullmatch(f"{word}_?(_.*)?", name)}
    assert refused == set()
