"""The failures that the sync lab rehearses, on both ends.

In a rehearsed failure no replica may have the new version, weights must be unchanged, the error must name the cause, and the next sync must
work. Broken promises are counted; 0 is correct. The last of the receivers fails on purpose, each time in another way, and so does the
sender's end of a transport; the others do their part. Forwards run throughout on serving replicas and must all use the old version.
Expansions fail while replicas wake; afterwards the replicas must sleep again, and the next expansion must bring the active version.
"""

from __future__ import annotations

import contextlib
import gc
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from kit import machine
from kit.actors.common import address_for
from kit.engines.contents import listed_names, sha256
from kit.errors import BadInput, KitError, RehearsedError
from kit.labs.sync.lab import CLOSED_S, SyncConfig
from kit.labs.sync.ranks.replica import SyncReplica
from kit.labs.sync.ranks.scenes import (
    AFTER_CLOSING,
    ALONE,
    AT_THE_OTHERS,
    AT_THE_RECEIVER,
    AT_THE_SENDER,
    AT_THE_TRAINER,
    CLOSING,
    EMPTIED,
    EXTRA,
    LOST,
    MIDDLE,
    MUTE,
    PACKED,
    REFILL,
    SILENT,
    STALLED,
    STUCK,
    SURE,
    TOO_LATE,
    UNLIKE,
    UNOPENED,
    WHY,
    WRONG_BYTES,
    GateOfHastyReaders,
    Tensors,
    in_fullest_bucket,
    rehearsed_scenes,
)
from kit.labs.sync.ranks.side import ANY, Side, beyond_garbage, error_of, miscounted
from kit.labs.sync.ranks.trainer import SyncTrainer
from kit.labs.sync.ranks.watch import WAITS, judge_forwards
from kit.measure.observers.births import Births, registered_groups
from kit.measure.phase import MEMFD, resource_counts, temp_files
from kit.sync.cache import BASE
from kit.sync.link import call, tcp_family
from kit.sync.receiver import PATIENCE, SENDER
from kit.sync.sender import SyncFailed, Target
from kit.target import replaced

THROUGH = (
    ", through"  # of the name with which a replica tells that a scene is over, or asks whether the sender has given up
)
AGAIN = ", again"  # of the name with which it tells what left something open


# -- on the trainer --------------------------------------------------------------------------------------------------------


def of_trainer(trainer: SyncTrainer) -> None:
    awake, asleep = trainer.targets(sleeping=False), trainer.targets(sleeping=True)
    if trainer.config.arena == "cache":  # before the trainer has other weights than the buckets
        trainer.offload(0)
        fail_expansions(trainer, asleep, awake)
        trainer.reload()
    step(trainer)
    if trainer.sends:
        note(trainer, "accepted", accepted(trainer), "calls that must be refused")
    named = fail_syncs(trainer, awake, ahead=1)
    if trainer.config.shares:
        trainer.job.mover.release()
        fail_expansions(trainer, asleep, awake)
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
    nudge(trainer)
    succeed(trainer, TOO_LATE, awake, ahead=1)
    trainer.update_truth()
    trainer.send_truth(awake)
    if trainer.config.delta != "off":
        fail_sync(trainer, LOST, awake, ahead=1)
    succeed(trainer, REFILL, awake, ahead=1)


def fail_expansions(trainer: SyncTrainer, asleep: Sequence[Target], awake: Sequence[Target]) -> None:
    let_in(trainer, asleep)
    fail_syncs(trainer, asleep, ahead=0)
    succeed(trainer, "expansion", asleep, ahead=0)
    trainer.everywhere(set())  # no rank takes its device back while replicas wake
    let_in(trainer, awake)


def fail_syncs(trainer: SyncTrainer, targets: Sequence[Target], *, ahead: int) -> dict[str, list[str]]:
    """All scenes; once more those after which any rank had something open, which may be made once and not by every failure. Returns the
    tensors that the errors named."""
    scenes = rehearsed_scenes(trainer.config, expansion=not ahead)
    trainer.leaving.clear()
    named = {scene: fail_sync(trainer, scene, targets, ahead=ahead) for scene in scenes}
    names = [f"{target.name}{AGAIN}" for target in targets]
    links = trainer.listener.accept(names, PATIENCE * trainer.config.deadline_s) if trainer.sends else {}
    leaving = trainer.everywhere(trainer.leaving.union(*(link.hello["leaving"] for link in links.values())))
    again = [scene for scene in scenes if scene in leaving]
    for link in links.values():
        link.send({"kind": "turn", "again": again})
        link.close()
    for scene in again:
        fail_sync(trainer, scene, targets, ahead=ahead)
    return named


