"""The weights of a receiver, filled from buckets of full tensors: whole tensors, or shards that are cut out on arrival.

`bind` checks everything before the first byte is copied; `Mismatch` names every tensor that is missing or does not fit.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Protocol

import torch

from kit.errors import KitError
from kit.sync.buckets import Bound, Mismatch, views

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kit.sync.buckets import Key, Layout, Spec

    Destination = tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]


class Applier(Protocol):
    """Weights bound to a bucket layout: `apply` copies the contents of a bucket into them."""

    def apply(self, index: int, buffer: torch.Tensor) -> None: ...


class Weights(Protocol):
    """The weights that a receiver fills: `bind` them to buckets of a layout, or raise `Mismatch`; `own` returns the tensors."""

    def bind(self, layout: Layout) -> Applier: ...
    def own(self) -> Sequence[torch.Tensor]: ...


class Whole:
    """Full tensors under the sender's names. Neighbours in a bucket are copied at once."""

    def __init__(self, tensors: Mapping[Key, torch.Tensor]) -> None:
        self.tensors = tensors
        self._bound: Bound | None = None
        self._seen: list[torch.Tensor] = []

    def bind(self, layout: Layout) -> Bound:
        pieces = itertools.chain(*layout.buckets)
        split = {piece.spec for piece in pieces if piece.size < layout.specs[piece.spec].size}
        specs = enumerate(layout.specs)
        wrong = {spec: _unlike(spec, self.tensors.get(spec.key), split=number in split) for number, spec in specs}
        _refuse(layout, self.tensors.keys(), wrong)
        now = list(self.tensors.values())
        same = [*map(id, now)] == [*map(id, self._seen)]
        if self._bound is None or self._bound.layout != layout or not same:
            self._bound, self._seen = Bound(layout, self.tensors), now
        return self._bound

    def own(self) -> Sequence[torch.Tensor]:
        return list(self.tensors.values())


class Cut:
    """Shards: for each full tensor its destinations, and which part goes there. Full tensors are shard 0."""

    def __init__(self, destinations: Mapping[str, Sequence[Destination]], own: Sequence[torch.Tensor]) -> None:
        self.destinations = destinations
        self._own = own

    def bind(self, layout: Layout) -> Cutting:
        wrong = {spec: _uncut(spec, self.destinations.get(spec.name)) for spec in layout.specs}
        _refuse(layout, {(name, 0) for name in self.destinations}, wrong)
        return Cutting(layout, self.destinations)

    def own(self) -> Sequence[torch.Tensor]:
        return self._own


class Cutting:
    """Cuts shards out of the buckets of one sync. Pieces of a tensor in several buckets wait until it is complete."""

    def __init__(self, layout: Layout, destinations: Mapping[str, Sequence[Destination]]) -> None:
        self.layout = layout
        self.destinations = destinations
        self._partial: dict[str, tuple[torch.Tensor, int]] = {}

    def apply(self, index: int, buffer: torch.Tensor) -> None:
        for view in views(self.layout, index, buffer):
            full = self._whole(view.spec, view.start, view.tensor)
            if full is not None:
                for into, take in self.destinations[view.spec.name]:
                    into.copy_(take(full))

    def _whole(self, spec: Spec, start: int, tensor: torch.Tensor) -> torch.Tensor | None:
        if tensor.shape == spec.shape:
            return tensor
        full, missing = self._partial.pop(spec.name, (None, torch.Size(spec.shape).numel()))
        if full is None:
            full = torch.empty(spec.shape, dtype=spec.dtype, device=tensor.device)
        full.view(-1)[start : start + tensor.numel()] = tensor
        missing -= tensor.numel()
        if missing:
            self._partial[spec.name] = full, missing
            return None
        return full


def _refuse(layout: Layout, here: object, wrong: Mapping[Spec, str]) -> None:
    sent = {spec.key for spec in layout.specs}
    missing = sorted(key for key in set(here) - sent)  # type: ignore[call-overload]
    failed = [(spec, why) for spec, why in wrong.items() if why]
    if not (missing or failed):
        return
    problems = [f"{spec} {why}" for spec, why in failed]
    problems += [f"{name} (shard {shard}) is not sent" for name, shard in missing]
    more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
    holding = {piece.spec: index for index, bucket in enumerate(layout.buckets) for piece in bucket}
    bucket = holding[layout.specs.index(failed[0][0])] if failed else None
    raise Mismatch(
        f"{'; '.join(problems[:5])}{more}",
        bucket=bucket,
        missing=tuple(missing),
        failed=tuple(spec.key for spec, _ in failed),
    )


def _unlike(spec: Spec, tensor: torch.Tensor | None, *, split: bool) -> str:
    if tensor is None:
        return "is unknown here"
    if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
        return f"is {tensor.dtype} {tuple(tensor.shape)} here but {spec.dtype} {spec.shape} at the sender"
    if split and not tensor.is_contiguous():
        return "is not contiguous here, but is split over several buckets"
    return _emptied(tensor)


def _emptied(tensor: torch.Tensor) -> str:
    there = not tensor.numel() or (tensor.untyped_storage().nbytes() and tensor.data_ptr())
    return "" if there else "has no bytes here: it was offloaded, or it only wraps other tensors"


def _uncut(spec: Spec, destinations: Sequence[Destination] | None) -> str:
    if destinations is None or spec.shard:
        return "is unknown here"
    full = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
    for into, take in destinations:
        try:
            fits = take(full).shape == into.shape
        except (KitError, RuntimeError, IndexError):
            fits = False
        if not fits or into.dtype != spec.dtype:
            here = f"{into.dtype} {tuple(into.shape)}"
            return f"does not fit its {here} here: it is {spec.dtype} {spec.shape} at the sender"
        if empty := _emptied(into):
            return empty
    return ""
