"""The pictures of a stream run: versions by replica, where the time went, lag of trained tokens, ends of groups, and the recomputation.

Colour is the weight version in the first picture, and a part of the time or an end of a group in the others.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from matplotlib.collections import PolyCollection
from matplotlib.ticker import MaxNLocator

from kit.draw.axes import grid_across, legend_of, marks_of, stack
from kit.draw.plots import Pictures, Plot, Table
from kit.draw.style import LINES
from kit.labs.stream import tables
from kit.results import NotMeasured
from kit.results.units import counted, time_unit
from kit.stream.meter import PARTS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    import pandas as pd
    from matplotlib.axes import Axes

    from kit.draw.plots import RunData, Scene
    from kit.draw.style import Theme
    from kit.loop.ledger import Row

REPLICAS = 8  # as many have lanes, the first ones
LANE = (0.022, 0.11)  # inches for a request of a replica
LANES = 3.0  # inches for all of them
TRAINER = 0.42  # inches
BETWEEN = 0.16  # inches between two replicas
LEGEND = 0.45  # inches
BAND = 0.4  # opacity of a sync
NAMED = 10  # steps that have numbers
LETTER = 0.062  # inches
ACROSS = 10.2  # inches of the axis of time
MOST = 16  # steps that are drawn as bars of their own, the last ones
BOUNDED = ("strict", "in-order", "weight-fifo", "windowed")  # samplers that bound the lag by the window

PART = {
    "training": (0, "training"),
    "logprobs": (3, "log-probabilities"),
    "sync": (2, "sync"),
    "exposed_generation": (1, "waiting for samples (exposed generation)"),
}
END = {
    "cleared": (2, "trained"),
    "evicted": (1, "evicted: too old"),
    "aborted": (4, "aborted"),
    "failed": (3, "failed"),
    "dropped": (5, "dropped: equal rewards"),
    "replaced": (0, "replaced"),
}
LOOP = {
    "plain": "plain: generate, then train",
    "lockstep": "lockstep: staleness 0",
    "stream": "stream: this config",
    "bound": "bound: simulated",
}


# -- versions by replica ---------------------------------------------------------------------------------------------------


class Box(NamedTuple):
    """A bar: its ends in seconds, and its place from the top in inches."""

    left: float
    right: float
    top: float
    bottom: float


class Lanes(NamedTuple):
    """Where everything is: the requests of each replica below one another, in as few lanes as they need."""

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


def paint_boxes(ax: Axes, boxes: Iterable[Box], began: float, scale: float, **look: Any) -> None:
    """Rectangles as one collection: a run may have thousands."""
    corners = [
        [
            ((x - began) * scale, y)
            for x, y in ((b.left, b.top), (b.right, b.top), (b.right, b.bottom), (b.left, b.bottom))
        ]
        for b in boxes
    ]
    ax.add_collection(PolyCollection(corners, **{"linewidth": 0, "zorder": 2, **look}), autolim=False)


def versions(scene: Scene) -> None:
    """The trainer's lane, the requests of each replica, and the buffer below on the same axis of time."""
    theme, frame = scene.theme, scene.data.records
    phase = tables.shown(frame) or ""
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
    made = {int(row.ids["version"]) for row in rows if row.name == "bumped"} | {*drawn.boxes}
    by: dict[str, list[int]] = defaultdict(list)
    for version in sorted(made):
        by[theme.colour(version)].append(version)
    colours: dict[str, dict[str, Any]] = {}
    for colour, some in by.items():
        colours[("" if colours else "version ") + few(some)] = {"facecolor": colour}
    hatched = {"facecolor": theme.faint, "hatch": "////", "edgecolor": theme.paper, "linewidth": 0}
    marks: dict[str, dict[str, Any]] = {"sync, from request to publication": {"facecolor": theme.faint, "alpha": BAND}}
    if drawn.joints:
        marks["one sample across a sync"] = {"color": theme.ink, "linewidth": 1.2}
    if any(one.part == "logprobs" for one in tables.work(rows)):
        marks["log-probabilities"] = hatched
    if drawn.given_up:
        marks["given up"] = {"color": theme.ink, "linestyle": "", "marker": "x", "markersize": 5}
    return colours, marks


def few(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) if len(numbers) < 4 else f"{numbers[0]}, {numbers[1]} ... {numbers[-1]}"


