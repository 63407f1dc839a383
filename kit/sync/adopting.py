"""A receiver's weights as views of the sender's memory, copy on write, where the bytes in it lie as they do in a weight.

A receiver maps the memory privately, by a descriptor of its own that can only read and has a shared lock. What it writes to its weights
stays its own. The system holds the lock as long as the mapping exists, also if the receiver is killed, and the sender packs no version
into memory with such a lock: pages that were not written would change under the forwards.

Limits: contiguous weights on a CPU of the sender's machine. A weight whose full tensors are interleaved, cut by columns or apart in the
memory is copied. With small pages a mapping is not free: it takes about as long as a copy into memory that has its pages already.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch

from kit.sync.buckets import Cut, Destination, Layout, Spec, bucket_views, keep_copies
from kit.sync.cache import starts

_adopted: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # the memory behind each adopted weight


class Adopting(Cut):
    """Shards that `adopt` binds to the memory of all buckets of a layout, and `bind` to buckets that are copied."""

    def __init__(self, destinations: Mapping[str, Sequence[Destination]], own: Sequence[torch.Tensor]) -> None:
        super().__init__(destinations, own)
        self._places: dict[int, int] = {}  # where each weight lies in the memory
        self._last: dict[int, list[int]] = {}  # weights by the last bucket with bytes of them

    def adopt(self, layout: Layout) -> Self:
        """Find the weights that can be views. Buckets must lie in one private mapping, as a cache lays them."""
        self.bind(layout)
        self._starts = starts(layout.sizes)[0]
        memory, last = contiguous(layout, self._starts)
        specs = {spec.name: spec for spec in layout.specs}
        parts: dict[int, list[tuple[str, Destination]]] = {}
        for name, several in self.destinations.items():
            for into, take in several:
                parts.setdefault(into.untyped_storage().data_ptr(), []).append((name, (into, take)))
        for number, weight in enumerate(self._own):
            filled = parts.get(weight.untyped_storage().data_ptr(), [])
            place = place_of(weight, filled, specs, memory)
            if place is not None:
                self._places[number] = place
                self._last.setdefault(max(last[name] for name, _ in filled), []).append(number)
        views = {self._own[number].untyped_storage().data_ptr() for number in self._places}
        self.destinations = {
            name: [(into, take) for into, take in several if into.untyped_storage().data_ptr() not in views]
            for name, several in self.destinations.items()
        }
        return self

    def apply(self, index: int, buffer: torch.Tensor) -> None:
        if not self._places:
            super().apply(index, buffer)
            return
        for view in bucket_views(self.layout, index, buffer):
            full = self._whole(view) if self.destinations[view.spec.name] else None
            if full is not None:
                self.copy(view.spec.name, full)
        memory = buffer.data_ptr() - self._starts[index]
        for number in self._last.get(index, ()):
            weight = self._own[number]
            weight.data = view_at(memory + self._places[number], weight, buffer.untyped_storage())

    def keep(self) -> Callable[[], None]:
        """Views are put back as they are: nothing is copied for them."""
        adopted = [(self._own[number], self._own[number].data) for number in self._places]
        put_copies_back = keep_copies([weight for number, weight in enumerate(self._own) if number not in self._places])

        def put_back() -> None:
            for weight, before in adopted:
                weight.data = before
            put_copies_back()

        return put_back


def contiguous(layout: Layout, starts: Sequence[int]) -> tuple[dict[str, int], dict[str, int]]:
    """Where each tensor begins in the memory, if all its pieces follow each other there, and its last bucket."""
    begins: dict[str, int] = {}
    ends: dict[str, int] = {}
    last: dict[str, int] = {}
    for index, bucket in enumerate(layout.buckets):
        for piece in bucket:
            name, place = layout.specs[piece.spec].name, starts[index] + piece.offset
            begins.setdefault(name, place if piece.start == 0 else -1)
            if ends.get(name, place) != place:
                begins[name] = -1
            ends[name], last[name] = place + piece.size, index
    return {name: place for name, place in begins.items() if place >= 0}, last


def place_of(
    weight: torch.Tensor,
    filled: Sequence[tuple[str, Destination]],
    specs: Mapping[str, Spec],
    memory: Mapping[str, int],
) -> int | None:
    """Where the bytes of a weight lie in the memory just as they lie in the weight, if they do."""
    places, covered = set[int](), 0
    for name, (into, take) in filled:
        spec = specs[name]
        part = take(torch.empty(spec.shape, dtype=spec.dtype, device="meta"))
        if name not in memory or strides(part) != strides(into):
            return None
        offset = into.data_ptr() - weight.data_ptr()
        places.add(memory[name] + int(part.storage_offset()) * spec.dtype.itemsize - offset)
        covered += into.numel()
    whole = weight.is_cpu and weight.is_contiguous() and covered == weight.numel() > 0
    return places.pop() if whole and len(places) == 1 else None


def strides(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """How a tensor lies in memory: sizes and strides of the dimensions that have more than one element."""
    return [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def view_at(address: int, weight: torch.Tensor, owner: torch.UntypedStorage) -> torch.Tensor:
    """A tensor like the weight at an address in the owner's memory, which lives as long as the view. Its storage is no larger."""
    array = (ctypes.c_ubyte * weight.nbytes).from_address(address)
    weakref.finalize(array, lambda _: None, owner).atexit = False
    _adopted[address] = array
    return torch.frombuffer(array, dtype=weight.dtype).view(weight.shape)


def let_go(weights: Sequence[torch.Tensor]) -> None:
    """Give adopted weights memory of their own, which has no pages yet, so that the sender's can be used again."""
    for weight in weights:
        if is_adopted(weight):
            weight.data = torch.empty_like(weight.data)


def is_adopted(weight: torch.Tensor) -> bool:
    return weight.untyped_storage().data_ptr() in _adopted
