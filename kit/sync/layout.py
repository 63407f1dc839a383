"""The layout of buckets, on which both ends agree: which bytes of which tensor are in which bucket.

It depends only on the specs of the tensors, and is sent as JSON. Tensors are in order, each at a 512-byte boundary of its bucket. A tensor
larger than a bucket is refused, or split into pieces over several.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import torch

from kit.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ALIGN = 512
_PAGE = 4096
_MIB = 2**20

Key = tuple[str, int]  # name and shard


class Spec(NamedTuple):
    """One tensor, or one shard of it. A whole tensor is shard 0."""

    name: str
    shard: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def key(self) -> Key:
        return self.name, self.shard

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} (shard {self.shard})"


class Piece(NamedTuple):
    """`size` bytes of tensor number `spec`, starting at its byte `start`, at `offset` in a bucket."""

    spec: int
    start: int
    size: int
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The place of every byte of every tensor. Made by `lay_out`."""

    specs: tuple[Spec, ...]
    bucket_bytes: int
    buckets: tuple[tuple[Piece, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The used bytes of each bucket."""
        return tuple(max(piece.offset + piece.size for piece in bucket) for bucket in self.buckets)

    @property
    def pieces(self) -> tuple[tuple[int, ...], ...]:
        """The bytes of each piece in each bucket."""
        return tuple(tuple(piece.size for piece in bucket) for bucket in self.buckets)

    @property
    def total(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.size for spec in self.specs)

    def holding(self, names: Iterable[str]) -> set[int]:
        """The buckets with any part of these tensors, of any shard; an unknown name is refused."""
        wanted = set(names)
        unknown = wanted - {spec.name for spec in self.specs}
        if unknown:
            more = f", and {len(unknown) - 1} more are unknown" if len(unknown) > 1 else ""
            raise BadInput(f"the layout has no tensor named {min(unknown)}{more}")
        return {
            index
            for index, bucket in enumerate(self.buckets)
            if any(self.specs[piece.spec].name in wanted for piece in bucket)
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "specs": [[name, shard, dtype_name(dtype), list(shape)] for name, shard, dtype, shape in self.specs],
            "bucket_bytes": self.bucket_bytes,
            "buckets": [[list(piece) for piece in bucket] for bucket in self.buckets],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read the result of `to_json`; a layout that does not hold every byte exactly once is refused."""
        layout = cls(
            specs=tuple(Spec(name, shard, _dtype(dtype), tuple(shape)) for name, shard, dtype, shape in data["specs"]),
            bucket_bytes=data["bucket_bytes"],
            buckets=tuple(tuple(Piece(*piece) for piece in bucket) for bucket in data["buckets"]),
        )
        layout.check()
        return layout

    def check(self) -> None:
        """Refuse pieces that are misaligned, overlap, exceed their bucket, or omit or repeat bytes of a tensor."""
        _refuse_twice(self.specs)
        reached = [0] * len(self.specs)
        for index, bucket in enumerate(self.buckets):
            end = 0
            for piece in bucket:
                spec = self.specs[piece.spec]
                if piece.offset % ALIGN:
                    raise BadInput(f"bucket {index}: {spec} lies at {piece.offset}, which is not a multiple of {ALIGN}")
                if piece.offset < end or piece.offset + piece.size > self.bucket_bytes:
                    raise BadInput(
                        f"bucket {index}: {spec} lies at {piece.offset} to {piece.offset + piece.size}; only {end} "
                        f"to {self.bucket_bytes} is free"
                    )
                if piece.start != reached[piece.spec]:
                    raise BadInput(f"bucket {index}: {spec} continues at byte {piece.start}, not {reached[piece.spec]}")
                end = piece.offset + piece.size
                reached[piece.spec] += piece.size
        short = [str(spec) for spec, got in zip(self.specs, reached, strict=True) if got != spec.size]
        placed = {piece.spec for bucket in self.buckets for piece in bucket}
        short += [str(spec) for number, spec in enumerate(self.specs) if not spec.size and number not in placed]
        if short:
            raise BadInput(f"the layout does not hold all bytes of {', '.join(short)}")


def specs_of(tensors: Mapping[Key, torch.Tensor]) -> list[Spec]:
    """The specs, in the order of the mapping."""
    return [Spec(name, shard, t.dtype, tuple(t.shape)) for (name, shard), t in tensors.items()]


def lay_out(specs: Sequence[Spec], bucket_bytes: int, *, oversize: Literal["refuse", "split"] = "refuse") -> Layout:
    """Fill one bucket after another. A tensor that does not fit into the rest starts a new bucket; a split one uses the rest."""
    if bucket_bytes < ALIGN or bucket_bytes % ALIGN:
        raise BadInput(f"bucket_bytes={bucket_bytes} must be a multiple of {ALIGN}")
    _refuse_twice(specs)
    buckets: list[list[Piece]] = []
    end = bucket_bytes  # of the filled part; there is no bucket yet
    for number, spec in enumerate(specs):
        if spec.size > bucket_bytes and oversize == "refuse":
            raise BadInput(
                f"{spec} has {spec.size} bytes and a bucket {bucket_bytes}: use larger buckets, or oversize='split'"
            )
        if end + spec.size > bucket_bytes >= spec.size or not buckets:
            buckets.append([])
            end = 0
        start = 0
        while True:
            if end == bucket_bytes and spec.size:
                buckets.append([])
                end = 0
            size = min(spec.size - start, bucket_bytes - end)
            buckets[-1].append(Piece(number, start, size, end))
            end += -(-size // ALIGN) * ALIGN
            start += size
            if start == spec.size:
                break
    return Layout(specs=tuple(specs), bucket_bytes=bucket_bytes, buckets=tuple(map(tuple, buckets)))


def automatic(specs: Sequence[Spec], *, oversize: Literal["refuse", "split"] = "refuse") -> int:
    """A bucket size from the sizes only, so that every rank computes the same.

    It is 1/16 of all bytes, so that packing, sending and applying overlap, between 1 and 64 MiB: smaller buckets cost messages, larger
    ones only memory. If the median tensor is larger than half of that, packing gains nothing, and a bucket is one such tensor, up to
    64 MiB. There are at most about 256 buckets. If tensors are not split, the largest must fit.
    """
    sizes = [spec.size for spec in specs] or [0]
    total, median = sum(sizes), int(statistics.median(sizes))
    size = min(max(total // 16, _MIB), 64 * _MIB)
    if median > size // 2:
        size = min(max(median, _MIB), 64 * _MIB)
    size = max(size, total // 256, max(sizes) if oversize == "refuse" else 0)
    return -(-size // _PAGE) * _PAGE


def _refuse_twice(specs: Iterable[Spec]) -> None:
    seen: set[Key] = set()
    for spec in specs:
        if spec.key in seen:
            raise BadInput(f"{spec} appears twice")
        seen.add(spec.key)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise BadInput(f"{name!r} is not a dtype of this torch")
    return dtype