def let_in(trainer: SyncTrainer, targets: Sequence[Target], suffix: str = "") -> None:
    """Tell replicas that it is their turn. They wait for it outside of a sync, which has a deadline."""
    if trainer.sends:
        names = [f"{target.name}{suffix}" for target in targets]
        for link in trainer.listener.accept(names, PATIENCE * trainer.config.deadline_s).values():
            link.send({"kind": "turn"})
            link.close()


def step(trainer: SyncTrainer) -> None:
    with trainer.as_job():
        trainer.job.step()


def nudge(trainer: SyncTrainer) -> None:
    """Change the last number of each trained tensor only: who compares the beginning of a bucket sees no change. A larger change would
    also grow the rounding of logits in bfloat16."""
    with trainer.as_job(), torch.no_grad():
        for chunk in trainer.job.chunks:
            for parameter in chunk.parameters():
                if parameter.requires_grad:
                    parameter.view(-1)[-1] += 0.125


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
    gathers = ahead > 0 and scene != MUTE  # which ends before that
    if not trainer.sends:
        if gathers:
            trainer.gather()
        return []
    sender, version = trainer.sender, trainer.sender.version + ahead
    active = version if scene == TOO_LATE else sender.version
    changes = trainer.config.delta != "off" and trainer.config.refresh == "staged" and ahead
    changed: list[str] = []

    def gather() -> Tensors:
        tensors = trainer.gather() if gathers else {}
        changed.extend(trainer.oracle.names({name: tensor for (name, _), tensor in tensors.items()}) if changes else ())
        return AT_THE_TRAINER[scene](tensors, trainer.cache.layout) if scene in AT_THE_TRAINER else tensors

    with counting_leftovers(trainer, scene), replaced(AT_THE_SENDER.get(scene, {})):
        if scene == MUTE:
            let_in(trainer, targets)
        error = error_of(lambda: sender.sync(version, targets, gather if ahead else None), ANY)
        if scene == MUTE:
            let_in(trainer, targets[-1:], THROUGH)
    if waits_in_its_constructor(trainer.config, scene):
        let_in(trainer, targets, THROUGH)
    peers = [target.name for target in targets]
    # A transport with a deadline of its own cannot know who stalls.
    wrong = "" if scene == STALLED else "; ".join(misnamed(trainer, scene, error, active, peers, changed=changed))
    note(trainer, "unnamed", int(bool(wrong)), scene, f"{wrong}: {error}" if wrong else "")
    note(trainer, "kept_version", int(sender.version != active), scene)
    return sorted(error.tensors) if isinstance(error, SyncFailed) else []


def waits_in_its_constructor(config: SyncConfig, scene: str) -> bool:
    """Whether receivers may need as long for a failed scene as the next sync would wait for them."""
    return config.own_transport and scene in UNOPENED


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
    last = peers[-1]
    if scene in {ALONE, *AT_THE_TRAINER}:
        if error.peer is not None or (scene == ALONE and SENDER not in str(error)):
            yield f"the error names {error.peer or 'nobody'} instead of {SENDER}"
    elif error.peer not in (peers if scene in {PACKED, LOST} else [last]):
        yield f"the error names {error.peer or 'no receiver'} instead of {last}"
    elif str(error.peer) not in str(error):
        yield f"the error has the receiver {error.peer} and does not say it"
    everything = [spec.name for spec in trainer.cache.layout.specs]
    named, wanted = sorted(error.tensors), [blamed(trainer, scene, sent) for sent in (changed, everything) if sent]
    some_of_them = scene == WRONG_BYTES and compares_some(trainer.config) and named and {*named} <= {*wanted[-1]}
    if named not in [sorted(names) for names in wanted] and not some_of_them:
        yield f"the error names {counted_tensors(named)} instead of {counted_tensors(wanted[0])}"
    yield from misspoken(trainer, scene, error)


