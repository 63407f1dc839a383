"""The pictures and tables of a sync run: busy time by stage, one sync event by event, transports, and what hashing found."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kit.draw.general import drift
from kit.draw.plots import Pictures, Plot, RunData, Scene, Table, grid_across, legend_of, marks_of, stack
from kit.draw.style import LINES, MARKERS, Theme
from kit.labs.sync import rules
from kit.results import NotMeasured, with_ids
from kit.results.units import counted, samples, time_unit

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

GB, MIB = 1e9, 2**20
COLUMNS = 4  # of a legend


# -- stages --------------------------------------------------------------------------------------------------------------


class Stage(NamedTuple):
    """How a stage is drawn: the place of its colour in the theme (None: grey), its hatch, and its word where its name says too little."""

    colour: int | None
    hatch: str = ""
    word: str = ""


# Sending and receiving are two ends of one thing, as are keeping the old weights and applying the new ones. What is short is one: the rest.
STAGES = {
    "gather": Stage(0),
    "pack": Stage(3),
    "send": Stage(1),
    "receive": Stage(1, "///"),
    "verify": Stage(2),
    "keep": Stage(4, "...", "undo copy"),
    "apply": Stage(4),
    "teardown": Stage(5),
    "rest": Stage(None, word="finalize to activate"),
}
SHORT = dict.fromkeys(("finalize", "publish", "activate"), "rest")
# Which stage an event ends. What leads to any other is drawn as waiting.
ENDS = {"gathered": "gather", "packed": "pack", "sent": "send", "received": "receive", "verified": "verify"}
ENDS |= {"apply": "apply", "applied": "apply", "teardown": "teardown", "end": "rest", **SHORT}
CYCLES = 5  # as many are drawn, the last ones
LANES = 6
LANE = 0.52  # inches
LETTER = 0.0057  # of the width of the drawing, at this size of type
LONG = 28  # letters in a line
WIDTH = 0.36


def look_of(stage: str | None, theme: Theme) -> dict[str, Any]:
    index, hatch, _ = STAGES[stage] if stage else (None, "", "")
    colour = theme.series[index] if index is not None else theme.faint if stage else theme.grid
    return {"facecolor": colour, "hatch": hatch, "edgecolor": theme.paper, "linewidth": 0}


def bars(scene: Scene) -> None:
    """Two bars for each sync: the sender's stages, and those of the receiver that was last. A line: the time that passed."""
    theme = scene.theme
    legend, ax = scene.figure.subplots(2, 1, height_ratios=(0.05, 1))
    marks = {stage.word or name: look_of(name, theme) for name, stage in STAGES.items()}
    marks["elapsed time"] = {"color": theme.ink, "linewidth": 1.8}
    legend_of(legend, marks_of(marks), columnspacing=1.0, handlelength=1.2)
    table = rules.stages(scene.data.records)
    table = table[table["cycle"].isin(sorted(table["cycle"].unique())[-CYCLES:])]
    scale, unit = time_unit(float(table["seconds"].max()))
    ticks: dict[float, str] = {}
    x, last = -1.0, None
    for (cycle, path), mine in table.groupby(["cycle", "path"], sort=False):
        x, last = x + (1.0 if last in (cycle, None) else 1.35), cycle
        for side, who in ((-1, "sender"), (1, "receiver")):
            rows = mine[mine["who"] == who]
            busy = scale * rows.groupby(rows["stage"].replace({"gate": "rest", **SHORT}))["seconds"].sum()
            parts = [(float(busy[stage]), look_of(stage, theme)) for stage in STAGES if stage in busy]
            stack(ax, x + side * WIDTH / 2, WIDTH * 0.9, parts)
        ticks[x] = f"{path}\ncycle {cycle}"
        for passed in mine[(mine["who"] == "sender") & (mine["stage"] == "wall")]["seconds"] * scale:
            ax.plot([x - WIDTH, x + WIDTH], [passed] * 2, color=theme.ink, linewidth=1.8, zorder=4)
            ticks[x] += f"\ntook {passed:.3g} {unit}"
    ax.set(
        xlim=(-0.7, max(4.0, *ticks) + 0.7),  # one sync is not drawn as wide as all of it
        xticks=list(ticks),
        xticklabels=list(ticks.values()),
        ylabel=f"busy [{unit}]",
        title="Stages of each sync, n = 1 each (left: sender; right: last receiver; stages overlap)",
    )
    ax.tick_params(axis="x", length=0)


