"""Digests of tensors: their bytes in the order of their elements, with dtype and shape; equal digests, equal tensors.

"sha256" is for proofs; "xxh3" (128 bits, where xxhash is installed) is 15 times as fast for large tensors and guards against accidents,
not against people.

Limits: a tensor on a device, or one that is not contiguous, is copied first. The host's bytes are read where they lie, by address and not
through `Tensor.numpy`, which marks a storage as never to be resized again.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import TYPE_CHECKING, Any

import torch

from kit.errors import BadInput

try:
    import xxhash
except ModuleNotFoundError:
    xxhash = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Callable


AUTO = "auto"  # the fastest that this rank has


def algorithms() -> tuple[str, ...]:
    """What there is on this rank, the fastest first."""
    return tuple(_ALGORITHMS)


def digest(tensor: torch.Tensor, algorithm: str) -> str:
    """Hexadecimal digest of bytes, dtype and shape."""
    if algorithm not in _ALGORITHMS:
        hint = "; xxhash is not installed on this rank" if algorithm == "xxh3" else ""
        raise BadInput(f"digest {algorithm!r} is not available on this rank: use {', '.join(algorithms())}{hint}")
    if tensor.numel() and not (tensor.untyped_storage().nbytes() and tensor.data_ptr()):
        raise BadInput(
            f"cannot hash a tensor {tuple(tensor.shape)} without bytes: it was offloaded, or it only wraps other tensors"
        )
    # What is conjugated or negated lazily has other bytes in memory than it stands for.
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    header = f"{flat.nbytes} {flat.dtype} {tuple(flat.shape)}\n".encode()
    raw = (ctypes.c_ubyte * flat.nbytes).from_address(flat.data_ptr()) if flat.nbytes else b""
    return _ALGORITHMS[algorithm](header, raw)


def _sha256(header: bytes, raw: Any) -> str:
    hashed = hashlib.sha256(header)
    hashed.update(raw)
    return hashed.hexdigest()


def _xxh3(header: bytes, raw: Any) -> str:
    hashed = xxhash.xxh3_128(header)
    hashed.update(raw)
    return str(hashed.hexdigest())


_ALGORITHMS: dict[str, Callable[[bytes, Any], str]] = {
    **({"xxh3": _xxh3} if xxhash else {}),
    "sha256": _sha256,
}
