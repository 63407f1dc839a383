"""The failures that the sync lab rehearses, on both ends.

In a rehearsed failure no replica may have the new version, weights must be unchanged, the error must name the cause, and the next sync must
work. Broken promises are counted; 0 is correct. The last of the receivers fails on purpose, each time in another way, and so does the
sender's end of a transport; the others do their part. Forwards run throughout on serving replicas and must all use the old version.
Expansions fail while replicas wake; afterwards the replicas must sleep again, and the next expansion must bring the active version.

What fails is a patch by name, as a fault is: `AT_THE_RECEIVER` and `AT_THE_SENDER`, by scene.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from kit.errors import BadInput, KitError
from kit.labs.sync.lab import SyncConfig
from kit.labs.sync.ranks.replica import SyncReplica
from kit.labs.sync.ranks.side import Side, raised
from kit.labs.sync.ranks.trainer import SyncTrainer
from kit.labs.sync.ranks.watch import WAITS, SeenTransport, judge, sha256
from kit.measure.phase import temp_files
from kit.sync.buckets import Destination
from kit.sync.cache import BASE
from kit.sync.link import ready
from kit.sync.receiver import Call
from kit.sync.sender import SyncFailed, Target
from kit.target import replaced

# The ways in which a sync fails. A receiver lacks a tensor (missing), waits for one that is not sent (unsent), or has another dtype or
# shape (unfit); gets bytes that changed after sending (wrong-bytes) or after packing; its transport raises; so does the sender's (both);
# only the sender's raises (alone); the receiver fails when all weights are new (late), or after others have published, or after the
# version became active.
EXTRA = "rehearsed.weight"
ALONE = "alone"
PACKED = "packed"
TOO_LATE = "activate"

CALL, TRANSPORT = "kit.sync.receiver:Call", "kit.labs.sync.ranks.watch:SeenTransport"
DESTINATIONS = "kit.labs.sync.ranks.replica:SyncReplica.destinations"
AT_THE_RECEIVER = {
    "missing": {DESTINATIONS: f"{__name__}:without_a_tensor"},
    "unsent": {DESTINATIONS: f"{__name__}:with_a_tensor_that_is_not_sent"},
    "unfit": {DESTINATIONS: f"{__name__}:with_another_dtype_and_another_shape"},
    "wrong-bytes": {f"{CALL}.look": f"{__name__}:looks_at_other_bytes"},
    "transport": {f"{TRANSPORT}.receive": f"{__name__}:raises_at_the_last_bucket"},
    "both": {f"{TRANSPORT}.receive": f"{__name__}:raises_at_the_last_bucket"},
    "late": {f"{CALL}.finalize": f"{__name__}:raises_when_all_weights_are_new"},
    "publish": {f"{CALL}.publish": f"{__name__}:raises_after_others_have_published"},
    TOO_LATE: {f"{CALL}.activate": f"{__name__}:raises_after_the_version_became_active"},
}
AT_THE_SENDER = {
    "both": {f"{TRANSPORT}.flush": f"{__name__}:raises_in_flush"},
    ALONE: {f"{TRANSPORT}.send": f"{__name__}:raises_at_the_second_bucket"},
    PACKED: {
        f"{TRANSPORT}.send": f"{__name__}:flips_a_packed_bit",
        f"{TRANSPORT}.close": f"{__name__}:flips_the_bit_back",
    },
}
look, destinations = Call.look, SyncReplica.destinations
send, receive, flush, close = SeenTransport.send, SeenTransport.receive, SeenTransport.flush, SeenTransport.close


def scenes(config: SyncConfig, *, expansion: bool = False) -> tuple[str, ...]:
    wrong_bytes = ("wrong-bytes", PACKED) if config.verify != "none" and config.verify_share == 1 else ()
    if expansion:
        return ("missing", *wrong_bytes, "late", "publish")
    return ("missing", "unsent", "unfit", *wrong_bytes, "transport", "both", ALONE, "late", "publish")


# -- on the trainer --------------------------------------------------------------------------------------------------------


def of_trainer(trainer: SyncTrainer) -> None:
    awake, asleep = trainer.targets(sleeping=False), trainer.targets(sleeping=True)
    step(trainer)
    if trainer.sends:
        note(trainer, "accepted", accepted(trainer), "calls that must be refused")
    for scene in scenes(trainer.config):
        fail(trainer, scene, awake, ahead=1)
    if trainer.config.shares:
        trainer.job.mover.release()
        for scene in scenes(trainer.config, expansion=True):
            fail(trainer, scene, asleep, ahead=0)
        succeed(trainer, "expansion", asleep, ahead=0)
        trainer.job.mover.restore()
    succeed(trainer, "refresh", awake, ahead=1)
    trainer.update_truth()
    trainer.send_truth(awake)
    step(trainer)
    fail(trainer, TOO_LATE, awake, ahead=1)
    step(trainer)
    succeed(trainer, TOO_LATE, awake, ahead=1)
    trainer.update_truth()
    trainer.send_truth(awake)


def step(trainer: SyncTrainer) -> None:
    with trainer.as_job():
        trainer.job.step()


def succeed(trainer: SyncTrainer, scene: str, targets: Sequence[Target], *, ahead: int) -> None:
    """The sync after failed ones. An expansion is not ahead of the active version and gathers nothing."""
    version = trainer.sender.version + ahead if trainer.sends else BASE
    report = trainer.deliver(version, targets, asleep=not ahead)
    if report is not None:
        wrong = trainer.sender.version != version or report.answered != len(targets)
        note(trainer, "next_failed", int(wrong), scene)


def fail(trainer: SyncTrainer, scene: str, targets: Sequence[Target], *, ahead: int) -> None:
    """One failing sync. With TOO_LATE the version is active by then, and only the replica that fails goes back."""
    if not trainer.sends:
        if ahead:
            trainer.gather()
        return
    sender, version = trainer.sender, trainer.sender.version + ahead
    active = version if scene == TOO_LATE else sender.version
    with nothing_left(trainer, scene), replaced(AT_THE_SENDER.get(scene, {})):
        error = raised(lambda: sender.sync(version, targets, trainer.gather if ahead else None))
    remains = "is already active" if scene == TOO_LATE else "stays"
    named = isinstance(error, SyncFailed) and f"version {active} {remains}" in str(error)
    if isinstance(error, SyncFailed) and scene == ALONE:
        named = named and error.peer is None and "the sender" in str(error)
    elif isinstance(error, SyncFailed):
        peers = [target.name for target in targets]
        named = named and error.peer in (peers if scene == PACKED else peers[-1:]) and error.peer in str(error)
        named = named and sorted(error.tensors) == blamed(trainer, scene)
    if not named:
        print(f"rehearse: the error in scene {scene} does not name the cause: {error}")
    note(trainer, "unnamed", int(not named), scene)
    note(trainer, "kept_version", int(sender.version != active), scene)


def blamed(trainer: SyncTrainer, scene: str) -> list[str]:
    names, layout = sorted(trainer.digests), trainer.cache.layout
    first = layout.specs[layout.buckets[0][0].spec].name
    of_receivers = {"missing": names[-1:], "unfit": [names[0], names[-1]], "unsent": [EXTRA], "wrong-bytes": names}
    return {**of_receivers, PACKED: [first]}.get(scene, [])


def accepted(trainer: SyncTrainer) -> int:
    """Invalid calls, which must be refused before any receiver is contacted; returns how many were accepted."""
    sender, targets, asleep = trainer.sender, trainer.targets(sleeping=False), trainer.targets(sleeping=True)
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
    return sum(not isinstance(raised(invalid), BadInput) for invalid in wrong)


# -- on a replica ----------------------------------------------------------------------------------------------------------


def of_replica(replica: SyncReplica) -> None:
    version = replica.receiver.version
    for scene in scenes(replica.config, expansion=replica.sleeper):
        endure(replica, scene)
    if replica.sleeper:
        take_next(replica, "expansion", version)
        replica.compare_weights(scene="expansion")
        replica.leave()
    else:
        take_next(replica, "refresh", version + 1)
        replica.compare()
        go_back(replica)
        take_next(replica, TOO_LATE, version + 3)
        replica.compare()


def take_next(replica: SyncReplica, scene: str, wanted: int) -> None:
    replica.take()
    note(replica, "next_failed", int(replica.receiver.version != wanted or not replica.receiver.routed), scene)


def endure(replica: SyncReplica, scene: str) -> None:
    """One failing sync on a replica, which must be unchanged afterwards."""
    receiver, version = replica.receiver, replica.receiver.version
    serves = replica.config.refresh == "staged" and not replica.sleeper
    replica.watch.reset("rehearsed")
    with nothing_left(replica, scene):
        if serves:
            replica.serve()
        join_failing(replica, scene)
        note(replica, "kept_version", int(receiver.version != version), scene)
        if serves:
            served, failed = replica.stop_serving()
            known = replica.watch.known
            count = sum(
                (forward.logits != known.get(version)) + (forward.versions != (version, version))
                for forward in replica.forwards.made.values()
            )
            # Old weights are restored behind the gate: no forward may run at `derive`.
            early = sum(point.name == "derive" and point.logits != WAITS for point in replica.watch.points)
            stopped = failed is not None or served not in known.values()
            note(replica, "served_wrong", count + early + replica.forwards.overlaps + stopped, scene)
            note(replica, "kept_wrong", int(not receiver.routed) + replica.compare_weights(scene=scene), scene)
        else:
            # The weights of a replica that paused or woke are undefined now: it must have no route, and sleep again if it woke.
            awake = replica.sleeper and not replica.replica.asleep
            note(replica, "kept_wrong", int(receiver.routed) + int(awake), scene)
            if awake:
                replica.replica.sleep()


def join_failing(replica: SyncReplica, scene: str) -> None:
    with replaced(AT_THE_RECEIVER.get(scene, {}) if replica.fails else {}):
        note(replica, "silent", int(raised(replica.receiver.join) is None), scene)


def go_back(replica: SyncReplica) -> None:
    """The last rank fails after the version became active: all ranks of its replica go back, all others keep the version."""
    receiver, version, staged = replica.receiver, replica.receiver.version, replica.config.refresh == "staged"
    goes_back, known = replica.of_last_replica, replica.watch.known
    replica.watch.reset("rehearsed")
    with nothing_left(replica, TOO_LATE):
        if staged:
            replica.serve()
        join_failing(replica, TOO_LATE)
    served, failed = replica.stop_serving() if staged else ("", None)
    wanted = (version, staged) if goes_back else (version + 1, True)
    note(replica, "kept_version", int((receiver.version, receiver.routed) != wanted), TOO_LATE)
    changed = replica.hashes(sha256) != replica.own
    note(replica, "kept_wrong", int(changed == goes_back and (staged or not goes_back)), TOO_LATE)
    if staged or not goes_back:
        rest = known.setdefault(receiver.version, sha256(replica.forwards.at_rest()))
        if staged:
            judged = judge(replica.forwards, known, version, receiver.version)
            wrong = judged.torn + judged.mislabelled + int(failed is not None or served != rest)
            note(replica, "served_wrong", wrong, TOO_LATE)


# -- on both ----------------------------------------------------------------------------------------------------------------


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


Destinations = Mapping[str, Sequence[Destination]]


def without_a_tensor(replica: SyncReplica) -> Destinations:
    places = dict(destinations(replica))
    del places[max(replica.truth)]
    return places


def with_a_tensor_that_is_not_sent(replica: SyncReplica) -> Destinations:
    places = destinations(replica)
    return {**places, EXTRA: places[max(replica.truth)]}


def with_another_dtype_and_another_shape(replica: SyncReplica) -> Destinations:
    """Of one tensor each; a plain copy would silently convert the first and broadcast the second."""
    places = dict(destinations(replica))
    first, last = min(places), max(replica.truth)
    places[last] = [(into.to(torch.float64), take) for into, take in places[last]]
    places[first] = [(into.new_empty(2, *into.shape), take) for into, take in places[first]]
    return places


def looks_at_other_bytes(call: Call, index: int, buffer: torch.Tensor) -> None:
    """Every piece of the bucket is changed: two words are swapped, or one bit of the first or last byte is flipped."""
    buffer = buffer.clone()
    for number, _, size, offset in call.layout.buckets[index]:
        piece = buffer[offset : offset + size]
        words = piece[: size // 8 * 8].view(-1, 8)
        if number % 3 == 0 and len(words) > 1 and not torch.equal(words[0], words[-1]):
            words[[0, -1]] = words[[-1, 0]]
        else:
            piece[-1 if number % 3 == 1 else 0] ^= 1
    look(call, index, buffer)


def raises_when_all_weights_are_new(call: Call, message: dict[str, Any]) -> None:  # noqa: ARG001 - a step of the receiver
    raise RehearsedError("rehearsed failure after all weights are new")


def raises_after_others_have_published(call: Call, message: dict[str, Any]) -> None:
    call.receiver.version = message["version"]
    raise RehearsedError("rehearsed failure after others have published")


def raises_after_the_version_became_active(call: Call, message: dict[str, Any]) -> None:  # noqa: ARG001 - as above
    raise RehearsedError("rehearsed failure after the version became active")


def raises_at_the_last_bucket(transport: SeenTransport, index: int, into: torch.Tensor) -> torch.Tensor:
    got = receive(transport, index, into)
    if index == transport.buckets - 1:
        raise OSError("rehearsed error of the receiver's transport")
    return got


def raises_at_the_second_bucket(transport: SeenTransport, index: int, buffer: torch.Tensor) -> None:
    if index == min(1, transport.buckets - 1):
        raise OSError("rehearsed error of a transport")
    send(transport, index, buffer)


def raises_in_flush(transport: SeenTransport) -> None:
    """The transport's own error, once the receiver has failed. A transport may have read the receiver's reason; one that does not listen
    has left it on the link."""
    reason: Exception | None = None
    try:
        flush(transport)
    except Exception as error:  # noqa: BLE001 - a transport may raise anything
        reason = error
    links = [*transport.links.values()]
    for link in ready(links, links[0].timeout_s) if reason is None else ():
        reason = reason or link.last_words("the receiver's failure", patience_s=link.timeout_s)
    raise OSError("rehearsed error of the sender's transport") from reason


def flips_a_packed_bit(transport: SeenTransport, index: int, buffer: torch.Tensor) -> None:
    if index == 0:
        buffer[0] ^= 1
        vars(transport)["flipped"] = buffer
    send(transport, index, buffer)


def flips_the_bit_back(transport: SeenTransport) -> None:
    """The packed bytes may be the only copy of the active version."""
    if "flipped" in vars(transport):
        vars(transport).pop("flipped")[0] ^= 1
    close(transport)
