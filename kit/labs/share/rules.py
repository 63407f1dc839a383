"""The rules of the lab `share`. Some need only the ledger (`kit.share.judge`); the others need the records of ranks and observers, and are
null if a run has none."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kit.labs.definition import in_a_notebook, own_code
from kit.labs.explored import no_world_fails
from kit.labs.share.adapters import ADAPTER_RULES
from kit.labs.share.lab import ALONE, BETWEEN_LOOKS_S, MAIN, OWN, TRAINER, ShareConfig, role_names
from kit.labs.share.ledgers import (
    RESERVED,
    Held,
    ResidentBytes,
    alone_phases,
    devices_of,
    every_ledger,
    judged_loop,
    judged_phases,
    lacking,
    leases,
    ledgers,
    loops,
    memory_source,
    no_ranks,
    of_ledgers,
    recorded_on_ranks,
    residents,
    role_of,
    share_config,
    sights,
    spans,
    watched,
)
from kit.machine import MIB
from kit.megatron.config import model_bytes
from kit.results import Measured, Missing, NotMeasured, Rule
from kit.results.frames import read_ids
from kit.results.growth import COUNTS, PILES_UP, largest, nothing_piles_up
from kit.results.records import numbers
from kit.results.rules import Measure, Violations, rule
from kit.results.units import counted
from kit.share import judge
from kit.share.judge.books import DeskLedger, replica_of
from kit.share.judge.demand import idle_while_needed
from kit.share.judge.ends import dead_replaced
from kit.share.judge.plans import MOST_SLEEPS, sleeps_in_a_row

if TYPE_CHECKING:
    import pandas as pd

RANK = re.compile(r"\brank (\d+)")
OUTCOMES = ("digest", "global_loss", "grad_norm", "tokens_digest")
SEEN_BYTES = 8 * MIB  # a change of resident memory above noise


def shared_rows(frame: pd.DataFrame, metric: str, *ids: str) -> pd.DataFrame:
    """The rows of a metric that the ranks recorded in the phase `shared`, which every complete run has."""
    rows = recorded_on_ranks(frame, MAIN, metric, *ids)
    if rows.empty:
        lacking(frame, f"the phase {MAIN} recorded no {metric}")
    return rows


def with_ranks(
    by_ledger: Callable[[DeskLedger], Violations], by_ranks: Callable[[pd.DataFrame, ShareConfig], Iterator[str]]
) -> Measure:
    """A rule of the ledger, then violations in the records of ranks, if there are any. Either can fail it."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured | Violations:
        answer = of_ledgers(by_ledger)(frame, config)
        if answer.value or no_ranks(config):
            return answer
        return agreeing(by_ranks(frame, share_config(config)), answer.why)

    return measure


def agreeing(violations: Iterator[str], why: str) -> Violations:
    yield from violations
    return f"{why}; the records of ranks and observers agree"


# -- devices ----------------------------------------------------------------------------------------------------------------


def owned_twice(frame: pd.DataFrame, config: ShareConfig) -> Iterator[str]:
    """Two holders of a lock (observers); two leases at once (ranks); a lease that no observer saw; a replica that woke without a lease."""
    held, taken_twice = leases(frame, MAIN)
    if not held:
        lacking(frame, "no rank recorded a lease")
    yield from taken_twice
    seen, seconds = sights(frame, MAIN), watched(frame, MAIN, config)
    blind = shared_rows(frame, "seen_samples", "blind")["blind"].astype(int).max()
    for device, periods in () if blind else seen.items():
        for sight in periods:
            if len(sight.owners) > 1:
                yield f"device {device} was locked by {' and '.join(sight.owners)}"
    for lease in () if blind else held:
        then = [
            sight for sight in seen.get(lease.device, []) if sight.since <= lease.until and sight.until > lease.since
        ]
        unseen = not any(lease.owner in sight.owners for sight in then)
        if unseen and seconds(lease.device, lease.since, lease.until) > BETWEEN_LOOKS_S:
            yield f"{lease.owner} recorded a lease of device {lease.device}, but no observer saw its lock"
    yield from off_its_core(frame, config, held)
    for row in (row for ledger in ledgers(frame, MAIN) for row in ledger.of("expanded")):
        owner = f"{row.who}.replica {row['replica']}"
        for device in devices_of(config, owner):
            own = [lease for lease in held if (lease.owner, lease.device) == (owner, device)]
            if not any(lease.since <= row.time <= lease.until for lease in own):
                yield f"{row}: it woke on device {device} without a lease of it"


