"""The pictures and tables of a split run: the calls of a step, and the errors of gradients and metrics against the plain step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.draw.plots import Pictures, Plot, Table
from kit.labs.split import parity
from kit.labs.split.config import KIT_SPLIT, cases_of
from kit.labs.split.pictures import calls, errors
from kit.labs.split.words import every_chunks
from kit.results.units import counted

if TYPE_CHECKING:
    from kit.draw.plots import RunData, Scene


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
    calls.timeline(scene.figure.subplots(), scene.data, scene.data.config, scene.theme)


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
        "calls": Plot("A step, call by call", ready, lambda data, _: max(2.6, calls.height(data.config)) + 0.9, step),
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
