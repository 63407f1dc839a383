"""The two sides of the sync lab. The trainer's rank 0 sends, and its other ranks take part in gathering the weights. The ranks of a replica
serve, sleep and receive; each cuts its own shards out of full tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kit.errors import KitError
from kit.labs import rankside
from kit.labs.bystander import Bystander
from kit.labs.sync.lab import SyncConfig, replica_model, roles, trainer_model
from kit.labs.sync.ranks import broken
from kit.labs.sync.ranks.watch import Forwards, SeenWeights, Watch, judge, sha256
from kit.machine import host
from kit.measure.observers.tensors import State
from kit.measure.phase import MEMFD, SHM, Place, log_steps, shared_memory
from kit.megatron import groups, model, ownership, serve, shards, standin
from kit.megatron.config import Geometry, ModelConfig
from kit.sync import transports
from kit.sync.buckets import ALIGN, Cut, Key, Layout, automatic, lay_out, specs_of
from kit.sync.cache import BASE, LARGEST, Cache, Ring
from kit.sync.hashes import digest
from kit.sync.link import Listener, address_of, call
from kit.sync.receiver import SENDER, Call, Receiver
from kit.sync.sender import Gathered, Log, Report, Sender, SyncFailed, Target
from kit.sync.serving import Serving
from kit.train.options import DEFAULTS
from kit.train.plain import PlainModel

ROWS, LENGTH = 2, 8  # of the prompt; its logits are compared
MOVES = dataclasses.replace(DEFAULTS, first_lr=DEFAULTS.lr)  # no warm-up, so that the first step changes weights
OF_THE_CACHE = ("stale-bucket", "cache-after-offload")  # faults that need the cache
LEAST_BUCKETS = 8  # also for a model that would fit into fewer, because a run with one bucket proves little


class Side:
    """One rank of the trainer or of a replica. Its job uses `self.group` as its whole world."""

    def __init__(self, ctx: rankside.Context) -> None:
        self.ctx = ctx
        self.config: SyncConfig = ctx.config
        self.address = address_of(ctx.meeting)
        self.scope = contextlib.ExitStack()
        self.group: Any = None
        self.bystander: Bystander | None = None
        gpu = ""
        if ctx.device.type == "cuda" and not transports.needs_permission():
            gpu = str(torch.cuda.get_device_properties(ctx.device).uuid)
        self.where = transports.Place(host=host(), world=ctx.world_of(ctx.rank), gpu=gpu)

    def enter(self) -> None:
        """Create the groups of the trainer and of each replica. All ranks create all groups in the same order."""
        config = self.config
        if self.ctx.device.type == "cuda":
            self.bystander = Bystander(str(self.ctx.device))
            self.scope.callback(self.bystander.close)
        self.scope.enter_context(ownership.as_found(timeout_s=config.deadline_s))
        groups.install()
        standin.install()
        first = config.trainer_ranks
        jobs = [range(first), *(range(at, at + config.infer_tp) for at in range(first, config.ranks, config.infer_tp))]
        before = sum(self.ctx.world_sizes[: self.ctx.world])
        here = range(before, before + self.ctx.world_sizes[self.ctx.world])
        for ranks in jobs:
            if ranks[0] in here:
                made = dist.new_group([rank - before for rank in ranks])
                self.group = made if self.ctx.rank in ranks else self.group

    def as_job(self) -> contextlib.AbstractContextManager[None]:
        return serve.as_world(self.group)

    def end(self, cycle: int) -> None:  # noqa: ARG002 - phases are called with their cycle
        self.scope.close()

    def path_of(self, *, asleep: bool) -> str:
        """The path of a sync to sleeping replicas, or to the others."""
        return "expand" if asleep else "refresh" if self.config.refresh == "staged" else "stream"

    def record_log(self, log: Log, began: float) -> None:
        for stage, seconds in log.seconds.items():
            self.ctx.record("stage_seconds", seconds, "s", stage=stage)
        for number, (name, when) in enumerate(log.events):
            self.ctx.record("event", when - began, "s", event=name, order=number)

    def held(self) -> set[Any]:
        """Shared memory on this rank that a sync should not leave behind."""
        return set(shared_memory())

    def count(self) -> None:
        self.ctx.record("segments", len(self.held()))
        for metric, value in self.bystander.ask().items() if self.bystander else ():
            self.ctx.record(metric, value, "B")

    def prompt(self, vocab: int) -> torch.Tensor:
        return torch.randint(0, vocab, (ROWS, LENGTH), generator=torch.Generator().manual_seed(self.config.seed))


# -- the trainer -----------------------------------------------------------------------------------------------------------


class Trainer(Side):
    def __init__(self, ctx: rankside.Context) -> None:
        super().__init__(ctx)
        self.sends = ctx.rank == 0
        self.digests: dict[str, str] = {}
        self.logits: torch.Tensor | None = None
        self.shared: set[Place] = set()  # memory files that appeared during a sync
        self.others: set[Place] = set()  # memory files that existed before, or appeared between syncs
        self.named: set[str] = set()  # files in /dev/shm that were open during a sync
        self.most = 0  # peak bytes of memory files that appeared during syncs
        self.unlocked = 0  # points of a sync at which the sender's lock was free
        self.stale = False  # a fault: a bucket with old bytes
        self.watch = Watch(lambda: self.sender.version, measure=self.weigh)

    def prepare(self, cycle: int) -> None:  # noqa: ARG002 - phases are called with their cycle
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
        targets = self.targets()
        if self.sends:
            error = raised(lambda: self.sender.sync(BASE, targets, self.other_base))
            named = (
                isinstance(error, SyncFailed)
                and error.tensors == (max(self.digests),)
                and error.peer in {target.name for target in targets}
            )
            self.ctx.record("base_accepted", int(not named))
        else:
            self.gather()
        self.deliver(BASE, targets)
        self.send_truth(targets)
        self.count()

    def other_base(self) -> dict[Key, torch.Tensor]:
        """The gathered weights with one changed number in the last tensor."""
        tensors = self.gather()
        key = max(self.digests), 0
        tensors[key] = tensors[key].clone()
        tensors[key].view(-1)[-1] += 1
        return tensors

    def train(self, cycle: int) -> None:  # noqa: ARG002 - as above
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
            plain = plain_logits(trainer_model(self.config), tensors, self.tokens)
            self.ctx.record("plain_error", logits_error(plain, self.logits))

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
            link.send_bytes(transports.memory(logits.view(-1).view(torch.uint8)))
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
            report = self.sender.sync(version, targets, None if asleep else self.to_send)
            self.record_report(report)
            return report
        finally:
            self.watch.record(self.ctx)

    def to_send(self) -> Gathered:
        tensors = self.gather()
        return broken.OldBytes(self.cache, tensors) if self.stale else tensors

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
            "cache_copies": (self.most // self.total, "1"),
            "cache_bytes": (self.most, "B"),
        }
        for metric, (value, unit) in numbers.items():
            self.ctx.record(metric, value, unit)
        for name, count in report.transports.items():
            self.ctx.record("transport_receivers", count, transport=name)
        self.record_log(report.log, report.began)

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


def streams(config: SyncConfig, fault: str | None) -> bool:
    """Whether no copy of a version is needed: no replica sleeps, and none serves during a sync."""
    return config.refresh == "paused" and not config.shares and fault not in OF_THE_CACHE


def memory_of(config: SyncConfig, tensors: dict[Key, torch.Tensor], fault: str | None) -> Cache:
    if streams(config, fault):
        return Ring(layout(config, tensors, most=LARGEST), timeout_s=config.deadline_s)
    return Cache(layout(config, tensors), timeout_s=config.deadline_s)


def layout(config: Any, tensors: dict[Key, torch.Tensor], most: float = math.inf) -> Layout:
    """Buckets of the configured size, or of an automatic one, which is at most `most` if larger tensors may be split."""
    specs = specs_of(tensors)
    if config.bucket_mib is not None:
        size = int(config.bucket_mib * 2**20)
    else:
        some: float = sum(spec.size for spec in specs) // LEAST_BUCKETS
        some = min(some, most) if config.oversize == "split" else max(some, config.largest)
        size = int(min(automatic(specs, oversize=config.oversize), some))
    return lay_out(specs, -(-size // ALIGN) * ALIGN, oversize=config.oversize)


def lock_is_free(cache: Cache) -> bool:
    """Whether another thread could take the lock of the cache."""

    def take() -> None:
        with cache.held("a rehearsal", timeout_s=0):
            pass

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(raised, take).result() is None


def plain_logits(config: ModelConfig, tensors: Mapping[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the last position from the plain model, which is loaded by tensor names only."""
    plain = PlainModel(config.geometry, dtype=model.DTYPES[config.dtype], device="meta")
    plain.load_state_dict(dict(tensors), assign=True)
    with torch.no_grad():
        logits: torch.Tensor = plain(tokens.to(next(iter(tensors.values())).device))
    return logits[:, -1].float()


