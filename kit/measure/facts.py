"""What the Python that runs this has for ranks, and what it can do: packages that import, code for this box's GPUs, parts of the
environment that matter for a release. `kit doctor` asks in a separate process, a preflight asks on its ranks.

Nothing here starts a kernel. A question about a GPU starts CUDA in this process.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from kit import machine, nccl
from kit.measure.recorder import version_of

LAUNCH_BLOCKING = "CUDA_LAUNCH_BLOCKING"


def imported(module: str, package: str) -> tuple[str | None, str | None]:
    """Import a module. Returns the version of its package, or None and why the import failed."""
    try:
        import_module(module)
        return version(package), None
    except Exception as error:  # noqa: BLE001 - a library that was built for another box may raise anything
        return None, f"{type(error).__name__}: {error}"


def gpu_code(*gpus: int) -> list[dict[str, Any]]:
    """For each kind of GPU among these numbers (default: all that this process sees): which code torch and NCCL have for it."""
    import torch

    built_for, running = torch.cuda.get_arch_list(), nccl.running()
    kinds = {torch.cuda.get_device_capability(gpu) for gpu in gpus or range(torch.cuda.device_count())}
    return [
        {
            "gpu": "sm_{}{}".format(*kind),
            "built_for": built_for,
            "torch": machine.runs_on_gpu(built_for, kind),
            "nccl_why": nccl.no_code(running, torch.version.cuda or "", kind),
        }
        for kind in sorted(kinds)
    ]


def code_in_words(code: Mapping[str, Any]) -> str:
    has = "has code" if code["torch"] else "has no code"
    kernels = code["nccl_why"] or "NCCL has kernels"
    return f"{code['gpu']}: torch {has} (built for {' '.join(code['built_for'])}); {kernels}"


def stack_findings() -> list[dict[str, str | None]]:
    """Transformer Engine, Megatron's optimizer and graph options, and libraries that move memory by themselves: which of them exist here
    (`what`), and what that means for a release."""
    optimizer = megatron_fields("megatron.core.optimizer", "OptimizerConfig")
    model = megatron_fields("megatron.core.transformer", "TransformerConfig")
    rows = (
        (
            "Transformer Engine",
            installed("transformer-engine", "transformer_engine"),
            "its workspaces and FP8 buffers belong to no tensor of the job: a release leaves them on the GPU",
        ),
        (
            "precision-aware optimizer",
            known_option(optimizer, "use_precision_aware_optimizer"),
            "where a job uses it, Transformer Engine's optimizer holds state of special types: hash it before and after",
        ),
        (
            "CPU-offloaded optimizer",
            known_option(optimizer, "optimizer_cpu_offload"),
            "where a job uses it, its state is on the host already: releasing the optimizer gives back nothing of it",
        ),
        (
            "CUDA graphs",
            known_option(model, "cuda_graph_impl", "enable_cuda_graph"),
            "where a job captures them, they hold addresses and communicators: capture them again after a reload",
        ),
        (
            "torch_memory_saver",
            installed("torch-memory-saver", "torch_memory_saver"),
            "it gives pages back and keeps addresses: another way out and back for tensors, none for communicators",
        ),
        (
            LAUNCH_BLOCKING,
            "set to 1" if os.environ.get(LAUNCH_BLOCKING) == "1" else None,
            "ranks wait where they launch a kernel: one that waits for others looks busy, so an error may blame the wrong rank",
        ),
    )
    return [dict(zip(("name", "what", "means"), row, strict=True)) for row in rows]


def installed(package: str, module: str) -> str | None:
    return None if find_spec(module) is None else version_of(package) or "of unknown version"


def megatron_fields(module: str, name: str) -> set[str]:
    """The fields of one of Megatron's configs; none where there is no Megatron, or it does not load."""
    try:
        return {field.name for field in dataclasses.fields(getattr(import_module(module), name))}
    except Exception:  # noqa: BLE001 - whatever it raises, doctor says elsewhere why Megatron does not load
        return set()


def known_option(fields: set[str], *names: str) -> str | None:
    """The first of these options that this Megatron has."""
    name = next((name for name in names if name in fields), None)
    return name and f"Megatron knows {name}"
