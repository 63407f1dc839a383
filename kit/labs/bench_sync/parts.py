"""The parts of the bench of weight transfer."""

from __future__ import annotations

import itertools
import math
import os
import secrets
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from kit.errors import BadInput
from kit.labs.bench import KIT, Bench, Part, Samples, ratios, run_part, show_progress, unmeasured
from kit.labs.bench_sync.engine import engine_sync
from kit.labs.bench_sync.lab import (
    BACK,
    GPUS,
    HOST,
    OUT,
    PACKAGES,
    PEER,
    WITHIN,
    BenchSyncConfig,
    Shape,
    place_for,
    shape_of,
)
from kit.labs.bench_sync.versions import changed_words
from kit.labs.lab import Drive
from kit.machine import GIB, KIB, MIB, free_memory
from kit.results import Run, with_ids

Seconds = Mapping[str, Sequence[float]]
WAYS = "kit.labs.bench_sync.ranks.ways"
GB = 1e9
# Copies of the weights on the sender: the weights, memcpy's target, the segment, and the cache with its spare room.
COPIES = 5
# Otherwise copies below about 190 MB go through the processor's cache, which first fetches the bytes to be overwritten.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x8000"}
# The limit is that of a call with all turns on a busy machine.
WORLD: dict[str, Any] = {"env": ENVIRONMENT, "timeout_s": 1800.0}
NOT_HERE = "not installed"
QUICKEST = "xxh3"
VERIFYING = 3  # ranks: two ends, and one that looks on
OVER_MEMCPY = ("shm", "shm+whole", "shm+whole+fresh", "shm+cache", "shm+expand")
GROUPS = ("broadcast", "per-tensor", "rendezvous")

RANKS = {"ipc": 2, "shm": 2, "broadcast": 3}  # a group is a proper subset of the World: one rank is outside
VISIBLE = "CUDA_VISIBLE_DEVICES"
BLOCK = 2**28
ROUNDS = 7
CYCLES, SIZE = 3, "small"  # of the sync lab, for what varies neither from one to the next nor with the size


def ask_rates(bench: Bench, shape: Shape, ways: Sequence[str], *, receivers: int, rounds: int = 0) -> dict[str, Any]:
    """The sender's samples of every way, and the number of bytes. A sender, the receivers, and one uninvolved rank, on the CPU."""
    needed, free = (COPIES + receivers) * shape.size(), free_memory()
    if needed > free:
        raise BadInput(f"{shape.name} needs {needed / GIB:.1f} GiB here, but only {free / GIB:.1f} GiB are free")
    asked: dict[str, Any] = {"shape": shape.arguments(), "receivers": receivers, "ways": list(ways)}
    asked |= {"rounds": rounds or bench.config.rounds, "meeting": f"bench-{secrets.token_hex(8)}"}
    with bench.world(receivers + 2, device="cpu", **WORLD) as world:
        answer: dict[str, Any] = world.call(f"{WAYS}:transfer_seconds", **asked)[0]
    return answer


def transfer_times(title: str, answer: dict[str, Any], names: Sequence[str], **ids: int) -> Iterator[Samples]:
    """Seconds of each way, with its rate."""
    for name in names:
        values, way = answer["seconds"][name], way_title(name)
        note = f"{answer['bytes'] / statistics.median(values) / GB:.2f} GB/s"
        yield Samples(what=f"{title}: {way}", values=values, who=who(name), note=note, ids={**ids, "way": way})


def way_title(name: str) -> str:
    rest, _, mib = name.partition("@")
    kind, *extras = rest.removeprefix("file:").split("+")
    if name == "copies":
        return "a copy on each end at once"
    words = {
        "cache": "by way of the cache",
        "expand": "from the cache",
        "whole": "in one segment",
        "fresh": "mapped anew",
        "one": "to the first alone",
    }
    size = [f"buckets of {mib} MiB"] * bool(mib)
    return ", ".join([kind, *(words.get(extra, f"verified by {extra}") for extra in extras), *size])


def who(name: str) -> str:
    return {"memcpy": "memcpy", "copies": "memcpy", **PACKAGES}.get(name, KIT)


