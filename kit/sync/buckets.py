"""Buckets of bytes: a layout that both ends share, and tensors packed by it. Tensors are copied in, viewed in place and copied out.

The layout says which bytes of which tensor are in which bucket. It depends only on the specs of the tensors, and is sent as JSON. Tensors
are in order, each at a 512-byte boundary. A tensor larger than a bucket is refused, or split into pieces over several.

Contiguous tensors on the host are copied by memcpy without the interpreter's lock, neighbours on both sides at once.
Everything else goes through torch, in one call per bucket.

Limits: a bucket's unused bytes keep what was in them; a piece of a tensor can be applied to contiguous memory only; autograd's
version counters do not see memcpy.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, Self

import torch

from kit.errors import BadInput, KitError
from kit.measure.host import Move, copy_threads, libc, transfer
from kit.sync.words import positions_of, write_words

ALIGN = 512
_PAGE = 4096
_MIB = 2**20
PROBLEMS = 5  # tensors named in an error's text; the error has the keys of all

Key = tuple[str, int]  # name and shard
GAPS, WORDS = 1, 2  # in place of a shard: the gaps between the changed words of a full tensor, and those words


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
    """Where every byte of every tensor lies. Made by `lay_out`."""

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
        return sum(spec.size for spec in self.specs)

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
    return [Spec(name, shard, t.dtype, tuple(t.shape)) for (name, shard), t in tensors.items()]


def lay_out(specs: Sequence[Spec], bucket_bytes: int, *, oversize: Literal["refuse", "split"] = "refuse") -> Layout:
    """Fill one bucket after another. A tensor that does not fit into the rest of one starts a new bucket; a split tensor uses the rest."""
    if bucket_bytes < ALIGN or bucket_bytes % ALIGN:
        raise BadInput(f"bucket_bytes={bucket_bytes} must be a multiple of {ALIGN}")
    _refuse_twice(specs)
    buckets: list[list[Piece]] = []
    end = bucket_bytes  # of the filled part; no bucket exists yet
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
    """Choose a bucket size from tensor sizes only, so that every rank computes the same one.

    It is 1/16 of all bytes, so that packing, sending and applying overlap, but at least 1 and at most 64 MiB: smaller buckets cost
    messages, larger ones only cost memory. If the median tensor is larger than half of that, packing gains nothing, and a bucket is the
    size of that tensor, up to 64 MiB. There are at most about 256 buckets. If tensors are not split, the largest must fit.
    """
    sizes = [spec.size for spec in specs] or [0]
    total, median = sum(sizes), int(statistics.median(sizes))
    size = min(max(total // 16, _MIB), 64 * _MIB)
    if median > size // 2:
        size = min(max(median, _MIB), 64 * _MIB)
    size = max(size, total // 256, max(sizes) if oversize == "refuse" else 0)
    return -(-size // _PAGE) * _PAGE


def _refuse_twice(specs: Iterable[Spec]) -> None:
    for key, times in Counter(spec.key for spec in specs).items():
        if times > 1:
            raise BadInput(f"{key[0]} (shard {key[1]}) appears twice")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise BadInput(f"{name!r} is not a dtype of this torch")
    return dtype


# The C library copies pieces below 1 MiB through the processor's cache, whatever its threshold for bypassing it.
HOT = 2**19


class BucketView(NamedTuple):
    """A tensor in a bucket: in its own shape if it is whole, else its elements from `start` on, flattened."""

    spec: Spec
    start: int
    tensor: torch.Tensor


class Mismatch(KitError):  # noqa: N818 - it is what was found
    """The tensors do not fit the contents of `bucket` (None: of all buckets); nothing was copied. `missing` and `failed` are keys."""

    def __init__(
        self, problems: Mapping[Key, str], missing: Collection[Key], bucket: int | None, where: str = ""
    ) -> None:
        named = [f"{name} (shard {shard}) {problem}" for (name, shard), problem in problems.items()]
        more = [f"and {len(named) - PROBLEMS} more"] if len(named) > PROBLEMS else []
        super().__init__(where + "; ".join(named[:PROBLEMS] + more))
        self.bucket = bucket
        self.missing = tuple(key for key in problems if key in missing)
        self.failed = tuple(key for key in problems if key not in missing)
        self.tensors = tuple(name for name, _ in (*self.failed, *self.missing))


def bucket_views(layout: Layout, index: int, buffer: torch.Tensor) -> list[BucketView]:
    """Return the tensors and pieces of tensors in a bucket, as views of its bytes. No copy."""
    _check_buffer(layout, index, buffer)
    in_bucket = []
    for number, start, size, offset in layout.buckets[index]:
        spec = layout.specs[number]
        typed = buffer[offset : offset + size].view(spec.dtype)
        in_bucket.append(
            BucketView(spec, start // spec.dtype.itemsize, typed.view(spec.shape) if size == spec.size else typed)
        )
    return in_bucket


def live(layout: Layout, index: int, tensors: Mapping[Key, torch.Tensor]) -> list[BucketView]:
    """Return what `views` would return for a bucket packed from these live tensors. Contiguous tensors are not copied."""
    specs, bucket = layout.specs, layout.buckets[index]
    if missing := {key: "is missing here" for key in (specs[piece.spec].key for piece in bucket) if key not in tensors}:
        raise Mismatch(missing, missing, index, f"bucket {index}: ")
    in_bucket = []
    for number, start, size, _ in bucket:
        spec = specs[number]
        tensor = tensors[spec.name, spec.shard].detach()
        if size == spec.size:
            in_bucket.append(BucketView(spec, start, tensor))
            continue
        first = start // spec.dtype.itemsize
        part = tensor.reshape(-1)[first : first + size // spec.dtype.itemsize]
        in_bucket.append(BucketView(spec, first, part))
    return in_bucket


class Bound:
    """`pack` and `apply` for tensors that persist: they are looked up and checked once, and again if one has moved. Limits: a tensor that
    changes its shape in place is not noticed; the tensors copied last are kept alive until the next use."""

    def __init__(self, layout: Layout, tensors: Mapping[Key, torch.Tensor]) -> None:
        self.layout = layout
        self.tensors = tensors
        self._plans: dict[tuple[int, bool, torch.device], _Plan] = {}

    def pack(self, index: int, out: torch.Tensor, *, fresh: bool = False, hot: bool = False) -> None:
        """Copy the tensors into a bucket. `fresh`: the pages of `out` are not allocated yet. `hot`: keep the bucket in the processor's
        cache for a reader that copies it out at once."""
        plan, base = self._plan(index, out, target=False), out.data_ptr()
        places = [base + offset for offset in plan.offsets]
        if fresh and places:
            transfer(
                [Move(*move) for move in zip(places, plan.addresses, plan.sizes, strict=True)], fresh=True, threads=1
            )
        elif hot and max(plan.sizes, default=0) > HOT:
            for place, address, size in zip(places, plan.addresses, plan.sizes, strict=True):
                cuts = range(0, size, HOT)
                sizes = [min(HOT, size - at) for at in cuts]
                _copy([place + at for at in cuts], [address + at for at in cuts], sizes)
        else:
            _copy(places, plan.addresses, plan.sizes)
        self._copy_by_torch(plan, index, out, target=False)

    def apply(self, index: int, buffer: torch.Tensor) -> None:
        plan, base = self._plan(index, buffer, target=True), buffer.data_ptr()
        _copy(plan.addresses, [base + offset for offset in plan.offsets], plan.sizes)
        self._copy_by_torch(plan, index, buffer, target=True)

    def _copy_by_torch(self, plan: _Plan, index: int, buffer: torch.Tensor, *, target: bool) -> None:
        if plan.by_torch:
            packed, outside = bucket_views(self.layout, index, buffer), live(self.layout, index, self.tensors)
            into, out_of = (outside, packed) if target else (packed, outside)
            torch._foreach_copy_([into[at].tensor for at in plan.by_torch], [out_of[at].tensor for at in plan.by_torch])

    def _plan(self, index: int, buffer: torch.Tensor, *, target: bool) -> _Plan:
        _check_buffer(self.layout, index, buffer)
        key = index, target, buffer.device
        plan = self._plans.get(key)
        if plan is None or not plan.holds():
            plan = self._plans[key] = _plan(self.layout, index, self.tensors, buffer, target=target)
        return plan


class _Plan(NamedTuple):
    """How one bucket is copied: memcpy between addresses and offsets, and the tensors that torch has to copy."""

    tensors: list[torch.Tensor]
    pointers: list[int]
    storages: dict[int, torch.UntypedStorage]
    addresses: list[int]
    offsets: list[int]
    sizes: list[int]
    by_torch: list[int]  # numbers of the pieces in the bucket

    def holds(self) -> bool:
        """Whether every tensor is still at its address and has its bytes."""
        return [tensor.data_ptr() for tensor in self.tensors] == self.pointers and all(
            storage.nbytes() for storage in self.storages.values()
        )


def _plan(
    layout: Layout, index: int, tensors: Mapping[Key, torch.Tensor], buffer: torch.Tensor, *, target: bool
) -> _Plan:
    plan = _Plan([], [], {}, [], [], [], [])
    problems: dict[Key, str] = {}
    on_host = buffer.is_cpu
    end_here = end_there = -1
    # This loop runs once per tensor, thousands of times per model: rare cases are handled in separate functions.
    for place, (number, start, size, offset) in enumerate(layout.buckets[index]):
        name, shard, dtype, shape = layout.specs[number]
        tensor = tensors.get((name, shard))
        if tensor is None or tensor.dtype != dtype or tensor.shape != shape:
            problems[name, shard] = _unlike(layout.specs[number], tensor)
            continue
        if not size:
            continue
        pointer, storage = tensor.data_ptr(), tensor.untyped_storage()
        if not pointer or not storage.nbytes():  # a wrapper such as a DTensor has a size but no address
            problems[name, shard] = EMPTY
            continue
        plan.tensors.append(tensor)
        plan.pointers.append(pointer)
        plan.storages[storage.data_ptr()] = storage
        if not (on_host and tensor.is_cpu and tensor.is_contiguous()):
            if target and size != layout.specs[number].size and not tensor.is_contiguous():
                problems[name, shard] = SCATTERED
            plan.by_torch.append(place)
        elif pointer + start == end_here and offset == end_there:
            plan.sizes[-1] += size
            end_here, end_there = end_here + size, end_there + size
        else:
            plan.addresses.append(pointer + start)
            plan.offsets.append(offset)
            plan.sizes.append(size)
            end_here, end_there = pointer + start + size, offset + size
    if problems:
        raise Mismatch(problems, problems.keys() - tensors.keys(), index, f"bucket {index}: ")
    return plan


def _copy(targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
    deque(map(libc.memcpy, targets, sources, sizes), maxlen=0)  # a loop without the interpreter's overhead


def _check_buffer(layout: Layout, index: int, buffer: torch.Tensor) -> None:
    needed = max(piece.offset + piece.size for piece in layout.buckets[index])
    if buffer.dtype is not torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise BadInput(f"bucket {index}: the buffer must be contiguous bytes in one dimension, torch.uint8")
    if buffer.numel() < needed:
        raise BadInput(f"bucket {index} needs {needed} bytes, but the buffer has {buffer.numel()}")


EMPTY = "has no bytes here: it was offloaded, or it only wraps other tensors"
SCATTERED = "is not contiguous here, but is split over several buckets"


def _unlike(spec: Spec, tensor: torch.Tensor | None, *, split: bool = False) -> str:
    """Return why a tensor here does not match the one in the bucket; empty if it does."""
    if tensor is None:
        return "is missing here"
    if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
        own, there = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}", f"{dtype_name(spec.dtype)} {spec.shape}"
        return f"is {own} here and {there} in the bucket"
    if split and not tensor.is_contiguous():
        return SCATTERED
    return _emptied(tensor)


def _emptied(tensor: torch.Tensor) -> str:
    return "" if not tensor.numel() or (tensor.untyped_storage().nbytes() and tensor.data_ptr()) else EMPTY


# -- the weights of a receiver, filled from buckets of full tensors ----------------------------------------------------

Destination = tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]


class Applier(Protocol):
    """Weights bound to a bucket layout: `apply` copies the contents of a bucket into them."""

    def apply(self, index: int, buffer: torch.Tensor) -> None: ...


class Weights(Protocol):
    """The weights that a receiver fills. `bind` prepares them for the buckets of a layout, or of `changes` to the weights of that layout,
    and raises `Mismatch` before the first byte is copied; `keep` copies the weights and returns a function that puts the copies back."""

    def bind(self, layout: Layout, changes: Layout | None = None) -> Applier: ...
    def keep(self) -> Callable[[], None]: ...


def keep_copies(tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Copy tensors; the function that is returned puts the copies back. Copies on the host share one block, so that the kernel supplies it
    in large pages: page by page takes several times as long as the copy."""
    now = [tensor.detach() for tensor in tensors]
    on_host = [tensor for tensor in now if tensor.is_cpu and tensor.is_contiguous()]
    offsets = [0, *itertools.accumulate(-(-tensor.nbytes // ALIGN) * ALIGN for tensor in on_host)]
    block = torch.empty(offsets[-1], dtype=torch.uint8)
    places = {id(tensor): offset for tensor, offset in zip(on_host, offsets[:-1], strict=True)}
    transfer(
        [Move(block.data_ptr() + places[id(tensor)], tensor.data_ptr(), tensor.nbytes) for tensor in on_host],
        fresh=True,
        threads=copy_threads(),
    )

    def copy_of(tensor: torch.Tensor) -> torch.Tensor:
        start = places.get(id(tensor))
        if start is None:
            return tensor.clone()
        return block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    copies = [(tensor, copy_of(tensor)) for tensor in now]

    def put_back() -> None:
        for tensor, old in copies:
            tensor.copy_(old)

    return put_back


class Whole:
    """Full tensors under the sender's names. Neighbours in a bucket are copied together."""

    def __init__(self, tensors: Mapping[Key, torch.Tensor]) -> None:
        self.tensors = tensors
        self._bound: Bound | None = None
        self._seen: list[torch.Tensor] = []

    def bind(self, layout: Layout, changes: Layout | None = None) -> Applier:
        pieces = itertools.chain(*layout.buckets)
        split = {piece.spec for piece in pieces if piece.size < layout.specs[piece.spec].size}
        wrong = [_unlike(spec, self.tensors.get(spec.key), split=at in split) for at, spec in enumerate(layout.specs)]
        _refuse(layout, self.tensors.keys(), wrong)
        if changes is not None:
            return Cut({name: [(tensor.detach(), as_it_is)] for (name, _), tensor in self.tensors.items()}, ()).bind(
                layout, changes
            )
        now = self.own()
        same = [*map(id, now)] == [*map(id, self._seen)]
        if self._bound is None or self._bound.layout != layout or not same:
            self._bound, self._seen = Bound(layout, self.tensors), now
        return self._bound

    def own(self) -> list[torch.Tensor]:
        return list(self.tensors.values())

    def keep(self) -> Callable[[], None]:
        return keep_copies(self.own())


def as_it_is(full: torch.Tensor) -> torch.Tensor:
    return full


class Cut:
    """Shards: the destinations of each full tensor, and the part that each destination takes. Full tensors are shard 0. A tensor split over
    several buckets is copied once all its pieces have arrived. `load` takes each full tensor with its name instead, if it is given; the
    tensor may be overwritten as soon as `load` has returned."""

    def __init__(
        self,
        destinations: Mapping[str, Sequence[Destination]],
        own: Sequence[torch.Tensor],
        load: Callable[[str, torch.Tensor], None] | None = None,
    ) -> None:
        self.destinations = destinations
        self.load = load or self.copy
        self._loads = load is not None
        self._own = own

    def keep(self) -> Callable[[], None]:
        return keep_copies(self._own)

    def bind(self, layout: Layout, changes: Layout | None = None) -> Self:
        wrong = [_uncut(spec, self.destinations.get(spec.name)) for spec in layout.specs]
        _refuse(layout, {(name, 0) for name in self.destinations}, wrong)
        self.layout = layout if changes is None else changes
        self.shapes = {spec.name: spec.shape for spec in layout.specs}
        if self._loads and any(spec.shard for spec in self.layout.specs):
            raise KitError("weights that are loaded by whole tensors cannot take changed words")
        self._partial: dict[Key, tuple[torch.Tensor, int]] = {}
        self._positions: dict[str, torch.Tensor] = {}
        return self

    def apply(self, index: int, buffer: torch.Tensor) -> None:
        for view in bucket_views(self.layout, index, buffer):
            full = self._whole(view)
            if full is not None:
                self._take(view.spec, full)

    def _take(self, spec: Spec, full: torch.Tensor) -> None:
        if spec.shard == GAPS:
            self._positions[spec.name] = positions_of(full)
        elif spec.shard == WORDS:
            self.write(spec.name, self._positions.pop(spec.name), full)
        else:
            self.load(spec.name, full)

    def write(self, name: str, positions: torch.Tensor, words: torch.Tensor) -> None:
        for into, take in self.destinations[name]:
            write_words(into, take, self.shapes[name], positions, words)

    def copy(self, name: str, full: torch.Tensor) -> None:
        for into, take in self.destinations[name]:
            into.copy_(take(full))

    def _whole(self, view: BucketView) -> torch.Tensor | None:
        spec, start, tensor = view
        if tensor.shape == spec.shape:
            return tensor
        full, missing = self._partial.pop(spec.key, (None, torch.Size(spec.shape).numel()))
        if full is None:
            full = torch.empty(spec.shape, dtype=spec.dtype, device=tensor.device)
        full.view(-1)[start : start + tensor.numel()] = tensor
        missing -= tensor.numel()
        if missing:
            self._partial[spec.key] = full, missing
            return None
        return full


def _refuse(layout: Layout, here: Iterable[Key], wrong: Sequence[str]) -> None:
    """Raise `Mismatch` if tensors do not fit or are not sent. `wrong`: why each tensor of the layout does not fit, or empty."""
    failed = {spec.key: why for spec, why in zip(layout.specs, wrong, strict=True) if why}
    missing = sorted(set(here) - {spec.key for spec in layout.specs})
    if failed or missing:
        first = next(iter(failed), None)
        holding = [
            at for at, row in enumerate(layout.buckets) if any(layout.specs[piece.spec].key == first for piece in row)
        ]
        bucket = holding[0] if holding else None  # of those that hold a part of it
        raise Mismatch({**failed, **dict.fromkeys(missing, "is not sent")}, missing, bucket)


def _uncut(spec: Spec, destinations: Sequence[Destination] | None) -> str:
    if destinations is None or spec.shard:
        return "is missing here"
    full = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
    for into, take in destinations:
        try:
            fits = take(full).shape == into.shape
        except (KitError, RuntimeError, IndexError):
            fits = False
        if not fits or into.dtype != spec.dtype:
            own = f"{dtype_name(into.dtype)} {tuple(into.shape)}"
            return f"does not fit its {own} here: it is {dtype_name(spec.dtype)} {spec.shape} in the bucket"
        if empty := _emptied(into):
            return empty
    return ""
