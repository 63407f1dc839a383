"""Common parts of checks: counts, memory and its growth, leftovers, steady times, routing, and reading ledgers from a frame.

Every `measure` is called with the frame of a run and its config.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kit.nccl import SHARED_GPU
from kit.results.frames import Source, read_ids, sharing, source
from kit.results.records import NOTEBOOK
from kit.results.rules import Measured, Missing, NotMeasured, Rule, incomplete, select

if TYPE_CHECKING:
    import pandas as pd

    Measure = Callable[[pd.DataFrame, Mapping[str, Any]], Measured]

MIB = 2**20
COUNTS = ("fds", "sockets", "threads", "children", "memfds", "shared_maps", "shm_files", "temp_files")
PILED = ("groups", *COUNTS)
WEIGHED = ("anon_rss", "file_rss", "shm_rss", "tensor_bytes", "pinned_bytes")
WARM_UP = 1  # first cycles excluded from a slope
SLOPE_CYCLES = 4
RISING = 6  # from this many cycles on, a single cycle cannot tilt the line through all
LEAST_S = 0.1  # a phase that takes less than this longer is steady
SETTLED = 2  # cycles after which all one-time allocations exist
STATE_SHARE = 0.01  # share of the job's state that a cycle may add without counting as growth


def needs_cycles(least: int) -> Callable[[Mapping[str, Any]], str]:
    """Why a config has too few cycles for an answer; a lab without cycles always has enough."""
    return lambda config: "" if config.get("cycles", least) >= least else f"needs at least {least} cycles"


one_cycle, few_cycles = needs_cycles(2), needs_cycles(SLOPE_CYCLES)


# -- counts --------------------------------------------------------------------------------------------------------------


def each_rank(frame: pd.DataFrame, config: Mapping[str, Any], phase: str, metric: str) -> pd.DataFrame:
    """A number from every rank in every cycle, or once for a phase of cycle 0. If any is missing, the check cannot pass."""
    rows = select(frame, phase=phase, metric=metric)
    wanted = config["ranks"] * (config["cycles"] if rows["cycle"].any() else 1)
    if len(rows) < wanted:
        incomplete(f"{metric} was recorded {len(rows)} times, not {wanted} (once per rank and cycle)")
    return rows


def most(rows: pd.DataFrame) -> tuple[float, str]:
    row = rows.iloc[int(rows["value"].to_numpy().argmax())]
    noted = f": {row['text']}" if row.get("text") else ""
    return float(row["value"]), f"(rank {row['rank']}, cycle {row['cycle']}){noted}"


def everywhere(config: Mapping[str, Any]) -> str:
    return ", ".join(f"{config[name]} {name if config[name] > 1 else name[:-1]}" for name in ("ranks", "cycles"))


def count_of(phase: str, metric: str, found: str, none: str) -> Measure:
    """The largest count of something that must be 0. The words describe a finding and its absence."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        value, where = most(each_rank(frame, config, phase, metric))
        return Measured(
            value, (found if value else none).format(value=value, where=where, everywhere=everywhere(config))
        )

    return measure


def more_than(metric: str, phase: str, base: str) -> Measure:
    """The largest increase of a count from `base` to any cycle's `phase`, on the worst rank."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        before = select(frame, phase=base, metric=metric).groupby("rank")["value"].first()
        rows = each_rank(frame, config, phase, metric)
        more = rows.assign(value=rows["value"] - rows["rank"].map(before))
        if more["value"].isna().any():
            incomplete(f"{metric} was not recorded on every rank after {base}")
        value, where = most(more.dropna(subset="value"))
        words = f"+{value:g} {where}" if value > 0 else f"no increase in {everywhere(config)}"
        return Measured(value, f"{metric} after {phase}, compared with {int(before.max())} after {base}: {words}")

    return measure


# -- memory --------------------------------------------------------------------------------------------------------------


def gpus(ranks: Iterable[Mapping[str, Any]]) -> dict[int, int]:
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


def by_cycle(rows: pd.DataFrame) -> pd.DataFrame:
    """The largest value of each cycle (the rows) on each rank (the columns)."""
    return rows.groupby(["cycle", "rank"])["value"].max().unstack("rank")


def growth(phase: str, when: str, metric: str = "") -> Measure:
    """The largest growth of memory from the first to the last cycle's phase; `when` describes the phase."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - checks are called alike
        own = source(frame)
        table = series(frame, own, metric or own.metric, phase)
        if len(table) < 2:
            raise Missing(f"memory was recorded in {len(table)} cycle; a drift needs 2")
        grown = (table.iloc[-1] - table.iloc[0]) / MIB
        where = f"cycle {table.index[-1]} vs cycle {table.index[0]} ({table.columns.name} {grown.idxmax()})"
        return Measured(float(grown.max()), f"{metric or own.label} {when}, {where}")

    return measure


