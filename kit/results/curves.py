"""Measured numbers as points of curves, made while a run goes on: what goes to an experiment tracker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import NamedTuple, Protocol

from kit.results.records import Row


class CurvePoint(NamedTuple):
    """Values by name at one x; `axis` is what x counts."""

    axis: str
    x: int
    values: Mapping[str, float]


class Curves(Protocol):
    """Makes points from rows as they arrive. A name gets each x once, in increasing order."""

    def see(self, rows: Iterable[Row]) -> Iterator[CurvePoint]: ...
    def close(self) -> Iterator[CurvePoint]: ...


class CycleCurves:
    """A point per cycle: the median of each PHASE/METRIC over ranks."""

    def __init__(self) -> None:
        self._cycle = -1
        self._values: defaultdict[str, list[float]] = defaultdict(list)

    def see(self, rows: Iterable[Row]) -> Iterator[CurvePoint]:
        for row in rows:
            if row.value is None or row.metric.endswith("_before") or row.cycle < self._cycle:
                continue  # rows about the whole run come last and have cycle 0
            if row.cycle > self._cycle:
                yield from self.close()
                self._cycle = row.cycle
            self._values[f"{row.phase}/{row.metric}"].append(row.value)

    def close(self) -> Iterator[CurvePoint]:
        if self._values:
            yield CurvePoint("cycle", self._cycle, {name: median(values) for name, values in self._values.items()})
        self._values.clear()
