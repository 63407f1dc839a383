"""`kit bench sync`: the speed of weight transfer from a trainer to receivers, compared with one large copy and with files.

Ratios are of times, turn by turn: 1.25 times memcpy's time is 0.8 of its speed. All ranks share this machine's cores and memory: with
fewer cores than working ranks, parallel work waits. Ranks import this module too, so it imports little.
"""

from __future__ import annotations

import os
import secrets
import shutil
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.bench.session import KIT, Bench, Part, Row, Session, over, progress, row, unmeasured
from kit.errors import BadInput
from kit.machine import free_memory
from kit.megatron.config import ModelConfig, model_bytes
from kit.world import World

if TYPE_CHECKING:
    from kit.results import Run

Seconds = Mapping[str, Sequence[float]]
ONRANKS = "kit.bench.onranks.sync"
SLOW = 1800.0  # seconds; time limit of a call with all turns on a busy machine
MIB, GIB, GB = 2**20, 2**30, 1e9
LARGE, SMALL = 1 / 0.8, 1 / 0.6  # of memcpy's time: for tensors of a MiB and more, and for smaller ones
OVER_GROUPS = 1 / 4
SLACK = 1.1
# Copies of the weights on the sender: the weights, memcpy's target, the segment, and the cache with its spare room.
COPIES = 5
# Otherwise copies below about 190 MB go through the processor's cache, which first fetches the bytes to be overwritten.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x8000"}
NOT_HERE = "not installed"
# Ways through files, and the packages that they need.
FILES = {
    "file:safetensors": "docs.examples.weight_files:Safetensors",
    "file:dcp": "docs.examples.weight_files:Checkpoint",
}
PACKAGES = {"file:safetensors": "safetensors", "file:dcp": "torch"}
OVER_MEMCPY = ("shm", "shm+whole", "shm+whole+fresh", "shm+cache")
GROUPS = ("broadcast", "per-tensor", "rendezvous")

IN_MEMORY = Path("/dev/shm")  # noqa: S108 - this path itself is measured
SPARE = 1.25  # a checkpoint is slightly larger than its tensors
# Names of plain copies; the number of the other GPU follows `PEER`.
HOST, WITHIN, OUT, BACK, PEER = "memcpy", "within the GPU", "GPU to pinned memory", "pinned memory to GPU", "to GPU"
RANKS = {"ipc": 2, "shm": 2, "broadcast": 3}  # a group is a proper subset of the World: one rank is outside
VISIBLE = "CUDA_VISIBLE_DEVICES"
BLOCK = 2**28
ROUNDS = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Weights: a model's, or `count` tensors of `each` bytes. `at_most` limits shared memory's time as a multiple of memcpy's; `key`
    names the parts."""

    key: str
    name: str
    at_most: float
    model: str = ""
    count: int = 0
    each: int = 0

    def arguments(self) -> dict[str, Any]:
        return {"model": self.model} if self.model else {"count": self.count, "each": self.each}

    def size(self) -> int:
        if not self.model:
            return self.count * self.each
        return model_bytes(ModelConfig(size=self.model, dtype="bfloat16"), ranks=1)["params"]


SHAPES = (
    Shape(key="model", name="qwen2.5-0.5b in bfloat16", model="qwen2.5-0.5b", at_most=LARGE),
    Shape(key="small", name="8192 x 32 KiB", count=8192, each=32 * 2**10, at_most=SMALL),
    Shape(key="large", name="64 x 4 MiB", count=64, each=4 * MIB, at_most=LARGE),
)


def parts(
    device: str,
    *,
    shapes: Sequence[Shape] = SHAPES,
    rounds: int = 7,
    slow_rounds: int = 2,
    buckets_mib: Sequence[float] = (1, 4, 8, 16, 64),
    hash_mib: int = 256,
    verify: Sequence[str] = ("xxh3", "sha256"),
    growth_mb: Sequence[int] = (10, 100, 1000, 2000),
    receivers: Sequence[int] = (1, 2, 4),
    receivers_mb: int = 100,
) -> dict[str, Part]:
    """All parts except those on GPUs share one World on the CPU: a sender, the receivers, and one uninvolved rank. GPU parts come first,
    because GPU time is scarcest. `slow_rounds` is for transfers through files."""

    def on(work: Any, *args: Any, rounds: int = rounds) -> Part:
        def part(session: Session) -> Iterable[Row]:
            world = session.shared(max(2, *receivers) + 2, device="cpu", env=ENVIRONMENT, timeout_s=SLOW)
            rows: Iterable[Row] = work(world, *args, rounds=rounds)
            return rows

        return part

    by_gpu: dict[str, Part] = {
        f"gpus.{name}": partial(on_gpus, name=name, model="qwen2.5-0.5b", cycles=rounds) for name in RANKS
    }
    made: dict[str, Part] = {}
    for shape in shapes:
        made |= {
            f"{shape.key}.transports": on(transports, shape, buckets_mib),
            f"{shape.key}.receivers": on(two_receivers, shape),
            f"{shape.key}.verified": on(verified, shape, verify),
            f"{shape.key}.files": on(through_files, shape, rounds=slow_rounds),
        }
    made["digests"] = on(digests, hash_mib)
    made["growth.bytes"] = on(growth, growth_mb, [1])
    made["growth.receivers"] = on(growth, [receivers_mb], receivers)
    return by_gpu | made if device == "cuda" else made | by_gpu


def rates(world: World, shape: Shape, ways: Sequence[str], *, receivers: int, rounds: int) -> dict[str, Any]:
    """The sender's samples of every way, and the number of bytes."""
    needed, free = (COPIES + receivers) * shape.size(), free_memory()
    if needed > free:
        raise BadInput(f"{shape.name} needs {needed / GIB:.1f} GiB here, but only {free / GIB:.1f} GiB are free")
    asked: dict[str, Any] = {"shape": shape.arguments(), "receivers": receivers, "ways": list(ways), "rounds": rounds}
    answer: dict[str, Any] = world.call(f"{ONRANKS}:rates", **asked, meeting=f"bench-{secrets.token_hex(8)}")[0]
    return answer


