"""The sender's end of a sync, which brings live weights to all receivers or to none.

`sync(version, targets, gather)` brings one version to some receivers:
- a **refresh** of receivers that serve: a new version is built in the cache. Every bucket is stored at the receivers before any of them
  changes a weight, and no forward runs between the change and the publication.
- a **stream** to receivers that pause: also a new version. Buckets go into their weights as they are packed. They have no route until the
  end, and none after a failure.
- an **expansion** to receivers that wake: they get the active version from the cache, whatever the live weights are, bucket by bucket into
  their weights. They have no route until the end. No version is made.
- the **base**, version -1: no weights are sent, and the sync succeeds only if all weights are equal.

Then come apply, teardown (the sender first), finalize (once), publish and activate; the base has only the last two. A failure on either end
ends the sync with an error that names its cause: no receiver has the new version, the old one remains active, and the next sync starts
afresh. Once all receivers have published, the version is active; a receiver that fails later is named and returns to the old version, with
all ranks of its replica and no others.

One lock is held throughout. Limits: one sync at a time; the sender's host holds the whole model, gathered and packed. If the sender dies
while it ends a sync, some receivers have the new version and some the old one, each under its number; those with the old one have no route
if their replica has other ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import torch

from kit.errors import BadInput, KitError, refuse_if
from kit.sync.buckets import Bound, Key, live
from kit.sync.cache import BASE, Cache
from kit.sync.deltas import Changes, Delta, Packed, find_changes
from kit.sync.hashes import AUTO, NONE, Digests, algorithms, digest
from kit.sync.link import FAILED, Link, Listener, PeerFailed, PeerGone, PeerSilent, ready
from kit.sync.transports import GRACE_S, RankPlace, Transport, TransportContext, best_transport, make

Gathered = Mapping[Key, torch.Tensor] | Bound


LAYOUT = "layout_id"  # id of the bucket layout that a receiver got last
HOLDS = "holds"  # the version of which a receiver has all weights, if it has
KEEP = "keep"  # in a failure message: whether the receiver keeps the new version
BUILDS = ("refresh", "stream")  # paths that make a version


class SyncLog:
    """`seconds` by stage; stages overlap, so their sum may exceed the elapsed time.

    `events` in order, by the system clock, which all ranks of a machine share."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.events: list[tuple[str, float]] = []

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - started

    def event(self, name: str) -> None:
        self.events.append((name, time.time()))


class OtherBase(KitError):  # noqa: N818 - it is what was found
    """The base weights of a receiver differ from the trainer's."""

    def __init__(self, peer: str, tensors: Sequence[str], count: int) -> None:
        super().__init__(
            f"{peer}'s base weights differ from the trainer's: {len(tensors)} of {count} tensors, {tensors[0]} first; "
            "a trainer that resumed with other weights must send a version"
        )
        self.peer = peer
        self.tensors = tuple(tensors)


class OtherResult(KitError):  # noqa: N818 - as above
    """The weights of a receiver differ from the trainer's after it has applied changes: it had lost the version before."""

    def __init__(self, peer: str, tensors: Sequence[str], version: int, base: int) -> None:
        super().__init__(
            f"{peer} has other weights than the trainer after the changes from version {base} to {version}: "
            f"{len(tensors)} tensors, {tensors[0]} first; the next sync sends everything"
        )
        self.peer = peer
        self.tensors = tuple(tensors)


class PackedOnGpu(Bound):
    """Weights that the transport packs on their GPU. A ring, which keeps no copy, then needs no bytes on the host."""

    def pack(self, index: int, out: torch.Tensor, *, fresh: bool = False, hot: bool = False) -> None:
        pass


def on_gpu(tensors: Iterable[torch.Tensor], device: torch.device) -> bool:
    """Whether all tensors are on this GPU."""
    return device.type == "cuda" and all(tensor.device == device for tensor in tensors)


