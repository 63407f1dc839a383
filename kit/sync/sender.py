"""The sender's end of a sync: from live weights to receivers that run them, or to none that do.

`sync(version, targets, gather)` brings one version to some receivers:
- a **refresh** of those that serve: a new version is built in the cache; every bucket is stored at the receivers before any of them changes
  a weight, and no forward runs between the change and the publication;
- a **stream** to those that pause: a new version too, and buckets go into their weights as they are packed; nobody is routed to them
  until the end, and after a failure not at all;
- an **expansion** to those that wake: they get the active version from the cache, whatever the live weights are by now, bucket by
  bucket into their weights, and are not routed before the end; it makes no version;
- the **base**, version -1: nothing moves, and only where all weights are equal.

Then, for all of them alike: apply, teardown (here first), finalize once, publish, activate. Whatever fails, on either end, ends the
sync with an error that names who and what: nobody has the new version, the active one stays, and the next sync starts afresh. That
holds until all have published: the version is active from then on, and whoever fails later is named and goes back alone.
One lock is held throughout. Limits: one sync at a time; the sender's host holds the whole model, gathered and packed; where the sender
dies while it activates, some receivers have the new version and some the old, each under its own number.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from kit.errors import BadInput, KitError
from kit.sync.buckets import live
from kit.sync.cache import BASE
from kit.sync.hashes import digest
from kit.sync.link import FAILED, PeerFailed, PeerGone, PeerSilent, ready
from kit.sync.log import Log
from kit.sync.transports import Place, choose, make
from kit.sync.transports.base import GRACE_S, TransportContext
from kit.sync.verify import NONE, Digests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from kit.sync.buckets import Key
    from kit.sync.cache import Cache
    from kit.sync.link import Link, Listener
    from kit.sync.transports.base import Transport

    Tensors = Mapping[Key, torch.Tensor]

AUTO = "auto"
BUILDS = ("refresh", "stream")  # paths that make a version
STEPS = ("apply", "teardown", "finalize", "publish", "activate")


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A receiver: what it calls itself, its rank in its World, where it lives, and what it does meanwhile."""

    name: str
    rank: int
    place: Place
    state: Literal["serving", "paused", "asleep"] = "serving"


class SyncFailed(KitError):  # noqa: N818 - it is what happened
    """No receiver has the version; where it is active nevertheless, whoever was not activated has not. `peer` is the receiver that
    failed, where one did; `bucket` and `tensors` what of."""

    def __init__(self, what: str, active: int, error: KitError, *, published: bool = False) -> None:
        super().__init__(
            f"{what} failed: {error}; version {active} {'is active already' if published else 'stays active'}"
        )
        said = error.said if isinstance(error, PeerFailed) else {}
        self.peer: str | None = getattr(error, "peer", None)
        self.bucket: int | None = said.get("bucket")
        self.tensors: tuple[str, ...] = tuple(said.get("tensors", getattr(error, "tensors", ())))


class OtherBase(KitError):  # noqa: N818 - it is what was found
    """A receiver's base weights are not the trainer's."""

    def __init__(self, peer: str, tensors: Sequence[str], count: int) -> None:
        super().__init__(
            f"{peer} has other base weights than the trainer: {len(tensors)} of {count} tensors, {tensors[0]} first; "
            "a trainer that resumed from elsewhere must send a version"
        )
        self.peer = peer
        self.tensors = tuple(tensors)


@dataclass(kw_only=True, slots=True)
class Report:
    """What a sync came to."""

    path: str
    version: int
    receivers: int = 0
    answered: int = 0  # receivers that are active with it
    bytes: int = 0
    tensors: int = 0
    copies: int = 0  # at most, of whole models in the cache
    buckets: int = 0
    bucket_bytes: int = 0
    transports: dict[str, int] = field(default_factory=dict)
    log: Log = field(default_factory=Log)
    began: float = 0.0
    wall: float = 0.0
    verified: int = 0  # tensors whose digests were compared on the way
    said: str = ""
    base_differs: dict[str, list[str]] = field(default_factory=dict)


