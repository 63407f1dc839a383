"""The pictures of an offload run: memory through the phases, times, drift over cycles, counts, verdict.

Controls and checks of content are most of such a run's steps and not what it is about: they are summed up in one line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.ticker import MaxNLocator

from kit.draw.axes import cycle_axis, draw_limit, draw_samples, legend_of, log_scale, marks_of, rank_lanes, widen
from kit.draw.general import COUNT_CHECKS, COUNTS, allowed, counts_of, drift
from kit.draw.plots import Pictures, Plot
from kit.draw.style import LINES, MARKERS
from kit.labs.offload.pictures.memory import gpu_bars, host_bars
from kit.results.units import counted, samples, time_unit

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from kit.draw.plots import RunData, Scene


# What is timed: a phase, or a part of it that the code under test reports.
TIMED = (
    ("release", "seconds", "release"),
    ("release", "groups_seconds", "its groups"),
    ("release", "tensors_seconds", "its tensors"),
    ("reload", "seconds", "reload"),
    ("reload", "groups_seconds", "its groups"),
    ("reload", "tensors_seconds", "its tensors"),
    ("talk", "seconds", "first\ncollective"),
    ("train", "seconds", "train"),
)
CONTROLS = ("control_build", "control", "control_end", "second_control")
CHECKING = ("fingerprint", "verify", "compare", "rehearse_failure", "ownership")
STATES = (("before the release", "fingerprint", 0), ("released", "idle", 4), ("reloaded", "verify", 2))


def rows_of(data: RunData, phase: str, metric: str) -> pd.DataFrame:
    rows = data.of(metric)
    return rows[rows["phase"] == phase]


def times(scene: Scene) -> None:
    """Time per phase and rank: the first cycle hollow, the later ones filled."""
    ax, data, theme = scene.figure.subplots(), scene.data, scene.theme
    shown = [(timed(data, phase, metric), label) for phase, metric, label in TIMED]
    shown = [(rows, label) for rows, label in shown if not rows.empty]
    scale, unit = time_unit(max(float(rows["value"].max()) for rows, _ in shown))
    lanes = rank_lanes(data)
    for index, (rows, _) in enumerate(shown):
        for lane, ranks in enumerate(lanes):
            mine = rows[rows["rank"].isin(ranks)].set_index("cycle")["value"] * scale
            x = index + (lane - (len(lanes) - 1) / 2) * 0.6 / len(lanes)
            first, later = mine[mine.index == 1], mine[mine.index > 1]
            if not later.empty:
                draw_samples(ax, x, later, theme, marker=MARKERS[lane], colour=theme.series[0])
            hollow: dict[str, Any] = {"color": theme.series[1], "markerfacecolor": "none", "markeredgewidth": 1.4}
            ax.plot([x] * len(first), first, MARKERS[lane], markersize=5.5, **hollow)
    log_scale(ax)
    low, high = ax.get_ylim()
    ax.set_ylim(low, high * 4)  # room for the legend
    ax.set_xticks(range(len(shown)), [label for _, label in shown])
    ax.tick_params(axis="x", labelsize=8)
    for tick, (_, label) in zip(ax.get_xticklabels(), shown, strict=True):
        tick.set_color(theme.faint if label.startswith("its") else theme.ink)
    ax.set_xlim(-0.6, len(shown) - 0.4)
    ax.set_ylabel(f"time [{unit}]")
    ax.set_title(f"Time per phase{' and rank' if len(lanes) > 1 else ', all ranks'}")
    names = [f"rank {ranks[0]}" if len(lanes) > 1 else f"{len(ranks)} ranks" for ranks in lanes]
    marks = {name: {"marker": MARKERS[lane], "color": theme.faint} for lane, name in enumerate(names)}
    marks["cycle 1, n = 1"] = {"marker": "o", "color": theme.series[1], "markerfacecolor": "none"}
    later_counts = {len(mine) for rows, _ in shown for _, mine in rows[rows["cycle"] > 1].groupby("rank")}
    if later_counts:
        marks[f"later, {samples(later_counts)}"] = {"marker": "o", "color": theme.series[0]}
    marks = {word: {"linestyle": "", **look} for word, look in marks.items()}
    ax.legend(handles=marks_of(marks), ncols=3, loc="upper right", handletextpad=0.1, columnspacing=0.8)
    ax.set_xlabel(left_out(data), color=theme.faint, fontsize=8.5)


def timed(data: RunData, phase: str, metric: str) -> pd.DataFrame:
    """The times of a phase; a training that had to be skipped took none."""
    rows = rows_of(data, phase, metric)
    if phase != "train":
        return rows
    trained = data.of("trained_steps")["step"]
    return rows[rows["step"].isin(trained)] if len(trained) else rows


def left_out(data: RunData) -> str:
    """The time of what is not drawn: the slowest rank of each phase."""
    slowest = data.of("seconds").groupby("step").agg({"phase": "first", "value": "max"})
    sums = {
        word: float(slowest[slowest["phase"].isin(phases)]["value"].sum())
        for word, phases in (("controls", CONTROLS), ("hashing and checks", CHECKING))
    }
    return "not drawn: " + ", ".join(f"{word} {seconds:.1f} s" for word, seconds in sums.items())


def census(scene: Scene) -> None:
    """A count per metric side by side, below the legend of the states."""
    theme, counts = scene.theme, counts_of(scene.data)
    axes = scene.figure.subplot_mosaic([["legend"] * len(counts), counts], height_ratios=[0.1, 2.2])
    marks = {word: state_style(place, scene) for place, (word, _, _) in enumerate(STATES)}
    marks["process without a job"] = {"color": theme.faint, "linestyle": LINES[1]}
    legend_of(axes["legend"], marks_of(marks))
    for name in counts:
        draw_count(axes[name], scene, name)


def state_style(place: int, scene: Scene) -> dict[str, Any]:
    colour = scene.theme.series[STATES[place][2]]
    return {"marker": MARKERS[place], "color": colour, "markerfacecolor": "none" if place == 0 else colour}


def draw_count(ax: Axes, scene: Scene, metric: str) -> None:
    """A count in each cycle while training, while released and once back, beside that of a process without the job.

    The limit is drawn above the level that the check starts from.
    """
    data, theme, more = scene.data, scene.theme, allowed(scene.verdict, metric)
    for place, (_, phase, colour) in enumerate(STATES):
        groups = rows_of(data, phase, metric).groupby("cycle")["value"]
        if not len(groups):
            continue
        middle = groups.median()
        ax.fill_between(middle.index, groups.min(), groups.max(), color=theme.series[colour], alpha=0.25, linewidth=0)
        size = (7.5, 5, 3.8)[place]
        style = state_style(place, scene)
        ax.plot(middle.index, middle, linewidth=1.2, markersize=size, **style)
    base = rows_of(data, "baseline", metric)["value"]
    if not base.empty:
        ax.axhline(base.median(), color=theme.faint, linewidth=1.2, linestyle=LINES[1], zorder=1)
    judged = rows_of(data, "baseline" if metric == "groups" else "build", metric)["value"]
    if more is not None and not judged.empty:
        level = float(judged.median()) + more
        draw_limit(ax, level, f"limit {more:+g}: {level:g}", theme)
    widen(ax, least=4)
    ax.set_ylim(bottom=0, top=ax.get_ylim()[1] * 1.08)
    ax.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    cycle_axis(ax)
    ax.set_xlabel("cycle" if len(data.ranks) == 1 else f"cycle (range of {len(data.ranks)} ranks)")
    ax.set_ylabel("count")
    ax.set_title(COUNTS[metric] + ("" if base.empty else f" (without a job {base.median():g})"))


OURS = "kit.labs."


def ready(data: RunData) -> bool:
    """Whether something was released and observed."""
    return {"release", "idle"} <= set(data.phases)


def words(data: RunData) -> list[str]:
    """The job, how it was released, and how often."""
    config = data.config
    sizes = [f"{name} {config[name]}" for name in ("tp", "pp", "ep") if config.get(name, 1) > 1]
    own = str(config.get("implementation", OURS))
    how = f"mode {config.get('mode')}" if own.startswith(OURS) else own
    number = sum(phase == "release" for _, phase in data.order)
    return [", ".join([str(config.get("size", "")), *sizes]), how, counted(number, "cycle")]


def sources(data: RunData) -> list[str]:
    return [name for name in ("anon_rss", "driver_used") if name in data.metrics()]


def memory(scene: Scene) -> None:
    """The host's memory above the GPU's."""
    found = sources(scene.data)
    for ax, source in zip(scene.figure.subplots(len(found), 1, squeeze=False)[:, 0], found, strict=True):
        (host_bars if source == "anon_rss" else gpu_bars)(ax, scene.data, scene.theme)


PICTURES = Pictures(
    plots={
        "memory": Plot(
            "Memory by source", lambda data: bool(sources(data)), lambda data, _: 3.3 * len(sources(data)), memory
        ),
        "drift": drift("idle", "while released"),
        "times": Plot("Time per phase and rank", lambda _: True, lambda *_: 3.4, times),
        "census": Plot(
            "Groups, files, threads", lambda data: bool(counts_of(data)), lambda *_: 2.4, census, COUNT_CHECKS
        ),
    },
    overview=(("memory",), ("times", "drift"), ("census",), ("verdict",)),
    ready=ready,
    words=words,
)
