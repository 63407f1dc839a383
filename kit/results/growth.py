"""Measures that rules share: counts, memory and its growth, steady times, routing; and ledgers read from a frame.

A measure is called with the frame of a run and its config. Its reason is made from the worst row, in one grammar: the metric, the value
and place that it was compared with, the value and place of the worst row, their difference and where that is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kit.machine import MIB
from kit.nccl import SHARED_GPU
from kit.results.frames import Source, sharing, source
from kit.results.rules import (
    Measured,
    Missing,
    NotMeasured,
    Rule,
    TooFewCycles,
    incomplete,
    null,
    rule,
    select,
    suspect_in,
)
from kit.results.units import counted

if TYPE_CHECKING:
    import pandas as pd

    Measure = Callable[[pd.DataFrame, Mapping[str, Any]], Measured]

COUNTS = ("fds", "sockets", "threads", "children", "memfds", "shared_maps", "shm_files", "temp_files")
PILED = ("groups", *COUNTS)
WEIGHED = ("anon_rss", "file_rss", "shm_rss", "tensor_bytes", "pinned_bytes")
WARM_UP = 1  # first cycles excluded from a slope
DRIFT_CYCLES = 2  # a first and a last one
SLOPE_CYCLES = 4  # the warm-up, and three points for a line
RISING = 6  # from this many cycles on, a single slow cycle cannot tilt the line through all
LEAST_S = 0.1  # a phase that takes less than this longer is steady
SETTLED = 2  # cycles after which all one-time allocations exist
BY_DRIVER = ("driver_used", "process_used")
HOST = ("anon_rss", "file_rss", "shm_rss")
DRIVER_STEP = 8.0  # MiB per cycle in RISING cycles: four of the driver's pages
HOST_STEP = 4.0  # MiB per cycle in RISING cycles beside a GPU: NCCL takes host memory for each communicator
STATE_SHARE = 0.01  # share of the job's state that a cycle may add without counting as growth


# -- counts --------------------------------------------------------------------------------------------------------------


def each_rank(frame: pd.DataFrame, config: Mapping[str, Any], phase: str, metric: str) -> pd.DataFrame:
    """A number from every rank in every cycle, or once for a phase of cycle 0. If any is missing, the check cannot pass."""
    rows = select(frame, phase=phase, metric=metric)
    wanted = config["ranks"] * (config["cycles"] if rows["cycle"].any() else 1)
    if len(rows) < wanted:
        incomplete(f"{metric} was recorded {len(rows)} times, not {wanted} (once per rank and cycle)")
    return rows


def worst(rows: pd.DataFrame, base: str = "") -> Measured:
    """The largest value, or the largest increase over the column `before`, which was measured after `base`. The worst row of each metric
    says why: "groups: 1 after baseline, 5 after count (+4; rank 0, cycle 4)"."""
    # Ranks write their rows when they are ready. Of equal values the first cycle and the lowest rank is named, in every run the same.
    rows = rows.sort_values(["cycle", "rank"], kind="stable")
    over = rows["value"] - rows["before"] if base else rows["value"]
    value = float(over.to_numpy().max())  # NaN if any is: pandas' own maximum passes over it
    if math.isnan(value):
        return Measured(value)

    reasons = []
    for index in over[over > 0].groupby(rows["metric"], sort=False).idxmax():
        row = rows.loc[index]
        where = f"rank {row['rank']}" + (f", cycle {row['cycle']}" if row["cycle"] else "")
        if base:
            reasons.append(compared(row["metric"], (row["before"], base), (row["value"], row["phase"]), where))
        else:
            note = f": {row['text']}" if row.get("text") else ""
            reasons.append(f"{row['metric']}: {row['value']:.6g} after {row['phase']} ({where}){note}")
    if reasons:
        return Measured(value, "; ".join(reasons))

    metrics, phases = (", ".join(rows[name].unique()) for name in ("metric", "phase"))
    ranks, cycles = rows["rank"].nunique(), rows["cycle"].nunique()
    everywhere = counted(ranks, "rank") + (f", {cycles} cycles" if cycles > 1 else "")
    absent = f"no increase after {phases} over {base}" if base else f"0 after {phases}"
    return Measured(value, f"{metrics}: {absent} ({everywhere})")


def compared(metric: str, before: tuple[float, str], now: tuple[float, str], where: str, unit: str = "") -> str:
    """Two levels of a metric, each with the place after which it was measured, and their difference."""
    (old, base), (new, place) = before, now
    was, is_now, increase = (round(float(number), 3) for number in (old, new, new - old))
    return f"{metric}: {was:.9g}{unit} after {base}, {is_now:.9g}{unit} after {place} ({increase:+.9g}{unit}; {where})"


def largest(*metrics: str, after: str, base: str = "", until: str = "", once: bool = False) -> Measure:
    """The largest of these counts after a phase of any cycle, or with `base` the largest increase since that phase.

    With `until`, the phase that follows the last cycle, a value counts only as far as the next cycle has it too. A leak stays, while on a
    busy machine one rank once had an extra socket in one cycle of 20. With `once`, your own code may make in the first of several cycles
    what it needs for all."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        import pandas as pd

        counts = frame[frame["metric"].isin(metrics)]
        kinds = [*counts.loc[counts["phase"] == after, "metric"].unique()] or metrics[:1]
        rows = pd.concat([each_rank(counts, config, after, kind) for kind in kinds], ignore_index=True)
        if until:
            later = counts[counts["phase"] == until]
            rows = pd.concat([rows, later.assign(cycle=rows["cycle"].max() + 1)], ignore_index=True)
            following = rows.sort_values("cycle", kind="stable").groupby(["metric", "rank"])["value"].shift(-1)
            if following.notna().any():
                rows = rows.assign(value=rows["value"].clip(upper=following))[following.notna()]
        if base:
            levels = pd.concat([select(counts, phase=base, metric=kind) for kind in kinds])
            before = levels.groupby(["metric", "rank"])["value"].last().rename("before")
            rows = rows.join(before, on=["metric", "rank"])
            if rows["before"].isna().any():
                incomplete(f"{', '.join(kinds)} were not recorded on every rank after {base}")
            rows = rows.dropna(subset="before")
            if once and suspect_in(config, None) and rows["cycle"].nunique() > 1:
                return worst(over_first_cycle(rows), f"{base} or the first {after}")
        return worst(rows, base)

    return measure


