"""`kit bench sync`: how fast weights come from a trainer to its receivers, beside one big copy of the same bytes and beside files.

Ratios are of times, turn by turn: 1.25 times memcpy's time is 0.8 of its speed. All ranks share this machine's cores and memory: with
fewer cores than ranks that work, what could go side by side waits. Ranks import this package too, so that it asks for little.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kit.bench.report import progress, table, tell
from kit.bench.rows import Row
from kit.bench.sync import cards, parts
from kit.errors import KitError
from kit.world import World

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.bench.sync.parts import Shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much of each. `aim` is the share of memcpy's speed that shared memory is to reach."""

    shapes: tuple[Shape, ...] = field(default_factory=lambda: parts.SHAPES)
    rounds: int = 7
    slow_rounds: int = 2  # of what goes through files
    buckets_mib: tuple[float, ...] = (1, 4, 8, 16, 64)
    hash_mib: int = 256
    verify: tuple[str, ...] = ("mix128", "xxh3", "sha256")
    growth_mb: tuple[int, ...] = (10, 100, 1000, 2000)
    receivers: tuple[int, ...] = (1, 2, 4)
    receivers_mb: int = 100
    on_cards: str = "qwen2.5-0.5b"


QUICK = Sizes(
    rounds=3,
    slow_rounds=1,
    buckets_mib=(4, 16, 64),
    verify=("mix128", "xxh3"),
    growth_mb=(10, 100, 1000),
    receivers=(1, 2),
)


def main(as_json: bool, sizes: Sizes = Sizes()) -> int:
    from kit.labs.configure import has_driver  # here, since the ranks import this package too

    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kit-bench-") as scratch:
        logs = Path(scratch)
        try:
            with parts.ranks(max(2, *sizes.receivers), logs / "ranks") as world:
                for what, part in works(world, sizes).items():
                    made = measured(world, what, part)
                    progress(f"\n{table(made)}\n")
                    rows += made
            rows += cards.rows(logs / "cards", model=sizes.on_cards, cycles=sizes.rounds, driver=has_driver())
        except KeyboardInterrupt:  # what was measured before is told
            rows.append(Row(what="the rest", note="not measured: interrupted"))
        with World(1, logs=logs / "last") as world:
            provenance = world.call("kit.measure:provenance")[0]
    tell("sync", rows, provenance, as_json=as_json)
    return 0


def works(world: World, sizes: Sizes) -> dict[str, Callable[[], list[Row]]]:
    """Every part by its name, in order."""
    few = sizes.rounds
    made: dict[str, Callable[[], list[Row]]] = {}
    for shape in sizes.shapes:
        name = shape.name
        made[f"{name}: transports"] = partial(parts.transports, world, shape, rounds=few, buckets_mib=sizes.buckets_mib)
        made[f"{name}: two receivers"] = partial(parts.two_receivers, world, shape, rounds=few)
        made[f"{name}: verified"] = partial(parts.verified, world, shape, sizes.verify, rounds=few)
        made[f"{name}: files"] = partial(parts.through_files, world, shape, rounds=sizes.slow_rounds)
    made["digests"] = partial(parts.digests, world, sizes.hash_mib, rounds=few)
    made["growth"] = partial(parts.growth, world, sizes.growth_mb, rounds=few)
    made["receivers"] = partial(parts.more_receivers, world, sizes.receivers, sizes.receivers_mb, rounds=few)
    return made


def measured(world: World, what: str, part: Callable[[], list[Row]]) -> list[Row]:
    """A part that breaks is a row that says so, and costs the ranks; the others go on."""
    progress(what)
    try:
        return part()
    except KitError as error:
        world.restart()
        return [Row(what=what, note=f"not measured: {str(error).partition(chr(10))[0]}")]
