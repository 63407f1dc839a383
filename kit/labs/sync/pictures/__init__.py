"""The pictures and tables of a sync run: stages of every sync, one sync event by event, transports, and what hashing found."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kit.draw.axes import grid_across
from kit.draw.general import drift
from kit.draw.plots import Pictures, Plot, Table
from kit.draw.style import LINES, MARKERS
from kit.labs.sync import tables
from kit.labs.sync.pictures import stages
from kit.results import NotMeasured, with_ids
from kit.results.units import counted, samples

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from kit.draw.plots import RunData, Scene
    from kit.draw.style import Theme


GB, MIB = 1e9, 2**20
COLUMNS = 4  # of a legend


def rates(scene: Scene) -> None:
    left, right = scene.figure.subplots(1, 2, width_ratios=(6, 5))
    curves(left, scene.data.records, scene.theme)
    side_by_side(right, scene.data.records, scene.theme)


def curves(ax: Axes, frame: pd.DataFrame, theme: Theme) -> None:
    """GB/s against the bucket size, end to end into a receiver's tensors; one large memcpy is the ceiling."""
    table = tables.transports(frame)
    for index, (name, rows) in enumerate(table.groupby("transport")):
        sizes, style = rows["bucket_bytes"] / MIB, {"color": theme.colour(index)}
        if rows["rate_low"].notna().all():
            ax.vlines(sizes, rows["rate_low"] / GB, rows["rate_high"] / GB, linewidth=5, alpha=0.3, **style)
        style |= {"marker": MARKERS[index % len(MARKERS)], "linestyle": LINES[index % len(LINES)]}
        ax.plot(sizes, rows["rate"] / GB, linewidth=1.6, markersize=5.5, label=str(name), **style)
    highest, ceiling = float(table["rate"].max()) / GB, tables.memcpy(frame) / GB
    if math.isfinite(ceiling):
        highest = max(highest, ceiling)
        ax.axhline(ceiling, color=theme.ink, linewidth=1.3, linestyle=LINES[2], zorder=1)
        ax.annotate(f"one memcpy, {ceiling:.3g}", (1, ceiling), (0, 3), xycoords=("axes fraction", "data"),
                    textcoords="offset points", ha="right", fontsize=8.5)  # fmt: skip
    sizes = sorted(table["bucket_bytes"].unique() / MIB)
    ax.set_xscale("log", base=2)
    ax.set_xlim(sizes[0] / 1.4, sizes[-1] * 1.4)
    ax.set_xticks(sizes, [f"{size:g}" for size in sizes])
    ax.minorticks_off()
    ax.set_ylim(0, (1.15 + 0.13 * math.ceil(table["transport"].nunique() / COLUMNS)) * highest)  # room for the legend
    swept = frame[frame["phase"] == "sweep"]
    numbers, size = (swept[swept["metric"] == name]["value"] for name in ("rate_samples", "sweep_bytes"))
    median = f"{samples({int(number) for number in numbers})}, median and range" if len(numbers) else "medians"
    ax.set_xlabel(f"bucket size [MiB] ({median})")
    ax.set_ylabel("GB/s")
    of = f", {float(size.iloc[0]) / MIB:.4g} MiB to one receiver" if len(size) else ""
    ax.set_title(f"Transports by bucket size{of}")
    ax.legend(ncols=COLUMNS, loc="upper left", columnspacing=1.1, handlelength=2.2)


def side_by_side(ax: Axes, frame: pd.DataFrame, theme: Theme) -> None:
    """Each transport at its best bucket size, the fastest first; those that this run's syncs used are marked."""
    table = tables.transports(frame)
    order = list(table["transport"].unique())
    found = table.sort_values("rate", ascending=False).drop_duplicates("transport")
    used = frame["phase"].isin(tables.PATHS) & (frame["metric"] == "transport_receivers") & (frame["value"] > 0)
    chosen = set(with_ids(frame[used], "transport")["transport"])
    for place, row in enumerate(found.to_dict("records")):
        ax.barh(place, row["rate"] / GB, 0.62, color=theme.colour(order.index(row["transport"])), zorder=2)
        share = f", {row['of_memcpy']:.0%}" if math.isfinite(row["of_memcpy"]) else ""
        mark = ", used here" if row["transport"] in chosen else ""
        words = f" {row['rate'] / GB:.3g} GB/s{share}, {row['bucket_bytes'] / MIB:g} MiB{mark}"
        ax.text(row["rate"] / GB, place, words, va="center", fontsize=8.5)
    ax.set_yticks(range(len(found)), found["transport"])
    ax.set_ylim(len(found) - 0.4, -0.6)
    ax.set_xlim(0, 2.3 * float(found["rate"].max()) / GB)
    grid_across(ax)
    ax.set_xlabel("GB/s")
    ax.set_title("Best medians (share of memcpy, bucket)")


def ready(data: RunData) -> bool:
    """Whether a sync succeeded."""
    timed = data.of("wall")
    return bool(timed[timed["rank"] == 0]["phase"].isin(tables.PATHS).any())


def words(data: RunData) -> list[str]:
    """The trainer, the replicas, what carries the weights between them, and how often."""
    config = data.config
    sizes = [f"{name} {config[name]}" for name in ("tp", "pp") if config[name] > 1]
    replicas = counted(config["replicas"], "replica") + (f" of {config['infer_tp']}" if config["infer_tp"] > 1 else "")
    where = [config["placement"], *(["two Worlds"] if config["worlds"] == "two" else [])]
    cycles = counted(config["cycles"], "cycle")
    return [", ".join([config["size"], *sizes]), replicas, ", ".join(where), f"transport {config['transport']}", cycles]


def has_rates(frame: pd.DataFrame) -> bool:
    try:
        return not tables.transports(frame).empty
    except NotMeasured:
        return False


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
        table = tables.digests(frame)
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


STAGES = ("wall", *tables.SENDER, *(f"receiver {stage}" for stage in tables.RECEIVER))  # columns of a table
PICTURES = Pictures(
    plots={
        "stages": Plot("Sync by stage", ready, lambda *_: 3.9, stages.bars),
        "events": Plot(
            "One sync, event by event",
            lambda data: ready(data) and bool(stages.shown(data.records)),
            lambda data, _: 0.9 + stages.height(data.records),
            stages.timeline,
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
            lambda run: tables.syncs(run.frame()),
            "wall",
            {**dict.fromkeys(STAGES, "s"), "bytes": "B"},
        ),
        "stages": Table("Every stage of every sync", lambda run: tables.stages(run.frame()), units={"seconds": "s"}),
        "transports": Table(
            "Transports by bucket size",
            lambda run: tables.transports(run.frame()),
            units={"bucket_bytes": "B", **dict.fromkeys(("rate", "rate_low", "rate_high"), "B/s")},
        ),
        "digests": Table("Digests on the receivers, worst first", lambda run: tables.digests(run.frame()), "differ"),
    },
)
