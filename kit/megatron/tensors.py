"""Move a job's weights, gradients and optimizer state off the device into host memory, and back.

Each storage is copied to the arena and then resized to nothing: every view of it (parameters, main_grad, buckets, shards) stays a view and
finds its bytes again after `restore`. On the CPU the copies run on the rank's share of the cores (`kit.measure.host`). On CUDA they run on
side streams into pinned memory, and freed blocks go back to the driver; pinning and streams have not run on a GPU yet. `offload_natively`
and `reload_natively` are Megatron's own calls, as a comparison.

Weights are parameters, module buffers and DDP's parameter buffers; grads are DDP's gradient buffers, main_grad and grad; optimizer is the
state of the inner optimizers and their own master parameters. A storage seen as weights is not counted again as optimizer.

Limits: a released tensor must not be used (torch does not guard it on the CPU; `Training.step` does); storages that cannot be resized are
refused by name; scratch memory, and what is on another device than the job's (Adam's step counters on CUDA), stays where it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kit import machine
from kit.errors import BadInput, KitError
from kit.measure.host import Move, copy_threads, huge_pages, map_shared, transfer, trim, unmap
from kit.measure.observers.tensors import tensor_digest

Pair = tuple[torch.Tensor, torch.Tensor]


__all__ = [
    "KINDS",
    "Arena",
    "Elsewhere",
    "Item",
    "Mover",
    "flat_bytes",
    "hashes",
    "inventory",
    "named_tensors",
    "process_memory",
    "tensor_digest",
    "trim",
]

KINDS = ("weights", "grads", "optimizer")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One storage: the kind and name under which it was found first."""

    name: str
    kind: str
    storage: Any
    size: int


def named_tensors(chunks: list[Any], optimizer: Any) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(kind, name, tensor) of everything, the large shared buffers first."""
    for number, chunk in enumerate(chunks):
        for place, buffer in enumerate(ddp_buffers(chunk)):
            if buffer.param_data is not None:
                yield "weights", f"chunk{number}.buffer{place}.param_data", buffer.param_data
            yield "grads", f"chunk{number}.buffer{place}.grad_data", buffer.grad_data
    for number, chunk in enumerate(chunks):
        module = getattr(chunk, "module", chunk)  # a plain module may stand in for Megatron's DDP
        for name, param in module.named_parameters():
            yield "weights", f"chunk{number}.{name}", param.data
            yield from _grads(f"chunk{number}.{name}", param)
        for name, buffer in module.named_buffers():
            yield "weights", f"chunk{number}.{name}", buffer
    for number, inner in enumerate(inner_optimizers(optimizer)):
        params = [param for group in inner.param_groups for param in group["params"]]
        for place, param in enumerate(params):
            name = f"optimizer{number}.param{place}"
            yield "optimizer", name, param.data
            yield from _grads(name, param)
            for path, tensor in _nested(name, inner.state.get(param, {})):
                yield "optimizer", path, tensor


def ddp_buffers(chunk: Any) -> list[Any]:
    """Megatron's parameter and gradient buffers; none for a plain module, where `buffers` is a method."""
    return [*chunk.buffers, *chunk.expert_parallel_buffers] if isinstance(chunk.buffers, list) else []


