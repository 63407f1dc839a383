"""The charts of parcel_lab.py, which only the notebook side imports."""

from functools import partial
from typing import Any

from kit.draw.album import Charts
from kit.draw.chart import Limit
from kit.draw.lines import Lines


def by_cycle(data: Any, *, metric: str) -> Any:
    rows = data.of(metric).sort_values(["rank", "cycle"]).rename(columns={"cycle": "x"})
    return rows.assign(kind="rank " + rows["rank"].astype(str))[["x", "value", "kind"]]


def chart(title: str, metric: str, rule: str) -> Lines:
    rows, limits = partial(by_cycle, metric=metric), (Limit(rule),)
    return Lines(rows=rows, title=title, label=title, about="cycle", limits=limits, zero=True)


WRONG = chart("wrong numbers", "wrong_numbers", "parcels_are_whole")
LEFT = chart("parcels left", "parcels_left", "shelf_is_empty")
CHARTS = Charts(plots={"wrong": WRONG, "left": LEFT}, overview=(("wrong", "left"), ("times",), ("verdict",)))
