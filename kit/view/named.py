"""Every drawing by name, alone: `run.plot("drift")`. `names(run)` are those that a run has something for, the whole picture first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.layout_engine import ConstrainedLayoutEngine

from kit.errors import BadInput
from kit.labs.split.config import cases_of
from kit.view import calls, cycles, drawings, handover, parity, plots, rates, split, sync
from kit.view.bands import card_bands
from kit.view.plots import Picture
from kit.view.sight import LABS, Sight
from kit.view.style import Theme, theme
from kit.view.waterfall import waterfall

if TYPE_CHECKING:
    from kit.results import Run, Verdict

WIDTH = 11.0  # inches, as the whole picture
DRIFT_AFTER = {"offload": "idle", "sync": "verify", "smoke": "count"}
DRIFT_OF = ("driver_used", "anon_rss")
ALL = "*"  # every check's limit is in the drawing


@dataclass(frozen=True, slots=True)
class Scene:
    """What a drawing is made from and onto."""

    picture: Picture
    sight: Sight
    verdict: Verdict
    look: Theme

    def size(self, height: float) -> None:
        self.picture.set_size_inches(WIDTH, height + 0.35)  # the heading


@dataclass(frozen=True, slots=True)
class NamedPlot:
    """A drawing of its own. `limits` names the checks whose limits are in it: when another moves, it stays as it is."""

    title: str
    has: Callable[[Sight], bool]
    paint: Callable[[Scene], None] | None  # None: the whole picture
    limits: tuple[str, ...] = ()

    def tells(self, run: Run) -> bool:
        return self.has(Sight.of(run))

    def draw(self, run: Run, theme: str = "light", tolerances: Mapping[str, float] | None = None) -> Picture:
        return self.of(Sight.of(run), theme, tolerances)

    def of(
        self,
        sight: Sight,
        theme_name: str = "light",
        tolerances: Mapping[str, float] | None = None,
        like: Picture | None = None,
    ) -> Picture:
        """As `draw`, of a run that was read before; laid out as `like`, the same drawing under other limits, which saves half the time."""
        look = theme(theme_name)
        if self.paint is None:
            return plots.plot_run(sight.run, theme_name=theme_name, tolerances=tolerances, seen=sight.seen)
        if not self.has(sight):
            raise BadInput(f"{sight.run.id} has no records for {self.title!r}")
        with mpl.rc_context(look.rc()):
            picture = Picture(layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06))
            self.paint(Scene(picture, sight, sight.verdict(tolerances), look))
            words = LABS[sight.own].words(sight.run, sight.seen) if sight.own else cycles_word(sight)
            heading = plots.heading(sight.run, sight.seen, words, tolerances)
            picture.suptitle(heading, x=0.01, ha="left", fontsize=9, color=look.faint)
            if like is not None:
                same_layout(picture, like)
        return picture

    def moves_with(self, tolerances: Mapping[str, Sequence[str]], moved: set[str]) -> bool:
        """Whether the drawing changes when these tolerances move; `tolerances` has the checks of each."""
        return any(ALL in self.limits or set(self.limits) & set(tolerances.get(name, ())) for name in moved)


def same_layout(picture: Picture, like: Picture) -> None:
    """Put the axes where the other picture has them, if it is of the same size and parts."""
    pairs = list(zip(picture.axes, like.axes, strict=False))
    if len(picture.axes) != len(like.axes) or tuple(picture.get_size_inches()) != tuple(like.get_size_inches()):
        return
    picture.set_layout_engine("none")
    for axes, other in pairs:
        axes.set_position(other.get_position(original=True))


def cycles_word(sight: Sight) -> list[str]:
    return [drawings.counted(len(sight.seen.cycles), "cycle")]


# -- memory ----------------------------------------------------------------------------------------------------------------


def memory_of(sight: Sight) -> list[str]:
    known = sight.seen.metrics()
    sources = {"host": drawings.HOST, "device": drawings.DEVICE}
    return [where for where, names in sources.items() if set(names) & known]


def memory(scene: Scene) -> None:
    """By source through the phases, the host's and the GPU's."""
    where = memory_of(scene.sight)
    scene.size(3.5 * len(where))
    for axes, name in zip(scene.picture.subplots(len(where), 1, squeeze=False)[:, 0], where, strict=True):
        if scene.sight.own == "offload":
            (waterfall if name == "host" else card_bands)(axes, scene.sight.seen, scene.look)
        else:
            sources, title = {
                "host": (drawings.HOST, "Host memory of the ranks"),
                "device": (drawings.DEVICE, scene.sight.seen.card_title),
            }[name]
            drawings.memory(axes, scene.sight.seen, scene.look, sources, title)


def drift_phase(sight: Sight) -> str | None:
    """After which phase memory is compared: the one that the lab's check asks about, else the last of the cycles."""
    seen = sight.seen
    found = seen.frame[seen.frame["metric"].isin(DRIFT_OF) & seen.frame["cycle"].isin(seen.cycles)]
    often = found.groupby("phase")["cycle"].nunique()
    often = often[often > 1]
    asked = DRIFT_AFTER.get(sight.run.lab)
    if asked in often.index:
        return asked
    if asked is not None or often.empty:
        return None
    return max(
        (phase for phase in seen.phases if phase in often.index and often[phase] == often.max()), key=seen.phases.index
    )


