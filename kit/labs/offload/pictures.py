"""The pictures of an offload run: memory through the phases, times, drift over cycles, counts, verdict.

Memory after each phase is a stacked bar; the first cycle stands apart from the later ones, which are drawn as their median. On the host,
bars are levels above the phase `baseline`, beside the job's tensors where these live there. On a GPU, bars reach up to what the driver
reports as used, and each part names its source. A part without a source is a difference: where NCCL gives no statistics, communicators
are what the driver reports beyond the allocator and beyond the level without a job. Ranks that share a GPU are drawn as one bar, unless
the driver reports each process. Controls and checks of content are most of a run's steps and not what it is about: one line sums them up.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from kit.draw.general import COUNT_CHECKS, COUNTS, allowed, counts_of, drift
from kit.draw.plots import (
    Picture,
    Pictures,
    Plot,
    RunData,
    Scene,
    cycle_axis,
    draw_limit,
    draw_samples,
    legend_of,
    log_scale,
    marks_of,
    rank_lanes,
    read,
    stack,
    widen,
)
from kit.draw.style import LINES, MARKERS, Theme, theme
from kit.errors import BadInput
from kit.results import Run, Verdict, VerdictRow
from kit.results.comparison import warnings
from kit.results.units import counted, samples, size_unit, time_unit
from kit.results.verdict import MARKS

WITHOUT = "baseline"  # the phase after which there are a context, loaded kernels and WORLD, and no job
BEFORE, IN_CYCLE = (WITHOUT, "build"), ("train", "release", "idle", "reload")
RESIDENT = {"anon_rss": "anonymous", "shared_rss": "shared, host arena included"}  # parts of the resident set
TOTAL, PEAK = "rss", "peak_rss"
KINDS = ("weights", "grads", "optimizer")
ASKED_AT = {WITHOUT: WITHOUT, "train": "fingerprint", "release": "idle", "idle": "idle"}  # where NCCL is asked
BELOW_TENSORS = ("others", "without", "nccl", "residual")  # what the allocator does not have
COLOURS: dict[str, int | str] = {"others": "paper", "without": "grid", "left": "bad", "slack": "faint", "other": 5}
COLOURS |= {"nccl": 3, "residual": 3, "weights": 0, "grads": 1, "optimizer": 2}
DIFFERENCES = ("residual", "slack")  # hatched: no source reports them
HOST_WIDTH, GPU_WIDTH = 0.36, 0.62
BESIDE = 0.4  # room for the legend, as a part of the bars' own


class Place(NamedTuple):
    """A place on the axis: a phase of some cycles, under a heading."""

    phase: str
    cycles: Sequence[int]
    part: str


def places(data: RunData) -> list[Place]:
    """Before the cycles, the first, the later ones taken together, and after them: those that were measured."""
    cycles = sorted(cycle for cycle, phase in data.order if phase == "release")
    later = cycles[1:]
    found = [Place(phase, [0], "before") for phase in BEFORE]
    found += [Place(phase, cycles[:1], "cycle 1") for phase in IN_CYCLE]
    if later:
        span = f"cycles {later[0]} to {later[-1]}, median" if later[1:] else f"cycle {later[0]}"
        found += [Place(phase, later, span) for phase in IN_CYCLE]
    found += [Place("train", [cycle + 1 for cycle in cycles[-1:]], "after")]
    measured = set(data.order)
    return [place for place in found if any((cycle, place.phase) in measured for cycle in place.cycles)]


@dataclass(frozen=True, slots=True)
class Levels:
    data: RunData

    def samples(self, metric: str, phase: str, cycles: Sequence[int]) -> pd.Series[float]:
        rows = self.data.of(metric, phase)
        return rows[rows["cycle"].isin(cycles)].set_index(["rank", "cycle"])["value"]

    def level(
        self, metric: str, phase: str, cycles: Sequence[int], *, add: bool = True, of: str = "median"
    ) -> float | None:
        """The median (or what `of` names) over GPUs, or over ranks where each has its own number. With `add`, the sum over the ranks of a
        GPU of what each reports of itself; a number of the GPU counts once."""
        rows = self.samples(metric, phase, cycles)
        if rows.empty:
            return None
        gpu_of = self.data.memory.gpu_of
        groups = rows.groupby([rows.index.get_level_values(0).map(lambda rank: gpu_of.get(rank, rank)), "cycle"])
        return float((groups.sum() if add else groups.max()).agg(of))

    @property
    def by_process(self) -> bool:
        """Whether the driver reported the process every time: otherwise its part of some bars would be missing."""
        return len(self.data.of("process_used")) == len(self.data.of("driver_used"))

    def own(self, phase: str, cycles: Sequence[int]) -> float | None:
        """What the driver reports of this process, else of the whole GPU."""
        if self.by_process:
            return self.level("process_used", phase, cycles)
        return self.level("driver_used", phase, cycles, add=False)

    def beyond(self, phase: str, cycles: Sequence[int]) -> float:
        return (self.own(phase, cycles) or 0.0) - (self.level("reserved", phase, cycles) or 0.0)

    def without(self) -> float:
        """The same without a job; the least of all phases where the baseline was not measured."""
        if self.own(WITHOUT, [0]) is not None:
            return self.beyond(WITHOUT, [0])
        return min(self.beyond(phase, [cycle]) for cycle, phase in self.data.order)

    def kinds(self, place: Place) -> dict[str, float]:
        """The job's tensors by kind after a phase, where the code under test reports them; what a release forgot is `left`."""
        if place.phase in {"release", "idle"}:
            left = self.level("left_bytes", "idle", place.cycles, of="max")
            return {} if left is None else {"left": left}
        phase, cycles = ("release" if place.phase == "train" else "reload"), place.cycles
        if place.part == "after":
            phase, cycles = "reload", [cycle - 1 for cycle in cycles]
        found = {kind: self.level(f"{kind}_bytes", phase, cycles) for kind in KINDS}
        return {kind: size for kind, size in found.items() if size is not None and place.part != "before"}

    def communicators(self, place: Place) -> float | None:
        phase = ASKED_AT.get(place.phase)
        return None if phase is None else self.level("communicators_total", phase, place.cycles)


