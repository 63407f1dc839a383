"""The phases of the sync lab on a rank: `sides.py` with the comparison of transports and the rehearsed failures.

The comparison of transports sends the same bytes to one receiver with every transport and bucket size, and copies them once as the ceiling.
Each turn is a whole sync with a receiver that pauses, from packing to applied weights, without verification. The result is the median of
the turns.

In a rehearsed failure no replica may have the new version, weights must be unchanged, the error must name the cause, and the next sync must
work. Broken promises are counted; 0 is correct. The last of the receivers fails on purpose, each time in another way, and so does the
sender's end of a transport; the others do their part. Forwards run throughout on serving replicas and must all use the old version.
Expansions fail while replicas wake; afterwards the replicas must sleep again, and the next expansion must bring the active version.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch.distributed import distributed_c10d as c10d

from kit.errors import BadInput, KitError
from kit.labs.rankside import Context
from kit.labs.sync.lab import ONE_WORLD, SyncConfig
from kit.labs.sync.ranks import sides
from kit.labs.sync.ranks.sides import Side, raised
from kit.labs.sync.ranks.watch import WAITS, judge, sha256
from kit.measure.phase import temp_files
from kit.sync.buckets import Bound, Cut, Key, Spec, Whole, automatic, lay_out
from kit.sync.cache import BASE, Cache, Kept
from kit.sync.sender import Sender, SyncFailed, Target

MIB = 2**20
TENSOR = 256 * 1024 - 64  # bytes; no multiple of 512, so neighbours in memory are not neighbours in a bucket
SIZES = (MIB // 4, MIB, 4 * MIB, 16 * MIB)
TURNS = 3

# The ways in which a sync fails. A receiver lacks a tensor (missing), waits for one that is not sent (unsent), or has another dtype or
# shape (unfit); gets bytes that changed after sending (wrong-bytes) or after packing; its transport raises; so does the sender's (both);
# only the sender's raises (alone); the receiver fails when all weights are new (late), or after others have published, or after the
# version became active.
EXTRA = "rehearsed.weight"
ALONE = "alone"
PACKED = "packed"
TOO_LATE = "activate"
BY_THE_SENDER = ("both", ALONE, PACKED)
# The step of a receiver that raises, and when that is.
FAILING = {
    "late": ("finalize", "after all weights are new"),
    "publish": ("publish", "after others have published"),
    TOO_LATE: ("activate", "after the version became active"),
}


def side(ctx: Context) -> Side:
    return Trainer(ctx) if ctx.rank < ctx.config.trainer_ranks else Inference(ctx)


def scenes(config: SyncConfig, *, expansion: bool = False) -> tuple[str, ...]:
    wrong_bytes = ("wrong-bytes", PACKED) if config.verify != "none" and config.verify_share == 1 else ()
    if expansion:
        return ("missing", *wrong_bytes, "late", "publish")
    return ("missing", "unsent", "unfit", *wrong_bytes, "transport", "both", ALONE, "late", "publish")


class Trainer(sides.Trainer):
    def sweep(self, cycle: int) -> None:  # noqa: ARG002 - phases are called with their cycle
        if not self.sends:
            return
        config, tensors = self.config, contents(self.config)
        whole = torch.full((len(tensors) * TENSOR,), 7, dtype=torch.uint8)
        into = torch.zeros_like(whole)
        target = replace(self.targets()[-1], state="paused")
        plain: list[float] = []
        for _ in range(TURNS):
            started = time.perf_counter()
            into.copy_(whole)
            plain.append(whole.numel() / (time.perf_counter() - started))
        total = whole.numel()
        self.ctx.record("sweep_bytes", total, "B")
        self.record_rates(plain, transport="memcpy")
        del whole, into
        for name, size in ways(config):
            layout = lay_out(specs(config), size)
            cache, bound = Cache(layout), Bound(layout, tensors)
            sender = Sender(
                cache,
                self.listener,
                place=self.where,
                rank=0,
                device=self.ctx.device,
                transport=name,
                verify="none",
                timeout_s=config.deadline_s,
            )
            rates = []
            for turn in range(TURNS + 1):
                events = dict(sender.sync(turn, [target], lambda: bound).log.events)  # noqa: B023 - called at once
                rates.append(total / (events["apply"] - events["ready"]))
            cache.close()
            self.record_rates(rates, transport=name, bucket_size=size)

    def record_rates(self, rates: list[float], **ids: Any) -> None:
        """Record the median, minimum, maximum and number of rates after the first, which allocates pages."""
        rates = rates[1:]
        for word, value in (("rate", statistics.median(rates)), ("rate_low", min(rates)), ("rate_high", max(rates))):
            self.ctx.record(word, value, "B/s", **ids)
        self.ctx.record("rate_samples", len(rates), **ids)

    def rehearse(self, cycle: int) -> None:  # noqa: ARG002 - as above
        awake, asleep = self.targets(sleeping=False), self.targets(sleeping=True)
        self.step()
        if self.sends:
            note(self, "accepted", accepted(self), "calls that must be refused")
        for scene in scenes(self.config):
            self.fail(scene, awake, ahead=1)
        if self.config.shares:
            self.job.mover.release()
            for scene in scenes(self.config, expansion=True):
                self.fail(scene, asleep, ahead=0)
            self.succeed("expansion", asleep, ahead=0)
            self.job.mover.restore()
        self.succeed("refresh", awake, ahead=1)
        self.update_truth()
        self.send_truth(awake)
        self.step()
        self.fail(TOO_LATE, awake, ahead=1)
        self.step()
        self.succeed(TOO_LATE, awake, ahead=1)
        self.update_truth()
        self.send_truth(awake)
        self.count()

    def step(self) -> None:
        with self.as_job():
            self.job.step()

    def succeed(self, scene: str, targets: Sequence[Target], *, ahead: int) -> None:
        """The sync after failed ones. An expansion is not ahead of the active version and gathers nothing."""
        version = self.sender.version + ahead if self.sends else BASE
        report = self.deliver(version, targets, asleep=not ahead)
        if report is not None:
            wrong = self.sender.version != version or report.answered != len(targets)
            note(self, "next_failed", int(wrong), scene)

    def fail(self, scene: str, targets: Sequence[Target], *, ahead: int) -> None:
        """One failing sync. With TOO_LATE the version is active by then, and only the replica that fails goes back."""
        if not self.sends:
            if ahead:
                self.gather()
            return
        sender, version = self.sender, self.sender.version + ahead
        active = version if scene == TOO_LATE else sender.version
        breaks = failing_transport(sender, scene) if scene in BY_THE_SENDER else contextlib.nullcontext()
        with nothing_left(self, scene), breaks:
            error = raised(lambda: sender.sync(version, targets, self.gather if ahead else None))
        remains = "is already active" if scene == TOO_LATE else "stays"
        named = isinstance(error, SyncFailed) and f"version {active} {remains}" in str(error)
        if isinstance(error, SyncFailed) and scene == ALONE:
            named = named and error.peer is None and "the sender" in str(error)
        elif isinstance(error, SyncFailed):
            peers = [target.name for target in targets]
            named = named and error.peer in (peers if scene == PACKED else peers[-1:]) and error.peer in str(error)
            named = named and sorted(error.tensors) == blamed(self, scene)
        if not named:
            print(f"rehearse: the error in scene {scene} does not name the cause: {error}")
        note(self, "unnamed", int(not named), scene)
        note(self, "kept_version", int(sender.version != active), scene)


def blamed(side: Trainer, scene: str) -> list[str]:
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


class Inference(sides.Inference):
    def sweep(self, cycle: int) -> None:  # noqa: ARG002 - as above
        if not self.sweeps:
            return
        wanted = contents(self.config)
        tensors = {key: tensor.clone() for key, tensor in wanted.items()}  # not side by side, unlike the sender's
        whole = Whole(tensors)
        receiver = self.new_receiver(lambda: whole)
        for name, size in ways(self.config):
            for tensor in tensors.values():
                tensor.zero_()
            with contextlib.closing(Kept()) as receiver.kept:
                for _ in range(TURNS + 1):
                    receiver.join()
            missing = sum(not torch.equal(tensor, wanted[key]) for key, tensor in tensors.items())
            self.ctx.record("sweep_missing", missing, transport=name, bucket_bytes=size)

    def rehearse(self, cycle: int) -> None:  # noqa: ARG002 - as above
        version = self.receiver.version
        for scene in scenes(self.config, expansion=self.sleeper):
            self.endure(scene)
        if self.sleeper:
            self.take_next("expansion", version)
            self.compare_weights(scene="expansion")
            self.leave()
        else:
            self.take_next("refresh", version + 1)
            self.compare()
            self.go_back()
            self.take_next(TOO_LATE, version + 3)
            self.compare()
        self.count()

    def take_next(self, scene: str, wanted: int) -> None:
        self.take()
        note(self, "next_failed", int(self.receiver.version != wanted or not self.receiver.routed), scene)

    def endure(self, scene: str) -> None:
        """One failing sync on a replica, which must be unchanged afterwards."""
        receiver, version = self.receiver, self.receiver.version
        serves = self.config.refresh == "staged" and not self.sleeper
        self.watch.reset("rehearsed")
        with nothing_left(self, scene):
            if serves:
                self.serve()
            self.join_failing(scene)
            note(self, "kept_version", int(receiver.version != version), scene)
            if serves:
                served, failed = self.stop_serving()
                made, known = self.forwards.made.values(), self.watch.known
                count = sum(
                    (each.logits != known.get(version)) + (each.versions != (version, version)) for each in made
                )
                # Old weights are restored behind the gate: no forward may run at `derive`.
                early = sum(point.name == "derive" and point.logits != WAITS for point in self.watch.points)
                stopped = failed is not None or served not in known.values()
                note(self, "served_wrong", count + early + self.forwards.overlaps + stopped, scene)
                note(self, "kept_wrong", int(not receiver.routed) + self.compare_weights(scene=scene), scene)
            else:
                # The weights of a replica that paused or woke are undefined now: it must have no route, and sleep again if it woke.
                awake = self.sleeper and not self.replica.asleep
                note(self, "kept_wrong", int(receiver.routed) + int(awake), scene)
                if awake:
                    self.replica.sleep()

    def join_failing(self, scene: str) -> None:
        with failing(self, scene) if self.last else contextlib.nullcontext():
            note(self, "silent", int(raised(self.receiver.join) is None), scene)

    def go_back(self) -> None:
        """The last rank fails after the version became active: all ranks of its replica go back, all others keep the version."""
        receiver, version, staged = self.receiver, self.receiver.version, self.config.refresh == "staged"
        goes_back, known = self.of_last_replica, self.watch.known
        self.watch.reset("rehearsed")
        with nothing_left(self, TOO_LATE):
            if staged:
                self.serve()
            self.join_failing(TOO_LATE)
        served, failed = self.stop_serving() if staged else ("", None)
        wanted = (version, staged) if goes_back else (version + 1, True)
        note(self, "kept_version", int((receiver.version, receiver.routed) != wanted), TOO_LATE)
        changed = self.hashes(sha256) != self.own
        note(self, "kept_wrong", int(changed == goes_back and (staged or not goes_back)), TOO_LATE)
        if staged or not goes_back:
            rest = known.setdefault(receiver.version, sha256(self.forwards.at_rest()))
            if staged:
                found = judge(self.forwards, known, version, receiver.version)
                wrong = found.torn + found.mislabelled + int(failed is not None or served != rest)
                note(self, "served_wrong", wrong, TOO_LATE)


# -- both ends -------------------------------------------------------------------------------------------------------------


def ways(config: SyncConfig) -> list[tuple[str, int]]:
    """The transports and bucket sizes to compare; `per-tensor` has no bucket size."""
    names = (
        ["shm", "serialize", "rendezvous"]
        if config.worlds == "two"
        else ["shm", "broadcast", "serialize", "per-tensor"]
    )
    if config.ranks < 3:
        names = [name for name in names if name not in ONE_WORLD]
    return [(name, size) for name in names for size in (SIZES if name != "per-tensor" else (automatic(specs(config)),))]


def specs(config: SyncConfig) -> list[Spec]:
    count = max(1, config.sweep_mib * MIB // TENSOR)
    return [Spec(f"tensor {number}", 0, torch.uint8, (TENSOR,)) for number in range(count)]


def contents(config: SyncConfig) -> dict[Key, torch.Tensor]:
    """Tensors side by side in one piece of memory. Bytes differ by tensor and by place, so that misplaced or stale bytes are detected."""
    places, wanted = torch.arange(TENSOR), specs(config)
    rows = torch.empty(len(wanted), TENSOR, dtype=torch.uint8)
    for number, row in enumerate(rows):
        row.copy_((places + 1) * (2 * number + 3) % 251 + 1)
    return {spec.key: row for spec, row in zip(wanted, rows, strict=True)}


@contextlib.contextmanager
def nothing_left(side: Side, scene: str) -> Iterator[None]:
    """Count process groups, shared memory and temporary files that a failed sync leaves behind."""
    groups, held, files = len(c10d._world.pg_map), side.held(), set(temp_files())
    yield
    note(side, "left_groups", max(0, len(c10d._world.pg_map) - groups), scene)
    note(side, "left_segments", len(side.held() - held), scene)
    note(side, "left_files", len(set(temp_files()) - files), scene)


def note(side: Side, metric: str, number: int, scene: str) -> None:
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

    def fail(_: object, message: dict[str, Any]) -> None:
        receiver.version = message["version"] if scene == "publish" else receiver.version
        raise RehearsedError(f"rehearsed failure {FAILING[scene][1]}")

    if scene in FAILING:
        setattr(Failing, FAILING[scene][0], fail)
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
        with contextlib.nullcontext() if self._scene == PACKED else contextlib.suppress(KitError):
            self._transport.flush()
        if self._scene != PACKED:
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
