"""The failures that the sync lab rehearses, on both ends.

In a rehearsed failure no replica may have the new version, weights must be unchanged, the error must name the cause, and the next sync must
work. Broken promises are counted; 0 is correct. The last of the receivers fails on purpose, each time in another way, and so does the
sender's end of a transport; the others do their part. Forwards run throughout on serving replicas and must all use the old version.
Expansions fail while replicas wake; afterwards the replicas must sleep again, and the next expansion must bring the active version.

What fails is a patch by name, as a fault is: `AT_THE_RECEIVER` and `AT_THE_SENDER`, by scene.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from kit import machine
from kit.engines.contents import listed_names, sha256
from kit.errors import BadInput, RehearsedError
from kit.labs.sync.lab import CLOSED_S, SyncConfig
from kit.labs.sync.ranks.replica import SyncReplica
from kit.labs.sync.ranks.side import ANY, Side, error_of
from kit.labs.sync.ranks.trainer import SyncTrainer
from kit.labs.sync.ranks.watch import WAITS, SeenTransport, judge_forwards
from kit.measure.observers.births import Births, registered_groups
from kit.measure.phase import MEMFD, resource_counts, temp_files
from kit.sync.buckets import Destination, Key
from kit.sync.cache import BASE
from kit.sync.link import ready
from kit.sync.receiver import Call
from kit.sync.sender import SyncFailed, Target
from kit.target import replaced

# The ways in which a sync fails. A receiver lacks a tensor (missing), waits for one that is not sent (unsent), or has another dtype or
# shape (unfit); its transport raises before a bucket in the middle has arrived, the first time that bytes of this version move (middle);
# it gets bytes that changed after sending (wrong-bytes) or after packing; its transport raises at the last bucket; so does the sender's
# (both); only the sender's raises (alone); the receiver fails when all weights are new (late), or after others have published, or after the
# version became active.
EXTRA = "rehearsed.weight"
ALONE = "alone"
# These scenes run twice, to tell what is made once from what every failure leaves behind.
LATE, MIDDLE = "late", "middle"
PACKED, WRONG_BYTES = "packed", "wrong-bytes"
# A smaller share of the tensors may be none of them, so wrong bytes may arrive unseen. A share above 1 - SURE may be the same tensors for
# two versions: of 14 tensors, 1 time in 10,000 at this limit.
SURE = 0.4
TOO_LATE = "activate"
CLOSING = ("left_unlisted", "left_groups", "left_fds", "left_sockets", "left_threads")
REFILL = "refill"  # fails nowhere
LOST = "lost"  # the receivers have lost the weights that were changed, and do not know it
WHY = {  # what code that fails on purpose says; the sender's error must say it too
    MIDDLE: "rehearsed error before a bucket",
    "transport": "rehearsed error of the receiver's transport",
    "both": "rehearsed error of the receiver's transport",
    ALONE: "rehearsed error of the sender's transport",
    LATE: "rehearsed failure after all weights are new",
    "publish": "rehearsed failure after others have published",
    TOO_LATE: "rehearsed failure after the version became active",
}

CALL, TRANSPORT = "kit.sync.receiver:Call", "kit.labs.sync.ranks.watch:SeenTransport"
DESTINATIONS = "kit.labs.sync.ranks.replica:SyncReplica.destinations"
AT_THE_RECEIVER = {
    "missing": {DESTINATIONS: f"{__name__}:without_a_tensor"},
    "unsent": {DESTINATIONS: f"{__name__}:with_a_tensor_that_is_not_sent"},
    "unfit": {DESTINATIONS: f"{__name__}:with_another_dtype_and_another_shape"},
    WRONG_BYTES: {f"{CALL}.look": f"{__name__}:looks_at_other_bytes"},
    MIDDLE: {f"{TRANSPORT}.receive": f"{__name__}:raises_before_a_bucket_in_the_middle"},
    "transport": {f"{TRANSPORT}.receive": f"{__name__}:raises_at_the_last_bucket"},
    "both": {f"{TRANSPORT}.receive": f"{__name__}:raises_at_the_last_bucket"},
    LATE: {f"{CALL}.finalize": f"{__name__}:raises_when_all_weights_are_new"},
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


def rehearsed_scenes(config: SyncConfig, *, expansion: bool = False) -> tuple[str, ...]:
    wrong_bytes = (WRONG_BYTES,) * (config.verify != "none" and config.verify_share >= SURE)
    wrong_bytes += (PACKED,) * (config.verify != "none" and config.verify_share == 1)
    if expansion:
        return ("missing", *wrong_bytes, LATE, "publish")
    return ("missing", "unsent", "unfit", MIDDLE, *wrong_bytes, "transport", "both", ALONE, LATE, "publish", LATE)


# -- on the trainer --------------------------------------------------------------------------------------------------------


def of_trainer(trainer: SyncTrainer) -> None:
    awake, asleep = trainer.targets(sleeping=False), trainer.targets(sleeping=True)
    if trainer.config.arena == "cache":  # before the trainer has other weights than the buckets
        trainer.offload(0)
        fail_expansions(trainer, asleep)
        trainer.reload()
    step(trainer)
    if trainer.sends:
        note(trainer, "accepted", accepted(trainer), "calls that must be refused")
    named = {scene: fail_sync(trainer, scene, awake, ahead=1) for scene in rehearsed_scenes(trainer.config)}
    if trainer.config.shares:
        trainer.job.mover.release()
        fail_expansions(trainer, asleep)
        trainer.job.mover.restore()
    step(trainer)  # so that no memory on the receiver has the bytes of this version already
    fail_sync(trainer, MIDDLE, awake, ahead=1)
    succeed(trainer, "refresh", awake, ahead=1)
    trainer.update_truth()
    trainer.send_truth(awake)
    if compares_others(trainer.config):
        again = fail_sync(trainer, WRONG_BYTES, awake, ahead=1)
        note(trainer, "compared_again", int(trainer.sends and again == named[WRONG_BYTES]), WRONG_BYTES)
    step(trainer)
    fail_sync(trainer, TOO_LATE, awake, ahead=1)
    step(trainer)
    succeed(trainer, TOO_LATE, awake, ahead=1)
    trainer.update_truth()
    trainer.send_truth(awake)
    if trainer.config.delta != "off":
        fail_sync(trainer, LOST, awake, ahead=1)
    succeed(trainer, REFILL, awake, ahead=1)


def fail_expansions(trainer: SyncTrainer, asleep: Sequence[Target]) -> None:
    for scene in rehearsed_scenes(trainer.config, expansion=True):
        fail_sync(trainer, scene, asleep, ahead=0)
    succeed(trainer, "expansion", asleep, ahead=0)
    trainer.everywhere(set())  # no rank takes its device back while replicas wake


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


def fail_sync(trainer: SyncTrainer, scene: str, targets: Sequence[Target], *, ahead: int) -> list[str]:
    """One failing sync; returns the tensors that its error names. With TOO_LATE the version is active by then, and only the replica that
    fails goes back."""
    if not trainer.sends:
        if ahead:
            trainer.gather()
        return []
    sender, version = trainer.sender, trainer.sender.version + ahead
    active = version if scene == TOO_LATE else sender.version
    changes = trainer.config.delta != "off" and trainer.config.refresh == "staged" and ahead
    changed: list[str] = []

    def gather() -> dict[Key, torch.Tensor]:
        tensors = trainer.gather()
        changed.extend(trainer.oracle.names({name: tensor for (name, _), tensor in tensors.items()}) if changes else ())
        return tensors

    with counting_leftovers(trainer, scene), replaced(AT_THE_SENDER.get(scene, {})):
        error = error_of(lambda: sender.sync(version, targets, gather if ahead else None), ANY)
    peers = [target.name for target in targets]
    wrong = "; ".join(misnamed(trainer, scene, error, active, peers, changed=changed))
    note(trainer, "unnamed", int(bool(wrong)), scene, f"{wrong}: {error}" if wrong else "")
    note(trainer, "kept_version", int(sender.version != active), scene)
    return sorted(error.tensors) if isinstance(error, SyncFailed) else []


def compares_some(config: SyncConfig) -> bool:
    """Whether receivers compare some tensors only."""
    return config.verify_share < 1 and WRONG_BYTES in rehearsed_scenes(config)


def compares_others(config: SyncConfig) -> bool:
    """Whether the next version certainly has other tensors compared."""
    return compares_some(config) and config.verify_share <= 1 - SURE


def misnamed(
    trainer: SyncTrainer,
    scene: str,
    error: Exception | None,
    active: int,
    peers: Sequence[str],
    *,
    changed: Sequence[str] = (),
) -> Iterator[str]:
    """What is wrong with the error of a rehearsed failure, in words. If only `changed` tensors may be sent, it may name those or all:
    where too much has changed, everything is sent."""
    if not isinstance(error, SyncFailed):
        yield f"{type(error).__name__} was raised instead of SyncFailed" if error else "no error was raised"
        return
    remains = f"version {active} {'is already active' if scene == TOO_LATE else 'stays'}"
    if remains not in str(error):
        yield f"the error does not say that {remains}"
    if (why := WHY.get(scene, "")) not in str(error):
        yield f"the error does not say why: {why}"
    if scene == ALONE:
        if error.peer is not None or "the sender" not in str(error):
            yield f"the error names {error.peer or 'nobody'} instead of the sender"
        return
    last = peers[-1]
    if error.peer not in (peers if scene in {PACKED, LOST} else [last]):
        yield f"the error names {error.peer or 'no receiver'} instead of {last}"
    elif str(error.peer) not in str(error):
        yield f"the error has the receiver {error.peer} and does not say it"
    everything = [spec.name for spec in trainer.cache.layout.specs]
    named, wanted = sorted(error.tensors), [blamed(trainer, scene, sent) for sent in (changed, everything) if sent]
    some_of_them = scene == WRONG_BYTES and compares_some(trainer.config) and named and {*named} <= {*wanted[-1]}
    if named not in [sorted(names) for names in wanted] and not some_of_them:
        yield f"the error names {counted_tensors(named)} instead of {counted_tensors(wanted[0])}"


def counted_tensors(names: Sequence[str]) -> str:
    return (
        f"{len(names)} tensors ({listed_names(names)})"
        if len(names) > 1
        else f"tensor {names[0]}"
        if names
        else "no tensor"
    )


def blamed(trainer: SyncTrainer, scene: str, sent: Sequence[str]) -> Sequence[str]:
    """The tensors that an error must name; these are sent, in this order."""
    names = sorted(trainer.digests)
    of_receivers = {"missing": names[-1:], "unfit": [names[0], names[-1]], "unsent": [EXTRA], LOST: names}
    return {**of_receivers, WRONG_BYTES: sent, PACKED: sent[:1]}.get(scene, [])


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
    return sum(not isinstance(error_of(invalid), BadInput) for invalid in wrong)


# -- on a replica ----------------------------------------------------------------------------------------------------------


def of_replica(replica: SyncReplica) -> None:
    version = replica.receiver.version
    if replica.sleeper:
        for _ in range(1 + (replica.config.arena == "cache")):
            endure_expansions(replica, version)
    else:
        for scene in rehearsed_scenes(replica.config):
            endure(replica, scene)
        endure(replica, MIDDLE)
        take_next(replica, "refresh", version + 1)
        replica.compare()
        if compares_others(replica.config):
            endure(replica, WRONG_BYTES)
        go_back(replica)
        take_next(replica, TOO_LATE, version + 3)
        replica.compare()
        refill(replica)


def endure_expansions(replica: SyncReplica, version: int) -> None:
    for scene in rehearsed_scenes(replica.config, expansion=True):
        endure(replica, scene)
    take_next(replica, "expansion", version)
    replica.compare_weights(scene="expansion")
    replica.leave()


def take_next(replica: SyncReplica, scene: str, wanted: int) -> None:
    replica.take()
    note(replica, "next_failed", int(replica.receiver.version != wanted or not replica.receiver.routed), scene)


def refill(replica: SyncReplica) -> None:
    """A replica that does not serve loses all its weights; the next sync must write every tensor, even those that training left alone."""
    replica.watch.reset("rehearsed")
    replica.model.poison()
    if replica.config.delta != "off":
        join_failing(replica, LOST)
    replica.receiver.join()
    replica.count_written(REFILL)
    replica.compare_weights(scene=REFILL)


def endure(replica: SyncReplica, scene: str) -> None:
    """One failing sync on a replica, which must be unchanged afterwards."""
    receiver, version = replica.receiver, replica.receiver.version
    serves = replica.config.refresh == "staged" and not replica.sleeper
    replica.watch.reset("rehearsed")
    with counting_leftovers(replica, scene):
        if serves:
            replica.serve()
        join_failing(replica, scene)
        note(replica, "kept_version", int(receiver.version != version), scene)
        if serves:
            served, failed = replica.stop_serving()
            known = replica.watch.known
            # Old weights are restored behind the gate: no forward may run at `derive`.
            early = sum(point.name == "derive" and point.logits != WAITS for point in replica.watch.points)
            stopped = failed is not None or not any(served in logits for logits in known.values())
            wrong_answers = replica.forwards.wrong_answers(replica.serving.served)
            note(replica, "not_derived", not_derived(replica), scene)
            count = on_another_version(replica, version)
            note(replica, "served_wrong", count + early + replica.forwards.overlaps + stopped + wrong_answers, scene)
            note(replica, "kept_wrong", int(not receiver.routed) + replica.compare_weights(scene=scene), scene)
        else:
            # The weights of a replica that paused or woke are undefined now: it must have no route, and sleep again if it woke.
            awake = replica.sleeper and not replica.model.asleep
            note(replica, "kept_wrong", int(receiver.routed) + int(awake), scene)
            if awake:
                replica.sleep()


def on_another_version(replica: SyncReplica, version: int) -> int:
    """Forwards of this sync with other logits or another label than the version's."""
    known = replica.watch.known.get(version, frozenset())
    return sum(
        (forward.logits not in known) + (forward.versions != (version, version))
        for forward in replica.forwards.made.values()
    )