def host_bars(ax: Axes, data: RunData, theme: Theme) -> None:
    """What the kernel reports of a rank; the job's tensors beside it, unless they live on a device."""
    levels, at_home = Levels(data), "driver_used" not in data.metrics()
    sources = {name: word for name, word in RESIDENT.items() if name in data.metrics()}
    scale, unit = size_unit(float(data.of(TOTAL)["value"].max()))
    base = {name: data.start(name) or 0.0 for name in (*sources, TOTAL)}
    looks = dict(zip(sources, (look(theme.faint, theme), look(theme.grid, theme)), strict=False))
    steps = places(data)
    for x, place in enumerate(steps):
        at, left = place[:2], x - HOST_WIDTH / 2
        found = {name: levels.samples(name, *at) for name in (*sources, TOTAL, PEAK)}
        sizes = {name: (float(found[name].median()) - base[name]) * scale for name in sources if len(found[name])}
        stack(ax, left, HOST_WIDTH, [(size, looks[name]) for name, size in sizes.items()])
        total, peak = ((found[name] - base[TOTAL]) * scale for name in (TOTAL, PEAK))
        if len(total):
            ax.plot([left, left], [total.min(), total.max()], color=theme.ink, linewidth=1.0, zorder=4)
        if len(peak):
            draw_peak(ax, (x - HOST_WIDTH, x), peak.max(), place, theme)
        if at_home:
            right, kinds = x + HOST_WIDTH / 2, levels.kinds(place).items()
            looked = [(size * scale, {"color": part_colour(kind, theme)}) for kind, size in kinds]
            stack(ax, right, HOST_WIDTH * 0.8, looked)
            if ("left", 0) in kinds:
                zero: dict[str, Any] = {"ha": "center", "color": theme.good, "fontweight": "bold"}
                ax.annotate("0", (right, 0), (0, 2), textcoords="offset points", **zero)
    finish(ax, steps, theme)
    title = f"Host memory of a rank, {base[TOTAL] * scale:.4g} {unit} at the baseline ({data.ranks_word()})"
    ax.set(ylabel=f"above baseline [{unit}]", title=title)
    marks = {word: looks[name] for name, word in sources.items()}
    marks["peak in the phase"] = {"color": theme.ink, "linewidth": 1.6}
    marks |= {f"job's {kind}": {"facecolor": part_colour(kind, theme)} for kind in KINDS if at_home}
    ax.legend(handles=marks_of(marks), ncols=len(marks), loc="upper left", columnspacing=1.1, handlelength=1.2)


