"""The trainer of the sync lab: its rank 0 sends, and its other ranks take part in gathering the weights."""

from __future__ import annotations

import dataclasses
import math
import mmap
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kit.actors.common import address_for
from kit.engines.changes import ChangeOracle
from kit.engines.contents import Contents, ModuleTensors, listed_names, sha256
from kit.labs import rankside
from kit.labs.sync.lab import SyncConfig, trainer_model
from kit.labs.sync.ranks.side import ANY, Side, beyond_garbage, error_of, fill, miscounted, plain_logits, worst_error
from kit.labs.sync.ranks.watch import SyncWatch
from kit.measure.observers.tensors import TensorState, held_bytes
from kit.measure.phase import MEMFD, SHM, Place, log_steps, memory_pages, shared_bytes, shared_memory
from kit.megatron import model, scales, serve, shards
from kit.megatron.tensors import KINDS, Elsewhere
from kit.sync import transports
from kit.sync.buckets import ALIGN, Cut, Key, Layout, automatic, lay_out, specs_of
from kit.sync.cache import BASE, LARGEST, Cache, Ring, Segment
from kit.sync.link import call
from kit.sync.receiver import SENDER
from kit.sync.sender import Gathered, Report, Sender, SyncFailed, Target
from kit.train.options import DEFAULTS


class HeldOnHost(NamedTuple):
    private: int  # bytes of tensors outside of shared memory
    weights: list[int]  # of these, of each storage of weights on the device
    trained: int  # of these, gradients and optimizer
    others: int  # of these, everything else, also where it hangs on the job's parameters and modules
    files: dict[Place, int]
    homes: list[Place]  # files from which buckets were sent


KITS = "kit-"  # how the kit's own memory files are named
KEPT = 2  # versions that a sender may hold: what is more is counted once garbage is gone
LEAST_BUCKETS = 8  # also for a model that would fit into fewer, because a run with one bucket proves little


