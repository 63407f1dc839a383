"""The picture of an offload run: memory through the phases, times, drift over cycles, counts, verdict.

Controls and checks of content are most of such a run's steps and none of its story: they are summed up in one line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kit.view import cycles, drawings
from kit.view.bands import card_bands
from kit.view.waterfall import waterfall

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kit.results import Run, Verdict
    from kit.view.steps import Steps
    from kit.view.style import Theme


OURS = "kit.labs."


def tells(seen: Steps) -> bool:
    """Whether the run came far enough for this picture: something was released and looked at."""
    return {"release", "idle"} <= set(seen.phases)


def words(run: Run, seen: Steps) -> list[str]:
    """The job, what was done with it, and how often."""
    config = run.config
    sizes = [f"{name} {config[name]}" for name in ("tp", "pp", "ep") if config.get(name, 1) > 1]
    own = str(config.get("implementation", OURS))
    how = f"mode {config.get('mode')}" if own.startswith(OURS) else own
    number = sum(phase == "release" for _, phase in seen.order)
    return [", ".join([str(config.get("size", "")), *sizes]), how, f"{number} cycle{'s' * (number != 1)}"]


def draw(picture: Figure, run: Run, seen: Steps, verdict: Verdict, look: Theme) -> None:  # noqa: ARG001 - as any picture's
    counts = [name for name in cycles.COUNTS if name in seen.metrics()]
    memory = ["host"] * ("anon_rss" in seen.metrics()) + ["device"] * ("driver_used" in seen.metrics())
    rows: list[tuple[list[str], float]] = [([name] * 12, 3.0) for name in memory]
    rows += [(["time"] * 7 + ["drift"] * 5, 2.6)]
    rows += [(["states"] * 12, 0.1)] if counts else []
    rows += [([name for name in counts for _ in range(12 // len(counts))], 1.7)] if counts else []
    rows += [(["verdict"] * 12, 0.2 * drawings.verdict_height(verdict))] if verdict else []
    picture.set_size_inches(11, sum(height for _, height in rows) + 0.5 * len(rows))
    names: list[Any] = [row for row, _ in rows]
    axes = picture.subplot_mosaic(names, height_ratios=[height for _, height in rows])
    for name in memory:
        (waterfall if name == "host" else card_bands)(axes[name], seen, look)
    cycles.times(axes["time"], seen, look)
    cycles.drift(axes["drift"], seen, verdict, look)
    for name in counts:
        cycles.census(axes[name], seen, name, look, allowed=drawings.allowed(verdict, name))
    if counts:
        cycles.census_legend(axes["states"], look)
    if verdict:
        drawings.verdict_summary(axes["verdict"], verdict, look)