def compare_transports(bench: Bench, shape: Shape) -> Iterator[Samples]:
    """Every transport to one receiver; shared memory compared with one copy and with groups, and automatic with fixed bucket sizes."""
    fixed = [f"broadcast@{mib:g}" for mib in bench.config.buckets_mib]
    ways = ["memcpy", "copies", *OVER_MEMCPY, "serialize", *GROUPS, *fixed]
    answer = ask_rates(bench, shape, ways, receivers=1)
    seconds, title = answer["seconds"], f"{shape.name}, 1 receiver"
    yield from transfer_times(title, answer, ways)
    yield over_memcpy(title, seconds, "copies")
    rules = (
        {"shm": "shm_over_memcpy", "shm+expand": "expand_over_memcpy"}
        if shape.large
        else {"shm": "small_shm_over_memcpy"}
    )
    for name in OVER_MEMCPY:
        yield over_memcpy(title, seconds, name, rules.get(name, ""))
    if shape.large:
        words = f"{title}: shm over a copy on each end at once, time"
        yield ratios("shm_over_copies", words, seconds["shm"], seconds["copies"])
    group, fastest = (
        min(names, key=lambda name: statistics.median(seconds[name]))
        for names in ([*GROUPS, *fixed], ["per-tensor", *fixed])
    )
    best = f"{title}: shm over the best by a group, time"
    yield ratios("shm_over_group", best, seconds["shm"], seconds[group], note=f"that is {way_title(group)}")
    automatic = f"{title}: broadcast over the best of per-tensor and fixed sizes, time"
    note = f"that is {way_title(fastest)}; automatic buckets are of {answer['automatic'] / MIB:.3g} MiB"
    yield ratios("automatic_over_fixed", automatic, seconds["broadcast"], seconds[fastest], note=note)


def over_memcpy(title: str, seconds: Seconds, name: str, rule: str = "") -> Samples:
    words = f"{title}: {way_title(name)}, time over memcpy's"
    samples = ratios(rule or "over_memcpy", words, seconds[name], seconds["memcpy"], who=who(name))
    return replace(samples, note=f"{1 / samples.median:.2f} of its speed")


def two_receivers(bench: Bench, shape: Shape) -> Iterator[Samples]:
    """One copy that both map, compared with memcpy and with the same copy for one of them."""
    ways = ["memcpy", "shm", "shm+one", "broadcast", "serialize"]
    answer = ask_rates(bench, shape, ways, receivers=2)
    title, seconds = f"{shape.name}, 2 receivers", answer["seconds"]
    yield from transfer_times(title, answer, ways)
    for name in ("shm", "broadcast", "serialize"):
        yield over_memcpy(title, seconds, name)
    yield ratios("two_over_one", f"{title}: shm over shm to the first alone, time", seconds["shm"], seconds["shm+one"])


def cost_of_digests(bench: Bench, shape: Shape) -> Iterator[Samples]:
    """The cost of digests of every tensor on both ends, computed during the transfer."""
    with bench.world(1, device="cpu", **WORLD) as world:
        there = set(world.call(f"{WAYS}:hash_seconds", size=4096, count=1, rounds=1)[0])
    algorithms = bench.config.verify.split(",")
    ways = ["shm", *(f"shm+{name}" for name in algorithms if name in there)]
    answer = ask_rates(bench, shape, ways, receivers=1)
    title, seconds = f"{shape.name}, 1 receiver", answer["seconds"]
    yield from transfer_times(title, answer, ways[1:])
    for name in ways[1:]:
        words = f"{title}: {way_title(name)}, time over unverified"
        rule = ("verified" if shape.large else "small_verified") if name == f"shm+{QUICKEST}" else "over_unverified"
        yield ratios(rule, words, seconds[name], seconds["shm"])
        if rule == "verified":
            beside = f"{words}, where digests have cores of their own"
            if len(os.sched_getaffinity(0)) >= 2 * VERIFYING:
                yield ratios("verified_beside", beside, seconds[name], seconds["shm"])
            else:
                why = f"{VERIFYING} ranks have a second core each from {2 * VERIFYING} cores on"
                yield Samples(what=beside, metric="verified_beside", unit="x", note=why)
    for name in algorithms:
        if name not in there:
            yield Samples(what=f"{title}: shm, verified by {name}", note=NOT_HERE)


