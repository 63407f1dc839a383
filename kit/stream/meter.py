"""Where the time of each optimizer step went, from the rows of a ledger as they come, and how far the policy moved. The parts add up.

At any time the loop does one thing: what the trainer was asked first and has not answered (training or log-probabilities), else a sync,
else it waits for generation, which is what `exposed_generation` counts. `replicas_idle` is the replicas' mean time without a request.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from kit.loop.messages import Command, Event, Id, Ledger, Row
from kit.loop.runner import Port

PARTS = ("training", "logprobs", "sync", "exposed_generation")
TRAINER = {"begin": "training", "microbatch": "training", "finish": "training", "logprobs": "logprobs"}


class Meter:
    """`see` each row, then `take` the seconds since the last `take`."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._trainer: list[str] = []  # its commands without an answer, in order
        self._syncing = False
        self._loads: dict[int, int] = {}
        self._where: dict[tuple[Id, Id], int] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def see(self, row: Row) -> None:
        self._pass(row.time)
        name, ids = row.name, row.ids
        is_event = "core" in ids
        if ids.get("to") == "trainer" and name in TRAINER:
            self._trainer.append(name)
        elif name == "sync_begin":
            self._syncing = True
        elif is_event and (name == "synced" or ids.get("of") == "sync"):
            self._syncing = False
        elif is_event and name in ("done", "error") and ids.get("of") in self._trainer:
            self._trainer.remove(str(ids["of"]))
        elif name == "joined":
            self._loads.setdefault(int(ids["replica"]), 0)
        elif name in ("died", "left"):
            self._loads.pop(int(ids["replica"]), None)
        elif name == "sent":
            self._where[ids["group"], ids["sample"]] = int(ids["replica"])
            self._add(int(ids["replica"]), 1)
        elif name in ("completed", "failed", "cancelled") and "sample" in ids:
            self._add(self._where.pop((ids["group"], ids["sample"]), None), -1)

    def take(self) -> dict[str, float]:
        seconds = {name: self._seconds[name] for name in (*PARTS, "replicas_idle")}
        self._seconds.clear()
        return {"total": sum(seconds[name] for name in PARTS), **seconds}

    def _add(self, replica: int | None, change: int) -> None:
        if replica in self._loads:
            self._loads[replica] += change

    def _pass(self, now: float) -> None:
        passed = 0.0 if self._last is None else now - self._last
        self._last = now
        doing = TRAINER[self._trainer[0]] if self._trainer else "sync" if self._syncing else "exposed_generation"
        self._seconds[doing] += passed
        if self._loads:
            self._seconds["replicas_idle"] += passed * list(self._loads.values()).count(0) / len(self._loads)


def spent(rows: Iterable[Row]) -> dict[str, float]:
    """The seconds of a whole ledger."""
    meter = Meter()
    for row in rows:
        meter.see(row)
    return meter.take()


def syncs(rows: Iterable[Row]) -> Iterator[tuple[float, float]]:
    """Start and end of each sync that ended."""
    began: dict[Id, float] = {}
    for row in rows:
        if row.name == "sync_begin":
            began[row.ids["version"]] = row.time
        elif row.name == "synced" and row.ids["version"] in began:
            yield began.pop(row.ids["version"]), row.time


class Watcher(Protocol):
    def see(self, row: Row) -> None: ...


class Watched:
    """A ledger that others look at, row by row."""

    def __init__(self, ledger: Ledger, *watchers: Watcher) -> None:
        self.ledger = ledger
        self.watchers = watchers

    def write(self, row: Row) -> None:
        self.ledger.write(row)
        for watcher in self.watchers:
            watcher.see(row)

    def flush(self) -> None:
        self.ledger.flush()


class Log(Port):
    """The port "log": a step's counts and times go to a logger with prefixes, under the version after the step, and into the ledger."""

    def __init__(self, meter: Meter, logger: Callable[[dict[str, float], int], object]) -> None:
        self.meter = meter
        self.logger = logger

    def send(self, command: Command) -> Iterable[Event]:
        seconds = self.meter.take()
        counts = {name: float(value) for name, value in command.ids if name not in ("step", "version")}
        values = {f"train/{name}": value for name, value in counts.items()}
        values |= {f"timing/{name}": value for name, value in seconds.items()}
        ids: dict[str, Id] = {name: command[name] for name in ("step", "version", "update")}
        ids |= {f"s_{name}": repr(value) for name, value in seconds.items()}
        try:
            self.logger(values, command.version)
        except Exception as error:  # noqa: BLE001 - a logger never ends training
            return [Event("logger_failed", command.pipeline, **ids, why=f"{type(error).__name__}: {error}")]
        return [Event("logged", command.pipeline, **ids)]


def drifted(differences: Sequence[float]) -> dict[str, float]:
    """Of tokens with these differences, the trainer's log-probability minus the engine's.

    `drift_ratio` is the mean importance weight, `drift_kl` the estimate of KL(engine, trainer) that is never below 0.
    """
    count = len(differences)
    ratios = [math.exp(min(one, 700.0)) for one in differences]
    return {
        "drift_mean": math.fsum(differences) / count,
        "drift_mismatch": math.fsum(map(abs, differences)) / count,
        "drift_ratio": math.fsum(ratios) / count,
        "drift_kl": math.fsum(ratio - 1 - one for ratio, one in zip(ratios, differences, strict=True)) / count,
    }