def not_derived(replica: SyncReplica) -> int:
    """Whether new weights were taken back and nothing was derived from the old ones."""
    names = [point.name for point in replica.watch.points]
    if "undo" not in names:
        return 0
    at = names.index("undo")
    return int("write" in names[:at] and "derive" not in names[at:])


def join_failing(replica: SyncReplica, scene: str) -> None:
    with replaced(AT_THE_RECEIVER.get(scene, {}) if replica.fails else {}):
        note(replica, "silent", int(error_of(replica.receiver.join, ANY) is None), scene)


def go_back(replica: SyncReplica) -> None:
    """The last rank fails after the version became active: all ranks of its replica go back, all others keep the version."""
    receiver, version, staged = replica.receiver, replica.receiver.version, replica.config.refresh == "staged"
    goes_back, known = replica.of_last_replica, replica.watch.known
    replica.watch.reset("rehearsed")
    with counting_leftovers(replica, TOO_LATE):
        if staged:
            replica.serve()
        join_failing(replica, TOO_LATE)
        served, failed = replica.stop_serving() if staged else ("", None)
    if staged and goes_back:  # a replica that paused keeps no old weights
        note(replica, "not_derived", not_derived(replica), TOO_LATE)
    wanted = (version, staged) if goes_back else (version + 1, True)
    note(replica, "kept_version", int((receiver.version, receiver.routed) != wanted), TOO_LATE)
    changed = replica.hashes(sha256) != replica.own
    note(replica, "kept_wrong", int(changed == goes_back and (staged or not goes_back)), TOO_LATE)
    if staged or not goes_back:
        rest = known.setdefault(receiver.version, replica.forwards.known_at_rest())
        if staged:
            judged = judge_forwards(replica.forwards, known, version, receiver.version)
            wrong = judged.torn + judged.mislabelled + int(failed is not None or served not in rest)
            wrong += replica.forwards.wrong_answers(replica.serving.served)
            note(replica, "served_wrong", wrong, TOO_LATE)


