"""Transports and bucket sizes side by side: the same bytes to one receiver, compared with one plain copy of them.

Each turn is a whole sync with a receiver that pauses, from packing to applied weights, without verification. The result for each
transport and size is the median of its turns.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from kit.labs.sync.config import ONE_WORLD
from kit.labs.sync.ranks.side import name_of
from kit.sync.buckets import Bound
from kit.sync.cache import Cache
from kit.sync.layout import Spec, automatic, lay_out
from kit.sync.memory import Kept
from kit.sync.receiver import Receiver
from kit.sync.sender import Sender
from kit.sync.weights import Whole

if TYPE_CHECKING:
    from kit.labs.sync.config import SyncConfig
    from kit.labs.sync.ranks.inference import Inference
    from kit.labs.sync.ranks.trainer import Trainer
    from kit.sync.layout import Key, Layout

MIB = 2**20
TENSOR = (
    256 * 1024 - 64
)  # bytes of each tensor; not a multiple of 512, so neighbours in memory are not neighbours in a bucket
SIZES = (MIB // 4, MIB, 4 * MIB, 16 * MIB)
TURNS = 3


def ways(config: SyncConfig) -> list[tuple[str, int]]:
    """The transports and bucket sizes to compare; `per-tensor` has no bucket size."""
    names = (
        ["shm", "serialize", "rendezvous"]
        if config.worlds == "two"
        else ["shm", "broadcast", "serialize", "per-tensor"]
    )
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


def buckets(config: SyncConfig, size: int) -> Layout:
    return lay_out(specs(config), size)


def send(side: Trainer) -> None:
    config = side.config
    tensors = contents(config)
    whole = torch.full((len(tensors) * TENSOR,), 7, dtype=torch.uint8)
    into = torch.empty_like(whole).fill_(0)
    target = replace(side.targets()[-1], state="paused")
    plain: list[float] = []
    for turn in range(TURNS):
        started = time.perf_counter()
        into.copy_(whole)
        if turn:
            plain.append(whole.numel() / (time.perf_counter() - started))
    side.ctx.record("sweep_bytes", whole.numel(), "B")
    record_rates(side, plain, transport="memcpy")
    del whole, into
    for name, size in ways(config):
        layout = buckets(config, size)
        cache, bound = Cache(layout, keep=True), Bound(layout, tensors)
        sender = Sender(
            cache,
            side.listener,
            place=side.where,
            rank=0,
            device=side.ctx.device,
            transport=name,
            verify="none",
            timeout_s=config.deadline_s,
        )
        seconds = []
        for turn in range(TURNS + 1):
            report = sender.sync(turn, [target], functools.partial(unchanged, bound))
            events = dict(report.log.events)
            seconds.append(events["apply"] - events["ready"])
        cache.close()
        rates = [
            sum(spec.size for spec in specs(config)) / taken for taken in seconds[1:]
        ]  # the first turn allocates pages
        record_rates(side, rates, transport=name, bucket_size=size)


def record_rates(side: Trainer, rates: list[float], **ids: Any) -> None:
    """Record the median, minimum, maximum and number of rates."""
    for word, value in (("rate", statistics.median(rates)), ("rate_low", min(rates)), ("rate_high", max(rates))):
        side.ctx.record(word, value, "B/s", **ids)
    side.ctx.record("rate_samples", len(rates), **ids)


def unchanged(bound: Bound) -> Bound:
    return bound


def receive(side: Inference) -> None:
    wanted = contents(side.config)
    tensors = {key: tensor.clone() for key, tensor in wanted.items()}  # not side by side, unlike the sender's
    whole = Whole(tensors)
    receiver = Receiver(
        name_of(side.ctx.rank),
        lambda: whole,
        Idle(side),
        address=side.address,
        device=side.ctx.device,
        timeout_s=side.config.deadline_s,
    )
    for name, size in ways(side.config):
        for tensor in tensors.values():
            tensor.zero_()
        with contextlib.closing(Kept()) as receiver.kept:
            for _ in range(TURNS + 1):
                receiver.join()
        missing = sum(not torch.equal(tensor, wanted[key]) for key, tensor in tensors.items())
        side.ctx.record("sweep_missing", missing, transport=name, bucket_bytes=size)


class Idle:
    """A host that serves nothing."""

    def __init__(self, side: Inference) -> None:
        self.side = side

    def wake(self) -> None:
        """It never sleeps."""

    def sleep(self) -> None:
        """As above."""

    def writing(self) -> contextlib.AbstractContextManager[None]:
        return self.side.serving.gate.writing()

    def finalize(self) -> None:
        """Nothing is derived."""

    def digests(self, algorithm: str) -> dict[str, str]:
        raise NotImplementedError(f"no base weights to hash with {algorithm}")