def draw_peak(ax: Axes, ends: tuple[float, float], level: float, place: Place, theme: Theme) -> None:
    if place.phase != WITHOUT:  # its peak is of the control, which ends there
        ax.plot(ends, [level, level], color=theme.ink, linewidth=1.6, zorder=4)


def finish(ax: Axes, steps: Sequence[Place], theme: Theme, *, room: float = 0.28) -> None:
    """Names below the bars, the part of the run above them, and room for that and a legend as a part of the height."""
    ax.set_xticks(range(len(steps)), [place.phase for place in steps])
    ax.tick_params(axis="x", length=0)
    ax.axhline(0, color=theme.faint, linewidth=1.0, zorder=1)
    widen(ax, least=8)
    low, high = ax.get_ylim()
    ax.set_yticks([tick for tick in ax.get_yticks() if low <= tick <= high])
    ax.set(xlim=(-0.7, len(steps) - 0.3), ylim=(low, high + room * (high - low)))
    for part in dict.fromkeys(place.part for place in steps):
        at = [x for x, place in enumerate(steps) if place.part == part]
        if part == "cycle 1":
            ax.axvspan(at[0] - 0.5, at[-1] + 0.5, color=theme.shade, zorder=0, linewidth=0)
        middle = (at[0] + at[-1]) / 2
        ax.text(middle, high + 0.08 * (high - low), part, ha="center", va="center", color=theme.faint, fontsize=8.5)


def part_colour(part: str, theme: Theme) -> str:
    colour = COLOURS[part]
    return theme.colour(colour) if isinstance(colour, int) else str(getattr(theme, colour))


def look(colour: str, theme: Theme, **more: Any) -> dict[str, Any]:
    return {"facecolor": colour, "edgecolor": theme.faint, "linewidth": 0.6, **more}


# -- a GPU -------------------------------------------------------------------------------------------------------------


class Band(NamedTuple):
    """A part, its source, and its bytes after each place; None where they are not known."""

    key: str
    name: str
    source: str
    sizes: Sequence[float | None]


def bands(data: RunData, steps: Sequence[Place]) -> list[Band]:
    """The parts from the bottom up. Sources are read one after another, so a difference may come out negative: it counts as 0."""
    gpu = Levels(data)
    without, by_process = gpu.without(), gpu.by_process
    world = gpu.level("communicators_total", WITHOUT, [0]) or 0.0
    columns: list[dict[str, float]] = []
    for place in steps:
        at = place[:2]
        beyond = max(gpu.beyond(*at) - without + world, 0.0)
        reported = gpu.communicators(place) or (world or None)  # where NCCL is not asked WORLD is there all the same
        # NCCL may count what is suspended and not on the GPU.
        nccl = {} if reported is None else {"nccl": min(reported, beyond)}
        kinds = gpu.kinds(place)
        reserved, allocated = (gpu.level(name, *at) or 0.0 for name in ("reserved", "allocated"))
        column = {
            "without": without - world,
            "residual": beyond - sum(nccl.values()),
            **nccl,
            **kinds,
            "other": max(allocated - sum(kinds.values()), 0.0),
            "slack": max(reserved - allocated, 0.0),
        }
        if by_process:
            whole = gpu.level("driver_used", *at, add=False) or 0.0
            column["others"] = max(whole - (gpu.own(*at) or 0.0), 0.0)
        columns.append(column)
    there = "other processes and ranks" if len(set(data.gpus.values())) < len(data.gpus) else "other processes"
    counts = any("nccl" in column for column in columns)
    names = {
        "others": (there, "driver"),
        "without": (f"CUDA context{'' if world else ', WORLD'}{'' if by_process else ', others'}", "driver, baseline"),
        "nccl": ("communicators", "NCCL's statistics"),
        "residual": ("not counted by NCCL" if counts else "communicators", "driver's residual"),
        "weights": ("weights", "the job"),
        "grads": ("gradients", "the job"),
        "optimizer": ("optimizer", "the job"),
        "left": ("not released", "the job"),
        "other": ("other tensors", "allocator"),
        "slack": ("slack", "allocator"),
    }
    found = [Band(key, *names[key], [column.get(key) for column in columns]) for key in names]
    return [band for band in found if any(band.sizes)]


