"""Shared memory for a few buckets, through which versions stream: of none is anything kept.

It is what a sender has in place of a cache where all receivers pause and none sleeps. The host holds no copy of the weights then, and what
has been packed is still in the processor's cache when receivers on the same host copy it out, which is much of what a sync takes. The
sender packs into a bucket's place again when every receiver is done with what lay there.

Limits: a version goes out once, as it is built: receivers that wake would need it later, and those that serve need all buckets at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.errors import BadInput
from kit.sync.cache import Cache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch

    from kit.sync.buckets import Bound
    from kit.sync.cache import _Place
    from kit.sync.layout import Key, Layout

SLOTS = 2  # one is packed while the other is applied; measured: more do not help, and fill the processor's cache
# For a bucket. Measured: smaller ones cost more messages, of larger ones less is still in the cache.
LARGEST = 4 * 2**20


class Ring(Cache):
    """The cache's place at a sender. `latest` and `active` are the versions that it sent, whose bytes are gone."""

    def __init__(self, layout: Layout, *, slots: int = SLOTS, timeout_s: float = 60.0) -> None:
        if slots < 1:
            raise BadInput(f"a ring of {slots} slots is too small: use at least 1")
        self.slots = slots
        super().__init__(layout, keep=True, timeout_s=timeout_s)

    def build(
        self,
        version: int,
        tensors: Mapping[Key, torch.Tensor] | Bound,
        dirty: Iterable[str] | None = None,  # noqa: ARG002 - there is nothing to take clean buckets from
        packed: Callable[[int], None] | None = None,
    ) -> None:
        """Pack every bucket; `packed` returns when the place of the next one is free."""
        super().build(version, tensors, None, packed)

    def _free_place(self) -> tuple[_Place, bool]:
        for version in list(self._places):
            self._give_up(version)
        self.latest = self.active
        place, fresh = super()._free_place()
        if fresh and place.segment is not None:
            place.segment.populate()
        return place, False
