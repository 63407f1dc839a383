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

from torch.distributed import distributed_c10d as c10d

from kit.errors import BadInput
from kit.labs.sync.ranks.failing import ALONE, EXTRA, PACKED, TOO_LATE, failing, failing_transport
from kit.labs.sync.ranks.side import failed, raised
from kit.labs.sync.ranks.watch import WAITS, judge, sha256
from kit.measure.observers.holdings import temp_files
from kit.sync.cache import BASE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kit.labs.sync.ranks.inference import Inference
    from kit.labs.sync.ranks.trainer import Trainer
    from kit.sync.sender import Target

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
    train(side)
    if not side.sends:
        for _ in scenes(side.config):
            side.gather()
        if side.config.shares:
            side.job.mover.release()
            side.job.mover.restore()
        side.gather()
        side.update_truth()
        train(side)
        side.gather()
        train(side)
        side.gather()
        side.update_truth()
        return
    sender, awake = side.sender, side.targets(sleeping=False)
    record(side, "accepted", accepted(side), "calls that must be refused")
    for scene in scenes(side.config):
        fail(side, scene, awake, sender.version + 1, side.gather)
    if side.config.shares:
        asleep = side.targets(sleeping=True)
        side.job.mover.release()
        for scene in expansions(side.config):
            fail(side, scene, asleep, sender.version, None)
        report = side.deliver(sender.version, asleep, asleep=True)
        record(side, "next_failed", int(report.answered != len(asleep)), scene="expansion")
        side.job.mover.restore()
    version = sender.version
    # No tensor is marked dirty: the cache must know by itself that the failed syncs changed all of them.
    report = side.deliver(version + 1, awake, dirty=())
    record(side, "next_failed", int(sender.version != version + 1 or report.answered != len(awake)), scene="refresh")
    side.update_truth()
    side.send_truth(awake)
    train(side)
    fail_late(side, awake)
    train(side)
    report = side.deliver(version + 3, awake)
    record(side, "next_failed", int(sender.version != version + 3 or report.answered != len(awake)), scene=TOO_LATE)
    side.update_truth()
    side.send_truth(awake)


def train(side: Trainer) -> None:
    with side.as_job():
        side.job.step()


def fail_late(side: Trainer, targets: Sequence[Target]) -> None:
    """A receiver fails after the version became active: only its replica goes back."""
    sender, active = side.sender, side.sender.version
    with nothing_left(side, TOO_LATE):
        error = failed(functools.partial(sender.sync, active + 1, targets, side.gather))
    named = error is not None and error.peer == targets[-1].name
    named = named and f"version {active + 1} is already active" in str(error)
    if not named:
        print(f"rehearse: the error in scene {TOO_LATE} does not name the cause: {error}")
    record(side, "unnamed", int(not named), scene=TOO_LATE)
    record(side, "kept_version", int(sender.version != active + 1), scene=TOO_LATE)


def fail(side: Trainer, scene: str, targets: Sequence[Target], version: int, gather: Callable[[], Any] | None) -> None:
    """One failing sync on the sender."""
    sender, active = side.sender, side.sender.version
    with (
        nothing_left(side, scene),
        failing_transport(sender, scene) if scene in BY_THE_SENDER else contextlib.nullcontext(),
    ):
        error = failed(functools.partial(sender.sync, version, targets, gather))
    named = error is not None and f"version {active} stays" in str(error)
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
    wrong = {
        "missing": names[-1:],
        "unfit": [names[0], names[-1]],
        "unsent": [EXTRA],
        "wrong-bytes": names,
        PACKED: [first],
    }
    return wrong.get(scene, [])


def accepted(side: Trainer) -> int:
    """Invalid calls, which must be refused before any receiver is contacted; returns how many were accepted."""
    sender, targets = side.sender, side.targets(sleeping=False)
    asleep = side.targets(sleeping=True)
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
    return sum(not refused(each) for each in wrong)


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
            wrong = [each for each in side.forwards.made.values() if each.logits != side.watch.known.get(version)]
            wrong_label = [each for each in side.forwards.made.values() if each.versions != (version, version)]
            # Old weights are restored behind the gate: no forward may run at `derive`.
            early = [point for point in side.watch.points if point.name == "derive" and point.logits != WAITS]
            count = len(wrong) + len(wrong_label) + len(early) + side.forwards.overlaps
            stopped = failed is not None or served not in side.watch.known.values()
            record(side, "served_wrong", count + int(stopped), scene=scene)
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
    groups, held, files = len(pg_map()), side.held(), set(temp_files())
    yield
    record(side, "left_groups", max(0, len(pg_map()) - groups), scene=scene)
    record(side, "left_segments", len(side.held() - held), scene=scene)
    record(side, "left_files", len(set(temp_files()) - files), scene=scene)


def refused(call: Callable[[], object]) -> bool:
    return isinstance(raised(call), BadInput)


def pg_map() -> dict[Any, Any]:
    found: dict[Any, Any] = c10d._world.pg_map
    return found


def record(side: Trainer | Inference, metric: str, number: int, scene: str) -> None:
    side.ctx.record(metric, number, scene=scene)
    if number:
        print(f"rehearse: {metric} is {number} in scene {scene}")