def times(what: str, answer: dict[str, Any], names: Sequence[str], **ids: float) -> list[Row]:
    """Seconds of each way, with its rate."""

    def one(name: str, taken: Sequence[float]) -> Row:
        note, way = f"{answer['bytes'] / statistics.median(taken) / GB:.2f} GB/s", called(name)
        return row(f"{what}: {way}", taken, who=who(name), note=note, ids={**ids, "way": way})

    return [one(name, answer["seconds"][name]) for name in names]


def called(name: str) -> str:
    rest, _, mib = name.partition("@")
    kind, *extras = rest.removeprefix("file:").split("+")
    if name == "copies":
        return "a copy on each end at once"
    words = {"cache": "by way of the cache", "whole": "in one segment", "fresh": "mapped anew"}
    size = [f"buckets of {mib} MiB"] * bool(mib)
    return ", ".join([kind, *(words.get(extra, f"verified by {extra}") for extra in extras), *size])


def who(name: str) -> str:
    return {"memcpy": "memcpy", "copies": "memcpy", **PACKAGES}.get(name, KIT)


# -- the parts -----------------------------------------------------------------------------------------------------------


def transports(world: World, shape: Shape, buckets_mib: Sequence[float], *, rounds: int) -> list[Row]:
    """Every transport to one receiver; shared memory compared with one copy and with groups, and automatic with fixed bucket sizes."""
    fixed = [f"broadcast@{mib:g}" for mib in buckets_mib]
    ways = ["memcpy", "copies", *OVER_MEMCPY, "serialize", *GROUPS, *fixed]
    answer = rates(world, shape, ways, receivers=1, rounds=rounds)
    seconds, what = answer["seconds"], f"{shape.name}, 1 receiver"
    group, other = (
        min(names, key=lambda name: statistics.median(seconds[name]))
        for names in ([*GROUPS, *fixed], ["per-tensor", *fixed])
    )
    best = f"{what}: shm over the best by a group, time"
    automatic = f"{what}: broadcast over the best of per-tensor and fixed sizes, time"
    note = f"that is {called(other)}; automatic buckets are of {answer['automatic'] / MIB:.3g} MiB"
    return [
        *times(what, answer, ways),
        over_memcpy(what, seconds, "copies"),
        *(over_memcpy(what, seconds, name, shape.at_most if name == "shm" else None) for name in OVER_MEMCPY),
        over(best, seconds["shm"], seconds[group], limit=OVER_GROUPS, note=f"that is {called(group)}"),
        over(automatic, seconds["broadcast"], seconds[other], limit=SLACK, note=note),
    ]


