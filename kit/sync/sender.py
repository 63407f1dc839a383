"""The sender's end of a sync: from live weights to receivers that run them, or to none that do.

`sync(version, targets, gather)` brings one version to some receivers:
- a **refresh** of those that serve: a new version is built in the cache. Every bucket is stored at the receivers before any of them changes
  a weight, and no forward runs between the change and the publication.
- a **stream** to those that pause: also a new version. Buckets go into their weights as they are packed. They have no route until the end,
  and none after a failure.
- an **expansion** to those that wake: they get the active version from the cache, whatever the live weights are, bucket by bucket into
  their weights. They have no route until the end. It makes no version.
- the **base**, version -1: nothing moves, and it succeeds only if all weights are equal.

Then, for all of them: apply, teardown (here first), finalize once, publish, activate. A failure on either end ends the sync with an error
that names its cause: no receiver has the new version, the active one stays, and the next sync starts afresh. Once all have published, the
version is active; a receiver that fails later is named and goes back, with all ranks of its replica and no others.

One lock is held throughout. Limits: one sync at a time; the sender's host holds the whole model, gathered and packed. If the sender dies
while it ends a sync, some receivers have the new version and some the old, each under its own number; those with the old one have no route
if they are ranks of a larger replica.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kit.errors import BadInput, KitError
from kit.sync.buckets import live
from kit.sync.cache import BASE
from kit.sync.hashes import AUTO, Digests, algorithms
from kit.sync.link import PeerFailed
from kit.sync.sending import BUILDS, Log, Sending, named
from kit.sync.transports import make

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from kit.sync.cache import Cache
    from kit.sync.link import Listener
    from kit.sync.sending import Gathered
    from kit.sync.transports import Place

STEPS = ("apply", "teardown", "finalize", "publish", "activate")


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A receiver: its name, its rank in its World, its location, its state, and the replica that it belongs to (empty: only this rank)."""

    name: str
    rank: int
    place: Place
    state: Literal["serving", "paused", "asleep"] = "serving"
    replica: str = ""


class SyncFailed(KitError):  # noqa: N818 - it is what happened
    """No receiver has the version or, if it is already active, replicas with a rank that was not activated do not. `peer` is the receiver
    that failed, if one did; `bucket` and `tensors` say where."""

    def __init__(self, what: str, active: int, error: KitError, *, published: bool = False) -> None:
        remains = "is already active" if published else "stays active"
        super().__init__(f"{what} failed: {error}; version {active} {remains}")
        said = error.said if isinstance(error, PeerFailed) else {}
        self.peer: str | None = getattr(error, "peer", None)
        self.bucket: int | None = said.get("bucket")
        self.tensors: tuple[str, ...] = tuple(said.get("tensors", getattr(error, "tensors", ())))


@dataclass(kw_only=True, slots=True)
class Report:
    """The outcome of a sync."""

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


@dataclass(eq=False, repr=False)
class Sender:
    """`transport` is a name, `module:attr`, or "auto": chosen for each receiver by its location. `share`: of the tensors that receivers
    verify. `config` reaches this end's transports."""

    steps: ClassVar[Sequence[str]] = STEPS

    cache: Cache
    listener: Listener
    _: KW_ONLY
    place: Place
    rank: int
    device: torch.device
    transport: str = AUTO
    verify: str = AUTO
    share: float = 1.0
    timeout_s: float = 60.0
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.verify = algorithms()[0] if self.verify == AUTO else self.verify
        self.make = make  # a transport by its name; an observer puts its own here
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
        *,
        dirty: Iterable[str] | None = None,
    ) -> Report:
        """Bring a version to these receivers, which call `join` meanwhile. `gather` returns all live weights, or a `Bound` of them; an
        expansion needs none. `dirty` names the tensors that changed since the last version."""
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
                Sending(self, report, targets).run(gather, dirty)
            except KitError as error:
                active = self.cache.active
                published = path in BUILDS and active == version
                raise SyncFailed(f"the {path} with version {version}", active, error, published=published) from error
            report.copies = max(report.copies, self.cache.copies)
            report.wall = time.perf_counter() - started
            return report

    def build(self, version: int, tensors: Gathered) -> None:
        """Make a version that no receiver has yet, while the live weights are there; expansions send it."""
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

    def published(self, path: str, version: int) -> int:  # noqa: ARG002 - a fault looks at the path
        """The version that receivers publish."""
        return version

    def base_agrees(self, differing: dict[str, list[str]]) -> bool:
        """Whether receivers may run their base weights as the trainer's."""
        return not any(differing.values())

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
