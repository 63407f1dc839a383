"""Checks of the offload lab that weigh: memory while released, over cycles and on the way back, on the host and on a card."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kit.results import Measured, NotMeasured, select

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pandas as pd

    Measure = Callable[[pd.DataFrame, Mapping[str, Any]], Measured]

MIB = 2**20
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
    source = "driver_used" if (frame["metric"] == "driver_used").any() else "anon_rss"
    if resident.min() < SEEN_BYTES:
        return Measured(share, f"of {resident.min() / MIB:.1f} MiB, by their storages; too few to see in {source}")
    held = select(frame, phase="fingerprint", metric=source).set_index(["rank", "cycle"])["value"]
    idle = select(frame, phase="idle", metric=source).set_index(["rank", "cycle"])["value"]
    fell = float((held - idle).groupby("rank").min().div(resident).min())
    return Measured(
        min(share, fell),
        f"of {resident.min() / MIB:.0f} MiB: {share:.3f} by their storages, and {source} fell by {fell:.3f} of them",
    )


def levels(frame: pd.DataFrame, phase: str) -> tuple[pd.DataFrame, str]:
    """Memory after each cycle's phase: driver memory on CUDA, anonymous memory on the CPU; a column a rank."""
    source = "driver_used" if (frame["metric"] == "driver_used").any() else "anon_rss"
    rows = select(frame, phase=phase, metric=source)
    return rows.pivot_table(index="cycle", columns="rank", values="value"), source


def drift(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    table, source = levels(frame, "idle")
    if len(table) < 2:
        raise NotMeasured("a drift needs two cycles or more")
    grown = (table.iloc[-1] - table.iloc[0]) / MIB
    return Measured(
        float(grown.max()),
        f"{source} while released, cycle {table.index[-1]} against cycle {table.index[0]}, rank {grown.idxmax()}",
    )


def slope(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Median of all pairwise slopes, above what a control without release shows of slope and spread."""
    if config["cycles"] < SLOPE_CYCLES:
        raise NotMeasured(f"a slope needs {SLOPE_CYCLES} cycles or more")
    table, source = levels(frame, "idle")
    control, _ = levels(frame, "control")
    mine, allowed = theil_sen(table), theil_sen(control)
    spread = float((control.loc[SLOPE_FROM:].std() / MIB).max()) / len(control)
    over = (mine - allowed.clip(lower=0)).max() - spread
    why = f"{source} {mine.max():+.3f} MiB a cycle from cycle {SLOPE_FROM} on; control {allowed.max():+.3f}, spread {spread:.3f}"
    return Measured(max(0.0, float(over)), why)


def theil_sen(table: pd.DataFrame) -> pd.Series:
    """Robust MiB per cycle, a value per rank."""
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


def on_cuda(ask: Measure) -> Measure:
    """A question to the driver, which only a card's has an answer to."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        if not (frame["metric"] == "driver_used").any():
            raise NotMeasured("the ranks had no CUDA device")
        return ask(frame, config)

    return measure


def residual(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Driver memory while released above the level after a context and one matrix product, per card."""
    stays = [kind for kind in ("groups", "weights", "grads", "optimizer") if not config[kind]]
    if stays:
        raise NotMeasured(f"{', '.join(stays)} stay by choice, and are in what the driver shows")
    over = per_rank(frame, "idle", "driver_used") - per_rank(frame, "start", "driver_used")
    return Measured(
        float(over.max()) / MIB,
        f"driver memory of rank {over.idxmax()}'s card while released, above a context and one matmul",
    )


def comm_released(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Of what communicators took (driver memory beyond the allocator's), the share that came back."""
    if not config["groups"]:
        raise NotMeasured("groups=false: no group was given back")
    outside = {}
    for phase in ("start", "fingerprint", "idle"):
        used = select(frame, phase=phase, metric="driver_used").groupby("rank")["value"].max()
        outside[phase] = used - select(frame, phase=phase, metric="reserved").groupby("rank")["value"].max()
    taken = outside["fingerprint"] - outside["start"]
    if taken.min() < MIB:
        raise NotMeasured("communicators took less than 1 MiB of driver memory")
    return Measured(
        float(((outside["fingerprint"] - outside["idle"]) / taken).min()), f"of {taken.max() / MIB:.0f} MiB a rank"
    )


def others_untouched(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    """How far the memory of a process beside the job moved from where it was at the start."""
    rows = frame[frame["metric"] == "bystander_driver"]
    source = "the driver"
    if not rows["value"].all():
        rows, source = frame[frame["metric"] == "bystander_bytes"], "its own allocator (the driver does not list it)"
    if rows.empty:
        raise NotMeasured("there was no bystander on the card")
    first = rows[rows["phase"] == "start"].set_index("rank")["value"]
    moved = (rows["value"] - rows["rank"].map(first)).abs()
    damaged = select(frame, metric="bystander_damaged")["value"].max()
    if damaged:
        return Measured(
            float(first.max()) / MIB, f"{damaged:g} bytes of a bystander's memory were changed: all of it counts"
        )
    return Measured(float(moved.max()) / MIB, f"asked {len(rows)} times over all ranks, by {source}")