class Sender:
    """`transport` is a name, `module:attr`, or "auto": chosen for each receiver by where it lives."""

    steps: Sequence[str] = STEPS

    def __init__(
        self,
        cache: Cache,
        listener: Listener,
        *,
        place: Place,
        rank: int,
        device: torch.device,
        transport: str = AUTO,
        verify: str = "mix128",
        share: float = 1.0,
        timeout_s: float = 60.0,
        config: dict[str, Any] | None = None,
    ) -> None:
        self.cache = cache
        self.listener = listener
        self.place = place
        self.rank = rank
        self.device = device
        self.transport = transport
        self.verify = verify
        self.share = share
        self.timeout_s = timeout_s
        self.config = config or {}
        self.digests: dict[str, list[str]] = {}  # of the live weights that the active version was built from

    @property
    def version(self) -> int:
        """What receivers run."""
        return self.cache.active

    def sync(
        self,
        version: int,
        targets: Sequence[Target],
        gather: Callable[[], Tensors] | None = None,
        *,
        dirty: Iterable[str] | None = None,
    ) -> Report:
        """Bring a version to these receivers, each of which joins meanwhile. `gather` gives all live weights; an expansion needs none.
        `dirty` are those that have changed since the last version."""
        with contextlib.ExitStack() as scope:
            try:
                scope.enter_context(self.cache.held(f"the sync of version {version}"))
            except KitError as error:
                raise SyncFailed(f"the sync of version {version}", self.cache.active, error) from error
            return self._sync(self._path(version, targets, gather), version, targets, gather, dirty)

    def _sync(
        self,
        path: str,
        version: int,
        targets: Sequence[Target],
        gather: Callable[[], Tensors] | None,
        dirty: Iterable[str] | None,
    ) -> Report:
        report = Report(path=path, version=version, began=time.time(), receivers=len(targets))
        report.log.event("begin")
        started = time.perf_counter()
        try:
            _Call(self, report, targets).run(gather, dirty)
        except KitError as error:
            active = self.cache.active
            published = path in BUILDS and active == version
            raise SyncFailed(f"the {path} with version {version}", active, error, published=published) from error
        report.copies = max(report.copies, self.cache.copies)
        report.wall = time.perf_counter() - started
        return report

    def published(self, path: str, version: int) -> int:  # noqa: ARG002 - a fault looks at the path
        """The version that receivers publish."""
        return version

    def base_agrees(self, differing: dict[str, list[str]]) -> bool:
        """Whether receivers may run their base weights as the trainer's."""
        return not any(differing.values())

    def _path(self, version: int, targets: Sequence[Target], gather: object) -> str:
        if not targets:
            raise BadInput("a sync needs a receiver")
        names = [target.name for target in targets]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise BadInput(f"several receivers are called {', '.join(twice)}: each needs a name of its own")
        states = {target.state for target in targets}
        if len(states) > 1:
            raise BadInput(
                f"some receivers are {' and some '.join(sorted(states))}: bring them the version in a sync each"
            )
        state, active = states.pop(), self.cache.active
        if state == "asleep":
            if version != active or version == BASE:
                why = "there is no copy of the base" if active == BASE else f"the active version is {active}"
                raise BadInput(
                    f"an expansion with version {version} is refused: {why}, and an expansion makes no version"
                )
            return "expand"
        if gather is None:
            raise BadInput("receivers that are awake get the live weights: say how they are gathered")
        if version <= active and not version == active == BASE:
            raise BadInput(f"version {version} is refused: {active} is active, and versions only grow")
        if version == BASE:
            return "base"
        return "refresh" if state == "serving" else "stream"


