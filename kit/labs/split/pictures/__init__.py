"""The pictures and tables of a split run: the calls of a step, and the errors of gradients and metrics against the plain step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kit.draw.axes import SEPARATE, grid_across, marks_of
from kit.draw.plots import Pictures, Plot, Table
from kit.labs.split import parity
from kit.labs.split.config import KIT_SPLIT, cases_of
from kit.labs.split.parity import chunks_of, every_chunks
from kit.labs.split.pictures import errors
from kit.results import with_ids
from kit.results.units import counted, time_unit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kit.draw.plots import RunData, Scene
    from kit.labs.split.config import Case

CALLS = {"run": "plain step", "begin": "begin", "microbatch": "microbatch", "finish": "finish"}
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


def calls(scene: Scene) -> None:
    """The calls of the last step, one after the other. A rank waits for others inside a call."""
    ax, data, theme = scene.figure.subplots(), scene.data, scene.theme
    rows = with_ids(data.frame[data.frame["metric"] == "call_seconds"], "call", "order")
    rows = rows.sort_values(["cycle", "phase", "rank", "order"])
    ranks = data.ranks if len(data.ranks) <= SEPARATE else data.ranks[:1]
    rows = rows[rows["rank"].isin(ranks)]
    totals = rows.groupby(["cycle", "phase", "rank"])["value"].sum()
    longest = float(totals.max()) if len(totals) else 1.0
    scale, unit = time_unit(longest)
    colours = dict(zip(CALLS, (theme.faint, theme.series[3], theme.series[0], theme.series[2]), strict=True))
    labels = {}
    for place, case, phase in ways(data.config):
        here = rows[(rows["cycle"] == case.cycle) & (rows["phase"] == phase)]
        labels[place] = f"{case.level}, plain" if phase == "sync" else chunks_of(case.chunks)
        for lane, rank in enumerate(ranks):
            mine = here[here["rank"] == rank]
            ax.barh(
                place + ((lane + 0.5) / len(ranks) - 0.5) * HIGH,
                mine["value"] * scale,
                left=(mine["value"].cumsum() - mine["value"]) * scale,
                height=HIGH / len(ranks) * 0.94,
                color=[colours[call] for call in mine["call"]],
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
    ax.set_title(f"Step {data.config['steps']}, call by call ({lanes})")
    marks = marks_of({word: {"facecolor": colours[call]} for call, word in CALLS.items()})
    ax.legend(handles=marks, ncols=len(marks), loc="upper left", columnspacing=1.1, handlelength=1.2)


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


PICTURES = Pictures(
    plots={
        "metrics": Plot(
            "Metrics against the plain step",
            ready,
            lambda data, _: errors.height(errors.first_step(data)) + 0.9,
            errors.metrics,
            ("metric_parity",),
        ),
        "gradients": Plot(
            "Gradients by number of chunks", ready, lambda *_: 3.6, errors.gradients, ("grad_parity", "later_steps")
        ),
        "calls": Plot(
            "A step, call by call",
            ready,
            lambda data, _: max(2.6, 0.27 * (ways(data.config)[-1][0] + 2)) + 0.9,
            calls,
        ),
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
