"""Every tensor of a training job: what it is, and which storage it lives in; each distinct storage once.

Weights are parameters, module buffers and DDP's parameter buffers; grads are DDP's gradient buffers, main_grad and
grad; optimizer is the state of the inner optimizers and their own master parameters. A storage seen as weights is never
counted again as optimizer. Limit: scratch memory and what is on another device than the job's (Adam's step counters on
CUDA) stay where they are.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import warnings
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

KINDS = ("weights", "grads", "optimizer")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One storage: the kind and name under which it was found first."""

    name: str
    kind: str
    storage: Any
    size: int


def named_tensors(chunks: list[Any], optimizer: Any) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(kind, name, tensor) of everything, the large shared buffers first."""
    for number, chunk in enumerate(chunks):
        for place, buffer in enumerate(ddp_buffers(chunk)):
            if buffer.param_data is not None:
                yield "weights", f"chunk{number}.buffer{place}.param_data", buffer.param_data
            yield "grads", f"chunk{number}.buffer{place}.grad_data", buffer.grad_data
    for number, chunk in enumerate(chunks):
        module = getattr(chunk, "module", chunk)  # a plain module may stand in for Megatron's DDP
        for name, param in module.named_parameters():
            yield "weights", f"chunk{number}.{name}", param.data
            yield from _grads(f"chunk{number}.{name}", param)
        for name, buffer in module.named_buffers():
            yield "weights", f"chunk{number}.{name}", buffer
    for number, inner in enumerate(inner_optimizers(optimizer)):
        params = [param for group in inner.param_groups for param in group["params"]]
        for place, param in enumerate(params):
            name = f"optimizer{number}.param{place}"
            yield "optimizer", name, param.data
            yield from _grads(name, param)
            for key, value in inner.state.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    yield "optimizer", f"{name}.{key}", value


def ddp_buffers(chunk: Any) -> list[Any]:
    """Megatron's parameter and gradient buffers; none for a plain module, whose `buffers` is a method."""
    return [*chunk.buffers, *chunk.expert_parallel_buffers] if isinstance(chunk.buffers, list) else []


def _grads(name: str, param: Any) -> Iterator[tuple[str, str, torch.Tensor]]:
    for attribute in ("main_grad", "grad"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the distributed optimizer sets gradients of views, which torch finds odd
            found = getattr(param, attribute, None)
        if found is not None:
            yield "grads", f"{name}.{attribute}", found


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The torch optimizers inside Megatron's wrappers."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        return [inner for each in chained for inner in inner_optimizers(each)]
    inner = getattr(optimizer, "optimizer", optimizer)  # a plain torch optimizer is its own inner one
    return [] if inner is None else [inner]


def inventory(chunks: list[Any], optimizer: Any, device: torch.device) -> list[Item]:
    """Each distinct storage on the job's device once."""
    items: dict[int, Item] = {}
    for kind, name, tensor in named_tensors(chunks, optimizer):
        storage = tensor.untyped_storage()
        if tensor.device.type == device.type and storage.nbytes():
            items.setdefault(storage._cdata, Item(name=name, kind=kind, storage=storage, size=storage.nbytes()))
    return list(items.values())


def hashes(chunks: list[Any], optimizer: Any, kinds: Iterable[str] = KINDS) -> dict[str, str]:
    """SHA-256 of the bytes of every tensor, by "kind/name"."""
    return {f"{k}/{name}": digest(t) for k, name, t in named_tensors(chunks, optimizer) if k in kinds}


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes in the order of its elements."""
    flat = tensor.detach().cpu().contiguous()
    # Not through numpy(): that marks the storage as never to be resized again.
    raw = (ctypes.c_ubyte * flat.nbytes).from_address(flat.data_ptr()) if flat.nbytes else b""
    return hashlib.sha256(raw).hexdigest()