class _Call:
    """One sync."""

    def __init__(self, sender: Sender, report: Report, targets: Sequence[Target]) -> None:
        self.sender = sender
        self.report = report
        self.targets = targets
        self.log = report.log
        self.cache = sender.cache
        self.layout = sender.cache.layout
        self.links: dict[str, Link] = {}
        self.transports: list[Transport] = []
        self.digests: Digests | None = None
        self.table: dict[str, list[str]] = {}

    def run(self, gather: Callable[[], Tensors] | None, dirty: Iterable[str] | None) -> None:
        sender, report = self.sender, self.report
        try:
            self.links = sender.listener.accept([target.name for target in self.targets], sender.timeout_s)
            tensors: Tensors = {}
            if gather is not None:
                with self.log.stage("gather"):
                    tensors = gather()
                self.log.event("gathered")
            if report.path == "base":
                self.compare_base(tensors)
            else:
                self.send(tensors, dirty)
            for step in sender.steps:
                if report.path != "base" or step in ("publish", "activate"):
                    getattr(self, step)()
            self.command("end", "ended")
        except BaseException as error:
            self.abandon(error)
            raise
        finally:
            if self.digests is not None:
                self.digests.close()
            for link in self.links.values():
                link.close()

    # -- what goes before ----------------------------------------------------------------------------------------------

    def compare_base(self, tensors: Tensors) -> None:
        algorithm = self.sender.verify if self.sender.verify != NONE else "sha256"
        self.tell("begin", path="base", version=BASE, algorithm=algorithm, began=self.report.began)
        mine = {name: digest(tensor, algorithm) for (name, _), tensor in tensors.items()}
        theirs = self.hear("base")
        differing = {
            peer: sorted(name for name in {*mine, *said["digests"]} if mine.get(name) != said["digests"].get(name))
            for peer, said in theirs.items()
        }
        self.report.base_differs = differing
        self.report.verified = len(mine)
        if not self.sender.base_agrees(differing):
            peer, names = next((peer, names) for peer, names in differing.items() if names)
            raise OtherBase(peer, names, len(mine))

    def send(self, tensors: Tensors, dirty: Iterable[str] | None) -> None:
        sender, report, layout, version = self.sender, self.report, self.layout, self.report.version
        self.digests = Digests(layout, version, algorithm=sender.verify, share=sender.share)
        kinds = {target.name: self.kind(target) for target in self.targets}
        report.tensors = len(layout.specs)
        report.bytes, report.buckets, report.bucket_bytes = layout.total, len(layout.buckets), layout.bucket_bytes
        report.verified, report.said = self.digests.count, self.digests.said
        for kind in kinds.values():
            report.transports[kind] = report.transports.get(kind, 0) + 1
        self.tell(
            "begin",
            lambda name: {
                "transport": kinds[name],
                "ranks": self.ranks(kinds, kinds[name]),
                "place": self.spot(kinds, name),
            },
            path=report.path,
            version=version,
            layout=layout.to_json(),
            verify=sender.verify,
            share=sender.share,
            began=report.began,
        )
        self.hear("ready")
        self.log.event("ready")
        last = time.perf_counter()
        builds = report.path in BUILDS

        def packed(index: int) -> None:
            nonlocal last
            assert self.digests is not None
            if builds:
                self.log.add("pack", time.perf_counter() - last)
            with self.log.stage("send"):
                if not self.transports:
                    self.open(kinds)
                if builds:
                    self.digests.add(index, live(layout, index, tensors))
                for transport in self.transports:
                    transport.send(index, self.cache.bucket(version, index))
            last = time.perf_counter()

        if builds:
            self.cache.build(version, tensors, dirty, packed)
            report.copies = self.cache.copies
            self.log.event("packed")
        else:
            for index in range(len(layout.buckets)):
                packed(index)
        with self.log.stage("send"):
            for transport in self.transports:
                transport.flush()
        self.log.event("sent")
        with self.log.stage("verify"):
            self.table = self.digests.table() if builds else sender.digests
            self.tell("verify", digests=self.table)
            self.hear("verified")
        self.log.event("verified")

    # -- what goes after, in the order of `Sender.steps` ---------------------------------------------------------------

    def apply(self) -> None:
        with self.log.stage("apply"):
            self.command("apply", "applied")

    def teardown(self) -> None:
        """The sender's ends first, then everybody else's."""
        with self.log.stage("teardown"):
            self.close()
            self.command("teardown", "closed")

    def finalize(self) -> None:
        with self.log.stage("finalize"):
            self.command("finalize", "finalized")

    def publish(self) -> None:
        report = self.report
        with self.log.stage("publish"):
            self.tell("publish", version=self.sender.published(report.path, report.version))
            self.hear("published")
            if report.path in BUILDS:
                self.cache.activate(report.version)
                self.sender.digests = self.table
        self.log.event("publish")

    def activate(self) -> None:
        with self.log.stage("activate"):
            self.report.answered = self.command("activate", "activated")

    # -- how -----------------------------------------------------------------------------------------------------------

    def command(self, kind: str, answer: str) -> int:
        """How many have done it: all, or it raises."""
        self.tell(kind)
        answers = self.hear(answer)
        self.log.event(kind)
        return len(answers)

    def tell(self, kind: str, each: Callable[[str], dict[str, Any]] = lambda _: {}, **message: Any) -> None:
        """Everybody, and only then raise: who is gone must not keep the others from what they are told."""
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
        """From everybody within one deadline. Once somebody has failed the others get a moment: who is gone is named first, since others
        may fail by that, and who is silent last."""
        answers: dict[str, dict[str, Any]] = {}
        failed: list[KitError] = []
        waiting = dict(self.links)
        end = time.monotonic() + self.sender.timeout_s
        while waiting:
            there = ready(waiting.values(), end - time.monotonic())
            if not there:
                break
            for name in [name for name, link in waiting.items() if link in there]:
                try:
                    answers[name] = waiting.pop(name).expect(kind)[0]
                except (PeerFailed, PeerGone, PeerSilent) as error:
                    failed.append(error)
                    end = min(end, time.monotonic() + GRACE_S)
        if failed:
            raise min(failed, key=lambda error: not isinstance(error, PeerGone))
        if waiting:
            raise PeerSilent(", ".join(waiting), kind, self.sender.timeout_s)
        return answers

    def kind(self, target: Target) -> str:
        named = self.sender.transport
        return choose(self.sender.place, target.place) if named == AUTO else named

    def sharing(self, kinds: Mapping[str, str], kind: str) -> list[Target]:
        """Receivers by one transport."""
        return [target for target in self.targets if kinds[target.name] == kind]

    def ranks(self, kinds: Mapping[str, str], kind: str) -> list[int]:
        return [self.sender.rank, *(target.rank for target in self.sharing(kinds, kind))]

    def spot(self, kinds: Mapping[str, str], name: str) -> int:
        return 1 + [target.name for target in self.sharing(kinds, kinds[name])].index(name)

    def open(self, kinds: Mapping[str, str]) -> None:
        for kind in dict.fromkeys(kinds.values()):
            names = [target.name for target in self.sharing(kinds, kind)]
            ranks = self.ranks(kinds, kind)
            context = TransportContext(
                role="sender",
                name="the sender",
                links={name: self.links[name] for name in names},
                sizes=self.layout.sizes,
                starts=self.cache.starts,
                segment=self.cache.segment(self.report.version),
                pieces=self.layout.pieces,
                device=self.sender.device,
                timeout_s=self.sender.timeout_s,
                ranks=tuple(ranks),
                place=0,
                config={**self.sender.config, "size": len(ranks)},
            )
            self.transports.append(make(kind, context))

    def close(self) -> None:
        transports, self.transports = self.transports, []
        with contextlib.ExitStack() as scope:  # all of them, whatever one raises
            for transport in reversed(transports):
                scope.callback(transport.close)

    def abandon(self, error: BaseException) -> None:
        """Tell everybody that still listens, give everything back, and forget the version. The error goes on its way."""
        for link in self.links.values():
            with contextlib.suppress(KitError):
                link.send({"kind": FAILED, "why": f"given up by the sender: {error}"})
        try:
            with contextlib.suppress(KitError):
                self.close()
        finally:
            self.cache.discard(self.report.version)
