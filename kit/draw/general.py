"""The plots and tables that every run has (colour is the phase, shape is the rank), and runs compared with the first of them."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from kit.draw.plots import (
    ALL,
    SEPARATE,
    Picture,
    Pictures,
    Plot,
    RunData,
    Scene,
    Table,
    cycle_axis,
    draw_level,
    draw_limit,
    draw_samples,
    grid_across,
    limit_of,
    log_scale,
    marks_of,
    message,
    name_ends,
    phase_columns,
    phase_legend,
    rank_lanes,
    step_axis,
    widen,
)
from kit.draw.style import LINES, MARKERS, Theme, theme
from kit.errors import BadInput
from kit.results import Run, Verdict, compare
from kit.results.comparison import informative, labelled, warnings
from kit.results.frames import labels, own_numbers, summary_of, without_empty
from kit.results.records import rank_name
from kit.results.units import ROW, amount, counted, samples, size_unit, time_unit
from kit.results.verdict import MARKS, cells, folded, without_parts

MIB = 2**20
SOURCES = {
    "Host memory of the ranks": {"peak_rss": "peak", "rss": "resident", "anon_rss": "anonymous"},
    "GPU memory": {
        "driver_used": "whole GPU",
        "process_used": "this process",
        "reserved": "reserved",
        "peak_allocated": "peak",
        "allocated": "allocated",
    },
}
COUNTS = {"groups": "Process groups", "fds": "Open files", "sockets": "Sockets", "threads": "Threads"}
COUNT_CHECKS = ("groups_return_to_baseline", "fds_return", "threads_return")
DRIFT_CHECKS = ("memory_drift", "memory_growth")  # the checks that limit it, in any lab
PASSED_COLUMNS = 4
MEMORY_METRICS = ("anon_rss", "rss", "pss", "driver_used", "process_used", "allocated", "reserved")


# -- memory ------------------------------------------------------------------------------------------------------------


def memory_of(data: RunData) -> dict[str, Mapping[str, str]]:
    return {where: names for where, names in SOURCES.items() if set(names) & data.metrics()}


def memory(scene: Scene) -> None:
    found = memory_of(scene.data)
    for ax, (where, names) in zip(
        scene.figure.subplots(len(found), 1, squeeze=False)[:, 0], found.items(), strict=True
    ):
        shared = ", each GPU shared by ranks" if where == "GPU memory" and scene.data.memory.gpu_of else ""
        draw_memory(ax, scene.data, scene.theme, names, where + shared)


def draw_memory(ax: Axes, data: RunData, theme: Theme, sources: Mapping[str, str], title: str) -> None:
    """Memory after each phase as the change since the start. At the end of each line: the source and its last level."""
    known = [name for name in sources if name in data.metrics()]
    scale, unit = size_unit(max(data.level(name)["max"].iloc[-1] for name in known))
    ends: list[tuple[float, str]] = []
    for source, line in zip(known, itertools.cycle(LINES)):
        level = data.level(source)
        start = data.start(source.removeprefix("peak_")) or 0.0
        draw_level(ax, level, data, theme, start=start, scale=scale, line=line, points=not source.startswith("peak"))
        last = level["median"].iloc[-1]
        ends.append(((last - start) * scale, f"{sources[source]}, {last * scale:.4g} {unit}"))
    widen(ax, least=8 * MIB * scale)
    ax.axhline(0, color=theme.faint, linewidth=1.0, zorder=1)
    ax.set(ylabel=f"change since start [{unit}]", title=f"{title} ({data.ranks_word()})")
    step_axis(ax, data, theme)
    name_ends(ax, ends, len(data.order) - 1, theme)


# -- drift -------------------------------------------------------------------------------------------------------------


def drift(phase: str = "", when: str = "") -> Plot:
    """Memory after a phase of each cycle against the first cycle; without a phase, the last one that several cycles have."""

    def after(data: RunData) -> str | None:
        rows = data.frame
        found = rows[rows["metric"].isin(["driver_used", "anon_rss"]) & rows["cycle"].isin(data.cycles)]
        often = found.groupby("phase")["cycle"].nunique()
        often = often[often > 1]
        if phase or often.empty:
            return phase if phase in often.index else None
        return max((str(one) for one in often.index if often[one] == often.max()), key=data.phases.index)

    def paint(scene: Scene) -> None:
        found = after(scene.data)
        assert found is not None
        draw_drift(scene.figure.subplots(), scene, found, when or f"after {found}")

    return Plot("Drift over cycles", lambda data: after(data) is not None, lambda *_: 3.4, paint, DRIFT_CHECKS)


def draw_drift(ax: Axes, scene: Scene, phase: str, when: str) -> None:
    """By rank or GPU; beside them a job that is never released, where the lab has one, and the limit."""
    data, theme = scene.data, scene.theme
    table = data.memory_levels(phase)
    table = (table - table.iloc[0]) / MIB
    draw_ranks(ax, table, theme, each=data.memory.owner)
    control = data.memory_levels("control")
    control = control[control.index.isin(table.index)]
    if not control.empty:
        moved = ((control - control.iloc[0]) / MIB).median(axis=1)
        ax.plot(
            moved.index, moved, color=theme.faint, linestyle=LINES[1], linewidth=1.2, label="control, never released"
        )
    if (limit := limit_of(scene.verdict, *DRIFT_CHECKS)) is not None:
        draw_limit(ax, limit, f"limit {limit:g} MiB", theme)
        if limit > 8 * float(table.abs().max().max()):
            ax.set_yscale("symlog", linthresh=1)
            ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    low, high = ax.get_ylim()
    ax.set_ylim(min(low, -2), max(high, 2) * (15 if ax.get_yscale() == "symlog" else 1.3))
    ax.axhline(0, color=theme.faint, linewidth=1.0, zorder=1)
    cycle_axis(ax)
    if data.cycle_words:
        ax.set_xticks(list(table.index), [data.cycle_words.get(int(cycle), str(cycle)) for cycle in table.index])
    first = " ".join(data.cycle_words.get(int(table.index[0]), f"cycle {table.index[0]}").split())
    word = "anonymous memory" if data.memory.metric == "anon_rss" else "GPU memory"
    about = f"{data.cycle} (a point is one sample)"
    ax.set(xlabel=about, ylabel=f"since {first} [MiB]", title=f"Drift of {word} {when}")
    ax.legend(loc="upper left", ncols=3, handletextpad=0.4, columnspacing=0.9)


def draw_ranks(ax: Axes, table: pd.DataFrame, theme: Theme, each: str) -> None:
    """A line per rank or GPU, a point per cycle; many are drawn as their median and range."""
    style: dict[str, Any] = {"color": theme.series[0], "markersize": 4.5, "linewidth": 1.2}
    if len(table.columns) <= SEPARATE:
        for lane, rank in enumerate(table.columns):
            ax.plot(table.index, table[rank], marker=MARKERS[lane], label=f"{each} {rank}", **style)
        return
    ax.fill_between(table.index, table.min(axis=1), table.max(axis=1), color=theme.series[0], alpha=0.25, linewidth=0)
    many = f"median and range of {len(table.columns)} {each}s"
    ax.plot(table.index, table.median(axis=1), marker="o", label=many, **style)


# -- a job's own numbers ----------------------------------------------------------------------------------------------


def own_names(data: RunData) -> list[str]:
    """The numbers that somebody's own job recorded, those with most values first."""
    found = own_numbers(data.records)["metric"].value_counts() if data.run.own else None
    return [] if found is None else [str(name) for name in found.index[:MOST_NUMBERS]]


