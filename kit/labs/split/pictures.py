"""The pictures and tables of a split run: the calls of a step, and the errors of gradients and metrics against the plain step.

Errors are on a scale of decades with separate places for 0 (bit for bit) and for values that are not finite.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kit.draw.plots import SEPARATE, Pictures, Plot, RunData, Scene, Table, grid_across, legend_of, limit_of, marks_of
from kit.draw.style import LINES, MARKERS, Theme
from kit.labs.split import rules
from kit.labs.split.faults import KIT_SPLIT
from kit.labs.split.lab import Case, cases_of
from kit.labs.split.rules import COMMON, chunks_of, every_chunks, singular
from kit.results import with_ids
from kit.results.units import counted, time_unit

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

CALLS = {"run": "plain step", "begin": "begin", "microbatch": "microbatch", "finish": "finish"}
HIGH = 0.76  # of the height of a row
BETWEEN = 0.5  # rows between two levels
ZERO, BEYOND = 1.2, 0.8  # decades from the last tick to the place of 0, and to that of infinity
APART = 0.14  # levels, in columns
EACH = "one per\nmicrobatch"  # chunks
WRONG = "////"  # beside its colour
DIAMOND: dict[str, Any] = {"linestyle": "", "marker": "D", "markerfacecolor": "none"}
ROWS = 0.19  # inches for a metric
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def ways(config: Mapping[str, Any]) -> list[tuple[float, Case, str]]:
    """The rows from top to bottom: position, case, phase."""
    cases = cases_of(config)
    rows = [(case, phase) for case in cases for phase in (("sync", "split") if case.first else ("split",))]
    places = itertools.accumulate(1 + BETWEEN * (phase == "sync") for _, phase in rows)
    return [(place - 1 - BETWEEN, *row) for place, row in zip(places, rows, strict=True)]


def calls(scene: Scene) -> None:
    """The calls of the last step, one after the other. A rank waits for others inside a call."""
    ax, data, theme = scene.figure.subplots(), scene.data, scene.theme
    rows = with_ids(data.frame[data.frame["metric"] == "call_seconds"], "call", "order")
    rows = rows.sort_values(["cycle", "phase", "rank", "order"])
    ranks = data.ranks if len(data.ranks) <= SEPARATE else data.ranks[:1]
    rows = rows[rows["rank"].isin(ranks)]
    totals = rows.groupby(["cycle", "phase", "rank"])["value"].sum()
    longest = float(totals.max()) if len(totals) else 1.0
    scale, unit = time_unit(longest)
    colours = dict(zip(CALLS, (theme.faint, theme.series[3], theme.series[0], theme.series[2]), strict=True))
    labels = {}
    for place, case, phase in ways(data.config):
        here = rows[(rows["cycle"] == case.cycle) & (rows["phase"] == phase)]
        labels[place] = f"{case.level}, plain" if phase == "sync" else chunks_of(case.chunks)
        for lane, rank in enumerate(ranks):
            mine = here[here["rank"] == rank]
            ax.barh(
                place + ((lane + 0.5) / len(ranks) - 0.5) * HIGH,
                mine["value"] * scale,
                left=(mine["value"].cumsum() - mine["value"]) * scale,
                height=HIGH / len(ranks) * 0.94,
                color=[colours[call] for call in mine["call"]],
                edgecolor=theme.paper,
                linewidth=0.6,
            )
        if not here.empty:
            took = float(totals[case.cycle, phase].max())
            ax.text((took + 0.015 * longest) * scale, place, f"{took * scale:.3g} {unit}", va="center", fontsize=8.5)
    lanes = f"rank {ranks[0]}" if len(ranks) == 1 else f"lanes: ranks {ranks[0]} to {ranks[-1]}"
    ax.set(
        yticks=list(labels),
        yticklabels=list(labels.values()),
        ylim=(max(labels) + 0.6, -0.6 - 0.12 * (max(labels) + 1)),  # room for the legend
        xlim=(0, 1.14 * longest * scale),
        xlabel=f"time since the step began [{unit}], one sample",
        title=f"Step {data.config['steps']}, call by call ({lanes})",
    )
    grid_across(ax)
    marks = marks_of({word: {"facecolor": colours[call]} for call, word in CALLS.items()})
    ax.legend(handles=marks, ncols=len(marks), loc="upper left", columnspacing=1.1, handlelength=1.2)


class Decades(NamedTuple):
    low: int
    high: int
    infinite: bool

    @classmethod
    def of(cls, values: Iterable[float], marks: Iterable[float]) -> Decades:
        known = list(values)
        found = [math.log10(value) for value in (*known, *marks) if 0 < value < math.inf]
        return cls(math.floor(min(found)), math.ceil(max(found) + 0.01), any(not value < math.inf for value in known))

    def place(self, value: float) -> float:
        if value == 0:
            return self.low - ZERO
        return math.log10(value) if value < math.inf else self.high + BEYOND

    def ticks(self) -> dict[float, str]:
        every = math.ceil((self.high - self.low) / 7)
        powers = range(self.high, self.low - 1, -every)
        shown = [power for power in powers if power - self.place(0) > every / 2]
        named = {float(power): f"10{str(power).translate(RAISED)}" for power in shown}
        return {**named, self.place(0): "0", **({self.place(math.inf): "∞"} if self.infinite else {})}

    def ends(self) -> tuple[float, float]:
        return self.place(0) - 0.8, self.high + (BEYOND + 0.4 if self.infinite else 0.3)

    def shade(self) -> tuple[float, float]:
        return self.ends()[0], self.low - ZERO / 2


# -- gradients -----------------------------------------------------------------------------------------------------------


def gradients(scene: Scene) -> None:
    """||dg|| / ||g|| over the model for each number of chunks: the first step as points, later ones as a span."""
    ax, theme, config = scene.figure.subplots(), scene.theme, scene.data.config
    compared = scene.data.records[scene.data.records["phase"] == "compare"]
    rows = with_ids(compared[compared["metric"] == "gradient_error"], "step")
    between = compared[compared["metric"] == "chunk_error"].set_index("cycle")["value"]
    limit, later = limit_of(scene.verdict, "grad_parity"), limit_of(scene.verdict, "later_steps")
    lines = [(limit, "limit {:g}, step 1"), (later if config["steps"] > 1 else None, "limit {:g}, later")]
    decades = Decades.of([*rows["value"], *between], [COMMON, *(value for value, _ in lines if value)])
    columns = {count: index for index, count in enumerate(config["chunks"])}
    levels = list(dict.fromkeys(case.level for case in cases_of(config)))
    for place, level in enumerate(levels):
        points = []
        for case in cases_of(config):
            mine = rows[rows["cycle"] == case.cycle]
            if case.level != level or mine.empty:
                continue
            x = columns[case.chunks] + (place - (len(levels) - 1) / 2) * APART
            rest = mine[mine["step"] > 1]["value"]
            if not rest.empty:
                ends = [decades.place(float(value)) for value in (rest.min(), rest.max())]
                ax.plot([x, x], ends, "_-", color=theme.faint, linewidth=4, alpha=0.5, markersize=9, zorder=2)
            if not case.first:
                ax.plot(x, decades.place(float(between[case.cycle])), zorder=3, **DIAMOND, color=theme.ink)
            points.append((x, float(mine[mine["step"] == 1]["value"].iloc[0])))
        places = [(x, decades.place(value)) for x, value in points]
        marker, colour = MARKERS[place], theme.series[place * 3]
        if points:
            ax.plot(*zip(*places, strict=True), color=colour, linewidth=1.2, marker=marker, markersize=5.5, label=level)
        for (x, y), (_, error) in zip(places, points, strict=True):
            if limit is not None and not error <= limit:
                ax.plot(x, y, marker, color=theme.bad, markersize=8.5, zorder=4)
    right = len(columns) - 0.45
    for value, word in [*lines, (COMMON, "{:g}, common")]:
        if value:
            colour = theme.faint if value == COMMON else theme.bad
            ax.axhline(math.log10(value), color=colour, linewidth=1.3, linestyle=LINES[2], zorder=1)
            ax.text(right, math.log10(value), word.format(value), color=colour, fontsize=8.5, va="bottom")
    bottom, top = decades.ends()
    ax.axhspan(*decades.shade(), color=theme.shade, zorder=0, linewidth=0)
    ax.set(
        yticks=list(decades.ticks()),
        yticklabels=list(decades.ticks().values()),
        ylim=(bottom, top + 0.28 * (top - bottom)),  # room for the legend
        xlim=(-0.5, right + 0.3 * (len(columns) + 1)),
        xticks=range(len(columns)),
        xticklabels=[str(count or EACH) for count in columns],
        xlabel="chunks per step (a point is one step, n = 1)",
        ylabel="||dg|| / ||g||",
        title="Gradients against the plain step",
    )
    marks: dict[str, Any] = {}
    if len(columns) > 1:
        marks["against the first number of chunks"] = {**DIAMOND, "color": theme.ink}
    if config["steps"] > 1:
        span = f"steps 2 to {config['steps']}" if config["steps"] > 2 else "step 2"
        marks[span] = {"facecolor": theme.faint, "alpha": 0.5}
    handles = [*ax.get_legend_handles_labels()[0], *marks_of(marks)]
    ax.legend(handles=handles, ncols=2, loc="upper left", handletextpad=0.5, columnspacing=0.9)


# -- metrics ---------------------------------------------------------------------------------------------------------------


def first_step(data: RunData) -> pd.DataFrame:
    """The largest error of each metric over all numbers of chunks in the first step, by level. NotMeasured if the run ended before."""
    table = rules.metrics(data.records, data.config)
    table = table[table["step"] == 1].assign(lost=table["split"].isna() & table["sync"].notna())
    worst = {"error": "max", "one_scalar_error": "max", "lost": "any"}
    found = table.groupby(["level", "normalizer", "metric"], as_index=False).agg(worst)
    return found.sort_values("level", ascending=False, kind="stable", ignore_index=True)  # tokens first


def draw_bar(
    ax: Axes, y: float, error: float, decades: Decades, *, colour: str, zero: str, word: str = "", hatch: str = ""
) -> None:
    """An error as a bar with a word beside it, and a 0 in the colour `zero`."""
    if error == 0:
        x = decades.place(0) + (y - round(y)) * 1.5  # beside each other: two rows of digits would touch
        ax.text(x, y, "0", color=zero, fontsize=7, fontweight="bold", ha="center", va="center")
        return
    left = decades.shade()[1]
    ax.barh(y, decades.place(error) - left, 0.38, left=left, color=colour, hatch=hatch, linewidth=0, zorder=2)
    if word:
        ax.text(decades.place(error), y, f" {word}", color=colour, fontsize=7.5, va="center")


def metrics(scene: Scene) -> None:
    table, theme = first_step(scene.data), scene.theme
    levels = list(dict.fromkeys(case.level for case in cases_of(scene.data.config)))
    axes = scene.figure.subplot_mosaic(
        [["legend"] * len(levels), levels], height_ratios=(0.1, 0.5 + ROWS * table["metric"].nunique())
    )
    marks: dict[str, dict[str, Any]] = {
        "measured against the plain step": {"facecolor": theme.series[0]},
        "above the limit": {"facecolor": theme.bad, "hatch": WRONG, "edgecolor": theme.paper, "linewidth": 0},
        "if the loss's normalizer divided every metric (computed)": {"facecolor": theme.series[1]},
    }
    legend_of(axes["legend"], marks_of(marks))
    for level in levels:
        draw_metrics(axes[level], table, level, limit_of(scene.verdict, "metric_parity"), theme)


def draw_metrics(ax: Axes, table: pd.DataFrame, level: str, limit: float | None, theme: Theme) -> None:
    """Two bars for each metric: the measured error, and the error if the loss's normalizer divided every metric.

    The drawing of the first level has the names; the others have the same order.
    """
    decades = Decades.of([*table["error"], *table["one_scalar_error"]], [COMMON, limit or COMMON])
    names = list(dict.fromkeys(table["metric"]))
    rows = table[table["level"] == level].set_index("metric")
    for index, name in enumerate(names):
        error, scalar, lost = rows.loc[name, ["error", "one_scalar_error", "lost"]]
        wrong = limit is not None and not error <= limit
        colour, zero, hatch = (theme.bad, theme.bad, WRONG) if wrong else (theme.series[0], theme.good, "")
        word = "missing" if lost else ""
        draw_bar(ax, index - 0.2, error, decades, colour=colour, zero=zero, word=word, hatch=hatch)
        draw_bar(ax, index + 0.2, scalar, decades, colour=theme.series[1], zero=theme.faint)
    for value, word, colour in ((limit, "limit {:g} ", theme.bad), (COMMON, " {:g}, common", theme.faint)):
        if value:
            x, side = math.log10(value), "left" if value == COMMON else "right"
            ax.axvline(x, color=colour, linewidth=1.3, linestyle=LINES[2], zorder=3)
            ax.text(x, -0.75, word.format(value), color=colour, fontsize=8.5, va="center", ha=side)
    ax.axvspan(*decades.shade(), color=theme.shade, zorder=0, linewidth=0)
    words = ["" if unit == "none" else f"per {singular(unit)}" for unit in rows.loc[names, "normalizer"]]
    if level == table["level"].iloc[0]:
        words = [f"{name}  {word}" for name, word in zip(names, words, strict=True)]
    ax.set_yticks(range(len(names)), words, fontsize=8)
    ax.set(
        xticks=list(decades.ticks()),
        xticklabels=list(decades.ticks().values()),
        xlim=decades.ends(),
        ylim=(len(names) - 0.4, -1.2),
        xlabel="relative error in step 1, worst of all numbers of chunks",
        title=f"Metrics, loss per {singular(level)}",
    )
    grid_across(ax)


def ready(data: RunData) -> bool:
    return "rehearse" in data.phases and "result" in data.metrics()  # not in runs of an older kit


def words(data: RunData) -> list[str]:
    config = data.config
    sizes = [f"{name} {config[name]}" for name in ("tp", "pp", "ep") if config[name] > 1]
    own = [] if config["implementation"] == KIT_SPLIT else [config["implementation"]]
    job = " ".join([config["backend"], ", ".join([config["size"], *sizes])])
    return [job, config["recipe"], *own, every_chunks(config), counted(config["steps"], "step")]


PICTURES = Pictures(
    cycle="level and chunks",
    cycle_words=lambda config: {case.cycle: f"{case.level}\n{case.chunks or EACH}" for case in cases_of(config)},
    plots={
        "metrics": Plot(
            "Metrics against the plain step",
            ready,
            lambda data, _: 1.4 + ROWS * first_step(data)["metric"].nunique(),
            metrics,
            ("metric_parity",),
        ),
        "gradients": Plot(
            "Gradients by number of chunks", ready, lambda *_: 3.6, gradients, ("grad_parity", "later_steps")
        ),
        "calls": Plot(
            "A step, call by call", ready, lambda data, _: max(2.6, 0.27 * (ways(data.config)[-1][0] + 2)) + 0.9, calls
        ),
    },
    overview=(("calls", "gradients"), ("metrics",), ("verdict",)),
    words=words,
    ready=ready,
    tables={
        "metrics": Table("Every metric, worst first", lambda run: rules.metrics(run.frame(), run.config), "error"),
        "tensors": Table(
            "Every tensor, worst first", lambda run: rules.tensors(run.frame(), run.config), "gradient_error"
        ),
    },
)
