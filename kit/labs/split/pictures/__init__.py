"""The pictures and tables of a split run: the calls of a step, and the errors of gradients and metrics against the plain step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.patches import Patch

from kit.draw.axes import SEPARATE, grid_across
from kit.draw.plots import Pictures, Plot, Table
from kit.labs.split import parity
from kit.labs.split.config import KIT_SPLIT, cases_of
from kit.labs.split.parity import chunks_of, every_chunks
from kit.labs.split.pictures import errors
from kit.results import with_ids
from kit.results.units import counted, time_unit

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd
    from matplotlib.axes import Axes

    from kit.draw.plots import RunData, Scene
    from kit.draw.style import Theme
    from kit.labs.split.config import Case

KINDS = {"run": "plain step", "begin": "begin", "microbatch": "microbatch", "finish": "finish"}
HIGH = 0.76  # of the height of a row
BETWEEN = 0.5  # rows between two levels


def ways(config: Mapping[str, Any]) -> list[tuple[float, Case, str]]:
    """The rows from top to bottom: position, case, phase."""
    found: list[tuple[float, Case, str]] = []
    place = 0.0
    for case in cases_of(config):
        if case.first:
            place += BETWEEN if found else 0.0
            found.append((place, case, "sync"))
            place += 1
        found.append((place, case, "split"))
        place += 1
    return found


def calls_height(config: Mapping[str, Any]) -> float:
    return 0.27 * (ways(config)[-1][0] + 2)


def timeline(ax: Axes, data: RunData, config: Mapping[str, Any], theme: Theme) -> None:
    """The calls of the last step, one after the other. A rank waits for others inside a call."""
    rows = calls_of(data)
    ranks = data.ranks if len(data.ranks) <= SEPARATE else data.ranks[:1]
    rows = rows[rows["rank"].isin(ranks)]
    totals = rows.groupby(["cycle", "phase", "rank"])["value"].sum()
    longest = float(totals.max()) if len(totals) else 1.0
    scale, unit = time_unit(longest)
    colours = dict(zip(KINDS, (theme.faint, theme.series[3], theme.series[0], theme.series[2]), strict=True))
    labels = {}
    for place, case, phase in ways(config):
        here = rows[(rows["cycle"] == case.cycle) & (rows["phase"] == phase)]
        labels[place] = f"{case.level}, plain" if phase == "sync" else chunks_of(case.chunks)
        for lane, rank in enumerate(ranks):
            mine = here[here["rank"] == rank]
            ax.barh(
                place + ((lane + 0.5) / len(ranks) - 0.5) * HIGH,
                mine["value"] * scale,
                left=(mine["value"].cumsum() - mine["value"]) * scale,
                height=HIGH / len(ranks) * 0.94,
                color=[colours[kind] for kind in mine["kind"]],
                edgecolor=theme.paper,
                linewidth=0.6,
            )
        if not here.empty:
            took = float(totals[case.cycle, phase].max())
            ax.text((took + 0.015 * longest) * scale, place, f"{took * scale:.3g} {unit}", va="center", fontsize=8.5)
    ax.set_yticks(list(labels), list(labels.values()))
    ax.set_ylim(max(labels) + 0.6, -0.6 - 0.12 * (max(labels) + 1))  # room for the legend
    ax.set_xlim(0, 1.14 * longest * scale)
    grid_across(ax)
    ax.set_xlabel(f"time since the step began [{unit}], one sample")
    lanes = f"rank {ranks[0]}" if len(ranks) == 1 else f"lanes: ranks {ranks[0]} to {ranks[-1]}"
    ax.set_title(f"Step {config['steps']}, call by call ({lanes})")
    marks = [Patch(facecolor=colours[kind], label=word) for kind, word in KINDS.items()]
    ax.legend(handles=marks, ncols=len(marks), loc="upper left", columnspacing=1.1, handlelength=1.2)


def calls_of(data: RunData) -> pd.DataFrame:
    """The records of calls in their order; `kind` is the name of the call."""
    rows = with_ids(data.frame[data.frame["metric"] == "call_seconds"], "call", "order").rename(
        columns={"call": "kind"}
    )
    return rows.sort_values(["cycle", "phase", "rank", "order"])


def ready(data: RunData) -> bool:
    """Whether every number of chunks was compared: the next phase has begun."""
    return "rehearse" in data.phases and "result" in data.metrics()  # not in runs of an older kit


def words(data: RunData) -> list[str]:
    """The job, the loss, the code under test, and the numbers of chunks."""
    config = data.config
    sizes = [f"{name} {config[name]}" for name in ("tp", "pp", "ep") if config[name] > 1]
    own = [] if config["implementation"] == KIT_SPLIT else [config["implementation"]]
    job = " ".join([config["backend"], ", ".join([config["size"], *sizes])])
    return [job, config["recipe"], *own, every_chunks(config), counted(config["steps"], "step")]


def step(scene: Scene) -> None:
    timeline(scene.figure.subplots(), scene.data, scene.data.config, scene.theme)


def gradients(scene: Scene) -> None:
    errors.gradients(scene.figure.subplots(), scene.data.records, scene.data.config, scene.verdict, scene.theme)


def metrics(scene: Scene) -> None:
    """One drawing per level of the loss, side by side."""
    levels = list(dict.fromkeys(case.level for case in cases_of(scene.data.config)))
    table = errors.first_step(scene.data.records, scene.data.config)
    axes = scene.figure.subplot_mosaic([["legend"] * len(levels), levels], height_ratios=(0.1, errors.height(table)))
    errors.metrics_legend(axes["legend"], scene.theme)
    for level in levels:
        errors.metrics(axes[level], table, level, scene.verdict, scene.theme)


def metrics_height(data: RunData) -> float:
    return errors.height(errors.first_step(data.records, data.config)) + 0.9


PICTURES = Pictures(
    plots={
        "metrics": Plot(
            "Metrics against the plain step", ready, lambda data, _: metrics_height(data), metrics, ("metric_parity",)
        ),
        "gradients": Plot(
            "Gradients by number of chunks", ready, lambda *_: 3.6, gradients, ("grad_parity", "later_steps")
        ),
        "calls": Plot("A step, call by call", ready, lambda data, _: max(2.6, calls_height(data.config)) + 0.9, step),
    },
    overview=(("calls", "gradients"), ("metrics",), ("verdict",)),
    words=words,
    ready=ready,
    tables={
        "metrics": Table("Every metric, worst first", lambda run: parity.metrics(run.frame(), run.config), "error"),
        "tensors": Table(
            "Every tensor, worst first", lambda run: parity.tensors(run.frame(), run.config), "gradient_error"
        ),
    },
)
