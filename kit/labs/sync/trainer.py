"""The trainer's ranks in the sync lab. Rank 0 sends; the others take part where weights are gathered."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kit.labs.sync import broken
from kit.labs.sync.config import trainer_model
from kit.labs.sync.side import Side, failed, fill, name_of, takes
from kit.labs.sync.watch import Watch, sha256
from kit.measure.observers.holdings import MEMFD, SHM, shared_memory
from kit.megatron import model, serve, shards
from kit.sync.cache import BASE, Cache
from kit.sync.layout import ALIGN, Spec, automatic, lay_out
from kit.sync.link import Listener
from kit.sync.ring import LARGEST, Ring
from kit.sync.sender import Target
from kit.sync.transports.serialize import memory
from kit.train.plain import PlainModel
from kit.train.settings import DEFAULTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kit.labs.rankside import Context
    from kit.measure.observers.holdings import Place
    from kit.megatron.config import ModelConfig
    from kit.sync.layout import Key, Layout
    from kit.sync.sender import Report, Sender

MOVES = dataclasses.replace(DEFAULTS, first_lr=DEFAULTS.lr)  # no warm-up: the first step makes other weights, too
OF_THE_CACHE = ("stale-bucket", "cache-after-offload")  # faults that need one
LEAST_BUCKETS = 8  # of a model that would fit into less: a run with one bucket proves little


class Trainer(Side):
    """Trains versions, and brings them to the replicas."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self.sends = ctx.rank == 0
        self.digests: dict[str, str] = {}
        self.logits: torch.Tensor | None = None
        self.shared: set[Place] = set()  # memory files that came up in a sync
        self.others: set[Place] = set()  # those that were there before, or came up between two
        self.named: set[str] = set()  # files in /dev/shm that were held in a sync
        self.most = 0  # bytes of memory files that came up in a sync
        self.unlocked = 0  # points of a sync at which the sender's lock was free
        self.total = 0  # bytes of all tensors
        self.watch = Watch(lambda: self.sender.version, measure=self.weigh)
        self.job: Any
        self.cache: Cache
        self.listener: Listener
        self.sender: Sender

    def prepare(self, cycle: int) -> None:  # noqa: ARG002 - phases are called with their cycle
        """A training job with the base weights."""
        self.enter()
        config = trainer_model(self.config)
        with self.as_job():
            self.job = model.build(config, MOVES)
            self.job.mover.arena.open()  # now, so that its file is no growth after the first release
            fill(self.job.chunks, config.geometry, model.DTYPES[config.dtype], self.config.seed)
            self.job.optimizer.reload_model_params()
            if self.ctx.fault == "resumed-trainer":
                self.job.step()
        self.tokens = self.prompt(config.geometry.vocab)
        if self.config.shares:  # once before anything is counted: the memory to put weights aside is kept
            self.job.mover.release()
            self.job.mover.restore()
        tensors = self.gather()
        self.total = sum(tensor.nbytes for tensor in tensors.values())
        if self.sends:
            self.cache = memory_of(self.config, tensors, self.ctx.fault)
            self.listener = self.scope.enter_context(Listener(name=self.ctx.meeting))
            self.scope.callback(self.cache.close)
            self.sender = broken.sender_of(self.ctx.fault)(
                self.cache,
                self.listener,
                place=self.where,
                rank=0,
                device=self.ctx.device,
                transport=broken.transport_of(self.ctx.fault, self.config.transport),
                verify=self.config.verify,
                share=self.config.verify_share,
                timeout_s=self.config.deadline_s,
            )
            self.sender.make = self.watch.made(self.sender.make)
        self.count()

    def base(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Version -1: nothing moves, where all weights are equal; where one number differs it is refused."""
        self.learn()
        if self.sends:
            error = failed(lambda: self.sender.sync(BASE, self.targets(), self.other_base))
            named = error is not None and error.tensors == (max(self.digests),) and error.peer in self.names()
            self.ctx.record("base_accepted", int(not named))
        else:
            self.gather()
        self.sync(BASE, self.targets())
        self.tell_truth(self.targets())
        self.count()

    def other_base(self) -> dict[Key, torch.Tensor]:
        """The gathered weights, of which one number of the last tensor is another."""
        tensors = self.gather()
        key = max(self.digests), 0
        other = tensors[key].clone()
        other.view(-1)[-1] += 1
        return {**tensors, key: other}

    def train(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """A new version, and what it must look like on every replica."""
        with self.as_job():
            self.job.step(self.config.steps)
        self.learn()

    def learn(self) -> None:
        """What the weights are now: a SHA-256 of each tensor, and logits; and whether a plain model gives these by the tensors' names."""
        with self.as_job():
            self.logits = serve.logits(self.job, self.tokens)
        tensors = {name: tensor for (name, _), tensor in self.gather().items()}
        self.digests = {name: sha256(tensor) for name, tensor in tensors.items()}
        if self.logits is not None and self.sends:
            plain = plain_logits(trainer_model(self.config), tensors, self.tokens).double()
            apart = (plain - self.logits.double()).abs().max() / self.logits.double().abs().max()
            self.ctx.record("plain_error", float(apart) if apart.isfinite() else math.inf)

    def refresh(self, cycle: int) -> None:
        if self.ctx.fault == "cache-after-offload":
            self.job.mover.release(("weights",))
        self.sync(cycle, self.targets(sleeping=False))
        if self.ctx.fault == "cache-after-offload":
            self.job.mover.restore()
        self.count()

    def offload(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """The replicas that wake get the trainer's devices: what they are brought comes from the cache."""
        self.job.mover.release()

    def expand(self, cycle: int) -> None:
        if self.sends:
            self.deliver(cycle, self.targets(sleeping=True), asleep=True)

    def verify(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self.tell_truth(self.targets())
        self.count()

    def tell_truth(self, targets: Sequence[Target]) -> None:
        """Tell replicas what they must have; what each finds it records itself."""
        if not self.sends:
            return
        assert self.logits is not None
        links = self.listener.accept([target.name for target in targets], self.config.deadline_s)
        logits = self.logits.cpu().contiguous()
        for link in links.values():
            link.send({"kind": "truth", "digests": self.digests, "shape": list(logits.shape)})
            link.send_bytes(memory(logits.view(-1).view(torch.uint8)))
        for link in links.values():
            link.expect("judged")
            link.close()
        self.ctx.record("version", self.sender.version)

    def shrink(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self.job.mover.restore()
        self.count()

    def end(self, cycle: int) -> None:
        with self.as_job():
            self.job.mover.close()
        del self.job
        super().end(cycle)

    # -- how -----------------------------------------------------------------------------------------------------------

    def gather(self) -> dict[Key, torch.Tensor]:
        """Full tensors of the live weights, on rank 0. Collective over the trainer."""
        if self.job.mover.away and self.ctx.fault == "cache-after-offload":
            # Without its guard a cache packs what the allocator hands out next. Here that is zeros, as fresh pages are.
            return (
                {spec.key: torch.zeros(spec.shape, dtype=spec.dtype) for spec in self.cache.layout.specs}
                if self.sends
                else {}
            )
        with self.as_job():
            return {(name, 0): tensor for name, tensor in shards.full_tensors(self.job.chunks)}

    def targets(self, *, sleeping: bool | None = None) -> list[Target]:
        """Receivers: all, those that share a device with the trainer, or the others."""
        config = self.config
        awake = "paused" if config.refresh == "paused" else "serving"
        return [
            Target(
                name=name_of(rank),
                rank=rank,
                place=self.place_of(rank),
                state="asleep" if sleeping else awake,  # type: ignore[arg-type]
                replica=f"replica {(rank - config.trainer_ranks) // config.infer_tp}",
            )
            for rank in range(config.trainer_ranks, config.ranks)
            if sleeping is None or config.sleeps((rank - config.trainer_ranks) // config.infer_tp) == sleeping
        ]

    def place_of(self, rank: int) -> Any:
        """Where a receiver lives: on this machine, since they meet at a socket of it; in which World is told by its rank."""
        worlds = [world for world, size in enumerate(self.ctx.world_sizes) for _ in range(size)]
        return self.where._replace(world=f"{self.ctx.meeting} {worlds[rank]}", gpu="")

    def sync(self, version: int, targets: Sequence[Target]) -> Report | None:
        if not self.sends:
            self.gather()
            return None
        return self.deliver(version, targets, dirty=broken.dirty(self.ctx.fault, self.cache))

    def deliver(
        self, version: int, targets: Sequence[Target], *, asleep: bool = False, dirty: Sequence[str] | None = None
    ) -> Report:
        """One sync by the sender, watched."""
        self.watch.reset("base" if version == BASE else self.path_of(asleep=asleep))
        self.others |= shared_memory().keys() - self.shared
        try:
            return self.told(self.sender.sync(version, targets, None if asleep else self.gather, dirty=dirty))
        finally:
            self.watch.record(self.ctx)

    def told(self, report: Report) -> Report:
        record = self.ctx.record
        record("bytes", report.bytes, "B")
        record("buckets", report.buckets)
        record("bucket_bytes", report.bucket_bytes, "B")
        record("receivers", report.receivers)
        record("answered", report.answered)
        record("wall", report.wall, "s")
        record("version", self.sender.version)
        record("tensors_verified", report.verified)
        record("tensors_sent", report.tensors)
        record("unlocked", self.unlocked)
        record("cache_copies", self.most // self.total)
        record("cache_bytes", self.most, "B")
        for name, count in report.transports.items():
            record("transport_receivers", count, transport=name)
        self.tell(report.log, report.began)
        return report

    def weigh(self) -> None:
        """Shared memory that syncs have made, at its peak; and whether another thread could take the sender's lock."""
        self.unlocked += takes(self.cache)
        held = shared_memory()
        files = {place: one.size for place, one in held.items() if one.name.startswith(MEMFD)}
        self.shared |= files.keys() - self.others
        self.named |= {one.name for one in held.values() if one.name.startswith(SHM)}
        self.most = max(self.most, sum(size for place, size in files.items() if place in self.shared))

    def names(self) -> list[str]:
        return [target.name for target in self.targets()]

    def held(self) -> set[Any]:
        """The copies out of which versions were sent may stay, as many as there may be; a name in /dev/shm may not."""
        held = super().held()
        homes = sorted(held & self.watch.homes)
        named = {name for name in self.named if Path(name).exists()}
        return (held - set(homes[: copies(self.config, self.ctx.fault)])) | named


def copies(config: Any, fault: str | None) -> int:
    """Versions in memory between syncs: a ring has one, some of whose bytes are there."""
    return 1 if streams(config, fault) else 2


def streams(config: Any, fault: str | None) -> bool:
    """Whether nobody needs a copy of a version: no replica sleeps, and none serves while it comes."""
    return config.refresh == "paused" and not config.shares and fault not in OF_THE_CACHE


def memory_of(config: Any, tensors: dict[Key, torch.Tensor], fault: str | None) -> Cache:
    if streams(config, fault):
        return Ring(layout(config, tensors, most=LARGEST), timeout_s=config.deadline_s)
    return Cache(layout(config, tensors), keep=True, timeout_s=config.deadline_s)


def plain_logits(config: ModelConfig, tensors: Mapping[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the last position by the plain model, which knows tensors by their names alone."""
    plain = PlainModel(config.geometry, dtype=model.DTYPES[config.dtype], device="meta")
    plain.load_state_dict(dict(tensors), assign=True)
    with torch.no_grad():
        logits: torch.Tensor = plain(tokens.to(next(iter(tensors.values())).device))
    return logits[:, -1].float()


def layout(config: Any, tensors: dict[Key, torch.Tensor], most: int | None = None) -> Layout:
    """Buckets of the size that was asked for, or found, which is at most `most` where larger tensors are split."""
    specs = [Spec(name, shard, tensor.dtype, tuple(tensor.shape)) for (name, shard), tensor in tensors.items()]
    if config.bucket_mib is not None:
        size = int(config.bucket_mib * 2**20)
    else:
        some = sum(spec.size for spec in specs) // LEAST_BUCKETS
        some = some if config.oversize == "split" else max(some, config.largest)
        size = min(automatic(specs, oversize=config.oversize), some)
        if most is not None and config.oversize == "split":
            size = min(size, most)
    return lay_out(specs, -(-size // ALIGN) * ALIGN, oversize=config.oversize)