class SyncTrainer(Side):
    def __init__(self, ctx: rankside.Context) -> None:
        super().__init__(ctx)
        self.sends = ctx.rank == 0
        self.digests: dict[str, str] = {}
        self.changed: list[str] = []  # tensors that training changed since the truth before
        self.logits: torch.Tensor | None = None
        self.oracle = ChangeOracle()
        self.shared: set[Place] = set()  # memory files that appeared during a sync
        self.outside: set[Place] = set()  # memory files that existed before, or appeared between syncs
        self.named: set[str] = set()  # files in /dev/shm that were open during a sync
        self.most = 0  # peak bytes of memory files that appeared during syncs
        self.version_bytes = 0  # of one version in the lab's own buckets, each of which begins a page
        self.steps_sent = -1  # the trainer's steps when it sent a version last
        self.unlocked = 0  # points of a sync at which the sender's lock was free
        self.watch = SyncWatch(lambda: self.version, measure=self.weigh)

    @property
    def version(self) -> int:
        """The version that replicas run."""
        return self.sender.version

    def prepare(self, cycle: int) -> None:  # noqa: ARG002 - phases are called with their cycle
        self.enter()
        self.make_job()
        self.contents = Contents(ModuleTensors(self.job.chunks))
        self.asked = self.prompts(trainer_model(self.config).geometry.vocab)
        if self.config.shares:  # before anything is counted: the host memory for offloaded weights stays allocated
            self.job.mover.release(KINDS if self.config.arena == "own" else KINDS[1:])
            self.job.mover.restore()
        tensors = self.gather()
        self.total = sum(tensor.nbytes for tensor in tensors.values())
        self.make_sender(tensors)
        self.count()

    def make_sender(self, tensors: dict[Key, torch.Tensor]) -> None:
        if not self.sends:
            return
        self.version_bytes = bytes_in_pages(layout(self.config, tensors).sizes)
        self.cache = memory_of(self.config, tensors)
        self.scope.callback(self.cache.close)
        self.sender = Sender(
            self.cache,
            self.listener,
            place=self.where,
            rank=0,
            device=self.ctx.device,
            transport=self.config.transport,
            verify=self.config.verify,
            share=self.config.verify_share,
            timeout_s=self.config.deadline_s,
            config={"host": self.ctx.host} if self.ctx.host else {},
            delta=self.config.delta,
        )
        self.sender.make = self.watch.wrap_make(self.sender.make)

    def make_job(self) -> None:
        config = trainer_model(self.config)
        # No warm-up, so that the first step changes weights.
        settings = dataclasses.replace(
            DEFAULTS, first_lr=self.config.lr, lr=self.config.lr, last_lr=self.config.lr / 10
        )
        with self.as_job():
            self.job = model.build(config, settings)
            self.job.mover.arena.open()  # now, so that its file is no growth after the first release
            if self.config.kv_scales:
                scales.add_scales(self.job.chunks)
            fill(self.job.chunks, config)
            self.job.optimizer.reload_model_params()
        self.at_first = self.held_on_host()  # before there can be a copy of the weights

    def base(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Version -1: a base with two changed numbers must be refused; then the real base is published, and no weights move."""
        self.update_truth()
        targets = self.targets()
        if self.sends:
            error = error_of(lambda: self.sender.sync(BASE, targets, self.other_base), ANY)
            wrong = min(self.digests), max(self.digests)
            named = (
                isinstance(error, SyncFailed)
                and error.tensors == wrong
                and error.peer in {target.name for target in targets}
                and not [*miscounted(str(error), wrong, self.digests)]
            )
            self.ctx.record("base_accepted", int(not named))
        else:
            self.gather()
        self.deliver(BASE, targets)
        self.send_truth(targets)
        self.count()

    def other_base(self) -> dict[Key, torch.Tensor]:
        """The gathered weights with one changed number in two of the tensors."""
        tensors = self.gather()
        for key in ((min(self.digests), 0), (max(self.digests), 0)):
            tensors[key] = tensors[key].clone()
            tensors[key].view(-1)[-1] += 1
        return tensors

    def train(self, cycle: int) -> None:  # noqa: ARG002 - as above
        with self.as_job():
            began = time.perf_counter()
            steps = self.job.step(self.config.steps)
            seconds = time.perf_counter() - began
            if self.config.kv_scales:
                scales.calibrate(self.job.chunks)
        log_steps(steps, done=self.job.steps_done, seconds=seconds, device=str(self.ctx.device))
        self.update_truth()

    def update_truth(self) -> None:
        """Take a SHA-256 of each current tensor, and logits; compare the logits with those of a plain model loaded by tensor names."""
        with self.as_job():
            answers = [serve.logits(self.job, tokens) for tokens in self.asked]
        self.logits = torch.stack([logits for logits in answers if logits is not None]) if self.sends else None
        first = not self.contents.seen
        changed = self.everywhere(self.contents.changed())
        self.changed = [] if first else changed
        tensors = {name: tensor for (name, _), tensor in self.gather().items()}
        self.digests = {name: sha256(tensor) for name, tensor in tensors.items()}
        if self.config.delta != "off" and self.sends:
            self.record_changes(tensors)
        if self.logits is not None and self.sends:
            plain = [plain_logits(trainer_model(self.config), tensors, tokens) for tokens in self.asked]
            self.ctx.record("plain_error", worst_error(plain, self.logits))

    def record_changes(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """What changed since the truth before, and the bytes that this needs."""
        if changed := self.oracle.compare(tensors):
            self.ctx.record(
                "words_changed", sum(each.changed for each in changed), of=sum(each.words for each in changed)
            )
            self.ctx.record("bytes_needed", sum(each.needed(self.config.delta) for each in changed), "B")
        self.oracle.remember(tensors)

    def everywhere(self, names: set[str]) -> list[str]:
        """Names from all ranks of the trainer. Collective."""
        with self.as_job():
            tables: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(tables, names)
        return sorted(set().union(*tables))

    def refresh(self, cycle: int) -> None:
        self.deliver(cycle, self.targets(sleeping=False))
        self.steps_sent = self.job.steps_done
        self.count()

    def offload(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Offload the trainer to make room for waking replicas, which get their weights from the cache."""
        before = self.held_on_host()
        lends = self.config.arena == "cache" and self.steps_sent == self.job.steps_done
        self.job.mover.release(elsewhere=self.in_buckets() if lends else None)
        self.record_offloaded(before)

    def in_buckets(self) -> Elsewhere:
        """The weights in the buckets of the version that was made from them; every rank of the trainer maps these."""
        self.bucket_memory = self.map_buckets()
        layout, _, _ = self.bucket_memory
        with self.as_job():
            places = shards.destinations(self.job.chunks)
            parts = [part for chunk in self.job.chunks for part in shards.parts_of_chunk(chunk)]
        # A bucket holds the first tensor rank's copy of what all of them have, such as norms: other ranks keep their own.
        for name in {name for part in parts if part.how == shards.WHOLE and part.place.rank for name in part.full}:
            del places[name]
        # A stage of a pipeline has only some of the tensors.
        weights = Cut({spec.name: places.get(spec.name, ()) for spec in layout.specs}, ())
        tensors = [into for several in places.values() for into, _ in several]
        return Elsewhere(tensors, torch.no_grad()(lambda: self.fill_from_buckets(weights)))

    def map_buckets(self) -> tuple[Layout, Sequence[int], Segment]:
        """The memory of the active version. Collective over the trainer."""
        if not self.sends:
            name = f"trainer {self.ctx.rank}"
            with call(address_for(self.ctx, "sync"), name, peer=SENDER, timeout_s=self.config.deadline_s) as link:
                message, (fd,) = link.expect("buckets")
                return Layout.from_json(message["layout"]), message["starts"], Segment.attach(fd)
        layout, segment = self.cache.layout, self.cache.segment(self.version)
        names = [f"trainer {rank}" for rank in range(1, self.config.trainer_ranks)]
        for link in self.listener.accept(names, self.config.deadline_s).values():
            link.send({"kind": "buckets", "layout": layout.to_json(), "starts": self.cache.starts}, [segment.fd])
            link.close()
        return layout, self.cache.starts, segment

    def fill_from_buckets(self, weights: Cut) -> None:
        layout, starts, segment = self.bucket_memory
        bound = weights.bind(layout)
        for index, (start, size) in enumerate(zip(starts, layout.sizes, strict=True)):
            bound.apply(index, segment.tensor[start : start + size])
        if not self.sends:
            segment.close()
        del self.bucket_memory

    def held_on_host(self) -> HeldOnHost:
        """What this rank holds in tensors and in files of memory."""
        state = TensorState(chunks=self.job.chunks, optimizer=self.job.optimizer)
        private, own = self.tensor_bytes(), self.ctx.device.type
        resident = {kind: state.resident(kind) for kind in {"cpu", own}}
        weights = [item.size for item in resident[own] if item.kind == "weights"]
        trained = sum(item.size for items in resident.values() for item in items if item.kind in KINDS[1:])
        homes = list(self.watch.homes)
        return HeldOnHost(private, weights, trained, private - sum(weights) - trained, memory_pages(), homes)

    def record_offloaded(self, before: HeldOnHost) -> None:
        """Record copies of the weights on the host beside the buckets, and weights that did not leave. Collective over the trainer."""
        with self.as_job():
            tables: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(tables, (self.at_first, before, self.held_on_host()))
        weights = sum(sum(first.weights) for first, _, _ in tables)
        homes = {home for _, _, now in tables for home in now.homes}
        files = {
            place: max(0, size - first.files.get(place, 0))
            for first, _, now in tables
            for place, size in now.files.items()
            if place not in homes
        }
        held = sum(now.private for _, _, now in tables) + sum(files.values())
        others = sum(first.others + was.trained for first, was, _ in tables)
        self.ctx.record("offloaded_left", sum(len(now.weights) for _, _, now in tables))
        self.ctx.record("host_copies", (held - others) / weights)

    def expand(self, cycle: int) -> None:
        self.deliver(cycle, self.targets(sleeping=True), asleep=True)

    def verify(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self.send_truth(self.targets())
        self.weigh_tensors()
        self.count()

    def tensor_bytes(self) -> int:
        return held_bytes() - shared_bytes()

    def send_truth(self, targets: Sequence[Target]) -> None:
        """Send replicas the digests and logits that they must have; each records its own differences."""
        if not self.sends:
            return
        assert self.logits is not None
        links = self.listener.accept([target.name for target in targets], self.config.deadline_s)
        logits = self.logits.cpu().contiguous()
        for link in links.values():
            link.send({"kind": "truth", "digests": self.digests, "changed": self.changed, "shape": list(logits.shape)})
            link.send_bytes(transports.memory(logits.view(-1).view(torch.uint8)))
        for link in links.values():
            link.expect("judged")
            link.close()
        self.ctx.record("version", self.version)

    def shrink(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self.reload()
        self.count()

    def reload(self) -> None:
        self.job.mover.restore()
        changed = self.contents.changed()
        self.ctx.record("restored_wrong", len(changed), text=listed_names(sorted(changed)))

    def end(self, cycle: int) -> None:
        with self.as_job():
            self.job.mover.close()
        del self.job
        super().end(cycle)

    def gather(self) -> dict[Key, torch.Tensor]:
        """Full tensors of the live weights, on rank 0. Collective over the trainer."""
        with self.as_job():
            return {(name, 0): tensor for name, tensor in shards.full_tensors(self.job.chunks)}

    def targets(self, *, sleeping: bool | None = None) -> list[Target]:
        """The receivers: all, those that share a device with the trainer, or the others."""
        config = self.config
        awake = "paused" if config.refresh == "paused" else "serving"
        replicas = {rank: (rank - config.trainer_ranks) // config.infer_tp for rank in range(config.ranks)}
        return [
            Target(
                name=f"rank {rank}",
                rank=rank,
                place=self.place_of(rank),
                state="asleep" if sleeping else awake,  # type: ignore[arg-type]
                replica=f"replica {replica}",
            )
            for rank, replica in replicas.items()
            if replica >= 0 and (sleeping is None or config.sleeps(replica) == sleeping)
        ]

    def place_of(self, rank: int) -> Any:
        """The location of a receiver: its machine, the World of its rank, and the trainer's GPU if it shares it."""
        host = self.ctx.machine_of(rank)
        shares = host == self.where.host and self.ctx.devices[rank] == str(self.ctx.device)
        return self.where._replace(host=host, world=self.ctx.world_of(rank), gpu=self.where.gpu if shares else "")

    def deliver(self, version: int, targets: Sequence[Target], *, asleep: bool = False) -> Report | None:
        """One sync, observed by the lab on the sender; the other ranks take part in gathering the weights."""
        if not self.sends:
            if not asleep:
                self.gather()
            return None
        self.watch.reset("base" if version == BASE else self.path_of(asleep=asleep))
        self.outside |= shared_memory().keys() - self.shared
        try:
            report = self.sender.sync(version, targets, None if asleep else self.to_send)
            self.record_report(report)
            return report
        finally:
            self.watch.record(self.ctx)

    def to_send(self) -> Gathered:
        return self.gather()

    def record_report(self, report: Report) -> None:
        numbers = {
            "bytes": (report.bytes, "B"),
            "buckets": (report.buckets, "1"),
            "bucket_bytes": (report.bucket_bytes, "B"),
            "receivers": (report.receivers, "1"),
            "answered": (report.answered, "1"),
            "wall": (report.wall, "s"),
            "version": (self.sender.version, "1"),
            "tensors_verified": (report.verified, "1"),
            "tensors_sent": (report.tensors, "1"),
            "unlocked": (self.unlocked, "1"),
            "cache_copies": (self.copies(), "1"),
            "cache_bytes": (self.most, "B"),
        }
        for metric, (value, unit) in numbers.items():
            self.ctx.record(metric, value, unit)
        for name, count in report.transports.items():
            self.ctx.record("transport_receivers", count, transport=name)
        self.record_log(report.log, report.began)

    def copies(self) -> float:
        """Copies of the model in those files. The pages that small buckets leave unfilled are no copy."""
        return self.most / self.version_bytes

    def weigh(self) -> None:
        """Measure the peak of shared memory that syncs allocated, and count points at which the sender's lock is free."""
        self.unlocked += lock_is_free(self.cache)
        self.most = max(self.most, beyond_garbage(self.bytes_of_syncs, max(self.most, KEPT * self.version_bytes)))

    def bytes_of_syncs(self) -> int:
        held = shared_memory()
        files = {place: file.size for place, file in held.items() if file.name.startswith(MEMFD)}
        self.shared |= files.keys() - self.outside
        self.named |= {file.name for file in held.values() if file.name.startswith(SHM)}
        # A transport that is not the kit's may stage buckets in files of its own.
        counted = MEMFD + KITS * self.config.own_transport
        counts = [
            size for place, size in files.items() if place in self.shared and held[place].name.startswith(counted)
        ]
        return sum(counts)

    def waiting(self) -> int:
        return self.listener.waiting if self.sends else 0

    def held(self) -> set[Any]:
        """Without the segments from which versions were sent, of which one is allowed with a ring, else two; a version that changes were
        sent of has one that nothing was sent from. Files in /dev/shm always count."""
        held = super().held()
        homes = sorted(held & (self.watch.homes if self.config.delta == "off" else self.shared))[
            : 1 if streams(self.config) else 2
        ]
        return held - set(homes) | {name for name in self.named if Path(name).exists()}


def streams(config: SyncConfig) -> bool:
    """Whether no copy of a version is needed: no replica sleeps, none serves during a sync, and no later version is compared with it."""
    return config.refresh == "paused" and not config.shares and config.delta == "off"


def memory_of(config: SyncConfig, tensors: dict[Key, torch.Tensor]) -> Cache:
    if streams(config):
        return Ring(layout(config, tensors, most=LARGEST), timeout_s=config.deadline_s)
    return Cache(layout(config, tensors), timeout_s=config.deadline_s)


def layout(config: Any, tensors: dict[Key, torch.Tensor], most: float = math.inf) -> Layout:
    """Buckets of the configured size, or of an automatic one, which is at most `most` if larger tensors may be split."""
    specs = specs_of(tensors)
    if config.bucket_mib is not None:
        size = int(config.bucket_mib * 2**20)
    else:
        limit: float = sum(spec.size for spec in specs) // LEAST_BUCKETS
        limit = min(limit, most) if config.oversize == "split" else max(limit, config.largest)
        size = int(min(automatic(specs, oversize=config.oversize), limit))
    unit = (
        mmap.PAGESIZE if config.refresh == "adopted" else ALIGN
    )  # without a gap to the next bucket, which begins a page
    return lay_out(specs, -(-size // unit) * unit, oversize=config.oversize)


def bytes_in_pages(sizes: Sequence[int]) -> int:
    """Of buckets, each of which begins a page."""
    return sum(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes)


def lock_is_free(cache: Cache) -> bool:
    """Whether another thread could take the lock of the cache."""

    def take() -> None:
        with cache.held("a rehearsal", timeout_s=0):
            pass

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(error_of, take).result() is None
