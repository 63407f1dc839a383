"""The pictures of a stream run: versions by replica, where the time went, lag of trained tokens, ends of groups, and the recomputation.

Colour is the weight version in the first picture, and a part of the time or an end of a group in the others.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from kit.draw.plots import (
    Box,
    Pictures,
    Plot,
    RunData,
    Scene,
    Table,
    WhatIf,
    grid_across,
    legend_of,
    marks_of,
    paint_boxes,
    stack,
)
from kit.draw.style import LINES, Theme
from kit.labs.stream import tables
from kit.results import NotMeasured, Row, Run, Unjudged
from kit.results.units import ROW, counted, time_unit
from kit.stream.ports import PARTS, Call, calls, syncs
from kit.stream.ports import TRAINER as TRAINING
from kit.stream.settings import SAMPLERS
from kit.stream.simulated import forecast, pace

REPLICAS = 8  # as many have lanes, the first ones
LANE = (0.022, 0.11)  # inches for a request of a replica
LANES = 3.0  # inches for all of them
TRAINER = 0.42  # inches
BETWEEN = 0.16  # inches between two replicas
LEGEND = 0.45  # inches
BAND = 0.4  # opacity of a sync
LETTER = 0.062  # inches
ACROSS = 10.2  # inches of the axis of time


class Lanes(NamedTuple):
    """The layout: the requests of each replica one below the other, in as few lanes as possible."""

    boxes: dict[int, list[Box]]  # by version
    joints: list[Box]  # between two parts of a sample
    given_up: list[tuple[float, float]]
    names: dict[float, str]  # of replicas, by the middle of their lanes
    bottom: float


def lanes(rows: Sequence[Row]) -> Lanes:
    by: dict[int, list[tables.Sample]] = defaultdict(list)
    for sample in tables.samples(rows):
        by[sample.replica].append(sample)
    packed = {replica: pack(by[replica]) for replica in sorted(by)[:REPLICAS]}
    total = sum(max(numbers) + 1 for numbers in packed.values())
    high = min(max(LANES / total, LANE[0]), LANE[1])
    boxes: dict[int, list[Box]] = defaultdict(list)
    joints, given_up, names = [], [], {}
    top = TRAINER + BETWEEN
    for replica, places in packed.items():
        for sample, place in zip(by[replica], places, strict=True):
            upper = top + place * high
            middle = upper + 0.43 * high
            for part in sample.parts:
                boxes[part.version].append(Box(part.left, part.right, upper, upper + 0.86 * high))
            for one, after in itertools.pairwise(sample.parts):
                joints.append(Box(one.right, after.left, middle - 0.1 * high, middle + 0.1 * high))
            if sample.end in ("failed", "cancelled"):
                given_up.append((sample.parts[-1].right, middle))
        end = top + (max(places) + 1) * high
        names[(top + end) / 2] = f"replica {replica}"
        top = end + BETWEEN
    return Lanes(dict(sorted(boxes.items())), joints, given_up, names, top - BETWEEN)


def pack(samples: Sequence[tables.Sample]) -> list[int]:
    """The lane of each sample: the first that is free when it begins."""
    free: list[float] = []
    found = []
    for sample in samples:
        left, right = sample.parts[0].left, sample.parts[-1].right
        place = next((place for place, until in enumerate(free) if until <= left), len(free))
        free[place : place + 1] = [right]
        found.append(place)
    return found


def versions(scene: Scene) -> None:
    theme, frame = scene.theme, scene.data.records
    phase = tables.shown(frame)
    rows = tables.ledger(frame, phase)
    drawn = lanes(rows)
    began, ended = rows[0].time, rows[-1].time
    scale, unit = time_unit(ended - began)
    legend, ax, below = scene.figure.subplots(3, 1, sharex=False, height_ratios=(LEGEND, drawn.bottom + 0.2, 1.1))
    for version, boxes in drawn.boxes.items():
        paint_boxes(ax, boxes, began, scale, facecolor=theme.colour(version), gid=f"version {version}")
    paint_boxes(ax, drawn.joints, began, scale, facecolor=theme.ink, gid="joints")
    if drawn.given_up:
        x, y = zip(*drawn.given_up, strict=True)
        ax.plot(
            [(one - began) * scale for one in x], y, "x", color=theme.ink, markersize=4, markeredgewidth=1.1, zorder=4
        )
    draw_trainer(ax, rows, theme, began, scale)
    draw_buffer(below, rows, theme, began, scale)
    bands(rows, (ax, below), theme, began, scale)
    ax.set_yticks([TRAINER / 2, *drawn.names], ["trainer", *drawn.names.values()])
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(drawn.bottom + 0.05, -0.2)
    for one in (ax, below):
        one.set_xlim(0, (ended - began) * scale)
    ax.set_xticklabels([])
    grid_across(ax)
    below.set_xlabel(f"time since the loop began [{unit}]")
    many = len({sample.replica for sample in tables.samples(rows)})
    some = f", the first {REPLICAS} of {many} replicas" if many > REPLICAS else ""
    ax.set_title(f"Phase {phase}: a bar is a sample, its colour the weight version of its tokens{some}")
    style: dict[str, Any] = {"columnspacing": 1.1, "handlelength": 1.2}
    colours, others = version_marks(rows, drawn, theme)
    legend_of(legend, marks_of(colours), loc="upper left", **style)
    legend.add_artist(legend.get_legend())  # two rows: one could be wider than the picture
    legend_of(legend, marks_of(others), loc="lower left", **style)


def version_marks(rows: Sequence[Row], drawn: Lanes, theme: Theme) -> tuple[dict[str, dict[str, Any]], ...]:
    """Every version with its colour, where versions that share one are named together; and all other marks."""
    made = {row.number("version") for row in rows if row.event == "bumped"} | {*drawn.boxes}
    by: dict[str, list[int]] = defaultdict(list)
    for version in sorted(made):
        by[theme.colour(version)].append(version)
    colours: dict[str, dict[str, Any]] = {}
    for colour, some in by.items():
        colours[("" if colours else "version ") + few(some)] = {"facecolor": colour}
    hatched = {"facecolor": theme.faint, "hatch": "////", "edgecolor": theme.paper, "linewidth": 0}
    marks: dict[str, dict[str, Any]] = {"sync, from request to publication": {"facecolor": theme.faint, "alpha": BAND}}
    if drawn.joints:
        marks["sample that spans a sync"] = {"color": theme.ink, "linewidth": 1.2}
    if any(call.row.event == "logprobs" for call in calls(rows)):
        marks["log-probabilities"] = hatched
    if drawn.given_up:
        marks["given up"] = {"color": theme.ink, "linestyle": "", "marker": "x", "markersize": 5}
    return colours, marks


def few(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) if len(numbers) < 4 else f"{numbers[0]}, {numbers[1]} ... {numbers[-1]}"


def draw_trainer(ax: Axes, rows: Sequence[Row], theme: Theme, began: float, scale: float) -> None:
    """A step from its first call to its last, in the colour of the version that it makes; hollow while it waits for groups."""
    made = {row.number("step"): row.number("version") for row in rows if row.event == "bumped"}
    by: dict[int, list[Call]] = defaultdict(list)
    for call in calls(rows):
        if call.row.event in TRAINING:
            by[call.row.number("step")].append(call)
    inch = (rows[-1].time - began) / ACROSS
    ends = [*[mine[0].left for mine in by.values()][1:], rows[-1].time]
    hatched = {"hatch": "////", "edgecolor": theme.paper}
    for (step, mine), following in zip(by.items(), ends, strict=True):
        colour = theme.colour(made[step]) if step in made else theme.faint
        left, right = mine[0].left, mine[-1].right
        middle = (0.06 + TRAINER) / 2
        paint_boxes(ax, [Box(left, right, middle - 0.02, middle + 0.02)], began, scale, facecolor=colour)
        for part, look in (("training", {}), ("logprobs", hatched)):
            boxes = [Box(one.left, one.right, 0.06, TRAINER) for one in mine if TRAINING[one.row.event] == part]
            paint_boxes(ax, boxes, began, scale, facecolor=colour, gid=f"step {step}", **look)
        whole = f"step {step}, version {made[step]}" if step in made else f"step {step} given up"
        fitting = [word for word in (whole, f"step {step}", str(step)) if len(word) * LETTER * inch < following - left]
        if fitting:
            ax.text((left - began) * scale, 0.03, fitting[0], fontsize=7.5, va="bottom")


def bands(rows: Sequence[Row], axes: Iterable[Axes], theme: Theme, began: float, scale: float) -> None:
    """Each sync as a band: it begins when the version is made, and waits for calls in flight."""
    for span in syncs(rows):
        left, right = ((when - began) * scale for when in span)
        for ax in axes:
            ax.axvspan(left, right, color=theme.faint, alpha=BAND, linewidth=0.8, zorder=0.5, gid="sync")


def draw_buffer(ax: Axes, rows: Sequence[Row], theme: Theme, began: float, scale: float) -> None:
    table, limits = tables.buffer(rows), tables.capacity(rows)
    x = (table["time"] - began) * scale
    ax.stackplot(
        x, table["complete"], table["unfinished"], step="post", linewidth=0,
        colors=[theme.ink, theme.faint], alpha=0.7, labels=["complete", "unfinished"], zorder=2,
    )  # fmt: skip
    top = float((table["complete"] + table["unfinished"]).max())
    if "places" in limits:
        top = max(top, limits["places"])
        ax.axhline(
            limits["places"],
            color=theme.bad,
            linewidth=1.4,
            linestyle=LINES[2],
            label=f"limit, {limits['places']} places",
        )
    ax.set_ylim(0, 1.5 * top)  # room for the legend
    ax.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    ax.set(ylabel="groups", title="Groups in the buffer")
    ax.legend(loc="upper left", ncols=3, columnspacing=1.1, handlelength=1.4)


def height(data: RunData) -> float:
    return lanes(tables.ledger(data.records, tables.shown(data.records))).bottom + 0.2 + LEGEND + 1.1 + 0.95


NAMED = 10  # steps that have numbers
MOST = 16  # steps drawn as separate bars, the last ones
PART = {
    "training": (0, "training"),
    "logprobs": (3, "log-probabilities"),
    "sync": (2, "sync"),
    "exposed_generation": (1, "waiting for samples (exposed generation)"),
}
LOOP = {
    "plain": "plain: generate, then train",
    "lockstep": "lockstep: staleness 0",
    "stream": "stream: this config",
    "bound": "bound: simulated",
}


def looks(theme: Theme) -> dict[str, dict[str, Any]]:
    return {part: {"facecolor": theme.series[PART[part][0]], "linewidth": 0} for part in PARTS}


def times(scene: Scene) -> None:
    theme, frame = scene.theme, scene.data.records
    axes = scene.figure.subplot_mosaic(
        [["legend", "legend"], ["steps", "loops"]], height_ratios=(0.1, 1), width_ratios=(6, 5)
    )
    marks = {PART[part][1]: look for part, look in looks(theme).items()}
    legend_of(axes["legend"], marks_of(marks), columnspacing=1.1)
    draw_steps(axes["steps"], tables.steps(frame, tables.shown(frame)), theme)
    draw_loops(axes["loops"], tables.loops(frame), theme)


def whole_numbers(ax: Axes, numbers: Collection[int]) -> None:
    """An axis of bars at whole numbers. A few bars are not as wide as the plot."""
    low, high = min(numbers), max(numbers)
    ax.set_xticks(range(low, high + 1, math.ceil((high - low + 1) / NAMED)))
    ax.set_xlim(low - 0.8, max(high, low + 3) + 0.8)


def draw_steps(ax: Axes, table: pd.DataFrame, theme: Theme) -> None:
    table = table.iloc[-MOST:]
    scale, unit = time_unit(float(table["total"].max()))
    for row in table.to_dict("records"):
        top = stack(ax, row["step"], 0.7, [(row[part] * scale, look) for part, look in looks(theme).items()])
        share = row["exposed_generation"] / row["total"] if row["total"] else 0.0
        ax.text(row["step"], top, f"{share:.0%}", ha="center", va="bottom", fontsize=7.5)
    ax.set_ylim(0, 1.15 * float(table["total"].max()) * scale)
    whole_numbers(ax, table["step"])
    ax.set(xlabel="step (n = 1 each)", ylabel=f"time [{unit}]", title="Time of each step, and the share of waiting")


def draw_loops(ax: Axes, table: pd.DataFrame, theme: Theme) -> None:
    longest = float(table["total"].max())
    scale, unit = time_unit(longest)
    for place, row in enumerate(table.to_dict("records")):
        left = 0.0
        for part, look in looks(theme).items():
            ax.barh(place, row[part] * scale, 0.6, left=left, zorder=2, **look)
            left += row[part] * scale
        ax.text(left, place, f" {left:.3g} {unit}", va="center", fontsize=8.5)
    ax.set_yticks(range(len(table)), [LOOP[loop] for loop in table["loop"]])
    ax.set(ylim=(max(len(table), 3) - 0.4, -0.6), xlim=(0, 1.22 * longest * scale))
    grid_across(ax)
    ax.set(xlabel=f"time [{unit}] (n = 1 each)", title="Time of each loop over the same groups")


def bound(scene: Scene) -> None:
    """Speed and waiting, each next to that of the simulated loop with the same durations."""
    left, right = scene.figure.subplots(1, 2, width_ratios=(4, 6))
    frame, theme = scene.data.records, scene.theme
    table = {str(row["metric"]): row for row in tables.bound(frame).to_dict("records")}
    speed, waiting = table["steps_per_second"], table["exposed_generation"]
    looks = {"measured": theme.series[0], "bound": theme.faint}
    for place, (name, colour) in enumerate(looks.items()):
        reached = float(speed[name])
        left.barh(place, reached, 0.6, color=colour, zorder=2)
        left.text(reached, place, f" {reached:.3g}", va="center", fontsize=8.5)
    left.set_yticks(range(len(looks)), ["measured", "bound: simulated"])
    left.set(ylim=(len(looks) - 0.4, -0.6), xlim=(0, 1.2 * max(float(speed[name]) for name in looks)))
    grid_across(left)
    left.set(xlabel="steps per second", title="Measured against bound")
    waits = {name: tables.steps(frame, phase) for name, phase in (("measured", "stream"), ("bound", "bound"))}
    scale, unit = time_unit(max(float(one["exposed_generation"].max()) for one in waits.values()))
    for side, (name, steps) in zip((-0.2, 0.2), waits.items(), strict=True):
        some = steps.iloc[-MOST:]
        label = f"{name}: {float(waiting[name]) * scale:.3g} {unit}"
        right.bar(
            some["step"] + side, some["exposed_generation"] * scale, 0.4, color=looks[name], zorder=2, label=label
        )
    whole_numbers(right, waits["measured"].iloc[-MOST:]["step"])
    right.set(
        ylim=(0, 1.3 * right.get_ylim()[1]),
        xlabel="step",
        ylabel=f"time [{unit}]",
        title="Exposed generation of each step",
    )
    right.legend(loc="upper right", ncols=2)


def bounded(data: RunData) -> bool:
    return bool(((data.records["phase"] == "bound") & (data.records["metric"] == "steps_per_second")).any())


BOUNDED = ("strict", "in-order", "weight-fifo", "windowed")  # samplers that bound the lag by the window

END = {
    "cleared": (2, "trained"),
    "evicted": (1, "evicted: too old"),
    "aborted": (4, "aborted"),
    "failed": (3, "failed"),
    "dropped": (5, "dropped: equal rewards"),
    "replaced": (0, "replaced"),
}


def groups(scene: Scene) -> None:
    left, right = scene.figure.subplots(1, 2, width_ratios=(6, 5))
    data, phase = scene.data, tables.shown(scene.data.records)
    window = tables.capacity(tables.ledger(data.records, phase)).get("window")
    bounded = data.config.get("sampler") in BOUNDED
    draw_lags(left, tables.lags(data.records, phase), window if bounded else None, scene.theme)
    draw_ends(right, tables.ends(data.records, phase), scene.theme)


def draw_lags(ax: Axes, table: pd.DataFrame, window: int | None, theme: Theme) -> None:
    tokens = table.groupby("lag")["tokens"].sum()
    total = int(tokens.sum())
    for lag, count in zip(tokens.index.tolist(), tokens.tolist(), strict=True):
        late = window is not None and lag > window
        ax.bar(lag, count, 0.7, color=theme.bad if late else theme.series[0], zorder=2)
        ax.text(lag, count, f"{count}\n{count / total:.0%}", ha="center", va="bottom", fontsize=8.5)
    if window is not None:
        ax.axvline(window + 0.5, color=theme.bad, linewidth=1.4, linestyle=LINES[2])
        ax.annotate(f"limit: {counted(window, 'version')} ", (window + 0.5, 1), xycoords=("data", "axes fraction"),
                    ha="right", va="top", color=theme.bad, fontsize=8.5)  # fmt: skip
    ax.set_ylim(0, 1.35 * max(float(tokens.max()) if total else 0.0, 1.0))
    whole_numbers(ax, [0, window or 0, *table["lag"]])
    ax.set(xlabel="lag: version during training minus version of the token", ylabel="trained tokens")
    mean = tables.lag_columns(table)["mean lag"]
    ax.set_title(f"Lag of {total:,} trained tokens, mean {mean:.2f} versions")


def draw_ends(ax: Axes, table: pd.DataFrame, theme: Theme) -> None:
    looks = {end: {"facecolor": theme.series[colour], "linewidth": 0} for end, (colour, _) in END.items()}
    kinds = [end for end in END if end in set(table["end"])]
    for version, rows in table.groupby("version"):
        counts = rows.set_index("end")["groups"]
        stack(ax, float(str(version)), 0.7, [(float(counts.get(end, 0)), looks[end]) for end in kinds])
    by = table.groupby("version")["groups"].sum()
    totals = table.groupby("end")["groups"].sum()
    ax.set_ylim(0, (1.15 + 0.13 * math.ceil(len(kinds) / 2)) * (float(by.max()) if len(by) else 1.0))
    whole_numbers(ax, table["version"])
    ax.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    ax.set(
        xlabel="version when the group ended", ylabel="groups", title=f"How {counted(int(totals.sum()), 'group')} ended"
    )
    marks = {f"{END[end][1]} ({totals[end]})": looks[end] for end in kinds}
    ax.legend(handles=marks_of(marks), ncols=2, loc="upper left", columnspacing=1.1, handlelength=1.2)


def drift(scene: Scene) -> None:
    left, right = scene.figure.subplots(1, 2, width_ratios=(4, 6))
    table = tables.drift(scene.data.records, scene.data.run.dir)
    highest = 0.0
    for lag in sorted({int(one) for one in table["lag"]}):
        some = table[table["lag"] == lag]
        count = some["tokens"].sum()
        kl, ratio = (float((some[name] * some["tokens"]).sum() / count) for name in ("KL", "ratio"))
        highest = max(highest, kl)
        left.bar(lag, kl, 0.7, color=scene.theme.series[0], zorder=2)
        left.text(lag, kl, f"{kl:.2g}\nratio {ratio:.4g}", ha="center", va="bottom", fontsize=8.5)
        right.plot(
            some["position"],
            some["mismatch"],
            marker="o",
            markersize=3,
            color=scene.theme.colour(lag),
            label=f"lag {lag}",
        )
    left.set_ylim(0, 1.4 * max(highest, 1e-9))
    whole_numbers(left, [int(lag) for lag in table["lag"]])
    left.set(xlabel="lag in versions", ylabel="KL per token", title="Drift of the policy by lag")
    right.set_ylim(0, 1.3 * max(float(table["mismatch"].max()), 1e-9))
    right.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    right.set(
        xlabel="position in the answer", ylabel="mean |difference|", title="Trainer's minus recorded log-probability"
    )
    right.legend(loc="upper right", ncols=4)


WIDEST = 8  # versions


def prepare(run: Run) -> Callable[..., pd.DataFrame]:
    frame = run.frame()
    phase = tables.shown(frame)
    if not phase:
        raise NotMeasured("no loop of this run has a complete sample yet")
    rows = tables.ledger(frame, phase)
    done = line(rows)

    def table(**changes: Any) -> pd.DataFrame:
        words = ", ".join(f"{name} {value}" for name, value in changes.items())
        possible = forecast(rows, **changes).rows
        return pd.DataFrame([{"loop": f"measured: {phase}", **done}, {"loop": f"forecast: {words}", **line(possible)}])

    return table


def line(rows: Sequence[Row]) -> dict[str, float]:
    reached, lags = pace(rows), tables.lags_of(rows)
    wasted = next((row.number("wasted", 0) for row in rows if row.event == "ended"), 0)
    return {
        "seconds": rows[-1].time - rows[0].time,
        "steps per second": reached["steps_per_second"],
        "exposed generation": reached["exposed_generation"],
        **tables.lag_columns(lags),
        "tokens trained": int(lags["tokens"].sum()),
        "tokens wasted": wasted,
    }


WHAT_IF = WhatIf(title="What if", names={"sampler": (*SAMPLERS,)}, numbers={"window": (0, WIDEST)}, prepare=prepare)


def has_rows(table: Callable[[RunData], pd.DataFrame]) -> Callable[[RunData], bool]:
    def has(data: RunData) -> bool:
        try:
            return len(table(data)) > 0
        except (NotMeasured, Unjudged):
            return False

    return has


def measured(table: Callable[..., pd.DataFrame]) -> Callable[[RunData], bool]:
    """Whether a table of the loop that is drawn has rows."""
    return has_rows(lambda data: table(data.records, tables.shown(data.records)))


def ready(data: RunData) -> bool:
    return bool(data.order) and tables.shown(data.records) != ""


def recomputed(scene: Scene) -> None:
    ax, theme, frame = scene.figure.subplots(), scene.theme, scene.data.records
    rows = frame[frame["phase"] == "verify"]
    found = {str(name): float(value) for name, value in zip(rows["metric"], rows["value"], strict=True)}
    sentence, colour = "Recomputation: the run ended before this phase.", theme.faint
    if "wrong_stamps" in found:
        tokens, decidable, wrong = (int(found[name]) for name in ("tokens", "decidable", "wrong_stamps"))
        share = found["samples_over_syncs"] / found["samples"] if found["samples"] else 0.0
        colour = theme.bad if wrong else theme.good
        sentence = (
            f"Recomputation: {tokens:,} tokens under the weights of every version; {decidable:,} of them are decidable, "
            f"{wrong:,} have a wrong version. {share:.0%} of the samples span a sync."
        )
    ax.set_axis_off()
    ax.text(0, 0.5, sentence, transform=ax.transAxes, va="center", color=colour, fontsize=9.5)


def words(data: RunData) -> list[str]:
    config = data.config
    sizes = [f"{name} {config[name]}" for name in ("tp", "pp") if config[name] > 1]
    served = counted(config["replicas"], "replica") + (f" of {config['infer_tp']}" if config["infer_tp"] > 1 else "")
    return [
        ", ".join([config["size"], *sizes]), served, f"{config['sampler']}, window {config['window']}",
        f"at a sync: {config['at_sync']}", counted(config["steps"], "step"),
    ]  # fmt: skip


SECONDS = dict.fromkeys(("total", *PARTS), "s")
PICTURES = Pictures(
    plots={
        "versions": Plot("Versions over time, by replica", ready, lambda data, _: height(data), versions),
        "steps": Plot("Where the time went", measured(tables.steps), lambda *_: 3.3, times),
        "bound": Plot("Measured against bound", bounded, lambda *_: 2.4, bound),
        "groups": Plot("Lag of tokens, ends of groups", measured(tables.ends), lambda *_: 3.1, groups),
        "drift": Plot(
            "Drift by lag and position",
            has_rows(lambda data: tables.drift(data.records, data.run.dir)),
            lambda *_: 2.7,
            drift,
        ),
        "recomputed": Plot("Recomputation", ready, lambda *_: 0.35, recomputed),
    },
    what_if=WHAT_IF,
    overview=(("versions",), ("steps",), ("bound",), ("groups",), ("drift",), ("recomputed",), ("verdict",)),
    words=words,
    ready=ready,
    tables={
        "steps": Table("Every step", lambda run: tables.steps(run.frame()), units={**SECONDS, "replicas_idle": "s"}),
        "replicas": Table("Every replica", lambda run: tables.replicas(run.frame()), units={"generating": "s"}),
        "loops": Table("Loop by loop", lambda run: tables.loops(run.frame()), units=SECONDS),
        "bound": Table(
            "Measured against bound", lambda run: tables.bound(run.frame()), units={"measured": ROW, "bound": ROW}
        ),
        "drift": Table("Drift by lag and position", lambda run: tables.drift(run.frame(), run.dir), "mismatch"),
        "lags": Table("Lag of trained tokens", lambda run: tables.lags(run.frame()), "lag"),
        "ends": Table("How groups ended", lambda run: tables.ends(run.frame())),
    },
)
