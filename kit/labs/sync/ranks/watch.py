"""The lab's own observation of a sync on a rank: version, route and forwards of a replica at every point, and the closing of transports.

The log of the code under test is not read. A point is a moment at which that code uses an object of the lab: the host (wake, gate,
derive), the weights (write), the transport (open, bucket, send, close), or a step of the sync (all others). At each of them a serving
replica is asked for a forward: one begins and gives logits, or none begins, which counts as waiting.

Limits: "waits" means that no forward began for `QUIET_S`, or for `BRIEF_S` from the bucket `MANY` on; a gate that opens later than that is
observed by the next point only. Of many buckets not all are asked (`is_asked`).
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from kit import machine
from kit.engines.contents import sha256
from kit.labs.rankside import Context
from kit.labs.sync.lab import is_asked
from kit.measure.phase import Place, shared_at
from kit.sync.hashes import digest
from kit.sync.link import Link
from kit.sync.receiver import Call, Receiver
from kit.sync.serving import ALGORITHM, Serving

QUIET_S = 0.015  # if no forward is inside and none begins for this long, forwards wait
MANY, BRIEF_S = 16, 0.002  # from this bucket on for this long; a later point observes what began meanwhile
SETTLED_S = 2.0  # after a sync a forward has this long to begin: nothing may hold it back any more
LINGER_S = 0.02  # a forward stays inside this long when a writer arrives, to detect a writer that does not wait
BEGINNING = 2**16  # bytes of each bucket that are compared with those of other buckets
WAITS, STUCK, UNASKED = "waits", "stuck", "unasked"
STEPS = ("verify", "apply", "teardown", "finalize", "publish", "activate", "end")


class Forward(NamedTuple):
    """One forward: its prompt and the SHA-256 of its logits, the versions of the replica when it began and ended, whether there was a
    route, and the answer that its request must get."""

    logits: str
    versions: tuple[int, int]
    routed: bool
    answer: str = ""


class Point(NamedTuple):
    """A moment of a sync, by the system clock. `logits` are those of the attempted forward, or the reason for none."""

    name: str
    bucket: int
    when: float
    version: int
    routed: bool
    logits: str


@dataclass(eq=False)
class Forwards:
    """The forward that `Serving` runs, with a record of each call. The prompts take turns; a replica's ranks run the same forwards."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    prompts: Sequence[torch.Tensor]
    receiver: Callable[[], Receiver]
    deadline_s: float

    def __post_init__(self) -> None:
        self.made: dict[int, Forward] = {}
        self.overlaps = 0  # writers that entered while a forward was inside
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
            prompt = number % len(self.prompts)
            logits = self.forward(self.prompts[prompt])
            versions = before, receiver.version
            made = Forward(logits_of(prompt, logits), versions, routed or receiver.routed, digest(logits, ALGORITHM))
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

    def at_rest(self) -> list[torch.Tensor]:
        """Logits of the current weights for each prompt, on a separate thread like served forwards. Nothing may be served meanwhile."""
        with ThreadPoolExecutor(1) as pool:
            thread = pool.submit(threading.get_native_id).result()
            forwards = [pool.submit(self.forward, prompt) for prompt in self.prompts]
        end = time.monotonic() + SETTLED_S
        while machine.has_thread(thread) and time.monotonic() < end:
            time.sleep(0.001)  # the system still counts a thread that has just been joined
        return [forward.result() for forward in forwards]

    def known_at_rest(self) -> frozenset[str]:
        return known_logits(self.at_rest())

    def wrong_answers(self, served: Sequence[str]) -> int:
        """Requests that got no answer, two, or that of another request."""
        wanted = [forward.answer for _, forward in sorted(self.made.items())]
        return sum(one != other for one, other in zip_longest(wanted, served))

    def attempt(self, quiet_s: float = QUIET_S) -> str:
        """Logits of a forward that begins from now on; WAITS if none begins, STUCK if one does not end."""
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
            ended = self._changed.wait_for(lambda: number in self.made, self.deadline_s)
            return self.made[number].logits if ended else STUCK

    @contextlib.contextmanager
    def writer(self, writing: contextlib.AbstractContextManager[None], *, serves: bool) -> Iterator[None]:
        """Let a writer enter the gate while a forward is inside, for which it must wait."""
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


def logits_of(prompt: int, logits: torch.Tensor) -> str:
    return f"{prompt}:{sha256(logits)}"


def known_logits(of_prompts: Sequence[torch.Tensor]) -> frozenset[str]:
    return frozenset(logits_of(prompt, logits) for prompt, logits in enumerate(of_prompts))