def over_first_cycle(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of later cycles, compared with the first cycle where it had more than the level before."""
    is_first = rows["cycle"] == rows["cycle"].min()
    first = rows[is_first].set_index(["metric", "rank"])["value"].rename("first")
    later: pd.DataFrame = rows[~is_first].join(first, on=["metric", "rank"])
    return later.assign(before=later[["before", "first"]].max(axis=1))


def worst_of(*measures: Measure) -> Measure:
    """The largest of several numbers; the reasons of all that are above 0."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        answers = [ask(frame, config) for ask in measures]
        bad = [answer.why for answer in answers if not (answer.value or 0.0) <= 0]
        top = max(answers, key=lambda answer: math.inf if math.isnan(answer.value or 0.0) else answer.value or 0.0)
        return replace(top, why="; ".join(bad or [answers[0].why]))

    return measure


# -- memory --------------------------------------------------------------------------------------------------------------


def gpu_of_rank(ranks: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """The GPU of each rank, numbered over the run, from the status of its World; empty on the CPU."""
    seats = {row["rank"]: (row["host"], row["device"]) for row in ranks if row["device"].startswith("cuda")}
    numbers = {seat: number for number, seat in enumerate(dict.fromkeys(seats.values()))}
    return {rank: numbers[seat] for rank, seat in seats.items()}


def by_owner(
    frame: pd.DataFrame, source: Source, phase: str, metric: str | None = None, *, add: bool = False
) -> pd.Series[float]:
    """A metric (default: that of the source) after each cycle's phase, per rank, or per GPU if ranks share one. A number of the
    whole GPU, reported by each of its ranks, counts once; with `add`, numbers of single ranks are summed."""
    rows = select(frame, phase=phase, metric=metric or source.metric)
    owner = rows["rank"].map(lambda rank: source.gpu_of.get(rank, rank)).rename(source.owner)
    groups = rows.groupby([owner, "cycle"])["value"]
    return groups.sum() if add else groups.max()


def series(frame: pd.DataFrame, own: Source, metric: str, phase: str) -> pd.DataFrame:
    seen = own if metric == own.metric else own._replace(metric=metric, gpu_of={})
    return by_owner(frame, seen, phase).unstack(seen.owner)


def growth(phase: str, metric: str = "") -> Measure:
    """The largest growth of memory from the first to the last cycle, after a phase."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - measures are called alike
        own = source(frame)
        table = series(frame, own, metric or own.metric, phase) / MIB
        if len(table) < 2:
            raise Missing(f"memory was recorded in {len(table)} cycle; a drift needs 2")
        first, last = table.iloc[0], table.iloc[-1]
        owner: Any = (last - first).idxmax()
        before, now = ((row[owner], f"{phase} in cycle {row.name}") for row in (first, last))
        why = compared(metric or own.label, before, now, f"{table.columns.name} {owner}", unit=" MiB")
        return Measured(float((last - first).max()), why)

    return measure


def need_cuda(frame: pd.DataFrame) -> None:
    if not (frame["metric"] == "driver_used").any():
        raise NotMeasured("the ranks had no CUDA device")


def bystander_change(first: str) -> Measure:
    """The largest change in the memory of the bystander process since the first phase in which it was measured."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
        need_cuda(frame)
        rows = frame[frame["metric"] == "bystander_driver"]
        if rows.empty:
            raise NotMeasured("no bystander process ran on the GPU")
        start = frame[(frame["phase"] == first) & (frame["metric"] == "bystander_bytes")]["value"]
        if damaged := select(frame, metric="bystander_damaged")["value"].max():
            words = f"{damaged:g} bytes of a bystander process's memory were overwritten"
            return Measured(float(start.max()) / MIB, words)
        if not rows["value"].all():
            raise NotMeasured("the driver does not list the bystander process (a container, or a part of a GPU)")
        level = rows["rank"].map(rows[rows["phase"] == first].set_index("rank")["value"])
        moved = (rows["value"] - level).abs()
        return Measured(float(moved.max()) / MIB, f"{len(rows)} readings over all ranks, from the driver")

    return measure


def rise(table: pd.DataFrame) -> pd.Series:
    """Growth per cycle after the warm-up, one value per column: the median of all pairwise slopes, or with fewer than `RISING` cycles the
    smallest step from one cycle to the next. So no single jump counts as growth in every cycle."""
    import numpy as np
    import pandas as pd

    rows = table[table.index > table.index.min() + WARM_UP - 1] if len(table) > WARM_UP + 1 else table
    if WARM_UP + 1 < len(table) < RISING:
        return rows.diff().min()
    first, second = np.triu_indices(len(rows), k=1)
    cycles = rows.index.to_numpy(dtype=float)
    values = rows.to_numpy(dtype=float)
    slopes = (values[second] - values[first]) / (cycles[second] - cycles[first])[:, None]
    return pd.Series(np.median(slopes, axis=0), index=rows.columns)


def slopes(
    phase: str, control: str = "", allowed: Callable[[Mapping[str, Any]], float] = lambda _: 1.0
) -> Callable[[pd.DataFrame, Mapping[str, Any]], Measured | list[Measured]]:
    """Growth per cycle of memory on the worst rank or GPU, above the slope of the same kind in a control without treatment: on the CPU of
    the fastest-growing kind, on a GPU one answer per kind. All levels are from one phase, since levels differ between phases.

    `allowed` is the limit of a kind that is counted in bytes. The driver gives memory in pages of 2 MiB, and one more page in few cycles
    is a steep line: its numbers need `RISING` cycles and may grow by `DRIVER_STEP` in each of these, in more cycles by no more in total.
    """

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured | list[Measured]:
        own = source(frame)
        kinds = dict.fromkeys([own.metric, *(["driver_used"] if own.metric != "process_used" else []), *WEIGHED])
        rows = frame[frame["phase"] == phase]
        recorded, cycles = {*rows["metric"]}, rows["cycle"].nunique()
        driven = bool(recorded & {*BY_DRIVER})
        steps = {**dict.fromkeys(BY_DRIVER, DRIVER_STEP), **dict.fromkeys(HOST, HOST_STEP)} if driven else {}
        least = {kind: step * RISING / max(RISING, cycles) for kind, step in steps.items()}
        answers = [
            null(TooFewCycles(RISING), of=kind)
            if kind in BY_DRIVER and cycles < RISING
            else replace(slope(frame, own, kind, phase, control), limit=max(allowed(config), least.get(kind, 0.0)))
            for kind in kinds
            if kind in recorded
        ]
        if not answers:
            raise Missing(f"no memory was recorded in phase {phase}")
        if driven:
            return answers
        top = max(answers, key=lambda answer: answer.value or 0.0)
        remaining = ", ".join(f"{answer.of} {answer.value:+.3f}" for answer in answers if answer is not top)
        return Measured(top.value, f"{top.why}; others: {remaining}" if remaining else top.why)

    return measure


def slope(frame: pd.DataFrame, own: Source, kind: str, phase: str, control: str) -> Measured:
    table = series(frame, own, kind, phase)
    if len(table) <= WARM_UP + 1:
        raise Missing(f"{kind} was recorded in only {len(table)} cycles, too few for a slope")
    slopes = rise(table) / MIB
    allowed = slopes * 0
    if has_control := bool(control and ((frame["metric"] == kind) & (frame["phase"] == control)).any()):
        allowed = (rise(series(frame, own, kind, control)) / MIB).clip(lower=0)

    over = slopes - allowed
    owner: Any = over.idxmax()
    where = f"{table.columns.name} {owner}, {len(table) - WARM_UP} cycles"
    why = f"{kind}: {slopes[owner]:+.3f} MiB/cycle after {phase} ({where})"
    if has_control:
        why = compared(kind, (allowed[owner], control), (slopes[owner], phase), where, unit=" MiB/cycle")
    return Measured(max(0.0, float(over.max())), why, of=kind)


def slope_limit(state: Callable[[Mapping[str, Any]], float]) -> Callable[[Mapping[str, Any]], float]:
    """1 MiB per cycle, or a share of the job's state if that is more; `state` gives its bytes."""
    return lambda config: max(1.0, STATE_SHARE * state(config) / MIB)


def nothing_piles_up(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    """Do groups, file descriptors, threads, processes, shared memory and temporary files stay constant from cycle to cycle?

    The largest increase of any count from the end of the second cycle to the end of the last. Everything that is made once exists after
    two cycles. With four cycles or more, the last two must both have the increase."""
    rows = frame[(frame["cycle"] > 0) & frame["metric"].isin(PILED)]
    if rows.empty:
        raise Missing("no file descriptors, threads or files were counted")
    if rows["cycle"].nunique() <= SETTLED:
        raise TooFewCycles(SETTLED + 1)
    phases = rows.groupby("cycle")["phase"].last()
    rows = rows[rows["phase"] == rows["cycle"].map(phases)]
    table = rows.pivot_table(index="cycle", columns=["metric", "rank"], values="value", aggfunc="last")
    last, is_long = table.index[-1], len(table) > SETTLED + 1
    now = table.iloc[-2:].min() if is_long else table.iloc[-1]
    levels = now.rename("value").to_frame().assign(before=table.iloc[SETTLED - 1]).dropna().reset_index()
    place = f"cycles {table.index[-2]} and {last}" if is_long else f"cycle {last}"
    return worst(levels.assign(phase=place, cycle=last), base=f"cycle {table.index[SETTLED - 1]}")


def steady(*phases: str) -> Measure:
    """Ratio of each phase's time in both of the last two cycles to that in any earlier cycle, on the worst rank; and last to second cycle,
    on the line through all. With fewer than `RISING` cycles its slope is the smallest step from one cycle to the next. An increase below
    `LEAST_S` does not count, nor does one slow cycle: on a busy machine one cycle took five times as long as others."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        import numpy as np

        answers = []
        for phase in phases:
            rows = select(frame, phase=phase, metric="seconds")
            table = rows.groupby(["cycle", "rank"])["value"].max().unstack("rank")
            if len(table) < config["cycles"]:
                raise Missing(f"{phase} was timed in {len(table)} of {config['cycles']} cycles")
            pairs = {("any earlier cycle", "both of the last two"): (table.iloc[:-2].max(), table.iloc[-2:].min())}
            if len(table) >= SLOPE_CYCLES:
                warm = table.iloc[WARM_UP:]
                slope = rise(table).clip(lower=0)
                since = warm.index.to_numpy() - warm.index[0]
                at_first = (warm - np.outer(since, slope)).median().clip(lower=warm.min())
                pairs["the second cycle", "the last, on the line through all"] = at_first, at_first + slope * since[-1]

            ratios = []
            for (earlier, later), (base, now) in pairs.items():
                ratio = (now / base).where(now - base >= LEAST_S, (now / base).clip(upper=1.0))
                rank: Any = ratio.idxmax()
                times = f"{base[rank] * 1e3:.0f} ms in {earlier}, {now[rank] * 1e3:.0f} ms in {later}"
                ratios.append(Measured(float(ratio[rank]), f"{phase}: {times} (rank {rank})"))
            answers.append(max(ratios, key=lambda answer: answer.value or 0.0))
        top = max(answers, key=lambda answer: answer.value or 0.0)
        shared = [SHARED_GPU] if sharing(frame) > 1 else []
        return Measured(top.value, "; ".join([*(answer.why for answer in answers), *shared]))

    return measure


def each_observed(
    ask: Callable[[str], Callable[[pd.DataFrame, Mapping[str, Any]], Measured | list[Measured]]],
) -> Callable[[pd.DataFrame, Mapping[str, Any]], list[Measured]]:
    """The same check for each phase that the observers watched: the answers about each phase."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> list[Measured]:
        answers = []
        for phase in frame[frame["metric"] == "observers_seconds"]["phase"].unique():
            try:
                finding = ask(phase)(frame[frame["phase"] == phase], config)
                parts = [finding] if isinstance(finding, Measured) else finding
                answers += [replace(part, of=f"{phase}/{part.of}" if part.of else phase) for part in parts]
            except NotMeasured as missing:
                answers.append(null(missing, of=phase))
        return answers

    return measure


def observed(config: Mapping[str, Any]) -> bool:
    """Whether observers watched your own job: `rec.phase(..., observe=True)`."""
    return bool(config.get("observed"))


def routing_effective(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Do all collectives go through the backend that `routing` names?

    The share of routed groups (WORLD included), on the rank with the lowest share."""

    def by_rank(metric: str) -> pd.Series:
        return select(frame, phase="run", metric=metric).set_index("rank")["value"]

    effective = by_rank("routing_effective")
    rank: Any = effective.idxmin()
    if effective[rank] != 1:
        reason = select(frame, phase="run", metric="routing_reason", rank=rank)["text"].iloc[0]
        return Measured(0.0, f"requested but not in effect on rank {rank}: {reason or 'see run.json'}")
    made, routed = by_rank("routing_groups"), by_rank("routing_groups_effective")
    rank = (routed / made).idxmin()
    why = f"{routed[rank]:.0f} of {made[rank]:.0f} groups on rank {rank} go through {config['routing']}"
    lost = by_rank("routing_options_lost").max()
    dropped = f"; {lost:.0f} options were dropped, see run.json" if lost else ""
    return Measured(float(routed[rank] / made[rank]), why + dropped)


def by_ranks(config: Mapping[str, Any]) -> bool:
    """Whether ranks do the work. On simulated ones nothing could pile up in them."""
    return not config.get("simulated")


PILES_UP = rule(nothing_piles_up, cycles=SETTLED + 1, when=by_ranks)
# Rules for any job, without a lab.
OBSERVED = (
    replace(PILES_UP, measure=each_observed(lambda _: nothing_piles_up), when=observed),
    Rule(
        "memory_slope",
        "Does memory stay constant from cycle to cycle?",
        each_observed(slopes),
        limit=1,
        unit="MiB/cycle",
        when=observed,
    ),
)
EVERY_LAB = (
    rule(
        routing_effective,
        limit=1,
        better=">=",
        when=lambda config: config.get("routing", "torch") != "torch",
    ),
    PILES_UP,
)
