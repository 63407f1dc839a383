"""Tensors packed into buckets of bytes by a layout: copies in, views without a copy, copies out.

Between contiguous tensors of the host bytes move by plain copies outside of the interpreter's lock, neighbours on both sides in one;
everything else goes through torch in one call a bucket.

Limits: a bucket's unused bytes keep what was in them; a piece of a tensor can be applied to contiguous memory only; autograd's
version counters do not see plain copies.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import torch

from kit.errors import BadInput, KitError
from kit.measure.host import Move, libc, transfer
from kit.sync.layout import Key, Layout, Spec, dtype_name

if TYPE_CHECKING:
    from collections.abc import Mapping

# The C library copies pieces below a MiB through the processor's cache, whatever its threshold for what goes past it.
HOT = 2**19


class View(NamedTuple):
    """A tensor in a bucket: in its own shape if it is whole, else its elements from `start` on, in one dimension."""

    spec: Spec
    start: int
    tensor: torch.Tensor


class Mismatch(KitError):  # noqa: N818 - it is what was found
    """The tensors do not fit the contents of the bucket, and nothing was copied. `missing` and `failed` are keys."""

    def __init__(self, message: str, *, bucket: int, missing: tuple[Key, ...], failed: tuple[Key, ...]) -> None:
        super().__init__(message)
        self.bucket = bucket
        self.missing = missing
        self.failed = failed


def views(layout: Layout, index: int, buffer: torch.Tensor) -> list[View]:
    """The tensors and pieces of tensors in a bucket, as views of its bytes. No copy."""
    _check_buffer(layout, index, buffer)
    found = []
    for number, start, size, offset in layout.buckets[index]:
        spec = layout.specs[number]
        typed = buffer[offset : offset + size].view(spec.dtype)
        found.append(View(spec, start // spec.dtype.itemsize, typed.view(spec.shape) if size == spec.size else typed))
    return found


def live(layout: Layout, index: int, tensors: Mapping[Key, torch.Tensor]) -> list[View]:
    """The same for live tensors: what `views` would return for a bucket with them. Contiguous tensors are not copied."""
    found = []
    missing = [layout.specs[piece.spec].key for piece in layout.buckets[index]]
    missing = [key for key in missing if key not in tensors]
    if missing:
        raise _mismatch(index, tensors, [(key, "is missing") for key in missing])
    for number, start, size, _ in layout.buckets[index]:
        spec = layout.specs[number]
        tensor = tensors[spec.key].detach()
        first = start // spec.dtype.itemsize
        part = tensor if size == spec.size else tensor.reshape(-1)[first : first + size // spec.dtype.itemsize]
        found.append(View(spec, first, part))
    return found


class Bound:
    """`pack` and `apply` for tensors that stay: they are looked up and checked once, and again if one has moved.

    Limits: a tensor that changes its shape where it lies is not noticed; what was copied last is kept alive until the next use.
    """

    def __init__(self, layout: Layout, tensors: Mapping[Key, torch.Tensor]) -> None:
        self.layout = layout
        self.tensors = tensors
        self._plans: dict[tuple[int, bool, torch.device], _Plan] = {}

    def pack(self, index: int, out: torch.Tensor, *, fresh: bool = False, hot: bool = False) -> None:
        """`hot`: the bucket is to be in the processor's cache afterwards, for whoever copies it out at once."""
        _into_bucket(self._plan(index, out, target=False), out, fresh=fresh, hot=hot)

    def apply(self, index: int, buffer: torch.Tensor) -> None:
        _out_of_bucket(self._plan(index, buffer, target=True), buffer)

    def _plan(self, index: int, buffer: torch.Tensor, *, target: bool) -> _Plan:
        _check_buffer(self.layout, index, buffer)
        key = index, target, buffer.device
        plan = self._plans.get(key)
        if plan is None or not plan.holds():
            plan = self._plans[key] = _plan(self.layout, index, self.tensors, buffer, target=target)
        return plan


class _Plan(NamedTuple):
    """How one bucket is copied: plain copies between addresses and offsets, and the tensors that torch has to copy."""

    layout: Layout
    bucket: int
    tensors: list[torch.Tensor]
    pointers: list[int]
    storages: list[torch.UntypedStorage]
    addresses: list[int]
    offsets: list[int]
    sizes: list[int]
    by_torch: list[tuple[int, torch.Tensor]]  # by the piece's number in the bucket

    def holds(self) -> bool:
        """Whether every tensor is where it was, with its bytes."""
        return [tensor.data_ptr() for tensor in self.tensors] == self.pointers and all(
            storage.nbytes() for storage in self.storages
        )


