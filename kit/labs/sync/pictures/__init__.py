"""The pictures and tables of a sync run: stages of every sync, one sync event by event, transports, and what hashing found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.draw.general import drift
from kit.draw.plots import Pictures, Plot, Table
from kit.labs.sync import tables
from kit.labs.sync.pictures import rates, stages
from kit.results import NotMeasured, with_ids
from kit.results.units import counted

if TYPE_CHECKING:
    import pandas as pd

    from kit.draw.plots import RunData, Scene
    from kit.draw.style import Theme

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
    rates.curves(left, scene.data.records, scene.theme)
    rates.side_by_side(right, scene.data.records, carried(scene.data.records), scene.theme)


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
        why = "the run did not get to it" if scene.data.config.get("sweep", True) else "sweep is off"
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
        "summary": Plot("What hashing found", ready, lambda *_: 0.65, draw_summary),
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