def drift(scene: Scene) -> None:
    scene.size(3.4)
    phase = drift_phase(scene.sight)
    assert phase is not None
    cycles.drift(scene.picture.subplots(), scene.sight.seen, scene.verdict, scene.look, phase)


# -- time and counts -------------------------------------------------------------------------------------------------------


def times(scene: Scene) -> None:
    seen, look = scene.sight.seen, scene.look
    if scene.sight.own == "offload":
        scene.size(3.6)
        cycles.times(scene.picture.subplots(), seen, look)
        return
    scene.size(3.6)
    drawings.times(scene.picture.subplots(), seen, look)


def counts_of(sight: Sight) -> list[str]:
    return [name for name in cycles.COUNTS if name in sight.seen.metrics()]


def census(scene: Scene) -> None:
    seen, look, verdict = scene.sight.seen, scene.look, scene.verdict
    counts = counts_of(scene.sight)
    legend = 0.25 * (1 if scene.sight.own == "offload" else math.ceil(len(seen.phases) / drawings.legend_columns(seen)))
    high = math.ceil(len(counts) / 2)
    scene.size(legend + 2.3 * high)
    rows = [counts[index : index + 2] for index in range(0, len(counts), 2)]
    names: Any = [["legend"] * 2, *([*row, row[-1]][:2] for row in rows)]
    axes = scene.picture.subplot_mosaic(names, height_ratios=[legend, *[2.0] * high])
    for name in counts:
        if scene.sight.own == "offload":
            cycles.census(axes[name], seen, name, look, allowed=drawings.allowed(verdict, name))
        else:
            drawings.census(
                axes[name], seen, look, name, title=cycles.COUNTS[name], allowed=drawings.allowed(verdict, name)
            )
    if scene.sight.own == "offload":
        cycles.census_legend(axes["legend"], look)
    else:
        drawings.phase_legend(axes["legend"], seen, look)


def timeline(scene: Scene) -> None:
    seen, look = scene.sight.seen, scene.look
    legend = 0.25 * math.ceil(len(seen.phases) / drawings.legend_columns(seen))
    lanes = 0.8 + min(0.34 * len(seen.ranks), 5.0)
    scene.size(legend + lanes)
    above, below = scene.picture.subplots(2, 1, height_ratios=(legend, lanes))
    drawings.phase_legend(above, seen, look)
    drawings.timeline(below, seen, look)


def verdict(scene: Scene) -> None:
    rows = split.grouped(scene.verdict)
    scene.size(0.22 * drawings.verdict_height(rows) + 0.1)
    drawings.verdict_summary(scene.picture.subplots(), rows, scene.look)


# -- syncs of weights ------------------------------------------------------------------------------------------------------


def stages(scene: Scene) -> None:
    scene.size(3.9)
    legend, bars = scene.picture.subplots(2, 1, height_ratios=(0.05, 1))
    handover.stages_legend(legend, scene.look)
    handover.stages(bars, scene.sight.frame, scene.look)


