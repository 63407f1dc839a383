"""What a card's memory is taken by after each phase of an offload run: parts that stand on one another up to what the driver says is used.

Each part says who told it. What nobody tells is a difference: the communicators' memory where NCCL gives no statistics is what the
driver shows beyond the allocator and beyond what there was without a job. Ranks that share a card are drawn as one, unless the driver
tells of each process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kit.view.drawings import counted, size_unit
from kit.view.waterfall import KINDS, Place, finish, places

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kit.view.steps import Steps
    from kit.view.style import Theme

WITHOUT = "baseline"  # the phase after which there are a context, loaded kernels and WORLD, and no job
TOLD_AT = {WITHOUT: WITHOUT, "train": "fingerprint", "release": "idle", "idle": "idle"}  # where NCCL is asked
NCCL = "NCCL's statistics"
WIDTH = 0.62
BESIDE = 0.4  # room for the legend, as a part of the bars' own


class Band(NamedTuple):
    """A part, what is said of it, and its bytes after each place; None where it is not known."""

    name: str
    told: str
    sizes: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Card:
    """Levels of one card: the median over cards, or over ranks where each has its own number."""

    seen: Steps

    def level(self, metric: str, phase: str, cycles: Sequence[int], *, add: bool = True) -> float | None:
        """`add` over the ranks of a card what each says of itself; what they all say of the card counts once."""
        rows = self.seen.of(metric)
        rows = rows[(rows["phase"] == phase) & rows["cycle"].isin(cycles)]
        if rows.empty:
            return None
        owner = rows["rank"].map(lambda rank: self.seen.memory.card_of.get(rank, rank)).rename("owner")
        groups = rows.groupby([owner, "cycle"])["value"]
        return float((groups.sum() if add else groups.max()).median())

    @property
    def by_process(self) -> bool:
        """Whether the driver told of the process every time: else its part of some bars would be missing."""
        return len(self.seen.of("process_used")) == len(self.seen.of("driver_used"))

    def own(self, phase: str, cycles: Sequence[int]) -> float | None:
        """What the driver says of this process, else of the whole card."""
        if self.by_process:
            return self.level("process_used", phase, cycles)
        return self.level("driver_used", phase, cycles, add=False)

    def beyond(self, phase: str, cycles: Sequence[int]) -> float:
        """What the driver shows and the allocator does not have."""
        return (self.own(phase, cycles) or 0.0) - (self.level("reserved", phase, cycles) or 0.0)

    def without(self) -> float:
        """That, without a job; the least of all phases where the run was not asked then."""
        if self.own(WITHOUT, [0]) is not None:
            return self.beyond(WITHOUT, [0])
        return min(self.beyond(phase, [cycle]) for cycle, phase in self.seen.order)

    def kinds(self, place: Place) -> dict[str, float]:
        """The job's tensors by kind after a phase, where the code under test tells them; what a release forgot is `left`."""
        if place.phase in {"release", "idle"}:
            left = self.level("left_bytes", "idle", place.cycles)
            return {} if left is None else {"left": left}
        told, cycles = ("release" if place.phase == "train" else "reload"), place.cycles
        if place.part == "after":
            told, cycles = "reload", [cycle - 1 for cycle in cycles]
        found = {kind: self.level(f"{kind}_bytes", told, cycles) for kind in KINDS}
        return {kind: size for kind, size in found.items() if size is not None and place.part != "before"}

    def communicators(self, place: Place) -> float | None:
        """NCCL's own statistics of every communicator that a phase left."""
        phase = TOLD_AT.get(place.phase)
        return None if phase is None else self.level("communicators_total", phase, place.cycles)


def bands(seen: Steps, steps: Sequence[Place]) -> list[Band]:
    """The parts from the bottom up. A difference that comes out negative, since sources are asked one after the other, is 0."""
    card = Card(seen)
    without, by_process = card.without(), card.by_process
    world = card.level("communicators_total", WITHOUT, [0]) or 0.0
    columns: list[dict[str, float]] = []
    for place in steps:
        at = place.phase, place.cycles
        beyond = max(card.beyond(*at) - without + world, 0.0)
        said = card.communicators(place) or (world or None)  # where NCCL is not asked WORLD is there all the same
        told = None if said is None else min(said, beyond)  # NCCL may count what is suspended, and is not on the card
        kinds = card.kinds(place)
        reserved, allocated = (card.level(name, *at) or 0.0 for name in ("reserved", "allocated"))
        column = {
            "without": without - world,
            "residual": beyond - (told or 0.0),
            **({} if told is None else {"nccl": told}),
            **kinds,
            "other": max(allocated - sum(kinds.values()), 0.0),
            "slack": max(reserved - allocated, 0.0),
        }
        if by_process:
            whole = card.level("driver_used", *at, add=False) or 0.0
            column["others"] = max(whole - (card.own(*at) or 0.0), 0.0)
        columns.append(column)
    there = "other processes and ranks" if len(set(seen.cards.values())) < len(seen.cards) else "other processes"
    nccl = any("nccl" in column for column in columns)
    names = {
        "others": (there, "driver"),
        "without": (f"CUDA context{'' if world else ', WORLD'}{'' if by_process else ', others'}", "driver, baseline"),
        "nccl": ("communicators", NCCL),
        "residual": ("not told by NCCL" if nccl else "communicators", "driver's residual"),
        "weights": ("weights", "the job"),
        "grads": ("gradients", "the job"),
        "optimizer": ("optimizer", "the job"),
        "left": ("job's, left behind", "the job"),
        "other": ("other tensors", "allocator"),
        "slack": ("slack", "allocator"),
    }
    found = [Band(*names[key], [column.get(key) for column in columns]) for key in names]
    return [band for band in found if any(band.sizes)]


