"""The picture of a sync run: stages of every sync, an expansion event by event, transports, and what hashing found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kit.labs.sync import tables
from kit.results import NotMeasured
from kit.view import handover, rates
from kit.view.drawings import counted, verdict_height, verdict_summary
from kit.view.split import grouped

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kit.results import Run, Verdict
    from kit.view.steps import Steps
    from kit.view.style import Theme


def tells(seen: Steps) -> bool:
    """Whether a sync went through."""
    timed = seen.of("wall")
    return bool(timed[timed["rank"] == 0]["phase"].isin(tables.PATHS).any())


def words(run: Run, seen: Steps) -> list[str]:  # noqa: ARG001 - every lab's picture is asked alike
    """The trainer, the replicas, what carries the weights between them, and how often."""
    config = run.config
    sizes = [f"{name} {config[name]}" for name in ("tp", "pp") if config[name] > 1]
    replicas = counted(config["replicas"], "replica") + (f" of {config['infer_tp']}" if config["infer_tp"] > 1 else "")
    where = [config["placement"], *(["two Worlds"] if config["worlds"] == "two" else [])]
    cycles = counted(config["cycles"], "cycle")
    return [", ".join([config["size"], *sizes]), replicas, ", ".join(where), f"transport {config['transport']}", cycles]


def draw(picture: Figure, run: Run, seen: Steps, verdict: Verdict, look: Theme) -> None:  # noqa: ARG001 - as any picture's
    frame = run.frame()
    lines = grouped(verdict)
    told, compared = handover.shown(frame), has_rates(frame)
    said = sentences(frame, run.config, look)
    below = {"said": 0.21 * len(said), "verdict": 0.2 * verdict_height(lines)}
    heights = {"stages": 3.5, "events": 0.9 + handover.height(frame), "rates": 3.1, "words": sum(below.values()) + 0.4}
    heights = {part: high for part, high in heights.items() if {"events": told, "rates": compared}.get(part, True)}
    picture.set_size_inches(11, sum(heights.values()) + 0.3)
    # Each has the whole width: long names on the left of one must not push the others in.
    column: Any = picture.subfigures(len(heights), 1, height_ratios=list(heights.values()), squeeze=False)[:, 0]
    parts = dict(zip(heights, column, strict=True))
    legend, bars = parts["stages"].subplots(2, 1, height_ratios=(0.04, 1))
    handover.stages_legend(legend, look)
    handover.stages(bars, frame, look)
    if told:
        handover.timeline(parts["events"].subplots(), frame, run.config, look)
    if compared:
        left, right = parts["rates"].subplots(1, 2, width_ratios=(6, 5))
        rates.curves(left, frame, look)
        rates.side_by_side(right, frame, carried(frame), look)
    names: list[Any] = [[name] for name in below if below[name]]
    axes = parts["words"].subplot_mosaic(names, height_ratios=[high for high in below.values() if high])
    write(axes["said"], said)
    if lines:
        verdict_summary(axes["verdict"], lines, look)


def has_rates(frame: pd.DataFrame) -> bool:
    try:
        return not tables.transports(frame).empty
    except NotMeasured:
        return False


def carried(frame: pd.DataFrame) -> set[str]:
    """The transports that syncs of this run went by."""
    rows = frame[
        frame["phase"].isin(tables.PATHS) & frame["metric"].str.startswith("transport/") & (frame["value"] > 0)
    ]
    return set(rows["metric"].str.removeprefix("transport/"))


def sentences(frame: pd.DataFrame, config: Mapping[str, Any], theme: Theme) -> list[tuple[str, str]]:
    """What hashing found, what was served meanwhile, and what this picture has no drawing of; each with its colour."""
    said = [hashed(frame, theme), served(frame, theme)]
    if not has_rates(frame):
        why = "the run did not get to it" if config.get("sweep", True) else "sweep is off"
        said.append((f"Transports were not compared: {why}.", theme.faint))
    return said


def write(ax: Axes, said: Sequence[tuple[str, str]]) -> None:
    ax.set_axis_off()
    for line, (words, colour) in enumerate(said):
        y = 1 - (line + 0.5) / len(said)
        ax.text(0, y, words, transform=ax.transAxes, va="center", color=colour, fontsize=9.5)


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
    words = f"Meanwhile: {counted(int(forwards), 'forward')} served during refreshes, {torn:g} of no one version."
    return words, theme.bad if torn else theme.good