# -- events ----------------------------------------------------------------------------------------------------------------


def shown(frame: pd.DataFrame) -> tuple[str, int] | None:
    """The sync to draw event by event: the last expansion that has any, else the last refresh."""
    events = rules.all_events(frame)
    for path in reversed(rules.PATHS):
        cycles = events[events["phase"] == path]["cycle"]
        if len(cycles):
            return path, int(cycles.max())
    return None


def lanes(events: pd.DataFrame) -> list[int]:
    """The sender and the receivers; of many those that took longest."""
    last = events[events["rank"] != 0].groupby("rank")["seconds"].max().sort_values(ascending=False)
    sender = [0] if (events["rank"] == 0).any() else []
    return sender + sorted(int(rank) for rank in last.index[: LANES - 1])


def height(frame: pd.DataFrame) -> float:
    found = shown(frame)
    return LANE * (len(lanes(rules.events(frame, *found))) + 1) if found else 0.0


def timeline(scene: Scene) -> None:
    """A lane a rank: what led to each event in the colour of its stage, and its name where it happened."""
    ax, theme, frame = scene.figure.subplots(), scene.theme, scene.data.records
    path, cycle = shown(frame) or ("expand", 0)
    events = rules.events(frame, path, cycle)
    ranks = lanes(events)
    low, high = float(events["seconds"].min()), float(events["seconds"].max())
    scale, unit = time_unit(high - low)
    of_ranks = (events[events["rank"] == rank] for rank in ranks)
    moments = [list(zip(mine["seconds"] * scale, mine["event"], strict=True)) for mine in of_ranks]
    left, right = (edge * scale for edge in (low - 0.01 * (high - low), high))
    for _ in range(3):  # the last names need room, which makes all others narrower
        ends = [written[-1] for written in (labels(lane, LETTER * (right - left)) for lane in moments)]
        right = max(left + (x - left) / (1 - LETTER * wide(word)) for x, word in ends)
    for lane, mine in enumerate(moments):
        for index, (x, name) in enumerate(mine):
            if index:
                before = mine[index - 1][0]
                ax.barh(lane, x - before, 0.34, left=before, zorder=2, **look_of(ENDS.get(name), theme))
            ax.plot([x, x], [lane - 0.24, lane + 0.2], color=theme.ink, linewidth=1.0, zorder=3)
        for x, word in labels(mine, LETTER * (right - left)):
            ax.text(x, lane - 0.27, fold(word), fontsize=7.5, va="bottom", linespacing=1.0)
    receivers = events["rank"].nunique() - (0 in ranks)
    some = f", {len(ranks) - 1} of {receivers} receivers" if receivers > LANES - 1 else ""
    word = {"expand": "Expansion", "refresh": "Refresh"}[path]
    ax.set(
        yticks=range(len(ranks)),
        yticklabels=[named(rank, scene.data.config) for rank in ranks],
        ylim=(len(ranks) - 0.6, -0.85),
        xlim=(left, right),
        xlabel=f"time since the sender began [{unit}]",
        title=f"{word} of cycle {cycle}, event by event{some} (grey: preparing, waiting)",
    )
    grid_across(ax)


def labels(moments: Sequence[tuple[float, str]], letter: float) -> list[tuple[float, str]]:
    """Where names are written: each at its event, but those that would run into the one before are joined to it."""
    found: list[tuple[float, str]] = []
    for x, name in moments:
        if found and x < found[-1][0] + (wide(found[-1][1]) + 1) * letter:
            found[-1] = found[-1][0], f"{found[-1][1]}, {name}"
        else:
            found.append((x, name))
    return found