def gpu_bars(ax: Axes, data: RunData, theme: Theme) -> None:
    """A bar per phase, and the allocator's peak within the phase."""
    gpu, steps = Levels(data), places(data)
    scale, unit = size_unit(max(gpu.level("driver_used", *place[:2], add=False) or 0.0 for place in steps))
    found = bands(data, steps)
    hatches = {band.key: "////" if band.key in DIFFERENCES else "" for band in found}
    looks = {key: look(part_colour(key, theme), theme, hatch=hatch) for key, hatch in hatches.items()}
    for x, place in enumerate(steps):
        sizes = {band.key: (band.sizes[x] or 0.0) * scale for band in found}
        top = highest = stack(ax, x, GPU_WIDTH, [(size, looks[key]) for key, size in sizes.items()])
        peak = gpu.level("peak_allocated", *place[:2])
        if peak is not None:
            at, half = peak * scale + sum(sizes.get(key, 0.0) for key in BELOW_TENSORS), GPU_WIDTH / 2 + 0.06
            draw_peak(ax, (x - half, x + half), at, place, theme)
            highest = top if place.phase == WITHOUT else max(top, at)
        ax.annotate(f"{top:.4g}", (x, highest), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    finish(ax, steps, theme, room=0.16)
    xlim = (-0.7, len(steps) * (1 + BESIDE))
    ax.set(xlim=xlim, ylim=(0, None), ylabel=f"in use [{unit}]", title=f"GPU memory by use ({memory_words(data)})")
    marks: dict[str, Any] = {"peak in the phase (allocator)": {"color": theme.ink, "linewidth": 1.6}}
    marks |= {f"{band.name} ({band.source})": looks[band.key] for band in reversed(found)}
    legend = ax.legend(handles=marks_of(marks), loc="center right", fontsize=8, labelspacing=0.45, borderaxespad=0)
    legend.set_frame_on(True)
    legend.get_frame().set(facecolor=theme.paper, edgecolor="none", alpha=1)


def memory_words(data: RunData) -> str:
    ranks, gpus = len(data.ranks), len(set(data.memory.gpu_of.values()))
    if gpus:
        return f"{counted(gpus, 'GPU')} shared by {ranks} ranks"
    return "1 rank" if ranks == 1 else f"median of {ranks} ranks"


# -- times and counts ----------------------------------------------------------------------------------------------------


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


def times(scene: Scene) -> None:
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
    ax.set_xticks(range(len(shown)), [label for _, label in shown])
    ax.tick_params(axis="x", labelsize=8)
    for tick, (_, label) in zip(ax.get_xticklabels(), shown, strict=True):
        tick.set_color(theme.faint if label.startswith("its") else theme.ink)
    title = f"Time per phase{' and rank' if len(lanes) > 1 else ', all ranks'}"
    room = (low, high * 4)  # for the legend
    ax.set(xlim=(-0.6, len(shown) - 0.4), ylim=room, ylabel=f"time [{unit}]", title=title)
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
    rows, trained = data.of(metric, phase), data.of("trained_steps")["step"]
    return rows[rows["step"].isin(trained)] if phase == "train" and len(trained) else rows


def left_out(data: RunData) -> str:
    slowest = data.of("seconds").groupby("step").agg({"phase": "first", "value": "max"})
    of = {"controls": CONTROLS, "hashing and checks": CHECKING}
    sums = {word: slowest[slowest["phase"].isin(phases)]["value"].sum() for word, phases in of.items()}
    return "not drawn: " + ", ".join(f"{word} {seconds:.1f} s" for word, seconds in sums.items())


def census(scene: Scene) -> None:
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
    """A count in each cycle while training, while released and once back, beside that of a process without the job. The limit is
    drawn above the level that the check starts from."""
    data, theme, more = scene.data, scene.theme, allowed(scene.verdict, metric)
    for place, (_, phase, colour) in enumerate(STATES):
        groups = data.of(metric, phase).groupby("cycle")["value"]
        if not len(groups):
            continue
        middle, size = groups.median(), (7.5, 5, 3.8)[place]
        ax.fill_between(middle.index, groups.min(), groups.max(), color=theme.series[colour], alpha=0.25, linewidth=0)
        ax.plot(middle.index, middle, linewidth=1.2, markersize=size, **state_style(place, scene))
    base = data.of(metric, "baseline")["value"]
    if not base.empty:
        ax.axhline(base.median(), color=theme.faint, linewidth=1.2, linestyle=LINES[1], zorder=1)
    judged = data.of(metric, "baseline" if metric == "groups" else "build")["value"]
    if more is not None and not judged.empty:
        draw_limit(ax, judged.median() + more, f"limit {more:+g}: {judged.median() + more:g}", theme)
    widen(ax, least=4)
    ax.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    cycle_axis(ax)
    title = COUNTS[metric] + ("" if base.empty else f" (without a job {base.median():g})")
    ranks = "" if len(data.ranks) == 1 else f" (range of {len(data.ranks)} ranks)"
    ax.set(xlabel=f"cycle{ranks}", ylabel="count", title=title, ylim=(0, ax.get_ylim()[1] * 1.08))


OURS = "kit.labs."


def words(data: RunData) -> list[str]:
    config = data.config
    sizes = [f"{name} {config[name]}" for name in ("tp", "pp", "ep") if config.get(name, 1) > 1]
    own = str(config.get("implementation", OURS))
    how = f"mode {config.get('mode')}" if own.startswith(OURS) else own
    number = sum(phase == "release" for _, phase in data.order)
    return [", ".join([str(config.get("size", "")), *sizes]), how, counted(number, "cycle")]


def sources(data: RunData) -> list[str]:
    return [name for name in ("anon_rss", "driver_used") if name in data.metrics()]


def memory(scene: Scene) -> None:
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
    ready=lambda data: {"release", "idle"} <= set(data.phases),
    words=words,
)


