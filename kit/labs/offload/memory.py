"""Checks of the offload lab that weigh: memory while released, its slope over cycles and on the way back, on the host and on a card."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kit.labs.memory import MIB, by_owner, levels, source
from kit.results import Measured, NotMeasured, select

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from kit.labs.memory import Source

SEEN_BYTES = 64 * MIB  # below this a job's bytes drown in the interpreter's own memory
SLOPE_FROM, SLOPE_CYCLES = 4, 8


def per_rank(frame: pd.DataFrame, phase: str, metric: str) -> pd.Series:
    return select(frame, phase=phase, metric=metric).groupby("rank")["value"].max()


def tensors_released(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - checks are called alike
    """Of the resident bytes, what left; and what the kernel (or the driver) says of it, whichever is less."""
    resident = per_rank(frame, "fingerprint", "resident_bytes")
    left = per_rank(frame, "idle", "left_bytes")
    if not resident.min():
        raise NotMeasured("nothing was to be given back")
    share = float(((resident - left) / resident).min())
    seen = source(frame)
    if resident.min() < SEEN_BYTES:
        return Measured(share, f"of {resident.min() / MIB:.1f} MiB, by their storages; too few to see in {seen.told}")
    there = by_owner(frame, seen, "fingerprint", "resident_bytes", add=True)
    gone = by_owner(frame, seen, "fingerprint") - by_owner(frame, seen, "idle")
    fell = float((gone / there).min())
    return Measured(
        min(share, fell),
        f"of {there.min() / MIB:.0f} MiB: {share:.3f} by their storages, and {seen.told} fell by {fell:.3f} of them",
    )


def slope(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Median of all pairwise slopes, above what a control without release shows of slope and spread."""
    if config["cycles"] < SLOPE_CYCLES:
        raise NotMeasured(f"a slope needs {SLOPE_CYCLES} cycles or more")
    table, seen = levels(frame, "idle")
    control, _ = levels(frame, "control")
    mine, allowed = theil_sen(table), theil_sen(control)
    spread = float((control.loc[SLOPE_FROM:].std() / MIB).max()) / len(control)
    over = (mine - allowed.clip(lower=0)).max() - spread
    why = f"{seen.told} {mine.max():+.3f} MiB a cycle from cycle {SLOPE_FROM} on; control {allowed.max():+.3f}, spread {spread:.3f}"
    return Measured(max(0.0, float(over)), why)


def theil_sen(table: pd.DataFrame) -> pd.Series:
    """Robust MiB per cycle, a value per column."""
    import numpy as np
    import pandas as pd

    rows = table.loc[SLOPE_FROM:]
    first, second = np.triu_indices(len(rows), k=1)
    cycles = rows.index.to_numpy(dtype=float)
    values = rows.to_numpy(dtype=float) / MIB
    slopes = (values[second] - values[first]) / (cycles[second] - cycles[first])[:, None]
    return pd.Series(np.median(slopes, axis=0), index=rows.columns)


def reload_peak(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """The most memory on the way back against the level of the training that follows it."""
    if not any(config[kind] for kind in ("weights", "grads", "optimizer")):
        raise NotMeasured("no tensors are moved")
    resident = per_rank(frame, "fingerprint", "resident_bytes")
    if resident.min() < SEEN_BYTES:
        raise NotMeasured(
            f"{resident.min() / MIB:.1f} MiB are too few to see beside the interpreter's memory; take a larger size"
        )
    cuda = (frame["metric"] == "peak_allocated").any()
    peak, level = ("peak_allocated", "allocated") if cuda else ("peak_rss", "rss")
    peaks = select(frame, phase="reload", metric=peak).set_index(["rank", "cycle"])["value"]
    training = select(frame, phase="train", metric=level)
    after = training.assign(cycle=training["cycle"] - 1).set_index(["rank", "cycle"])["value"]
    ratio = (peaks / after).dropna()
    if ratio.empty:
        raise NotMeasured("no training followed a reload")
    rank, cycle = ratio.index[int(ratio.to_numpy().argmax())]
    return Measured(
        float(ratio.max()),
        f"{peak} in reload against {level} in the training after it, rank {rank}, cycle {cycle}; job of {resident.max() / MIB:.0f} MiB",
    )


def residual(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Driver memory while released above the level after a context and one matrix product, per card."""
    stays = [kind for kind in ("groups", "weights", "grads", "optimizer") if not config[kind]]
    if stays:
        raise NotMeasured(f"{', '.join(stays)} stay by choice, and are in what the driver shows")
    seen = source(frame)
    over = most(frame, seen, "idle") - most(frame, seen, "start")
    where = f"{seen.whose} {over.idxmax()}"
    return Measured(float(over.max()) / MIB, f"{seen.told} while released, above a context and one matmul, {where}")


def most(frame: pd.DataFrame, seen: Source, phase: str, metric: str | None = None, *, add: bool = False) -> pd.Series:
    """The most of all cycles, for each that has memory of its own."""
    return by_owner(frame, seen, phase, metric, add=add).groupby(seen.whose).max()


def comm_released(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Of what communicators took (driver memory beyond the allocator's), the share that came back.

    Held against the level after the controls, not the start: by then every kernel is loaded, which takes memory that never comes back.
    """
    if not config["groups"]:
        raise NotMeasured("groups=false: no group was given back")
    seen = source(frame)
    without, held, idle = (
        most(frame, seen, phase) - most(frame, seen, phase, "reserved", add=True)
        for phase in ("baseline", "fingerprint", "idle")
    )
    taken = held - without
    if taken.min() < MIB:
        raise NotMeasured("communicators took less than 1 MiB of driver memory")
    return Measured(
        float(((held - idle) / taken).min()), f"of {taken.max() / MIB:.0f} MiB a {seen.whose}, by {seen.told}"
    )
