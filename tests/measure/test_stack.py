"""What is found in a training environment."""

from __future__ import annotations

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
