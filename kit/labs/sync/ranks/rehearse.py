"""Rehearsed failures of a sync: no replica may have the new version, weights must be unchanged, the error must name the cause, and the
next sync must work.

Broken promises are counted; 0 is correct. The last of the receivers fails on purpose, each time in another way, and so does the sender's
end of a transport; the others do their part. Forwards run throughout on serving replicas and must all use the old version. Expansions fail
while replicas wake; afterwards the replicas must sleep again, and the next expansion must bring the active version.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.distributed import distributed_c10d as c10d

from kit.errors import BadInput, KitError
from kit.labs.sync.ranks.side import failed, raised
from kit.labs.sync.ranks.watch import WAITS, judge, sha256
from kit.measure.phase import temp_files
from kit.sync.buckets import Cut
from kit.sync.cache import BASE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kit.labs.sync.ranks.inference import Inference
    from kit.labs.sync.ranks.trainer import Trainer
    from kit.sync.sender import Target


EXTRA = "rehearsed.weight"
ALONE = "alone"
PACKED = "packed"
TOO_LATE = "activate"
BY_THE_SENDER = ("both", ALONE, PACKED)


def scenes(config: Any) -> tuple[str, ...]:
    """The ways in which a refresh fails. A receiver lacks a tensor, waits for one that is not sent, or has another dtype or shape;
    gets bytes that changed after sending or after packing; its transport raises; so does the sender's; only the sender's raises; the
    receiver fails when all weights are new, or after others have published."""
    return ("missing", "unsent", "unfit", *wrong_bytes(config), "transport", "both", ALONE, "late", "publish")


def expansions(config: Any) -> tuple[str, ...]:
    return ("missing", *wrong_bytes(config), "late", "publish")


def wrong_bytes(config: Any) -> tuple[str, ...]:
    return ("wrong-bytes", PACKED) if config.verify != "none" and config.verify_share == 1 else ()


# -- the trainer -----------------------------------------------------------------------------------------------------------


def trainer(side: Trainer) -> None:
    awake, asleep = side.targets(sleeping=False), side.targets(sleeping=True)
    train(side)
    if side.sends:
        record(side, "accepted", accepted(side), "calls that must be refused")
    for scene in scenes(side.config):
        fail(side, scene, awake, ahead=1)
    if side.config.shares:
        side.job.mover.release()
        for scene in expansions(side.config):
            fail(side, scene, asleep, ahead=0)
        succeed(side, "expansion", asleep, ahead=0)
        side.job.mover.restore()
    succeed(side, "refresh", awake, ahead=1)
    side.update_truth()
    side.send_truth(awake)
    train(side)
    fail(side, TOO_LATE, awake, ahead=1)
    train(side)
    succeed(side, TOO_LATE, awake, ahead=1)
    side.update_truth()
    side.send_truth(awake)


def train(side: Trainer) -> None:
    with side.as_job():
        side.job.step()


def succeed(side: Trainer, scene: str, targets: Sequence[Target], *, ahead: int) -> None:
    """The sync after failed ones. An expansion is not ahead of the active version and gathers nothing."""
    version = side.sender.version + ahead if side.sends else BASE
    report = side.deliver(version, targets, asleep=not ahead)
    if report is not None:
        wrong = side.sender.version != version or report.answered != len(targets)
        record(side, "next_failed", int(wrong), scene=scene)


def fail(side: Trainer, scene: str, targets: Sequence[Target], *, ahead: int) -> None:
    """One failing sync. With TOO_LATE the version is active by then, and only the replica that fails goes back."""
    if not side.sends:
        if ahead:
            side.gather()
        return
    sender, version = side.sender, side.sender.version + ahead
    active = version if scene == TOO_LATE else sender.version
    with (
        nothing_left(side, scene),
        failing_transport(sender, scene) if scene in BY_THE_SENDER else contextlib.nullcontext(),
    ):
        error = failed(functools.partial(sender.sync, version, targets, side.gather if ahead else None))
    remains = "is already active" if scene == TOO_LATE else "stays"
    named = error is not None and f"version {active} {remains}" in str(error)
    if error is not None and scene == ALONE:
        named = named and error.peer is None and "the sender" in str(error)
    elif error is not None:
        peers = [target.name for target in targets]
        named = named and error.peer in (peers if scene == PACKED else peers[-1:]) and error.peer in str(error)
        named = named and sorted(error.tensors) == blamed(side, scene)
    if not named:
        print(f"rehearse: the error in scene {scene} does not name the cause: {error}")
    record(side, "unnamed", int(not named), scene=scene)
    record(side, "kept_version", int(sender.version != active), scene=scene)


def blamed(side: Trainer, scene: str) -> list[str]:
    """The tensors that an error must name."""
    names, layout = sorted(side.digests), side.cache.layout
    first = layout.specs[layout.buckets[0][0].spec].name
    of_receivers = {"missing": names[-1:], "unfit": [names[0], names[-1]], "unsent": [EXTRA], "wrong-bytes": names}
    return {**of_receivers, PACKED: [first]}.get(scene, [])


def accepted(side: Trainer) -> int:
    """Invalid calls, which must be refused before any receiver is contacted; returns how many were accepted."""
    sender, targets, asleep = side.sender, side.targets(sleeping=False), side.targets(sleeping=True)
    version = sender.version
    wrong: list[Callable[[], object]] = [
        lambda: sender.sync(version, targets, dict),
        lambda: sender.sync(BASE, targets, dict),
        lambda: sender.sync(version + 1, []),
        lambda: sender.sync(version + 1, targets),
        lambda: sender.sync(version + 1, [*targets, targets[0]], dict),
    ]
    if asleep:
        wrong += [lambda: sender.sync(version + 1, asleep), lambda: sender.sync(version, [*asleep, *targets], dict)]
    return sum(not isinstance(raised(each), BadInput) for each in wrong)


# -- a replica -------------------------------------------------------------------------------------------------------------


def inference(side: Inference) -> None:
    if side.sleeper:
        for scene in expansions(side.config):
            endure(side, scene)
        take(side, "expansion", side.receiver.version)
        side.compare_weights(scene="expansion")
        side.leave()
        return
    for scene in scenes(side.config):
        endure(side, scene)
    version = side.receiver.version
    take(side, "refresh", version + 1)
    side.compare()
    go_back(side)
    take(side, TOO_LATE, version + 3)
    side.compare()


def go_back(side: Inference) -> None:
    """The last rank fails after the version became active: all ranks of its replica go back, all others keep the version."""
    receiver, version, staged = side.receiver, side.receiver.version, side.config.refresh == "staged"
    goes_back = side.of_last_replica
    side.watch.reset("rehearsed")
    with nothing_left(side, TOO_LATE), failing(side, TOO_LATE) if side.last else contextlib.nullcontext():
        if staged:
            serve(side)
        record(side, "silent", int(raised(receiver.join) is None), scene=TOO_LATE)
    known, rest = side.watch.known, ""
    served, failed = stop_serving(side) if staged else ("", None)
    wanted = (version, staged) if goes_back else (version + 1, True)
    record(side, "kept_version", int((receiver.version, receiver.routed) != wanted), scene=TOO_LATE)
    changed = side.hashes(sha256) != side.own
    record(side, "kept_wrong", int(changed == goes_back and (staged or not goes_back)), scene=TOO_LATE)
    if staged or not goes_back:
        rest = known.setdefault(receiver.version, sha256(side.forwards.at_rest()))
    if staged:
        found = judge(side.forwards, known, version, receiver.version)
        wrong = found.torn + found.mislabelled + int(failed is not None or served != rest)
        record(side, "served_wrong", wrong, scene=TOO_LATE)


def take(side: Inference, scene: str, wanted: int) -> None:
    """The sync after the failed ones."""
    side.take()
    record(side, "next_failed", int(side.receiver.version != wanted or not side.receiver.routed), scene=scene)


def endure(side: Inference, scene: str) -> None:
    """One failing sync on a replica, which must be unchanged afterwards."""
    receiver, staged = side.receiver, side.config.refresh == "staged"
    serves, version = staged and not side.sleeper, side.receiver.version
    side.watch.reset("rehearsed")
    with nothing_left(side, scene):
        if serves:
            serve(side)
        with failing(side, scene) if side.last else contextlib.nullcontext():
            silent = raised(receiver.join) is None
        record(side, "silent", int(silent), scene=scene)
        record(side, "kept_version", int(receiver.version != version), scene=scene)
        if serves:
            served, failed = stop_serving(side)
            made, known = side.forwards.made.values(), side.watch.known
            count = sum((each.logits != known.get(version)) + (each.versions != (version, version)) for each in made)
            # Old weights are restored behind the gate: no forward may run at `derive`.
            early = sum(point.name == "derive" and point.logits != WAITS for point in side.watch.points)
            stopped = failed is not None or served not in known.values()
            record(side, "served_wrong", count + early + side.forwards.overlaps + stopped, scene=scene)
            record(side, "kept_wrong", int(not receiver.routed) + side.compare_weights(scene=scene), scene=scene)
        else:
            # The weights of a replica that paused or woke are undefined now: it must have no route, and sleep again if it woke.
            awake = side.sleeper and not side.replica.asleep
            record(side, "kept_wrong", int(receiver.routed) + int(awake), scene=scene)
            if awake:
                side.replica.sleep()


def serve(side: Inference) -> None:
    """Run forwards one after the other."""
    side.serving.start()
    side.forwards.attempt(side.config.deadline_s)


def stop_serving(side: Inference) -> tuple[str, Exception | None]:
    """The logits of one more forward, and the error that any forward raised."""
    return side.forwards.attempt(side.config.deadline_s), raised(side.serving.stop)


# -- both ends -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def nothing_left(side: Trainer | Inference, scene: str) -> Iterator[None]:
    """Count process groups, shared memory and temporary files that a failed sync leaves behind."""
    groups, held, files = len(c10d._world.pg_map), side.held(), set(temp_files())
    yield
    record(side, "left_groups", max(0, len(c10d._world.pg_map) - groups), scene=scene)
    record(side, "left_segments", len(side.held() - held), scene=scene)
    record(side, "left_files", len(set(temp_files()) - files), scene=scene)


def record(side: Trainer | Inference, metric: str, number: int, scene: str) -> None:
    side.ctx.record(metric, number, scene=scene)
    if number:
        print(f"rehearse: {metric} is {number} in scene {scene}")


# -- code that fails on purpose --------------------------------------------------------------------------------------------


class RehearsedError(KitError):
    """An error that is raised on purpose."""


@contextlib.contextmanager
def failing(side: Inference, scene: str) -> Iterator[None]:
    """Make the receiver fail in the next sync, as the scene says."""
    receiver = side.receiver
    plain: Any = receiver.calls

    class Failing(plain):  # type: ignore[misc]
        def look(self, index: int, buffer: torch.Tensor) -> None:
            super().look(index, corrupted(self.layout, index, buffer) if scene == "wrong-bytes" else buffer)

        def finalize(self, said: dict[str, Any]) -> None:
            if scene == "late":
                raise RehearsedError("rehearsed failure after all weights are new")
            super().finalize(said)

        def publish(self, said: dict[str, Any]) -> None:
            if scene == "publish":
                receiver.version = said["version"]
                raise RehearsedError("rehearsed failure after others have published")
            super().publish(said)

        def activate(self, said: dict[str, Any]) -> None:
            if scene == TOO_LATE:
                raise RehearsedError("rehearsed failure after the version became active")
            super().activate(said)

    with contextlib.ExitStack() as scope:
        scope.enter_context(mock.patch.object(receiver, "calls", Failing))
        scope.enter_context(mock.patch.object(side, "cut", functools.partial(cut_for, scene, max(side.truth))))
        if scene in {"transport", "both"}:
            scope.enter_context(failing_transport(receiver, scene))
        yield


def cut_for(scene: str, name: str, weights: Cut) -> Cut:
    """Other weights for the receiver: without one tensor; with one that the trainer does not have; or with one of another dtype and one of
    another shape, which a plain copy would silently convert and broadcast."""
    places = dict(weights.destinations)
    if scene == "missing":
        del places[name]
    elif scene == "unsent":
        places[EXTRA] = places[name]
    elif scene == "unfit":
        first = min(places)
        places[name] = [(into.to(torch.float64), take) for into, take in places[name]]
        places[first] = [(into.new_empty(2, *into.shape), take) for into, take in places[first]]
    return Cut(places, weights.own())


def corrupted(layout: Any, index: int, buffer: torch.Tensor) -> torch.Tensor:
    """Change every piece of a bucket: swap two words, or flip one bit of the first or last byte."""
    buffer = buffer.clone()
    for number, _, size, offset in layout.buckets[index]:
        piece = buffer[offset : offset + size]
        words = piece[: size // 8 * 8].view(-1, 8)
        if number % 3 == 0 and len(words) > 1 and not torch.equal(words[0], words[-1]):
            words[[0, -1]] = words[[-1, 0]]
        else:
            piece[-1 if number % 3 == 1 else 0] ^= 1
    return buffer


class Fails:
    """A transport that raises its own error: a receiver's at the last bucket, the sender's in flush; with ALONE at the second bucket.
    It hides what the links report. With PACKED it flips a bit of the first bucket after packing."""

    def __init__(self, transport: Any, last: int, scene: str) -> None:
        self._transport = transport
        self._last = last
        self._scene = scene
        self._changed: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, index: int, buffer: torch.Tensor) -> None:
        if self._scene == ALONE and index == min(1, self._last):
            raise OSError("rehearsed error of a transport")
        if self._scene == PACKED and index == 0:
            buffer[0] ^= 1
            self._changed = buffer
        self._transport.send(index, buffer)

    def close(self) -> None:
        if self._changed is not None:
            self._changed[0] ^= 1  # the packed bytes may be the only copy of the active version
            self._changed = None
        self._transport.close()

    def flush(self) -> None:
        if self._scene == PACKED:
            self._transport.flush()
            return
        with contextlib.suppress(KitError):
            self._transport.flush()
        raise OSError("rehearsed error of the sender's transport")

    def receive(self, index: int, into: torch.Tensor) -> torch.Tensor:
        got: torch.Tensor = self._transport.receive(index, into)
        if index == self._last:
            raise OSError("rehearsed error of the receiver's transport")
        return got


@contextlib.contextmanager
def failing_transport(end: Any, scene: str) -> Iterator[None]:
    """Make the transport of this end (sender or receiver) fail in the next sync."""
    plain = end.make

    def make(kind: Any, ctx: Any, **named: Any) -> Any:
        return Fails(plain(kind, ctx, **named), len(ctx.sizes) - 1, scene)

    with mock.patch.object(end, "make", make):
        yield
