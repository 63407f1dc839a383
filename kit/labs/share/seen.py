"""What ranks recorded of themselves, and what observers saw of them from outside, as intervals and levels in time."""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kit.results.frames import with_ids

if TYPE_CHECKING:
    import pandas as pd

OWNERS = re.compile(r"\w+\.(?:trainer|replica \d+)|pid \d+")


class Held(NamedTuple):
    """A device in the hands of an owner such as "a.replica 0"; `until` is infinite if nothing says that it was given back."""

    device: int
    owner: str
    since: float
    until: float


def leases(frame: pd.DataFrame, phase: str) -> tuple[list[Held], list[str]]:
    """What ranks say they held, and a sentence for each time that one took a device that another held."""
    rows = with_ids(frame[(frame["phase"] == phase) & (frame["metric"] == "lease")], "device", "event")
    open_: dict[int, tuple[str, float]] = {}
    found, wrong = list[Held](), list[str]()
    for row in rows.sort_values("time", kind="stable").to_dict("records"):
        device, owner, when = int(row["device"]), str(row["text"]), float(row["time"])
        if row["event"] == "taken":
            if device in open_:
                wrong.append(f"{owner} took device {device} while {open_[device][0]} held it, by their own leases")
            open_[device] = owner, when
        elif device in open_ and open_[device][0] == owner:
            found.append(Held(device, owner, open_.pop(device)[1], when))
    found += [Held(device, owner, since, float("inf")) for device, (owner, since) in open_.items()]
    return found, wrong


class Sight(NamedTuple):
    """From a time on a device has these owners, seen by an observer."""

    time: float
    owners: tuple[str, ...]


def sights(frame: pd.DataFrame, phase: str) -> dict[int, list[Sight]]:
    """By device, in order."""
    rows = with_ids(frame[(frame["phase"] == phase) & (frame["metric"] == "seen_owner")], "device")
    found: defaultdict[int, list[Sight]] = defaultdict(list)
    for row in rows.sort_values("time", kind="stable").to_dict("records"):
        found[int(row["device"])].append(Sight(float(row["time"]), tuple(OWNERS.findall(str(row["text"])))))
    return dict(found)


def was_seen(held: Held, seen: list[Sight]) -> bool:
    """Whether an observer saw this owner at any time while it held the device, by its own word."""
    return any(
        held.owner in one.owners and one.time <= held.until and after > held.since
        for one, after in zip(seen, [*(later.time for later in seen[1:]), float("inf")], strict=True)
    )


@dataclass(slots=True)
class Levels:
    """The resident bytes of a rank over time: each holds until the next."""

    times: list[float] = field(default_factory=list)
    bytes: list[float] = field(default_factory=list)

    def at(self, when: float) -> float:
        """The level at a time; the first one before it."""
        return self.bytes[max(0, bisect.bisect_right(self.times, when) - 1)]

    def between(self, since: float, until: float) -> list[float]:
        """All levels in an interval, that at its begin included."""
        inside = self.bytes[bisect.bisect_right(self.times, since) : bisect.bisect_left(self.times, until)]
        return [self.at(since), *inside]


def residents(frame: pd.DataFrame, phase: str) -> dict[str, Levels]:
    """By the rank's name, as observers saw it."""
    rows = with_ids(frame[(frame["phase"] == phase) & (frame["metric"] == "seen_resident")], "who")
    found: defaultdict[str, Levels] = defaultdict(Levels)
    for row in rows.sort_values("time", kind="stable").to_dict("records"):
        found[str(row["who"])].times.append(float(row["time"]))
        found[str(row["who"])].bytes.append(float(row["value"]))
    return dict(found)


def role_of(rank: str) -> str:
    """The owner that a rank is of: "a.trainer" for "a.trainer#1", the second of its ranks."""
    return rank.partition("#")[0]


def devices_of(config: Any, owner: str) -> tuple[int, ...]:
    """The devices of an owner such as "a.replica 0", or of one of its ranks such as "a.replica 0#1", by a run's config."""
    name, _, place = owner.partition("#")
    pipeline, _, role = name.partition(".")
    mapping = config.mapping(pipeline)
    devices = tuple(mapping.train if role == "trainer" else mapping.bundle(int(role.rpartition(" ")[2])))
    return devices[int(place) : int(place) + 1] if place else devices
