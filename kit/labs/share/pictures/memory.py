"""Resident bytes of the ranks on each device over time, against the device's budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kit.draw.plots import draw_limit, legend_of, limit_of, marks_of
from kit.labs.share import tables
from kit.labs.share.pictures.lanes import Loop, loop_of, owner_marks, some, time_axis
from kit.results import NotMeasured
from kit.results.units import size_unit

if TYPE_CHECKING:
    import pandas as pd

    from kit.draw.plots import RunData, Scene

DEVICES = 4  # as many are drawn, the first ones
HIGH = 1.15  # inches of one
LEGEND = 0.22
MIB = 2**20
HEADS = 0.75


def has(data: RunData) -> bool:
    phase = tables.shown(data.records)
    try:
        return phase is not None and len(tables.memory(data.records, phase)) > 0
    except NotMeasured:
        return False


def shown(loop: Loop) -> range:
    return range(min(loop.book.limit("devices", 0), DEVICES))


def memory(scene: Scene) -> None:
    """A device each: what each pipeline has there above the least of each rank, which is its process without a model."""
    loop, theme = loop_of(scene.data), scene.theme
    table = tables.memory(scene.data.records, loop.phase)
    number = loop.book.limit("devices", 0)
    legend, *axes = scene.figure.subplots(len(shown(loop)) + 1, 1, height_ratios=(LEGEND, *[HIGH] * len(shown(loop))))
    legend_of(legend, marks_of(owner_marks(loop, theme)), columnspacing=1.1, handlelength=1.4)
    parts = {device: levels(table[table["device"] == device], loop) for device in shown(loop)}
    most = max((float(np.sum(part.stacks, axis=0).max()) for part in parts.values() if part.at), default=1.0)
    more = (limit_of(scene.verdict, "peak_fits") or 0.0) * MIB
    most = max(most, *(part.budget + more for part in parts.values()))
    scale, unit = size_unit(most)
    for (device, part), ax in zip(parts.items(), axes, strict=True):
        ax.stackplot(
            [loop.at(when) for when in part.at], *[stack * scale for stack in part.stacks], step="post", linewidth=0,
            colors=[theme.colour(place) for place in range(len(loop.names))], alpha=0.85, zorder=2,
        )  # fmt: skip
        limit = (part.budget + more) * scale
        draw_limit(ax, limit, f"budget {limit:.4g} {unit}: the most of one rank, and noise", theme)
        ax.set_ylim(0, 1.35 * most * scale)
        ax.set_ylabel(f"[{unit}]")
        many = some([str(one) for one in range(number)], DEVICES, "devices") if device == 0 else ""
        ax.set_title(
            f"Device {device}: resident bytes of its ranks above their least ({part.least * scale:.4g} {unit}){many}"
        )
        time_axis(ax, loop, last=device == shown(loop)[-1])


class Levels(NamedTuple):
    """Times, the bytes of each pipeline at them above the least of each of its ranks, these least bytes together, and the budget: the most
    that one rank has."""

    at: list[float]
    stacks: list[Any]
    least: float
    budget: float


def levels(table: pd.DataFrame, loop: Loop) -> Levels:
    least = table.groupby("who")["bytes"].min()
    budget = float((table.groupby("who")["bytes"].max() - least).max()) if len(table) else 0.0
    last: dict[str, dict[str, float]] = {name: {} for name in loop.names}
    at: list[float] = []
    sums: list[list[float]] = []
    for row in table.to_dict("records"):
        last[row["pipeline"]][row["who"]] = row["bytes"] - float(least[row["who"]])
        at.append(row["time"])
        sums.append([sum(mine.values()) for mine in last.values()])
    if at:
        at.append(max(loop.ended, at[-1]))
        sums.append(sums[-1])
    return Levels(at, list(np.array(sums).T) if sums else [np.zeros(0) for _ in loop.names], float(least.sum()), budget)


def height(data: RunData) -> float:
    return LEGEND + HIGH * len(shown(loop_of(data))) + HEADS
