"""A replica of the sync lab: its ranks serve, sleep and receive; each cuts its own shards out of full tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from kit import machine
from kit.actors.common import address_for
from kit.engines.contents import Contents, listed_names, sha256
from kit.engines.hosted import (
    ENGINES,
    EngineContext,
    HostedModel,
    LoadedModel,
    MegatronModel,
    OwnSide,
)
from kit.errors import KitError
from kit.labs import rankside
from kit.labs.served import vllm_python
from kit.labs.sync.lab import SyncConfig, replica_model, roles
from kit.labs.sync.ranks.side import ANY, Side, base_weights, error_of, fill, logits_error, plain_logits, worst_error
from kit.labs.sync.ranks.watch import Forwards, SeenWeights, SyncWatch, judge_forwards, known_logits
from kit.measure.observers.tensors import live_bytes
from kit.measure.phase import MEMFD, shared_at
from kit.megatron import model, scales
from kit.sync import transports
from kit.sync.adopting import Adopting
from kit.sync.buckets import Cut, Destination
from kit.sync.hashes import differing_digests, digest
from kit.sync.link import call
from kit.sync.receiver import SENDER, Call, Receiver
from kit.sync.serving import Serving
from kit.target import load

FIRST = 3  # tensors that a comparison names
PROMPTS = 8  # of the noise between an engine and the plain model
SYNCED = "synced"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverContext:
    """`ctx` for your own receiving side: the model to load into, which holds the base weights, and the ranks that share it. `loader()` is
    the kit's way to write a tensor, bound to the model's memory of now, `forward` the model's, and no forward runs inside `writing()`."""

    rank: int  # within the replica
    world_size: int
    group: Any
    device: torch.device
    config: SyncConfig
    chunks: Sequence[Any]
    loader: Callable[[], Callable[[str, torch.Tensor], None]]
    forward: Callable[[torch.Tensor], torch.Tensor]
    writing: Callable[[], contextlib.AbstractContextManager[None]]


