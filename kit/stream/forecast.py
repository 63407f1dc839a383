"""Forecasts: the durations of a run, from its ledger, fed to the simulated system with another sampler or window.

A length that the run did not generate is drawn from those that it did. Limits: durations are medians (the trainer's per group), a replica's
requests share its time, and what a replica does between two calls takes no time.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from kit.errors import BadInput
from kit.loop.ledger import read
from kit.loop.messages import numbers
from kit.results.records import PATTERN
from kit.stream.meter import Meter
from kit.stream.settings import read_settings, refusals
from kit.stream.simulated import Durations, simulate

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from kit.loop.ledger import Row
    from kit.stream.simulated import Simulation


def rows_of(folder: Path, phase: str | None) -> list[Row]:
    """The ledger of a loop in a run's folder."""
    return [row for path in sorted(folder.glob(PATTERN)) for row in read(path, phase)[0]]


def forecast(rows: Iterable[Row], **changes: Any) -> Simulation:
    """Simulate the run of a ledger with some settings changed, such as `sampler` and `window`. Places grow to what the sampler needs."""
    known = list(rows)
    settings = read_settings(next((row.ids for row in known if row.name == "capacity"), {}))
    changed = replace(settings, **changes)
    if changes and "places" not in changes:
        places = max(changed.places, changed.groups * (changed.window + 1))
        slots = places if settings.slots == settings.places else changed.slots
        changed = replace(changed, places=places, slots=slots)
    if found := refusals(changed):
        raise BadInput("; ".join(found))
    return simulate(changed, measured(known))


def pace(rows: Iterable[Row]) -> dict[str, float]:
    """What a loop reached: steps per second, and the seconds in which it only waited for samples."""
    meter, steps = Meter(), 0
    for row in rows:
        meter.see(row)
        steps += row.name == "bumped"
    seconds = meter.take()
    return {
        "steps_per_second": steps / seconds["total"] if seconds["total"] else 0.0,
        "exposed_generation": seconds["exposed_generation"],
    }


def measured(rows: Iterable[Row]) -> Durations:
    """The durations that a ledger tells. A run without a completed sample or a finished update tells too little."""
    known = list(rows)
    lengths = {_sample(row): int(row.ids["length"]) for row in known if row.name == "completed" and "core" in row.ids}
    rewards = {_sample(row): str(row.ids["reward"]) for row in known if row.name == "completed" and "core" in row.ids}
    spent = _trainer(known)
    if not lengths or not spent["finish"]:
        raise BadInput(
            "the ledger has no completed sample or no finished update; a forecast needs the durations of one step"
        )
    token_s, span = _decoding(known)
    drawn = sorted(lengths.values())

    def length(group: int, sample: int) -> int:
        return lengths.get((group, sample)) or random.Random(f"{group} {sample}").choice(drawn)  # noqa: S311

    def typical(name: str) -> float:
        return median(spent[name]) if spent[name] else 0.0

    return Durations(
        token_s=token_s,
        span=span,
        begin_s=typical("begin"),
        train_s=typical("microbatch"),
        logprobs_s=typical("logprobs"),
        finish_s=typical("finish"),
        clear_s=typical("clear"),
        sync_s=_sync(known),
        length=length,
        reward=lambda group, sample: rewards.get((group, sample), str(sample % 2)),
    )


def _sample(row: Row) -> tuple[int, int]:
    return int(row.ids["group"]), int(row.ids["sample"])


def _trainer(rows: list[Row]) -> defaultdict[str, list[float]]:
    """Seconds of each of the trainer's commands, per group where it has groups. It answers in order: one starts when the last has ended."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    sent: dict[tuple[Any, ...], float] = {}
    free = float("-inf")
    for row in rows:
        about = row.ids.get("step"), row.ids.get("update"), row.ids.get("groups"), row.ids.get("which")
        if row.ids.get("to") == "trainer":
            sent[row.name, about] = row.time
        elif row.name == "done" and (row.ids["of"], about) in sent:
            began = max(sent.pop((row.ids["of"], about)), free)
            free = row.time
            groups = len(numbers(str(row.ids.get("groups", "")))) if row.ids["of"] in ("microbatch", "logprobs") else 1
            found[str(row.ids["of"])].append((row.time - began) / max(1, groups))
    return found


def _decoding(rows: list[Row]) -> tuple[float, int]:
    """Seconds a token while a replica is busy, whatever the number of its requests, and tokens a call."""
    last: dict[Any, float] = {}
    busy: defaultdict[Any, float] = defaultdict(float)
    tokens: defaultdict[Any, int] = defaultdict(int)
    load: defaultdict[Any, int] = defaultdict(int)
    spans = [1]
    where: dict[tuple[int, int], Any] = {}
    for row in rows:
        replica = row.ids.get("replica")
        if row.name == "sent":
            where[_sample(row)] = replica
            if not load[replica]:  # it was idle until now
                last[replica] = row.time
            load[replica] += 1
        elif row.name == "published":
            last[replica] = row.time  # the time of a sync is no decoding
        elif row.name == "tokens":
            busy[replica] += row.time - last.get(replica, row.time)
            last[replica] = row.time
            tokens[replica] += int(row.ids["count"])
            spans.append(int(row.ids["count"]))
        elif row.name in ("completed", "cancelled", "failed") and "sample" in row.ids:
            load[where.pop(_sample(row), None)] -= 1
    return sum(busy.values()) / max(1, sum(tokens.values())), max(spans)


def _sync(rows: list[Row]) -> float:
    """Seconds from the start of a sync to its end."""
    began: dict[Any, float] = {}
    found = []
    for row in rows:
        if row.name == "sync_begin":
            began[row.ids["version"]] = row.time
        elif row.name == "synced" and row.ids["version"] in began:
            found.append(row.time - began.pop(row.ids["version"]))
    return median(found) if found else 0.0