# -- a replica -------------------------------------------------------------------------------------------------------------


class Inference(Side):
    """One rank of a replica, and the host of its receiver."""

    def __init__(self, ctx: rankside.Context) -> None:
        super().__init__(ctx)
        alike = next(role.ranks for role in roles(self.config) if ctx.rank in role.ranks)
        self.sleeper = self.config.sleeps((ctx.rank - self.config.trainer_ranks) // self.config.infer_tp)
        self.sweeps = ctx.rank == self.config.ranks - 1
        self.last = ctx.rank == alike[-1]  # of the receivers of one sync
        self.of_last_replica = ctx.rank in alike[-self.config.infer_tp :]
        self.cut: Callable[[Cut], Cut] = lambda weights: weights  # a rehearsal gives the receiver other weights
        self.truth: dict[str, str] = {}  # the trainer's digests of the version that this replica must have
        self.own: dict[str, str] = {}  # the digests of this replica's weights when they were last hashed

    def prepare(self, cycle: int) -> None:  # noqa: ARG002 - phases are called with their cycle
        self.enter()
        config = replica_model(self.config)
        with self.as_job():
            self.replica = serve.Replica(config)
            fill(self.replica.chunks, config.geometry, model.DTYPES[config.dtype], self.config.seed)
        tokens = self.prompt(config.geometry.vocab)
        wait = self.config.deadline_s

        def forward() -> torch.Tensor:
            if self.ctx.device.type == "cuda":
                torch.cuda.set_device(self.ctx.device)  # every thread begins with the first GPU
            with standin.on_this_thread():
                return self.replica.logits(tokens)

        self.forwards = Forwards(forward, lambda: self.receiver, wait)
        self.serving = Serving(self.forwards, group=self.group, timeout_s=wait)
        broken.serving(self.ctx.fault, self.serving, next(self.replica.chunks[0].parameters()))
        self.receiver = self.new_receiver(self.weights)
        self.watch = Watch(lambda: self.receiver.version, lambda: self.receiver.routed, self.forwards, self.serving)
        self.receiver.make = self.watch.wrap_make(self.receiver.make)
        self.receiver.calls = self.watch.wrap_call(broken.call_of(self.ctx.fault, last=self.sweeps))
        self.count()

    def new_receiver(self, weights: Callable[[], Any]) -> Receiver:
        return Receiver(
            f"rank {self.ctx.rank}",
            weights,
            self,
            address=self.address,
            device=self.ctx.device,
            timeout_s=self.config.deadline_s,
        )

    def base(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """First the trainer pretends that a tensor differs, which must be refused; then the base is published."""
        self.ctx.record("base_accepted", int(raised(self.receiver.join) is None))
        self.watch.reset("base")
        try:
            self.record_received(self.receiver.join())
        finally:
            self.watch.record(self.ctx)
        self.compare()
        if self.sleeper:
            self.leave()
        self.count()

    def refresh(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Forwards run one after the other while weights arrive; each must run on a single version."""
        self.take()
        self.count()

    expand = refresh

    def verify(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self.compare()
        self.record_state()
        self.count()

    def compare(self) -> None:
        """Get the trainer's digests and logits and record the differences. Collective over trainer and replicas."""
        with call(
            self.address, self.receiver.name, peer=SENDER, timeout_s=self.config.deadline_s
        ) as link:  # the sender's `send_truth`
            truth, _ = link.expect("truth")
            wanted = torch.empty(truth["shape"], dtype=torch.float32)
            link.receive_bytes(transports.memory(wanted.view(-1).view(torch.uint8)))
            self.truth = truth["digests"]
            self.compare_weights()
            logits = self.forwards.at_rest().cpu()
            link.send({"kind": "judged"})
        self.ctx.record("logits_error", logits_error(logits, wanted))
        self.ctx.record("logits_same", int(torch.equal(logits, wanted)))
        known = self.watch.known.setdefault(self.receiver.version, sha256(logits))
        self.ctx.record("logits_moved", int(known != sha256(logits)))

    def compare_weights(self, scene: str = "synced") -> int:
        """Record how many tensors differ from the trainer's; return how many changed since the last call. Collective over a replica."""
        before, self.own = self.own, self.hashes(sha256)
        own = self.own
        if differing := sorted(name for name in {*own, *self.truth} if own.get(name) != self.truth.get(name)):
            print(f"tensors that differ from the trainer's: {len(differing)}, first: {differing[0]}")
        self.ctx.record("tensors_hashed", len(own), scene=scene)
        self.ctx.record("digest", None, text=rankside.digest(own), scene=scene)
        self.ctx.record("tensors_differ", len(differing), scene=scene)
        return sum(own.get(name) != before.get(name) for name in {*own, *before})

    def shrink(self, cycle: int) -> None:  # noqa: ARG002 - as above
        if self.sleeper:
            self.leave()
        self.count()

    def end(self, cycle: int) -> None:
        del self.replica
        super().end(cycle)

    # -- the receiver's host -------------------------------------------------------------------------------------------

    def wake(self) -> None:
        self.replica.wake()
        self.watch.point("wake")

    def sleep(self) -> None:
        self.replica.sleep()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        with self.forwards.writer(self.serving.writing(), serves=self.serving.running):
            self.watch.point("gate")
            yield

    def finalize(self) -> None:
        """Nothing is derived from these weights; the point shows that the receiver asked for it."""
        self.watch.point("derive")

    def digests(self, algorithm: str) -> dict[str, str]:
        return self.hashes(functools.partial(digest, algorithm=algorithm))

    def hashes(self, of: Callable[[torch.Tensor], str]) -> dict[str, str]:
        """Digests of every full tensor of the replica, on each of its ranks. Collective over the replica."""
        with self.as_job():
            own = {name: of(tensor) for name, tensor in shards.full_tensors(self.replica.chunks)}
            tables: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(tables, own)
        table: dict[str, str] = tables[0]
        return table

    def weights(self) -> SeenWeights:
        with self.as_job():
            places = shards.destinations(self.replica.chunks)
        weights = Cut(broken.places_of(self.ctx.fault, places), [p.data for p in self.replica.chunks[0].parameters()])
        return SeenWeights(self.cut(weights), self.watch)

    def leave(self) -> None:
        """Lose the route and sleep, which makes room for the trainer."""
        self.receiver.routed = False
        self.replica.sleep()
        there = State(chunks=self.replica.chunks).resident(self.ctx.device.type)
        kept = [each for each in there if each.kind == "weights"]
        self.ctx.record("asleep_tensors", len(kept), text="; ".join(map(str, kept[:3])))

    def serve(self) -> None:
        self.serving.start()
        self.forwards.attempt(self.config.deadline_s)

    def stop_serving(self) -> tuple[str, Exception | None]:
        """The logits of one more forward, and the error that any forward raised."""
        return self.forwards.attempt(self.config.deadline_s), raised(self.serving.stop)

    def take(self) -> None:
        """Join a sync that must succeed while forwards run; afterwards this replica serves the new version."""
        old, asleep, known = self.receiver.version, self.replica.asleep, self.watch.known
        self.watch.reset(self.path_of(asleep=asleep))
        try:
            if not asleep:
                self.serve()
            self.record_received(self.receiver.join())
            if asleep:
                self.serving.start()
            served, failed = self.stop_serving()
            new = self.receiver.version
            known[new] = sha256(self.forwards.at_rest())
        finally:
            with contextlib.suppress(KitError):  # the first error is the one to raise
                self.serving.stop()
            self.watch.record(self.ctx)
        if failed is not None:
            print(f"a forward failed after a successful sync: {failed}")
        self.ctx.record("serves", int(failed is None and self.receiver.routed and served == known[new]))
        if not asleep:
            for metric, count in judge(self.forwards, known, old, new)._asdict().items():
                self.ctx.record(metric, count)
            self.ctx.record("versions_differ", int(known.get(old) != known[new]))

    def record_received(self, received: Call) -> None:
        self.record_log(received.log, received.began)
        self.ctx.record("wall", received.log.events[-1][1] - received.began, "s")
        self.record_state()

    def record_state(self) -> None:
        self.ctx.record("version", self.receiver.version)
        self.ctx.record("routed", int(self.receiver.routed))


# -- both ------------------------------------------------------------------------------------------------------------------


def fill(chunks: Sequence[Any], geometry: Geometry, dtype: torch.dtype, seed: int) -> None:
    """Fill in the same base weights for any layout: each full tensor is drawn from its name, then cut."""
    with torch.device("meta"):
        shapes = {name: param.shape for name, param in PlainModel(geometry).named_parameters()}
    with torch.no_grad():
        for name, places in shards.destinations(chunks).items():
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            full = torch.randn(shapes[name], generator=generator)
            full = (1 + 0.1 * full if full.dim() == 1 and "norm" in name else 0.05 * full).to(dtype)
            for into, take in places:
                into.copy_(take(full))


def logits_error(logits: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference divided by the largest logit; infinite if it is no number."""
    error = float((logits.double() - wanted.double()).abs().max() / wanted.double().abs().max())
    return error if math.isfinite(error) else math.inf


def raised(call: Callable[[], object]) -> Exception | None:
    """The error that the call raises, without its frames, which would keep tensors alive."""
    try:
        call()
    except (KitError, OSError) as error:
        link: BaseException | None = error
        while link is not None:
            link.__traceback__, link = None, link.__cause__ or link.__context__
        return error
    return None
