"""The trainer's ranks in the sync lab. Rank 0 sends; the others take part where weights are gathered."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from kit.labs.sync import broken, rehearse, sweep
from kit.labs.sync.config import trainer_model
from kit.labs.sync.side import Side, fill, name_of
from kit.megatron import model, serve, shards
from kit.sync.cache import BASE, Cache
from kit.sync.hashes import digest
from kit.sync.layout import ALIGN, Spec, automatic, lay_out
from kit.sync.link import Listener
from kit.sync.ring import LARGEST, Ring
from kit.sync.sender import Target
from kit.sync.transports.serialize import memory
from kit.train.settings import DEFAULTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kit.labs.rankside import Context
    from kit.sync.layout import Key, Layout
    from kit.sync.sender import Report, Sender

MOVES = dataclasses.replace(DEFAULTS, first_lr=DEFAULTS.lr)  # no warm-up: the first step makes other weights, too
PROOF = "sha256"
OF_THE_CACHE = ("stale-bucket", "cache-after-offload")  # faults that need one
LEAST_BUCKETS = 8  # of a model that would fit into less: a run with one bucket proves little


class Trainer(Side):
    """Trains versions, and brings them to the replicas."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self.sends = ctx.rank == 0
        self.digests: dict[str, str] = {}
        self.logits: torch.Tensor | None = None
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
            fill(self.job.chunks, config.geometry, model.DTYPES[config.dtype], self.config.seed)
            self.job.optimizer.reload_model_params()
            if self.ctx.fault == "resumed-trainer":
                self.job.step()
        self.tokens = self.prompt(config.geometry.vocab)
        if self.config.shares:  # once before anything is counted: the memory to put weights aside is kept
            self.job.mover.release()
            self.job.mover.restore()
        tensors = self.gather()
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
        self.count()

    def base(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Version -1: nothing moves, where all weights are equal."""
        report = self.sync(BASE, self.targets())
        if report is not None:
            self.ctx.record("base_differ", sum(map(len, report.base_differs.values())))
            self.ctx.record("base_compared", report.verified * len(report.base_differs))
        self.count()

    def train(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """A new version, and what it must look like on every replica: a digest of each tensor, and logits."""
        with self.as_job():
            self.job.step(self.config.steps)
            self.logits = serve.logits(self.job, self.tokens)
        self.digests = {name: digest(tensor, PROOF) for (name, _), tensor in self.gather().items()}

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
            self.told(self.sender.sync(cycle, self.targets(sleeping=True)))

    def verify(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Tell every replica what it must have; what it finds it records itself."""
        if self.sends:
            assert self.logits is not None
            names = [target.name for target in self.targets()]
            links = self.listener.accept(names, self.config.deadline_s)
            logits = self.logits.cpu().contiguous()
            for link in links.values():
                link.send({"kind": "truth", "digests": self.digests, "shape": list(logits.shape)})
                link.send_bytes(memory(logits.view(-1).view(torch.uint8)))
            for link in links.values():
                link.expect("judged")
                link.close()
            self.ctx.record("version", self.sender.version)
        self.count()

    def shrink(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self.job.mover.restore()
        self.count()

    def sweep(self, cycle: int) -> None:  # noqa: ARG002 - as above
        if self.sends:
            sweep.send(self)

    def rehearse(self, cycle: int) -> None:  # noqa: ARG002 - as above
        rehearse.trainer(self)
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
            )
            for rank in range(config.trainer_ranks, config.ranks)
            if sleeping is None or config.sleeps((rank - config.trainer_ranks) // config.infer_tp) == sleeping
        ]

    def place_of(self, rank: int) -> Any:
        """Where a receiver lives: on this machine, since they meet at a socket of it; in which World is told by its rank."""
        worlds = [world for world, size in enumerate(self.ctx.world_sizes) for _ in range(size)]
        return self.where._replace(world=f"{self.ctx.meeting} {worlds[rank]}", card="")

    def sync(self, version: int, targets: Sequence[Target]) -> Report | None:
        if not self.sends:
            self.gather()
            return None
        return self.told(
            self.sender.sync(version, targets, self.gather, dirty=broken.dirty(self.ctx.fault, self.cache))
        )

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
        record("cache_copies", report.copies)
        record("cache_bytes", self.cache.nbytes, "B")
        for name, count in report.transports.items():
            record(f"transport/{name}", count)
        self.tell(report.log, report.began)
        return report

    def count(self, own: int = 0) -> None:
        super().count(own + (self.cache.blocks if self.sends else 0))


def memory_of(config: Any, tensors: dict[Key, torch.Tensor], fault: str | None) -> Cache:
    """A ring where nobody needs a copy of a version: no replica sleeps, and none serves while it comes."""
    if config.refresh == "paused" and not config.shares and fault not in OF_THE_CACHE:
        return Ring(layout(config, tensors, most=LARGEST), timeout_s=config.deadline_s)
    return Cache(layout(config, tensors), keep=True, timeout_s=config.deadline_s)


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
