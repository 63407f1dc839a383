"""What takes a GPU's memory after each phase of an offload run: stacked parts up to what the driver reports as used.

Each part names its source. A part without one is a difference: where NCCL gives no statistics, the communicators' memory is what the
driver shows beyond the allocator and beyond the level without a job. Ranks that share a GPU are drawn as one, unless the driver
reports each process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kit.draw.axes import stack
from kit.labs.offload.pictures.host import KINDS, Place, finish, places
from kit.results.units import counted, size_unit

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from kit.draw.plots import RunData
    from kit.draw.style import Theme

WITHOUT = "baseline"  # the phase after which there are a context, loaded kernels and WORLD, and no job
TOLD_AT = {WITHOUT: WITHOUT, "train": "fingerprint", "release": "idle", "idle": "idle"}  # where NCCL is asked
NCCL = "NCCL's statistics"
BELOW_TENSORS = ("others", "without", "nccl", "residual")  # what the allocator does not have
WIDTH = 0.62
BESIDE = 0.4  # room for the legend, as a part of the bars' own


class Band(NamedTuple):
    """A part, its source, and its bytes after each place; None where they are not known."""

    key: str
    name: str
    source: str
    sizes: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Levels:
    """Levels of one GPU: the median over GPUs, or over ranks where each has its own number."""

    data: RunData

    def level(self, metric: str, phase: str, cycles: Sequence[int], *, add: bool = True) -> float | None:
        """With `add`, the sum over the ranks of a GPU of what each reports of itself; a number of the GPU counts once."""
        rows = self.data.of(metric)
        rows = rows[(rows["phase"] == phase) & rows["cycle"].isin(cycles)]
        if rows.empty:
            return None
        owner = rows["rank"].map(lambda rank: self.data.memory.gpu_of.get(rank, rank)).rename("owner")
        groups = rows.groupby([owner, "cycle"])["value"]
        return float((groups.sum() if add else groups.max()).median())

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
        """What the driver reports beyond the allocator."""
        return (self.own(phase, cycles) or 0.0) - (self.level("reserved", phase, cycles) or 0.0)

    def without(self) -> float:
        """The same without a job; the least of all phases where the baseline was not measured."""
        if self.own(WITHOUT, [0]) is not None:
            return self.beyond(WITHOUT, [0])
        return min(self.beyond(phase, [cycle]) for cycle, phase in self.data.order)

    def kinds(self, place: Place) -> dict[str, float]:
        """The job's tensors by kind after a phase, where the code under test reports them; what a release forgot is `left`."""
        if place.phase in {"release", "idle"}:
            left = self.level("left_bytes", "idle", place.cycles)
            return {} if left is None else {"left": left}
        phase, cycles = ("release" if place.phase == "train" else "reload"), place.cycles
        if place.part == "after":
            phase, cycles = "reload", [cycle - 1 for cycle in cycles]
        found = {kind: self.level(f"{kind}_bytes", phase, cycles) for kind in KINDS}
        return {kind: size for kind, size in found.items() if size is not None and place.part != "before"}

    def communicators(self, place: Place) -> float | None:
        """NCCL's own statistics of every communicator that a phase left."""
        phase = TOLD_AT.get(place.phase)
        return None if phase is None else self.level("communicators_total", phase, place.cycles)