def others_untouched(first: str) -> Measure:
    """The largest change in the memory of the bystander process since the first phase in which it was measured."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
        rows = frame[frame["metric"] == "bystander_driver"]
        source = "the driver"
        if not rows["value"].all():
            rows = frame[frame["metric"] == "bystander_bytes"]
            source = "its own allocator (the driver does not list it)"
        if rows.empty:
            raise NotMeasured("no bystander process ran on the GPU")
        start = rows[rows["phase"] == first].set_index("rank")["value"]
        moved = (rows["value"] - rows["rank"].map(start)).abs()
        if damaged := select(frame, metric="bystander_damaged")["value"].max():
            words = f"{damaged:g} bytes of a bystander process's memory were overwritten"
            return Measured(float(start.max()) / MIB, words)
        return Measured(float(moved.max()) / MIB, f"{len(rows)} readings over all ranks, from {source}")

    return measure


def on_cuda(ask: Measure) -> Measure:

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        if not (frame["metric"] == "driver_used").any():
            raise NotMeasured("the ranks had no CUDA device")
        return ask(frame, config)

    return measure


def theil_sen(table: pd.DataFrame) -> pd.Series:
    """The median of all pairwise slopes per cycle after the warm-up, one value per column; robust against outliers."""
    import numpy as np
    import pandas as pd

    rows = table[table.index > table.index.min() + WARM_UP - 1] if len(table) > WARM_UP + 1 else table
    first, second = np.triu_indices(len(rows), k=1)
    cycles = rows.index.to_numpy(dtype=float)
    values = rows.to_numpy(dtype=float)
    slopes = (values[second] - values[first]) / (cycles[second] - cycles[first])[:, None]
    return pd.Series(np.median(slopes, axis=0), index=rows.columns)


def slopes(phase: str, control: str = "") -> Measure:
    """Growth per cycle of the fastest-growing kind of memory, on the worst rank or GPU, above the slope of the same kind in a control
    without treatment. All levels are from one phase, since levels differ between phases."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - checks are called alike
        own = source(frame)
        kinds = dict.fromkeys([own.metric, *(["driver_used"] if own.metric != "process_used" else []), *WEIGHED])
        recorded = {*frame.loc[frame["phase"] == phase, "metric"]}
        here = [kind for kind in kinds if kind in recorded]
        if not here:
            raise Missing(f"no memory was recorded in phase {phase}")
        found = [_slope(frame, own, kind, phase, control) for kind in here]
        worst = max(found, key=lambda one: one.value or 0.0)
        others = ", ".join(f"{one.of} {one.value:+.3f}" for one in found if one is not worst)
        return Measured(worst.value, f"{worst.why}; others: {others}" if others else worst.why)

    return measure


def _slope(frame: pd.DataFrame, own: Source, metric: str, phase: str, control: str) -> Measured:
    table = series(frame, own, metric, phase)
    if len(table) <= WARM_UP + 1:
        raise Missing(f"{metric} was recorded in only {len(table)} cycles, too few for a slope")
    mine = theil_sen(table) / MIB
    allowed, compared = mine * 0, ""
    if control and ((frame["metric"] == metric) & (frame["phase"] == control)).any():
        allowed = (theil_sen(series(frame, own, metric, control)) / MIB).clip(lower=0)
        compared = f", control {allowed.max():+.3f}"
    over = mine - allowed
    worst: Any = over.idxmax()
    where = f"{table.columns.name} {worst}"
    why = f"{metric} {mine[worst]:+.3f} MiB/cycle over {len(table) - WARM_UP} cycles ({where}){compared}"
    return Measured(max(0.0, float(over.max())), why, of=metric)


def slope_limit(state: Callable[[Mapping[str, Any]], float]) -> Callable[[Mapping[str, Any]], float]:
    """1 MiB per cycle, or a share of the job's state if that is more; `state` gives its bytes."""
    return lambda config: max(1.0, STATE_SHARE * state(config) / MIB)


