"""All groups of a job destroyed and made again: ours, and the two ways in common use."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from kit.bench.report import progress
from kit.bench.rows import Row, row
from kit.errors import KitError
from kit.world import World

if TYPE_CHECKING:
    from pathlib import Path

MS = 1e3
AIM_AT_2 = 60.0


def rows(ranks: int, logs: Path, *, n: int) -> list[Row]:
    """Each way in processes of its own, since two of them leave groups behind; each sample is the slowest rank's."""
    told: dict[str, list[list[dict[str, Any]]]] = {}
    try:
        with World(ranks, logs=logs, preload=("megatron.core",)) as world:
            for mode in ("manual", "official", "exact"):
                progress(f"groups on {ranks} ranks, {mode}")
                told[mode] = world.call("kit.bench.offload.onranks:communicators", mode=mode, cycles=n)
                world.restart()
    except KitError as error:
        return [Row(what=f"groups, {ranks} ranks", note=f"not measured: {str(error).partition(chr(10))[0]}")]
    manual = statistics.median(_samples(told["manual"], "both"))
    made = []
    for mode, per_rank in told.items():
        what = f"{per_rank[0][0]['groups']} groups a rank, {ranks} ranks, tp2: destroy + reload"
        exact = mode == "exact"
        about: dict[str, Any] = {"limit": manual} if exact else {}
        about |= {"aim": AIM_AT_2} if exact and ranks == 2 else {}
        samples = _samples(per_rank, "both")
        made.append(row(what, samples, who=mode, unit="ms", note=_left(per_rank), **about))
    first = told["exact"]
    return [
        *reversed(made),
        row(f"destroy alone, {ranks} ranks", _samples(first, "destroy"), who="exact", unit="ms"),
        row(f"reload alone, {ranks} ranks", _samples(first, "reload"), who="exact", unit="ms"),
    ]


def _samples(per_rank: list[list[dict[str, Any]]], what: str) -> list[float]:
    cycles = zip(*per_rank, strict=True)
    parts = ("destroy", "reload") if what == "both" else (what,)
    return [MS * sum(max(rank[part] for rank in cycle) for part in parts) for cycle in cycles]


def _left(per_rank: list[list[dict[str, Any]]]) -> str:
    """Whether anything was given back: the sockets of rank 0 in the last cycle tell."""
    last = per_rank[0][-1]
    held, released, back = last["sockets"]
    return f"{held} sockets before, {released} while released, {back} after {len(per_rank[0])} cycles"
