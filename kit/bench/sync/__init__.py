"""`kit bench sync`: how fast weights come from a trainer to its receivers, beside one big copy of the same bytes and beside files.

Ratios are of times, turn by turn: 1.25 times memcpy's time is 0.8 of its speed. All ranks share this machine's cores and memory: with
fewer cores than ranks that work, what could go side by side waits. Ranks import this package too, so that it asks for little.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from kit.bench.cost import Cost, crowd
from kit.bench.sync import gpus, works

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kit.bench.rows import Row
    from kit.bench.session import Part, Session
    from kit.bench.sync.works import Shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much of each. `aim` is the share of memcpy's speed that shared memory is to reach."""

    shapes: tuple[Shape, ...] = field(default_factory=lambda: works.SHAPES)
    rounds: int = 7
    slow_rounds: int = 2  # of what goes through files
    buckets_mib: tuple[float, ...] = (1, 4, 8, 16, 64)
    hash_mib: int = 256
    verify: tuple[str, ...] = ("mix128", "xxh3", "sha256")
    growth_mb: tuple[int, ...] = (10, 100, 1000, 2000)
    receivers: tuple[int, ...] = (1, 2, 4)
    receivers_mb: int = 100
    on_gpus: str = "qwen2.5-0.5b"


QUICK = Sizes(
    shapes=works.SHAPES[1:],
    rounds=2,
    slow_rounds=1,
    buckets_mib=(4, 16, 64),
    hash_mib=64,
    verify=("mix128", "xxh3"),
    growth_mb=(10, 100),
    receivers=(1, 2),
)


def parts(session: Session, sizes: Sizes) -> dict[str, Part]:
    """The GPUs' first, where there is a driver: nothing else here is as rare."""
    few = sizes.rounds
    by_gpu: dict[str, Part] = {
        f"gpus.{name}": partial(gpus.rows, session, name, model=sizes.on_gpus, cycles=few) for name in gpus.RANKS
    }

    def on(part: Callable[..., Iterable[Row]], *args: Any, **keywords: Any) -> Part:
        return lambda: part(works.ranks(session, max(2, *sizes.receivers)), *args, **keywords)

    made: dict[str, Part] = {}
    for shape in sizes.shapes:
        made[f"{shape.key}.transports"] = on(works.transports, shape, rounds=few, buckets_mib=sizes.buckets_mib)
        made[f"{shape.key}.receivers"] = on(works.two_receivers, shape, rounds=few)
        made[f"{shape.key}.verified"] = on(works.verified, shape, sizes.verify, rounds=few)
        made[f"{shape.key}.files"] = on(works.through_files, shape, rounds=sizes.slow_rounds)
    made["digests"] = on(works.digests, sizes.hash_mib, rounds=few)
    made["growth.bytes"] = on(works.growth, sizes.growth_mb, [1], rounds=few)
    made["growth.receivers"] = on(works.growth, [sizes.receivers_mb], sizes.receivers, rounds=few)
    return {**by_gpu, **made} if session.device == "cuda" else {**made, **by_gpu}


def costs(sizes: Sizes) -> dict[str, Cost]:
    """Times of copies; a tensor more is as good as 64 KiB more. The World is counted with each first part of a shape."""
    turns, slow = sizes.rounds + 1, sizes.slow_rounds + 1
    ranks = max(2, *sizes.receivers) + 2
    start = Cost(world=crowd(ranks))
    made = {f"gpus.{name}": Cost(megatron=1.3, job=2, copy=3 * (turns + 1)) for name in gpus.RANKS}
    for shape in sizes.shapes:
        weight = shape.size() / works.GIB + (shape.count or 300) / 16_000
        made[f"{shape.key}.transports"] = start + Cost(copy=50 * weight * turns)
        made[f"{shape.key}.receivers"] = Cost(copy=14 * weight * turns)
        made[f"{shape.key}.verified"] = Cost(copy=14 * weight * turns)
        made[f"{shape.key}.files"] = Cost(copy=55 * weight * slow)
    made["digests"] = start + Cost(copy=14 * sizes.hash_mib / 1024 * turns)
    made["growth.bytes"] = start + Cost(copy=6 * sum(sizes.growth_mb) / 1000 * turns)
    made["growth.receivers"] = Cost(copy=12 * sizes.receivers_mb / 1000 * sum(sizes.receivers) * turns)
    return made