def fold(word: str) -> str:
    return textwrap.fill(word, max(LONG, len(word) // 2 + 9))


def wide(word: str) -> int:
    return max(map(len, fold(word).split("\n")))


def named(rank: int, config: Mapping[str, object]) -> str:
    if rank == 0:
        return "sender, rank 0"
    ranks, replicas, each = (int(str(config[name])) for name in ("ranks", "replicas", "infer_tp"))
    return f"replica {(rank - (ranks - replicas * each)) // each}, rank {rank}"


# -- transports ----------------------------------------------------------------------------------------------------------


def rates(scene: Scene) -> None:
    left, right = scene.figure.subplots(1, 2, width_ratios=(6, 5))
    curves(left, scene.data.records, scene.theme)
    side_by_side(right, scene.data.records, scene.theme)


def curves(ax: Axes, frame: pd.DataFrame, theme: Theme) -> None:
    """GB/s against the bucket size, end to end into a receiver's tensors; one large memcpy is the ceiling."""
    table = rules.transports(frame)
    for index, (name, rows) in enumerate(table.groupby("transport")):
        x, style = rows["bucket_bytes"] / MIB, dict[str, Any](color=theme.colour(index))
        if rows["rate_low"].notna().all():
            ax.vlines(x, rows["rate_low"] / GB, rows["rate_high"] / GB, linewidth=5, alpha=0.3, **style)
        style |= {"marker": MARKERS[index % len(MARKERS)], "linestyle": LINES[index % len(LINES)]}
        ax.plot(x, rows["rate"] / GB, linewidth=1.6, markersize=5.5, label=str(name), **style)
    highest, ceiling = float(table["rate"].max()) / GB, rules.memcpy(frame) / GB
    if math.isfinite(ceiling):
        highest = max(highest, ceiling)
        ax.axhline(ceiling, color=theme.ink, linewidth=1.3, linestyle=LINES[2], zorder=1)
        ax.annotate(f"one memcpy, {ceiling:.3g}", (1, ceiling), (0, 3), xycoords=("axes fraction", "data"),
                    textcoords="offset points", ha="right", fontsize=8.5)  # fmt: skip
    sizes = sorted(table["bucket_bytes"].unique() / MIB)
    ax.set_xscale("log", base=2)
    ax.minorticks_off()
    swept = frame[frame["phase"] == "sweep"]
    numbers, size = (swept[swept["metric"] == name]["value"] for name in ("rate_samples", "sweep_bytes"))
    median = f"{samples({int(number) for number in numbers})}, median and range" if len(numbers) else "medians"
    of = f", {float(size.iloc[0]) / MIB:.4g} MiB to one receiver" if len(size) else ""
    ax.set(
        xlim=(sizes[0] / 1.4, sizes[-1] * 1.4),
        xticks=sizes,
        xticklabels=[f"{size:g}" for size in sizes],
        ylim=(0, (1.15 + 0.13 * math.ceil(table["transport"].nunique() / COLUMNS)) * highest),  # room for the legend
        xlabel=f"bucket size [MiB] ({median})",
        ylabel="GB/s",
        title=f"Transports by bucket size{of}",
    )
    ax.legend(ncols=COLUMNS, loc="upper left", columnspacing=1.1, handlelength=2.2)


def side_by_side(ax: Axes, frame: pd.DataFrame, theme: Theme) -> None:
    """Each transport at its best bucket size, the fastest first; those that this run's syncs used are marked."""
    table = rules.transports(frame)
    order = list(table["transport"].unique())
    found = table.sort_values("rate", ascending=False).drop_duplicates("transport")
    used = frame["phase"].isin(rules.PATHS) & (frame["metric"] == "transport_receivers") & (frame["value"] > 0)
    chosen = set(with_ids(frame[used], "transport")["transport"])
    for place, row in enumerate(found.to_dict("records")):
        ax.barh(place, row["rate"] / GB, 0.62, color=theme.colour(order.index(row["transport"])), zorder=2)
        share = f", {row['of_memcpy']:.0%}" if math.isfinite(row["of_memcpy"]) else ""
        mark = ", used here" if row["transport"] in chosen else ""
        words = f" {row['rate'] / GB:.3g} GB/s{share}, {row['bucket_bytes'] / MIB:g} MiB{mark}"
        ax.text(row["rate"] / GB, place, words, va="center", fontsize=8.5)
    ax.set(
        yticks=range(len(found)),
        yticklabels=list(found["transport"]),
        ylim=(len(found) - 0.4, -0.6),
        xlim=(0, 2.3 * float(found["rate"].max()) / GB),
        xlabel="GB/s",
        title="Best medians (share of memcpy, bucket)",
    )
    grid_across(ax)


def ready(data: RunData) -> bool:
    timed = data.of("wall")
    return bool(timed[timed["rank"] == 0]["phase"].isin(rules.PATHS).any())


def words(data: RunData) -> list[str]:
    config = data.config
    sizes = [f"{name} {config[name]}" for name in ("tp", "pp") if config[name] > 1]
    replicas = counted(config["replicas"], "replica") + (f" of {config['infer_tp']}" if config["infer_tp"] > 1 else "")
    where = config["placement"] + (", two Worlds" if config["worlds"] == "two" else "")
    cycles = counted(config["cycles"], "cycle")
    return [", ".join([config["size"], *sizes]), replicas, where, f"transport {config['transport']}", cycles]


def has_rates(frame: pd.DataFrame) -> bool:
    rates = with_ids(frame[(frame["phase"] == "sweep") & (frame["metric"] == "rate")], "transport", "bucket_size")
    return bool(rates["value"].notna().any())


def summary(scene: Scene) -> None:
    """What hashing found, what was served meanwhile, and what has no plot, in sentences."""
    ax, theme, frame = scene.figure.subplots(), scene.theme, scene.data.records
    lines = [hashed(frame, theme), served(frame, theme)]
    if not has_rates(frame):
        why = "the run ended before that" if scene.data.config.get("sweep", True) else "sweep is off"
        lines.append((f"Transports were not compared: {why}.", theme.faint))
    ax.set_axis_off()
    for line, (sentence, colour) in enumerate(lines):
        y = 1 - (line + 0.5) / len(lines)
        ax.text(0, y, sentence, transform=ax.transAxes, va="center", color=colour, fontsize=9.5)


def hashed(frame: pd.DataFrame, theme: Theme) -> tuple[str, str]:
    try:
        table = rules.digests(frame)
    except NotMeasured as why:
        return f"Digests: {why}.", theme.faint
    wrong = table[table["differ"] > 0]
    total = f"{table['hashed'].sum():g} tensors hashed on {counted(table['rank'].nunique(), 'receiver')}"
    over = f"over {counted(table['cycle'].nunique(), 'cycle')}"
    if wrong.empty:
        return f"Digests: {total} {over}, 0 differ from the trainer's.", theme.good
    first = wrong.iloc[0]
    where = f"first on rank {first['rank']:g} in cycle {first['cycle']:g}"
    return f"Digests: {total} {over}, {wrong['differ'].sum():g} differ from the trainer's, {where}.", theme.bad


def served(frame: pd.DataFrame, theme: Theme) -> tuple[str, str]:
    rows = frame[frame["phase"] == "refresh"]
    counts = {name: rows[rows["metric"] == name]["value"] for name in ("served", "torn")}
    if counts["served"].empty:
        return "No replica served while weights were refreshed.", theme.faint
    forwards, torn = (float(values.sum()) for values in counts.values())
    found = f"{counted(int(forwards), 'forward')} served during refreshes, {torn:g} with weights of mixed versions."
    return f"Meanwhile: {found}", theme.bad if torn else theme.good


PICTURES = Pictures(
    plots={
        "stages": Plot("Sync by stage", ready, lambda *_: 3.9, bars),
        "events": Plot(
            "One sync, event by event",
            lambda data: ready(data) and bool(shown(data.records)),
            lambda data, _: 0.9 + height(data.records),
            timeline,
        ),
        "rates": Plot("GB/s by bucket size", lambda data: has_rates(data.records), lambda *_: 3.4, rates),
        "summary": Plot("Digests and forwards", ready, lambda *_: 0.65, summary),
        "drift": drift("verify"),
    },
    overview=(("stages",), ("events",), ("rates",), ("summary",), ("verdict",)),
    words=words,
    ready=ready,
    tables={
        "syncs": Table(
            "Every sync",
            lambda run: rules.syncs(run.frame()),
            "wall",
            {
                **dict.fromkeys(("wall", *rules.SENDER, *(f"receiver {one}" for one in rules.RECEIVER)), "s"),
                "bytes": "B",
            },
        ),
        "stages": Table("Every stage of every sync", lambda run: rules.stages(run.frame()), units={"seconds": "s"}),
        "transports": Table(
            "Transports by bucket size",
            lambda run: rules.transports(run.frame()),
            units={"bucket_bytes": "B", **dict.fromkeys(("rate", "rate_low", "rate_high"), "B/s")},
        ),
        "digests": Table("Digests on the receivers, worst first", lambda run: rules.digests(run.frame()), "differ"),
    },
)