def over_memcpy(what: str, seconds: Seconds, name: str, limit: float | None = None) -> Row:
    made = over(
        f"{what}: {called(name)}, time over memcpy's", seconds[name], seconds["memcpy"], who=who(name), limit=limit
    )
    assert made.median
    return replace(made, note=f"{1 / made.median:.2f} of its speed")


def two_receivers(world: World, shape: Shape, *, rounds: int) -> list[Row]:
    ways = ["memcpy", "shm", "broadcast", "serialize"]
    answer = rates(world, shape, ways, receivers=2, rounds=rounds)
    what = f"{shape.name}, 2 receivers"
    return [*times(what, answer, ways), *(over_memcpy(what, answer["seconds"], name) for name in ways[1:])]


def verified(world: World, shape: Shape, algorithms: Sequence[str], *, rounds: int) -> list[Row]:
    """The cost of digests of every tensor on both ends, computed during the transfer."""
    there = set(world.call(f"{ONRANKS}:hashing", ranks=[0], each=4096, count=1, rounds=1)[0])
    wanted = [name for name in algorithms if name in there]
    ways = ["shm", *(f"shm+{name}" for name in wanted)]
    answer = rates(world, shape, ways, receivers=1, rounds=rounds)
    what, seconds = f"{shape.name}, 1 receiver", answer["seconds"]
    return [
        *times(what, answer, ways[1:]),
        *(over(f"{what}: {called(name)}, time over unverified", seconds[name], seconds["shm"]) for name in ways[1:]),
        *(Row(what=f"{what}: shm, verified by {name}", note=NOT_HERE) for name in algorithms if name not in there),
    ]


def through_files(world: World, shape: Shape, *, rounds: int) -> list[Row]:
    """Compared with a common alternative: files in memory."""
    there = [name for name, package in PACKAGES.items() if find_spec(package)]
    answer = rates(world, shape, ["shm", *there], receivers=1, rounds=rounds)
    what, seconds, where = f"{shape.name}, 1 receiver, files", answer["seconds"], place_for(shape.size())
    place = f"in {where}" if where else "in the temporary folder, because memory has too little room"
    made = times(what, answer, there)
    for name in there:
        words = f"{what}: {called(name)} over shm, time"
        made.append(over(words, seconds[name], seconds["shm"], who=who(name), note=place))
    absent = [name for name in PACKAGES if name not in there]
    return [*made, *(Row(what=f"{what}: {called(name)}", who=who(name), note=NOT_HERE) for name in absent)]


