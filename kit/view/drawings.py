"""The drawings of a run, each on axes that it is given. Colour is the phase, shape is the rank, everywhere."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from kit.view.style import LINES, MARKERS, Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kit.results import Verdict
    from kit.view.steps import Level, Steps

APART = 4  # so many ranks are drawn one by one; more are drawn as one cloud
HOST = {"peak_rss": "peak", "rss": "resident", "anon_rss": "anonymous"}
DEVICE = {
    "driver_used": "whole GPU",
    "process_used": "this process",
    "reserved": "reserved",
    "peak_allocated": "peak",
    "allocated": "allocated",
}


def phase_legend(ax: Axes, steps: Steps, theme: Theme) -> None:
    """What the colours mean."""
    ax.set_axis_off()
    marks = [
        Patch(facecolor=theme.colour(index), hatch=theme.hatch(index), label=phase)
        for index, phase in enumerate(steps.phases)
    ]
    ax.legend(handles=marks, ncols=legend_columns(steps), loc="center left", borderaxespad=0, handlelength=1.4)


def legend_columns(steps: Steps) -> int:
    """As many names in a row as the width of the picture carries."""
    return max(1, min(len(steps.phases), 130 // (6 + max(map(len, steps.phases)))))


def times(ax: Axes, steps: Steps, theme: Theme) -> None:
    """Time per phase and rank: a point a cycle, a bar from the fastest to the slowest, a tick at the median."""
    seconds = steps.of("seconds")
    scale, unit = time_unit(float(seconds["value"].max()))
    groups = [[rank] for rank in steps.ranks] if len(steps.ranks) <= APART else [steps.ranks]
    counts = set()
    for index, phase in enumerate(steps.phases):
        for lane, ranks in enumerate(groups):
            chosen = seconds[(seconds["phase"] == phase) & seconds["rank"].isin(ranks)]["value"] * scale
            if chosen.empty:
                continue
            counts.add(len(chosen))
            x = index + (lane - (len(groups) - 1) / 2) * 0.6 / len(groups)
            colour = theme.colour(index)
            ax.plot([x, x], [chosen.min(), chosen.max()], color=colour, linewidth=5, alpha=0.3, solid_capstyle="round")
            ax.plot([x] * len(chosen), chosen, MARKERS[lane], color=colour, markersize=4.5, markeredgecolor=theme.paper)
            ax.plot(x, chosen.median(), "_", color=theme.ink, markersize=11, markeredgewidth=1.4)
    low, high = float(seconds["value"].min()), float(seconds["value"].max())
    if low > 0 and high / low > 30:
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        ax.set_ylim(bottom=0)
    if len(groups) > 1:
        shapes = [
            Line2D([], [], linestyle="", marker=MARKERS[lane], color=theme.faint, label=f"rank {ranks[0]}")
            for lane, ranks in enumerate(groups)
        ]
        ax.legend(handles=shapes, ncols=len(shapes), loc="upper right", handletextpad=0.2, columnspacing=1.0)
        ax.set_ylim(top=high * scale * (2.5 if ax.get_yscale() == "log" else 1.25))  # room for the legend
    ax.set_ylabel(f"time [{unit}]")
    slant = len(steps.phases) > 5 or max(map(len, steps.phases)) > 11
    ax.set_xticks(
        range(len(steps.phases)), steps.phases, rotation=25 if slant else 0, ha="right" if slant else "center"
    )
    ax.set_xlim(-0.6, len(steps.phases) - 0.4)
    spread = "" if counts == {1} else ", median and range"
    of = "Time per phase and rank" if len(groups) == len(steps.ranks) else "Time per phase, all ranks"
    ax.set_title(f"{of} ({count_word(counts)} each{spread})")


def memory(ax: Axes, steps: Steps, theme: Theme, sources: Mapping[str, str], title: str) -> None:
    """Memory by source after each phase, against its level at the start. At a line's end: the source and its last level."""
    scale, unit = size_unit(max(steps.level(name).high[-1] for name in sources if name in steps.metrics()))
    ends: list[tuple[float, str]] = []
    for source, line in zip((name for name in sources if name in steps.metrics()), itertools.cycle(LINES)):
        level = steps.level(source)
        start = steps.level(source.removeprefix("peak_")).start or 0.0
        draw_level(ax, level, steps, theme, Drawn(start, scale, line, marks=not source.startswith("peak")))
        ends.append(((level.middle[-1] - start) * scale, f"{sources[source]}, {level.middle[-1] * scale:.4g} {unit}"))
    widen(ax, least=8 * 2**20 * scale)
    ax.axhline(0, color=theme.faint, linewidth=1.0, zorder=1)
    ax.set_ylabel(f"change since start [{unit}]")
    ax.set_title(f"{title} ({ranks_word(steps)})")
    step_axis(ax, steps, theme)
    name_ends(ax, ends, len(steps.order) - 1, theme)


