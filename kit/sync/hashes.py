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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from kit.errors import BadInput
from kit.measure.host import copy_threads
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
    flat = _flat(tensor)
    header = f"{flat.nbytes} {flat.dtype} {tuple(flat.shape)}\n".encode()
    hashed = _ALGORITHMS[algorithm](header)
    hashed.update(_bytes_at(flat.data_ptr(), flat.nbytes))
    return str(hashed.hexdigest())


def differing_digests(named: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Digests by name; of a name with several unlike tensors, such as a head apart from the embedding, all of them."""
    table: dict[str, str] = {}
    for name, digest in named:
        if digest not in table.setdefault(name, digest):
            table[name] += f" {digest}"
    return table


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values as contiguous bytes on the host; not copied if they are that already."""
    if tensor.numel() and not (tensor.untyped_storage().nbytes() and tensor.data_ptr()):
        raise BadInput(
            f"cannot hash a tensor {tuple(tensor.shape)} without bytes: it was offloaded, or it only wraps other tensors"
        )
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    # The bytes in memory of a lazily conjugated or negated tensor are not its values.
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def _bytes_at(address: int, size: int) -> Any:
    return (ctypes.c_ubyte * size).from_address(address) if size else b""


_ALGORITHMS: dict[str, Callable[[bytes], Any]] = {"xxh3": xxhash.xxh3_128} if xxhash else {}
_ALGORITHMS["sha256"] = hashlib.sha256


class Digests:
    """Digests of live tensors on the sender and of received bytes on the receiver: `add` or `add_packed` for each bucket, then `table()`.
    They are computed on a separate thread where this rank has a core for it, else at once, while the bytes are in the processor's cache.

    Each piece of a tensor in a bucket has one digest, of its bytes: both ends have the same layout, which says dtype and shape. With a
    share below 1 only some tensors are hashed, different ones per version; both ends select the same ones by version and name.
    """

    def __init__(self, layout: Layout, version: int, *, algorithm: str, share: float = 1.0) -> None:
        if algorithm not in (NONE, *algorithms()):
            raise BadInput(f"verify={algorithm} is not available on this rank: use {', '.join((NONE, *algorithms()))}")
        self._layout = layout
        self._hash = _ALGORITHMS.get(algorithm)
        self._wanted = {
            spec.name
            for spec in layout.specs
            if algorithm != NONE and zlib.crc32(f"{version} {spec.name}".encode()) < share * 2**32
        }
        self._pool = ThreadPoolExecutor(1, "kit-digests") if copy_threads() > 1 else None
        self._made: dict[int, Future[list[str]]] = {}

    @property
    def count(self) -> int:
        return len(self._wanted)

    def add(self, index: int, pieces: Sequence[BucketView]) -> None:
        """Hash what a bucket is packed from; its bytes must not change until `table` or `wait`."""
        self._start(index, lambda: self._of_pieces(pieces))

    def add_packed(self, index: int, buffer: torch.Tensor) -> None:
        """The same for a bucket's bytes."""
        self._start(index, lambda: self._of_bytes(index, buffer))

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
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _start(self, index: int, work: Callable[[], list[str]]) -> None:
        if not self._wanted:
            return
        if self._pool is not None:
            self._made[index] = self._pool.submit(work)
            return
        made = self._made[index] = Future[list[str]]()
        try:
            made.set_result(work())
        except BadInput as error:
            made.set_exception(error)

    def _of_pieces(self, pieces: Sequence[BucketView]) -> list[str]:
        flat = [_flat(piece.tensor) for piece in pieces if piece.spec.name in self._wanted]
        return [self._digest(tensor.data_ptr(), tensor.nbytes) for tensor in flat]

    def _of_bytes(self, index: int, buffer: torch.Tensor) -> list[str]:
        specs, host = self._layout.specs, buffer.cpu()
        base = host.data_ptr()
        return [
            self._digest(base + offset, size)
            for number, _, size, offset in self._layout.buckets[index]
            if specs[number].name in self._wanted
        ]

    def _digest(self, address: int, size: int) -> str:
        assert self._hash is not None
        return str(self._hash(_bytes_at(address, size)).hexdigest())