# -- on both ----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def counting_leftovers(side: Side, scene: str) -> Iterator[None]:
    """Count what a failed sync leaves behind: groups, shared memory, temporary files, descriptors, sockets and threads."""
    groups, held, files = len(c10d._world.pg_map), side.held(), set(temp_files())
    counts = open_now(side)
    with Births() as births:
        yield
        note(side, "left_segments", len(side.held() - held), scene)
        note(side, "left_files", len(set(temp_files()) - files), scene)
        end = time.monotonic() + CLOSED_S
        while True:
            opened = [max(0, after - before) for before, after in zip(counts, open_now(side), strict=True)]
            remaining = [unlisted(births), max(0, len(c10d._world.pg_map) - groups), *opened]
            if not any(remaining) or time.monotonic() > end:
                break
            time.sleep(0.01)
    for metric, number in zip(CLOSING, remaining, strict=True):
        note(side, metric, number, scene)


def open_now(side: Side) -> tuple[int, int, int]:
    """Descriptors, sockets among them, and threads of this rank. Shared memory is counted apart, since a cache may keep some for the next
    version. Receivers that wait for the next sync are no part of this one."""
    counts, waiting = resource_counts(), side.waiting()
    memory = sum(name.startswith(MEMFD) for name, _ in machine.open_files())
    return counts.fds - memory - waiting, counts.sockets - waiting, counts.threads