def numbers(scene: Scene) -> None:
    """Own numbers, such as a loss: over the cycles where each rank has one in each, else in the order of recording."""
    rows, names = own_numbers(scene.data.records), own_names(scene.data)
    for ax, name in zip(scene.figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        mine = rows[rows["metric"] == name]
        once = not mine.duplicated(["rank", "cycle"]).any()
        table = mine.assign(at=mine["cycle"] if once else mine.groupby("rank").cumcount())
        draw_ranks(ax, table.pivot_table(index="at", columns="rank", values="value"), scene.theme, each="rank")
        unit = mine["unit"].iloc[0]
        ax.set(title=f"{name} [{unit}]" if unit not in ("", "1") else name, xlabel="cycle" if once else "record")
        ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
        ax.legend(loc="best", handletextpad=0.4)


# -- time and counts ---------------------------------------------------------------------------------------------------


def times(scene: Scene) -> None:
    ax, data, theme = scene.figure.subplots(), scene.data, scene.theme
    seconds = data.of("seconds")
    scale, unit = time_unit(float(seconds["value"].max()))
    lanes = rank_lanes(data)
    counts = set()
    for index, phase in enumerate(data.phases):
        for lane, ranks in enumerate(lanes):
            chosen = seconds[(seconds["phase"] == phase) & seconds["rank"].isin(ranks)]["value"] * scale
            if not chosen.empty:
                counts.add(len(chosen))
                x = index + (lane - (len(lanes) - 1) / 2) * 0.6 / len(lanes)
                draw_samples(ax, x, chosen, theme, marker=MARKERS[lane], colour=theme.colour(index))
    low, high = float(seconds["value"].min()), float(seconds["value"].max())
    if logarithmic := low > 0 and high / low > 30:
        log_scale(ax)
    else:
        ax.set_ylim(bottom=0)
    if len(lanes) > 1:
        gray = {"linestyle": "", "color": theme.faint}
        shapes = marks_of({f"rank {ranks[0]}": {**gray, "marker": MARKERS[n]} for n, ranks in enumerate(lanes)})
        ax.legend(handles=shapes, ncols=len(shapes), loc="upper right", handletextpad=0.2, columnspacing=1.0)
        ax.set_ylim(top=high * scale * (5 if logarithmic else 1.25))  # room for the legend
    slant = {"rotation": 25, "ha": "right"} if len(data.phases) > 5 or max(map(len, data.phases)) > 11 else {}
    ax.set_xticks(range(len(data.phases)), data.phases, **slant)
    spread = "" if counts == {1} else ", median and range"
    of = "Time per phase and rank" if len(lanes) == len(data.ranks) else "Time per phase, all ranks"
    title = f"{of} ({samples(counts)} each{spread})"
    ax.set(xlim=(-0.6, len(data.phases) - 0.4), ylabel=f"time [{unit}]", title=title)


def counts_of(data: RunData) -> list[str]:
    return [name for name in COUNTS if name in data.metrics()]


def allowed(verdict: Verdict, metric: str) -> float | None:
    """By how much a count may grow: the limit of the check that is named `<metric>_return...`."""
    return next((row.limit for row in verdict if row.check.startswith(f"{metric}_return")), None)


def phase_legend_height(data: RunData) -> float:
    return 0.25 * math.ceil(len(data.phases) / phase_columns(data))


def census(scene: Scene) -> None:
    counts, high = counts_of(scene.data), phase_legend_height(scene.data)
    places = scene.figure.subplot_mosaic([["legend"] * len(counts), counts], height_ratios=[high, 2.2])
    phase_legend(places["legend"], scene.data, scene.theme)
    for name in counts:
        draw_count(places[name], scene, name)


def draw_count(ax: Axes, scene: Scene, metric: str) -> None:
    """A count through the phases, with the level at the start and, where a check judges it, the limit above that."""
    data, theme, more = scene.data, scene.theme, allowed(scene.verdict, metric)
    start = data.start(metric)
    draw_level(ax, data.level(metric), data, theme)
    if start is not None:
        ax.axhline(start, color=theme.faint, linewidth=1.2, linestyle=LINES[1], zorder=1)
        if more is not None:
            ax.axhline(start + more, color=theme.bad, linewidth=1.2, linestyle=LINES[2], zorder=1, gid="limit")
    widen(ax, least=4)
    ax.set_ylim(bottom=max(-0.2, ax.get_ylim()[0]))
    ax.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    limit = "" if start is None or more is None else f", limit {more:+g}"
    title = COUNTS[metric] + ("" if start is None else f": start {start:g}{limit}")
    ax.set(ylabel="count" if len(data.ranks) == 1 else f"count (range of {len(data.ranks)} ranks)", title=title)
    step_axis(ax, data, theme)


def timeline(scene: Scene) -> None:
    """What each rank did when: a lane per rank, a bar per phase. A phase that raised has a frame."""
    data, theme = scene.data, scene.theme
    high = phase_legend_height(data)
    legend, ax = scene.figure.subplots(2, 1, height_ratios=(high, timeline_height(data) - high))
    phase_legend(legend, data, theme)
    seconds = data.of("seconds").sort_values("value", ascending=False)  # so that an inner phase lies on top
    failed = data.of("failed")
    raised = set(zip(failed["step"].tolist(), failed["rank"].tolist(), strict=True))
    begin = float((seconds["time"] - seconds["value"]).min())
    scale, unit = time_unit(float(seconds["time"].max()) - begin)
    for phase, bars in seconds.groupby("phase", sort=False):
        index = data.phases.index(str(phase))
        framed = [key in raised for key in zip(bars["step"].tolist(), bars["rank"].tolist(), strict=True)]
        ax.barh(
            bars["rank"].map(data.ranks.index),
            bars["value"] * scale,
            left=(bars["time"] - bars["value"] - begin) * scale,
            height=0.72,
            color=theme.colour(index),
            hatch=theme.hatch(index),
            edgecolor=theme.ink,
            linewidth=[2.0 if frame else 0.0 for frame in framed],
        )
    ax.set_yticks(range(len(data.ranks)), [rank_name(rank, data.run.roles) for rank in data.ranks])
    grid_across(ax)
    title = "Timeline of ranks" + (" (framed: raised)" if raised else "")
    ax.set(ylim=(len(data.ranks) - 0.5, -0.5), xlabel=f"time since the first phase began [{unit}]", title=title)


def timeline_height(data: RunData) -> float:
    return phase_legend_height(data) + 0.8 + min(0.34 * len(data.ranks), 5.0)


# -- verdict -----------------------------------------------------------------------------------------------------------


def verdict_lines(verdict: Verdict) -> int:
    """Lines that the verdict takes: one per check that failed, one per reason of a null, and the names of the others in columns."""
    groups = folded(without_parts(verdict))
    passed = sum(group[0].passed is True for group in groups)
    return len(groups) - passed + math.ceil(passed / PASSED_COLUMNS)


def verdict(scene: Scene) -> None:
    """Checks that failed and those not measured first, with the reason; of those that passed the names."""
    ax, theme = scene.figure.subplots(), scene.theme
    groups = folded(without_parts(scene.verdict))
    passed, others = [one[0] for one in groups if one[0].passed], [one for one in groups if not one[0].passed]
    lines = verdict_lines(scene.verdict)
    ax.set_axis_off()

    def write(x: float, line: float, text: str, **style: Any) -> None:
        ax.text(x, 1 - (line + 0.5) / lines, text, va="center", transform=ax.transAxes, fontsize=8.5, **style)

    for line, group in enumerate(others):
        check, measured, limit, reason = cells(group)
        held = "" if group[0].measured is None else f"{measured}, limit {limit}"
        why = textwrap.shorten(reason.removeprefix("not measured: "), 84 if held else 110, placeholder=" ...")
        write(0.0, line, str(MARKS[group[0].passed]), color=theme.answer(group[0].passed), fontweight="bold")
        for x, text in ((0.12, check), (0.34, held), (0.5 if held else 0.34, why)):
            write(x, line, text)
    deep = math.ceil(len(passed) / PASSED_COLUMNS)
    for index, row in enumerate(passed):
        column, line = divmod(index, deep)
        x = column / PASSED_COLUMNS
        write(x, len(others) + line, MARKS[True].sign, color=theme.good, fontweight="bold")
        write(x + 0.015, len(others) + line, row.check)


# -- tables ------------------------------------------------------------------------------------------------------------


def records_table(run: Run) -> pd.DataFrame:
    """Every record, in the order of time. Run and lab are the same in each; times are seconds since the first."""
    frame = without_empty(run.frame().drop(columns=["run", "lab"]))
    began = frame["time"].min()
    moments = {name: (frame[name] - began).round(3) for name in ("time", "start") if name in frame}
    return frame.assign(**moments).rename(columns={"time": "at [s]", "start": "since [s]"})


def times_table(run: Run) -> pd.DataFrame:
    frame = run.frame()
    seconds = frame[(frame["metric"] == "seconds") & frame["value"].notna()].groupby(["phase", "rank"], sort=False)
    found = seconds["value"].agg(["count", "median", "min", "max"]).reset_index()
    return found.assign(rank=[rank_name(int(rank), run.roles) for rank in found["rank"]]).rename(columns={"count": "n"})


def levels_table(run: Run) -> pd.DataFrame:
    frame = run.frame()
    frame = frame[frame["metric"].isin([*MEMORY_METRICS, *COUNTS]) & frame["value"].notna()]
    grouped = frame.groupby(["phase", "metric", "unit"], sort=False)["value"]
    return grouped.agg(["median", "min", "max"]).reset_index()


MOST_NUMBERS = 4  # side by side in a plot
SPREAD = {"median": ROW, "min": ROW, "max": ROW}
GENERAL = Pictures(
    plots={
        "memory": Plot(
            "Memory by source",
            lambda data: bool(data.order and memory_of(data)),
            lambda data, _: 3.2 * len(memory_of(data)),
            memory,
        ),
        "drift": drift(),
        "numbers": Plot("Own numbers", lambda data: bool(own_names(data)), lambda *_: 3.0, numbers),
        "times": Plot("Time per phase and rank", lambda data: bool(data.order), lambda *_: 3.4, times),
        "census": Plot(
            "Groups, files, threads",
            lambda data: bool(data.order and counts_of(data)),
            lambda data, _: 2.4 + phase_legend_height(data),
            census,
            COUNT_CHECKS,
        ),
        "timeline": Plot(
            "Timeline of ranks", lambda data: bool(data.order), lambda data, _: timeline_height(data), timeline
        ),
        "verdict": Plot(
            "Verdict",
            lambda data: bool(data.verdict()),
            lambda _, rows: 0.22 * verdict_lines(rows) + 0.1,
            verdict,
            (ALL,),
        ),
    },
    overview=(("numbers",), ("times", "memory"), ("census",), ("timeline",), ("verdict",)),
    tables={
        "times": Table("Time per phase and rank", times_table, "median", dict.fromkeys(("median", "min", "max"), "s")),
        "numbers": Table(
            "Own numbers",
            lambda run: summary_of(run.frame()),
            units=dict.fromkeys(("first", "last", "min", "max"), ROW),
        ),
        "memory": Table("Memory and counts per phase", levels_table, units=SPREAD),
        "records": Table("Every record", records_table),
    },
)

# -- runs compared with the first: what changed most, as medians and spreads of both and their ratio -------------------

ROWS = 14
LETTERS = 130  # that fit into a row of the legend
EVEN = 1.02  # a ratio below it counts as no change


def plot_against(runs: Sequence[Run], *, theme_name: str = "light", table: pd.DataFrame | None = None) -> Picture:
    """The others are compared with the first run. `table` is what `compare(runs)` returned, if that is known."""
    if len({run.id for run in runs}) < 2:
        raise BadInput("a comparison needs at least two different runs")
    look = theme(theme_name)
    shown = most(compare(runs) if table is None else table, ROWS)
    with mpl.rc_context(look.rc()):
        others = labelled(runs)
        first = others.pop(runs[0].id)
        if shown.empty:
            return message(f"nothing that both measured changed by more than {EVEN - 1:.0%} against {first}", look)
        # Names in a row of the legend.
        beside = max(1, min(3, len(others), LETTERS // max(map(len, others.values()), default=1)))
        warned = [f"Warning: {why}" for why in warnings(runs)]
        lines = 0.2 * (len(warned) + math.ceil(len(others) / beside))
        picture = Picture(1.5 + lines + (0.08 + 0.18 * len(others)) * shown["place"].nunique())
        draw(picture.subplots(), shown, others, look, beside)
        heading = f"{runs[0].lab} · what changed most against {first} · {counted(len(others), 'other run')}"
        picture.suptitle("\n".join([heading, *warned]), x=0.01, ha="left", fontsize=11.5)
    return picture


def most(table: pd.DataFrame, rows: int) -> pd.DataFrame:
    """The phases and metrics that changed most, with their place; of each run the rank where it did. What has no ratio is left out."""
    table = informative(table)
    table = table[(table["found_in"] == "both") & (table["base"] > 0) & (table["value"] > 0)]
    table = table.assign(metric=labels(table), apart=table["ratio"].where(table["ratio"] >= 1, 1 / table["ratio"]))
    table = table.sort_values("apart", ascending=False, kind="stable").drop_duplicates(["phase", "metric", "run"])
    names = table["phase"] + "  " + table["metric"]
    places = {name: place for place, name in enumerate(names[table["apart"] > EVEN].unique()[:rows])}
    return table.assign(name=names, place=names.map(places)).dropna(subset="place")


def draw(ax: Axes, shown: pd.DataFrame, others: Mapping[str, str], look: Theme, beside: int) -> None:
    """A line at 1 is the first run, with its own spread in grey. A bar is from the least to the greatest that the spreads allow."""
    ends = [1.0]
    for place, mine in shown.groupby("place"):
        if (half := float((mine["base_spread"] / mine["base"]).max()) / 2) > 0:
            own: dict[str, Any] = {"color": look.faint, "alpha": 0.25, "solid_capstyle": "butt", "zorder": 1}
            ax.plot([max(1 - half, 0.1), 1 + half], [float(str(place))] * 2, linewidth=9, **own)
    rows: Iterable[Any] = shown.itertuples()
    for row in rows:
        lane = list(others).index(row.run)
        y = row.place + (lane - (len(others) - 1) / 2) * 0.6 / len(others)
        half = row.spread / 2 / row.base
        span = [max(row.ratio - half, row.ratio / 10), row.ratio + half]
        ax.plot(span, [y, y], color=look.colour(lane), linewidth=5, alpha=0.3, solid_capstyle="round")
        style: dict[str, Any] = {"color": look.colour(lane), "markersize": 6, "markeredgecolor": look.paper}
        ax.plot(row.ratio, y, MARKERS[lane % len(MARKERS)], **style)
        words = f"{amount(row.base, row.unit)} → {amount(row.value, row.unit)}, rank {row.rank}"
        ax.text(1.01, y, words, transform=ax.get_yaxis_transform(), va="center", fontsize=8, color=look.ink)
        ends += span
    ax.axvline(1, color=look.ink, linewidth=1.2)
    margin = max(max(ends) / min(ends), 1.5) ** 0.04
    ax.set(xscale="log", xlim=(min(ends) / margin, max(ends) * margin))
    ax.xaxis.set_major_locator(FixedLocator(ratios(*ax.get_xlim())))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g} x")
    names = shown.drop_duplicates("place").sort_values("place")["name"]
    ax.set_yticks(range(len(names)), names)
    grid_across(ax)
    numbers = samples({*shown["n"], *shown["base_n"]})
    about = f"ratio of medians over cycles ({numbers}); bars: their spread around it; grey: that of the first run"
    ax.set(ylim=(len(names) - 0.4, -0.6), xlabel=about)
    if len(others) == 1:
        ax.set_title(next(iter(others.values())))
        return
    for lane, words in enumerate(others.values()):
        ax.plot([], [], MARKERS[lane % len(MARKERS)], color=look.colour(lane), label=words)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=beside, handletextpad=0.3, borderaxespad=0.3)


def ratios(low: float, high: float) -> list[float]:
    """Ticks at 1 and at round ratios to both sides of it, far enough apart for their words."""
    apart = math.log(high / low) / 12
    found = [1.0]
    for step in (1.1, 1.25, 1.5, 2, 3, 5, *(10.0**power for power in range(1, 16))):
        if math.log(step / max(found)) >= apart:
            found = [1 / step, *found, step]
    return [float(f"{tick:.3g}") for tick in found if low <= tick <= high]
