"""The checks of the lab `share`. Some need only the ledger (`kit.share.judge`); the others need the records of ranks and observers, and
are null if a run has none."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kit.labs.share.lab import BETWEEN_LOOKS_S, PIPELINES, TRAINER, ShareConfig, pipeline_config
from kit.labs.share.ledgers import (
    MAIN,
    Levels,
    Measure,
    devices_of,
    every_ledger,
    leases,
    ledgers,
    loops,
    of_ledgers,
    recorded,
    residents,
    role_of,
    sights,
    spans,
    watched,
)
from kit.labs.stream.lab import replica_model
from kit.loop.messages import numbers
from kit.megatron.config import model_bytes
from kit.results import Measured, Missing, NotMeasured, Rule
from kit.results.growth import left
from kit.results.rules import Unjudged
from kit.results.units import counted
from kit.share import judge
from kit.share.books import Ledger
from kit.share.judge import of_violations
from kit.stream import judge as stream

if TYPE_CHECKING:
    import pandas as pd

MIB = 2**20
OUTCOMES = ("digest", "global_loss", "grad_norm", "tokens_digest")
SEEN_BYTES = 8 * MIB  # a change of resident memory above noise


def read(config: Mapping[str, Any]) -> ShareConfig:
    given: dict[str, Any] = {one.name: config[one.name] for one in dataclasses.fields(ShareConfig)}
    given |= {name: tuple(one) for name, one in given.items() if isinstance(one, list)}
    return ShareConfig(**given)


def no_ranks(config: Mapping[str, Any]) -> str:
    if config.get("simulated", True):
        return "needs the records of ranks, which a simulated run or another system's ledger lacks"
    return ""


def lacking(frame: pd.DataFrame, what: str) -> None:
    """Records that every complete run has are missing, perhaps because of the code under test."""
    raise (Unjudged if (frame["phase"] == "end").any() else Missing)(what)


def rows_of(frame: pd.DataFrame, phase: str, metric: str, *ids: str) -> pd.DataFrame:
    rows = recorded(frame, phase, metric, *ids)
    if rows.empty:
        lacking(frame, f"the phase {phase} recorded no {metric}")
    return rows


def with_ranks(rule: Callable[[Ledger], Measured], more: Callable[[pd.DataFrame, ShareConfig], list[str]]) -> Measure:
    """A ledger rule combined with violations in the records of ranks, if there are any. Either can fail the check."""
    by_ledger = of_ledgers(rule)

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        found = by_ledger(frame, config)
        if found.value or no_ranks(config):
            return found
        return of_violations(more(frame, read(config)), f"{found.why}; the records of ranks and observers agree")

    return measure


# -- devices ----------------------------------------------------------------------------------------------------------------


def owned_twice(frame: pd.DataFrame, config: ShareConfig) -> list[str]:
    """Two holders of a lock (observers); two leases at once (ranks); a lease that no observer saw; a replica that woke without a lease."""
    held, wrong = leases(frame, MAIN)
    if not held:
        lacking(frame, "no rank recorded a lease")
    seen, seconds = sights(frame, MAIN), watched(frame, MAIN)
    blind = rows_of(frame, MAIN, "seen_samples", "blind")["blind"].astype(int).max()
    for device, some in () if blind else seen.items():
        wrong += [f"device {device} was locked by {' and '.join(one.owners)}" for one in some if len(one.owners) > 1]
    for one in () if blind else held:
        then = [each for each in seen.get(one.device, []) if each.since <= one.until and each.until > one.since]
        if seconds(one.since, one.until) > BETWEEN_LOOKS_S and not any(one.owner in each.owners for each in then):
            wrong.append(f"{one.owner} recorded a lease of device {one.device}, but no observer saw its lock")
    for row in (row for ledger in ledgers(frame, MAIN) for row in ledger.of("expanded")):
        owner = f"{row.who}.replica {row['replica']}"
        for device in devices_of(config, owner):
            if not any(
                (one.owner, one.device) == (owner, device) and one.since <= row.time <= one.until for one in held
            ):
                wrong.append(f"{row}: it woke on device {device} without a lease of it")
    return wrong


def peak_fits(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """For each device, the most bytes that observers saw of replicas that did not hold it. A trainer off its devices is in host memory,
    which is the same memory on the CPU."""
    run, levels = read(config), residents(frame, MAIN)
    whole = weights_seen(run)
    if not levels:
        lacking(frame, "no observer recorded the memory of ranks")
    held = leases(frame, MAIN)[0]
    replicas = {owner: min(one.bytes) for owner, one in levels.items() if not role_of(owner).endswith(f".{TRAINER}")}
    over, where = 0.0, ""
    for device, (start, end) in itertools.product(range(run.devices), sorted(readings(levels))):
        here = [one for one in held if one.device == device and one.since <= end and one.until > start]
        holders = {one.owner for one in here if one.since <= start and end < one.until}
        busy = {one.owner for one in here}  # who came or went while it was read may have had memory in its own right
        others = [owner for owner in replicas if role_of(owner) not in busy and device in devices_of(run, owner)]
        size = sum(levels[owner].at(end) - replicas[owner] for owner in others) if holders else 0.0
        if size > over:
            over, where = (
                size,
                f"device {device}, held by {min(holders)}: {size / MIB:.1f} MiB of {' and '.join(others)}",
            )
    right = f"no replica kept its {whole / MIB:.1f} MiB while another rank held the device"
    return Measured(over / MIB, where if over > SEEN_BYTES else f"at most {over / MIB:.1f} MiB: {right}")


def readings(levels: Mapping[str, Levels]) -> set[tuple[float, float]]:
    """When observers read the memory of ranks: all of them at once, each time from a start to an end."""
    return {one for each in levels.values() for one in zip(each.starts, each.ends, strict=True)}


def weights_seen(run: ShareConfig) -> float:
    """The bytes of a replica's weights; raises if they are too few to see in resident memory."""
    least = min(model_bytes(replica_model(pipeline_config(run, name)), ranks=1)["params"] for name in run.pipelines)
    if least < 2 * SEEN_BYTES:
        raise NotMeasured(
            f"a replica's weights are {least / MIB:.1f} MiB, too small to distinguish from noise; use more layers"
        )
    return float(least)