def unlisted(births: Births) -> int:
    """Groups that were made meanwhile, are still there, and are in none of torch's tables. Groups in reference cycles do not count."""
    listed = {id(group) for group in registered_groups()}
    alive = births.alive()
    if alive:
        del alive
        gc.collect()
        alive = births.alive()
    return sum(id(group) not in listed for group in alive)


def note(side: Side, metric: str, number: int, scene: str, text: str = "") -> None:
    side.ctx.record(metric, number, text=text, scene=scene)
    if number:
        print(f"rehearse: {metric} is {number} in scene {scene}{': ' * bool(text)}{text}")


# -- code that fails on purpose --------------------------------------------------------------------------------------------


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
    raise RehearsedError(WHY[LATE])


def raises_after_others_have_published(call: Call, message: dict[str, Any]) -> None:
    call.receiver.version = message["version"]
    raise RehearsedError(WHY["publish"])


def raises_after_the_version_became_active(call: Call, message: dict[str, Any]) -> None:  # noqa: ARG001 - as above
    raise RehearsedError(WHY[TOO_LATE])


def raises_before_a_bucket_in_the_middle(transport: SeenTransport, index: int, into: torch.Tensor) -> torch.Tensor:
    """The bucket is sent and never read, and the next sync has the same bytes: a sender that notes what it sent must not take it for
    received."""
    if index == transport.buckets // 2:
        raise RehearsedError(WHY[MIDDLE])
    return receive(transport, index, into)


def raises_at_the_last_bucket(transport: SeenTransport, index: int, into: torch.Tensor) -> torch.Tensor:
    got = receive(transport, index, into)
    if index == transport.buckets - 1:
        raise OSError(WHY["transport"])
    return got


def raises_at_the_second_bucket(transport: SeenTransport, index: int, buffer: torch.Tensor) -> None:
    if index == min(1, transport.buckets - 1):
        raise OSError(WHY[ALONE])
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
    raise OSError(WHY[ALONE]) from reason


flipped: dict[int, torch.Tensor] = {}  # packed buffers, by address: a second transport must not flip the bit back


def flips_a_packed_bit(transport: SeenTransport, index: int, buffer: torch.Tensor) -> None:
    if index == 0 and buffer.data_ptr() not in flipped:
        buffer[0] ^= 1
        flipped[buffer.data_ptr()] = buffer
    send(transport, index, buffer)


def flips_the_bit_back(transport: SeenTransport) -> None:
    """The packed bytes may be the only copy of the active version."""
    while flipped:
        flipped.popitem()[1][0] ^= 1
    close(transport)
