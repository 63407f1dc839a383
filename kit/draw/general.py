"""The charts and tables that every run has: colour is the phase, shape is the rank."""

from __future__ import annotations

import math
import textwrap
from functools import partial

import pandas as pd

from kit.draw.album import Charts, Table
from kit.draw.chart import Limit, Plot
from kit.draw.data import CONTROL, RunData, lines_apart, with_attrs
from kit.draw.lanes import Lanes
from kit.draw.lines import Lines
from kit.draw.matrix import Matrix
from kit.draw.points import Points, counts_in_words
from kit.draw.style import Look
from kit.machine import MIB
from kit.results import NotMeasured, Verdict
from kit.results.frames import own_numbers, summary_of, without_empty
from kit.results.records import rank_name
from kit.results.units import ROW, size
from kit.results.verdict import MARKS, beside_mark, cells, folded_rows, without_parts

SOURCES = {
    "Host memory of the ranks": {"rss": "resident", "anon_rss": "anonymous", "peak_rss": "peak"},
    "GPU memory": {
        "driver_used": "whole GPU",
        "process_used": "this process",
        "reserved": "reserved",
        "allocated": "allocated",
        "peak_allocated": "peak",
    },
}
COUNTS = {"groups": "Process groups", "fds": "Open files", "sockets": "Sockets", "threads": "Threads"}
# By how much a count may grow.
COUNT_LIMITS = tuple(
    Limit(rule, "limit {limit:+g}", panel=COUNTS[metric])
    for metric, rule in {
        "groups": "groups_return_to_baseline",
        "fds": "fds_return",
        "threads": "threads_return",
    }.items()
)
DRIFT_LIMITS = (Limit("memory_drift"), Limit("memory_growth"))  # of any lab
CONTROL_RUN = "control run"
MEMORY_METRICS = ("anon_rss", "rss", "pss", "driver_used", "process_used", "allocated", "reserved")
TONES = {True: "good", False: "bad", None: "faint"}  # of an answer
MOST_NUMBERS = 4  # side by side in a plot
PASSED_COLUMNS = 4


# -- rows of the charts --------------------------------------------------------------------------------------------------


def memory_by_source(data: RunData) -> pd.DataFrame:
    """Memory after each phase as the change since the start. The name of a source has its last level."""
    parts = []
    for where, sources in SOURCES.items():
        shared = ", each GPU shared by ranks" if where == "GPU memory" and data.memory.gpu_of else ""
        for metric in [name for name in sources if name in data.metrics()]:
            level, start = data.level(metric), data.start(metric.removeprefix("peak_")) or 0.0
            if level.empty:  # none of its values is a number
                continue
            name = f"{sources[metric]}, {size(level['value'].iloc[-1])}"
            level[["low", "value", "high"]] -= start
            parts.append(level.assign(panel=where + shared, kind=name, start=0.0))
    if not parts:
        raise NotMeasured("the run has no records of memory")
    return with_attrs(data.by_step(pd.concat(parts)), ranks=data.ranks_word())


def memory_drift(data: RunData, *, phase: str = "", when: str = "") -> pd.DataFrame:
    """Memory after a phase of each cycle against the first cycle; without a phase, the last one that several cycles have. Beside it a job
    that is never released, where the lab has one."""
    seen = data.frame[data.frame["metric"].isin(["driver_used", "anon_rss"]) & data.frame["cycle"].isin(data.cycles)]
    cycles = seen.groupby("phase")["cycle"].nunique()
    cycles = cycles[cycles > 1]
    if cycles.empty or (phase and phase not in cycles):
        raise NotMeasured("no phase of several cycles has records of memory")
    last = phase or max((str(name) for name in cycles.index if cycles[name] == cycles.max()), key=data.phases.index)
    table, control = data.memory_levels(last), data.memory_levels(CONTROL)
    rows = lines_apart((table - table.iloc[0]) / MIB, data.memory.owner)
    control = control[control.index.isin(table.index)]
    if not control.empty:
        change = ((control - control.iloc[0]) / MIB).median(axis=1)
        rows = pd.concat([rows, change.rename("value").rename_axis("x").reset_index().assign(kind=CONTROL_RUN)])
    first = data.cycle_words.get(int(table.index[0]), f"cycle {table.index[0]}")
    ticks = {"ticks": {cycle: data.cycle_words[cycle] for cycle in table.index}} if data.cycle_words else {}
    return with_attrs(
        rows.assign(start=0.0),
        memory="anonymous memory" if data.memory.metric == "anon_rss" else "GPU memory",
        when=when or f"after {last}",
        first=" ".join(first.split()),
        axis=data.cycle,
        **ticks,
    )