def census(ax: Axes, steps: Steps, theme: Theme, metric: str, *, title: str, allowed: float | None) -> None:
    """A count through the phases, with the level before the run and, where a check judges it, the limit above that."""
    level = steps.level(metric)
    draw_level(ax, level, steps, theme)
    if level.start is not None:
        ax.axhline(level.start, color=theme.faint, linewidth=1.2, linestyle=LINES[1], zorder=1)
        if allowed is not None:
            ax.axhline(level.start + allowed, color=theme.bad, linewidth=1.2, linestyle=LINES[2], zorder=1, gid="limit")
    widen(ax, least=4)
    ax.set_ylim(bottom=max(-0.2, ax.get_ylim()[0]))
    ax.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    ax.set_ylabel("count" if len(steps.ranks) == 1 else f"count (range of {len(steps.ranks)} ranks)")
    limit = "" if level.start is None or allowed is None else f", limit {allowed:+g}"
    ax.set_title(title + ("" if level.start is None else f" (at start {level.start:g}{limit})"))
    step_axis(ax, steps, theme)


def allowed(verdict: Verdict, metric: str) -> float | None:
    """By how much a count may grow: the limit of the check that is named `<metric>_return...`."""
    return next((row.limit for row in verdict if row.check.startswith(f"{metric}_return")), None)


def timeline(ax: Axes, steps: Steps, theme: Theme) -> None:
    """Who did what when: a lane per rank, a bar per phase. A phase that raised has a frame."""
    seconds = steps.of("seconds").sort_values("value", ascending=False)  # so that what is inside lies on top
    failed = steps.of("failed")
    raised = set(zip(failed["step"].tolist(), failed["rank"].tolist(), strict=True))
    begin = float((seconds["time"] - seconds["value"]).min())
    scale, unit = time_unit(float(seconds["time"].max()) - begin)
    lanes = {rank: lane for lane, rank in enumerate(steps.ranks)}
    for phase, bars in seconds.groupby("phase", sort=False):
        index = steps.phases.index(str(phase))
        framed = [key in raised for key in zip(bars["step"].tolist(), bars["rank"].tolist(), strict=True)]
        ax.barh(
            bars["rank"].map(lanes),
            bars["value"] * scale,
            left=(bars["time"] - bars["value"] - begin) * scale,
            height=0.72,
            color=theme.colour(index),
            hatch=theme.hatch(index),
            edgecolor=theme.ink,
            linewidth=[2.0 if frame else 0.0 for frame in framed],
        )
    ax.set_yticks(range(len(steps.ranks)), [f"rank {rank}" for rank in steps.ranks])
    ax.set_ylim(len(steps.ranks) - 0.5, -0.5)
    ax.grid(visible=False, axis="y")
    ax.grid(visible=True, axis="x")
    ax.set_xlabel(f"time since the first phase began [{unit}]")
    ax.set_title("Timeline of ranks" + (" (framed: raised)" if raised else ""))


def verdict_lines(ax: Axes, verdict: Verdict, theme: Theme) -> None:
    """A line per check: passed or not, what was measured, the limit."""
    ax.set_axis_off()
    marks = {True: ("✓ pass", theme.good), False: ("✗ FAIL", theme.bad), None: ("- not measured", theme.faint)}
    for index, row in enumerate(verdict):
        y = 1 - (index + 0.5) / len(verdict)
        word, colour = marks[row.passed]
        measured = "" if row.measured is None else f"{row.measured:.4g}, limit {row.limit:g} {unit_word(row.unit)}"
        why = "" if row.passed else textwrap.shorten(row.why, 80, placeholder=" ...")
        ax.text(0.0, y, word, va="center", transform=ax.transAxes, color=colour, fontweight="bold")
        for x, text in ((0.13, row.check), (0.38, measured), (0.53, why)):
            ax.text(x, y, text, va="center", transform=ax.transAxes, fontsize=8.5)


PASSED_COLUMNS = 4


def verdict_height(verdict: Verdict) -> int:
    """Lines that `verdict_summary` takes."""
    passed = sum(row.passed is True for row in verdict)
    return len(verdict) - passed + math.ceil(passed / PASSED_COLUMNS)


def verdict_summary(ax: Axes, verdict: Verdict, theme: Theme) -> None:
    """Many checks in little room: failed ones first and those not measured, with why; of those that passed the names."""
    passed = [row for row in verdict if row.passed is True]
    others = sorted((row for row in verdict if row.passed is not True), key=lambda row: row.passed is None)
    lines = verdict_height(verdict)
    ax.set_axis_off()
    for index, row in enumerate(others):
        mark, colour = ("✗ FAIL", theme.bad) if row.passed is False else ("- not measured", theme.faint)
        measured = "" if row.measured is None else f"{row.measured:.4g}, limit {row.limit:g} {unit_word(row.unit)}"
        y = 1 - (index + 0.5) / lines
        ax.text(0.0, y, mark, va="center", transform=ax.transAxes, color=colour, fontweight="bold", fontsize=8.5)
        why = textwrap.shorten(row.why.removeprefix("not measured: "), 84 if measured else 110, placeholder=" ...")
        for x, text in ((0.12, row.check), (0.34, measured), (0.5 if measured else 0.34, why)):
            ax.text(x, y, text, va="center", transform=ax.transAxes, fontsize=8.5)
    deep = math.ceil(len(passed) / PASSED_COLUMNS)
    for index, row in enumerate(passed):
        column, line = divmod(index, deep)
        y = 1 - (len(others) + line + 0.5) / lines
        x = column / PASSED_COLUMNS
        ax.text(x, y, "✓", va="center", transform=ax.transAxes, color=theme.good, fontweight="bold", fontsize=8.5)
        ax.text(x + 0.015, y, row.check, va="center", transform=ax.transAxes, fontsize=8.5)


