"""What the lab itself sees of a sync on a rank: version, route and forwards of a replica at every point, and when transports close.

Nothing is read from the log of the code under test. A point is a moment at which that code uses something of the lab's: the host (wake,
gate, derive), the weights (write), the transport (open, bucket, send, close), or a step of the sync (all others). Before and after each
of them a replica that serves is asked for a forward: one begins and gives logits, or none begins, which is to wait.

Limits: "waits" means that no forward began for `QUIET_S`; a gate that lets forwards in later than that is seen by the next point alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kit.measure.observers.holdings import shared_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kit.labs.rankside import Context
    from kit.measure.observers.holdings import Place
    from kit.sync.receiver import Call, Receiver
    from kit.sync.serving import Serving

QUIET_S = 0.015  # with no forward inside and none that begins: forwards wait
LINGER_S = 0.02  # for which a forward stays inside when a writer comes: one that does not wait for it is seen
WAITS = "waits"
STUCK = "stuck"
STEPS = ("verify", "apply", "teardown", "finalize", "publish", "activate", "end")


def sha256(tensor: torch.Tensor) -> str:
    """The lab's own: of dtype, shape and all bytes. Works on a copy, which no storage of a job is marked by."""
    flat = tensor.detach().to("cpu", copy=True).contiguous()
    hashed = hashlib.sha256(f"{flat.dtype} {tuple(flat.shape)}\n".encode())
    hashed.update(flat.view(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


class Forward(NamedTuple):
    """One forward: its logits by their SHA-256, and version and route of the replica when it began and when it ended."""

    logits: str
    versions: tuple[int, int]
    routed: bool


class Point(NamedTuple):
    """A moment of a sync, by the system's clock. `logits` are of a forward that was attempted then, or why there are none."""

    name: str
    bucket: int
    when: float
    version: int
    routed: bool
    logits: str


class Forwards:
    """The replica's forward as `Serving` runs it, with each call followed."""

    def __init__(
        self, forward: Callable[[], torch.Tensor], receiver: Callable[[], Receiver], deadline_s: float
    ) -> None:
        self.forward = forward
        self.receiver = receiver
        self.deadline_s = deadline_s
        self.made: dict[int, Forward] = {}
        self.overlaps = 0  # writers that came in while a forward was inside
        self._begun = 0
        self._inside: set[int] = set()
        self._lingers = False
        self._changed = threading.Condition()

    def __call__(self) -> torch.Tensor:
        receiver = self.receiver()
        with self._changed:
            number, self._begun = self._begun, self._begun + 1
            self._inside.add(number)
            self._changed.notify_all()
        before, routed = receiver.version, receiver.routed
        try:
            logits = self.forward()
            made = Forward(sha256(logits), (before, receiver.version), routed or receiver.routed)
            with self._changed:
                self.made[number] = made
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._lingers, LINGER_S)
        finally:
            with self._changed:
                self._inside.discard(number)
                self._changed.notify_all()
        return logits

    def reset(self) -> None:
        with self._changed:
            self.made, self.overlaps = {}, 0

    def at_rest(self) -> torch.Tensor:
        """Logits of the weights as they are, on a thread of its own, as forwards that are served. Nothing may be served meanwhile."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self.forward).result()

    def attempt(self, quiet_s: float = QUIET_S) -> str:
        """Logits of a forward that begins from now on; WAITS where none begins, STUCK where one does not end."""
        with self._changed:
            number, quiet = self._begun, time.monotonic()
            end = quiet + self.deadline_s
            while self._begun == number:
                self._changed.wait(quiet_s)
                if self._inside:
                    quiet = time.monotonic()
                    if quiet > end:
                        return STUCK
                elif self._begun == number and time.monotonic() - quiet >= quiet_s:
                    return WAITS
            there = self._changed.wait_for(lambda: number in self.made, self.deadline_s)
            return self.made[number].logits if there else STUCK

    @contextlib.contextmanager
    def writer(self, writing: contextlib.AbstractContextManager[None], *, serves: bool) -> Iterator[None]:
        """A writer goes through the gate while a forward is inside, who must be waited for."""
        with contextlib.ExitStack() as scope:
            with self._changed:
                self._lingers = serves
                if serves:
                    self._changed.wait_for(lambda: bool(self._inside), self.deadline_s)
            try:
                scope.enter_context(writing)
                with self._changed:
                    self.overlaps += bool(self._inside)
            finally:
                with self._changed:
                    self._lingers = False
                    self._changed.notify_all()
            yield


class Watch:
    """One rank's eyes: `points` of the sync under way. `known` are the logits of each version, taken at rest."""

    def __init__(
        self,
        version: Callable[[], int],
        routed: Callable[[], bool] = lambda: True,
        forwards: Forwards | None = None,
        serving: Serving | None = None,
        measure: Callable[[], None] = lambda: None,
    ) -> None:
        self.version = version
        self.routed = routed
        self.forwards = forwards
        self.serving = serving
        self.measure = measure  # what else is looked at
        self.points: list[Point] = []
        self.homes: set[Place] = set()  # shared memory out of which buckets were sent
        self.known: dict[int, str] = {}
        self.path = "base"
        self.told: Counter[str] = Counter()  # syncs that were recorded, by path

    def point(self, name: str, bucket: int = 0) -> None:
        when, version, routed = time.time(), self.version(), self.routed()
        serves = self.forwards is not None and self.serving is not None and self.serving.running
        logits = self.forwards.attempt() if self.forwards is not None and serves else ""
        self.measure()
        self.points.append(Point(name, bucket, when, version, routed, logits))

    def reset(self, path: str) -> None:
        """Another sync, by this path."""
        self.path, self.points = path, []
        if self.forwards is not None:
            self.forwards.reset()

    # -- what the code under test is given in place of its own ---------------------------------------------------------

    def made(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """For `Receiver.make` and `Sender.make`."""

        def seen(*args: Any, **named: Any) -> Any:
            transport = SeenTransport(make(*args, **named), self)
            self.point("open")
            return transport

        return seen

    def calls(self, plain: type[Call]) -> type[Call]:
        """For `Receiver.calls`."""
        watch = self

        class Seen(plain):  # type: ignore[misc, valid-type]
            def begin(self, said: dict[str, Any]) -> None:
                watch.point("begin")
                super().begin(said)

            def undo(self) -> None:
                watch.point("undo")
                super().undo()
                watch.point("undone")

        for step in STEPS:
            setattr(Seen, step, _seen_step(plain, step, watch))
        return Seen

    # -- what it comes to ----------------------------------------------------------------------------------------------

    def version_of(self, logits: str) -> str:
        """What a forward's logits are, in words."""
        if logits in {"", WAITS, STUCK}:
            return logits
        return next((f"version {version}" for version, known in self.known.items() if known == logits), "no version")

    def record(self, ctx: Context) -> None:
        """Every point, in its order. `sync` counts those of a path, which is the same number on both ends."""
        self.told[self.path] += 1
        for order, point in enumerate(self.points):
            ctx.record(
                "point",
                point.when,
                "s",
                path=self.path,
                sync=self.told[self.path],
                point=point.name,
                bucket=point.bucket,
                order=order,
                version=point.version,
                routed=int(point.routed),
                forward=self.version_of(point.logits),
            )


class Judged(NamedTuple):
    """Forwards of one sync."""

    served: int
    torn: int  # of no one version, of the old one after the new one, or with a writer inside
    mislabelled: int  # of a version that was not the replica's at that moment


def judge(forwards: Forwards, known: Mapping[int, str], old: int, new: int) -> Judged:
    """Forwards of a replica that was routed to, against the logits of the two versions at rest."""
    made = [each for _, each in sorted(forwards.made.items()) if each.routed]
    before, after = known.get(old), known[new]
    torn = forwards.overlaps + sum(each.logits not in {before, after} for each in made)
    news = [place for place, each in enumerate(made) if each.logits == after]
    if news and before != after:
        torn += sum(each.logits == before for each in made[news[0] :])
    mislabelled = sum(
        each.logits in known.values() and each.logits not in {known.get(version) for version in each.versions}
        for each in made
    )
    return Judged(len(made), torn, mislabelled)


class SeenTransport:
    """A transport, and the moments at which it is used."""

    def __init__(self, transport: Any, watch: Watch) -> None:
        self._transport = transport
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, index: int, buffer: torch.Tensor) -> None:
        self._watch.homes |= {home for home in [shared_at(buffer.data_ptr())] if home}
        self._transport.send(index, buffer)
        self._watch.point("send", index)

    def receive(self, index: int, into: torch.Tensor) -> torch.Tensor:
        got: torch.Tensor = self._transport.receive(index, into)
        self._watch.point("bucket", index)
        return got

    def close(self) -> None:
        self._watch.point("close")
        self._transport.close()
        self._watch.point("closed")


class SeenWeights:
    """A replica's weights, and the moments at which buckets are written into them."""

    def __init__(self, weights: Any, watch: Watch) -> None:
        self._weights = weights
        self._watch = watch

    def own(self) -> Any:
        return self._weights.own()

    def bind(self, layout: Any) -> SeenApplier:
        return SeenApplier(self._weights.bind(layout), self._watch)


class SeenApplier:
    def __init__(self, applier: Any, watch: Watch) -> None:
        self._applier = applier
        self._watch = watch

    def apply(self, index: int, buffer: torch.Tensor) -> None:
        self._watch.point("write", index)
        self._applier.apply(index, buffer)


def _seen_step(plain: type[Call], step: str, watch: Watch) -> Callable[..., None]:
    def seen(self: Any, said: dict[str, Any]) -> None:
        getattr(plain, step)(self, said)
        watch.point(step)

    return seen
