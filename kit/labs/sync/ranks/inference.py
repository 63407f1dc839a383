"""The ranks of a replica in the sync lab: they serve, sleep and receive. Each rank cuts its own shards out of full tensors."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from kit.errors import KitError
from kit.labs import rankside
from kit.labs.sync.config import replica_model, roles
from kit.labs.sync.ranks import broken
from kit.labs.sync.ranks.side import Side, fill, name_of, raised
from kit.labs.sync.ranks.watch import Forwards, SeenWeights, Watch, judge, sha256
from kit.measure.observers.tensors import State
from kit.megatron import model, serve, shards, standin
from kit.sync.buckets import Cut
from kit.sync.hashes import digest
from kit.sync.link import call
from kit.sync.receiver import SENDER, Receiver
from kit.sync.serving import Serving
from kit.sync.transports import memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kit.labs.rankside import Context
    from kit.sync.receiver import Call


class Inference(Side):
    """One rank of a replica, and the host of its receiver."""

    def __init__(self, ctx: Context) -> None:
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
        """Build a replica with the base weights."""
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
        self.receiver = Receiver(
            name_of(self.ctx.rank), self.weights, self, address=self.address, device=self.ctx.device, timeout_s=wait
        )
        self.watch = Watch(lambda: self.receiver.version, lambda: self.receiver.routed, self.forwards, self.serving)
        self.receiver.make = self.watch.wrap_make(self.receiver.make)
        self.receiver.calls = self.watch.wrap_call(broken.call_of(self.ctx.fault, last=self.sweeps))
        self.count()

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
        """Compare this replica with the trainer: a SHA-256 of every tensor, and logits."""
        self.compare()
        self.record_state()
        self.count()

    def compare(self) -> None:
        """Get the trainer's digests and logits and record the differences. Collective over trainer and replicas."""
        with call(self.address, name_of(self.ctx.rank), peer=SENDER, timeout_s=self.config.deadline_s) as link:
            truth, _ = link.expect("truth")
            wanted = torch.empty(truth["shape"], dtype=torch.float32)
            link.receive_bytes(memory(wanted.view(-1).view(torch.uint8)))
            self.truth = truth["digests"]
            self.compare_weights()
            logits = self.forwards.at_rest().cpu()
            error = (logits.double() - wanted.double()).abs().max() / wanted.double().abs().max()
            link.send({"kind": "judged"})
        record, version, known = self.ctx.record, self.receiver.version, self.watch.known
        record("logits_error", float(error) if math.isfinite(float(error)) else math.inf)
        record("logits_same", int(torch.equal(logits, wanted)))
        record("logits_moved", int(known.setdefault(version, sha256(logits)) != sha256(logits)))

    def compare_weights(self, scene: str = "synced") -> int:
        """Record how many tensors differ from the trainer's; return how many changed since the last call. Collective over a replica."""
        own, before = self.hashes(sha256), self.own
        self.own = own
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
        """Digests of every full tensor of the replica, on each of its ranks. Collective over the replica."""
        return self.hashes(functools.partial(digest, algorithm=algorithm))

    def hashes(self, of: Callable[[torch.Tensor], str]) -> dict[str, str]:
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

    def take(self) -> None:
        """Join a sync that must succeed while forwards run; afterwards this replica serves the new version."""
        old, asleep = self.receiver.version, self.replica.asleep
        self.watch.reset(self.path_of(asleep=asleep))
        try:
            if not asleep:
                self.serving.start()
                self.forwards.attempt(self.config.deadline_s)
            self.record_received(self.receiver.join())
            if asleep:
                self.serving.start()
            served = self.forwards.attempt(self.config.deadline_s)
            failed = raised(self.serving.stop)
            new = self.receiver.version
            self.watch.known[new] = sha256(self.forwards.at_rest())
        finally:
            with contextlib.suppress(KitError):  # the first error is the one to raise
                self.serving.stop()
            self.watch.record(self.ctx)
        if failed is not None:
            print(f"a forward failed after a successful sync: {failed}")
        known = self.watch.known
        self.ctx.record("serves", int(failed is None and self.receiver.routed and served == known[new]))
        if not asleep:
            found = judge(self.forwards, known, old, new)
            self.ctx.record("served", found.served)
            self.ctx.record("torn", found.torn)
            self.ctx.record("mislabelled", found.mislabelled)
            self.ctx.record("versions_differ", int(known.get(old) != known[new]))

    def record_received(self, received: Call) -> None:
        self.record_log(received.log, received.began)
        self.ctx.record("wall", received.log.events[-1][1] - received.began, "s")
        self.record_state()

    def record_state(self) -> None:
        self.ctx.record("version", self.receiver.version)
        self.ctx.record("routed", int(self.receiver.routed))