def _plan(
    layout: Layout, index: int, tensors: Mapping[Key, torch.Tensor], buffer: torch.Tensor, *, target: bool
) -> _Plan:
    plan = _Plan(layout, index, [], [], [], [], [], [], [])
    storages: dict[int, torch.UntypedStorage] = {}
    problems: list[tuple[Key, str]] = []
    on_host = buffer.is_cpu
    end_here = end_there = -1
    # This loop runs once a tensor, thousands of times a model: what is rare is told apart in functions of its own.
    for place, (number, start, size, offset) in enumerate(layout.buckets[index]):
        name, shard, dtype, shape = layout.specs[number]
        tensor = tensors.get((name, shard))
        if tensor is None or tensor.dtype != dtype or tensor.shape != shape:
            problems.append(((name, shard), _unlike(layout.specs[number], tensor)))
            continue
        if not size:
            continue
        pointer, storage = tensor.data_ptr(), tensor.untyped_storage()
        if not pointer or not storage.nbytes():  # a wrapper, as a DTensor, has a size and no address
            problems.append(((name, shard), "has no bytes here: it was offloaded, or it only wraps other tensors"))
            continue
        plan.tensors.append(tensor)
        plan.pointers.append(pointer)
        storages[storage.data_ptr()] = storage
        if not (on_host and tensor.is_cpu and tensor.is_contiguous()):
            if target and size != layout.specs[number].size and not tensor.is_contiguous():
                problems.append(((name, shard), "is not contiguous, but is split over several buckets"))
            plan.by_torch.append((place, tensor))
        elif pointer + start == end_here and offset == end_there:
            plan.sizes[-1] += size
            end_here, end_there = end_here + size, end_there + size
        else:
            plan.addresses.append(pointer + start)
            plan.offsets.append(offset)
            plan.sizes.append(size)
            end_here, end_there = pointer + start + size, offset + size
    if problems:
        raise _mismatch(index, tensors, problems)
    plan.storages.extend(storages.values())
    return plan


def _into_bucket(plan: _Plan, out: torch.Tensor, *, fresh: bool, hot: bool) -> None:
    base = out.data_ptr()
    places = [base + offset for offset in plan.offsets]
    if fresh and places:
        transfer([Move(*move) for move in zip(places, plan.addresses, plan.sizes, strict=True)], fresh=True, threads=1)
    elif hot and max(plan.sizes, default=0) > HOT:
        for place, address, size in zip(places, plan.addresses, plan.sizes, strict=True):
            cuts = range(0, size, HOT)
            _copy_all([place + at for at in cuts], [address + at for at in cuts], [min(HOT, size - at) for at in cuts])
    else:
        _copy_all(places, plan.addresses, plan.sizes)
    if plan.by_torch:
        _copy_by_torch(plan, out, target=False)


def _out_of_bucket(plan: _Plan, buffer: torch.Tensor) -> None:
    base = buffer.data_ptr()
    _copy_all(plan.addresses, [base + offset for offset in plan.offsets], plan.sizes)
    if plan.by_torch:
        _copy_by_torch(plan, buffer, target=True)


def _copy_all(targets: list[int], sources: list[int], sizes: list[int]) -> None:
    deque(map(libc.memcpy, targets, sources, sizes), maxlen=0)  # a loop without the interpreter's share of one


def _copy_by_torch(plan: _Plan, buffer: torch.Tensor, *, target: bool) -> None:
    found = views(plan.layout, plan.bucket, buffer)
    packed = [found[place].tensor for place, _ in plan.by_torch]
    outside = [_part(tensor.detach(), found[place]) for place, tensor in plan.by_torch]
    if target:
        torch._foreach_copy_(outside, packed)
    else:
        torch._foreach_copy_(packed, outside)


def _part(tensor: torch.Tensor, view: View) -> torch.Tensor:
    """What of a tensor a view of a bucket stands for: of a contiguous one a view, too."""
    whole = view.tensor.numel() == tensor.numel()
    return tensor if whole else tensor.reshape(-1)[view.start : view.start + view.tensor.numel()]


def _check_buffer(layout: Layout, index: int, buffer: torch.Tensor) -> None:
    needed = max(piece.offset + piece.size for piece in layout.buckets[index])
    if buffer.dtype is not torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise BadInput(f"bucket {index}: the buffer must be contiguous bytes in one dimension, torch.uint8")
    if buffer.numel() < needed:
        raise BadInput(f"bucket {index} needs {needed} bytes, but the buffer has {buffer.numel()}")


def _unlike(spec: Spec, tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "is missing"
    here, there = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}", f"{dtype_name(spec.dtype)} {spec.shape}"
    return f"is {here} here and {there} in the bucket"


PROBLEMS = 5  # tensors that an error names; it has the keys of all of them


def _mismatch(index: int, tensors: Mapping[Key, torch.Tensor], problems: list[tuple[Key, str]]) -> Mismatch:
    named = [f"{name} (shard {shard}) {problem}" for (name, shard), problem in problems[:PROBLEMS]]
    more = [f"and {len(problems) - PROBLEMS} more"] if len(problems) > PROBLEMS else []
    keys = [key for key, _ in problems]
    return Mismatch(
        f"bucket {index}: {'; '.join([*named, *more])}",
        bucket=index,
        missing=tuple(key for key in keys if key not in tensors),
        failed=tuple(key for key in keys if key in tensors),
    )