def misspoken(trainer: SyncTrainer, scene: str, error: SyncFailed) -> Iterator[str]:
    """What is wrong with the bucket of an error, and with the tensors in its words."""
    layout, tensors = trainer.cache.layout, error.tensors
    if scene in {WRONG_BYTES, PACKED} and trainer.config.delta != "off":
        return  # the words name a bucket of changes, or of everything where too much has changed
    if scene in {WRONG_BYTES, PACKED, UNLIKE} and trainer.config.delta == "off":
        # All buckets differ; with a share of the tensors those that were compared.
        right = in_fullest_bucket(layout)[0] if scene == UNLIKE else 0
        index = error.bucket if error.bucket is not None and compares_some(trainer.config) else right
        if error.bucket != index:
            yield f"the error names bucket {error.bucket} instead of bucket {index}"
        elif not re.search(rf"\bbucket {index}\b", str(error)):
            yield f"the error has bucket {index} and does not say it"
        held = {layout.specs[piece.spec].name for piece in layout.buckets[index]}
        tensors = tuple(name for name in tensors if name in held)
    if scene == EMPTIED:
        tensors = tuple(spec.name for spec in layout.specs)
    if tensors:
        yield from miscounted(str(error), tensors, {*trainer.digests, EXTRA})


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
    of_receivers[UNLIKE] = in_fullest_bucket(trainer.cache.layout)[1]
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
    note(replica, "accepted", int(not isinstance(replica.early, KitError)), "a forward before the replica serves")
    if replica.sleeper:
        for _ in range(1 + (replica.config.arena == "cache")):
            come_in(replica)
            endure_expansions(replica, version)
    else:
        if replica.config.arena == "cache":
            come_in(replica)
        endure_all(replica, rehearsed_scenes(replica.config))
        if replica.config.shares:
            come_in(replica)
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
    endure_all(replica, rehearsed_scenes(replica.config, expansion=True))
    take_next(replica, "expansion", version)
    replica.compare_weights(scene="expansion")
    replica.leave()


def endure_all(replica: SyncReplica, scenes: Sequence[str]) -> None:
    replica.leaving.clear()
    for scene in scenes:
        endure(replica, scene)
    for scene in come_in(replica, AGAIN, leaving=sorted(replica.leaving))["again"]:
        endure(replica, scene)


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
    serves = replica.config.refresh != "paused" and not replica.sleeper
    replica.watch.reset("rehearsed")
    with counting_leftovers(replica, scene), hasty_readers(replica, scene):
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
    """Fail, or take part while the last of the receivers fails; each of them must hear which one it was, and why."""
    mute = scene == MUTE and replica.fails
    if scene == MUTE:
        come_in(replica)
    with replaced((AT_THE_RECEIVER if replica.fails else AT_THE_OTHERS).get(scene, {})):
        error = error_of((lambda: stay_mute(replica)) if mute else replica.receiver.join, ANY)
    note(replica, "silent", int(error is None), scene)
    if scene == STALLED and replica.fails:
        note(replica, "waited_for", int(STUCK in str(error)), scene)
    if waits_in_its_constructor(replica.config, scene):
        come_in(replica, THROUGH)
    hears = scene in (AFTER_CLOSING if replica.config.own_transport else WHY)
    if error is not None and hears and not replica.fails:
        name = SENDER if scene in {ALONE, EMPTIED} else replica.failing
        heard = WHY[scene] in str(error) and re.search(rf"\b{re.escape(name)}\b", str(error))
        note(replica, "unheard", int(not heard), scene, "" if heard else f"no word of {name} and why: {error}")


def come_in(replica: SyncReplica, suffix: str = "", **hello: Any) -> dict[str, Any]:
    """Wait for this replica's turn, for as long as all that may come before it; returns the sender's answer."""
    scenes = len(rehearsed_scenes(replica.config)) + len(rehearsed_scenes(replica.config, expansion=True))
    limit_s = 2 * scenes * PATIENCE * replica.config.deadline_s
    name, address = f"{replica.receiver.name}{suffix}", address_for(replica.ctx, "sync")
    with call(address, name, peer=SENDER, timeout_s=limit_s, hello=hello) as link:
        return link.expect("turn")[0]


def stay_mute(replica: SyncReplica) -> None:
    """Connect and say nothing, until the sender has given up."""
    address = address_for(replica.ctx, "sync")
    unix = "unix" in address
    with socket.socket(socket.AF_UNIX if unix else tcp_family(address["host"])) as sock:
        sock.settimeout(replica.config.deadline_s)
        sock.connect(b"\0" + address["unix"].encode() if unix else (address["host"], address["port"]))
        come_in(replica, THROUGH)
    raise RehearsedError("the silence is over")


@contextlib.contextmanager
def hasty_readers(replica: SyncReplica, scene: str) -> Iterator[None]:
    """Where a writer is inside for long, because another replica is silent, forwards must go on waiting."""
    serving, gate = replica.serving, replica.serving.gate
    if scene == SILENT:
        serving.gate = GateOfHastyReaders(gate.timeout_s)
    try:
        yield
    finally:
        serving.gate = gate


def go_back(replica: SyncReplica) -> None:
    """The last rank fails after the version became active: all ranks of its replica go back, all others keep the version."""
    receiver, version, staged = replica.receiver, replica.receiver.version, replica.config.refresh != "paused"
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
            judged = judge_forwards(replica.forwards, known, known.get(version, frozenset()), rest)
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
        note(side, "left_segments", beyond_garbage(lambda: len(side.held() - held), 0), scene)
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
    if any(opened):
        side.leaving.add(scene)


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