def _grads(name: str, param: Any) -> Iterator[tuple[str, str, torch.Tensor]]:
    for attribute in ("main_grad", "grad"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the distributed optimizer sets gradients of views, which torch finds odd
            value = getattr(param, attribute, None)
        if value is not None:
            yield "grads", f"{name}.{attribute}", value


def _nested(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an optimizer's state by name. That of torch's L-BFGS has lists of them."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _nested(f"{path}.{key}", item)
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _nested(f"{path}.{place}", item)


def inner_optimizers(optimizer: Any) -> list[Any]:
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        return [inner for optimizer in chained for inner in inner_optimizers(optimizer)]
    inner = getattr(optimizer, "optimizer", optimizer)  # a plain torch optimizer is its own inner one
    return [] if inner is None else [inner]


def inventory(chunks: list[Any], optimizer: Any, device: torch.device) -> list[Item]:
    """Each distinct storage on the job's device once."""
    items: dict[int, Item] = {}
    for kind, name, tensor in named_tensors(chunks, optimizer):
        storage = tensor.untyped_storage()
        if tensor.device.type == device.type and storage.nbytes():
            items.setdefault(storage._cdata, Item(name=name, kind=kind, storage=storage, size=storage.nbytes()))
    return list(items.values())


def hashes(chunks: list[Any], optimizer: Any, kinds: Iterable[str] = KINDS) -> dict[str, str]:
    """SHA-256 of the bytes of every tensor, by "kind/name"."""
    return {f"{k}/{name}": tensor_digest(t) for k, name, t in named_tensors(chunks, optimizer) if k in kinds}


_ALIGN = 512  # bytes


class Arena:
    """A growing block of host memory. `reserve` hands out places; `clear` takes all of them back at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.size = 0
        self.used = 0
        self._address = 0
        self._pinned: torch.Tensor | None = None
        self._fd = -1

    def open(self) -> None:
        """Make the file, if it is not there: a job that never leaves its device holds none."""
        if self._fd < 0:
            self._fd = os.memfd_create("kit-arena")

    def __del__(self) -> None:
        if self._fd >= 0:  # a job that is dropped takes its arena along
            self.close()

    def grow(self, size: int) -> bool:
        """Make room for at least `size` bytes; nothing may be waiting in the arena. True: its pages do not exist yet."""
        if self.used:
            raise RuntimeError("the arena cannot grow while tensors wait in it")
        if size <= self.size:
            return False
        self._unmap()
        self.open()
        os.ftruncate(self._fd, size)
        self._address = map_shared(self._fd, size)
        self.size = size
        if self.device.type == "cuda":
            self._pin()
        return True

    def _pin(self) -> None:
        huge_pages(self._address, self.size)
        if int(_cudart().cudaHostRegister(self._address, self.size, 0)) == 0:
            block = (ctypes.c_ubyte * self.size).from_address(self._address)
            self._pinned = torch.frombuffer(block, dtype=torch.uint8)
            return
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self.device)  # CUDA reports the refusal at the next call: make that call here
        size = self.size
        self._unmap()
        self._pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self.size = size

    def _unmap(self) -> None:
        if self._address:
            if self._pinned is not None:
                _cudart().cudaHostUnregister(self._address)
            unmap(self._address, self.size)
            os.ftruncate(self._fd, 0)
        self._pinned, self._address, self.size = None, 0, 0

    def reserve(self, size: int) -> int:
        offset = self.used
        self.used += -(-size // _ALIGN) * _ALIGN
        return offset

    def address(self, offset: int) -> int:
        """Where a place lies in this process; CPU only."""
        return self._address + offset

    def view(self, offset: int, size: int) -> torch.Tensor:
        """A place as pinned bytes; CUDA only. Not to be used once the arena has grown or is closed."""
        assert self._pinned is not None
        return self._pinned[offset : offset + size]

    def clear(self) -> None:
        """Nothing waits any more; the memory stays for the next cycle."""
        self.used = 0

    def close(self) -> None:
        self.clear()
        self._unmap()
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


PIECE = 64 * 2**20  # large tensors are cut, so that no stream is left with most of the bytes
STREAMS = 2  # on one stream small copies would leave gaps: here one begins while the other ends


def copy_on_streams(pairs: Iterable[Pair], device: torch.device) -> None:
    """Copy each second to its first; one end of a pair is on the device, the other pinned. Work under way is waited for first, and every
    copy is done at the end."""
    torch.cuda.synchronize(device)
    streams = [torch.cuda.Stream(device) for _ in range(STREAMS)]  # type: ignore[no-untyped-call]
    try:
        for (target, source), stream in zip(pieces(pairs), itertools.cycle(streams), strict=False):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
    finally:  # where a copy cannot be begun, those before it are under way
        for stream in streams:
            stream.synchronize()


def pieces(pairs: Iterable[Pair], size: int = PIECE) -> Iterator[Pair]:
    """The same copies, each of at most `size` bytes."""
    for target, source in pairs:
        for start in range(0, target.numel(), size):
            yield target[start : start + size], source[start : start + size]


def process_memory() -> dict[str, int]:
    """Bytes of this process by source: anonymous and shared resident memory; on CUDA allocator and driver too."""
    status = machine.status()
    sources = {"rss_anon": status["RssAnon"], "rss_shmem": status["RssShmem"]}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        sources |= {"allocated": allocated, "reserved": reserved, "driver": total - free}
    return sources


class Elsewhere(NamedTuple):
    """Weights whose bytes are on the host already: a release frees their memory without a copy, and a reload calls `fill` once they have
    memory again. A storage counts if these tensors are all that lies in it."""

    tensors: Sequence[torch.Tensor]
    fill: Callable[[], None]

    def covers(self, item: Item) -> bool:
        places = {
            (tensor.data_ptr(), tuple(tensor.shape), tensor.stride()): tensor.nbytes
            for tensor in self.tensors
            if tensor.untyped_storage()._cdata == item.storage._cdata
        }
        return sum(places.values()) == item.size


class Mover:
    """Moves one job's tensors. `release` and `restore` alternate; `away` names the kinds that are off the device."""

    def __init__(self, chunks: list[Any], optimizer: Any, device: torch.device) -> None:
        self.chunks = chunks
        self.optimizer = optimizer
        self.device = device
        self.arena = Arena(device)
        self._waiting: list[tuple[Item, int, int]] = []
        self._kept: list[tuple[Item, int]] = []  # what is elsewhere
        self._elsewhere: Elsewhere | None = None

    @property
    def away(self) -> tuple[str, ...]:
        """The kinds that are off the device now, in fixed order."""
        kinds = {item.kind for item, _ in self._all()}
        return tuple(kind for kind in KINDS if kind in kinds)

    def _all(self) -> list[tuple[Item, int]]:
        """What is off the device, with the addresses that it had."""
        return [*((item, old) for item, _, old in self._waiting), *self._kept]

    def items(self) -> list[Item]:
        return inventory(self.chunks, self.optimizer, self.device)

    def release(self, kinds: Iterable[str] = KINDS, *, elsewhere: Elsewhere | None = None) -> dict[str, Any]:
        """Copy out and free. Stats: tensors, bytes by kind, seconds, memory before and after, addresses."""
        wanted = tuple(kinds)
        if unknown := [kind for kind in wanted if kind not in KINDS]:
            raise BadInput(f"kind {unknown[0]!r} is unknown: choose from {', '.join(KINDS)}")
        if self.away:
            raise KitError(f"{', '.join(self.away)} are already off the device: restore them first")
        items = [item for item in self.items() if item.kind in wanted]
        if fixed := [item.name for item in items if not item.storage.resizable()]:
            raise KitError(
                f"the storage of {fixed[0]} cannot be resized, so it cannot be released (on a CPU `.numpy()` forbids it)"
            )
        before, start = process_memory(), time.perf_counter()
        kept = [item for item in items if elsewhere is not None and elsewhere.covers(item)]
        moving = [item for item in items if item not in kept]
        fresh = self.arena.grow(sum(-(-item.size // _ALIGN) * _ALIGN for item in moving))
        self._waiting = [(item, self.arena.reserve(item.size), item.storage.data_ptr()) for item in moving]
        try:
            self._copy(out=True, fresh=fresh)
        except BaseException:  # everything is where it was
            self._waiting = []
            self.arena.clear()
            raise
        self._kept, self._elsewhere = [(item, item.storage.data_ptr()) for item in kept], elsewhere
        for item in items:
            item.storage.resize_(0)
        self._give_back()
        return self._stats(items, before, time.perf_counter() - start)

    def _give_back(self) -> None:
        """Give freed blocks back to the host or the driver."""
        if self.device.type == "cpu":
            trim()
        else:
            torch.cuda.empty_cache()

    def restore(self) -> dict[str, Any]:
        """Bring everything back to where every view finds it. Nothing away: nothing is done. After an error everything is away as before,
        and may be brought back later."""
        before, start = process_memory(), time.perf_counter()
        there = self._all()
        try:
            for item, _ in there:
                _allocate(item)
            self._copy(out=False, fresh=True)
            if self._elsewhere is not None:
                self._elsewhere.fill()
        except BaseException:
            for item, _ in there:
                item.storage.resize_(0)
            self._give_back()
            raise
        moved = sum(item.storage.data_ptr() != old for item, old in there)
        items = [item for item, _ in there]
        self._waiting = []
        self._kept, self._elsewhere = [], None
        self.arena.clear()
        return self._stats(items, before, time.perf_counter() - start) | {"addresses_changed": moved}

    def _copy(self, *, out: bool, fresh: bool) -> None:
        """Copy what waits to the arena, or back. `fresh`: the target's pages do not exist yet."""
        if self.device.type == "cpu":
            moves = []
            for item, offset, _ in self._waiting:
                device_address, there = item.storage.data_ptr(), self.arena.address(offset)
                moves.append(Move(there, device_address, item.size) if out else Move(device_address, there, item.size))
            transfer(moves, fresh=fresh, threads=copy_threads())
        else:
            pairs = ((flat_bytes(item), self.arena.view(offset, item.size)) for item, offset, _ in self._waiting)
            copy_on_streams(((there, on_device) for on_device, there in pairs) if out else pairs, self.device)

    def close(self) -> None:
        self.restore()
        self.arena.close()

    def _stats(self, items: list[Item], before: dict[str, int], seconds: float) -> dict[str, Any]:
        sizes = _by_kind(items)
        return {
            "tensors": len(items),
            "bytes": sizes | {"total": sum(sizes.values())},
            "seconds": seconds,
            "memory_before": before,
            "memory_after": process_memory(),
            "addresses": {f"{item.kind}/{item.name}": item.storage.data_ptr() for item in items},
        }


def _allocate(item: Item) -> None:
    try:
        item.storage.resize_(item.size)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        raise KitError(f"{item.kind} {item.name} could not be brought back ({item.size} B): {error}") from error


def flat_bytes(item: Item) -> torch.Tensor:
    """All bytes of an item, as a view of its storage."""
    return torch.empty(0, dtype=torch.uint8, device=item.storage.device).set_(item.storage)


def _by_kind(items: list[Item]) -> dict[str, int]:
    return {kind: sum(item.size for item in items if item.kind == kind) for kind in KINDS}


# -- Megatron's own offload, as a comparison ---------------------------------------------------------------------------------


def offload_natively(chunks: list[Any], optimizer: Any, device: torch.device) -> dict[str, Any]:
    """Parameter buffers to pinned memory, gradient buffers dropped, optimizer state by `offload_to_cpu`. Parameters outside of DDP's
    buffers stay (all of them without the distributed optimizer). Stats: seconds, bytes that left by kind."""
    if device.type != "cuda":
        raise BadInput("Megatron's own offload is not measured here: it pins memory, which needs a GPU")
    before, start = _by_kind(inventory(chunks, optimizer, device)), time.perf_counter()
    for buffer in itertools.chain.from_iterable(map(ddp_buffers, chunks)):
        buffer.offload_to_cpu(move_params=True, move_grads=True)
    optimizer.offload_to_cpu()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    seconds = time.perf_counter() - start
    after = _by_kind(inventory(chunks, optimizer, device))
    return {"seconds": seconds, "bytes": {kind: before[kind] - after[kind] for kind in KINDS}}


def reload_natively(chunks: list[Any], optimizer: Any) -> dict[str, Any]:
    """Bring back what `offload_natively` moved. Gradients come back as zeros. Stats: seconds."""
    start = time.perf_counter()
    for buffer in itertools.chain.from_iterable(map(ddp_buffers, chunks)):
        buffer.reload_from_cpu(move_params=True, move_grads=True)
    optimizer.restore_from_cpu()
    torch.cuda.synchronize()
    return {"seconds": time.perf_counter() - start}