def draw_trainer(ax: Axes, rows: Sequence[Row], theme: Theme, began: float, scale: float) -> None:
    """A step from its first call to its last in the colour of the version that it makes; it is open while it waits for groups."""
    made = {int(row.ids["step"]): int(row.ids["version"]) for row in rows if row.name == "bumped"}
    by: dict[int, list[tables.Work]] = defaultdict(list)
    for one in tables.work(rows):
        by[one.step].append(one)
    inch = (rows[-1].time - began) / ACROSS
    ends = [*[calls[0].left for calls in by.values()][1:], rows[-1].time]
    hatched = {"hatch": "////", "edgecolor": theme.paper}
    for (step, calls), following in zip(by.items(), ends, strict=True):
        colour = theme.colour(made[step]) if step in made else theme.faint
        left, right = calls[0].left, calls[-1].right
        middle = (0.06 + TRAINER) / 2
        paint_boxes(ax, [Box(left, right, middle - 0.02, middle + 0.02)], began, scale, facecolor=colour)
        for part, look in (("training", {}), ("logprobs", hatched)):
            mine = [Box(one.left, one.right, 0.06, TRAINER) for one in calls if one.part == part]
            paint_boxes(ax, mine, began, scale, facecolor=colour, gid=f"step {step}", **look)
        whole = f"step {step}, version {made[step]}" if step in made else f"step {step} given up"
        fitting = [word for word in (whole, f"step {step}", str(step)) if len(word) * LETTER * inch < following - left]
        if fitting:
            ax.text((left - began) * scale, 0.03, fitting[0], fontsize=7.5, va="bottom")


def bands(rows: Sequence[Row], axes: Iterable[Axes], theme: Theme, began: float, scale: float) -> None:
    """Each sync as a band: it begins when the version is made, and waits for calls that are under way."""
    start: dict[Any, float] = {}
    for row in rows:
        if row.name == "sync_begin":
            start[row.ids["version"]] = row.time
        elif row.name == "synced" and row.ids["version"] in start:
            left, right = ((when - began) * scale for when in (start.pop(row.ids["version"]), row.time))
            for ax in axes:
                ax.axvspan(left, right, color=theme.faint, alpha=BAND, linewidth=0.8, zorder=0.5, gid="sync")


def draw_buffer(ax: Axes, rows: Sequence[Row], theme: Theme, began: float, scale: float) -> None:
    """Places that complete and unfinished groups take, against the limits."""
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
    ax.set_ylabel("groups")
    ax.set_title("Groups in the buffer")
    ax.legend(loc="upper left", ncols=3, columnspacing=1.1, handlelength=1.4)


def height(data: RunData) -> float:
    return lanes(tables.ledger(data.records, tables.shown(data.records) or "")).bottom + 0.2 + LEGEND + 1.1 + 0.95


# -- time --------------------------------------------------------------------------------------------------------------------


def looks(theme: Theme) -> dict[str, dict[str, Any]]:
    """The parts of the time in their colours, by column."""
    return {part: {"facecolor": theme.series[PART[part][0]], "linewidth": 0} for part in PARTS}


def part_legend(ax: Axes, theme: Theme) -> None:
    legend_of(ax, marks_of({PART[part][1]: look for part, look in looks(theme).items()}), columnspacing=1.1)


def times(scene: Scene) -> None:
    """Every step by part, and beside it whole loops over the same work."""
    theme, frame = scene.theme, scene.data.records
    axes = scene.figure.subplot_mosaic(
        [["legend", "legend"], ["steps", "loops"]], height_ratios=(0.1, 1), width_ratios=(6, 5)
    )
    part_legend(axes["legend"], theme)
    draw_steps(axes["steps"], tables.steps(frame, tables.shown(frame) or ""), theme)
    draw_loops(axes["loops"], tables.loops(frame), theme)


def whole_numbers(ax: Axes, numbers: Collection[int]) -> None:
    """An axis of bars at whole numbers. A few bars are not as wide as the plot."""
    low, high = min(numbers), max(numbers)
    every = math.ceil((high - low + 1) / NAMED)
    ax.set_xticks(range(low, high + 1, every))
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
    ax.set_xlabel("step (n = 1 each)")
    ax.set_ylabel(f"time [{unit}]")
    ax.set_title("Time of each step, and the share of waiting")


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
    ax.set_ylim(max(len(table), 3) - 0.4, -0.6)
    ax.set_xlim(0, 1.22 * longest * scale)
    grid_across(ax)
    ax.set_xlabel(f"time [{unit}] (n = 1 each)")
    ax.set_title("Time of each loop over the same groups")


