"""Where a rank's host memory is through the phases of an offload run: what the kernel reports beside the job's tensors.

Bars are levels above the phase `baseline`, after which a process holds all but the job. The first cycle stands apart from the later
ones, of which the median is drawn. What a source cannot tell is left out. The module `gpu` draws a GPU's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kit.draw.axes import stack, widen
from kit.results.units import size_unit

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from kit.draw.plots import RunData
    from kit.draw.style import Theme

BEFORE, IN_CYCLE = ("baseline", "build"), ("train", "release", "idle", "reload")
HOST = {"anon_rss": "anonymous", "shared_rss": "shared, host arena included"}  # parts of the resident set
TOTAL, PEAK = "rss", "peak_rss"
KINDS = ("weights", "grads", "optimizer")
WIDTH = 0.36


@dataclass(frozen=True, slots=True)
class Place:
    """A place on the axis: a phase of some cycles, under a heading."""

    phase: str
    cycles: Sequence[int]
    part: str


def places(data: RunData) -> list[Place]:
    """Before the cycles, the first, the later ones taken together, and after them: those that were measured."""
    cycles = sorted(cycle for cycle, phase in data.order if phase == "release")
    later, last = cycles[1:], cycles[-1:]
    found = [Place(phase, [0], "before") for phase in BEFORE]
    found += [Place(phase, cycles[:1], "cycle 1") for phase in IN_CYCLE]
    if later:
        span = f"cycles {later[0]} to {later[-1]}, median" if later[1:] else f"cycle {later[0]}"
        found += [Place(phase, later, span) for phase in IN_CYCLE]
    found += [Place("train", [cycle + 1 for cycle in last], "after")]
    measured = set(data.order)
    return [place for place in found if any((cycle, place.phase) in measured for cycle in place.cycles)]


def values(data: RunData, metric: str, phase: str, cycles: Sequence[int]) -> pd.Series[float]:
    rows = data.of(metric)
    return rows[(rows["phase"] == phase) & rows["cycle"].isin(cycles)]["value"]


def waterfall(ax: Axes, data: RunData, theme: Theme) -> None:
    """The job's tensors are drawn where they live: here, unless there is a device."""
    at_home = "driver_used" not in data.metrics()
    sources = {name: word for name, word in HOST.items() if name in data.metrics()}
    scale, unit = size_unit(float(data.of(TOTAL)["value"].max()))
    steps = places(data)
    base = {name: start(data, name) for name in {*sources, TOTAL}}
    shades = dict(zip(sources, (theme.faint, theme.grid), strict=False))
    for x, place in enumerate(steps):
        found = {name: values(data, name, place.phase, place.cycles) * scale for name in (*sources, TOTAL, PEAK)}
        levels = {name: float(found[name].median()) - base[name] * scale for name in sources if not found[name].empty}
        look = {"edgecolor": theme.faint, "linewidth": 0.6}
        stack(ax, x - WIDTH / 2, WIDTH, [(level, {"color": shades[name], **look}) for name, level in levels.items()])
        total, peak = found[TOTAL] - base[TOTAL] * scale, found[PEAK] - base[TOTAL] * scale
        if not total.empty:
            ax.plot([x - WIDTH / 2] * 2, [total.min(), total.max()], color=theme.ink, linewidth=1.0, zorder=4)
        if not peak.empty and place.phase != "baseline":  # its peak is of the control, which ends there
            ax.plot([x - WIDTH, x], [peak.max()] * 2, color=theme.ink, linewidth=1.6, zorder=4)
        if at_home:
            draw_job(ax, x + WIDTH / 2, {kind: size * scale for kind, size in job(data, place).items()}, theme)
    finish(ax, steps, theme)
    ax.set_ylabel(f"above baseline [{unit}]")
    ax.set_title(f"Host memory of a rank, {base[TOTAL] * scale:.4g} {unit} at the baseline ({data.ranks_word()})")
    marks: list[Artist] = [
        Patch(facecolor=shades[key], edgecolor=theme.faint, label=word) for key, word in sources.items()
    ]
    marks += [Line2D([], [], color=theme.ink, linewidth=1.6, label="peak in the phase")]
    marks += [
        Patch(facecolor=theme.colour(index), label=f"job's {kind}") for index, kind in enumerate(KINDS) if at_home
    ]
    ax.legend(handles=marks, ncols=len(marks), loc="upper left", columnspacing=1.1, handlelength=1.2)


def start(data: RunData, metric: str) -> float:
    """The level at the baseline, else the lowest there is."""
    found = values(data, metric, "baseline", [0])
    return float(data.of(metric)["value"].min() if found.empty else found.median())


def job(data: RunData, place: Place) -> dict[str, float]:
    """Bytes of the job's tensors after a phase, by kind where the code under test says so; `left` is what a release forgot."""
    if place.part in {"before", "after"}:
        return {}
    if place.phase in {"release", "idle"}:
        left = values(data, "left_bytes", "idle", place.cycles)
        return {} if left.empty else {"left": float(left.max())}
    phase = "release" if place.phase == "train" else "reload"
    found = {kind: values(data, f"{kind}_bytes", phase, place.cycles) for kind in KINDS}
    return {kind: float(rows.median()) for kind, rows in found.items() if not rows.empty}


def draw_job(ax: Axes, x: float, kinds: Mapping[str, float], theme: Theme) -> None:
    colours = {kind: theme.colour(KINDS.index(kind)) if kind in KINDS else theme.bad for kind in kinds}
    stack(ax, x, WIDTH * 0.8, [(size, {"color": colours[kind]}) for kind, size in kinds.items()])
    if kinds.get("left") == 0:
        style: dict[str, Any] = {"ha": "center", "color": theme.good, "fontweight": "bold"}
        ax.annotate("0", (x, 0), (0, 2), textcoords="offset points", **style)


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