def drift_chart(phase: str = "", when: str = "") -> Lines:
    """The chart of memory over cycles, after a phase that the words `when` describe."""
    return Lines(
        rows=partial(memory_drift, phase=phase, when=when),
        title="Drift over cycles",
        heading="Drift of {memory} {when}",
        label="since {first} [MiB]",
        about="{axis} (a point is one sample)",
        limits=DRIFT_LIMITS,
        looks={CONTROL_RUN: Look("faint", line=1, marker="")},
        least=4.0,
        height=3.4,
    )


def own_lines(data: RunData) -> pd.DataFrame:
    """Own numbers, such as a loss: over the cycles where each rank has one in each, else in the order of recording."""
    if not data.run.own:
        raise NotMeasured("the numbers of a lab have charts of their own")
    numbers, parts = own_numbers(data.records), []
    for metric in numbers["metric"].value_counts().index[:MOST_NUMBERS]:
        rows = numbers[numbers["metric"] == metric]
        is_once = not rows.duplicated(["rank", "cycle"]).any()
        rows = rows.assign(at=rows["cycle"] if is_once else rows.groupby("rank").cumcount())
        unit = rows["unit"].iloc[0]
        name = f"{metric} [{unit}]" if unit not in ("", "1") else metric
        lines = lines_apart(rows.pivot_table(index="at", columns="rank", values="value"), "rank")
        parts.append(lines.assign(panel=name, axis="cycle" if is_once else "record"))
    if not parts:
        raise NotMeasured("the job recorded no numbers")
    return pd.concat(parts)


def phase_times(data: RunData) -> pd.DataFrame:
    rows = data.timed().sort_values(["step", "rank"], kind="stable")  # not in the order in which ranks answered
    rows = rows.assign(place=rows["phase"], kind=rows["phase"], lane=data.lanes(rows))
    counts = counts_in_words(rows, "phase", "lane")
    spread = "" if counts == "n = 1" else ", median and range"
    is_apart = rows["lane"].nunique() == len(data.ranks)
    return with_attrs(rows, each="phase and rank" if is_apart else "phase, all ranks", n=f"{counts} each{spread}")


def counts_by_step(data: RunData) -> pd.DataFrame:
    """Counts through the phases, with the level at the start."""
    parts = []
    for metric in [name for name in COUNTS if name in data.metrics()]:
        start, level = data.start(metric), data.level(metric)
        name = COUNTS[metric] + ("" if start is None else f": start {start:g}")
        parts.append(level.assign(panel=name, start=math.nan if start is None else start))
    if not parts:
        raise NotMeasured("the run has no records of groups, files or threads")
    ranks = "" if len(data.ranks) == 1 else f" (range of {len(data.ranks)} ranks)"
    return with_attrs(data.by_step(pd.concat(parts)), ranks=ranks)


def phases_of_ranks(data: RunData) -> pd.DataFrame:
    """What each rank did when; a phase that raised has a frame. An inner phase lies on the outer one."""
    seconds, failed = data.timed(), data.of("failed")
    begin = float((seconds["time"] - seconds["value"]).min())
    rows = pd.DataFrame(
        {
            "lane": [rank_name(rank, data.run.roles) for rank in seconds["rank"]],
            "kind": seconds["phase"],
            "left": seconds["time"] - seconds["value"] - begin,
            "right": seconds["time"] - begin,
        }
    )
    raised = set(zip(failed["step"], failed["rank"], strict=True))
    frames = rows[[key in raised for key in zip(seconds["step"], seconds["rank"], strict=True)]].assign(kind="raised")
    rows = rows.assign(rank=seconds["rank"]).sort_values(["rank", "left"], kind="stable")
    return pd.concat([rows, frames])


