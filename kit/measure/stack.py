"""What a training environment has that matters when a job is released: found by looking, imported only where nothing else tells.

Runs in the ranks' interpreter. A package that is there says what could be in use, not that a job uses it.
"""

from __future__ import annotations

import dataclasses
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NamedTuple


class Finding(NamedTuple):
    """Something that is there (`what`), or is not, and what it means for a release."""

    name: str
    what: str | None
    means: str


def findings() -> list[Finding]:
    """Transformer Engine, Megatron's optimizer and graph options, and libraries that move memory by themselves."""
    optimizer = megatron_fields("megatron.core.optimizer", "OptimizerConfig")
    model = megatron_fields("megatron.core.transformer", "TransformerConfig")
    return [
        Finding(
            "Transformer Engine",
            installed("transformer-engine", "transformer_engine"),
            "its workspaces and FP8 buffers belong to no tensor of the job: a release leaves them on the GPU",
        ),
        Finding(
            "precision-aware optimizer",
            option(optimizer, "use_precision_aware_optimizer"),
            "where a job uses it, Transformer Engine's optimizer holds state of its own types: hash it before and after",
        ),
        Finding(
            "CPU-offloaded optimizer",
            option(optimizer, "optimizer_cpu_offload"),
            "where a job uses it, its state is on the host already: releasing the optimizer gives back nothing of it",
        ),
        Finding(
            "CUDA graphs",
            option(model, "cuda_graph_impl", "enable_cuda_graph"),
            "where a job captures them, they hold addresses and communicators: capture anew after a reload",
        ),
        Finding(
            "torch_memory_saver",
            installed("torch-memory-saver", "torch_memory_saver"),
            "it gives pages back and keeps addresses: another way out and back for tensors, none for communicators",
        ),
    ]


def installed(package: str, module: str) -> str | None:
    """A package's version; None where it is not there."""
    if find_spec(module) is None:
        return None
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"


def megatron_fields(module: str, name: str) -> set[str]:
    """The fields of one of Megatron's configs; none where there is no Megatron, or it does not load."""
    try:
        return {field.name for field in dataclasses.fields(getattr(import_module(module), name))}
    except Exception:  # noqa: BLE001 - whatever it raises, doctor says elsewhere why Megatron does not load
        return set()


def option(fields: set[str], *names: str) -> str | None:
    """An option that this Megatron knows, under the first of its names."""
    found = next((name for name in names if name in fields), None)
    return found and f"Megatron knows {found}"
