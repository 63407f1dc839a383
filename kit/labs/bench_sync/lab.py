"""Bench sync: the speed of weight transfer from a trainer to receivers, compared with one large copy and with files.

Ratios are of times, turn by turn: 1.25 times memcpy's time is 0.8 of its speed. All ranks share this machine's cores and memory: with
fewer cores than working ranks, parallel work waits. Ranks import this module too, so it imports little.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from kit.labs.definition import BenchConfig, Definition, Option, Step, driven_parts
from kit.machine import KIB, MIB, has_gpu_driver
from kit.megatron.config import ModelConfig, model_bytes

# Ways through files, and the packages that they need.
FILES = {
    "file:safetensors": "docs.examples.weight_files:Safetensors",
    "file:dcp": "docs.examples.weight_files:Checkpoint",
}
PACKAGES = {"file:safetensors": "safetensors", "file:dcp": "torch"}
# Names of plain copies; the number of the other GPU follows `PEER`.
HOST, WITHIN, OUT, BACK, PEER = "memcpy", "within the GPU", "GPU to pinned memory", "pinned memory to GPU", "to GPU"
SYNCED, LOADED = "a sync", "the engine's own load"
IN_MEMORY = Path("/dev/shm")  # noqa: S108 - this path itself is measured
SPARE = 1.25  # a checkpoint is slightly larger than its tensors
GPUS = ("ipc", "shm", "broadcast")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Weights: a model's, or `count` tensors of `bytes` bytes. `large`: whether most bytes are in tensors of a MiB and more."""

    name: str
    large: bool = True
    model: str = ""
    count: int = 0
    bytes: int = 0

    def arguments(self) -> dict[str, Any]:
        return {"model": self.model} if self.model else {"count": self.count, "size": self.bytes}

    def size(self) -> int:
        if not self.model:
            return self.count * self.bytes
        return model_bytes(ModelConfig(size=self.model, dtype="bfloat16"), ranks=1)["params"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchSyncConfig(BenchConfig):
    QUICK: ClassVar[dict[str, Any]] = {
        "shapes": "small,large",
        "rounds": 2,
        "slow_rounds": 1,
        "buckets_mib": (4, 16, 64),
        "hash_mib": 64,
        "verify": "xxh3",
        "growth_mb": (10, 100),
        "terms_mib": (4, 16, 64),
        "stall_mib": 64,
        "delta_model": "small",
        "receivers": (1, 2),
        "engine_rounds": 3,
    }

    shapes: Annotated[str, Option("weights to send, separated by commas: model, small, large")] = "model,small,large"
    model: Annotated[Literal["tiny", "125m", "qwen2.5-0.5b"], Option("model whose shapes are sent")] = "qwen2.5-0.5b"
    small: Annotated[int, Option("number of small tensors, of 32 KiB", low=1, high=1 << 20)] = 8192
    large: Annotated[int, Option("number of large tensors, of 4 MiB", low=1, high=1 << 20)] = 64
    rounds: Annotated[int, Option("turns of each way", low=1, high=1000)] = 9
    slow_rounds: Annotated[int, Option("turns of each way through files", low=1, high=1000)] = 2
    buckets_mib: Annotated[tuple[int, ...], Option("fixed bucket sizes", unit="MiB")] = (1, 4, 8, 16, 64)
    hash_mib: Annotated[int, Option("bytes that are hashed alone", low=1, high=1 << 20, unit="MiB")] = 256
    verify: Annotated[str, Option("hash algorithms, separated by commas")] = "xxh3,sha256"
    growth_mb: Annotated[tuple[int, ...], Option("sizes of weights that grow", unit="MB")] = (10, 100, 1000, 2000)
    terms_mib: Annotated[
        tuple[int, int, int],
        Option(
            "sizes for the two terms: in tensors of 4 KiB, of 64 KiB (predicted from the others) and of 4 MiB",
            unit="MiB",
        ),
    ] = (16, 64, 256)
    stall_mib: Annotated[
        int, Option("size of weights that arrive while a replica serves", low=4, high=1 << 20, unit="MiB")
    ] = 256
    delta_model: Annotated[
        Literal["tiny", "small", "125m"], Option("model that is trained, for what changes from version to version")
    ] = "125m"
    receivers: Annotated[tuple[int, ...], Option("numbers of receivers")] = (1, 2, 4)
    receivers_mb: Annotated[int, Option("size of weights to more receivers", low=1, high=1 << 20, unit="MB")] = 100
    engine_layers: Annotated[int, Option("layers of the model in vLLM, of 58 MiB each", low=1, high=1000)] = 5
    engine_rounds: Annotated[int, Option("turns of a sync to vLLM", low=1, high=1000)] = 9


def shape_of(config: BenchSyncConfig, key: str) -> Shape:
    if key == "model":
        return Shape(name=f"{config.model} in bfloat16", model=config.model)
    if key == "small":
        return Shape(name=f"{config.small} x 32 KiB", count=config.small, bytes=32 * KIB, large=False)
    return Shape(name=f"{config.large} x 4 MiB", count=config.large, bytes=4 * MIB)


def plan(config: BenchSyncConfig) -> list[Step]:
    """GPU parts come first where there is a GPU, because GPU time is scarcest."""
    on_gpus = [f"gpus.{name}" for name in GPUS]
    kinds = ("transports", "receivers", "verified", "files")
    on_host = [f"{shape}.{kind}" for shape in config.shapes.split(",") for kind in kinds]
    on_host += ["terms", "stalls", "arena", "engine", "digests", "growth.bytes", "growth.receivers"]
    cuda = config.device == "cuda" or (config.device == "auto" and has_gpu_driver())
    on_host.append("deltas")
    return driven_parts(
        config, on_gpus + on_host if cuda else on_host + on_gpus, "kit.labs.bench_sync.parts:measure_sync"
    )


LAB = Definition(
    name="bench-sync",
    summary="measures the speed of weight transfer, compared with one large copy and with files",
    config=BenchSyncConfig,
    plan=plan,
    rules="kit.labs.bench_sync.rules:RULES",
    first=("quick", "parts", "device", "shapes"),
    tag="bench",
)


def place_for(size: int) -> Path | None:
    """A folder in memory with room for this many bytes; None if there is none, so files go to the temporary folder."""
    return IN_MEMORY if IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > SPARE * size else None
