"""Where a rank's host memory is through the phases of an offload run: what the kernel says, beside what the job's tensors are.

Bars are levels above the phase `baseline`, after which a process holds all but the job. The first cycle stands apart from the later
ones, of which the median is drawn. What a source cannot tell is left out. A card's memory is in `kit.view.bands`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kit.view.drawings import ranks_word, size_unit, widen

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from kit.view.steps import Steps
    from kit.view.style import Theme

BEFORE, IN_CYCLE = ("baseline", "build"), ("train", "release", "idle", "reload")
HOST = {"anon_rss": "anonymous", "shared_rss": "shared, with the host arena"}  # parts of the resident set
TOTAL, PEAK = "rss", "peak_rss"
KINDS = ("weights", "grads", "optimizer")
WIDTH = 0.36


@dataclass(frozen=True, slots=True)
class Place:
    """A place on the axis: a phase of some cycles, under a heading."""

    phase: str
    cycles: Sequence[int]
    part: str


def places(seen: Steps) -> list[Place]:
    """Before the cycles, the first, the later ones taken together, and after them: those that were measured."""
    cycles = sorted(cycle for cycle, phase in seen.order if phase == "release")
    later, last = cycles[1:], cycles[-1:]
    found = [Place(phase, [0], "before") for phase in BEFORE]
    found += [Place(phase, cycles[:1], "cycle 1") for phase in IN_CYCLE]
    if later:
        span = f"cycles {later[0]} to {later[-1]}, median" if later[1:] else f"cycle {later[0]}"
        found += [Place(phase, later, span) for phase in IN_CYCLE]
    found += [Place("train", [cycle + 1 for cycle in last], "after")]
    measured = set(seen.order)
    return [place for place in found if any((cycle, place.phase) in measured for cycle in place.cycles)]


def values(seen: Steps, metric: str, phase: str, cycles: Sequence[int]) -> pd.Series[float]:
    rows = seen.of(metric)
    return rows[(rows["phase"] == phase) & rows["cycle"].isin(cycles)]["value"]


@dataclass(frozen=True, slots=True)
class Canvas:
    """Where bars are drawn, and from bytes to the axis' unit."""

    ax: Axes
    theme: Theme
    scale: float


def waterfall(ax: Axes, seen: Steps, theme: Theme) -> None:
    """The job's tensors are drawn where they live: here, unless there is a device."""
    at_home = "driver_used" not in seen.metrics()
    sources = {name: word for name, word in HOST.items() if name in seen.metrics()}
    scale, unit = size_unit(float(seen.of(TOTAL)["value"].max()))
    canvas = Canvas(ax, theme, scale)
    steps = places(seen)
    base = {name: start(seen, name) for name in {*sources, TOTAL}}
    shades = dict(zip(sources, (theme.faint, theme.grid), strict=False))
    for x, place in enumerate(steps):
        found = {name: values(seen, name, place.phase, place.cycles) for name in (*sources, TOTAL, PEAK)}
        levels = {name: float(found[name].median()) - base[name] for name in sources if not found[name].empty}
        draw_sources(canvas, x, levels, shades)
        draw_range(canvas, x, found[TOTAL] - base[TOTAL])
        if place.phase != "baseline":  # its peak is of the control, which ends there
            draw_peak(canvas, x, found[PEAK] - base[TOTAL])
        if at_home:
            draw_job(canvas, x, job(seen, place))
    finish(ax, steps, theme)
    ax.set_ylabel(f"above baseline [{unit}]")
    ax.set_title(f"Host memory of a rank, {base[TOTAL] * scale:.4g} {unit} at the baseline ({ranks_word(seen)})")
    marks: list[Artist] = [
        Patch(facecolor=shades[key], edgecolor=theme.faint, label=word) for key, word in sources.items()
    ]
    marks += [Line2D([], [], color=theme.ink, linewidth=1.6, label="peak in the phase")]
    marks += [
        Patch(facecolor=theme.colour(index), label=f"job's {kind}") for index, kind in enumerate(KINDS) if at_home
    ]
    ax.legend(handles=marks, ncols=len(marks), loc="upper left", columnspacing=1.1, handlelength=1.2)


