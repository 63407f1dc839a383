"""What the offload lab asks of its records. A check that this device cannot answer says why, and is null."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kit.results import Check, Measured, NotMeasured, select

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pandas as pd

    Measure = Callable[[pd.DataFrame, Mapping[str, Any]], Measured]

MIB = 2**20
SEEN_BYTES = 64 * MIB  # below this a job's bytes drown in the interpreter's own memory
SLOPE_FROM, SLOPE_CYCLES = 4, 8


def worst(rows: pd.DataFrame, unit: str = "") -> str:
    """Where the largest value was."""
    row = rows.iloc[int(rows["value"].to_numpy().argmax())]
    return f"{row['value']:g}{unit} on rank {row['rank']} in cycle {row['cycle']}"


def count_of(phase: str, metric: str, needs: str | None = None) -> Measure:
    """The largest number that the ranks themselves counted; right is 0."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        if needs is not None and not config[needs]:
            raise NotMeasured(f"{needs}=false")
        rows = select(frame, phase=phase, metric=metric)
        return Measured(float(rows["value"].max()), f"{len(rows)} counts; largest {worst(rows)}")

    return measure


def per_rank(frame: pd.DataFrame, phase: str, metric: str) -> pd.Series:
    return select(frame, phase=phase, metric=metric).groupby("rank")["value"].max()


def more_than(metric: str, phase: str, base: str) -> Measure:
    """How many more there are after any cycle's `phase` than after `base`, on the worst rank."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        if not config["groups"]:
            raise NotMeasured("groups=false")
        before = select(frame, phase=base, metric=metric).groupby("rank")["value"].first()
        rows = select(frame, phase=phase, metric=metric)
        more = rows.assign(value=rows["value"] - rows["rank"].map(before))
        level = int(before.max())
        return Measured(float(more["value"].max()), f"{level} after {base!r}; {phase!r} has more by {worst(more)}")

    return measure


def groups_return(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Registered groups: while released against the start, and once back against before."""
    released = more_than("groups", "idle", "start")(frame, config)
    back = more_than("groups", "verify", "build")(frame, config)
    return max(released, back, key=lambda one: one.value or 0)


