"""What is found in a training environment."""

from __future__ import annotations

import pytest

from kit.measure import stack


def test_megatrons_options_are_read_from_megatron():
    found = {one.name: one.what for one in stack.findings()}
    assert found["CPU-offloaded optimizer"] == "Megatron knows optimizer_cpu_offload"
    assert found["precision-aware optimizer"] == "Megatron knows use_precision_aware_optimizer"
    assert found["CUDA graphs"] == "Megatron knows cuda_graph_impl"
    assert stack.megatron_fields("megatron.core.optimizer", "NoSuchConfig") == set()
    assert stack.option(set(), "anything") is None
    assert stack.installed("torch", "torch") == __import__("importlib.metadata").metadata.version("torch")
    assert stack.installed("no-such-package", "no_such_module") is None


# As torch 2.13's wheels for CUDA 13 list them.
WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize(
    ("built", "gpus", "said"),
    [
        (WHEEL, [(9, 0), (8, 9), (10, 3), (12, 1)], None),
        (WHEEL, [(13, 0)], None),  # from PTX
        (WHEEL, [(9, 0), (7, 0)], f"GPU 1 is sm_70; built for {' '.join(WHEEL)}"),
        (["sm_80", "sm_90a"], [(8, 0), (9, 0), (10, 0)], "GPU 2 is sm_100; built for sm_80 sm_90a"),
        (["sm_86"], [(8, 0)], "GPU 0 is sm_80; built for sm_86"),
        ([], [(9, 0)], None),
        (WHEEL, [], None),
    ],
)
def test_a_gpu_for_which_torch_was_not_built_is_found(built, gpus, said):
    assert stack.without_kernels(built, gpus) == said