def memory_down_asleep(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """For each replica that falls asleep: the share of its weights that observers see while it sleeps. Periods shorter than the time
    between two samples are not judged."""
    run, levels = read(config), residents(frame, MAIN)
    whole = weights_seen(run)
    kept, where, count = 0.0, "", 0
    held, seconds = leases(frame, MAIN)[0], watched(frame, MAIN)
    for one, rank in itertools.product(held, levels):
        if one.owner.endswith(f".{TRAINER}") or role_of(rank) != one.owner or one.device not in devices_of(run, rank):
            continue
        wakes = min(
            (other.since for other in held if other[:2] == one[:2] and other.since >= one.until), default=math.inf
        )
        if min(seconds(one.since, one.until), seconds(one.until, wakes)) > BETWEEN_LOOKS_S and math.isfinite(one.until):
            awake = max(levels[rank].between(one.since, one.until))
            asleep = min(levels[rank].between(one.until, wakes))
            share = 1 - (awake - asleep) / whole
            count += 1
            if share > kept:
                kept, where = share, f"{rank}: {awake / MIB:.1f} MiB awake, {asleep / MIB:.1f} MiB asleep"
    if not count:
        lacking(frame, "no observer saw a replica fall asleep")
    return Measured(kept, where or f"replicas freed their weights {count} times")


def keeps_groups(config: Mapping[str, Any]) -> str:
    if not config.get("release_groups"):
        return "trainers keep their process groups; use release_groups=true"
    return no_ranks(config)


def groups_down_asleep(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - checks are called alike
    """The groups in torch's table, without the World's, each time a trainer rank left its device."""
    rows = rows_of(frame, MAIN, "groups_asleep", "who")
    freed = rows_of(frame, MAIN, "lease", "event")
    left = Counter(freed[(freed["event"] == "freed") & freed["text"].str.endswith(f".{TRAINER}")]["rank"])
    counts = Counter(rows["rank"])
    wrong = [
        f"rank {rank} left its device {count} times and counted its process groups {counts[rank]} times"
        for rank, count in left.items()
        if counts[rank] < count
    ]
    wrong += [
        f"{row['who']} (rank {row['rank']}) kept {row['value']:.0f} process groups off its devices"
        for row in rows[rows["value"] > 0].to_dict("records")
    ]
    return of_violations(wrong, f"{len(rows)} times a trainer rank kept only the World's process group")


# -- requests, versions, weights ----------------------------------------------------------------------------------------------


def slept_in_flight(frame: pd.DataFrame, config: ShareConfig) -> list[str]:
    """Requests in flight, as recorded by replicas, when their weights were dropped. Every sleep must have a record."""
    rows = rows_of(frame, MAIN, "in_flight", "replica", "pipeline")
    wrong = [
        f"replica {row['replica']} of {row['pipeline']} fell asleep with {row['value']:.0f} requests in flight"
        for row in rows[rows["value"] > 0].to_dict("records")
    ]
    recorded = Counter(zip(rows["pipeline"], rows["replica"].astype(int), strict=True))
    for ledger in ledgers(frame, MAIN):
        for (name, replica), slept in Counter(row.replica for row in ledger.of("shrunk")).items():
            if recorded[name, replica] < slept * config.infer_tp:
                wrong.append(
                    f"replica {replica} of {name} slept {slept} times and counted {recorded[name, replica]} times"
                )
    return wrong


def weights_after_wake(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - checks are called alike
    """SHA-256 of all tensors of each replica after each sync, against the trainer's of that version."""
    trained = rows_of(frame, MAIN, "digest", "pipeline", "version")
    digests = {(row["pipeline"], int(row["version"])): row["text"] for row in trained.to_dict("records")}
    rows = rows_of(frame, MAIN, "served", "pipeline", "version", "replica").to_dict("records")
    wrong = [
        f"replica {row['replica']} of {row['pipeline']} served weights that differ from the trainer's version {row['version']}"
        for row in rows
        if digests.get((row["pipeline"], int(row["version"]))) != row["text"]
    ]
    hashed = Counter((row["pipeline"], int(row["replica"]), int(row["version"])) for row in rows)
    published = Counter(
        (row.who, row["replica"], row["version"]) for ledger in ledgers(frame, MAIN) for row in ledger.of("published")
    )
    wrong += [
        f"version {version} was published on replica {replica} of {name} {count} times and hashed {hashed[name, replica, version]} times"
        for (name, replica, version), count in published.items()
        if hashed[name, replica, version] < count
    ]
    return of_violations(wrong, f"all tensors of a replica matched the trainer's version {len(rows)} times")


# -- the same numbers -----------------------------------------------------------------------------------------------------------


def outcomes(frame: pd.DataFrame, phase: str, pipeline: str) -> dict[tuple[str, str], tuple[float | None, str]]:
    """Weights of each version, losses and norms of each update, tokens of each sample, in recorded order."""
    rows = frame[(frame["phase"] == phase) & frame["metric"].isin(OUTCOMES)].sort_values("time", kind="stable")
    found: dict[tuple[str, str], tuple[float | None, str]] = {}
    for metric, text, value, ids in zip(rows["metric"], rows["text"], rows["value"], rows["ids"], strict=True):
        known = json.loads(ids) if ids else {}
        if known.pop("pipeline", "") == pipeline:
            key = metric, " ".join(f"{name}={known[name]}" for name in sorted(known))
            found[key] = None if metric.endswith("digest") else value, text
    return found


def wanted_outcomes(config: ShareConfig, pipeline: str) -> dict[str, int]:
    one = pipeline_config(config, pipeline)
    updates = one.steps * one.groups * one.group // (one.batch or one.groups * one.group)
    samples = one.steps * one.groups * one.group
    return {"digest": one.steps + 1, "global_loss": updates, "grad_norm": updates, "tokens_digest": samples}


def same_numbers(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    run = read(config)
    found = [departed(frame, run, name, MAIN) for name in run.pipelines]
    wrong = [one for some, _ in found for one in some]
    count = sum(number for _, number in found)
    return of_violations(wrong, f"{count} losses, gradient norms, token and weight digests are identical bit for bit")


def departed(frame: pd.DataFrame, run: ShareConfig, name: str, phase: str) -> tuple[list[str], int]:
    """The outcomes of a pipeline in a phase that differ from those alone, in order, and the number of outcomes compared."""
    before = f"alone_{name}"
    alone, found = (outcomes(frame, where, name) for where in (before, phase))
    for where, some in ((before, alone), (phase, found)):
        for metric, number in wanted_outcomes(run, name).items():
            if (there := sum(key[0] == metric for key in some)) != number:
                lacking(
                    frame, f"pipeline {name} recorded {metric} {there} times in the phase {where}, expected {number}"
                )
    wrong = [
        f"pipeline {name}, {metric} of {ids}: {describe(found.get((metric, ids)))} in the phase {phase}, {describe(one)} alone"
        for (metric, ids), one in alone.items()
        if found.get((metric, ids)) != one
    ]
    return wrong, len(alone)


def describe(one: tuple[float | None, str] | None) -> str:
    if one is None:
        return "nothing"
    return one[1][:12] if one[0] is None else repr(one[0])


def stale(config: Mapping[str, Any]) -> str:
    if config.get("window"):
        return f"window={config['window']}: the version that generates a sample depends on timing; use window=0"
    return no_ranks(config)


def namespaces_apart(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    """Weights and samples that are equal in both pipelines, although each draws its own."""
    one, other = (outcomes(frame, MAIN, name) for name in PIPELINES)
    both = [key for key in one if key in other and key[0] in ("digest", "tokens_digest")]
    if not both:
        lacking(frame, "the pipelines recorded no comparable weights or samples")
    alike = [
        f"{metric} of {ids} is the same in both pipelines"
        for metric, ids in both
        if one[metric, ids] == other[metric, ids]
    ]
    return of_violations(alike, f"{len(both)} digests of weights and samples differ between the pipelines")


def alone_here(config: Mapping[str, Any]) -> str:
    if not no_ranks(config) and len(read(config).pipelines) < 2:
        return "there is only one pipeline"
    return no_ranks(config)


def others_untouched(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Process groups of every rank, compared with the phase in which its pipeline was alone; and memory of sleeping ranks while a replica
    of another pipeline sleeps or wakes."""
    run, levels = read(config), residents(frame, MAIN)
    wrong = list(groups_moved(frame, run))
    held, count = leases(frame, MAIN)[0], 0
    moves = [one for ledger in ledgers(frame, MAIN) for one in spans(ledger) if one.state in ("waking", "sleeping")]
    for move, (owner, level) in itertools.product(moves, levels.items()):
        busy = {one.owner for one in held if one.since < move.right and one.until > move.left}
        if owner.partition(".")[0] != move.pipeline and role_of(owner) not in busy:
            count += 1
            grown = max(level.within(move.left, move.right), default=0.0) - level.at(move.left)
            if grown > SEEN_BYTES:
                what = f"a replica of {move.pipeline} fell asleep or woke"
                wrong.append(f"{owner} grew by {grown / MIB:.1f} MiB asleep while {what}")
    return of_violations(
        wrong,
        f"{counted(count, 'reading')} of sleeping ranks while a replica of the other pipeline fell asleep or woke",
    )


def groups_moved(frame: pd.DataFrame, run: ShareConfig) -> Iterator[str]:
    rows = frame[frame["metric"] == "groups"]
    after = rows[rows["phase"] == MAIN].groupby("rank")["value"].last()
    for phase in (f"alone_{name}" for name in run.pipelines):
        before = rows[rows["phase"] == phase].groupby("rank")["value"].last()
        for rank in before.index.intersection(after.index):
            if before[rank] != after[rank]:
                yield f"rank {rank} has {after[rank]:g} process groups after the phase shared, {before[rank]:g} after {phase}"


def dead_and_seen(frame: pd.DataFrame, config: ShareConfig) -> list[str]:
    """Devices that a dead pipeline still held, according to observers, after the desk had removed it; and outcomes of the others that
    differ from those alone."""
    wrong = []
    dead = {row.who for ledger in ledgers(frame, "rehearse") for row in ledger.of("died") if "replica" not in row.ids}
    for name in () if config.window else sorted({*config.pipelines} - dead):
        wrong += departed(frame, config, name, "rehearse")[0]
    for where, ledger in every_ledger(frame, ("rehearse",)):
        for name in {row.who for row in ledger.of("died") if "replica" not in row.ids}:
            gone = next((row.time for row in ledger.of("gone") if row.who == name), math.inf)
            last = ledger.rows[-1].time
            for device, seen in sights(frame, "rehearse").items():
                late = [one for one in seen if gone + BETWEEN_LOOKS_S < one.since <= last]
                wrong += [
                    f"{where}: {owner} still holds device {device} after the desk removed {name}"
                    for one in late
                    for owner in one.owners
                    if owner.startswith(f"{name}.")
                ]
    return wrong


def loops_right(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    """Every rule of a loop's ledger, for each pipeline, alone and shared, except that a step may wait for all its groups."""
    wrong, count, asked = list[str](), 0, set[str]()
    for where, loop in loops(frame, (MAIN, "alone_a", "alone_b")):
        for name, rule in stream.CHECKS.items():
            if name != "trains_before_straggler":
                try:
                    found = rule(loop)
                except NotMeasured:
                    continue
                count += 1
                asked.add(name)
                wrong += [f"{where}: {name}: {found.why}"] if found.value else []
    if not count:
        raise Missing("no pipeline's loop was recorded with its settings (`capacity`)")
    return of_violations(
        wrong, f"{counted(len(asked), 'rule')} of the lab stream, checked {count} times, hold in every loop"
    )


def gate_shown(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Whether the gate's scenario occurred; only then do the other checks tell something about it."""
    what, count_in = GATES[config["gate"]]
    count = sum(map(count_in, ledgers(frame, MAIN)))
    return Measured(float(count), f"{what}: {count} times" if count else f"never happened: {what}")


def returns(ledger: Ledger, *, beside_others: bool) -> int:
    """How often a replica slept, while others of its pipeline served or while none did, and later served again."""
    serving: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
    asleep: set[tuple[str, int]] = set()
    count = 0
    for row in ledger.of("published", "left"):
        if row.event == "published":
            serving[row.who].add(row.replica)
            count += row.replica in asleep
            asleep.discard(row.replica)
        else:
            serving[row.who].discard(row.replica)
            asleep |= {row.replica} if bool(serving[row.who]) == beside_others else set()
    return count


def hand_overs(ledger: Ledger) -> int:
    rows = [row for row in ledger.of("granted", "release") if row.get("kind") == "training"]
    return sum(one.event == "release" and after.event == "granted" for one, after in itertools.pairwise(rows))


def exchanges(ledger: Ledger) -> int:
    last: dict[int, str] = {}
    count = 0
    for row in ledger.of("expand"):
        devices = numbers(str(row["devices"]))
        count += any(last.get(device, row.who) != row.who for device in devices)
        last |= dict.fromkeys(devices, row.who)
    return count


# The scenario of each gate, and a function that counts it in a ledger.
GATES: Mapping[str, tuple[str, Callable[[Ledger], int]]] = {
    "1": (
        "one of several replicas slept, requests went to another, and the first one served again",
        functools.partial(returns, beside_others=True),
    ),
    "2": (
        "the only replica slept, requests waited, and it served again",
        functools.partial(returns, beside_others=False),
    ),
    "2.5": ("a pipeline handed its devices over, released its process groups, and continued training", hand_overs),
    "3": ("a pipeline handed its devices over after a step and continued training", hand_overs),
    "4": ("a replica woke up on a device where a replica of the other pipeline had been", exchanges),
    "5": (
        "a pipeline with its own `pipeline=` code handed its devices over after a step and continued training",
        hand_overs,
    ),
}


def nothing_left(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Counts of every rank at the end compared with those before the first loop, and process groups after each loop compared with those
    before it. The compiler's folder from the first step is expected."""
    import pandas as pd

    if wrong := list(groups_moved(frame, read(config))):
        return of_violations(wrong, "")
    kept = frame["metric"] == "temp_files"
    settled = frame[kept & (frame["phase"] == MAIN)].assign(phase="prepare")
    return left("end", "prepare")(pd.concat([frame[~kept | (frame["phase"] != "prepare")], settled]), config)


BY_RANKS_TOO = {
    "one_owner": owned_twice,
    "drained_before_sleep": slept_in_flight,
    "dead_pipeline_leaves": dead_and_seen,
}

RULES: tuple[Rule, ...] = (
    Rule(
        "gate_shown",
        "Did the gate's scenario occur?",
        gate_shown,
        limit=1,
        better=">=",
        when=lambda config: bool(config.get("gate")),
    ),
    Rule(
        "same_numbers",
        "Does each pipeline compute bit for bit what it computes alone?",
        same_numbers,
        cannot=stale,
    ),
    Rule(
        "weights_after_wake",
        "Does every woken replica have the weights of the version that it serves?",
        weights_after_wake,
        cannot=no_ranks,
    ),
    Rule(
        "peak_fits",
        "Does each device hold at most the memory that one of its ranks needs?",
        peak_fits,
        limit=SEEN_BYTES / MIB,
        unit="MiB",
        cannot=no_ranks,
    ),
    Rule(
        "memory_down_asleep",
        "Is the memory of a replica's weights freed while it sleeps?",
        memory_down_asleep,
        limit=0.5,
        cannot=no_ranks,
    ),
    Rule(
        "groups_down_asleep",
        "Are a trainer's process groups gone while it is off its devices?",
        groups_down_asleep,
        cannot=keeps_groups,
    ),
    Rule(
        "others_untouched",
        "Is a pipeline unaffected when a replica of the other one sleeps or wakes?",
        others_untouched,
        cannot=alone_here,
    ),
    Rule(
        "namespaces_apart",
        "Do the pipelines have separate weights and random numbers?",
        namespaces_apart,
        cannot=alone_here,
    ),
    Rule(
        "nothing_left",
        "Are all files, sockets, threads, processes and shared-memory segments gone at the end?",
        nothing_left,
        cannot=no_ranks,
    ),
    Rule("loops_right", "Does each pipeline's loop satisfy every rule of the lab stream?", loops_right),
    *(
        Rule(
            name,
            rule.__doc__ or "",
            with_ranks(rule, BY_RANKS_TOO[name]) if name in BY_RANKS_TOO else of_ledgers(rule),
        )
        for name, rule in judge.CHECKS.items()
    ),
)

PRESETS = {
    "strict": {
        "peak_fits": 4.0,  # half of what counts as noise of resident memory
        "memory_down_asleep": 0.1,
    },
    "common practice": {
        "peak_fits": 64.0,  # an engine that keeps its graphs and buffers
        "memory_down_asleep": 0.9,
    },
}