def old_groups(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Groups that something still holds while released, and the sockets and threads above the level without a job."""
    if not config["groups"]:
        raise NotMeasured("groups=false")
    alive = select(frame, phase="idle", metric="old_groups_alive")["value"].max()
    sockets = more_than("sockets", "idle", "baseline")(frame, config).value or 0
    threads = more_than("threads", "idle", "baseline")(frame, config).value or 0
    total = alive + max(0.0, sockets) + max(0.0, threads)
    return Measured(
        float(total), f"{alive:g} alive, {sockets:+g} sockets, {threads:+g} threads, worst rank, while released"
    )


def tensors_released(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - checks are called alike
    """Of the resident bytes, what left; and what the kernel (or the driver) says of it, whichever is less."""
    resident = per_rank(frame, "fingerprint", "resident_bytes")
    left = per_rank(frame, "idle", "left_bytes")
    if not resident.min():
        raise NotMeasured("nothing was to be given back")
    share = float(((resident - left) / resident).min())
    source = "driver_used" if (frame["metric"] == "driver_used").any() else "anon_rss"
    if resident.min() < SEEN_BYTES:
        return Measured(share, f"of {resident.min() / MIB:.1f} MiB by storage; too few to see in {source}")
    held = select(frame, phase="fingerprint", metric=source).set_index(["rank", "cycle"])["value"]
    idle = select(frame, phase="idle", metric=source).set_index(["rank", "cycle"])["value"]
    fell = float((held - idle).groupby("rank").min().div(resident).min())
    return Measured(
        min(share, fell), f"{share:.3f} by storage; {source} fell by {fell:.3f} of {resident.min() / MIB:.0f} MiB"
    )


def tensors_restored(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    if not config["hashes"]:
        raise NotMeasured("hashes=false: the cycles are unchecked")
    hashed = select(frame, phase="verify", metric="tensors_hashed")["value"]
    rows = select(frame, phase="verify", metric="tensors_changed")
    return Measured(float(rows["value"].max()), f"SHA-256 of {hashed.sum():.0f} tensors; changed: {worst(rows)}")


def bitwise(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    """Losses, gradient norms, weights and optimizer state that differ from a run without any release."""
    apart = select(frame, phase="second_control", metric="controls_differ")["value"].max()
    if apart:
        raise NotMeasured(
            f"two controls without any release differ in {apart:g} places: this setup is not deterministic"
        )
    steps = select(frame, phase="compare", metric="steps_differ")
    compared = select(frame, phase="compare", metric="steps_compared")["value"].max()
    tensors = select(frame, phase="compare", metric="tensors_differ")["value"]
    total = float((steps.set_index("rank")["value"] + tensors.set_axis(steps["rank"])).max())
    return Measured(
        total, f"{steps['value'].max():g} of {compared:g} steps and {tensors.max():g} tensors differ, worst rank"
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
        f"{source} while released, cycle {table.index[0]} to {table.index[-1]}, rank {grown.idxmax()}",
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
    after = select(frame, phase="verify", metric=level).set_index(["rank", "cycle"])["value"]
    ratio = peaks / after
    rank, cycle = ratio.index[int(ratio.to_numpy().argmax())]
    return Measured(
        float(ratio.max()),
        f"{peak} in reload / {level} after it, rank {rank}, cycle {cycle}; job {resident.max() / MIB:.0f} MiB",
    )


def on_cuda(metric: str) -> Measure:
    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        if not (frame["metric"] == "driver_used").any():
            raise NotMeasured("the ranks had no CUDA device")
        return {"residual": residual, "comm_released": comm_released}[metric](frame, config)

    return measure


def residual(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    """Driver memory while released above the level after a context and one matrix product."""
    idle = select(frame, phase="idle", metric="driver_used").groupby("rank")["value"].max()
    base = per_rank(frame, "start", "driver_used")
    return Measured(
        float((idle - base).max()) / MIB, "driver memory while released, above start (context and one matmul)"
    )


def comm_released(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    """Of what communicators took (driver memory beyond the allocator's), the share that came back."""
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


def failure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    if not config["groups"] or config["mode"] != "exact":
        raise NotMeasured("a failure is rehearsed with groups=true and mode=exact only")
    rows = select(frame, phase="rehearse_failure", metric="failure_raised")
    return Measured(
        float((1 - rows["value"]).max()),
        "a group that refused to be destroyed, named in the error on every rank or not",
    )


def zero(name: str, question: str, measure: Measure, tolerance: str) -> Check:
    return Check(name=name, question=question, tolerance=tolerance, limit=0, unit="1", better="<=", measure=measure)


CHECKS = (
    zero(
        "groups_return_to_baseline",
        "Are the groups gone while released, and no more of them after?",
        groups_return,
        "groups_more",
    ),
    zero(
        "model_parallel_uninitialised",
        "Does Megatron know that it has no groups?",
        count_of("idle", "initialised", "groups"),
        "initialised",
    ),
    zero(
        "every_group_communicates",
        "Does every rebuilt group give the exact sum?",
        count_of("talk", "wrong_groups"),
        "wrong_groups",
    ),
    zero(
        "membership_unchanged",
        "Does every name stand for the same ranks?",
        count_of("verify", "membership_changed"),
        "names_moved",
    ),
    zero(
        "options_unchanged",
        "Same timeout, backend, options, description?",
        count_of("verify", "options_changed"),
        "options_changed",
    ),
    zero(
        "handles_alive",
        "Does every holder point at a living group?",
        count_of("verify", "stale_holders"),
        "stale_holders",
    ),
    zero(
        "stale_handle_raises",
        "Does a group in use after destroy raise, by name?",
        count_of("idle", "stale_usable", "groups"),
        "stale_usable",
    ),
    zero("old_groups_dead", "Are old groups really gone, sockets and threads too?", old_groups, "old_groups"),
    zero("destroy_failure_raises", "Does a group that cannot be destroyed raise, by name?", failure, "failures_hidden"),
    Check(
        name="tensors_released",
        question="Do the bytes leave the device?",
        tolerance="released_share",
        limit=0.9,
        unit="ratio",
        better=">=",
        measure=tensors_released,
    ),
    zero("tensors_restored", "Is every tensor back, by its hash?", tensors_restored, "tensors_changed"),
    zero("training_continues_bitwise", "Does it train as if nothing had happened?", bitwise, "values_differ"),
    Check(
        name="memory_drift",
        question="Does memory stay where it was after the first cycle?",
        tolerance="drift_mib",
        limit=200,
        unit="MiB",
        better="<=",
        measure=drift,
    ),
    Check(
        name="memory_slope",
        question="Does memory grow with every cycle, more than in a control?",
        tolerance="slope_mib",
        limit=1,
        unit="MiB/cycle",
        better="<=",
        measure=slope,
    ),
    Check(
        name="reload_peak",
        question="Does the way back take more memory than training?",
        tolerance="peak_ratio",
        limit=1.1,
        unit="ratio",
        better="<=",
        measure=reload_peak,
    ),
    Check(
        name="residual",
        question="How much of the card is still taken while released?",
        tolerance="residual_mib",
        limit=500,
        unit="MiB",
        better="<=",
        measure=on_cuda("residual"),
    ),
    Check(
        name="comm_released",
        question="Does the communicators' memory come back?",
        tolerance="comm_share",
        limit=0.7,
        unit="ratio",
        better=">=",
        measure=on_cuda("comm_released"),
    ),
    zero("fds_return", "Are sockets and files as many as before?", more_than("fds", "verify", "build"), "fds_more"),
    zero("threads_return", "Are threads as many as before?", more_than("threads", "verify", "build"), "threads_more"),
    zero(
        "state_as_found",
        "Is the distributed state left as it was found?",
        count_of("ownership", "not_as_found"),
        "not_as_found",
    ),
)