def lasting(metric: str, phase: str, base: str, then: str = "") -> Measure:
    """The largest increase over `base` that is present after `phase` of two successive cycles, on the worst rank. `then` follows the last
    cycle. A leak stays, while on a busy machine one rank once had an extra socket in one cycle of 20. So an increase that appears only in
    the last of several counts does not count."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        before = select(frame, phase=base, metric=metric).groupby("rank")["value"].first()
        rows = select(frame, phase=phase, metric=metric)
        if len(rows) < config["ranks"] * config["cycles"]:
            incomplete(f"{metric} was counted {len(rows)} times, not {config['ranks'] * config['cycles']}")
        table = by_cycle(rows)
        more = frame[(frame["phase"] == then) & (frame["metric"] == metric)]
        if len(more):
            table.loc[int(table.index.max()) + 1] = more.groupby("rank")["value"].max()
        table = table - before
        stays = table.clip(upper=table.shift(-1)).iloc[:-1] if len(table) > 1 else table
        rank, cycle = stays.max().idxmax(), stays.max(axis=1).idxmax()
        value = float(stays.max().max())
        words = f"+{value:g} from cycle {cycle} on (rank {rank})" if value > 0 else "no lasting increase"
        return Measured(value, f"{metric} after {phase}, compared with {int(before.max())} after {base}: {words}")

    return measure


def piled_up(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - checks are called alike
    """The largest increase of any count from the end of the second cycle to the end of the last, on the worst rank. Everything that is made
    once exists after two cycles. With four cycles or more, the last two must both have the increase."""
    rows = frame[(frame["cycle"] > 0) & frame["metric"].isin(PILED)]
    if rows.empty:
        raise Missing("no file descriptors, threads or files were counted")
    if rows["cycle"].nunique() <= SETTLED:
        raise NotMeasured(f"needs at least {SETTLED + 1} cycles")
    phases = rows.groupby("cycle")["phase"].last()
    rows = rows[rows["phase"] == rows["cycle"].map(phases)]
    table = rows.pivot_table(index="cycle", columns=["metric", "rank"], values="value", aggfunc="last")
    many = len(table) > SETTLED + 1
    last = "in each of the last two" if many else f"after cycle {table.index[-1]}"
    now = table.iloc[-2:].min() if many else table.iloc[-1]
    return _more(table.iloc[SETTLED - 1], now, f"after cycle {table.index[SETTLED - 1]}", last)


def left(after: str, base: str) -> Measure:
    """The largest increase of any count from before the run to after it, on the worst rank."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        rows = frame[frame["metric"].isin(COUNTS)]
        before, now = (
            rows[rows["phase"] == phase].groupby(["metric", "rank"])["value"].last() for phase in (base, after)
        )
        if min(len(before), len(now)) < config["ranks"]:
            incomplete(f"file descriptors, threads and files were not counted on every rank after {base} and {after}")
        return _more(before, now, f"after {base}", f"after {after}")

    return measure


def _more(before: pd.Series, now: pd.Series, then: str, at_last: str) -> Measured:
    more = (now - before).dropna()
    worst = more.groupby(level="metric").idxmax()
    grown = [place for place in worst if more[place] > 0]
    words = [f"{one[0]}: {before[one]:g} {then}, {now[one]:g} {at_last} (rank {one[1]})" for one in grown]
    return Measured(max(0.0, float(more.max())), "; ".join(words) or f"no increase in {', '.join(worst.index)}")


