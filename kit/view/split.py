"""The picture of a split run: a step as its calls, how far gradients and metrics are from the plain step's, the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kit.labs.split.config import KIT_SPLIT, cases_of
from kit.results import Verdict
from kit.view import calls, drawings, parity
from kit.view.drawings import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kit.results import Run
    from kit.view.steps import Steps
    from kit.view.style import Theme


def tells(seen: Steps) -> bool:
    """Whether every cut was compared: the phase after the comparisons has begun."""
    return "rehearse" in seen.phases


def words(run: Run, seen: Steps) -> list[str]:  # noqa: ARG001 - every lab's picture is asked alike
    """The job, the loss, the code under test, and how the step was cut."""
    config = run.config
    sizes = [f"{name} {config[name]}" for name in ("tp", "pp", "ep") if config[name] > 1]
    own = [] if config["implementation"] == KIT_SPLIT else [config["implementation"]]
    job = " ".join([config["backend"], ", ".join([config["size"], *sizes])])
    cuts = ", ".join(str(count or "all") for count in config["chunks"])
    return [job, config["recipe"], *own, f"cut in {cuts}", counted(config["steps"], "step")]


def draw(picture: Figure, run: Run, seen: Steps, verdict: Verdict, look: Theme) -> None:
    frame = run.frame()  # with the infinities that other pictures have no place for
    levels = list(dict.fromkeys(case.level for case in cases_of(run.config)))
    table = parity.first_step(frame, run.config)
    lines = grouped(verdict)
    heights = [max(2.6, calls.height(run.config)), 0.3 + parity.height(table), 0.2 * drawings.verdict_height(lines)]
    heights = [height + room for height, room in zip(heights, (0.9, 0.8, 0.1), strict=True)]
    picture.set_size_inches(11, sum(heights) + 0.3)
    # Each has the whole width: long names on the left of one must not push the others in.
    parts: Any = picture.subfigures(3, 1, height_ratios=heights)
    above, middle, below = parts
    left, right = above.subplots(1, 2, width_ratios=(6, 5))
    calls.timeline(left, seen, run.config, look)
    parity.gradients(right, frame, run.config, verdict, look)
    names: list[Any] = [["legend"] * len(levels), levels]
    axes = middle.subplot_mosaic(names, height_ratios=(0.1, parity.height(table)))
    parity.metrics_legend(axes["legend"], look)
    for level in levels:
        parity.metrics(axes[level], table, level, verdict, look)
    drawings.verdict_summary(below.subplots(), lines, look)


def grouped(verdict: Verdict) -> Verdict:
    """One line for each check: rows that say what it is about in detail are left out."""
    return Verdict(row for row in verdict if "/" not in row.check)
