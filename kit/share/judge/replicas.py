"""The rules of requests, replicas and versions across sleep and wake: the pipelines' rows beside the desk's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from kit.results.ledger import by_cores
from kit.results.records import Row, numbers
from kit.results.rules import NotMeasured, Violations
from kit.results.units import counted
from kit.share.judge.books import DeskLedger, Request, cluster_of, need, replica_of
from kit.share.judge.ends import ended_by_others
from kit.share.judge.stuck import flights


def with_base_weights(ledger: DeskLedger) -> Iterator[Row]:
    """The rows of a ledger. Another system need not write that its replicas serve version 0: then a row `published` follows each that wakes
    before the first update."""
    bases = set() if by_cores(ledger.rows) else {row.who for row in ledger.of("clusters")}
    bases -= {row.who for row in ledger.of("published") if row.get("version") == 0}
    for row in ledger.rows:
        yield row
        if row.event == "bumped":
            bases.discard(row.who)
        elif row.event == "expanded" and row.who in bases:
            yield replace(row, metric="published", ids={**row.ids, "version": 0})


def routed_to_awake(ledger: DeskLedger) -> Violations:
    """Are requests sent only to replicas that are awake and have the current weights?"""
    sent = need(ledger, "sent")
    need(ledger, "joined")
    need(ledger, "published", "hold")
    awake, published = set[tuple[str, Any]](), set[tuple[str, Any]]()
    for row in with_base_weights(ledger):
        replica = row.who, row.get("replica")
        if row.event == "joined":
            awake.add(replica)
        elif row.event in ("shrink", "shrunk", "died"):
            awake.discard(replica)
            published.discard(replica)
        elif row.event == "published":
            published.add(replica)
        elif row.event == "sent" and replica not in awake & published:
            yield f"{row}: the replica {'has no weights' if replica in awake else 'is asleep'}"
    return counted(len(sent), "request")


def drained_before_sleep(ledger: DeskLedger) -> Violations:
    """Does a replica generate nothing while it sleeps?"""
    count, asleep = len(need(ledger, "shrunk")), set[tuple[str, int]]()
    for row in ledger.rows:
        if row.event == "shrunk":
            asleep.add(replica_of(row))
        elif row.event == "expand":
            asleep.discard(replica_of(row))
        elif row.event in ("started", "tokens", "completed") and "replica" in row.ids and replica_of(row) in asleep:
            yield f"{row}: the replica is asleep"
    return f"replicas fell asleep {counted(count, 'time')}"


def empty_set_suspends(ledger: DeskLedger) -> Violations:
    """While no replica of a pipeline serves, do its requests wait without an error and get an answer later?"""
    need(ledger, "sent")
    count, over = 0, ended_by_others(ledger)
    serving: defaultdict[str, set[int]] = defaultdict(set)
    empty: set[str] = set()  # pipelines without a serving replica
    heard = "shrink" if ledger.of("shrink") else "left"  # the event after which a pipeline sends the replica nothing
    for row in with_base_weights(ledger):
        name, replica = row.who, row.get("replica")
        if row.event == "published":
            serving[name].add(replica)
            empty.discard(name)
        elif row.event in (heard, "died") and replica in serving[name]:
            serving[name].discard(replica)
            if not serving[name]:
                count += 1
                empty.add(name)
        elif row.event == "sent" and name in empty:
            yield f"{row}: no replica serves"
        elif row.event == "ended" and name in empty - over and row.get("why") == "error":
            yield f"{row}: no replica served, and the pipeline ended with an error: {row.get('error', '')}"
    yield from still_counted(ledger)
    if not count:
        raise NotMeasured("every pipeline always had a serving replica")
    return f"{count} times the last replica of a pipeline fell asleep"


def still_counted(ledger: DeskLedger) -> Iterator[str]:
    """Yield a violation per finished pipeline that had requests without an answer when it released generation."""
    kept: dict[str, list[Request]] = {}
    for row, flying in flights(ledger):
        if row.event in ("release", "planned_release") and cluster_of(row) == "generation":
            kept[row.who] = [request for request in flying if request[0] == row.who]
        elif row.event == "ended" and row.get("why") != "error" and (left := kept.get(row.who)):
            yield f"{row}: {len(left)} requests are still counted, the first for group {left[0][1]} sample {left[0][2]}"


def version_after_wake(ledger: DeskLedger) -> Violations:
    """Does every woken replica get the current version and generate only with it?"""
    need(ledger, "published", "hold")
    count, limit, began = len(need(ledger, "expanded")), ledger.limit("request_ms", 60_000) / 1000, 0
    current: defaultdict[str, int] = defaultdict(int)
    ordered: dict[tuple[str, int], int] = {}
    serves: dict[tuple[str, int], int] = {}
    woken: dict[tuple[str, int], Row] = {}
    later: set[tuple[str, int]] = set()  # woke up after version 0
    for row in with_base_weights(ledger):
        if row.event == "bumped":
            current[row.who] = row["version"]
        elif row.event == "expanded":
            later |= {replica_of(row)} if current[row.who] else set()
            woken[replica_of(row)] = row
            serves.pop(replica_of(row), None)
        elif row.event == "sync":
            ordered |= {(row.who, replica): row["version"] for replica in numbers(row["replicas"])}
            if row["version"] != current[row.who]:
                yield f"{row} has version {row['version']}; expected {current[row.who]}"
        elif row.event == "published" and replica_of(row) in woken | serves:
            woken.pop(replica_of(row), None)
            serves[replica_of(row)] = row["version"]
            if row["version"] != (due := ordered.get(replica_of(row), current[row.who])):
                yield f"{row} has version {row['version']}; version {due} was ordered"
        elif row.event in ("started", "tokens") and "replica" in row.ids:
            version, woken_replica = row.get("version"), replica_of(row)
            began += row.event == "started" and woken_replica in later
            if woken_replica in woken:
                yield f"{row}: the replica has received no weights since it woke up (row {woken[woken_replica].at})"
            elif version is not None and version != serves.get(woken_replica, version):
                yield f"{row} has version {version}; the replica serves version {serves[woken_replica]}"
        elif row.event in ("left", "died", "shrunk") and "replica" in row.ids:
            yield from bare([woken.pop(replica) for replica in {replica_of(row)} & {*woken}], row.time, limit)
            serves.pop(replica_of(row), None)
            ordered.pop(replica_of(row), None)
        elif row.event in ("ended", "died", "unregistered"):
            yield from bare([woken.pop(replica) for replica in [*woken] if replica[0] == row.who], row.time, limit)
    yield from bare(woken.values(), ledger.rows[-1].time, limit)
    return f"{count} wake-ups; {counted(began, 'request')} began on replicas that woke after version 0"


def bare(woken: Iterable[Row], now: float, limit: float) -> Iterator[str]:
    """Yield a violation per replica that was awake without weights for longer than a request may wait."""
    return (f"{row}: the replica got no weights for {now - row.time:.3f} s" for row in woken if now - row.time > limit)
