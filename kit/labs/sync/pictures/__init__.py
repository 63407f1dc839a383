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
from kit.results import NotMeasured, units, with_ids
from kit.results.units import counted

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from kit.draw.plots import RunData, Scene
    from kit.draw.style import Theme


GB, MIB = 1e9, 2**20
COLUMNS = 4  # of a legend


def curves(ax: Axes, frame: pd.DataFrame, theme: Theme) -> None:
    """GB/s against the bucket size, end to end into a receiver's tensors; one large memcpy is the ceiling."""
    table = tables.transports(frame)
    low, high = ends(frame)
    for index, (name, rows) in enumerate(table.groupby("transport")):
        keys = [(str(name), int(size)) for size in rows["bucket_bytes"]]
        if all(key in low for key in keys):
            ax.vlines(
                rows["bucket_bytes"] / MIB,
                [low[key] / GB for key in keys],
                [high[key] / GB for key in keys],
                color=theme.colour(index),
                linewidth=5,
                alpha=0.3,
            )
        ax.plot(
            rows["bucket_bytes"] / MIB,
            rows["rate"] / GB,
            marker=MARKERS[index % len(MARKERS)],
            linestyle=LINES[index % len(LINES)],
            color=theme.colour(index),
            linewidth=1.6,
            markersize=5.5,
            label=str(name),
        )
    ceiling = tables.memcpy(frame) / GB
    if math.isfinite(ceiling):
        ax.axhline(ceiling, color=theme.ink, linewidth=1.3, linestyle=LINES[2], zorder=1)
        ax.annotate(f"one memcpy, {ceiling:.3g}", (1, ceiling), (0, 3), xycoords=("axes fraction", "data"),
                    textcoords="offset points", ha="right", fontsize=8.5)  # fmt: skip
    highest = max(float(table["rate"].max()) / GB, ceiling if math.isfinite(ceiling) else 0)
    sizes = sorted(table["bucket_bytes"].unique())
    ax.set_xscale("log", base=2)
    ax.set_xlim(sizes[0] / MIB / 1.4, sizes[-1] / MIB * 1.4)
    ax.set_xticks([size / MIB for size in sizes], [f"{size / MIB:g}" for size in sizes])
    ax.minorticks_off()
    ax.set_ylim(0, (1.15 + 0.13 * math.ceil(table["transport"].nunique() / COLUMNS)) * highest)  # room for the legend
    ax.set_xlabel(f"bucket size [MiB]{samples(frame)}")
    ax.set_ylabel("GB/s")
    swept = frame[(frame["phase"] == "sweep") & (frame["metric"] == "sweep_bytes")]["value"]
    of = f", {float(swept.iloc[0]) / MIB:.4g} MiB to one receiver" if len(swept) else ""
    ax.set_title(f"Transports by bucket size{of}")
    ax.legend(ncols=COLUMNS, loc="upper left", columnspacing=1.1, handlelength=2.2)


def ends(frame: pd.DataFrame) -> tuple[dict[tuple[str, int], float], dict[tuple[str, int], float]]:
    """The least and the greatest rate of each transport and size, where the run recorded them."""

    def by_way(metric: str) -> dict[tuple[str, int], float]:
        rows = tables.swept(frame, metric, "transport", "bucket_size")
        ways = zip(rows["transport"], rows["bucket_size"].astype(int), strict=True)
        return dict(zip(ways, rows["value"], strict=True))

    return by_way("rate_low"), by_way("rate_high")


def samples(frame: pd.DataFrame) -> str:
    """Of how many a point is the median; older runs do not tell."""
    numbers = tables.swept(frame, "rate_samples")["value"]
    return (
        f" ({units.samples({int(number) for number in numbers})}, median and range)" if len(numbers) else " (medians)"
    )


def side_by_side(ax: Axes, frame: pd.DataFrame, chosen: set[str], theme: Theme) -> None:
    """Each transport at its best bucket size; those that this run's syncs used are marked."""
    order = {str(name): index for index, name in enumerate(sorted(tables.transports(frame)["transport"].unique()))}
    found = tables.best(frame)
    for place, row in enumerate(found.to_dict("records")):
        ax.barh(place, row["rate"] / GB, 0.62, color=theme.colour(order[row["transport"]]), zorder=2)
        share = f", {row['of_memcpy']:.0%}" if math.isfinite(row["of_memcpy"]) else ""
        used = ", used here" if row["transport"] in chosen else ""
        words = f" {row['rate'] / GB:.3g} GB/s{share}, {row['bucket_bytes'] / MIB:g} MiB{used}"
        ax.text(row["rate"] / GB, place, words, va="center", fontsize=8.5)
    ax.set_yticks(range(len(found)), found["transport"])
    ax.set_ylim(len(found) - 0.4, -0.6)
    ax.set_xlim(0, 2.3 * float(found["rate"].max()) / GB)
    grid_across(ax)
    ax.set_xlabel("GB/s")
    ax.set_title("Best medians (share of memcpy, bucket)")


BUSY = (
    "gather",
    "pack",
    "send",
    "receive",
    "verify",
    "keep",
    "gate",
    "apply",
    "teardown",
    "finalize",
    "publish",
    "activate",
    "wall",
)


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


def draw_stages(scene: Scene) -> None:
    legend, bars = scene.figure.subplots(2, 1, height_ratios=(0.05, 1))
    stages.stages_legend(legend, scene.theme)
    stages.stages(bars, scene.data.records, scene.theme)


def draw_events(scene: Scene) -> None:
    stages.timeline(scene.figure.subplots(), scene.data.records, scene.data.config, scene.theme)


def draw_rates(scene: Scene) -> None:
    left, right = scene.figure.subplots(1, 2, width_ratios=(6, 5))
    curves(left, scene.data.records, scene.theme)
    side_by_side(right, scene.data.records, carried(scene.data.records), scene.theme)


def has_rates(frame: pd.DataFrame) -> bool:
    try:
        return not tables.transports(frame).empty
    except NotMeasured:
        return False


def carried(frame: pd.DataFrame) -> set[str]:
    """The transports that syncs of this run used."""
    used = frame["phase"].isin(tables.PATHS) & (frame["metric"] == "transport_receivers") & (frame["value"] > 0)
    return set(with_ids(frame[used], "transport")["transport"])


def draw_summary(scene: Scene) -> None:
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


PICTURES = Pictures(
    plots={
        "stages": Plot("Sync by stage", ready, lambda *_: 3.9, draw_stages),
        "events": Plot(
            "One sync, event by event",
            lambda data: ready(data) and bool(stages.shown(data.records)),
            lambda data, _: 0.9 + stages.height(data.records),
            draw_events,
        ),
        "rates": Plot("GB/s by bucket size", lambda data: has_rates(data.records), lambda *_: 3.4, draw_rates),
        "summary": Plot("Digests and forwards", ready, lambda *_: 0.65, draw_summary),
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
            {**dict.fromkeys([*BUSY, *(f"receiver {stage}" for stage in BUSY)], "s"), "bytes": "B"},
        ),
        "stages": Table("Every stage of every sync", lambda run: tables.stages(run.frame()), units={"seconds": "s"}),
        "transports": Table(
            "Transports by bucket size",
            lambda run: tables.transports(run.frame()),
            units={"bucket_bytes": "B", "rate": "B/s"},
        ),
        "digests": Table("Digests on the receivers, worst first", lambda run: tables.digests(run.frame()), "differ"),
    },
)
