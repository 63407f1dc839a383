"""A lab's own view of a model on either end, tensor by tensor: what training changed, what a sync wrote, and what no sync may change.

A tensor has the name that its module gives it, with layers numbered over all pipeline stages, so both ends use the same names. Nothing of
the code under test takes part: neither its names nor the way it cuts and joins tensors. A version must bring parameters and persistent
buffers. All other tensors of a module are constants: buffers that are not persistent, and plain attributes such as the table of rotary
frequencies. Your own receiving side may declare what it derives, which changes with a version, and parameters that are frozen: constants.

Limits: tensors that no module holds are not seen; a constant that a module makes during a forward is not known.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

LAYER = re.compile(r"(.*\blayers\.)(\d+)")
# A head that is not the embedding itself has its own copy.
TIED = {
    "output_layer.weight": "embedding.word_embeddings.weight",
    "lm_head.weight": "model.embed_tokens.weight",
}
FIRST = 3  # tensors that a sentence names
Named = Iterator[tuple[str, torch.Tensor]]


def sha256(tensor: torch.Tensor) -> str:
    """A lab's own hash of dtype, shape and all bytes. It reads a copy, because numpy would mark the storage as fixed in size."""
    flat = tensor.detach().to("cpu", copy=True).contiguous()
    hashed = hashlib.sha256(f"{flat.dtype} {tuple(flat.shape)}\n".encode())
    hashed.update(flat.view(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


class Holder(Protocol):
    """What holds a model's tensors. `versioned` gives those that a version must bring, which `poison` fills; `constants` all others."""

    def versioned(self) -> Named: ...
    def constants(self) -> Named: ...
    def poison(self) -> None: ...


class Contents:
    """The tensors of a model on this rank, and what they held at the last look."""

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        self.seen: dict[str, str] = {}
        self.constant: dict[str, str] = {}

    def changed(self) -> set[str]:
        """The names of the tensors that have other bytes than at the last call. The first call returns all of them."""
        before, self.seen = self.seen, {name: sha256(tensor) for name, tensor in self.holder.versioned()}
        return {name for name, digest in self.seen.items() if digest != before.get(name)}

    def disturbed(self) -> list[str]:
        """The names of the constants that have other bytes than at the first call."""
        digests = {name: sha256(tensor) for name, tensor in self.holder.constants()}
        self.constant = self.constant or digests
        return sorted(name for name in {*self.constant, *digests} if self.constant.get(name) != digests.get(name))

    def unwritten(self) -> dict[str, int]:
        """The number of elements that `poison` left in each tensor, where there are any."""
        left = {name: poisoned(tensor) for name, tensor in self.holder.versioned()}
        return {name: count for name, count in sorted(left.items()) if count}


class ModuleTensors:
    """The tensors of modules in this process."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        self.chunks = chunks

    def versioned(self) -> Named:
        return versioned(self.chunks)

    def constants(self) -> Named:
        return constants(self.chunks)

    def poison(self) -> None:
        """Fill every tensor that a version must bring with a value that no version has."""
        with torch.no_grad():
            for _, tensor in self.versioned():
                tensor.detach().fill_(poison_of(tensor.dtype))


def is_declared(name: str, names: Iterable[str]) -> bool:
    """Whether a tensor is in a list of whole names, their beginnings, or last parts."""
    listed = tuple(names)
    return name.startswith(listed) or name.rpartition(".")[2] in listed


def versioned(chunks: Sequence[Any]) -> Named:
    """Parameters and persistent buffers."""
    for where, module in modules(chunks):
        persistent = module._buffers.keys() - module._non_persistent_buffers_set
        for name, tensor in {**module._parameters, **{key: module._buffers[key] for key in persistent}}.items():
            if tensor is not None:
                yield TIED.get(where + name, where + name), tensor


def constants(chunks: Sequence[Any]) -> Named:
    """All other tensors that modules hold."""
    for where, module in modules(chunks):
        passing = {key: module._buffers[key] for key in module._non_persistent_buffers_set}
        for name, value in {**vars(module), **passing}.items():
            if isinstance(value, torch.Tensor):
                yield where + name, value


def modules(chunks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Every module with the beginning of its tensors' names."""
    for chunk in chunks:
        own = dict(chunk.named_modules())
        layers = {path: module for path, module in own.items() if LAYER.fullmatch(path)}
        numbers = {path: layer.layer_number - 1 for path, layer in layers.items() if hasattr(layer, "layer_number")}
        for path, module in own.items():
            yield numbered(f"{path}." if path else "", numbers), module


def numbered(path: str, numbers: Mapping[str, int]) -> str:
    """The path without wrappers, and with the number of its layer in the whole model."""
    if match := LAYER.match(path):
        path = f"{match[1]}{numbers.get(match[0], match[2])}{path[match.end() :]}"
    while path.startswith("module."):
        path = path.removeprefix("module.")
    return path


def poison_of(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return float("nan")
    return 1 if dtype is torch.bool else torch.iinfo(dtype).min


def poisoned(tensor: torch.Tensor) -> int:
    """Elements with the poison of their type. Where a version may have that value too, all of them must have it."""
    tensor = tensor.detach()
    if tensor.dtype.is_floating_point:
        return int(tensor.isnan().sum())
    left = int((tensor == poison_of(tensor.dtype)).sum())
    return left if left == tensor.numel() else 0


def listed_names(names: Sequence[str]) -> str:
    return ", ".join(names[:FIRST]) + (f" and {len(names) - FIRST} more" if len(names) > FIRST else "")
