"""Digests of tensors: their bytes in the order of their elements, with dtype and shape; equal digests, equal tensors.

"sha256" is for proofs, "xxh3" (128 bits, where xxhash is installed) for the hot path, "mix128" for ranks without xxhash: with nothing
but numpy three times as fast as a SHA-256 that has instructions of its own. Small tensors (32 KiB) gain little by it.

mix128 reads rows of 1024 little-endian 64-bit words. A row gives two sums modulo 2**64 of words times fixed odd keys that differ
by position: one of the words as they are, one of the words with their bytes reversed, under other keys; so a difference in the
highest bits, which a product pushes out at the top, stands low in the second. BLAKE2b over all rows' sums, with length, dtype and
shape, gives the digest. Another order of words, rows or tensors changes it, as one changed word always does. Two given rows that
differ collide with a chance of at most 2**-56 over the choice of keys, 2**-126 where the lowest bit of a word and the lowest bit of
a highest byte differ. The keys are public: who wants a collision can make one. It guards against accidents, not people.

Limits: a tensor on a device, or one that is not contiguous, is copied first. The host's bytes are read where they lie, by address and not
through `Tensor.numpy`, which marks a storage as never to be resized again.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kit.errors import BadInput

try:
    import xxhash
except ModuleNotFoundError:
    xxhash = None

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Words = np.ndarray[Any, np.dtype[np.uint64]]

_ROW = 1024  # words
_BLOCK = 64  # rows that are summed in one go and stay in the cache; part of the format, as sums go in block by block
_BLOCK_BYTES = _BLOCK * _ROW * 8


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


def _mix128(header: bytes, raw: Any) -> str:
    hashed = hashlib.blake2b(header, digest_size=16)
    reversed_words = np.empty((_BLOCK, _ROW), dtype="<u8")
    for words in _blocks(np.frombuffer(raw, dtype=np.uint8)):
        scratch = reversed_words[: len(words)]
        np.copyto(scratch, words.view(">u8"))
        # einsum's loops over integers are vectorised, those of `@` and `dot` are not.
        hashed.update(np.einsum("rw,w->r", words, _KEYS[0]).tobytes())
        hashed.update(np.einsum("rw,w->r", scratch, _KEYS[1]).tobytes())
    return hashed.hexdigest()


def _blocks(raw: np.ndarray[Any, np.dtype[np.uint8]]) -> Iterator[Words]:
    """Up to _BLOCK rows at a time; the last row is filled up with zeros."""
    aligned = raw.ctypes.data % 8 == 0
    for start in range(0, len(raw), _BLOCK_BYTES):
        part = raw[start : start + _BLOCK_BYTES]
        rows = -(-len(part) // (_ROW * 8))
        if not aligned or len(part) < rows * _ROW * 8:
            padded = np.zeros(rows * _ROW * 8, dtype=np.uint8)
            padded[: len(part)] = part
            part = padded
        yield part.view("<u8").reshape(rows, _ROW)


def _keys() -> tuple[Words, Words]:
    stream = hashlib.shake_256(b"mix128 keys").digest(2 * _ROW * 8)
    words = np.frombuffer(stream, dtype="<u8") | np.uint64(1)
    return words[:_ROW], words[_ROW:]


_KEYS = _keys()
_ALGORITHMS: dict[str, Callable[[bytes, Any], str]] = {
    **({"xxh3": _xxh3} if xxhash else {}),
    "mix128": _mix128,
    "sha256": _sha256,
}
