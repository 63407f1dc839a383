"""A forward of the kit's model on fake tensors of a device `cuda`: whatever stays on the CPU there is mixed with them, and raises.

The stand-in for "cuda" hides such mixtures on a box without a GPU. Limits: no experts, which need shapes that fake tensors lack, and no
backward, which aborts in a torch that was built without CUDA.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Without CUDA in torch, indexing, `contiguous` and numbers as devices are refused for fake tensors as well, so they are done another way.
FORWARD = """
import contextlib, sys, torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves, tree_map_only

def devices(values):
    return {tensor.device for tensor in tree_leaves(values) if isinstance(tensor, torch.Tensor) and tensor.dim()}

class OnCuda(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in {torch.Tensor.__getitem__, torch.Tensor.__setitem__}:
            assert len(devices(args)) <= 1, f"mixed devices: {devices(args)}"
            if func is torch.Tensor.__setitem__:
                return None
            tensor, index = tree_map_only(torch.Tensor, lambda one: torch.empty(one.shape, dtype=one.dtype), args)
            return torch.empty(tensor[index].shape, dtype=args[0].dtype, device=args[0].device)
        if func is torch.Tensor.contiguous:
            return torch.clone(args[0], memory_format=torch.contiguous_format)
        if type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device("cuda", kwargs["device"])
        return func(*args, **kwargs)

def moved(module, change, recurse=True):
    made = {}
    for part in module.modules():
        for kind in (part._parameters, part._buffers):
            for name, old in kind.items():
                if old is not None and id(old) not in made:
                    new = change(old.detach())
                    new = made[id(old)] = torch.nn.Parameter(new) if kind is part._parameters else new
                    new.__dict__.update({key: value for key, value in vars(old).items() if key not in vars(new)})
                kind[name] = None if old is None else made[id(old)]
    return module

def give(value):
    return lambda *_, **__: value  # a function of its own for every name, as torch's compiler wants

cuda = torch.cuda
for owner, name, value in (
    (cuda, "is_available", True), (cuda, "current_device", 0), (cuda, "device_count", 1), (cuda, "synchronize", None),
    (cuda, "_lazy_init", None), (cuda, "_lazy_call", None), (cuda, "manual_seed", None), (cuda, "set_rng_state", None),
    (cuda, "get_rng_state", torch.zeros(16, dtype=torch.uint8)), (cuda.random, "get_rng_state", torch.zeros(16, dtype=torch.uint8)),
):
    setattr(owner, name, give(value))
torch.nn.Module._apply = moved
from kit.megatron import model
from kit.megatron.config import ModelConfig
from megatron.core.tensor_parallel import random
random._set_cuda_rng_state = lambda *_, **__: None
random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
config = ModelConfig(gloo_groups=False, **eval(sys.argv[1]))
with FakeTensorMode(allow_non_fake_inputs=True), OnCuda(), torch.no_grad():
    device = model.initialise(config)
    network = model.network(config, device)
    if sys.argv[2] == "wrong":
        network.embedding.word_embeddings.weight = torch.nn.Parameter(torch.empty(1, 1))
    batch = next(model._batches(config, 0, device))
    out = network(batch["tokens"], batch["positions"], None, labels=batch["labels"])
print(out.device, sorted(map(str, {one.device for one in network.parameters()})))
"""


def forward(settings: dict[str, object], what: str = "right") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORWARD, str(settings), what],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    )


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"tp": 2}, {"dtype": "bfloat16"}], ids=["tp", "bfloat16"])
def test_a_forward_mixes_no_devices(settings: dict[str, object]) -> None:
    done = forward(settings)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "cuda:0 ['cuda:0']"


@pytest.mark.slow
def test_a_weight_on_the_cpu_is_noticed() -> None:
    done = forward({"tp": 2}, "wrong")
    assert done.returncode
    assert "mixed devices" in done.stderr
