"""Digests of tensors: of their bytes in element order, their dtype and their shape. Equal digests mean equal tensors.

"sha256" is for proofs; "xxh3" (128 bits, if xxhash is installed) is 15 times as fast for large tensors and guards against accidents, not
against tampering.

Limits: a tensor on a GPU, or one that is not contiguous, is copied first. Host bytes are read in place by address, because `Tensor.numpy`
would mark the storage as fixed in size.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from kit.errors import BadInput
from kit.sync.buckets import BucketView, Layout

try:
    import xxhash
except ModuleNotFoundError:
    xxhash = None  # type: ignore[assignment]


NONE = "none"
AUTO = "auto"  # the fastest algorithm on this rank


def algorithms() -> tuple[str, ...]:
    return tuple(_ALGORITHMS)


def digest(tensor: torch.Tensor, algorithm: str) -> str:
    """Return the hexadecimal digest of bytes, dtype and shape."""
    if algorithm not in _ALGORITHMS:
        hint = "; xxhash is not installed on this rank" if algorithm == "xxh3" else ""
        raise BadInput(f"digest {algorithm!r} is not available on this rank: use {', '.join(algorithms())}{hint}")
    if tensor.numel() and not (tensor.untyped_storage().nbytes() and tensor.data_ptr()):
        raise BadInput(
            f"cannot hash a tensor {tuple(tensor.shape)} without bytes: it was offloaded, or it only wraps other tensors"
        )
    # The bytes in memory of a lazily conjugated or negated tensor are not its values.
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    header = f"{flat.nbytes} {flat.dtype} {tuple(flat.shape)}\n".encode()
    raw = (ctypes.c_ubyte * flat.nbytes).from_address(flat.data_ptr()) if flat.nbytes else b""
    hashed = _ALGORITHMS[algorithm](header)
    hashed.update(raw)
    return str(hashed.hexdigest())


_ALGORITHMS: dict[str, Callable[[bytes], Any]] = {"xxh3": xxhash.xxh3_128} if xxhash else {}
_ALGORITHMS["sha256"] = hashlib.sha256


class Digests:
    """Digests of live tensors on the sender and of received bytes on the receiver, computed on a separate thread: `add` the pieces of
    each bucket, then `table()`.

    Each piece of a tensor in a bucket has one digest. With a share below 1 only some tensors are hashed, different ones per version;
    both ends select the same ones by version and name.
    """

    def __init__(self, layout: Layout, version: int, *, algorithm: str, share: float = 1.0) -> None:
        if algorithm not in (NONE, *algorithms()):
            raise BadInput(f"verify={algorithm} is not available on this rank: use {', '.join((NONE, *algorithms()))}")
        self._algorithm = algorithm
        self._wanted = {
            spec.name
            for spec in layout.specs
            if algorithm != NONE and zlib.crc32(f"{version} {spec.name}".encode()) < share * 2**32
        }
        self._pool = ThreadPoolExecutor(1, "kit-digests")
        self._made: dict[int, Future[list[str]]] = {}

    @property
    def count(self) -> int:
        return len(self._wanted)

    def add(self, index: int, pieces: Sequence[BucketView]) -> None:
        """Start hashing a bucket; its bytes must not change until `table` or `wait`."""
        if self._wanted:
            self._made[index] = self._pool.submit(self._of, pieces)

    def wait(self, index: int) -> None:
        if index in self._made:
            self._made[index].result()

    def table(self) -> dict[str, list[str]]:
        """Return the digests of every bucket by its number, once those in progress are done."""
        return {str(index): made.result() for index, made in self._made.items()}

    def differences(self, layout: Layout, peers: dict[str, list[str]]) -> list[tuple[int, str]]:
        """Return (bucket, name) of each tensor whose digest differs between the two ends."""
        own, differing = self.table(), []
        for key in sorted({*own, *peers}, key=int):
            names = (layout.specs[piece.spec].name for piece in layout.buckets[int(key)])
            wanted = [name for name in names if name in self._wanted]
            digests = itertools.zip_longest(wanted, own.get(key, []), peers.get(key, []))
            differing += [(int(key), name) for name, ours, theirs in digests if name is not None and ours != theirs]
        return differing

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _of(self, pieces: Sequence[BucketView]) -> list[str]:
        return [digest(piece.tensor, self._algorithm) for piece in pieces if piece.spec.name in self._wanted]