# -- lag and ends ------------------------------------------------------------------------------------------------------------


def groups(scene: Scene) -> None:
    left, right = scene.figure.subplots(1, 2, width_ratios=(6, 5))
    data, phase = scene.data, tables.shown(scene.data.records) or ""
    window = tables.capacity(tables.ledger(data.records, phase)).get("window")
    bounded = data.config.get("sampler") in BOUNDED
    draw_lags(left, tables.lags(data.records, phase), window if bounded else None, scene.theme)
    draw_ends(right, tables.ends(data.records, phase), scene.theme)


def draw_lags(ax: Axes, table: pd.DataFrame, window: int | None, theme: Theme) -> None:
    """Trained tokens by lag; those beyond the window are wrong."""
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
    ax.set_xlabel("lag: version during training minus version of the token")
    ax.set_ylabel("trained tokens")
    mean = float((table["lag"] * table["tokens"]).sum()) / total if total else 0.0
    ax.set_title(f"Lag of {total:,} trained tokens, mean {mean:.2f} versions")


def draw_ends(ax: Axes, table: pd.DataFrame, theme: Theme) -> None:
    """Groups that ended under each version, stacked by how."""
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
    ax.set_xlabel("version when the group ended")
    ax.set_ylabel("groups")
    ax.set_title(f"How {counted(int(totals.sum()), 'group')} ended")
    marks = {f"{END[end][1]} ({totals[end]})": looks[end] for end in kinds}
    ax.legend(handles=marks_of(marks), ncols=2, loc="upper left", columnspacing=1.1, handlelength=1.2)


# -- all of them -------------------------------------------------------------------------------------------------------------


def measured(table: Callable[..., pd.DataFrame]) -> Callable[[RunData], bool]:
    """Whether a table of the loop that is drawn has rows."""

    def has(data: RunData) -> bool:
        phase = tables.shown(data.records)
        try:
            return phase is not None and len(table(data.records, phase)) > 0
        except NotMeasured:
            return False

    return has


def ready(data: RunData) -> bool:
    """Whether a loop with a ledger has a complete sample."""
    return bool(data.order) and tables.shown(data.records) is not None


def recomputed(scene: Scene) -> None:
    """What the phase verify found, in a sentence."""
    ax, theme = scene.figure.subplots(), scene.theme
    sentence, colour = verified(scene.data.records, theme)
    ax.set_axis_off()
    ax.text(0, 0.5, sentence, transform=ax.transAxes, va="center", color=colour, fontsize=9.5)


def verified(frame: pd.DataFrame, theme: Theme) -> tuple[str, str]:
    rows = frame[frame["phase"] == "verify"]
    found = {str(name): float(value) for name, value in zip(rows["metric"], rows["value"], strict=True)}
    if "wrong_stamps" not in found:
        return "Recomputation: the run ended before it.", theme.faint
    tokens, decidable, wrong = (int(found[name]) for name in ("tokens", "decidable", "wrong_stamps"))
    share = found["samples_over_syncs"] / found["samples"] if found["samples"] else 0.0
    sentence = (
        f"Recomputation: {tokens:,} tokens under the weights of every version; {decidable:,} of them are decidable, "
        f"{wrong:,} have a wrong version. {share:.0%} of the samples span a sync."
    )
    return sentence, theme.bad if wrong else theme.good


def words(data: RunData) -> list[str]:
    """The trainer and its replicas, the sampler with its window, and what happens at a sync."""
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
        "groups": Plot("Lag of tokens, ends of groups", measured(tables.ends), lambda *_: 3.1, groups),
        "recomputed": Plot("Recomputation", ready, lambda *_: 0.35, recomputed),
    },
    overview=(("versions",), ("steps",), ("groups",), ("recomputed",), ("verdict",)),
    words=words,
    ready=ready,
    tables={
        "steps": Table("Every step", lambda run: tables.steps(run.frame()), units={**SECONDS, "replicas_idle": "s"}),
        "replicas": Table("Every replica", lambda run: tables.replicas(run.frame()), units={"generating": "s"}),
        "loops": Table("Loop by loop", lambda run: tables.loops(run.frame()), units=SECONDS),
        "lags": Table("Lag of trained tokens", lambda run: tables.lags(run.frame()), "lag"),
        "ends": Table("How groups ended", lambda run: tables.ends(run.frame())),
    },
)