def digests(world: World, size_mib: int, *, rounds: int) -> Iterator[Row]:
    """Seconds for 10^9 bytes on one core, in tensors of 4 MiB and of 32 KiB."""
    for name, each in (("4 MiB", 4 * MIB), ("32 KiB", 32 * 2**10)):
        count = max(1, size_mib * MIB // each)
        seen = world.call(f"{ONRANKS}:hashing", ranks=[0], each=each, count=count, rounds=rounds)[0]
        for algorithm, taken in seen.items():
            yield row(f"digests of 1 GB in tensors of {name}: {algorithm}", taken)
        if "xxh3" not in seen:
            yield Row(what=f"digests of 1 GB in tensors of {name}: xxh3", note=NOT_HERE)


def growth(world: World, megabytes: Sequence[int], receivers: Sequence[int], *, rounds: int) -> Iterator[Row]:
    """Larger weights to one receiver, or the same weights to more receivers."""
    for size in megabytes:
        shape = Shape(key="growth", name=f"{size} MB in tensors of 1 MB", count=size, each=10**6, at_most=LARGE)
        for count in receivers:
            what = f"growth: {size} MB, {count} receiver{'s' * (count > 1)}"
            progress(what)
            ways = ["memcpy", "shm", "broadcast"]
            answer = rates(world, shape, ways, receivers=count, rounds=rounds)
            yield from times(what, answer, ways, megabytes=size, receivers=count)


def place_for(size: int) -> Path | None:
    """A folder in memory with room for this many bytes; None if there is none, so files go to the temporary folder."""
    return IN_MEMORY if IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > SPARE * size else None


# -- on CUDA: the lab's syncs by each transport, beside plain copies -------------------------------------------------------
#
# A rate counts each copied byte once, although it is read and written. Times are the sender's, from when all are ready until the receivers
# have applied everything, as in the lab's comparison of transports. Copies are measured in the same ranks just before. If two ranks share a
# GPU, NCCL may refuse; the row then gives the reason. Not tested on a GPU yet; the tests run the same code on the CPU.


def on_gpus(session: Session, name: str, *, model: str, cycles: int) -> list[Row]:
    """One transport. Without a GPU a row gives the reason."""
    if session.device == "cpu":
        return [unmeasured(f"on GPUs: {name}", "the CPU was requested, or this machine has no GPU driver")]
    return by_transport(session, name, model=model, cycles=cycles)


def by_transport(session: Session, name: str, *, model: str, cycles: int) -> list[Row]:
    """Ceilings, then versions, in the same ranks; the first version, which allocates pages and connections, is not reported."""
    env = {VISIBLE: os.environ.get(VISIBLE, "0").partition(",")[0]} if name == "ipc" else None  # both ends on one GPU
    logs = session.logs / "gpus" / name
    logs.mkdir(parents=True, exist_ok=True)
    with session.world(RANKS[name], logs=logs / "ranks", env=env, preload=("megatron.core",), timeout_s=600) as world:
        seats = [seat["device"] for seat in world.status()]
        copies: dict[str, Any] = {"size": BLOCK, "rounds": ROUNDS, "device": seats[0]}
        (plain,) = world.call(f"{ONRANKS}:measured", ranks=[0], timeout_s=600, **copies)
        settings: dict[str, Any] = {"tp": 1, "replicas": 1, "infer_tp": 1, "placement": "apart", "refresh": "paused"}
        settings |= {"transport": name, "verify": "none", "sweep": False, "ranks": RANKS[name], "size": model}
        run = session.lab("sync", logs / "run", world=world, timeout_s=600, cycles=cycles + 1, **settings)
    return beside_copies(run, name, plain, same=seats[0] == seats[-1])


def beside_copies(run: Run, name: str, plain: Seconds, *, same: bool) -> list[Row]:
    """The transport's time with its ceiling, and the ceilings."""
    from kit.labs.sync.rules import events

    frame = run.frame()
    sent = frame[(frame["phase"] == "refresh") & (frame["rank"] == 0)]
    size = float(sent[sent["metric"] == "bytes"]["value"].max())
    at = [
        events(frame, "refresh", int(cycle)).query("rank == 0").set_index("event")["seconds"]
        for cycle in sorted(sent["cycle"].unique())[1:]
    ]
    seconds = [float(one["apply"] - one["ready"]) for one in at]
    least = {what: statistics.median(plain[what]) * size / BLOCK for what in ceiling_of(name, plain, same=same)}
    slowest = max(least, key=least.__getitem__)
    taken, device = statistics.median(seconds), "same" if same else "another"
    where = f"{run.config['size']}, 1 receiver on {'the same' if same else 'another'} device"
    share = f"{least[slowest] / taken:.2f} of {slowest} at {size / least[slowest] / GB:.2f} GB/s"
    about: dict[str, Any] = {"ceiling": least[slowest], "note": f"{size / taken / GB:.2f} GB/s, {share}"}
    about["ids"] = {"transport": name, "bytes": size, "device": device}

    def copies(what: str) -> Row:
        note, ids = f"{BLOCK / statistics.median(plain[what]) / GB:.2f} GB/s", {"transport": name, "bytes": BLOCK}
        words = f"{name}: {BLOCK >> 20} MiB, {what}"
        return row(words, plain[what], who="plain copy", note=note, ids={**ids, "copy": what})

    return [row(f"{where}: {name}, from all ready to applied", seconds, **about), *map(copies, plain)]


def ceiling_of(name: str, plain: Seconds, *, same: bool) -> list[str]:
    """The plain copies that bound a transport: shared memory goes through the host, NCCL from GPU to GPU."""
    if WITHIN not in plain:
        return [HOST]
    peers = [what for what in plain if what.startswith(PEER)]
    if name == "shm" or not (same or peers):
        return [OUT, BACK]
    return [WITHIN] if same else peers


QUICK: dict[str, Any] = {
    "shapes": SHAPES[1:],
    "rounds": 2,
    "slow_rounds": 1,
    "buckets_mib": (4, 16, 64),
    "hash_mib": 64,
}
SYNC = Bench(parts, {**QUICK, "verify": ("xxh3",), "growth_mb": (10, 100), "receivers": (1, 2)})