def off_its_core(frame: pd.DataFrame, config: ShareConfig, held: list[Held]) -> Iterator[str]:
    """Yield a violation per lease that lasted longer than between two looks of an observer, and in which a rank was never seen on one core.
    If no rank ever was, ranks cannot choose: a container does not allow it, or the devices are GPUs."""
    rows = recorded_on_ranks(frame, MAIN, "seen_cores", "who")
    if not rows["text"].str.isdigit().any():
        return
    seconds = watched(frame, MAIN, config)
    for who, seen in rows.groupby("who"):
        looks = [*zip(seen["text"], seen["time"], [*seen["time"][1:], math.inf], strict=True)]
        for lease in held:
            mine = lease.owner == role_of(str(who)) and lease.device in devices_of(config, str(who))
            ended = mine and math.isfinite(lease.until)
            if ended and seconds(lease.device, lease.since, lease.until) > BETWEEN_LOOKS_S:
                then = [cores for cores, since, until in looks if since <= lease.until and until > lease.since]
                if then and not any(cores.isdigit() for cores in then):
                    yield f"{who} held device {lease.device} and was only seen on the cores {' and '.join(then)}"


def peak_fits(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Does each device hold at most the memory that one of its ranks needs?

    For each device, the most bytes that observers saw of replicas that did not hold it. A trainer off its devices is in host memory,
    which is the same memory on the CPU.
    """
    run, levels = share_config(config), residents(frame, MAIN)
    whole = weights_seen(run)
    if not levels:
        lacking(frame, "no observer recorded the memory of ranks")
    held = leases(frame, MAIN)[0]
    replicas = {
        owner: min(level.bytes) for owner, level in levels.items() if not role_of(owner).endswith(f".{TRAINER}")
    }
    over, where = 0.0, ""
    for device, (start, end) in itertools.product(range(run.devices), sorted(readings(levels))):
        then = [lease for lease in held if lease.device == device and lease.since <= end and lease.until > start]
        holders = {lease.owner for lease in then if lease.since <= start and end < lease.until}
        # Who came or went while it was read may have had memory in its own right.
        busy = {lease.owner for lease in then}
        others = [owner for owner in replicas if role_of(owner) not in busy and device in devices_of(run, owner)]
        size = sum(levels[owner].at(end) - replicas[owner] for owner in others) if holders else 0.0
        if size > over:
            over, where = (
                size,
                f"device {device}, held by {min(holders)}: {size / MIB:.1f} MiB of {' and '.join(others)}",
            )
    right = f"no replica kept its {whole / MIB:.1f} MiB while another rank held the device"
    return Measured(over / MIB, where if over > SEEN_BYTES else f"at most {over / MIB:.1f} MiB: {right}")


def readings(levels: Mapping[str, ResidentBytes]) -> set[tuple[float, float]]:
    """When observers read the memory of ranks: all of them at once, each time from a start to an end."""
    return {reading for level in levels.values() for reading in zip(level.starts, level.ends, strict=True)}


def weights_seen(run: ShareConfig) -> float:
    """The bytes of a replica's weights; raises if they are too few to see in resident memory."""
    least = min(model_bytes(loop.replica_model, ranks=1)["params"] for loop in run.loops.values())
    if least < 2 * SEEN_BYTES:
        raise NotMeasured(
            f"a replica's weights are {least / MIB:.1f} MiB, too small to distinguish from noise; use more layers"
        )
    return float(least)


def memory_down_asleep(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Is the memory of a replica's weights freed while it sleeps?

    For each replica that falls asleep: the share of its weights that observers see while it sleeps. Periods shorter than the time
    between two samples are not judged.
    """
    run, levels = share_config(config), residents(frame, MAIN)
    whole = weights_seen(run)
    kept, where, count = 0.0, "", 0
    held, seconds = leases(frame, MAIN)[0], watched(frame, MAIN, run)
    for lease, rank in itertools.product(held, levels):
        of_trainer = lease.owner.endswith(f".{TRAINER}")
        if of_trainer or role_of(rank) != lease.owner or lease.device not in devices_of(run, rank):
            continue
        later = [again.since for again in held if again[:2] == lease[:2] and again.since >= lease.until]
        wakes = min(later, default=math.inf)
        spells = ((lease.since, lease.until), (lease.until, wakes))
        shortest = min(seconds(lease.device, *spell) for spell in spells)
        if shortest > BETWEEN_LOOKS_S and math.isfinite(lease.until):
            awake = max(levels[rank].between(lease.since, lease.until))
            asleep = min(levels[rank].between(lease.until, wakes))
            share = 1 - (awake - asleep) / whole
            count += 1
            if share > kept:
                kept, where = share, f"{rank}: {awake / MIB:.1f} MiB awake, {asleep / MIB:.1f} MiB asleep"
    if not count:
        lacking(frame, "no observer saw a replica fall asleep")
    return Measured(kept, where or f"replicas freed their weights {count} times")


def keeps_groups(config: Mapping[str, Any]) -> str:
    keeps = "release_groups" in config and not config["release_groups"]
    return "trainers keep their process groups; use release_groups=true" if keeps else no_ranks(config)


def groups_down_asleep(frame: pd.DataFrame, config: Mapping[str, Any]) -> Violations:
    """Are a trainer's process groups gone while it is off its devices?

    The groups in torch's table, without the World's, each time a trainer rank left its device.
    """
    rows = shared_rows(frame, "groups_asleep", "who")
    freed = shared_rows(frame, "lease", "event")
    departures = Counter(freed[(freed["event"] == "freed") & freed["text"].str.endswith(f".{TRAINER}")]["rank"])
    counts = Counter(rows["rank"])
    for rank, count in departures.items():
        if counts[rank] < count:
            who = name_rank(share_config(config), rank)
            yield f"{who} left its device {count} times and counted its process groups {counts[rank]} times"
    for row in rows[rows["value"] > 0].to_dict("records"):
        yield f"{row['who']} (rank {row['rank']}) kept {row['value']:.0f} process groups off its devices"
    return f"{len(rows)} times a trainer rank kept only the World's process group"


# -- requests, versions, weights ----------------------------------------------------------------------------------------------


def slept_in_flight(frame: pd.DataFrame, config: ShareConfig) -> Iterator[str]:
    """Requests in flight, as recorded by replicas, when their weights were dropped. Every sleep must have a record."""
    rows = shared_rows(frame, "in_flight", "replica", "pipeline")
    for row in rows[rows["value"] > 0].to_dict("records"):
        yield f"replica {row['replica']} of {row['pipeline']} fell asleep with {row['value']:.0f} requests in flight"
    counts = Counter(zip(rows["pipeline"], rows["replica"].astype(int), strict=True))
    for ledger in ledgers(frame, MAIN):
        for (name, replica), slept in Counter(replica_of(row) for row in ledger.of("shrunk")).items():
            if counts[name, replica] < slept * config.loops[name].infer_tp:
                yield f"replica {replica} of {name} slept {slept} times and counted {counts[name, replica]} times"


def weights_after_wake(frame: pd.DataFrame, config: Mapping[str, Any]) -> Violations:
    """Does every woken replica have the weights of the version that it serves?

    SHA-256 of all tensors of each replica after each sync, against the trainer's of that version; at sleep_level=1 also of each rank's
    tensors as it wakes, against those with which it fell asleep.
    """
    yield from lost_asleep(frame, share_config(config))
    trained = shared_rows(frame, "digest", "pipeline", "version")
    digests = {(row["pipeline"], int(row["version"])): row["text"] for row in trained.to_dict("records")}
    rows = shared_rows(frame, "served", "pipeline", "version", "replica").to_dict("records")
    for row in rows:
        if digests.get((row["pipeline"], int(row["version"]))) != row["text"]:
            replica = f"replica {row['replica']} of {row['pipeline']}"
            yield f"{replica} served weights that differ from the trainer's version {row['version']}"
    hashed = Counter((row["pipeline"], int(row["replica"]), int(row["version"])) for row in rows)
    published = Counter(
        (row.who, row["replica"], row["version"]) for ledger in ledgers(frame, MAIN) for row in ledger.of("published")
    )
    for (name, replica, version), count in published.items():
        if (times := hashed[name, replica, version]) < count:
            place = f"replica {replica} of {name}"
            yield f"version {version} was published on {place} {count} times and hashed {times} times"
    return f"all tensors of a replica matched the trainer's version {len(rows)} times"


def lost_asleep(frame: pd.DataFrame, config: ShareConfig) -> Iterator[str]:
    """Yield a violation per wake of a rank with other weights than it had when it fell asleep. At sleep_level=1 every wake must have the
    records of both; runs of older kits have none at all."""
    asleep: dict[tuple[str, int, int], str] = {}
    compared = Counter[tuple[str, int]]()
    for row in recorded_on_ranks(frame, MAIN, "kept", "pipeline", "replica", "when").to_dict("records"):
        rank = str(row["pipeline"]), int(row["replica"]), int(row["rank"])
        if row["when"] == "sleeps":
            asleep[rank] = row["text"]
        elif rank in asleep:
            compared[rank[:2]] += 1
            if asleep[rank] != row["text"]:
                yield f"replica {rank[1]} of {rank[0]} woke with other weights than those with which it fell asleep (rank {rank[2]})"
    if config.sleep_level != 1 or not (frame["metric"] == "kept").any():
        return
    for ledger in ledgers(frame, MAIN):
        for (name, replica), woken in Counter(replica_of(row) for row in ledger.of("expanded")).items():
            if (count := compared[name, replica]) < woken * config.loops[name].infer_tp:
                lacking(
                    frame,
                    f"replica {replica} of {name} woke {woken} times, and its weights were compared {count} times",
                )


MOST_IDLE = 0.4  # of the device time; rounding to whole replicas can leave a third idle


def devices_used(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Are devices in use while a pipeline has work for them?

    Counted is the time in which some pipeline has work and no plan is being carried out. The value is the share of it, over all devices, in
    which a device was idle although a sleeping replica of a pipeline with work could have woken on it.
    """
    shares: list[tuple[float, str]] = []
    is_split = False
    for where, ledger in every_ledger(frame, judged_phases(frame, config)):
        if ledger.limits.get("planner") == "static":
            is_split = True
        else:
            shares += idle_share(where, ledger)
    if not shares and is_split:
        raise NotMeasured("the planner static gives each pipeline equal devices, whether it has work or not")
    if not shares:
        raise Missing("no ledger of a planner that shares devices has a pipeline with work")
    return Measured(*max(shares))


def idle_share(where: str, ledger: DeskLedger) -> Iterator[tuple[float, str]]:
    spells = [*idle_while_needed(ledger)]
    whole = ledger.limit("devices", 0) * math.fsum(seconds for seconds, *_ in spells)
    if not whole:
        return
    idle = math.fsum(seconds * len(devices) for seconds, _, devices, _ in spells)
    longest = max(spells, key=lambda spell: spell[0] * len(spell[2]))
    seconds, row, devices, names = longest
    most = f"; longest: devices {devices} for {seconds:.3f} s until {row}, although {' and '.join(names)} could have woken a replica there"
    yield (
        idle / whole,
        f"{where}: devices were idle for {idle:.3f} of {whole:.3f} device-seconds" + (most if devices else ""),
    )


def no_thrash(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Does a pipeline make progress between two times that its replicas must sleep?"""
    answers: list[Measured] = []
    for where, ledger in every_ledger(frame, judged_phases(frame, config)):
        try:
            answer = sleeps_in_a_row(ledger)
        except Missing:  # a pipeline alone has no desk
            if not answers:
                raise
        else:
            answers.append(replace(answer, why=f"{where}: {answer.why}"))
    if not answers:
        raise Missing("no phase recorded a ledger of a desk")
    return max(answers, key=lambda answer: answer.value or 0.0)


# -- the same numbers -----------------------------------------------------------------------------------------------------------


def outcomes(frame: pd.DataFrame, phase: str, pipeline: str) -> dict[tuple[str, str], tuple[float | None, str]]:
    """Weights of each version, losses and norms of each update, tokens of each sample, in recorded order."""
    rows = frame[(frame["phase"] == phase) & frame["metric"].isin(OUTCOMES)].sort_values("time", kind="stable")
    numbers_by_key: dict[tuple[str, str], tuple[float | None, str]] = {}
    for metric, text, value, ids in zip(rows["metric"], rows["text"], rows["value"], rows["ids"], strict=True):
        known = dict(read_ids(ids))
        if known.pop("pipeline", "") == pipeline:
            key = metric, " ".join(f"{name}={known[name]}" for name in sorted(known))
            numbers_by_key[key] = None if metric.endswith("digest") else value, text
    return numbers_by_key


def wanted_outcomes(config: ShareConfig, pipeline: str) -> dict[str, int]:
    loop = config.loops[pipeline]
    samples = loop.steps * loop.groups * loop.group
    updates = samples // (loop.batch or loop.groups * loop.group)
    return {"digest": loop.steps + 1, "global_loss": updates, "grad_norm": updates, "tokens_digest": samples}


def same_numbers(frame: pd.DataFrame, config: Mapping[str, Any]) -> Violations:
    """Does each pipeline compute bit for bit what it computes alone?"""
    run = share_config(config)
    compared = [departed(frame, run, name, MAIN) for name in run.names]  # all, so that lacking records come first
    for violations, _ in compared:
        yield from violations
    count = sum(number for _, number in compared)
    return f"{count} losses, gradient norms, token and weight digests are identical bit for bit"


def departed(frame: pd.DataFrame, run: ShareConfig, name: str, phase: str) -> tuple[list[str], int]:
    """The outcomes of a pipeline in a phase that differ from those alone, in order, and the number of outcomes compared."""
    alone, shared = outcomes(frame, ALONE + name, name), outcomes(frame, phase, name)
    for where, recorded_there in ((ALONE + name, alone), (phase, shared)):
        for metric, number in wanted_outcomes(run, name).items():
            if (count := sum(key[0] == metric for key in recorded_there)) != number:
                lacking(
                    frame, f"pipeline {name} recorded {metric} {count} times in the phase {where}, expected {number}"
                )
    violations = [
        f"pipeline {name}, {metric} of {ids}: {describe(shared.get((metric, ids)))} in the phase {phase}, "
        f"{describe(outcome)} alone"
        for (metric, ids), outcome in alone.items()
        if shared.get((metric, ids)) != outcome
    ]
    return violations, len(alone)


def describe(outcome: tuple[float | None, str] | None) -> str:
    if outcome is None:
        return "nothing"
    number, text = outcome
    return text[:12] if number is None else repr(number)


def stale(config: Mapping[str, Any]) -> str:
    if (why := no_ranks(config)) or "pipelines" not in config:
        return why
    loops_of_run = share_config(config).loops.items()
    windows = [f"{name}.window={loop.window}" for name, loop in loops_of_run if loop.window != loop.own_window]
    if windows:
        return f"{', '.join(windows)}: the version that generates a sample depends on timing; use window=0"
    return ""


def namespaces_apart(frame: pd.DataFrame, config: Mapping[str, Any]) -> Violations:
    """Do the pipelines have separate weights and random numbers?

    Each draws its own, so none of their weights and samples are equal.
    """
    drawn = [outcomes(frame, MAIN, name) for name in share_config(config).names]
    count = 0
    for first, second in itertools.combinations(drawn, 2):
        common = [key for key in first if key in second and key[0] in ("digest", "tokens_digest")]
        if not common:
            lacking(frame, "the pipelines recorded no comparable weights or samples")
        count += len(common)
        for metric, ids in common:
            if first[metric, ids] == second[metric, ids]:
                yield f"{metric} of {ids} is the same in both pipelines"
    return f"{count} digests of weights and samples differ between the pipelines"


def alone_here(config: Mapping[str, Any]) -> str:
    if not no_ranks(config) and len(share_config(config).names) < 2:
        return "there is only one pipeline"
    return no_ranks(config)


def others_untouched(frame: pd.DataFrame, config: Mapping[str, Any]) -> Violations:
    """Is a pipeline unaffected when a replica of the other one sleeps or wakes?

    Process groups of every rank, compared with the phase in which its pipeline was alone; and memory of sleeping ranks while a replica
    of another pipeline sleeps or wakes.
    """
    levels = residents(frame, MAIN)
    yield from groups_moved(frame, share_config(config))
    if memory_source(frame, MAIN) == RESERVED:
        raise NotMeasured(
            "the GPU driver does not list the ranks' processes (a container, or parts of a GPU), so nothing outside them sees their memory"
        )
    held, count = leases(frame, MAIN)[0], 0
    moves = [span for ledger in ledgers(frame, MAIN) for span in spans(ledger) if span.state in ("waking", "sleeping")]
    for move, (owner, level) in itertools.product(moves, levels.items()):
        busy = {lease.owner for lease in held if lease.since < move.right and lease.until > move.left}
        if owner.partition(".")[0] != move.pipeline and role_of(owner) not in busy:
            count += 1
            grown = max(level.within(move.left, move.right), default=0.0) - level.at(move.left)
            if grown > SEEN_BYTES:
                yield f"{owner} grew by {grown / MIB:.1f} MiB asleep while a replica of {move.pipeline} fell asleep or woke"
    if not count:
        raise NotMeasured("no replica fell asleep or woke while a rank of the other pipeline slept")
    return f"{counted(count, 'reading')} of sleeping ranks while a replica of the other pipeline fell asleep or woke"


def name_rank(config: ShareConfig, rank: int) -> str:
    """The pipeline and role of a rank, such as "b trainer (rank 3)"."""
    counts = [
        (f"{name} {role}", count) for name, loop in config.loops.items() for role, count in role_names(loop).items()
    ]
    names = [role for role, count in counts for _ in range(count)]
    return f"{names[rank]} (rank {rank})" if 0 <= rank < len(names) else f"rank {rank}"


def groups_moved(frame: pd.DataFrame, run: ShareConfig) -> Iterator[str]:
    rows = frame[frame["metric"] == "groups"]
    after = rows[rows["phase"] == MAIN].groupby("rank")["value"].last()
    for phase in (ALONE + name for name in run.names):
        before = rows[rows["phase"] == phase].groupby("rank")["value"].last()
        for rank in before.index.intersection(after.index):
            if before[rank] != after[rank]:
                yield f"{name_rank(run, rank)} has {after[rank]:g} process groups after the phase shared, {before[rank]:g} after {phase}"


def dead_and_seen(frame: pd.DataFrame, config: ShareConfig) -> Iterator[str]:
    """Devices that a dead pipeline still held, according to observers, after the desk had removed it; and outcomes of the others that
    differ from those alone."""
    dead = {name for ledger in ledgers(frame, "rehearse") for name in ledger.dead}
    for name in [name for name, loop in config.loops.items() if loop.window == loop.own_window and name not in dead]:
        yield from departed(frame, config, name, "rehearse")[0]
    for where, ledger in every_ledger(frame, ("rehearse",)):
        for name in ledger.dead:
            gone = next((row.time for row in ledger.of("gone") if row.who == name), math.inf)
            last = ledger.rows[-1].time
            for device, seen in sights(frame, "rehearse").items():
                late = [sight for sight in seen if gone + BETWEEN_LOOKS_S < sight.since <= last]
                for owner in (owner for sight in late for owner in sight.owners if owner.startswith(f"{name}.")):
                    yield f"{where}: {owner} still holds device {device} after the desk removed {name}"


def loops_right(frame: pd.DataFrame, config: Mapping[str, Any]) -> Violations:
    """Does each pipeline's loop satisfy every rule of the lab stream?

    Every rule of a loop's ledger, for each pipeline, alone and shared, except that a step may wait for all its groups.
    """
    count, asked = 0, set[str]()
    for where, loop in loops(frame, (MAIN, *(() if own_code(config, OWN) else alone_phases(frame)))):
        for name, answer in judged_loop(loop):
            count += 1
            asked.add(name)
            if answer.value:
                yield f"{where}: {name}: {answer.why}"
    if not count:
        raise Missing("no pipeline's loop was recorded with its settings (`capacity`)")
    return f"{counted(len(asked), 'rule')} of the lab stream, checked {count} times, hold in every loop"


def gate_shown(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Did the gate's scenario occur?

    Only then do the other rules tell something about it.
    """
    scenario, count_in = GATES[config["gate"]]
    count = sum(map(count_in, ledgers(frame, MAIN)))
    return Measured(float(count), f"{scenario}: {count} times" if count else f"never happened: {scenario}")


def returns(ledger: DeskLedger, *, beside_others: bool) -> int:
    """How often a replica slept, while others of its pipeline served or while none did, and later served again."""
    serving: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
    asleep: set[tuple[str, int]] = set()
    count = 0
    for row in ledger.of("published", "left"):
        if row.event == "published":
            serving[row.who].add(replica_of(row))
            count += replica_of(row) in asleep
            asleep.discard(replica_of(row))
        else:
            serving[row.who].discard(replica_of(row))
            asleep |= {replica_of(row)} if bool(serving[row.who]) == beside_others else set()
    return count


def hand_overs(ledger: DeskLedger) -> int:
    rows = [row for row in ledger.of("granted", "release") if row.get("kind") == "training"]
    return sum(row.event == "release" and after.event == "granted" for row, after in itertools.pairwise(rows))


def exchanges(ledger: DeskLedger) -> int:
    last: dict[int, str] = {}
    count = 0
    for row in ledger.of("expand"):
        devices = numbers(row["devices"])
        count += any(last.get(device, row.who) != row.who for device in devices)
        last |= dict.fromkeys(devices, row.who)
    return count


# The scenario of each gate, and a function that counts it in a ledger.
GATES: Mapping[str, tuple[str, Callable[[DeskLedger], int]]] = {
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
    """Are all files, sockets, threads, processes and shared-memory segments gone at the end?

    Counts of every rank at the end compared with those before the first loop, and process groups after each loop compared with those
    before it. The compiler's folder from the first step is expected.
    """
    import pandas as pd

    if moved := list(groups_moved(frame, share_config(config))):
        more = f"; {len(moved) - 1} more" if len(moved) > 1 else ""
        return Measured(float(len(moved)), moved[0] + more)
    kept = frame["metric"] == "temp_files"
    settled = frame[kept & (frame["phase"] == MAIN)].assign(phase="prepare")
    counts = pd.concat([frame[~kept | (frame["phase"] != "prepare")], settled])
    ended = frame[frame["phase"] == "end"]["rank"].nunique()  # a rehearsal may have killed the others
    most = largest(*COUNTS, after="end", base="prepare")(counts, {**config, "ranks": ended})
    return with_names(most, config)


def with_names(answer: Measured, config: Mapping[str, Any]) -> Measured:
    """The answer with the pipeline and role of each rank that its words name."""
    return replace(answer, why=RANK.sub(lambda rank: name_rank(share_config(config), int(rank[1])), answer.why))


def piled_up(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    return with_names(nothing_piles_up(frame, config), config)


def desk_is_own(config: Mapping[str, Any]) -> str:
    own = own_code(config, ("scheduler",))
    return f"how devices are divided is up to scheduler={config['scheduler']}" if own else ""


def may_replace(config: Mapping[str, Any]) -> bool:
    """Whether new ranks may replace dead ones: in a simulated run, and in another system's ledger. The lab does not start new ranks."""
    return bool(no_ranks(config))


BY_RANKS_TOO = {
    "one_owner": owned_twice,
    "drained_before_sleep": slept_in_flight,
    "dead_pipeline_leaves": dead_and_seen,
}

RULES: tuple[Rule, ...] = (
    rule(gate_shown, limit=1, better=">=", when=lambda config: bool(config.get("gate"))),
    rule(same_numbers, cannot=stale),
    rule(weights_after_wake, cannot=no_ranks),
    rule(peak_fits, limit=SEEN_BYTES / MIB, unit="MiB", cannot=no_ranks),
    rule(memory_down_asleep, limit=0.5, cannot=no_ranks),
    rule(groups_down_asleep, cannot=keeps_groups),
    rule(others_untouched, cannot=alone_here),
    rule(namespaces_apart, cannot=alone_here),
    rule(nothing_left, cannot=no_ranks),
    replace(PILES_UP, measure=piled_up),
    rule(
        no_world_fails,
        when=lambda config: bool(config["worlds"] and own_code(config, OWN)),
        cannot=lambda config: in_a_notebook(config, OWN),
    ),
    *ADAPTER_RULES,
    rule(loops_right),
    rule(devices_used, limit=MOST_IDLE),
    rule(no_thrash, limit=MOST_SLEEPS),
    *(
        Rule(
            by_ledger.__name__,
            by_ledger.__doc__ or "",
            with_ranks(by_ledger, BY_RANKS_TOO[by_ledger.__name__])
            if by_ledger.__name__ in BY_RANKS_TOO
            else of_ledgers(by_ledger),
            when=may_replace if by_ledger is dead_replaced else None,
            cannot=desk_is_own if by_ledger in judge.BY_DEMAND else None,
        )
        for by_ledger in judge.RULES
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
