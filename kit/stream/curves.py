"""The training curves of each loop of a run: a point per optimizer update, from the loop's ledger and the trainer's rows.

A point waits for the metrics of the next update, because its groups are cleared after its own, and for the trainer's results, which
arrive within a second. A loop without results, such as a simulated one, gives its points when it closes.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean

from kit.results.curves import CurvePoint
from kit.results.records import Row
from kit.stream.judge.history import ends_group

UpdateKey = tuple[int, int]  # the numbers of a step and of an update in it
SECONDS = "s_"  # begins the name of a logged time
PLACES = {"step", "update", "version", "pipeline", "core", "to"}  # ids of a row of the log that are no counts


class LoopCurves:
    """The updates of a phase's loops, one after the other. x is the number of updates so far, in all of them."""

    def __init__(self, phase: str) -> None:
        self._phase = phase
        self._before = 0  # updates of the loops before this one
        self._opening = False
        self._begin()

    def _begin(self) -> None:
        self._ended: list[UpdateKey] = []
        self._given = 0  # of those that ended
        self._values: defaultdict[UpdateKey, dict[str, float]] = defaultdict(dict)
        self._answered: set[UpdateKey] = set()  # the trainer has recorded their results
        self._samples: defaultdict[object, list[Row]] = defaultdict(list)  # complete ones by group
        self._trained: defaultdict[UpdateKey, list[Row]] = defaultdict(list)
        self._clearing: dict[UpdateKey, float] = {}  # since when

    def see(self, row: Row) -> Iterator[CurvePoint]:
        if row.value is None:
            if self._opening and row.event != "resumed":  # a loop that another one continues numbers its updates on
                yield from self.close()
                self._before += self._given
                self._begin()
            self._opening = row.event == "capacity"
        key = (row.number("step"), row.number("update")) if {"step", "update"} <= row.ids.keys() else None
        if row.value is not None:
            if key and len(row.ids) == len(key):
                self._answered.add(key)
                seconds = row.metric.endswith("_seconds")
                name = f"timing/{row.metric.removesuffix('_seconds')}" if seconds else f"train/{row.metric}"
                self._values[key][name] = row.value
        elif row.event == "completed":
            self._samples[row["group"]].append(row)
        elif row.event == "trained" and key:
            self._trained[key] += self._samples.pop(row["group"], [])
        elif ends_group(row):
            self._samples.pop(row["group"], None)
        elif row.event == "metrics" and key:
            self._values[key] |= numbers_in(row, {name: f"counts/{name}" for name in row.ids.keys() - PLACES})
            self._values[key] |= rollout_values(self._trained.pop(key, []))
            self._ended.append(key)
            yield from self._ready(self._ended[self._given : -1])
        elif row.event in ("logged", "logger_failed") and key and key in self._values:
            times = (name for name in row.ids if name.startswith(SECONDS))
            self._values[key] |= numbers_in(row, {name: f"timing/{name.removeprefix(SECONDS)}" for name in times})
        elif row.event == "clear" and key:
            self._clearing[key] = row.time
        elif row.get("of") == "clear" and key in self._clearing:
            self._values[key]["timing/clear"] = row.time - self._clearing.pop(key)

    def close(self) -> Iterator[CurvePoint]:
        yield from map(self._point, self._ended[self._given :])

    def _ready(self, keys: Iterable[UpdateKey]) -> Iterator[CurvePoint]:
        for key in keys:
            if key not in self._answered:
                break
            yield self._point(key)

    def _point(self, key: UpdateKey) -> CurvePoint:
        self._given += 1
        self._answered.discard(key)
        values = self._values.pop(key, {})  # wrong code may end an update twice
        if (total := values.get("timing/total")) and "rollout/tokens" in values:
            values["timing/tokens_per_second"] = values["rollout/tokens"] / total
        return CurvePoint(
            "update", self._before + self._given, {f"{self._phase}/{name}": value for name, value in values.items()}
        )


def rollout_values(samples: Sequence[Row]) -> dict[str, float]:
    """What the complete samples of an update tell."""
    rewards, lengths = (
        [number for sample in samples for number in numbers_in(sample, {name: name}).values()]
        for name in ("reward", "length")
    )
    values = {"rollout/samples": float(len(samples))}
    if lengths:
        values |= {"rollout/tokens": sum(lengths), "rollout/length": fmean(lengths)}
    if rewards:
        ends = {"rollout/reward_min": min(rewards), "rollout/reward_max": max(rewards)}
        values |= {"rollout/reward": fmean(rewards), **ends}
    return values


def numbers_in(row: Row, names: Mapping[str, str]) -> dict[str, float]:
    """The ids of a row that are numbers, under other names. Ledgers of other systems and of own code may lack some."""
    given = {}
    for name, new in names.items():
        with contextlib.suppress(ValueError):
            given[new] = float(str(row.get(name, "")))
    return given


class UpdateCurves:
    """The curves of every loop of a run."""

    def __init__(self) -> None:
        self._loops: dict[str, LoopCurves] = {}

    def see(self, rows: Iterable[Row]) -> Iterator[CurvePoint]:
        for row in rows:
            if row.phase not in self._loops:
                self._loops[row.phase] = LoopCurves(row.phase)
            yield from self._loops[row.phase].see(row)

    def close(self) -> Iterator[CurvePoint]:
        for loop in self._loops.values():
            yield from loop.close()
