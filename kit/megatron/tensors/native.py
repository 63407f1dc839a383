"""Megatron's own offload calls, as a comparison: what they move, what they drop, what they cost.

Parameter buffers go to pinned memory, gradient buffers are dropped (they come back as zeros), optimizer state goes
through `optimizer.offload_to_cpu`. Limits: parameters outside of DDP's buffers stay (all of them without the distributed
optimizer), and without a GPU the calls raise or do nothing, so they are refused there.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from kit.errors import BadInput
from kit.megatron.tensors.inventory import KINDS, inventory


def _buffers(chunks: list[Any]) -> list[Any]:
    return [buffer for chunk in chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]


def resident(chunks: list[Any], optimizer: Any, device: torch.device) -> dict[str, int]:
    """Bytes of the job that are on the device now, by kind."""
    items = inventory(chunks, optimizer, device)
    return {kind: sum(item.size for item in items if item.kind == kind) for kind in KINDS}


def release(chunks: list[Any], optimizer: Any, device: torch.device) -> dict[str, Any]:
    """Offload by Megatron's own means. Stats: seconds, bytes that left by kind."""
    if device.type != "cuda":
        raise BadInput("Megatron's own offload is not measured here: it pins memory, which needs a GPU")
    before, start = resident(chunks, optimizer, device), time.perf_counter()
    for buffer in _buffers(chunks):
        buffer.offload_to_cpu(move_params=True, move_grads=True)
    optimizer.offload_to_cpu()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    seconds = time.perf_counter() - start
    after = resident(chunks, optimizer, device)
    return {"seconds": seconds, "bytes": {kind: before[kind] - after[kind] for kind in KINDS}}


def restore(chunks: list[Any], optimizer: Any) -> dict[str, Any]:
    """Bring back what `release` moved. Gradients come back as zeros. Stats: seconds."""
    start = time.perf_counter()
    for buffer in _buffers(chunks):
        buffer.reload_from_cpu(move_params=True, move_grads=True)
    optimizer.restore_from_cpu()
    torch.cuda.synchronize()
    return {"seconds": time.perf_counter() - start}
