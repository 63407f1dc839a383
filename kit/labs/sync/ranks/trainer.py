"""The trainer's ranks in the sync lab. Rank 0 sends; the others take part in gathering the weights."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kit.labs.sync.config import trainer_model
from kit.labs.sync.ranks import broken
from kit.labs.sync.ranks.side import Side, failed, fill, lock_is_free, name_of
from kit.labs.sync.ranks.watch import Watch, sha256
from kit.measure.phase import MEMFD, SHM, log_steps, shared_memory
from kit.megatron import model, serve, shards
from kit.sync.buckets import ALIGN, automatic, lay_out, specs_of
from kit.sync.cache import BASE, LARGEST, Cache, Ring
from kit.sync.link import Listener
from kit.sync.sender import Sender, Target
from kit.sync.transports import memory
from kit.train.options import DEFAULTS
from kit.train.plain import PlainModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kit.labs.rankside import Context
    from kit.measure.phase import Place
    from kit.megatron.config import ModelConfig
    from kit.sync.buckets import Key, Layout
    from kit.sync.sender import Gathered, Report

MOVES = dataclasses.replace(DEFAULTS, first_lr=DEFAULTS.lr)  # no warm-up, so that the first step changes weights
OF_THE_CACHE = ("stale-bucket", "cache-after-offload")  # faults that need the cache
LEAST_BUCKETS = 8  # also for a model that would fit into fewer, because a run with one bucket proves little


class Trainer(Side):
    """Trains versions and sends them to the replicas."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self.sends = ctx.rank == 0
        self.digests: dict[str, str] = {}
        self.logits: torch.Tensor | None = None
        self.shared: set[Place] = set()  # memory files that appeared during a sync
        self.others: set[Place] = set()  # memory files that existed before, or appeared between syncs
        self.named: set[str] = set()  # files in /dev/shm that were open during a sync
        self.most = 0  # peak bytes of memory files that appeared during syncs
        self.unlocked = 0  # points of a sync at which the sender's lock was free
        self.total = 0  # bytes of all tensors
        self.stale = False  # a fault: a bucket with old bytes
        self.watch = Watch(lambda: self.sender.version, measure=self.weigh)

    def prepare(self, cycle: int) -> None:  # noqa: ARG002 - phases are called with their cycle
        """Build a training job with the base weights."""
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
        if self.config.shares:  # before anything is counted: the host memory for offloaded weights stays allocated
            self.job.mover.release()
            self.job.mover.restore()
        tensors = self.gather()
        self.total = sum(tensor.nbytes for tensor in tensors.values())
        if self.sends:
            self.cache = memory_of(self.config, tensors, self.ctx.fault)
            self.listener = self.scope.enter_context(Listener(name=self.ctx.meeting))
            self.scope.callback(self.cache.close)
            self.sender = broken.SENDERS.get(self.ctx.fault, Sender)(
                self.cache,
                self.listener,
                place=self.where,
                rank=0,
                device=self.ctx.device,
                transport=broken.LEAKY if self.ctx.fault == "leaked-group" else self.config.transport,
                verify=self.config.verify,
                share=self.config.verify_share,
                timeout_s=self.config.deadline_s,
            )
            self.sender.make = self.watch.wrap_make(self.sender.make)
        self.count()

    def base(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Version -1: a base with one changed number must be refused; then the real base is published, and no weights move."""
        self.update_truth()
        if self.sends:
            error = failed(lambda: self.sender.sync(BASE, self.targets(), self.other_base))
            named = (
                error is not None
                and error.tensors == (max(self.digests),)
                and error.peer in {target.name for target in self.targets()}
            )
            self.ctx.record("base_accepted", int(not named))
        else:
            self.gather()
        self.deliver(BASE, self.targets())
        self.send_truth(self.targets())
        self.count()

    def other_base(self) -> dict[Key, torch.Tensor]:
        """The gathered weights with one changed number in the last tensor."""
        tensors = self.gather()
        key = max(self.digests), 0
        other = tensors[key].clone()
        other.view(-1)[-1] += 1
        return {**tensors, key: other}

    def train(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Train a new version, and take the digests and logits that every replica must have."""
        with self.as_job():
            began = time.perf_counter()
            made = self.job.step(self.config.steps)
            seconds = time.perf_counter() - began
        log_steps(made, done=self.job.steps_done, seconds=seconds, device=str(self.ctx.device))
        self.update_truth()

    def update_truth(self) -> None:
        """Take a SHA-256 of each current tensor, and logits; compare the logits with those of a plain model loaded by tensor names."""
        with self.as_job():
            self.logits = serve.logits(self.job, self.tokens)
        tensors = {name: tensor for (name, _), tensor in self.gather().items()}
        self.digests = {name: sha256(tensor) for name, tensor in tensors.items()}
        if self.logits is not None and self.sends:
            plain = plain_logits(trainer_model(self.config), tensors, self.tokens).double()
            error = (plain - self.logits.double()).abs().max() / self.logits.double().abs().max()
            self.ctx.record("plain_error", float(error) if error.isfinite() else math.inf)

    def refresh(self, cycle: int) -> None:
        if self.ctx.fault == "cache-after-offload":
            self.job.mover.release(("weights",))
        self.stale = self.ctx.fault == "stale-bucket"
        self.deliver(cycle, self.targets(sleeping=False))
        self.stale = False
        if self.ctx.fault == "cache-after-offload":
            self.job.mover.restore()
        self.count()

    def offload(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Offload the trainer to make room for waking replicas, which get their weights from the cache."""
        self.job.mover.release()

    def expand(self, cycle: int) -> None:
        self.deliver(cycle, self.targets(sleeping=True), asleep=True)

    def verify(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self.send_truth(self.targets())
        self.count()

    def send_truth(self, targets: Sequence[Target]) -> None:
        """Send replicas the digests and logits that they must have; each records its own differences."""
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

    def gather(self) -> dict[Key, torch.Tensor]:
        """Full tensors of the live weights, on rank 0. Collective over the trainer."""
        if self.job.mover.away and self.ctx.fault == "cache-after-offload":
            # Without its guard a cache packs whatever memory the allocator returns next: here zeros, like fresh pages.
            specs = self.cache.layout.specs if self.sends else ()
            return {spec.key: torch.zeros(spec.shape, dtype=spec.dtype) for spec in specs}
        with self.as_job():
            return {(name, 0): tensor for name, tensor in shards.full_tensors(self.job.chunks)}

    def targets(self, *, sleeping: bool | None = None) -> list[Target]:
        """The receivers: all, those that share a device with the trainer, or the others."""
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
        """The location of a receiver: this machine, since both ends meet at a local socket, and the World of its rank."""
        gpu = self.where.gpu if self.ctx.devices[rank] == str(self.ctx.device) else ""
        return self.where._replace(world=self.ctx.world_of(rank), gpu=gpu)

    def deliver(self, version: int, targets: Sequence[Target], *, asleep: bool = False) -> Report | None:
        """One sync, observed by the lab on the sender; the other ranks take part in gathering the weights."""
        if not self.sends:
            if not asleep:
                self.gather()
            return None
        self.watch.reset("base" if version == BASE else self.path_of(asleep=asleep))
        self.others |= shared_memory().keys() - self.shared
        try:
            return self.record_report(self.sender.sync(version, targets, None if asleep else self.to_send))
        finally:
            self.watch.record(self.ctx)

    def to_send(self) -> Gathered:
        tensors = self.gather()
        return broken.OldBytes(self.cache, tensors) if self.stale else tensors

    def record_report(self, report: Report) -> Report:
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
        self.record_log(report.log, report.began)
        return report

    def weigh(self) -> None:
        """Measure the peak of shared memory that syncs allocated, and count points at which the sender's lock is free."""
        self.unlocked += lock_is_free(self.cache)
        held = shared_memory()
        files = {place: one.size for place, one in held.items() if one.name.startswith(MEMFD)}
        self.shared |= files.keys() - self.others
        self.named |= {one.name for one in held.values() if one.name.startswith(SHM)}
        self.most = max(self.most, sum(size for place, size in files.items() if place in self.shared))

    def held(self) -> set[Any]:
        """Without the segments from which versions were sent, of which one is allowed with a ring, else two; files in /dev/shm always
        count."""
        held = super().held()
        homes = sorted(held & self.watch.homes)[: 1 if streams(self.config, self.ctx.fault) else 2]
        return held - set(homes) | {name for name in self.named if Path(name).exists()}


def streams(config: Any, fault: str | None) -> bool:
    """Whether no copy of a version is needed: no replica sleeps, and none serves during a sync."""
    return config.refresh == "paused" and not config.shares and fault not in OF_THE_CACHE


def memory_of(config: Any, tensors: dict[Key, torch.Tensor], fault: str | None) -> Cache:
    if streams(config, fault):
        return Ring(layout(config, tensors, most=LARGEST), timeout_s=config.deadline_s)
    return Cache(layout(config, tensors), timeout_s=config.deadline_s)


def plain_logits(config: ModelConfig, tensors: Mapping[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the last position from the plain model, which is loaded by tensor names only."""
    plain = PlainModel(config.geometry, dtype=model.DTYPES[config.dtype], device="meta")
    plain.load_state_dict(dict(tensors), assign=True)
    with torch.no_grad():
        logits: torch.Tensor = plain(tokens.to(next(iter(tensors.values())).device))
    return logits[:, -1].float()


def layout(config: Any, tensors: dict[Key, torch.Tensor], most: int | None = None) -> Layout:
    """Buckets of the configured size, or of an automatic one, which is at most `most` if larger tensors may be split."""
    specs = specs_of(tensors)
    if config.bucket_mib is not None:
        size = int(config.bucket_mib * 2**20)
    else:
        some = sum(spec.size for spec in specs) // LEAST_BUCKETS
        some = some if config.oversize == "split" else max(some, config.largest)
        size = min(automatic(specs, oversize=config.oversize), some)
        if most is not None and config.oversize == "split":
            size = min(size, most)
    return lay_out(specs, -(-size // ALIGN) * ALIGN, oversize=config.oversize)
