"""Your own synchroniser in the sync lab, in the place of the kit's sender and receivers, on every rank of both ends.

What the lab measures stays the same. It also hashes the weights of a replica where your code enters and leaves the gate, publishes, and
returns: they may change within a single gate, and not after the version was published.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from kit.engines.contents import listed_names, sha256
from kit.errors import BadInput, RehearsedError, refuse_if
from kit.labs.sync.lab import SyncConfig
from kit.labs.sync.ranks.rehearsals import counting_leftovers, note, on_another_version, step
from kit.labs.sync.ranks.replica import SyncReplica
from kit.labs.sync.ranks.side import ANY, Side, error_of, replica_ranks
from kit.labs.sync.ranks.trainer import SyncTrainer
from kit.measure.observers.settings import settings_now
from kit.megatron import observe, shards
from kit.megatron.scales import scale_values
from kit.sync.buckets import Key
from kit.sync.cache import BASE
from kit.sync.sender import Report, SyncLog, Target
from kit.target import load

GATE = "gate"  # the rehearsed failure: the last replica's gate raises
FAILURES = 2  # to tell what is made once from what every failure leaves behind


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchroniserContext:
    """`ctx` for your own synchroniser. Ranks count over the run: those of the trainer, of each replica, and of the replicas that are awake
    and asleep while the trainer works. `chunks` are this rank's model, `group` the ranks that share it: the trainer, or one replica."""

    role: str  # trainer or replica
    rank: int
    world_size: int
    trainer: tuple[int, ...]
    replicas: tuple[tuple[int, ...], ...]
    awake: tuple[int, ...]
    asleep: tuple[int, ...]
    group: Any
    device: torch.device
    config: SyncConfig
    chunks: Sequence[Any]
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceContext(SynchroniserContext):
    """On the trainer. `full_tensors()` yields every tensor of the live weights whole, with its Hugging Face name, on rank 0, and nothing
    on other ranks, which must exhaust it too."""

    full_tensors: Callable[[], Iterator[tuple[str, torch.Tensor]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkContext(SynchroniserContext):
    """On a replica. `load(name, tensor)` writes this rank's part of a full tensor; no forward runs inside `writing()`; `publish(version)`
    labels the weights; `receiver` is your own receiving side, if there is one."""

    load: Callable[[str, torch.Tensor], None]
    writing: Callable[[], contextlib.AbstractContextManager[None]]
    publish: Callable[[int], None]
    receiver: Any


def common_context(side: Side, chunks: Sequence[Any]) -> dict[str, Any]:
    return {
        "rank": side.ctx.rank,
        "world_size": side.config.ranks,
        "trainer": tuple(range(side.config.trainer_ranks)),
        "replicas": tuple(tuple(ranks) for ranks in replica_ranks(side.config)),
        "awake": ranks_of(side.config, sleeping=False),
        "asleep": ranks_of(side.config, sleeping=True),
        # Not the lab's own: forwards use that one on another thread while your code runs.
        "group": side.new_group(),
        "device": side.ctx.device,
        "config": side.config,
        "chunks": chunks,
        "timeout_s": side.config.deadline_s,
    }


def nothing() -> None:
    """What is called where your code lacks a method."""


class Labelled:
    """An object with `sync_weights`, which knows no version: the lab closes the gate around it, and publishes when it has returned.

    It has no `retries`: the rehearsed failure of a gate would come before its code is called."""

    def __init__(self, ctx: SynchroniserContext, own: Any) -> None:
        self.ctx = ctx
        self.own = own
        self.close = getattr(own, "close", nothing)

    def sync(self, version: int, targets: Sequence[int]) -> None:  # noqa: ARG002 - as of any synchroniser
        if not isinstance(self.ctx, SinkContext):
            self.own.sync_weights(timer=None, kv_scales=self.scales() if self.ctx.config.kv_scales else None)
            return
        with self.ctx.writing():
            self.own.sync_weights(timer=None, kv_scales=None)
            self.ctx.publish(version)

    def scales(self) -> dict[str, float]:
        """The scales of all layers, on every rank of the trainer. Collective over these."""
        tables: list[Any] = [None] * len(self.ctx.trainer)
        dist.all_gather_object(tables, scale_values(self.ctx.chunks), group=self.ctx.group)
        return {name: value for table in tables for name, value in table.items()}


def build_own(ctx: SynchroniserContext) -> Any:
    """The synchroniser of this rank."""
    target = ctx.config.implementation
    own = load(target)(ctx)
    if not hasattr(own, "sync") and hasattr(own, "sync_weights"):
        own = Labelled(ctx, own)
    if not hasattr(own, "sync"):
        raise BadInput(
            f"implementation={target}: the object it returned has no sync(version, targets) and no sync_weights"
        )
    if ctx.config.shares and not hasattr(own, "expand"):
        raise BadInput(
            f"implementation={target}: the object it returned has no expand(version, targets), which brings waking replicas the "
            "version that it kept: add it, or use placement=apart"
        )
    return own


def retries(own: Any) -> bool:
    """Whether the next sync may be called after one that raised."""
    return bool(getattr(own, "retries", False))


def close_own(own: Any) -> None:
    """Let your code release what it keeps between syncs, if it has anything."""
    getattr(own, "close", nothing)()


def ranks_of(config: SyncConfig, *, sleeping: bool | None = None) -> tuple[int, ...]:
    """The ranks of all replicas, of those that share a device with the trainer, or of the others."""
    return tuple(
        rank
        for replica, ranks in enumerate(replica_ranks(config))
        for rank in ranks
        if sleeping in (None, config.sleeps(replica))
    )


def lent(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that own code may export. `.cpu()` makes no copy on a CPU, and `.numpy()` then forbids for ever that the storage is resized,
    as the trainer's is when it is offloaded: this one has the same memory and a storage of its own."""
    return torch.from_dlpack(tensor.detach()) if tensor.device.type == "cpu" else tensor  # type: ignore[attr-defined]


class OwnTrainer(SyncTrainer):
    """A rank of the trainer. Your code is called on all of them."""

    synced = BASE

    @property
    def version(self) -> int:
        return self.synced

    def make_sender(self, tensors: dict[Key, torch.Tensor]) -> None:
        self.tensors = len(tensors)
        common = common_context(self, self.job.chunks)
        self.own = build_own(SourceContext(role="trainer", full_tensors=self.full_tensors, **common))

    def full_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.job.mover.away:
            raise BadInput("the trainer's weights are offloaded: expand brings what an earlier sync has kept")
        tensors = shards.full_tensors(self.job.chunks)
        while True:
            with self.as_job():  # not while your code runs, which may use groups of the World
                following = next(tensors, None)
            if following is None:
                return
            name, tensor = following
            if not (isinstance(self.own, Labelled) and name.endswith(shards.SCALES)):  # which it gets by name
                yield name, lent(tensor)

    def base(self, cycle: int) -> None:  # noqa: ARG002 - phases are called with their cycle
        self.update_truth()
        self.deliver(BASE, self.targets())
        self.send_truth(self.targets())
        self.shrink_own()
        self.count()

    def deliver(self, version: int, targets: Sequence[Target], *, asleep: bool = False) -> Report | None:
        before = self.beside_weights()
        log, began = SyncLog(), time.time()
        log.event("begin")
        with log.stage("send"):
            (self.own.expand if asleep else self.own.sync)(version, tuple(target.rank for target in targets))
        log.event("end")
        touched = [name for name, value in self.beside_weights().items() if value != before[name]]
        self.ctx.record("trainer_touched", len(touched), text=", ".join(touched))
        self.synced = version
        if self.sends:
            numbers = {
                "bytes": (self.total, "B"),
                "receivers": (len(targets), "1"),
                "tensors_sent": (self.tensors, "1"),
            }
            for metric, (number, unit) in {**numbers, "wall": (log.seconds["send"], "s")}.items():
                self.ctx.record(metric, number, unit)
            self.record_log(log, began)
        return None

    def beside_weights(self) -> dict[str, object]:
        """What training goes on with, beside the weights: a sync only reads them."""
        chunks = self.job.chunks
        state: dict[str, object] = {**settings_now(), **observe.random_state()}
        state["training mode"] = [module.training for chunk in chunks for module in chunk.modules()]
        if not self.job.mover.away:
            grads = [getattr(weight, "main_grad", weight.grad) for chunk in chunks for weight in chunk.parameters()]
            state["gradients"] = [sha256(grad) for grad in grads if grad is not None]
        return state

    def end(self, cycle: int) -> None:
        close_own(self.own)
        super().end(cycle)

    def shrink_own(self) -> None:
        if self.config.shares and hasattr(self.own, "shrink"):
            self.own.shrink(ranks_of(self.config, sleeping=True))

    def shrink(self, cycle: int) -> None:
        self.shrink_own()
        super().shrink(cycle)

    def rehearse(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Syncs that fail if your code allows it, an expansion, and the next sync."""
        awake, asleep = self.targets(sleeping=False), self.targets(sleeping=True)
        for _ in range(FAILURES if retries(self.own) else 0):
            step(self)
            with counting_leftovers(self, GATE):
                error = error_of(lambda: self.own.sync(self.synced + 1, tuple(target.rank for target in awake)), ANY)
            if self.sends:
                note(self, "silent", int(error is None), GATE)
        if self.config.shares:  # after the sync that failed, as an expansion must still bring the version before
            self.job.mover.release()
            self.deliver(self.synced, asleep, asleep=True)
            self.shrink_own()
            self.job.mover.restore()
        if not retries(self.own):  # else what the sync that failed had is to arrive now, and nothing more
            step(self)
        self.deliver(self.synced + 2, awake)
        self.update_truth()
        self.send_truth(awake)
        self.count()


class OwnReplica(SyncReplica):
    """A rank of a replica, and what its weights held wherever your code calls."""

    expected = BASE  # the version of the next sync
    inside = False  # whether your code holds the gate
    gate_fails = False  # in a rehearsal

    def prepare(self, cycle: int) -> None:
        super().prepare(cycle)
        self.own_sync = build_own(
            SinkContext(
                role="replica",
                load=self.load_part,
                writing=self.gate,
                publish=self.publish,
                receiver=getattr(self.model, "own", None),
                **common_context(self, getattr(self.model, "chunks", ())),
            )
        )
        self.ctx.record("retries", int(retries(self.own_sync)))
        self.count()

    def look(self) -> None:
        """The first look of a sync."""
        self.last_look = self.hashed()
        self.outside: set[str] = set()  # tensors that changed outside of the gate
        self.gates: list[set[str]] = []  # those that changed within each gate
        self.labelled_outside = False
        self.published: dict[str, str] = {}  # what the weights held when they got their label
        self.cut = self.model.weights(self.destinations())

    def hashed(self) -> dict[str, str]:
        return {name: sha256(tensor) for name, tensor in self.model.versioned()}

    def changed_now(self) -> set[str]:
        """The tensors that changed since the last look."""
        before, self.last_look = self.last_look, self.hashed()
        return {name for name, held in self.last_look.items() if held != before[name]}

    # -- what your code calls --------------------------------------------------------------------------------------------

    def load_part(self, name: str, tensor: torch.Tensor) -> None:
        refuse_if(name not in self.cut.destinations, f"a replica has no tensor {name}")
        with torch.no_grad():
            self.cut.load(name, tensor)

    @contextlib.contextmanager
    def gate(self) -> Iterator[None]:
        if self.inside:
            yield
            return
        if self.gate_fails:
            raise RehearsedError("rehearsed failure at the gate")
        with self.writing():
            self.outside |= self.changed_now()
            self.inside = True
            try:
                yield
            finally:
                self.inside = False
                self.gates.append(self.changed_now())

    def lock(self) -> contextlib.AbstractContextManager[None]:
        return self.gate()

    def publish(self, version: int) -> None:
        self.receiver.version = version
        self.labelled_outside |= not self.inside
        self.watch.point("publish")
        self.published = self.hashed()

    # -- the phases ------------------------------------------------------------------------------------------------------

    def base(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self.weigh_tensors()
        self.model.poison()  # now, as later syncs may leave out what has not changed
        self.take_base(self.receive_all)

    def receive_all(self) -> None:
        self.receive()
        self.count_written()

    def refresh(self, cycle: int) -> None:
        self.expected = cycle
        super().refresh(cycle)

    expand = refresh

    def receive(self) -> None:
        """Your code brings a version. What it writes outside of the gate counts where forwards could run meanwhile."""
        asleep, began, log = self.model.asleep, time.time(), SyncLog()
        self.receiver.routed = self.receiver.routed and not asleep and self.config.refresh == "staged"
        if asleep:
            self.wake()
        self.look()
        self.watch.point("begin")
        log.event("begin")
        with log.stage("receive"):
            self.call_own(asleep=asleep)
        self.outside |= self.changed_now()
        late = sorted(name for name, held in self.published.items() if held != self.last_look[name])
        self.receiver.routed = True
        self.watch.point("end")
        log.event("end")
        self.ctx.record("written_late", len(late), text=listed_names(late))
        if not asleep:
            self.ctx.record("written_outside", len(self.outside), text=listed_names(sorted(self.outside)))
            self.ctx.record("labelled_outside", int(self.labelled_outside))
            self.ctx.record("gates_written", sum(bool(changed) for changed in self.gates))
        self.ctx.record("wall", log.seconds["receive"], "s")
        self.record_log(log, began)
        self.record_state()

    def call_own(self, *, asleep: bool) -> None:
        targets = ranks_of(self.config, sleeping=None if self.watch.path == "base" else asleep)
        (self.own_sync.expand if asleep else self.own_sync.sync)(self.expected, targets)

    def end(self, cycle: int) -> None:
        close_own(self.own_sync)
        super().end(cycle)

    def leave(self) -> None:
        if hasattr(self.own_sync, "shrink"):
            self.own_sync.shrink(ranks_of(self.config, sleeping=True))
        super().leave()

    def rehearse(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self.expected = self.receiver.version
        if self.sleeper:
            self.take()
            self.compare_weights(scene="expansion")
            self.leave()
        else:
            for _ in range(FAILURES if retries(self.own_sync) else 0):
                self.endure_own()
            self.expected += 2
            self.take()
            self.compare()
        self.count()

    def endure_own(self) -> None:
        """The gates of the last replica raise, and so must its sync. No replica may then have the new version, or other weights."""
        version, held = self.receiver.version, self.hashed()
        self.watch.reset("rehearsed")
        with counting_leftovers(self, GATE):
            self.serve()
            self.look()
            self.gate_fails = self.of_last_replica
            error = error_of(lambda: self.own_sync.sync(version + 1, ranks_of(self.config, sleeping=False)), ANY)
            self.gate_fails = False
            served, failed = self.stop_serving()
        if self.of_last_replica:
            note(self, "silent", int(error is None), GATE)
        note(self, "kept_version", int(self.receiver.version != version), GATE)
        note(self, "kept_wrong", int(self.hashed() != held), GATE)
        wrong = int(failed is not None or served not in self.watch.known.get(version, ()))
        wrong += on_another_version(self, version) + self.forwards.wrong_answers(self.serving.served)
        note(self, "served_wrong", wrong, GATE)