@dataclass(frozen=True, slots=True)
class Drawn:
    """How a level is drawn: against what, in which unit, with which line, and whether its points are marked."""

    start: float = 0.0
    scale: float = 1.0
    line: Any = "-"
    marks: bool = True


PLAIN = Drawn()


def draw_level(ax: Axes, level: Level, steps: Steps, theme: Theme, how: Drawn = PLAIN) -> None:
    """A line through the medians, a band over the ranks, and points in the colours of the phases."""
    low, middle, high = (
        [(value - how.start) * how.scale for value in values] for values in (level.low, level.middle, level.high)
    )
    ax.fill_between(level.at, low, high, color=theme.faint, alpha=0.25, linewidth=0)
    ax.plot(level.at, middle, color=theme.faint, linewidth=1.2, linestyle=how.line)
    if how.marks:
        colours = [theme.colour(steps.phases.index(steps.order[step][1])) for step in level.at]
        ax.scatter(
            level.at,
            middle,
            s=26 if len(steps.order) <= 30 else 9,
            c=colours,
            edgecolors=theme.paper,
            linewidths=0.6,
            zorder=3,
        )


def step_axis(ax: Axes, steps: Steps, theme: Theme) -> None:
    """Steps by cycle, every other one shaded; a run of one cycle has its phases' names instead."""
    ax.set_xlim(-0.7, len(steps.order) - 0.3)
    if len(steps.cycles) <= 1:
        ax.set_xticks(range(len(steps.order)), [phase for _, phase in steps.order], rotation=25, ha="right")
        return
    where: dict[int, list[int]] = {}
    for index, (cycle, _) in enumerate(steps.order):
        where.setdefault(cycle, []).append(index)
    every = math.ceil(len(where) / 10)
    for number, places in enumerate(where.values()):
        if number % 2 and len(where) <= 20:
            ax.axvspan(places[0] - 0.5, places[-1] + 0.5, color=theme.shade, zorder=0, linewidth=0)
    shown = [(cycle, where[cycle]) for cycle in steps.cycles[::every]]
    ax.set_xticks([(places[0] + places[-1]) / 2 for _, places in shown], [str(cycle) for cycle, _ in shown])
    ax.tick_params(axis="x", length=0)
    ax.set_xlabel("cycle (a point per phase)")


def name_ends(ax: Axes, ends: Sequence[tuple[float, str]], last: int, theme: Theme) -> None:
    """Write the names at the ends of their lines, in room made for them, moved apart where they would overlap."""
    ax.set_xlim(right=(last + 1.4) * 1.42)
    low, high = ax.get_ylim()
    room, lowest = (high - low) * 0.085, -math.inf
    paper = {"facecolor": theme.paper, "edgecolor": "none", "pad": 1.0}
    for left, (value, name) in zip(range(len(ends), 0, -1), sorted(ends), strict=True):
        lowest = max(min(value, high - (left - 0.5) * room), lowest + room)
        ax.text(
            last + 0.04 * (last + 5), lowest, name, color=theme.ink, fontsize=8.5, va="center", bbox=paper
        )  # fmt: skip


def widen(ax: Axes, *, least: float) -> None:
    """Keep noise from looking like a mountain: a span of at least `least`; what cannot be negative is not."""
    low, high = ax.get_ylim()
    if high - low < least:
        middle = (low + high) / 2
        ax.set_ylim(middle - least / 2, middle + least / 2)


def time_unit(longest: float) -> tuple[float, str]:
    return (1.0, "s") if longest >= 2 else (1e3, "ms") if longest >= 2e-3 else (1e6, "µs")


def size_unit(most: float) -> tuple[float, str]:
    return (2.0**-30, "GiB") if most >= 8 * 2**30 else (2.0**-20, "MiB")


def unit_word(unit: str) -> str:
    return "" if unit == "1" else unit


def count_word(counts: set[int]) -> str:
    return f"n = {min(counts)}" if len(counts) == 1 else f"n = {min(counts)} to {max(counts)}"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def ranks_word(steps: Steps) -> str:
    return "1 rank" if len(steps.ranks) == 1 else f"median and range of {len(steps.ranks)} ranks"