def steady(phases: Sequence[str]) -> Measure:
    """Ratio of each phase's time in both of the last two cycles to that in any earlier cycle, on the worst rank. From `RISING` cycles on
    also last to second cycle, on the line through all. An increase below `LEAST_S` does not count, nor does one slow cycle: on a busy
    machine one cycle took five times as long as others."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        found = [_steady(frame, config, phase) for phase in phases]
        worst = max(found, key=lambda one: one.value or 0.0)
        shared = [SHARED_GPU] if sharing(frame) > 1 else []
        return Measured(worst.value, "; ".join([*(one.why for one in found), *shared]))

    return measure


def _steady(frame: pd.DataFrame, config: Mapping[str, Any], phase: str) -> Measured:
    import numpy as np

    table = by_cycle(select(frame, phase=phase, metric="seconds"))
    if len(table) < config["cycles"]:
        raise Missing(f"{phase} was timed in {len(table)} of {config['cycles']} cycles")
    pairs = {"in both of the last two cycles, at most {} before": (table.iloc[:-2].max(), table.iloc[-2:].min())}
    if len(table) >= RISING:
        slope, rows = theil_sen(table), table.iloc[WARM_UP:]
        since = rows.index.to_numpy() - rows.index[0]
        at_first = (rows - np.outer(since, slope)).median()
        at_first = at_first.clip(lower=rows.min())
        at_last = at_first + slope * since[-1]
        pairs["in the last cycle, {} in the second, by the slope of all cycles"] = (at_first, at_last)
    found = []
    for words, (base, now) in pairs.items():
        ratio = (now / base).where(now - base >= LEAST_S, (now / base).clip(upper=1.0))
        rank: Any = ratio.idxmax()
        times = f"{now[rank] * 1e3:.0f} ms {words.format(f'{base[rank] * 1e3:.0f} ms')}"
        found.append(Measured(float(ratio[rank]), f"{phase}: {times} (rank {rank})"))
    return max(found, key=lambda one: one.value or 0.0)


def each_observed(ask: Callable[[str], Measure]) -> Callable[[pd.DataFrame, Mapping[str, Any]], list[Measured]]:
    """The same check for each phase that the observers watched: one answer per phase."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> list[Measured]:
        found = []
        for phase in frame[frame["metric"] == "observers_seconds"]["phase"].unique():
            try:
                found.append(replace(ask(phase)(frame[frame["phase"] == phase], config), of=phase))
            except NotMeasured as missing:
                found.append(Measured(None, str(missing), of=phase))
        return found

    return measure


def observed(config: Mapping[str, Any]) -> bool:
    """Whether observers watched your own job: `rec.phase(..., observe=True)`."""
    return bool(config.get("observed"))


def routed_part(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """The share of routed groups (WORLD included), on the rank with the lowest share."""

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
    more = f"; {lost:.0f} options were dropped, see run.json" if lost else ""
    return Measured(float(routed[rank] / made[rank]), why + more)


NOTHING_PILES_UP = (
    "nothing_piles_up",
    "Do groups, file descriptors, threads, processes, shared memory and temporary files stay constant from cycle to cycle?",
)
# Checks that apply to any job, without a lab.
OBSERVED = (
    Rule(*NOTHING_PILES_UP, each_observed(lambda _: piled_up), when=observed),
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
    Rule(
        name="routing_effective",
        question="Do all collectives go through the backend that `routing` names?",
        limit=1,
        unit="1",
        better=">=",
        measure=routed_part,
        when=lambda config: config.get("routing", "torch") != "torch",
    ),
    Rule(*NOTHING_PILES_UP, piled_up, cannot=needs_cycles(SETTLED + 1)),
)


# -- ledgers among a run's records, for labs that drive cores ----------------------------------------------------------


Found = TypeVar("Found")


class PerFrame(Generic[Found]):
    """A cache of the last frame's ledgers by phase, because every check reads the same ones."""

    def __init__(self, read: Callable[[pd.DataFrame, str], Found]) -> None:
        self.read = read
        self.frame: Callable[[], pd.DataFrame | None] = lambda: None
        self.found: dict[str, Found] = {}

    def of(self, frame: pd.DataFrame, phase: str) -> Found:
        if self.frame() is not frame:
            self.frame, self.found = weakref.ref(frame), {}
        if phase not in self.found:
            self.found[phase] = self.read(frame, phase)
        return self.found[phase]


def events(frame: pd.DataFrame, phase: str, *, lab: str, main: str) -> pd.DataFrame:
    """The events of a lab's cores and ports in a phase, in order. In a run of another lab, all events count as the phase `main`."""
    found = frame[frame["value"].isna() & (frame["unit"] == "")]
    if (frame["lab"] == lab).any():
        return found[(found["phase"] == phase) & (found["rank"] == NOTEBOOK)]
    return found[found["rank"] >= 0 if phase == main else found["rank"] < NOTEBOOK].sort_values("time", kind="stable")


def rows_of(found: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows in the form of a judge: `event`, `time` and ids."""
    return [
        {"event": name, "time": when, **read_ids(ids)}
        for name, when, ids in zip(found["metric"], found["time"], found["ids"], strict=True)
    ]
