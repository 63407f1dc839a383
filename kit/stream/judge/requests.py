"""The rules of requests: each attempt at a sample has its own number, and requests are spread over the replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kit.results.records import Id, Row
from kit.results.rules import NotMeasured, Violations
from kit.results.units import counted
from kit.stream.judge.history import ANSWERS, LoopLedger

ENOUGH = 40  # requests that had a choice; fewer may all have gone to busy replicas by chance
CROWDED = 0.9  # 0: each to the least busy replica, about 0.5: at random, 1: each to the busiest one


def attempts_distinct(ledger: LoopLedger) -> Violations:
    """Does each request of a sample have its own attempt number, so that a late answer is not taken for the current one's?"""
    sent = ledger.need("sent", "group", "sample", "attempt")
    before: dict[tuple[Id, Id, Id], Row] = {}
    for row in sent:
        if (first := before.setdefault((row["group"], row["sample"], row["attempt"]), row)) is not row:
            yield f"{row}: attempt {row['attempt']} of this sample was already sent in row {first.at}"
    again = len(sent) - len({(row["group"], row["sample"]) for row in sent})
    return f"{counted(len(sent), 'request')}, {again} of them repeated"


def requests_spread(ledger: LoopLedger) -> Violations:
    """Do requests go to replicas with few requests in flight, and not to the busiest one?"""
    ledger.need("sent", "group", "sample", "replica")
    crowding = [share for _, share in _choices(ledger)]
    if len(crowding) < ENOUGH:
        raise NotMeasured(
            f"{counted(len(crowding), 'request')} had a choice of replicas with different load; {ENOUGH} are needed"
        )
    mean = sum(crowding) / len(crowding)
    if mean > CROWDED:
        last = [row for row, share in _choices(ledger) if share == 1][-1]
        yield (
            f"{last}: as most requests, it went to the replica with the most requests in flight (mean place between the least busy, 0, "
            f"and the busiest replica, 1: {mean:.2f} over {counted(len(crowding), 'request')} with a choice)"
        )
    return f"mean place between the least busy replica (0) and the busiest (1): {mean:.2f} over {counted(len(crowding), 'request')}"


def _choices(ledger: LoopLedger) -> Iterator[tuple[Row, float]]:
    """The requests for which replicas with different load could serve, and the place of the chosen one between the least busy and the
    busiest. A request that joins others of its group, for the sake of their prompt's cache, had no choice."""
    where: dict[tuple[Id, Id], Id] = {}
    serves: dict[Id, int] = {}
    states = bool(ledger.by_event["published"])
    for row in ledger.rows:
        replica, key = row.get("replica"), (row.get("group"), row.get("sample"))
        # One that joins lacks the weights until they are published.
        if replica is not None and row.event == ("published" if states else "joined"):
            version = row.number("version") if states else ledger.start
            serves[replica] = max(version, serves.get(replica, version))
        elif replica is not None and row.event in ("left", "died"):
            serves.pop(replica, None)
            where = {request: place for request, place in where.items() if place != replica}
        elif row.event == "sent" and replica is not None:
            current = ledger.version_at(row)
            load = Counter(where.values())
            loads = [load[name] for name, version in serves.items() if version == current or not states]
            joins = any(place == replica and group == row["group"] for (group, _), place in where.items())
            if not joins and len(loads) > 1 and max(loads) > min(loads) and replica in serves:
                yield row, min(1.0, (load[replica] - min(loads)) / (max(loads) - min(loads)))
            where[row["group"], row["sample"]] = replica
        elif row.event in ANSWERS and key in where and where[key] == row.get("replica", where[key]):
            del where[key]