STEPS = ("apply", "teardown", "finalize", "publish", "activate")


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A receiver: its name, its rank in its World, its location, its state and its replica (empty: this rank alone)."""

    name: str
    rank: int
    place: RankPlace
    state: Literal["serving", "paused", "asleep"] = "serving"
    replica: str = ""


class SyncFailed(KitError):  # noqa: N818 - it is what happened
    """No receiver has the version or, if it is already active, only replicas with all ranks activated have it. `peer` is the receiver that
    failed, if one did; `bucket` and `tensors` say where."""

    def __init__(self, what: str, active: int, error: KitError, *, published: bool = False) -> None:
        remains = "is already active" if published else "stays active"
        super().__init__(f"{what} failed: {error}; version {active} {remains}")
        message = error.message if isinstance(error, PeerFailed) else {}
        self.peer: str | None = getattr(error, "peer", None)
        self.bucket: int | None = message.get("bucket", getattr(error, "bucket", None))
        self.tensors: tuple[str, ...] = tuple(message.get("tensors", getattr(error, "tensors", ())))


@dataclass(kw_only=True, slots=True)
class Report:
    path: str
    version: int
    receivers: int = 0
    answered: int = 0  # receivers in replicas with all ranks activated
    bytes: int = 0
    tensors: int = 0
    copies: int = 0  # the most copies of the whole model in the cache
    buckets: int = 0
    bucket_bytes: int = 0
    transports: dict[str, int] = field(default_factory=dict)
    log: SyncLog = field(default_factory=SyncLog)
    began: float
    wall: float = 0.0
    verified: int = 0  # tensors with compared digests
    base: int | None = None  # the version from which changes were sent; None: everything was


@dataclass(eq=False, repr=False)
class Sender:
    """`transport` is a name, `module:attr`, or "auto": chosen for each receiver by its location. Receivers verify a `share` of the tensors.
    This end's transports get `config`.

    With a `delta` a new version is sent as what changed since the active one, if every receiver has that one, and each acknowledges it with
    digests of all its weights."""

    cache: Cache
    listener: Listener
    _: KW_ONLY
    place: RankPlace
    rank: int
    device: torch.device
    transport: str = AUTO
    verify: str = AUTO
    share: float = 1.0
    timeout_s: float = 60.0
    config: dict[str, Any] = field(default_factory=dict)
    delta: Delta = "off"

    def __post_init__(self) -> None:
        self.verify = algorithms()[0] if self.verify == AUTO else self.verify
        refuse_if(
            self.delta != "off" and (self.verify == NONE or self.share < 1),
            f"delta={self.delta} compares all weights after every sync: use it with digests of all tensors",
        )
        refuse_if(
            self.delta != "off" and any(spec.shard for spec in self.cache.layout.specs),
            f"delta={self.delta} sends parts of whole tensors, but some of these are shards: use delta=off",
        )
        refuse_if(
            self.delta != "off" and self.cache.slots > 0,
            f"delta={self.delta} compares versions, but a ring keeps none: use a cache",
        )
        self.doubted: set[str] = set()  # receivers whose weights were others than they should have been
        self.make = make  # makes a transport by name; an observer may replace it
        self.layout_json = self.cache.layout.to_json()
        self.layout_id = hashlib.sha256(json.dumps(self.layout_json).encode()).hexdigest()
        self.digests: dict[str, list[str]] = {}  # of the live weights that the active version was built from

    @property
    def version(self) -> int:
        """The version that receivers run."""
        return self.cache.active

    def sync(
        self,
        version: int,
        targets: Sequence[Target],
        gather: Callable[[], Gathered] | None = None,
    ) -> Report:
        """Bring a version to these receivers, which must call `join` meanwhile. `gather` returns all live weights, or a `Bound` of them;
        an expansion needs none."""
        with contextlib.ExitStack() as scope:
            try:
                scope.enter_context(self.cache.held(f"the sync of version {version}"))
            except KitError as error:
                raise SyncFailed(f"the sync of version {version}", self.cache.active, error) from error
            path = self._path(version, targets, gather)
            report = Report(path=path, version=version, began=time.time(), receivers=len(targets))
            report.log.event("begin")
            started = time.perf_counter()
            try:
                Sending(self, report, targets).run(gather)
            except KitError as error:
                active = self.cache.active
                published = path in BUILDS and active == version
                raise SyncFailed(f"the {path} with version {version}", active, error, published=published) from error
            report.copies = max(report.copies, self.cache.copies)
            report.wall = time.perf_counter() - started
            return report

    def build(self, version: int, tensors: Gathered) -> None:
        """Build and activate a version without receivers, while the live weights are in memory. Expansions send it later."""
        digests = Digests(self.cache.layout, version, algorithm=self.verify, share=self.share)

        def packed(index: int) -> None:
            if digests.count:
                digests.add(index, live(self.cache.layout, index, named(tensors)))

        try:
            self.cache.build(version, tensors, packed=packed)
            self.digests = digests.table()
        finally:
            digests.close()
        self.cache.activate(version)

    def _path(self, version: int, targets: Sequence[Target], gather: object) -> str:
        if not targets:
            raise BadInput("a sync needs at least one receiver")
        names = [target.name for target in targets]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise BadInput(f"several receivers have the name {', '.join(twice)}: names must be unique")
        states = {target.state for target in targets}
        if len(states) > 1:
            raise BadInput(f"some receivers are {' and some '.join(sorted(states))}: use one sync for each state")
        state, active = states.pop(), self.cache.active
        if self.cache.slots and state != "paused" and version != BASE:
            raise BadInput(
                f"version {version} is refused: a ring keeps no copy, and {names[0]} is {state}; all receivers must pause"
            )
        if state == "asleep":
            if version != active or version == BASE:
                why = "there is no copy of the base" if active == BASE else f"the active version is {active}"
                raise BadInput(
                    f"an expansion with version {version} is refused: {why}, and an expansion sends only the active version"
                )
            return "expand"
        if gather is None:
            raise BadInput("receivers that are awake get the live weights: pass gather=, a function that returns them")
        if version <= active and not version == active == BASE:
            raise BadInput(f"version {version} is refused: version {active} is active, and versions only grow")
        if version == BASE:
            return "base"
        return "refresh" if state == "serving" else "stream"


class Sending:
    """One sync. The steps after the bytes come in the order of `STEPS`."""

    def __init__(self, sender: Sender, report: Report, targets: Sequence[Target]) -> None:
        self.sender = sender
        self.report = report
        self.targets = targets
        self.log = report.log
        self.cache = sender.cache
        self.layout = sender.cache.layout
        self.links: dict[str, Link] = {}
        self.transports: list[Transport] = []
        self.sharing: dict[str, list[Target]] = {}  # the receivers of each transport
        self.replicas = {target.name: target.replica or target.name for target in targets}
        sizes = Counter(self.replicas.values())
        self.mates = {name: sizes[replica] - 1 for name, replica in self.replicas.items()}  # other ranks of the replica
        self.ready: set[str] = set()  # receivers in replicas that are ready on every rank
        self.digests: Digests | None = None
        self.table: dict[str, list[str]] = {}
        self.weights: Gathered = {}
        self.changes: Changes | None = None  # what is sent in place of the whole version
        self.sent: Digests | None = None  # of these changes
        # Packs live weights that are on the sender's GPU.
        self.pack: Callable[[int, torch.Tensor], None] | None = None

    def run(self, gather: Callable[[], Gathered] | None) -> None:
        sender, report = self.sender, self.report
        try:
            self.links = sender.listener.accept([target.name for target in self.targets], sender.timeout_s)
            weights: Gathered = {}
            if gather is not None:
                with self.log.stage("gather"):
                    weights = gather()
                self.log.event("gathered")
            if report.path == "base":
                self.compare_base(weights)
            else:
                self.send(weights)
            for step in STEPS:
                if report.path != "base" or step in ("publish", "activate"):
                    getattr(self, step)()
            self.command("end", "ended")
        except PeerGone as error:  # a user's transport does not look for the reason
            words = next((link.last_words("bytes") for link in self.links.values() if link.peer == error.peer), None)
            self.abandon(words or error)
            raise words or error from None
        except BaseException as error:
            self.abandon(error)
            raise
        finally:
            for digests in (self.digests, self.sent):
                if digests is not None:
                    digests.close()
            if self.changes is not None:
                self.changes.close()
            for link in self.links.values():
                link.close()

    def compare_base(self, weights: Gathered) -> None:
        algorithm = self.sender.verify if self.sender.verify != NONE else "sha256"
        self.tell(
            "begin",
            lambda name: {"mates": self.mates[name]},
            path="base",
            version=BASE,
            algorithm=algorithm,
            began=self.report.began,
        )
        own = {name: digest(tensor, algorithm) for (name, _), tensor in named(weights).items()}
        self.report.verified = len(own)
        for peer, names in different(own, self.hear("base")):
            raise OtherBase(peer, names, len(own))

    def send(self, weights: Gathered) -> None:
        sender, report, version = self.sender, self.report, self.report.version
        self.weights = weights
        self.digests = Digests(self.layout, version, algorithm=sender.verify, share=sender.share)
        for target in self.targets:
            kind = sender.transport
            if kind == "auto":
                kind = best_transport(sender.place, target.place, fds=self.links[target.name].carries_fds)
            self.sharing.setdefault(kind, []).append(target)
        places = {
            target.name: {"transport": kind, "ranks": self.ranks(kind), "place": place}
            for kind, sharing in self.sharing.items()
            for place, target in enumerate(sharing, start=1)
        }
        builds = report.path in BUILDS
        compares = builds and sender.delta != "off" and self.all_hold_the_base()
        if compares:
            self.build(weights)
            with self.log.stage("compare"):
                self.changes = self.find_changes(weights)
        layout = self.layout if self.changes is None else self.changes.layout
        report.transports = {kind: len(sharing) for kind, sharing in self.sharing.items()}
        report.tensors, report.verified = len(self.layout.specs), self.digests.count
        report.bytes, report.buckets, report.bucket_bytes = layout.total, len(layout.buckets), layout.bucket_bytes
        report.base = None if self.changes is None else self.changes.base
        self.tell(
            "begin",
            lambda name: {
                **places[name],
                "mates": self.mates[name],
                "layout": None if self.links[name].hello.get(LAYOUT) == sender.layout_id else sender.layout_json,
            },
            path=report.path,
            version=version,
            layout_id=sender.layout_id,
            verify=sender.verify,
            share=sender.share,
            slots=self.cache.slots,
            began=report.began,
            base=report.base,
            changes=None if self.changes is None else layout.to_json(),
        )
        self.hear("ready")
        self.log.event("ready")
        if self.changes is not None:
            self.send_changes(self.changes)
        elif builds and not compares:
            self.build(self.packable(weights), send=True)
        else:
            for index in range(len(layout.buckets)):
                self.pass_on(index)
        with self.log.stage("send"), self.blaming():
            for transport in self.transports:
                transport.flush()
        self.log.event("sent")
        with self.log.stage("verify"):
            if builds:
                self.table = self.digests.table()
            table = self.sent.table() if self.sent is not None else self.table if builds else sender.digests
            self.tell("verify", digests=table)
            self.hear("verified")
        self.log.event("verified")

    def packable(self, weights: Gathered) -> Gathered:
        """The live weights as they are packed. Those on the sender's GPU may be packed by a transport there."""
        if not on_gpu(named(weights).values(), self.sender.device):
            return weights
        bound = weights if isinstance(weights, Bound) else Bound(self.layout, weights)
        self.pack = bound.pack
        if self.cache.slots and self.sharing.keys() == {"ipc"}:
            return PackedOnGpu(self.layout, bound.tensors)
        return bound

    def build(self, weights: Gathered, *, send: bool = False) -> None:
        """Pack the version into the cache, and send each bucket at once or leave that for later."""
        last = time.perf_counter()

        def packed(index: int) -> None:
            nonlocal last
            assert self.digests is not None
            self.log.seconds["pack"] += time.perf_counter() - last
            if self.digests.count:
                self.digests.add(index, live(self.layout, index, named(weights)))
            if send:
                self.pass_on(index)
            last = time.perf_counter()

        self.cache.build(self.report.version, weights, packed)
        self.report.copies = self.cache.copies
        self.log.event("packed")

    def pass_on(self, index: int) -> None:
        """Send one packed bucket."""
        with self.log.stage("send"):
            if not self.transports:
                with self.blaming():
                    self.open()
            bucket = (
                self.cache.bucket(self.report.version, index) if self.changes is None else self.changes.bucket(index)
            )
            with self.blaming():
                for transport in self.transports:
                    transport.send(index, bucket)
                for transport in self.transports if self.cache.slots else ():
                    transport.ahead(index + 1, self.cache.slots)  # the next bucket's place is free then

    # -- what changed ------------------------------------------------------------------------------------------------

    def all_hold_the_base(self) -> bool:
        """Whether every receiver has all weights of the active version, of which the cache has a copy."""
        base, doubted = self.cache.active, self.sender.doubted
        return base != BASE and all(
            link.hello.get(HOLDS) == base and name not in doubted for name, link in self.links.items()
        )

    def base(self) -> tuple[int, Packed]:
        """The version that all receivers have acknowledged, and its bytes."""
        return self.cache.active, lambda index: self.cache.bucket(self.cache.active, index)

    def find_changes(self, weights: Gathered) -> Changes | None:
        """None if so much has changed that the whole version is sent, from the memory that it has already."""
        base, old = self.base()
        version = self.report.version
        tensors = find_changes(
            self.layout, old, lambda index: self.cache.bucket(version, index), named(weights), self.sender.delta
        )
        changes = Changes(base, tensors, self.layout.bucket_bytes)
        if not changes.worth_sending(self.layout):
            return None
        changes.pack()
        return changes

    def send_changes(self, changes: Changes) -> None:
        self.sent = Digests(changes.layout, self.report.version, algorithm=self.sender.verify)
        with self.log.stage("send"), self.blaming():
            self.open()  # also if nothing has changed
        for index in range(len(changes.layout.buckets)):
            self.sent.add(index, live(changes.layout, index, changes.tensors))
            self.pass_on(index)

    def acknowledge(self) -> None:
        """Receivers of changes acknowledge them with digests of all their weights. Who has others than the trainer gets everything with the
        next sync."""
        assert self.changes is not None
        algorithm = self.sender.verify
        self.tell("acknowledge", algorithm=algorithm)
        own = {name: digest(tensor, algorithm) for (name, _), tensor in named(self.weights).items()}
        wrong = different(own, self.hear("acknowledged"))
        self.report.verified = len(own)
        self.sender.doubted |= {peer for peer, _ in wrong}
        for peer, names in wrong:
            raise OtherResult(peer, names, self.report.version, self.changes.base)

    # -- the steps after sending, in the order of `STEPS` ---------------------------------------------------------

    def apply(self) -> None:
        with self.log.stage("apply"):
            self.command("apply", "applied")

    def teardown(self) -> None:
        """Close the sender's ends first, then the receivers', then collect what these had kept alive."""
        with self.log.stage("teardown"):
            kits = [transport for transport in self.transports if isinstance(transport, Transport)]
            with self.blaming():
                self.close()
            self.command("teardown", "closed")
            for transport in kits:
                transport.collect()

    def finalize(self) -> None:
        with self.log.stage("finalize"):
            self.command("finalize", "finalized")
        if self.changes is not None:
            with self.log.stage("acknowledge"):
                self.acknowledge()

    def publish(self) -> None:
        report = self.report
        with self.log.stage("publish"):
            self.tell("publish", version=report.version)
            self.hear("published")
            if report.path in BUILDS:
                self.cache.activate(report.version)
                self.sender.digests = self.table
        self.log.event("publish")

    def activate(self) -> None:
        """Find the replicas that are ready on every rank. They run the version after `end`, or once they hear that others failed; all
        ranks of other replicas go back to the old version."""
        unreachable: KitError | None = None
        with self.log.stage("activate"):
            try:
                self.tell("activate")
            except KitError as error:  # all other receivers got the message
                unreachable = error
            answers, failed = self.answers("activated", self.sender.timeout_s)
            broken = {replica for name, replica in self.replicas.items() if name not in answers}
            self.ready = {name for name, replica in self.replicas.items() if replica not in broken}
            self.report.answered = len(self.ready)
            self.sender.doubted -= self.ready
            if first := unreachable or failed:
                raise first
        self.log.event("activate")

    def command(self, kind: str, answer: str) -> None:
        self.tell(kind)
        self.hear(answer)
        self.log.event(kind)

    def tell(self, kind: str, each: Callable[[str], dict[str, Any]] = lambda _: {}, **message: Any) -> None:
        """Send a message to all receivers, and only then raise: the others must get it even if one receiver is gone."""
        failed: list[KitError] = []
        for name, link in self.links.items():
            try:
                link.send({"kind": kind, **each(name), **message})
            except PeerGone as error:
                failed.append(link.last_words(kind) or error)
            except PeerSilent as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def hear(self, kind: str) -> dict[str, dict[str, Any]]:
        answers, failed = self.answers(kind, GRACE_S)
        if failed is not None:
            raise failed
        return answers

    def answers(self, kind: str, grace_s: float) -> tuple[dict[str, dict[str, Any]], KitError | None]:
        """Return the answers of all receivers within one deadline, and the failure to blame. After the first failure the others get
        `grace_s`. A receiver that is gone is blamed first, because others may fail as a consequence, and a silent one last."""
        answers: dict[str, dict[str, Any]] = {}
        failed: list[KitError] = []
        waiting = dict(self.links)
        end = time.monotonic() + self.sender.timeout_s
        while waiting:
            readable = ready(waiting.values(), end - time.monotonic())
            if not readable:
                break
            for name in [name for name, link in waiting.items() if link in readable]:
                try:
                    answers[name] = waiting.pop(name).expect(kind)[0]
                except (PeerFailed, PeerGone, PeerSilent) as error:
                    failed.append(error)
                    end = min(end, time.monotonic() + grace_s)
        if waiting and not failed:
            failed.append(PeerSilent(", ".join(waiting), kind, self.sender.timeout_s))
        return answers, min(failed, key=lambda error: not isinstance(error, PeerGone), default=None)

    def ranks(self, kind: str) -> list[int]:
        return [self.sender.rank, *(target.rank for target in self.sharing[kind])]

    def open(self) -> None:
        sent: Changes | Cache = self.cache if self.changes is None else self.changes
        segment = self.cache.segment(self.report.version) if self.changes is None else self.changes.segment
        for kind, sharing in self.sharing.items():
            context = TransportContext(
                role="sender",
                name="the sender",
                links={target.name: self.links[target.name] for target in sharing},
                sizes=sent.layout.sizes,
                starts=sent.starts,
                segment=segment,
                pieces=sent.layout.pieces,
                pack=self.pack,
                device=self.sender.device,
                timeout_s=self.sender.timeout_s,
                ranks=tuple(self.ranks(kind)),
                config=self.sender.config,
            )
            self.transports.append(self.sender.make(kind, context, ring=bool(self.cache.slots)))

    @contextlib.contextmanager
    def blaming(self) -> Iterator[None]:
        """A transport may raise its own error because a receiver failed: blame that receiver if the transport has read its reason, or if
        the links report a failure soon."""
        try:
            yield
        except Exception as error:
            if isinstance(error, BadInput) or getattr(error, "peer", None) is not None:
                raise
            ends = f"the sender's end of the transport {' or '.join(self.sharing)}"
            raise (
                reason_behind(error) or self.culprit() or KitError(f"{ends} raised {type(error).__name__}: {error}")
            ) from error

    def culprit(self) -> KitError | None:
        """Return the failure that the links report; a receiver that is gone comes first, because others may fail as a consequence."""
        waiting, failures = dict(self.links), list[KitError]()
        end = time.monotonic() + GRACE_S
        while waiting and (readable := ready(waiting.values(), end - time.monotonic())):
            for name in [name for name, link in waiting.items() if link in readable]:
                try:
                    message = waiting[name].message("bytes")
                except (PeerGone, PeerSilent) as error:
                    failures.append(error)
                    del waiting[name]
                    continue
                if message.get("kind") == FAILED:
                    failures.append(PeerFailed(waiting.pop(name).peer, "bytes", message))
        return min(failures, key=lambda error: not isinstance(error, PeerGone), default=None)

    def close(self) -> None:
        transports, self.transports = self.transports, []
        with contextlib.ExitStack() as scope:  # close all of them, whatever one raises
            for transport in reversed(transports):
                scope.callback(transport.close)

    def abandon(self, error: BaseException) -> None:
        """Tell all receivers that the sync failed, release everything, and discard the version."""
        for name, link in self.links.items():
            with contextlib.suppress(KitError):
                link.send({"kind": FAILED, "why": f"the sender gave up: {error}", KEEP: name in self.ready})
        try:
            with contextlib.suppress(KitError):
                self.close()
        finally:
            self.cache.discard(self.report.version)


def reason_behind(error: BaseException) -> PeerFailed | None:
    """A receiver's reason that led to this error: a new error, since the error is its cause."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, PeerFailed) and link.message.get("kind") == FAILED:
            return PeerFailed(link.peer, "bytes", link.message)
        link = link.__cause__ or link.__context__
    return None


def different(own: Mapping[str, str], answers: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """The receivers whose tensors have other digests, each with their names."""
    differing = {
        peer: sorted(name for name in {*own, *message["digests"]} if own.get(name) != message["digests"].get(name))
        for peer, message in answers.items()
    }
    return [(peer, names) for peer, names in differing.items() if names]


def named(weights: Gathered) -> Mapping[Key, torch.Tensor]:
    return weights.tensors if isinstance(weights, Bound) else weights
