"""What a delta saves: rank 0 trains Megatron's mixed precision in bfloat16 and sends every version to rank 1, by what changed and whole.

Both syncs of a turn bring the same weights through the same service, one after the other; a comparison of its own counts what changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from kit.engines.changes import ChangeOracle
from kit.labs.bench_sync.ranks.stalls import NO_PLACE
from kit.labs.bench_sync.ranks.ways import TIMEOUT_S
from kit.megatron import groups, model, ownership, serve, shards, standin
from kit.megatron.config import ModelConfig
from kit.sync.buckets import Key, Whole, automatic, lay_out, specs_of
from kit.sync.cache import Cache, KeptMappings
from kit.sync.deltas import Delta
from kit.sync.hashes import digest
from kit.sync.link import Listener, address_of
from kit.sync.receiver import Receiver
from kit.sync.sender import Report, Sender, Target
from kit.sync.transports import Make, Transport, TransportContext, make
from kit.train.options import DEFAULTS

CPU = torch.device("cpu")
WARM = 3  # steps before the first version: Adam has no averages yet
Tensors = dict[Key, torch.Tensor]


class Trainer:
    def __init__(self, size: str, lr: float) -> None:
        config = ModelConfig(size=size, dtype="bfloat16", seq=32, microbatches=1)
        self.job = model.build(config, dataclasses.replace(DEFAULTS, first_lr=lr, lr=lr, last_lr=lr))
        self.job.step(WARM)

    def tensors(self) -> Tensors:
        return {(name, 0): tensor for name, tensor in self.named().items()}

    def named(self) -> dict[str, torch.Tensor]:
        return dict(shards.full_tensors(self.job.chunks))


class Server:
    """A replica that only holds weights."""

    def __init__(self, address: dict[str, Any]) -> None:
        self.kept = KeptMappings()
        self.receiver = Receiver(
            "rank 1", self.weights, self, address=address, device=CPU, timeout_s=TIMEOUT_S, kept=self.kept
        )
        self.receiver.make = self.counting
        self.whole: Whole | None = None
        self.arrived = 0  # bytes of buckets

    def counting(self, kind: str | Make, ctx: TransportContext, *, ring: bool = False) -> Transport:
        """A transport on this end, with a count of the bytes that it returns."""
        transport = make(kind, ctx, ring=ring)
        receive = transport.receive

        def counted(index: int, into: torch.Tensor) -> torch.Tensor:
            got = receive(index, into)
            self.arrived += got.numel()
            return got

        transport.receive = counted  # type: ignore[method-assign]
        return transport

    def weights(self) -> Whole:
        """Memory for what the sender's layout has."""
        layout = self.receiver.layout[1]
        if self.whole is None and layout is not None:
            self.whole = Whole({spec.key: torch.zeros(spec.shape, dtype=spec.dtype) for spec in layout.specs})
        assert self.whole is not None
        return self.whole

    def wake(self) -> None: ...

    def sleep(self) -> None: ...

    def finalize(self) -> None: ...

    def writing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def digests(self, algorithm: str) -> dict[str, str]:
        return {name: digest(tensor, algorithm) for (name, _), tensor in self.weights().tensors.items()}


def send_versions(listener: Listener, trainer: Trainer, rounds: int) -> list[dict[str, float]]:
    specs = specs_of(trainer.tensors())
    cache = Cache(lay_out(specs, automatic(specs, oversize="split"), oversize="split"))
    sender = Sender(cache, listener, place=NO_PLACE, rank=0, device=CPU, transport="shm", timeout_s=TIMEOUT_S)
    target, oracle, made = Target(name="rank 1", rank=1, place=NO_PLACE), ChangeOracle(), list[dict[str, float]]()

    def sync(way: Delta) -> Report:
        sender.delta = way
        return sender.sync(max(1, sender.version + 1), [target], trainer.tensors)

    try:
        sync("off")
        for _ in range(rounds):
            oracle.remember(trainer.named())
            trainer.job.step()
            changed = oracle.compare(trainer.named())
            by_words, everything = sync("word"), sync("off")
            made.append(
                {
                    "word": by_words.wall,
                    "off": everything.wall,
                    "needed": sum(each.needed("word") for each in changed),
                    "share": sum(each.changed for each in changed) / sum(each.words for each in changed),
                }
            )
    finally:
        cache.close()
    return made


def delta_syncs(*, size: str, lr: float, rounds: int, meeting: str) -> list[dict[str, float]]:
    """For every version: on the sender, seconds of both syncs, the least bytes for the changes, and the share of changed words; on the
    receiver, the bytes of changes that arrived."""
    with contextlib.ExitStack() as scope:
        scope.enter_context(ownership.as_found(timeout_s=TIMEOUT_S))
        groups.install()
        standin.install()
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        listener = scope.enter_context(Listener(name=meeting)) if dist.get_rank() == 0 else None
        dist.barrier()
        if listener is not None:
            with serve.as_world(alone):
                return send_versions(listener, Trainer(size, lr), rounds)
        server = Server(address_of(meeting))
        scope.callback(server.kept.close)
        arrived = []
        for _ in range(1 + 2 * rounds):
            server.arrived = 0
            server.receiver.join()
            arrived.append({"bytes": float(server.arrived)})
        return arrived[1::2]