# -- ways of releasing side by side: what each leaves behind, what its groups cost, and which checks see it ---------------


# Each keeps its colour and shape, whichever are shown.
WAYS = ("exact", "abort", "manual", "official", "suspend", "manual, by store")
Styles = Mapping[str, Mapping[str, Any]]  # the marker and the colour of each way
PARTS = {"release": "destroy groups", "reload": "rebuild groups"}


def plot_modes(runs: Sequence[Run], *, theme_name: str = "light") -> Picture:
    """Two or more offload runs. `theme_name` is light or dark."""
    if len(runs) < 2 or any(run.lab != "offload" for run in runs):
        raise BadInput("plot_modes compares modes: give it two or more runs of the offload lab")
    look, seen = theme(theme_name), {name(run): read(run) for run in runs}
    if len(seen) < len(runs):
        raise BadInput(f"two of these runs have the same mode; give one run per mode (here: {', '.join(seen)})")
    numbers = numbered(seen)
    styles = {way: {"marker": MARKERS[n % len(MARKERS)], "color": look.colour(n)} for way, n in numbers.items()}
    verdicts = {name(run): run.verdict() for run in runs}
    table = differing(verdicts)
    counts = [metric for metric in COUNTS if all(metric in one.metrics() for one in seen.values())]
    with mpl.rc_context(look.rc()):
        high = max(2.2, 0.2 * (len(table) + 3))
        warned = [f"Warning: {why}" for why in warnings(runs)]
        picture = Picture(2.1 + high + 1.0 + 0.2 * len(warned))
        names: list[Any] = [[metric for metric in counts for _ in range(12 // len(counts))]]
        names.append(["times"] * 4 + ["checks"] * 8)
        axes = picture.subplot_mosaic(names, height_ratios=[2.1, high])
        for metric in counts:
            left_behind(axes[metric], seen, metric, styles, look)
        picture.legend(
            *axes[counts[0]].get_legend_handles_labels(), loc="outside upper right", ncols=len(seen), handletextpad=0.4
        )
        group_times(axes["times"], seen, styles, look)
        checks(axes["checks"], table, verdicts, styles, look)
        ranks = counted(len(next(iter(seen.values())).ranks), "rank")
        title = f"offload · {ranks} · modes of releasing · counts of the worst rank"
        picture.suptitle("\n".join([title, *warned]), x=0.01, ha="left", fontsize=11.5)
    return picture


def name(run: Run) -> str:
    own = str(run.config["implementation"])
    return run.fault or (own.rpartition(":")[2] if not own.startswith(OURS) else str(run.config["mode"]))


def numbered(ways: Iterable[str]) -> dict[str, int]:
    """Numbers for colours and shapes: a mode has its own, as in the picture of the bench; others take what is free."""
    shown = list(ways)
    own = {way: WAYS.index(way) for way in shown if way in WAYS}
    free = (index for index in itertools.count() if index not in own.values())
    return own | {way: next(free) for way in shown if way not in WAYS}


def left_behind(ax: Axes, seen: Mapping[str, RunData], metric: str, styles: Styles, look: Theme) -> None:
    """More than a process without the job has, while released: the worst rank of each cycle."""
    for place, (way, one) in enumerate(seen.items()):
        size = 5.5 + 1.2 * (len(seen) - 1 - place)  # those below stay in sight where ways are alike
        base = one.of(metric, "baseline").set_index("rank")["value"]
        rows = one.of(metric, "idle")
        more = rows.assign(value=rows["value"] - rows["rank"].map(base)).groupby("cycle")["value"].max()
        ax.plot(more.index, more, linewidth=1.4, markersize=size, label=way, **styles[way])
    low, high = ax.get_ylim()
    ax.axhline(0, color=look.faint, linewidth=1.0, zorder=1)
    cycle_axis(ax)
    room = (min(low, -1), max(high, 4) * 1.05)
    ax.set(ylim=room, ylabel="more than without a job", title=f"{COUNTS[metric]} while released")


def group_times(ax: Axes, seen: Mapping[str, RunData], styles: Styles, look: Theme) -> None:
    counts = set()
    for index, (way, one) in enumerate(seen.items()):
        for place, phase in enumerate(PARTS):
            found = one.of("groups_seconds", phase)["value"] * 1e3
            if found.empty:
                continue
            counts.add(len(found))
            x = place + (index - (len(seen) - 1) / 2) * min(0.22, 0.8 / len(seen))
            ax.plot([x] * len(found), found, linestyle="", markersize=5, alpha=0.75, **styles[way])
            ax.plot(x, found.median(), "_", color=look.ink, markersize=14, markeredgewidth=1.6)
    log_scale(ax)
    ax.set_xticks(range(len(PARTS)), list(PARTS.values()))
    title = f"Time for groups (n = {', '.join(map(str, sorted(counts)))} each, median)"
    ax.set(xlim=(-0.6, len(PARTS) - 0.4), ylabel="time [ms]", title=title)


def differing(verdicts: Mapping[str, Verdict]) -> dict[str, dict[str, VerdictRow]]:
    """The checks that do not pass for every way, unless none was measured: a row by way."""
    rows: dict[str, dict[str, VerdictRow]] = {}
    for way, verdict in verdicts.items():
        for row in verdict:
            rows.setdefault(row.check, {})[way] = row
    answers = {check: {row.passed for row in ways.values()} for check, ways in rows.items()}
    return {check: ways for check, ways in rows.items() if answers[check] not in ({True}, {None})}


def checks(
    ax: Axes,
    table: Mapping[str, Mapping[str, VerdictRow]],
    verdicts: Mapping[str, Verdict],
    styles: Styles,
    look: Theme,
) -> None:
    """A line per check on which the ways differ or fail, with what was measured."""
    ax.set_axis_off()
    lines = max(len(table) + 3, 11)
    where = {way: 0.5 + 0.5 * (index + 0.5) / len(verdicts) for index, way in enumerate(verdicts)}

    def write(x: float, line: float, text: str, **how: Any) -> None:
        ax.text(x, 1 - (line + 0.5) / lines, text, va="center", transform=ax.transAxes, **{"fontsize": 8.5, **how})

    write(0.06, 0, "Checks", fontweight="bold", fontsize=10)
    for way, x in where.items():
        write(x, 0, way, ha="center", fontweight="bold", color=styles[way]["color"])
    for line, (check, ways) in enumerate(table.items(), start=1):
        write(0.06, line, check)
        for way, row in ways.items():
            measured = "" if row.measured is None or row.passed else f" {row.measured:g}"
            text = f"{MARKS[row.passed].sign} {'not measured' if row.passed is None else measured}".strip()
            write(where[way], line, text, ha="center", color=look.answer(row.passed))
    rest = [row for row in next(iter(verdicts.values())) if row.check not in table]
    passed = sum(row.passed is True for row in rest)
    left_out = f"{passed} more pass in every run; {len(rest) - passed} not measured in any"
    write(0.06, len(table) + 1.6, left_out, color=look.faint)
