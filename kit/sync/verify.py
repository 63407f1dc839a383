"""Digests of live tensors on the sender and of received bytes on the receiver, computed on a separate thread.

Each piece of a tensor in a bucket has one digest. With a share below 1 only some tensors are hashed, other ones with every version; both
ends select the same ones by version and name.
"""

from __future__ import annotations

import time
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from kit.errors import BadInput
from kit.sync.hashes import algorithms, digest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kit.sync.buckets import View
    from kit.sync.layout import Layout

NONE = "none"


class Difference(NamedTuple):
    """A tensor whose bytes differ from what was sent."""

    bucket: int
    name: str


class Digests:
    """`add` the pieces of each bucket, then `table()`; `seconds` is the time spent hashing."""

    def __init__(self, layout: Layout, version: int, *, algorithm: str, share: float = 1.0) -> None:
        if algorithm not in (NONE, *algorithms()):
            raise BadInput(f"verify={algorithm} is not available on this rank: use {', '.join((NONE, *algorithms()))}")
        self.seconds = 0.0
        self._algorithm = algorithm
        self._wanted = {
            spec.name
            for spec in layout.specs
            if algorithm != NONE and zlib.crc32(f"{version} {spec.name}".encode()) < share * 2**32
        }
        self._all = len({spec.name for spec in layout.specs})
        self._pool = ThreadPoolExecutor(1, "kit-digests")
        self._made: dict[int, Future[list[str]]] = {}

    @property
    def said(self) -> str:
        """How many tensors were verified, in words."""
        if not self._wanted:
            return "no tensor was verified in transit"
        return f"{len(self._wanted)} of {self._all} tensors verified in transit ({self._algorithm})"

    @property
    def count(self) -> int:
        return len(self._wanted)

    def add(self, index: int, pieces: Sequence[View]) -> None:
        """Start hashing a bucket; its bytes must not change until `table` or `wait`."""
        if self._wanted:
            self._made[index] = self._pool.submit(self._of, pieces)

    def wait(self, index: int) -> None:
        """Wait until a bucket is hashed."""
        if index in self._made:
            self._made[index].result()

    def table(self) -> dict[str, list[str]]:
        """The digests of every bucket by its number; waits for those in progress."""
        return {str(index): made.result() for index, made in self._made.items()}

    def differences(self, layout: Layout, other: dict[str, list[str]]) -> list[Difference]:
        """The differences to the digests of the other end."""
        mine, found = self.table(), []
        for key in sorted({*mine, *other}, key=int):
            names = [layout.specs[piece.spec].name for piece in layout.buckets[int(key)]]
            names = [name for name in names if name in self._wanted]
            ours, theirs = mine.get(key, []), other.get(key, [])
            found += [
                Difference(int(key), name)
                for place, name in enumerate(names)
                if ours[place : place + 1] != theirs[place : place + 1]
            ]
        return found

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _of(self, pieces: Sequence[View]) -> list[str]:
        started = time.perf_counter()
        made = [digest(piece.tensor, self._algorithm) for piece in pieces if piece.spec.name in self._wanted]
        self.seconds += time.perf_counter() - started
        return made