def start(seen: Steps, metric: str) -> float:
    """The level at the baseline, else the lowest there is."""
    found = values(seen, metric, "baseline", [0])
    return float(seen.of(metric)["value"].min() if found.empty else found.median())


def job(seen: Steps, place: Place) -> dict[str, float]:
    """Bytes of the job's tensors after a phase, by kind where the code under test says so; `left` is what a release forgot."""
    if place.part in {"before", "after"}:
        return {}
    if place.phase in {"release", "idle"}:
        left = values(seen, "left_bytes", "idle", place.cycles)
        return {} if left.empty else {"left": float(left.max())}
    told = "release" if place.phase == "train" else "reload"
    found = {kind: values(seen, f"{kind}_bytes", told, place.cycles) for kind in KINDS}
    return {kind: float(rows.median()) for kind, rows in found.items() if not rows.empty}


def draw_sources(canvas: Canvas, x: float, levels: Mapping[str, float], shades: Mapping[str, str]) -> None:
    """Parts stand on one another."""
    bottom = 0.0
    for name, level in levels.items():
        canvas.ax.bar(
            x - WIDTH / 2,
            level * canvas.scale,
            WIDTH,
            bottom=bottom * canvas.scale,
            color=shades[name],
            edgecolor=canvas.theme.faint,
            linewidth=0.6,
            zorder=2,
        )
        bottom += max(level, 0.0)


def draw_range(canvas: Canvas, x: float, found: pd.Series[float]) -> None:
    if not found.empty:
        ends = [float(value) * canvas.scale for value in (found.min(), found.max())]
        canvas.ax.plot([x - WIDTH / 2] * 2, ends, color=canvas.theme.ink, linewidth=1.0, zorder=4)


def draw_peak(canvas: Canvas, x: float, found: pd.Series[float]) -> None:
    if not found.empty:
        peak = float(found.max()) * canvas.scale
        canvas.ax.plot([x - WIDTH, x], [peak, peak], color=canvas.theme.ink, linewidth=1.6, zorder=4)


def draw_job(canvas: Canvas, x: float, kinds: Mapping[str, float]) -> None:
    theme, bottom = canvas.theme, 0.0
    for kind, size in kinds.items():
        colour = theme.colour(KINDS.index(kind)) if kind in KINDS else theme.bad
        height = size * canvas.scale
        canvas.ax.bar(x + WIDTH / 2, height, WIDTH * 0.8, bottom=bottom, color=colour, zorder=2)
        bottom += height
    if kinds.get("left") == 0:
        canvas.ax.annotate(
            "0",
            (x + WIDTH / 2, 0),
            (0, 2),
            textcoords="offset points",
            ha="center",
            color=theme.good,
            fontweight="bold",
        )


def finish(ax: Axes, steps: Sequence[Place], theme: Theme, *, room: float = 0.28) -> None:
    """Names below the bars, the part of the run above them, and room for that and a legend as a part of the height."""
    ax.set_xticks(range(len(steps)), [place.phase for place in steps])
    ax.tick_params(axis="x", length=0)
    ax.set_xlim(-0.7, len(steps) - 0.3)
    ax.axhline(0, color=theme.faint, linewidth=1.0, zorder=1)
    widen(ax, least=8)
    low, high = ax.get_ylim()
    ax.set_yticks([tick for tick in ax.get_yticks() if low <= tick <= high])
    ax.set_ylim(low, high + room * (high - low))
    for part in dict.fromkeys(place.part for place in steps):
        at = [x for x, place in enumerate(steps) if place.part == part]
        if part == "cycle 1":
            ax.axvspan(at[0] - 0.5, at[-1] + 0.5, color=theme.shade, zorder=0, linewidth=0)
        middle = (at[0] + at[-1]) / 2
        ax.text(middle, high + 0.08 * (high - low), part, ha="center", va="center", color=theme.faint, fontsize=8.5)