@dataclass(eq=False)
class SyncWatch:
    """One rank's observer: the `points` of the current sync. `known` are the logits of each version for each prompt, taken at rest."""

    version: Callable[[], int]
    routed: Callable[[], bool] = lambda: True
    forwards: Forwards | None = None
    serving: Serving | None = None
    measure: Callable[[], None] = lambda: None  # called at every point
    points: list[Point] = field(default_factory=list)
    homes: set[Place] = field(default_factory=set)  # shared memory from which buckets were sent
    known: dict[int, frozenset[str]] = field(default_factory=dict)
    # SHA-256 of the first bytes of each bucket that was last written.
    beginnings: dict[int, str] = field(default_factory=dict)
    repeats: set[int] = field(default_factory=set)  # buckets that begin with the bytes of the one before
    path: str = "base"
    base: int | None = None  # the version that the last sync named as the one which it changed
    arrived: int = 0  # bytes of the buckets of the last sync
    recorded: Counter[str] = field(default_factory=Counter)  # number of recorded syncs by path

    def point(self, name: str, bucket: int = 0) -> None:
        when, version, routed = time.time(), self.version(), self.routed()
        serves = self.forwards is not None and self.serving is not None and self.serving.running
        quiet_s = SETTLED_S if name == "end" else QUIET_S if bucket < MANY else BRIEF_S
        logits = ""
        if self.forwards is not None and serves:
            logits = self.forwards.attempt(quiet_s) if is_asked(bucket) else UNASKED
        self.measure()
        self.points.append(Point(name, bucket, when, version, routed, logits))

    def reset(self, path: str) -> None:
        self.path, self.points, self.base, self.arrived = path, [], None, 0
        if self.forwards is not None:
            self.forwards.reset()

    # -- wrappers for the code under test ------------------------------------------------------------------------------

    def wrap_make(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """For `Receiver.make` and `Sender.make`."""

        def seen(kind: Any, ctx: Any, **named: Any) -> Any:
            transport = SeenTransport(make(kind, ctx, **named), self, buckets=len(ctx.sizes), links=ctx.links)
            self.point("open")
            return transport

        return seen

    def wrap_call(self, plain: type[Call]) -> type[Call]:
        """For `Receiver.calls`."""
        watch = self

        class Seen(plain):  # type: ignore[misc, valid-type]
            def begin(self, message: dict[str, Any]) -> None:
                watch.base = message.get("base")
                watch.point("begin")
                super().begin(message)

            def undo(self) -> None:
                watch.point("undo")
                super().undo()
                watch.point("undone")

        def seen(step: str) -> Callable[[Any, dict[str, Any]], None]:
            def run(call: Any, message: dict[str, Any]) -> None:
                getattr(plain, step)(call, message)
                watch.point(step)

            return run

        for step in STEPS:
            setattr(Seen, step, seen(step))
        return Seen

    def version_of(self, logits: str) -> str:
        """The version that gave these logits, in words."""
        if logits in {"", WAITS, STUCK, UNASKED}:
            return logits
        return next((f"version {version}" for version, known in self.known.items() if logits in known), "no version")

    def record(self, ctx: Context) -> None:
        """Record every point in order. `sync` counts the syncs of a path, and is the same on both ends."""
        self.recorded[self.path] += 1
        for order, point in enumerate(self.points):
            ctx.record(
                "point",
                point.when,
                "s",
                path=self.path,
                sync=self.recorded[self.path],
                point=point.name,
                bucket=point.bucket,
                order=order,
                version=point.version,
                routed=int(point.routed),
                forward=self.version_of(point.logits),
            )


class JudgedForwards(NamedTuple):
    served: int
    torn: int  # on mixed weights, on the old version after the new one, or with a writer inside
    mislabelled: int  # on another version than the replica reported at that moment


def judge_forwards(
    forwards: Forwards, known: Mapping[int, frozenset[str]], before: frozenset[str], after: frozenset[str]
) -> JudgedForwards:
    """Compare the forwards of a replica with a route with its logits at rest before and after a sync. These are of two versions, if it
    published one."""
    routed = [forward for _, forward in sorted(forwards.made.items()) if forward.routed]
    torn = forwards.overlaps + sum(forward.logits not in before | after for forward in routed)
    news = [place for place, forward in enumerate(routed) if forward.logits in after - before]
    if news:
        torn += sum(forward.logits in before - after for forward in routed[news[0] :])
    every = frozenset[str]().union(*known.values())
    mislabelled = sum(
        forward.logits in every and not any(forward.logits in known.get(version, ()) for version in forward.versions)
        for forward in routed
    )
    return JudgedForwards(len(routed), torn, mislabelled)


class SeenTransport:
    def __init__(
        self, transport: Any, watch: SyncWatch, buckets: int = 0, links: Mapping[str, Link] | None = None
    ) -> None:
        self._transport = transport
        self._watch = watch
        self.buckets = buckets
        self.links = dict(links or {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, index: int, buffer: torch.Tensor) -> None:
        self._watch.homes |= {home for home in [shared_at(buffer.data_ptr())] if home}
        self._transport.send(index, buffer)
        self._watch.point("send", index)

    def receive(self, index: int, into: torch.Tensor) -> torch.Tensor:
        got: torch.Tensor = self._transport.receive(index, into)
        self._watch.arrived += got.numel()
        self._watch.point("bucket", index)
        return got

    def flush(self) -> None:
        self._transport.flush()

    def close(self) -> None:
        self._watch.point("close")
        self._transport.close()
        self._watch.point("closed")


class SeenWeights:
    """A replica's weights, with a point for each bucket that is written."""

    def __init__(self, weights: Any, watch: SyncWatch) -> None:
        self._weights = weights
        self._watch = watch
        self._before = b""  # how the last bucket began

    def keep(self) -> Callable[[], None]:
        keep: Callable[[], None] = self._weights.keep()
        return keep

    def bind(self, layout: Any, changes: Any = None) -> SeenWeights:
        self._applier = self._weights.bind(layout, changes)
        return self

    def adopt(self, layout: Any) -> SeenWeights:
        self._applier = self._weights.adopt(layout)
        return self

    def apply(self, index: int, buffer: torch.Tensor) -> None:
        self._watch.point("write", index)
        begins = buffer[:BEGINNING].cpu().contiguous().numpy().tobytes()
        self._watch.beginnings[index] = hashlib.sha256(begins).hexdigest()
        common = min(len(begins), len(self._before))
        self._watch.repeats.discard(index)
        if index and common and begins[:common] == self._before[:common]:
            self._watch.repeats.add(index)
        self._before = begins
        self._applier.apply(index, buffer)