def card_bands(ax: Axes, seen: Steps, theme: Theme) -> None:
    """The card after each phase, a bar each, and the allocator's peak within the phase."""
    steps = places(seen)
    card = Card(seen)
    scale, unit = size_unit(max(card.level("driver_used", p.phase, p.cycles, add=False) or 0.0 for p in steps))
    bottoms, tensors = [0.0] * len(steps), [0.0] * len(steps)
    found = bands(seen, steps)
    looks = styles(theme, nccl=any(band.told == NCCL for band in found))
    for band in found:
        if band.told in {"the job", "allocator"} and not any(tensors):
            tensors = list(bottoms)
        sizes = [(size or 0.0) * scale for size in band.sizes]
        ax.bar(range(len(steps)), sizes, WIDTH, bottom=bottoms, zorder=2, linewidth=0.6, **looks[band.name])
        bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    for x, (place, top) in enumerate(zip(steps, bottoms, strict=True)):
        peak, highest = card.level("peak_allocated", place.phase, place.cycles), top
        if peak is not None and place.phase != "baseline":  # its peak is of the control, which ends there
            at = tensors[x] + peak * scale
            ax.plot([x - WIDTH / 2 - 0.06, x + WIDTH / 2 + 0.06], [at, at], color=theme.ink, linewidth=1.6, zorder=4)
            highest = max(top, at)
        ax.annotate(f"{top:.4g}", (x, highest), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    finish(ax, steps, theme, room=0.16)
    ax.set_ylim(bottom=0)
    ax.set_ylabel(f"in use [{unit}]")
    ax.set_title(f"GPU memory by what takes it ({whose(seen)})")
    marks: list[Patch | Line2D] = [
        Patch(label=f"{band.name} ({band.told})", linewidth=0.6, **looks[band.name]) for band in reversed(found)
    ]
    peak_mark = Line2D([], [], color=theme.ink, linewidth=1.6, label="peak in the phase (allocator)")
    ax.set_xlim(-0.7, len(steps) * (1 + BESIDE))
    legend = ax.legend(handles=[peak_mark, *marks], loc="center right", fontsize=8, labelspacing=0.45, borderaxespad=0)
    legend.set_frame_on(True)
    legend.get_frame().set(facecolor=theme.paper, edgecolor="none", alpha=1)


def whose(seen: Steps) -> str:
    """Which memory a bar is."""
    ranks = len(seen.ranks)
    if seen.memory.card_of:
        cards = len(set(seen.memory.card_of.values()))
        return f"{counted(cards, 'card')} shared by {ranks} ranks"
    return "1 rank" if ranks == 1 else f"median of {ranks} ranks"


def styles(theme: Theme, *, nccl: bool) -> Mapping[str, dict[str, Any]]:
    """What nobody tells, and is a difference, is hatched."""
    kinds = {
        name: {"facecolor": theme.colour(index)} for index, name in enumerate(("weights", "gradients", "optimizer"))
    }
    unsaid = {"facecolor": theme.colour(3), "hatch": "////"}
    plain: dict[str, dict[str, str]] = {
        **kinds,
        "other processes": {"facecolor": theme.paper},
        "other processes and ranks": {"facecolor": theme.paper},
        **{
            f"CUDA context{with_}": {"facecolor": theme.grid}
            for with_ in ("", ", WORLD", ", others", ", WORLD, others")
        },
        "communicators": {"facecolor": theme.colour(3)} if nccl else unsaid,
        "not told by NCCL": unsaid,
        "job's, left behind": {"facecolor": theme.bad},
        "other tensors": {"facecolor": theme.colour(5)},
        "slack": {"facecolor": theme.faint, "hatch": "////"},
    }
    return {name: {"edgecolor": theme.faint, **look} for name, look in plain.items()}