class SyncReplica(Side):
    """One rank of a replica, and the host of its receiver."""

    def __init__(self, ctx: rankside.Context) -> None:
        super().__init__(ctx)
        alike = next(role.ranks for role in roles(self.config) if ctx.rank in role.ranks)
        self.sleeper = self.config.sleeps((ctx.rank - self.config.trainer_ranks) // self.config.infer_tp)
        self.last = ctx.rank == self.config.ranks - 1  # of the run; it takes part in the comparison of transports
        self.failing = f"rank {alike[-1]}"  # in rehearsed syncs: the last of the receivers
        self.fails = ctx.rank == alike[-1]
        self.of_last_replica = ctx.rank in alike[-self.config.infer_tp :]
        self.truth: dict[str, str] = {}  # the trainer's digests of the version that this replica must have
        self.before: dict[int, str] = {}  # how each bucket of the version before began
        self.own: dict[str, str] = {}  # the digests of this replica's weights when they were last hashed

    def prepare(self, cycle: int) -> None:  # noqa: ARG002 - phases are called with their cycle
        self.enter()
        config = replica_model(self.config)
        with self.as_job():
            self.model = self.make_model()
        self.contents = Contents(self.model)
        wait = self.config.deadline_s

        def forward(tokens: torch.Tensor) -> torch.Tensor:
            if self.ctx.device.type == "cuda":
                torch.cuda.set_device(self.ctx.device)  # every thread begins with the first GPU
            return self.model.logits(tokens).float().clone()  # an engine may write its next logits into the same memory

        self.forwards = Forwards(forward, self.prompts(config.geometry.vocab), lambda: self.receiver, wait)
        self.serving = Serving(self.forwards, group=self.group, timeout_s=wait)
        self.early = error_of(self.serving.next, ANY)
        self.receiver = self.new_receiver(self.weights)
        self.watch = SyncWatch(lambda: self.receiver.version, lambda: self.receiver.routed, self.forwards, self.serving)
        self.receiver.make = self.watch.wrap_make(self.receiver.make)
        self.receiver.calls = self.watch.wrap_call(Call)
        self.count()

    def make_model(self) -> HostedModel:
        """The model to serve with, with the base weights. Inside `as_job`."""
        settings, config = self.config, replica_model(self.config)
        if settings.serve != "megatron":
            return self.make_engine(dict(base_weights(config)))
        kits = OwnSide(config) if settings.receiver else MegatronModel(config)
        if settings.kv_scales:
            scales.add_scales(kits.chunks)
        fill(kits.chunks, config)
        if isinstance(kits, OwnSide):
            ctx = ReceiverContext(
                rank=dist.get_rank(),
                world_size=dist.get_world_size(),
                group=self.group,
                device=self.ctx.device,
                config=settings,
                chunks=kits.chunks,
                loader=functools.partial(self.loader, kits),
                forward=functools.partial(MegatronModel.logits, kits),
                writing=self.lock,
            )
            kits.receive_by(load(settings.receiver)(ctx), settings.receiver)
        return kits

    def loader(self, kits: MegatronModel) -> Callable[[str, torch.Tensor], None]:
        """The kit's own load into a model. Your code may ask for it when it is made: before the model serves."""
        with self.as_job():
            places = kits.destinations()
        return torch.no_grad()(Cut(places, ()).copy)

    def make_engine(self, weights: Mapping[str, torch.Tensor]) -> LoadedModel:
        settings, config = self.config, replica_model(self.config)
        ctx = EngineContext(
            geometry=config.geometry,
            dtype=model.DTYPES[config.dtype],
            device=self.ctx.device,
            weights=weights,
            timeout_s=settings.deadline_s,
            python=vllm_python(settings),
            config=settings,
        )
        own = load(ENGINES.get(settings.serve, settings.serve))(ctx)
        self.scope.callback(getattr(own, "close", lambda: None))
        engine = LoadedModel(own, settings.serve, ctx.device)
        if settings.serve in ENGINES:  # an engine from outside is judged itself, so its noise limits nothing
            prompts = [self.prompt(config.geometry.vocab, number) for number in range(1, PROMPTS + 1)]
            errors = [logits_error(engine.logits(each).cpu(), plain_logits(config, weights, each)) for each in prompts]
            self.ctx.record("logits_noise", max(errors))
        return engine

    def new_receiver(self, weights: Callable[[], Any]) -> Receiver:
        return Receiver(
            f"rank {self.ctx.rank}",
            weights,
            self,
            address=address_for(self.ctx, "sync"),
            device=self.ctx.device,
            timeout_s=self.config.deadline_s,
            adopts=self.adopts,
        )

    def base(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """First the trainer offers a base that differs in two numbers, which must be refused; then the base is published."""
        self.weigh_tensors()
        self.ctx.record("base_accepted", int(error_of(self.receiver.join) is None))
        self.take_base(lambda: self.record_received(self.receiver.join()))

    def take_base(self, receive: Callable[[], None]) -> None:
        self.watch.reset("base")
        try:
            receive()
        finally:
            self.watch.record(self.ctx)
        self.compare()
        if self.sleeper:
            self.leave()
        if self.sleeper and self.config.prewarm:
            self.model.wake()
            self.model.sleep()
            self.note_asleep()
        self.count()

    def refresh(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Forwards run one after the other while weights arrive; each must run on a single version."""
        self.take()
        self.count()

    expand = refresh

    def verify(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self.compare()
        self.record_state()
        if self.adopts:
            self.note_adopted()
        self.count()

    def compare(self) -> None:
        """Get the trainer's digests and logits and record the differences. Collective over trainer and replicas."""
        # The other end is the sender's `send_truth`.
        with call(
            address_for(self.ctx, "sync"), self.receiver.name, peer=SENDER, timeout_s=self.config.deadline_s
        ) as link:
            truth, _ = link.expect("truth")
            wanted = torch.empty(truth["shape"], dtype=torch.float32)
            link.receive_bytes(transports.memory(wanted.view(-1).view(torch.uint8)))
            self.truth = truth["digests"]
            self.compare_weights()
            self.compare_changes(truth["changed"])
            self.weigh_tensors()
            self.before, self.watch.beginnings, self.watch.repeats = self.watch.beginnings, {}, set()
            logits = torch.stack(self.forwards.at_rest()).cpu()
            through_cache = [
                each.cpu().clone()
                for prompt in self.forwards.prompts
                if (each := self.model.cached_logits(prompt)) is not None
            ]
            link.send({"kind": "judged"})
        self.ctx.record("logits_error", worst_error(logits, wanted))
        if through_cache:
            self.ctx.record("logits_error", worst_error(through_cache, wanted), text="through the engine's cache")
        self.ctx.record("logits_same", int(torch.equal(logits, wanted)))
        now = known_logits([*logits])
        known = self.watch.known.setdefault(self.receiver.version, now)
        self.ctx.record("logits_moved", int(known != now))

    def compare_weights(self, scene: str = SYNCED) -> int:
        """Record how many tensors differ from the trainer's; return how many changed since the last call. Collective over a replica."""
        before, self.own = self.own, self.hashes(sha256)
        own = self.own
        differing = sorted(name for name in {*own, *self.truth} if own.get(name) != self.truth.get(name))
        # Only a version that was trained since the last one must differ from it.
        places = self.describe(differing, trained=scene == SYNCED) if differing else ""
        if differing:
            print(f"tensors that differ from the trainer's: {len(differing)}: {places}")
        self.ctx.record("tensors_hashed", len(own), scene=scene)
        self.ctx.record("digest", None, text=rankside.digest_of_hashes(own), scene=scene)
        self.ctx.record("tensors_differ", len(differing), text=places, scene=scene)
        return sum(own.get(name) != before.get(name) for name in {*own, *before})

    def compare_changes(self, trained: Sequence[str]) -> None:
        """Record tensors that training changed and this replica did not, and constants that changed. Collective over a replica."""
        changed = set().union(*self.from_replica(self.contents.changed()))
        same = sorted(name for name in trained if changed.isdisjoint(self.model.counterparts(name)))
        disturbed = self.contents.disturbed()
        self.ctx.record("tensors_trained", len(trained))
        self.ctx.record("tensors_unchanged", len(same), text=listed_names(same))
        self.ctx.record("constants_changed", len(disturbed), text=listed_names(disturbed))

    def tensor_bytes(self) -> int:
        return live_bytes() + self.model.bytes_elsewhere()

    def count_written(self, scene: str = SYNCED) -> None:
        """Record tensors that hold what the lab wrote into them before the sync."""
        left = self.contents.unwritten()
        places = [f"{name} ({count} of its elements)" for name, count in left.items()]
        self.ctx.record("tensors_unwritten", len(left), text=listed_names(places), scene=scene)

    def describe(self, differing: Sequence[str], *, trained: bool) -> str:
        """The first of these tensors, each with its buckets, and buckets that repeat bytes."""
        buckets: dict[str, list[int]] = {}
        layout = self.receiver.layout[1]
        for index, pieces in enumerate(layout.buckets if layout is not None else ()):
            for piece in pieces:
                buckets.setdefault(layout.specs[piece.spec].name, []).append(index)  # type: ignore[union-attr]
        names = sorted(differing, key=lambda name: (buckets.get(name, [0])[0], name))
        places = {name: f" ({spell_buckets(buckets.get(name, []))})" if layout else "" for name in names}
        first = ", ".join(name + places[name] for name in names[:FIRST])
        more = f" and {len(names) - FIRST} more" if len(names) > FIRST else ""
        begins = self.watch.beginnings
        doubtful = sorted({index for name in names for index in buckets.get(name, ()) if index in begins})
        stale = [index for index in doubtful if trained and begins[index] == self.before.get(index)]
        repeated = [index for index in doubtful if index in self.watch.repeats]
        notes = [
            f"bytes of the version before in {spell_buckets(stale)}" if stale else "",
            f"bytes of the bucket before in {spell_buckets(repeated)}" if repeated else "",
        ]
        return "; ".join(filter(None, [first + more, *notes]))

    def shrink(self, cycle: int) -> None:  # noqa: ARG002 - as above
        if self.sleeper:
            self.leave()
        self.count()

    def end(self, cycle: int) -> None:
        del self.model
        super().end(cycle)

    # -- the receiver's host -------------------------------------------------------------------------------------------

    def wake(self) -> None:
        self.model.wake()
        self.watch.point("wake")

    def sleep(self) -> None:
        self.model.sleep()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        with self.forwards.writer(self.serving.writing(), serves=self.serving.running):
            self.watch.point("gate")
            yield

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """The gate for a receiving side that closes it itself; where the kit's receiver has closed it, there is nothing to do."""
        return contextlib.nullcontext() if self.serving.gated else self.serving.writing()

    def abandon(self) -> None:
        if isinstance(self.model, OwnSide | LoadedModel):
            self.model.abandon()

    def finalize(self) -> None:
        self.model.finalize()
        self.watch.point("derive")

    def digests(self, algorithm: str) -> dict[str, str]:
        return self.hashes(functools.partial(digest, algorithm=algorithm))

    def hashes(self, of: Callable[[torch.Tensor], str]) -> dict[str, str]:
        """Digests of every full tensor of the replica, on each of its ranks. Collective over the replica."""
        with self.as_job():
            own = differing_digests((name, of(tensor)) for name, tensor in self.model.full_tensors())
        table: dict[str, str] = self.from_replica(own)[0]
        return table

    def from_replica(self, own: Any) -> list[Any]:
        """The objects of all ranks of the replica. Collective over them."""
        with self.as_job():
            tables: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(tables, own)
        return tables

    def destinations(self) -> Mapping[str, Sequence[Destination]]:
        """Where each full tensor goes: the shards of this rank, and how they are cut."""
        with self.as_job():
            return self.model.destinations()

    def weights(self) -> SeenWeights:
        places = self.destinations()
        if self.adopts:
            return SeenWeights(Adopting(places, self.adoptable()), self.watch)
        return SeenWeights(self.model.weights(places), self.watch)

    @property
    def adopts(self) -> bool:
        return self.config.refresh == "adopted"

    def adoptable(self) -> list[torch.Tensor]:
        """The weights themselves: only those of the kit's model are adopted."""
        return self.model.parameters() if self.adopts and isinstance(self.model, MegatronModel) else []

    def held(self) -> set[Any]:
        """Without the sender's memory in which this replica's weights lie: that of one version."""
        homes = {place for weight in self.adoptable() if (place := shared_at(weight.data_ptr()))}
        return super().held() - set(sorted(homes)[:1])

    def note_adopted(self) -> None:
        """Record where the system has each weight: in memory of this rank alone, or mapped so that others see what is written to it."""
        mapped = [mapping for mapping in machine.mappings() if mapping.name.startswith(MEMFD)]
        weights = {name: weight for name, weight in self.model.versioned() if weight.numel()}
        found = {
            name: next((each.mode for each in mapped if each.start <= weight.data_ptr() < each.end), "")
            for name, weight in weights.items()
        }
        copied = sorted(name for name, mode in found.items() if not mode)
        share = sum(weights[name].nbytes for name in copied) / sum(weight.nbytes for weight in weights.values())
        shared = sorted(name for name, mode in found.items() if mode.endswith("s"))
        self.ctx.record("weights_copied", share, text=listed_names(copied))
        self.ctx.record("weights_shared", len(shared), text=listed_names(shared))

    def leave(self) -> None:
        """Lose the route and sleep, which makes room for the trainer."""
        self.receiver.routed = False
        self.sleep()
        self.note_asleep()

    def note_asleep(self) -> None:
        """Record what a sleeping model keeps, and whether an engine answers."""
        kept = self.model.resident()
        self.ctx.record("asleep_tensors", len(kept), text="; ".join(kept[:3]))
        if self.config.serve != "megatron":
            refused = error_of(self.forwards.at_rest, ANY)
            self.ctx.record("answered_asleep", int(refused is None))

    def serve(self) -> None:
        self.serving.start()
        self.forwards.attempt(self.config.deadline_s)

    def stop_serving(self) -> tuple[str, Exception | None]:
        """The logits of one more forward, and the error that any forward raised."""
        return self.forwards.attempt(self.config.deadline_s), error_of(self.serving.stop)

    def take(self) -> None:
        """Join a sync that must succeed while forwards run; afterwards this replica serves the new version."""
        old, asleep, known = self.receiver.version, self.model.asleep, self.watch.known
        before = known.get(old, frozenset())
        self.watch.reset(self.path_of(asleep=asleep))
        try:
            if not asleep:
                self.serve()
            self.receive()
            if asleep:
                self.count_written()
                self.serving.start()
            served, failed = self.stop_serving()
            new = self.receiver.version
            known[new] = self.forwards.known_at_rest()
        finally:
            with contextlib.suppress(KitError):  # the first error is the one to raise
                self.serving.stop()
            self.watch.record(self.ctx)
        if failed is not None:
            print(f"a forward failed after a successful sync: {failed}")
        self.ctx.record("serves", int(failed is None and self.receiver.routed and served in known[new]))
        self.ctx.record("wrong_answers", self.forwards.wrong_answers(self.serving.served))
        if not asleep:
            self.ctx.record("bytes_arrived", self.watch.arrived, "B")
            self.ctx.record("base_named", self.watch.base, was=old)
            for metric, count in judge_forwards(self.forwards, known, before, known[new])._asdict().items():
                self.ctx.record(metric, count)
            if new != old:
                self.ctx.record("versions_differ", int(known[new] != before))

    def receive(self) -> None:
        """Take part in the next sync."""
        self.record_received(self.receiver.join())

    def record_received(self, received: Call) -> None:
        self.record_log(received.log, received.began)
        self.ctx.record("wall", received.log.events[-1][1] - received.began, "s")
        self.record_state()

    def record_state(self) -> None:
        self.ctx.record("version", self.receiver.version)
        label = getattr(getattr(self.model, "own", None), "weight_version", None)
        if isinstance(label, int):
            self.ctx.record("version", label, label="engine")
        self.ctx.record("routed", int(self.receiver.routed))


def spell_buckets(numbers: Sequence[int]) -> str:
    if not numbers:
        return "in no bucket"
    return f"bucket{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:FIRST]))}" + ", ..." * (len(numbers) > FIRST)