def bands(data: RunData, steps: Sequence[Place]) -> list[Band]:
    """The parts from the bottom up. Sources are read one after another, so a difference may come out negative: it counts as 0."""
    gpu = Levels(data)
    without, by_process = gpu.without(), gpu.by_process
    world = gpu.level("communicators_total", WITHOUT, [0]) or 0.0
    columns: list[dict[str, float]] = []
    for place in steps:
        at = place.phase, place.cycles
        beyond = max(gpu.beyond(*at) - without + world, 0.0)
        reported = gpu.communicators(place) or (world or None)  # where NCCL is not asked WORLD is there all the same
        told = (
            None if reported is None else min(reported, beyond)
        )  # NCCL may count what is suspended and not on the GPU
        kinds = gpu.kinds(place)
        reserved, allocated = (gpu.level(name, *at) or 0.0 for name in ("reserved", "allocated"))
        column = {
            "without": without - world,
            "residual": beyond - (told or 0.0),
            **({} if told is None else {"nccl": told}),
            **kinds,
            "other": max(allocated - sum(kinds.values()), 0.0),
            "slack": max(reserved - allocated, 0.0),
        }
        if by_process:
            whole = gpu.level("driver_used", *at, add=False) or 0.0
            column["others"] = max(whole - (gpu.own(*at) or 0.0), 0.0)
        columns.append(column)
    there = "other processes and ranks" if len(set(data.gpus.values())) < len(data.gpus) else "other processes"
    nccl = any("nccl" in column for column in columns)
    names = {
        "others": (there, "driver"),
        "without": (f"CUDA context{'' if world else ', WORLD'}{'' if by_process else ', others'}", "driver, baseline"),
        "nccl": ("communicators", NCCL),
        "residual": ("not counted by NCCL" if nccl else "communicators", "driver's residual"),
        "weights": ("weights", "the job"),
        "grads": ("gradients", "the job"),
        "optimizer": ("optimizer", "the job"),
        "left": ("not released", "the job"),
        "other": ("other tensors", "allocator"),
        "slack": ("slack", "allocator"),
    }
    found = [Band(key, *names[key], [column.get(key) for column in columns]) for key in names]
    return [band for band in found if any(band.sizes)]


def gpu_bands(ax: Axes, data: RunData, theme: Theme) -> None:
    """A bar per phase, and the allocator's peak within the phase."""
    steps = places(data)
    gpu = Levels(data)
    scale, unit = size_unit(max(gpu.level("driver_used", p.phase, p.cycles, add=False) or 0.0 for p in steps))
    found = bands(data, steps)
    looks = styles(theme)
    for x, place in enumerate(steps):
        sizes = {band.key: (band.sizes[x] or 0.0) * scale for band in found}
        top = highest = stack(ax, x, WIDTH, [(size, looks[key]) for key, size in sizes.items()])
        peak = gpu.level("peak_allocated", place.phase, place.cycles)
        if peak is not None and place.phase != "baseline":  # its peak is of the control, which ends there
            at = peak * scale + sum(size for key, size in sizes.items() if key in BELOW_TENSORS)
            ax.plot([x - WIDTH / 2 - 0.06, x + WIDTH / 2 + 0.06], [at, at], color=theme.ink, linewidth=1.6, zorder=4)
            highest = max(top, at)
        ax.annotate(f"{top:.4g}", (x, highest), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    finish(ax, steps, theme, room=0.16)
    ax.set_ylim(bottom=0)
    ax.set_ylabel(f"in use [{unit}]")
    ax.set_title(f"GPU memory by use ({memory_words(data)})")
    marks: list[Artist] = [Line2D([], [], color=theme.ink, linewidth=1.6, label="peak in the phase (allocator)")]
    marks += [Patch(label=f"{band.name} ({band.source})", **looks[band.key]) for band in reversed(found)]
    ax.set_xlim(-0.7, len(steps) * (1 + BESIDE))
    legend = ax.legend(handles=marks, loc="center right", fontsize=8, labelspacing=0.45, borderaxespad=0)
    legend.set_frame_on(True)
    legend.get_frame().set(facecolor=theme.paper, edgecolor="none", alpha=1)


def memory_words(data: RunData) -> str:
    """Which memory a bar is."""
    ranks = len(data.ranks)
    if data.memory.gpu_of:
        gpus = len(set(data.memory.gpu_of.values()))
        return f"{counted(gpus, 'GPU')} shared by {ranks} ranks"
    return "1 rank" if ranks == 1 else f"median of {ranks} ranks"


def styles(theme: Theme) -> dict[str, dict[str, Any]]:
    """What no source reports, and is a difference, is hatched."""
    looks: dict[str, dict[str, Any]] = {
        "others": {"facecolor": theme.paper},
        "without": {"facecolor": theme.grid},
        "nccl": {"facecolor": theme.colour(3)},
        "residual": {"facecolor": theme.colour(3), "hatch": "////"},
        **{kind: {"facecolor": theme.colour(index)} for index, kind in enumerate(KINDS)},
        "left": {"facecolor": theme.bad},
        "other": {"facecolor": theme.colour(5)},
        "slack": {"facecolor": theme.faint, "hatch": "////"},
    }
    return {key: {"edgecolor": theme.faint, "linewidth": 0.6, **look} for key, look in looks.items()}
