"""Move a job's weights, gradients and optimizer state off the device into host memory, and back.

Each storage is copied to the arena and then resized to nothing: every view of it (parameters, main_grad, buckets,
shards) stays a view and finds its bytes again after `restore`. On CUDA copies run on side streams into pinned memory and
freed blocks are handed back to the driver; on the CPU they run on the rank's share of the cores. Limits: a released
tensor must not be used (torch does not guard it on the CPU; `Training.step` does); storages that cannot be resized are
refused by name.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from kit import machine
from kit.errors import BadInput, KitError
from kit.measure.host import Move, transfer, trim, workers
from kit.megatron.tensors import streams
from kit.megatron.tensors.arena import Arena, room
from kit.megatron.tensors.inventory import KINDS, Item, digest, hashes, inventory, named_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["KINDS", "Arena", "Item", "Mover", "digest", "hashes", "inventory", "memory", "named_tensors", "trim"]


def memory() -> dict[str, int]:
    """Bytes of this process by source: anonymous and shared resident memory; on CUDA allocator and driver too."""
    status = machine.status()
    sources = {"rss_anon": status["RssAnon"], "rss_shmem": status["RssShmem"]}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        sources |= {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
        sources["driver"] = total - free
    return sources


class Mover:
    """Moves one job's tensors. `release` and `restore` alternate; `away` names the kinds that are off the device."""

    def __init__(self, chunks: list[Any], optimizer: Any, device: torch.device, arena: Arena | None = None) -> None:
        self.chunks = chunks
        self.optimizer = optimizer
        self.device = device
        self.arena = arena or Arena(device)
        self._waiting: list[tuple[Item, int, int]] = []

    @property
    def away(self) -> tuple[str, ...]:
        """The kinds that are off the device now, in fixed order."""
        kinds = {item.kind for item, _, _ in self._waiting}
        return tuple(kind for kind in KINDS if kind in kinds)

    def items(self) -> list[Item]:
        """Every storage of the job that is on the device now."""
        return inventory(self.chunks, self.optimizer, self.device)

    def release(self, kinds: Iterable[str] = KINDS) -> dict[str, Any]:
        """Copy out and free. Stats: tensors, bytes by kind, seconds, memory before and after, addresses."""
        wanted = tuple(kinds)
        if unknown := [kind for kind in wanted if kind not in KINDS]:
            raise BadInput(f"kind {unknown[0]!r} is unknown: choose from {', '.join(KINDS)}")
        if self._waiting:
            raise KitError(f"{', '.join(self.away)} are already off the device: restore them first")
        items = [item for item in self.items() if item.kind in wanted]
        if fixed := [item.name for item in items if not item.storage.resizable()]:
            raise KitError(f"the storage of {fixed[0]} cannot be resized, so it cannot be released")
        before, start = memory(), time.perf_counter()
        fresh = self.arena.grow(room([item.size for item in items]))
        self._waiting = [(item, self.arena.reserve(item.size), item.storage.data_ptr()) for item in items]
        try:
            self._copy_out(fresh=fresh)
        except BaseException:  # everything is where it was
            self._waiting = []
            self.arena.clear()
            raise
        for item in items:
            item.storage.resize_(0)
        if self.device.type == "cpu":
            trim()
        else:
            torch.cuda.empty_cache()
        return self._stats(items, before, time.perf_counter() - start)

    def restore(self) -> dict[str, Any]:
        """Bring everything back to where every view finds it. Nothing away: nothing is done."""
        before, start = memory(), time.perf_counter()
        for item, _, _ in self._waiting:
            item.storage.resize_(item.size)
        if self.device.type == "cpu":
            moves = [
                Move(item.storage.data_ptr(), self.arena.address(offset), item.size)
                for item, offset, _ in self._waiting
            ]
            transfer(moves, fresh=True, threads=workers())
        else:
            streams.copy(self._pairs(), self.device)
        moved = sum(item.storage.data_ptr() != old for item, _, old in self._waiting)
        items = [item for item, _, _ in self._waiting]
        self._waiting = []
        self.arena.clear()
        return self._stats(items, before, time.perf_counter() - start) | {"addresses_changed": moved}

    def _copy_out(self, *, fresh: bool) -> None:
        if self.device.type == "cpu":
            moves = [Move(self.arena.address(offset), address, item.size) for item, offset, address in self._waiting]
            transfer(moves, fresh=fresh, threads=workers())
        else:
            streams.copy(((place, flat) for flat, place in self._pairs()), self.device)

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What waits, as it lies on the device and in the arena."""
        return ((_bytes(item), self.arena.view(offset, item.size)) for item, offset, _ in self._waiting)

    def close(self) -> None:
        """Restore what is away and give the host memory back."""
        self.restore()
        self.arena.close()

    def _stats(self, items: list[Item], before: dict[str, int], seconds: float) -> dict[str, Any]:
        sizes = {kind: sum(item.size for item in items if item.kind == kind) for kind in KINDS}
        return {
            "tensors": len(items),
            "bytes": sizes | {"total": sum(sizes.values())},
            "seconds": seconds,
            "memory_before": before,
            "memory_after": memory(),
            "addresses": {f"{item.kind}/{item.name}": item.storage.data_ptr() for item in items},
        }


def _bytes(item: Item) -> torch.Tensor:
    """A storage as flat bytes on its device."""
    return torch.empty(0, dtype=torch.uint8, device=item.storage.device).set_(item.storage)