def events(scene: Scene) -> None:
    scene.size(0.9 + handover.height(scene.sight.frame))
    handover.timeline(scene.picture.subplots(), scene.sight.frame, scene.sight.config, scene.look)


def bandwidth(scene: Scene) -> None:
    scene.size(3.4)
    left, right = scene.picture.subplots(1, 2, width_ratios=(6, 5))
    rates.curves(left, scene.sight.frame, scene.look)
    rates.side_by_side(right, scene.sight.frame, sync.carried(scene.sight.frame), scene.look)


# -- piece-wise steps ------------------------------------------------------------------------------------------------------


def metrics(scene: Scene) -> None:
    sight, look = scene.sight, scene.look
    levels = list(dict.fromkeys(case.level for case in cases_of(sight.config)))
    table = parity.first_step(sight.frame, sight.config)
    high = parity.height(table)
    scene.size(high + 0.9)
    names: Any = [["legend"] * len(levels), levels]
    axes = scene.picture.subplot_mosaic(names, height_ratios=(0.1, high))
    parity.metrics_legend(axes["legend"], look)
    for level in levels:
        parity.metrics(axes[level], table, level, scene.verdict, look)


def gradients(scene: Scene) -> None:
    scene.size(3.6)
    parity.gradients(scene.picture.subplots(), scene.sight.frame, scene.sight.config, scene.verdict, scene.look)


def step(scene: Scene) -> None:
    scene.size(max(2.6, calls.height(scene.sight.config)) + 0.9)
    calls.timeline(scene.picture.subplots(), scene.sight.seen, scene.sight.config, scene.look)


def measured(sight: Sight) -> bool:
    return bool(sight.seen.order)


def of_sync(sight: Sight) -> bool:
    return sight.own == "sync"


def of_split(sight: Sight) -> bool:
    return sight.own == "split"


PLOTS: dict[str, NamedPlot] = {
    "overview": NamedPlot("Overview", lambda _: True, None, (ALL,)),
    "memory": NamedPlot("Memory by source", lambda sight: measured(sight) and bool(memory_of(sight)), memory),
    "drift": NamedPlot("Drift over cycles", lambda sight: drift_phase(sight) is not None, drift, cycles.DRIFT),
    "times": NamedPlot("Time per phase and rank", measured, times),
    "census": NamedPlot(
        "Groups, files, threads",
        lambda sight: measured(sight) and bool(counts_of(sight)),
        census,
        ("groups_return_to_baseline", "fds_return", "threads_return"),
    ),
    "stages": NamedPlot("Sync by stage", of_sync, stages),
    "events": NamedPlot("One sync, event by event", lambda sight: of_sync(sight) and bool(handover.shown(sight.frame)), events),
    "rates": NamedPlot("GB/s by size of bucket", lambda sight: of_sync(sight) and sync.has_rates(sight.frame), bandwidth),
    "metrics": NamedPlot("Metrics against the plain step", of_split, metrics, ("metric_parity",)),
    "gradients": NamedPlot("Gradients by number of chunks", of_split, gradients, ("grad_parity", "later_steps")),
    "calls": NamedPlot("A step, call by call", of_split, step),
    "timeline": NamedPlot("Timeline of ranks", measured, timeline),
    "verdict": NamedPlot("Verdict", lambda sight: bool(sight.verdict()), verdict, (ALL,)),
}  # fmt: skip


def names_of(sight: Sight) -> list[str]:
    return [name for name, plot in PLOTS.items() if plot.has(sight)]


def names(run: Run) -> list[str]:
    """The plots that this run has something for."""
    return names_of(Sight.of(run))


def plot(
    run: Run, name: str = "overview", *, theme: str = "light", tolerances: Mapping[str, float] | None = None
) -> Picture:
    """One plot of a run; what it has none of is refused with the names of those that it has."""
    sight = Sight.of(run)
    known = names_of(sight)
    if name not in known:
        why = f"this run has nothing for the plot {name!r}" if name in PLOTS else f"there is no plot {name!r}"
        raise BadInput(f"{why}; its plots are: {', '.join(known)}")
    return PLOTS[name].of(sight, theme, tolerances)
