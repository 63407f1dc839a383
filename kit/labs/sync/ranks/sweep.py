"""The comparison of transports in the sync lab.

It sends the same bytes to one receiver with every transport and bucket size, and copies them once as the ceiling. Each turn is a whole sync
with a receiver that pauses, from packing to applied weights, without verification. The result is the median of the turns.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import Any

import torch

from kit.labs.sync.lab import ONE_WORLD, SyncConfig
from kit.labs.sync.ranks.replica import SyncReplica
from kit.labs.sync.ranks.trainer import SyncTrainer
from kit.machine import MIB
from kit.sync.buckets import Bound, Key, Spec, Whole, automatic, lay_out
from kit.sync.cache import Cache, KeptMappings
from kit.sync.sender import Sender, Target

TENSOR = 256 * 1024 - 64  # bytes; no multiple of 512, so neighbours in memory are not neighbours in a bucket
SIZES = (MIB // 4, MIB, 4 * MIB, 16 * MIB)
TURNS = 3
MOST_TRIES = 8  # to get memory at another place


def send_once(trainer: SyncTrainer, target: Target) -> None:
    config, tensors = trainer.config, contents(trainer.config)
    whole = torch.full((len(tensors) * TENSOR,), 7, dtype=torch.uint8)
    into = torch.zeros_like(whole)
    plain: list[float] = []
    for _ in range(TURNS):
        started = time.perf_counter()
        into.copy_(whole)
        plain.append(whole.numel() / (time.perf_counter() - started))
    total = whole.numel()
    trainer.ctx.record("sweep_bytes", total, "B")
    record_rates(trainer, plain, transport="memcpy")
    del whole, into

    in_the_way: list[torch.Tensor] = []
    for number, (name, size) in enumerate(ways(config)):
        layout = lay_out(specs(config), size)
        cache, bound = Cache(layout), Bound(layout, tensors)
        sender = Sender(
            cache,
            trainer.listener,
            place=trainer.where,
            rank=0,
            device=trainer.ctx.device,
            transport=name,
            verify="none",
            timeout_s=config.deadline_s,
            config=trainer.sender.config,
        )
        rates = []
        for turn in range(TURNS + 1):
            if (number, turn) == (0, 1):
                in_the_way += reload_elsewhere(tensors)
            events = dict(sender.sync(turn, [target], lambda: bound).log.events)  # noqa: B023 - called at once
            rates.append(total / (events["apply"] - events["ready"]))
        cache.close()
        in_the_way.clear()
        record_rates(trainer, rates, transport=name, bucket_size=size)


def reload_elsewhere(tensors: dict[Key, torch.Tensor]) -> list[torch.Tensor]:
    """Offload the tensors and reload them to another place, as between two syncs: what is bound to them must follow. Returns what keeps
    them from their old place, which has other bytes now."""
    storage = next(iter(tensors.values())).untyped_storage()  # they lie side by side in it
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
    kept, size, old = whole.clone(), storage.nbytes(), storage.data_ptr()
    whole.zero_()  # freed memory keeps its bytes, and right ones would hide who still reads them
    in_the_way: list[torch.Tensor] = []
    while storage.data_ptr() in (0, old) and len(in_the_way) < MOST_TRIES:  # the allocator decides
        storage.resize_(0)
        in_the_way.append(torch.zeros(size, dtype=torch.uint8))
        storage.resize_(size)
    whole.copy_(kept)
    return in_the_way


def record_rates(trainer: SyncTrainer, rates: list[float], **ids: Any) -> None:
    """Record the median, minimum, maximum and number of rates after the first, which allocates pages."""
    rates = rates[1:]
    for word, value in (("rate", statistics.median(rates)), ("rate_low", min(rates)), ("rate_high", max(rates))):
        trainer.ctx.record(word, value, "B/s", **ids)
    trainer.ctx.record("rate_samples", len(rates), **ids)


def receive(replica: SyncReplica) -> None:
    wanted = contents(replica.config)
    tensors = {key: tensor.clone() for key, tensor in wanted.items()}  # not side by side, unlike the sender's
    whole = Whole(tensors)
    receiver = replica.new_receiver(lambda: whole)
    for name, size in ways(replica.config):
        for tensor in tensors.values():
            tensor.zero_()
        with contextlib.closing(KeptMappings()) as receiver.kept:
            for _ in range(TURNS + 1):
                receiver.join()
        missing = sum(not torch.equal(tensor, wanted[key]) for key, tensor in tensors.items())
        replica.ctx.record("sweep_missing", missing, transport=name, bucket_bytes=size)


def ways(config: SyncConfig) -> list[tuple[str, int]]:
    """The transports and bucket sizes to compare; `per-tensor` has no bucket size."""
    names = (
        ["shm", "serialize", "rendezvous"]
        if config.worlds == "two"
        else ["shm", "broadcast", "serialize", "per-tensor"]
    )
    if config.nodes > 1:  # the replica that receives is on another machine
        names.remove("shm")
    if config.ranks < 3:
        names = [name for name in names if name not in ONE_WORLD]
    return [(name, size) for name in names for size in (SIZES if name != "per-tensor" else (automatic(specs(config)),))]


def specs(config: SyncConfig) -> list[Spec]:
    count = max(1, config.sweep_mib * MIB // TENSOR)
    return [Spec(f"tensor {number}", 0, torch.uint8, (TENSOR,)) for number in range(count)]


def contents(config: SyncConfig) -> dict[Key, torch.Tensor]:
    """Tensors side by side in one piece of memory. Bytes differ by tensor and by place, so that misplaced or stale bytes are detected."""
    places, wanted = torch.arange(TENSOR), specs(config)
    rows = torch.empty(len(wanted), TENSOR, dtype=torch.uint8)
    for number, row in enumerate(rows):
        row.copy_((places + 1) * (2 * number + 3) % 251 + 1)
    return {spec.key: row for spec, row in zip(wanted, rows, strict=True)}
