"""The phases of the sync lab on a rank, those of the trainer and those of a replica; here also the comparison of transports.

That comparison sends the same bytes to one receiver with every transport and bucket size, and copies them once as the ceiling. Each turn
is a whole sync with a receiver that pauses, from packing to applied weights, without verification. The result is the median of the turns.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kit.labs.sync.config import ONE_WORLD
from kit.labs.sync.ranks import inference, rehearse, trainer
from kit.labs.sync.ranks.side import name_of
from kit.sync.buckets import Bound, Spec, Whole, automatic, lay_out
from kit.sync.cache import Cache, Kept
from kit.sync.receiver import Receiver
from kit.sync.sender import Sender

if TYPE_CHECKING:
    from kit.labs.rankside import Context
    from kit.labs.sync.config import SyncConfig
    from kit.labs.sync.ranks.side import Side
    from kit.sync.buckets import Key

MIB = 2**20
TENSOR = 256 * 1024 - 64  # bytes; no multiple of 512, so neighbours in memory are not neighbours in a bucket
SIZES = (MIB // 4, MIB, 4 * MIB, 16 * MIB)
TURNS = 3


def side(ctx: Context) -> Side:
    return Trainer(ctx) if ctx.rank < ctx.config.trainer_ranks else Inference(ctx)


class Trainer(trainer.Trainer):
    def rehearse(self, cycle: int) -> None:  # noqa: ARG002 - phases are called with their cycle
        rehearse.trainer(self)
        self.count()

    def sweep(self, cycle: int) -> None:  # noqa: ARG002 - as above
        if not self.sends:
            return
        config, tensors = self.config, contents(self.config)
        whole = torch.full((len(tensors) * TENSOR,), 7, dtype=torch.uint8)
        into = torch.empty_like(whole).fill_(0)
        target = replace(self.targets()[-1], state="paused")
        plain: list[float] = []
        for turn in range(TURNS):
            started = time.perf_counter()
            into.copy_(whole)
            if turn:
                plain.append(whole.numel() / (time.perf_counter() - started))
        total = whole.numel()
        self.ctx.record("sweep_bytes", total, "B")
        self.record_rates(plain, transport="memcpy")
        del whole, into
        for name, size in ways(config):
            layout = lay_out(specs(config), size)
            cache, bound = Cache(layout), Bound(layout, tensors)
            sender = Sender(
                cache,
                self.listener,
                place=self.where,
                rank=0,
                device=self.ctx.device,
                transport=name,
                verify="none",
                timeout_s=config.deadline_s,
            )
            rates = []
            for turn in range(TURNS + 1):
                events = dict(sender.sync(turn, [target], partial(given, bound)).log.events)
                rates.append(total / (events["apply"] - events["ready"]))
            cache.close()
            self.record_rates(rates[1:], transport=name, bucket_size=size)  # the first turn allocates pages

    def record_rates(self, rates: list[float], **ids: Any) -> None:
        """Record the median, minimum, maximum and number of rates."""
        for word, value in (("rate", statistics.median(rates)), ("rate_low", min(rates)), ("rate_high", max(rates))):
            self.ctx.record(word, value, "B/s", **ids)
        self.ctx.record("rate_samples", len(rates), **ids)


class Inference(inference.Inference):
    def rehearse(self, cycle: int) -> None:  # noqa: ARG002 - as above
        rehearse.inference(self)
        self.count()

    def sweep(self, cycle: int) -> None:  # noqa: ARG002 - as above
        if not self.sweeps:
            return
        wanted = contents(self.config)
        tensors = {key: tensor.clone() for key, tensor in wanted.items()}  # not side by side, unlike the sender's
        whole = Whole(tensors)
        receiver = Receiver(
            name_of(self.ctx.rank),
            lambda: whole,
            Idle(self),
            address=self.address,
            device=self.ctx.device,
            timeout_s=self.config.deadline_s,
        )
        for name, size in ways(self.config):
            for tensor in tensors.values():
                tensor.zero_()
            with contextlib.closing(Kept()) as receiver.kept:
                for _ in range(TURNS + 1):
                    receiver.join()
            missing = sum(not torch.equal(tensor, wanted[key]) for key, tensor in tensors.items())
            self.ctx.record("sweep_missing", missing, transport=name, bucket_bytes=size)


def given(bound: Bound) -> Bound:
    """The weights as the sender asks for them."""
    return bound


class Idle:
    """A host that serves nothing, never sleeps and derives nothing."""

    def __init__(self, side: inference.Inference) -> None:
        self.side = side

    def wake(self) -> None: ...

    def sleep(self) -> None: ...

    def finalize(self) -> None: ...

    def writing(self) -> contextlib.AbstractContextManager[None]:
        return self.side.serving.gate.writing()

    def digests(self, algorithm: str) -> dict[str, str]:
        raise NotImplementedError(f"no base weights to hash with {algorithm}")


def ways(config: SyncConfig) -> list[tuple[str, int]]:
    """The transports and bucket sizes to compare; `per-tensor` has no bucket size."""
    names = [
        "shm",
        *(["serialize", "rendezvous"] if config.worlds == "two" else ["broadcast", "serialize", "per-tensor"]),
    ]
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