def through_files(bench: Bench, shape: Shape) -> Iterator[Samples]:
    """Compared with a common alternative: files in memory."""
    there = [name for name, package in PACKAGES.items() if find_spec(package)]
    answer = ask_rates(bench, shape, ["shm", *there], receivers=1, rounds=bench.config.slow_rounds)
    title, seconds, where = f"{shape.name}, 1 receiver, files", answer["seconds"], place_for(shape.size())
    place = f"in {where}" if where else "in the temporary folder, because memory has too little room"
    yield from transfer_times(title, answer, there)
    for name in PACKAGES:
        if name in there:
            words = f"{title}: {way_title(name)} over shm, time"
            yield ratios("files_over_shm", words, seconds[name], seconds["shm"], who=who(name), note=place)
        else:
            yield Samples(what=f"{title}: {way_title(name)}", who=who(name), note=NOT_HERE)


# -- two terms: time = tensors x seconds of a tensor + bytes / bandwidth -----------------------------------------------------

TERM_WAYS = ("shm", "shm+cache", "shm+expand", "serialize", *GROUPS)
# Bytes of a tensor: the first and the last are fitted, the middle one is predicted.
EACH = (4 * KIB, 64 * KIB, 4 * MIB)


def two_terms(bench: Bench) -> Iterator[Samples]:
    """Every transport over two sizes that differ in bytes and in the number of tensors, in one loop: the two terms of each turn, and how
    well their medians predict a size between them."""
    shapes = [
        Shape(name=f"{mib} MiB", count=mib * MIB // each, bytes=each)
        for mib, each in zip(bench.config.terms_mib, EACH, strict=True)
    ]
    asked: dict[str, Any] = {"shapes": [shape.arguments() for shape in shapes], "rounds": bench.config.rounds}
    asked |= {"ways": ["memcpy", *TERM_WAYS], "meeting": f"bench-{secrets.token_hex(8)}"}
    with bench.world(3, device="cpu", **WORLD) as world:
        many, middle, large = world.call(f"{WAYS}:seconds_by_shape", **asked)[0]
    first, between, last = shapes
    memcpy = last.size() / statistics.median(large["memcpy"]) / GB
    for name in TERM_WAYS:
        turns = [terms_of(*pair, first, last) for pair in zip(many[name], large[name], strict=True)]
        title, ids = f"two terms: {way_title(name)}", {"way": way_title(name)}
        a_tensor, a_byte = (statistics.median(term) for term in zip(*turns, strict=True))
        rate = f"{1 / a_byte / GB:.2f} GB/s, and memcpy {memcpy:.2f} GB/s" if a_byte > 0 else ""
        yield Samples(what=f"{title}, for each tensor", values=[turn[0] for turn in turns], ids=ids)
        yield Samples(what=f"{title}, for each GB", values=[turn[1] * GB for turn in turns], note=rate, ids=ids)
        predicted = between.count * a_tensor + between.size() * a_byte
        off = [max(taken / predicted, predicted / taken) if predicted > 0 else math.inf for taken in middle[name]]
        note = f"predicted {1e3 * predicted:.3g} ms, taken {1e3 * statistics.median(middle[name]):.3g} ms"
        words = f"{title}, {between.name} in tensors of 64 KiB predicted, off by"
        yield Samples(what=words, values=off, metric="terms_predict", unit="x", note=note, ids=ids)


def terms_of(many: float, large: float, first: Shape, last: Shape) -> tuple[float, float]:
    """Seconds of a tensor and of a byte that give both times exactly."""
    crossed = first.count * last.size() - last.count * first.size()
    a_tensor = (many * last.size() - large * first.size()) / crossed
    return a_tensor, (large * first.count - many * last.count) / crossed


# -- how long serving stops --------------------------------------------------------------------------------------------------

STALLS = "kit.labs.bench_sync.ranks.stalls"


def pauses(bench: Bench) -> Iterator[Samples]:
    """Each path with a replica whose forwards run throughout: the time without one, beside the time of the sync."""
    asked: dict[str, Any] = {"mib": bench.config.stall_mib, "each_mib": 4, "rounds": bench.config.rounds}
    with bench.world(3, device="cpu", **WORLD) as world:
        answers = world.call(f"{STALLS}:stalls", meeting=f"bench-{secrets.token_hex(8)}", **asked)
    answer, copied = answers[0], answers[1].pop(HOST)
    del answer[HOST]
    for path, turns in answer.items():
        title, ids = f"a sync of {bench.config.stall_mib} MiB, {path}", {"path": path}
        totals, paused, served, read = zip(*turns, strict=True)
        yield Samples(what=f"{title}: total", values=totals, ids=ids)
        yield Samples(what=f"{title}: without a forward", values=paused, ids=ids)
        share = [100 * without / total for without, total in zip(paused, totals, strict=True)]
        by = "by another replica" if "expansion" in path else "by the same replica"
        note = f"{statistics.median(served):.0f} forwards meanwhile {by}"
        metric = "staged_pause" if path == "staged" else "pause"
        yield Samples(
            what=f"{title}: share without a forward", values=share, metric=metric, unit="%", note=note, ids=ids
        )
        yield Samples(what=f"{title}: first pass over the weights", values=read, ids=ids)
        words = f"{title}: total, time over memcpy's"
        yield ratios("sync_over_memcpy", words, totals, copied)
    woken = {path: [total + read for total, _, _, read in answer[path]] for path in ("expansion", "adopted expansion")}
    words = f"a sync of {bench.config.stall_mib} MiB: adopted expansion over expansion, both with the first pass, time"
    yield ratios("adopted_over_copied", words, woken["adopted expansion"], woken["expansion"])


# -- host memory of an offloaded trainer -----------------------------------------------------------------------------------


def host_copies(bench: Bench) -> Iterator[Samples]:
    """Copies of the weights beside the buckets, as the sync lab counts them at every offload of its trainer."""
    settings: dict[str, Any] = {"size": SIZE, "cycles": CYCLES, "sweep": False}
    for arena in ("own", "cache"):
        frame = bench.lab("sync", arena, arena=arena, **settings).frame()
        beside = frame[frame["metric"] == "host_copies"]["value"].tolist()
        yield Samples(
            what=f"an offloaded trainer, {SIZE}, arena={arena}: copies of the weights beside the buckets",
            values=beside,
            metric="cached_once" if arena == "cache" else "copies",
            unit="copies",
            note=f"on the host {1 + statistics.median(beside):.2f} times" if beside else "",
            ids={"arena": arena},
        )


def digest_rates(bench: Bench) -> Iterator[Samples]:
    """Seconds for 10^9 bytes on one core, in tensors of 4 MiB and of 32 KiB."""
    with bench.world(1, device="cpu", **WORLD) as world:
        for name, size in (("4 MiB", 4 * MIB), ("32 KiB", 32 * KIB)):
            asked = {"size": size, "count": max(1, bench.config.hash_mib * MIB // size), "rounds": bench.config.rounds}
            title, seconds = f"digests of 1 GB in tensors of {name}", world.call(f"{WAYS}:hash_seconds", **asked)[0]
            for algorithm, values in seconds.items():
                yield Samples(what=f"{title}: {algorithm}", values=values)
            if "xxh3" not in seconds:
                yield Samples(what=f"{title}: xxh3", note=NOT_HERE)


def growing_weights(bench: Bench, megabytes: Sequence[int], receivers: Sequence[int]) -> Iterator[Samples]:
    """Larger weights to one receiver, or the same weights to more receivers."""
    for size, count in itertools.product(megabytes, receivers):
        shape = Shape(name=f"{size} MB in tensors of 1 MB", count=size, bytes=10**6)
        title = f"growth: {size} MB, {count} receiver{'s' * (count > 1)}"
        show_progress(title)
        ways = ["memcpy", "shm", "broadcast"]
        answer = ask_rates(bench, shape, ways, receivers=count)
        yield from transfer_times(title, answer, ways, megabytes=size, receivers=count)


# -- on CUDA: the lab's syncs by each transport, beside plain copies -------------------------------------------------------
#
# A rate counts each copied byte once, although it is read and written. Times are the sender's, from when all are ready until the receivers
# have applied everything, as in the lab's comparison of transports. Copies are measured in the same ranks just before. If two ranks share a
# GPU, NCCL may refuse; the row then gives the reason. Not tested on a GPU yet; the tests run the same code on the CPU.


def gpu_transport(bench: Bench, name: str) -> Iterator[Samples]:
    """One transport. Without a GPU a row gives the reason."""
    if bench.device == "cpu":
        why = "the CPU was requested, or this machine has no GPU driver"
        yield unmeasured(f"on GPUs: {name}", why)
    else:
        yield from by_transport(bench, name)


def by_transport(bench: Bench, name: str) -> Iterator[Samples]:
    """Ceilings, then versions, in the same ranks; the first version, which allocates pages and connections, is not reported."""
    env = {VISIBLE: os.environ.get(VISIBLE, "0").partition(",")[0]} if name == "ipc" else None  # both ends on one GPU
    with bench.world(RANKS[name], env=env, preload=("megatron.core",), timeout_s=600) as world:
        seats = [seat["device"] for seat in world.status()]
        copies: dict[str, Any] = {"size": BLOCK, "rounds": ROUNDS, "device": seats[0]}
        (plain,) = world.call(f"{WAYS}:ceiling_copies", ranks=[0], timeout_s=600, **copies)
        settings: dict[str, Any] = {"tp": 1, "replicas": 1, "infer_tp": 1, "placement": "apart", "refresh": "paused"}
        settings |= {"transport": name, "verify": "none", "sweep": False, "ranks": RANKS[name]}
        settings |= {"size": bench.config.model, "cycles": bench.config.rounds + 1}
        run = bench.lab("sync", name, world=world, timeout_s=600, **settings)
    yield from beside_copies(run, name, plain, same=seats[0] == seats[-1])


def beside_copies(run: Run, name: str, plain: Seconds, *, same: bool) -> Iterator[Samples]:
    """The transport's time with its ceiling, and the ceilings."""
    frame = run.frame()
    sent = frame[(frame["phase"] == "refresh") & (frame["rank"] == 0)]
    size = int(sent[sent["metric"] == "bytes"]["value"].max())
    events = with_ids(sent[sent["metric"] == "event"], "event").set_index("event")
    seconds = []
    for cycle in sorted(sent["cycle"].unique())[1:]:
        at = events[events["cycle"] == cycle]["value"]
        seconds.append(float(at["apply"] - at["ready"]))
    least = {title: statistics.median(plain[title]) * size / BLOCK for title in ceiling_of(name, plain, same=same)}
    slowest = max(least, key=least.__getitem__)
    taken, device = statistics.median(seconds), "same" if same else "another"
    share = f"{least[slowest] / taken:.2f} of {slowest} at {size / least[slowest] / GB:.2f} GB/s"
    where = f"{run.config['size']}, 1 receiver on {'the same' if same else 'another'} device"
    yield Samples(
        what=f"{where}: {name}, from all ready to applied",
        values=seconds,
        ceiling=least[slowest],
        note=f"{size / taken / GB:.2f} GB/s, {share}",
        ids={"transport": name, "bytes": size, "device": device},
    )
    for title, copied in plain.items():
        about: dict[str, Any] = {"who": "plain copy", "note": f"{BLOCK / statistics.median(copied) / GB:.2f} GB/s"}
        about["ids"] = {"transport": name, "bytes": BLOCK, "copy": title}
        yield Samples(what=f"{name}: {BLOCK >> 20} MiB, {title}", values=copied, **about)


def ceiling_of(name: str, plain: Seconds, *, same: bool) -> list[str]:
    """The plain copies that bound a transport: shared memory goes through the host, NCCL from GPU to GPU."""
    if WITHIN not in plain:
        return [HOST]
    peers = [title for title in plain if title.startswith(PEER)]
    if name == "shm" or not (same or peers):
        return [OUT, BACK]
    return [WITHIN] if same else peers


KINDS: dict[str, Callable[..., Iterator[Samples]]] = {
    "transports": compare_transports,
    "receivers": two_receivers,
    "verified": cost_of_digests,
    "files": through_files,
}


def measure_sync(drive: Drive) -> None:
    config: BenchSyncConfig = drive.config
    parts: dict[str, Part] = {
        "terms": two_terms,
        "stalls": pauses,
        "digests": digest_rates,
        "engine": engine_sync,
        "growth.bytes": partial(growing_weights, megabytes=config.growth_mb, receivers=[1]),
        "growth.receivers": partial(growing_weights, megabytes=[config.receivers_mb], receivers=config.receivers),
        "arena": host_copies,
        "deltas": changed_words,
        **{f"gpus.{name}": partial(gpu_transport, name=name) for name in GPUS},
    }
    shape, _, kind = drive.phase.partition(".")
    run_part(drive, parts.get(drive.phase) or partial(KINDS[kind], shape=shape_of(config, shape)))
