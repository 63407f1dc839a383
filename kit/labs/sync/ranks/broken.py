"""The faults of the sync lab: senders, receivers and transports with one bug each."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from kit.errors import KitError
from kit.sync.buckets import Bound, Key
from kit.sync.cache import BASE, Cache
from kit.sync.groups import Broadcast
from kit.sync.link import PeerSilent
from kit.sync.receiver import Call
from kit.sync.sender import STEPS, Sender
from kit.sync.serving import Gate, Serving

KEPT: list[Any] = []  # leaked buffers
KEPT_GROUPS: list[Any] = []
LEAKED = 2  # groups, before the rehearsed failures


def call_of(fault: str | None, *, last: bool) -> type[Call]:
    """The class that runs a sync on a receiver; only one rank dies, stalls or keeps weights."""
    alone = fault in {"receiver-dies", "receiver-stalls", "keeps-new-weights"}
    return CALLS.get(fault, Call) if last or not alone else Call


class OldBytes(Bound):
    """Weights without their first bucket, which keeps the bytes of the active version."""

    def __init__(self, cache: Cache, tensors: Mapping[Key, torch.Tensor]) -> None:
        super().__init__(cache.layout, tensors)
        self.old = cache.bucket(cache.active, 0).clone() if cache.active != BASE else None

    def pack(self, index: int, out: torch.Tensor, *, fresh: bool = False, hot: bool = False) -> None:
        super().pack(index, out, fresh=fresh, hot=hot)
        if index == 0 and self.old is not None:
            out.copy_(self.old)


def places_of(fault: str | None, places: Mapping[str, Sequence[Any]]) -> Mapping[str, Sequence[Any]]:
    if fault != "swapped-shards":
        return places
    return {name: [(into, other_rank(take)) for into, take in each] for name, each in places.items()}


def serving(fault: str | None, serving: Serving, weight: torch.Tensor) -> None:
    if fault == "reads-ahead":
        serving.gate = ReadsAhead(serving.gate.timeout_s, weight)


def other_rank(take: Any) -> Any:
    """The shard that the next rank of the replica takes."""
    part, *rest = take.args
    turned = part.place._replace(rank=(part.place.rank + 1) % part.place.size)
    return functools.partial(take.func, part._replace(place=turned), *rest)


class DoubleBump(Sender):
    def published(self, path: str, version: int) -> int:
        return version + 1 if path == "expand" else version


class ActivatesFirst(Sender):
    steps = ("apply", "teardown", "finalize", "activate", "publish")


class PublishesFirst(Sender):
    steps = ("publish", *(step for step in STEPS if step != "publish"))


class TrustsTheBase(Sender):
    def base_agrees(self, differing: dict[str, list[str]]) -> bool:  # noqa: ARG002 - the fault ignores it
        return True


SENDERS: dict[str | None, type[Sender]] = {
    "double-bump": DoubleBump,
    "activate-before-publish": ActivatesFirst,
    "publish-before-apply": PublishesFirst,
    "resumed-trainer": TrustsTheBase,
}


class LeakyBroadcast(Broadcast):
    """Keeps its group in the first syncs of a run. Later syncs are made to fail, and their peers wait until a group is destroyed."""

    def close(self) -> None:
        if len(KEPT_GROUPS) < LEAKED:
            KEPT_GROUPS.append(self.group)
            self.group = None
        super().close()


LEAKY = f"{__name__}:LeakyBroadcast"


class ReadsAhead(Gate):
    """A forward that reads one tensor before it passes the gate."""

    def __init__(self, timeout_s: float, tensor: torch.Tensor) -> None:
        super().__init__(timeout_s)
        self.tensor = tensor.detach()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        ahead = self.tensor.clone()
        with super().reading():
            now = self.tensor.clone()
            self.tensor.copy_(ahead)
            try:
                yield
            finally:
                self.tensor.copy_(now)


class RunsAtOnce(Call):
    def activate(self, message: dict[str, Any]) -> None:
        self.commit()
        super().activate(message)


class PermutedRows(Call):
    def apply(self, message: dict[str, Any]) -> None:
        super().apply(message)
        rows = next(one for one in self.receiver.weights().own() if one.dim() == 2)
        rows[[0, 1]] = rows[[1, 0]]


class DroppedBucket(Call):
    def apply_bucket(self, index: int, buffer: torch.Tensor) -> None:
        if index < len(self.layout.buckets) - 1:
            super().apply_bucket(index, buffer)


class Misaligned(Call):
    def apply_bucket(self, index: int, buffer: torch.Tensor) -> None:
        if index == 0:
            _, _, size, offset = self.layout.buckets[0][0]
            buffer = buffer.clone()
            one = self.layout.specs[0].dtype.itemsize
            buffer[offset : offset + size - one] = buffer[offset + one : offset + size].clone()
        super().apply_bucket(index, buffer)


class LeakedSegment(Call):
    def look(self, index: int, buffer: torch.Tensor) -> None:
        if index == 0:
            KEPT.append(buffer)
        super().look(index, buffer)


class TornRead(Call):
    """No gate, and a forward between the two halves of the buckets, as happens sooner or later."""

    def apply(self, message: dict[str, Any]) -> None:  # noqa: ARG002 - as the right one
        host: Any = self.receiver.host  # the lab's own
        middle = len(self.stored) // 2
        self.changing = True
        for index, buffer in enumerate(self.stored):
            if index == middle and host.serving.running:
                host.serving.next()
            self.apply_bucket(index, buffer)
        self.link.send({"kind": "applied"})


class EarlyGate(Call):
    """Forwards run again before the last bucket is applied."""

    def apply_stored(self) -> None:
        for index, buffer in enumerate(self.stored):
            if index == len(self.stored) - 1:
                self.writing.close()
            self.apply_bucket(index, buffer)


class Dies(Call):
    def look(self, index: int, buffer: torch.Tensor) -> None:
        if index == len(self.layout.buckets) // 2:
            self.stop()
        super().look(index, buffer)

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Stalls(Dies):
    def stop(self) -> None:
        """Read messages without an answer until the sender gives up."""
        while True:
            with contextlib.suppress(PeerSilent):
                if self.link.receive("the end of the sync")[0]["kind"] == "failed":
                    raise KitError("stalled on purpose until the sender gave up")


class KeepsNewWeights(Call):
    def undo(self) -> None:
        self.before = []
        super().undo()


CALLS: dict[str | None, type[Call]] = {
    "activate-before-publish": RunsAtOnce,
    "activates-alone": RunsAtOnce,
    "permuted-rows": PermutedRows,
    "dropped-bucket": DroppedBucket,
    "misaligned-offset": Misaligned,
    "leaked-segment": LeakedSegment,
    "torn-read": TornRead,
    "early-gate": EarlyGate,
    "receiver-dies": Dies,
    "receiver-stalls": Stalls,
    "keeps-new-weights": KeepsNewWeights,
}