def verdict_cells(verdict: Verdict) -> pd.DataFrame:
    """Checks that failed and those not measured first, with the reason; of those that passed the names, in columns."""
    groups = folded_rows(without_parts(verdict))
    lines: list[tuple[int, float, str, str]] = []
    others = [group for group in groups if not group[0].passed]
    for line, group in enumerate(others):
        check, measured, limit, reason = cells(group)
        held = "" if group[0].measured is None else f"{measured}, limit {limit}"
        why = textwrap.shorten(beside_mark(reason), 84 if held else 110, placeholder=" ...")
        lines.append((line, 0.0, str(MARKS[group[0].passed]), TONES[group[0].passed]))
        lines += [
            (line, start, words, "ink")
            for start, words in ((0.12, check), (0.34, held or why), (0.5, why if held else ""))
        ]
    passed = [group[0] for group in groups if group[0].passed]
    deep = math.ceil(len(passed) / PASSED_COLUMNS)
    for index, row in enumerate(passed):
        place, line = divmod(index, deep)
        start = place / PASSED_COLUMNS
        lines += [
            (len(others) + line, start, MARKS[True].sign, "good"),
            (len(others) + line, start + 0.015, row.check, "ink"),
        ]
    table = pd.DataFrame(lines, columns=["row", "start", "words", "tone"])
    return table.assign(column=table["start"].map(str), bold=table["tone"] != "ink")


# -- tables ------------------------------------------------------------------------------------------------------------


def every_record(data: RunData) -> pd.DataFrame:
    """Every record, in the order of time. Run and lab are the same in each; times are seconds since the first."""
    frame = without_empty(data.records.drop(columns=["run", "lab"]))
    began = frame["time"].min()
    moments = {name: (frame[name] - began).round(3) for name in ("time", "start") if name in frame}
    return frame.assign(**moments).rename(columns={"time": "at [s]", "start": "since [s]"})


def time_of_phases(data: RunData) -> pd.DataFrame:
    seconds = data.records[(data.records["metric"] == "seconds") & data.records["value"].notna()]
    table = seconds.groupby(["phase", "rank"], sort=False)["value"].agg(["count", "median", "min", "max"]).reset_index()
    names = [rank_name(int(rank), data.run.roles) for rank in table["rank"]]
    return table.assign(rank=names).rename(columns={"count": "n"})


def levels_of_phases(data: RunData) -> pd.DataFrame:
    rows = data.records[data.records["metric"].isin([*MEMORY_METRICS, *COUNTS]) & data.records["value"].notna()]
    return rows.groupby(["phase", "metric", "unit"], sort=False)["value"].agg(["median", "min", "max"]).reset_index()


MEMORY = Lines(
    rows=memory_by_source,
    heading="{panel} ({ranks})",
    label="change since start",
    about="{axis}",
    unit="B",
    least=8 * MIB,
    height=3.2,
)
CENSUS = Lines(
    rows=counts_by_step,
    title="Groups, files, threads",
    heading="{panel}",
    label="count{ranks}",
    about="{axis}",
    limits=COUNT_LIMITS,
    least=4.0,
    height=2.65,
)
TIMES = Points(
    rows=phase_times,
    title="Time per phase and rank",
    heading="Time per {each} ({n})",
    label="time",
    unit="s",
    height=3.4,
)
SPREAD = {"median": ROW, "min": ROW, "max": ROW}
GENERAL = Charts(
    plots={
        "memory": Plot("Memory by source", [MEMORY], below=True),
        "drift": drift_chart(),
        "numbers": Lines(rows=own_lines, title="Own numbers", heading="{panel}", about="{axis}"),
        "times": TIMES,
        "census": CENSUS,
        "timeline": Lanes(
            rows=phases_of_ranks,
            title="Timeline of ranks",
            looks={"raised": Look("ink", hollow=True)},
            about="time since the first phase began",
        ),
        "verdict": Matrix(rows=verdict_cells, title="Verdict", heading=" ", judged=True, heads=False),
    },
    overview=(("numbers",), ("times", "memory"), ("census",), ("timeline",), ("verdict",)),
    tables={
        "times": Table(
            "Time per phase and rank", time_of_phases, "median", dict.fromkeys(("median", "min", "max"), "s")
        ),
        "numbers": Table(
            "Own numbers",
            lambda data: summary_of(data.records),
            units=dict.fromkeys(("first", "last", "min", "max"), ROW),
        ),
        "memory": Table("Memory and counts per phase", levels_of_phases, units=SPREAD),
        "records": Table("Every record", every_record),
    },
)
