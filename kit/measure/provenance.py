"""Where a number comes from: one JSON-able dict of versions, machine, limits, GPUs, commit and settings.

Nothing here initialises CUDA: GPUs are read through `nvidia-smi`, and torch is asked only where the process has
loaded it. A value that could not be read is None, with the reason under `why`. User names, paths and secrets are left
out; the host's name is included.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from kit import machine, nccl
from kit.results.records import utc
from kit.target import kit_version

_ROOT = Path(__file__).resolve().parents[2]
_PREFIXES = ("NCCL_", "TORCH_", "MASTER_", "KIT_")
_NAMES = (
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
_SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
# A GPU's UUID is no secret: its pieces are shorter than any key.
_SECRET_VALUE = re.compile(r"[A-Za-z0-9+=]{32,}|\b(?:hf_|ghp_|sk-|nvapi-|AKIA)[\w-]{8,}|(?<=//)[^/@\s]+(?=@)")
_PATH = re.compile(r"file://\S*|~[\w.-]*(?:/[^\s,;:]*)?|(?<![\w./])/(?!/)[^\s,;:]*")
_GPU_FIELDS = {
    "name": "name",
    "uuid": "uuid",
    "memory_mib": "memory.total",
    "memory_free_mib": "memory.free",
    "pcie_gen": "pcie.link.gen.current",
    "pcie_gen_max": "pcie.link.gen.max",
    "pcie_width": "pcie.link.width.current",
    "pcie_width_max": "pcie.link.width.max",
    "driver": "driver_version",
}


def provenance() -> dict[str, Any]:
    """Read everything again. Takes up to a second where there is a GPU driver, so call it once per run, on one rank."""
    import platform

    return {
        "time": utc(),
        "kit": kit_version(),
        "git": git_state(_ROOT),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "kernel": platform.release(),
        "host": platform.node(),
        "versions": {name: _version(name) for name in ("torch", "megatron-core", "numpy")},
        "cuda": cuda_state(),
        "gpu": gpu_state(),
        "cpu": {
            "model": machine.cpu_model(),
            "cores": os.cpu_count(),
            "affinity": len(os.sched_getaffinity(0)),  # of this process
            "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "cgroup": machine.cgroup_limits(),
        "settings": settings(os.environ),
    }


def _version(name: str) -> str | None:
    loaded = sys.modules.get(name)
    if loaded is not None:
        return str(loaded.__version__)  # includes the build ("+cu130"), which metadata may lack
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cuda_state() -> dict[str, Any]:
    """CUDA and NCCL of this process: the library that was loaded, not the one torch was built with."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {"cuda": None, "nccl": None, "why": "torch is not loaded in this process"}
    if torch.version.cuda is None:
        return {"cuda": None, "nccl": None, "why": "this torch is built without CUDA"}
    if not torch.distributed.is_nccl_available():
        return {"cuda": torch.version.cuda, "nccl": None, "why": "this torch is built without NCCL"}
    return {"cuda": torch.version.cuda, "nccl": nccl.written(nccl.running()), "why": None}


def gpu_state() -> dict[str, Any]:
    """Driver and all GPUs of the box. An idle link drops to a lower PCIe generation; `pcie_gen_max` is the highest it can reach."""
    rows, why = machine.query_gpus(*_GPU_FIELDS.values())
    if why is not None:
        return {"driver": None, "gpus": [], "why": _public(why)}
    gpus = [dict(zip(_GPU_FIELDS, map(_cell, row), strict=True)) for row in rows]
    drivers = {one.pop("driver") for one in gpus}
    return {"driver": drivers.pop() if drivers else None, "gpus": gpus, "why": None}


def _cell(text: str) -> int | str | None:
    if text.startswith("["):  # "[N/A]", "[Not Supported]"
        return None
    return int(text) if text.isdigit() else text


def git_state(root: Path) -> dict[str, Any]:
    """Commit of the kit's own checkout, and whether any file differs from it (ignored files aside)."""
    nothing = {"commit": None, "dirty": None}
    top, why = machine.output("git", "-C", str(root), "rev-parse", "--show-toplevel", "HEAD")
    if top is None:
        return {**nothing, "why": why and _public(why)}
    folder, commit = top.splitlines()
    if Path(folder).resolve() != root:  # installed inside somebody else's repository
        return {**nothing, "why": "the kit is not a checkout of its own"}
    changed, why = machine.output("git", "--no-optional-locks", "-C", str(root), "status", "--porcelain")
    return {"commit": commit, "dirty": None if changed is None else bool(changed), "why": why and _public(why)}


def settings(environ: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """Pick the variables that change how a run behaves; secret names are dropped, secret values and paths hidden."""
    chosen = (name for name in sorted(environ) if name.startswith(_PREFIXES) or name in _NAMES)
    return {name: _public(environ[name]) for name in chosen if not _SECRET_NAME.search(name)}


def _public(value: str) -> str:
    return _SECRET_VALUE.sub("<hidden>", _PATH.sub("<path>", value))


# -- parts of a training environment that matter for a release; they are imported only where nothing else answers --------------------


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
    return None if find_spec(module) is None else _version(package) or "of unknown version"


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
