"""The checks of a ledger that need the pipelines' rows beside the desk's: requests, replicas and versions across sleep and wake."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from kit.loop.messages import numbers
from kit.results.units import counted
from kit.results.verdict import Missing, NotMeasured
from kit.share.judge import as_check, need

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kit.share.books import Ledger, Row
    from kit.share.judge import Finding

Replica = tuple[str, int]  # a pipeline's, by its number
ANSWERS = ("completed", "cancelled", "failed")


def one_of(row: Row) -> Replica:
    return row.who, int(row["replica"])


@as_check
def drained_before_sleep(ledger: Ledger) -> Finding:
    """Does a replica generate nothing from the moment it sleeps until it wakes?"""
    count, asleep = len(need(ledger, "shrunk")), set[Replica]()
    for row in ledger.rows:
        if row.event == "shrunk":
            asleep.add(one_of(row))
        elif row.event == "expand":
            asleep.discard(one_of(row))
        elif row.event in ("started", "tokens", "completed") and "replica" in row.ids and one_of(row) in asleep:
            yield f"{row}: the replica is asleep"
    return f"{count} times a replica fell asleep"


@as_check
def empty_set_suspends(ledger: Ledger) -> Finding:
    """While no replica of a pipeline serves, do its requests wait without an error and get answered later?"""
    need(ledger, "sent")
    count, over = 0, dead(ledger)
    serving: defaultdict[str, set[int]] = defaultdict(set)
    empty: set[str] = set()  # pipelines of which no replica serves any more
    heard = "shrink" if ledger.of("shrink") else "left"  # the pipeline's word that it sends nothing there any more
    for row in ledger.rows:
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
        raise NotMeasured("at any time a replica of each pipeline served")
    return f"{count} times the last replica of a pipeline fell asleep"


def still_counted(ledger: Ledger) -> Iterator[str]:
    """Requests without an answer when a pipeline that came to its end gave its generation back."""
    flying: dict[tuple[Any, ...], int] = {}
    kept: dict[str, list[tuple[Any, ...]]] = {}
    for row in ledger.rows:
        key = row.who, row.get("group"), row.get("sample")
        if row.event in ("left", "died") and "replica" in row.ids:
            flying = {one: where for one, where in flying.items() if (one[0], where) != one_of(row)}
        elif row.event == "sent":
            flying[key] = row["replica"]
        elif row.event in ANSWERS and "sample" in row.ids:
            flying.pop(key, None)
        elif row.event in ("release", "planned_release") and row.cluster == "generation":
            kept[row.who] = [one for one in flying if one[0] == row.who]
        elif row.event == "ended" and row.get("why") != "error" and (left := kept.get(row.who)):
            yield f"{row}: {len(left)} requests are still counted, the first for group {left[0][1]} sample {left[0][2]}"


@as_check
def version_after_wake(ledger: Ledger) -> Finding:
    """Does every replica that wakes get the current version, and generate only with that one?"""
    need(ledger, "published", "hold")
    count, limit, began = len(need(ledger, "expanded")), ledger.limit("request_ms", 60_000) / 1000, 0
    current: defaultdict[str, int] = defaultdict(int)
    ordered: dict[Replica, int] = {}
    serves: dict[Replica, int] = {}
    woken: dict[Replica, Row] = {}
    later: set[Replica] = set()  # woke up after version 0
    for row in ledger.rows:
        if row.event == "bumped":
            current[row.who] = row["version"]
        elif row.event == "expanded":
            later |= {one_of(row)} if current[row.who] else set()
            woken[one_of(row)] = row
            serves.pop(one_of(row), None)
        elif row.event == "sync":
            ordered |= {(row.who, replica): row["version"] for replica in numbers(str(row["replicas"]))}
            if row["version"] != current[row.who]:
                yield f"{row} is of version {row['version']}; version {current[row.who]} is due"
        elif row.event == "published" and one_of(row) in woken | serves:
            woken.pop(one_of(row), None)
            serves[one_of(row)] = row["version"]
            if row["version"] != (due := ordered.get(one_of(row), current[row.who])):
                yield f"{row} is of version {row['version']}; version {due} was ordered"
        elif row.event in ("started", "tokens") and "replica" in row.ids:
            version, one = row.get("version"), one_of(row)
            began += row.event == "started" and one in later
            if one in woken:
                yield f"{row}: the replica woke up and has got no weights since (row {woken[one].at})"
            elif version != serves.get(one, version):
                yield f"{row} is of version {version}; the replica serves version {serves[one]}"
        elif row.event in ("left", "died", "shrunk") and "replica" in row.ids:
            yield from bare([woken.pop(one) for one in {one_of(row)} & {*woken}], row.time, limit)
            serves.pop(one_of(row), None)
        elif row.event in ("ended", "died", "unregistered"):
            yield from bare([woken.pop(one) for one in [*woken] if one[0] == row.who], row.time, limit)
    yield from bare(woken.values(), ledger.rows[-1].time, limit)
    return f"{count} times a replica woke up, {counted(began, 'request')} began on those that woke after version 0"


def bare(woken: Iterable[Row], now: float, limit: float) -> Iterator[str]:
    """Those that were awake for longer than a request may wait, and got no weights."""
    return (f"{row}: the replica got no weights in {now - row.time:.3f} s" for row in woken if now - row.time > limit)


@as_check
def no_deadlock(ledger: Ledger) -> Finding:
    """Do the desk and all pipelines end by themselves, the live ones without an error?"""
    begun = {str(row["core"]): row for row in ledger.rows if row.event == "begins" and "core" in row.ids}
    ends = {row.who for row in ledger.of("ended", *(() if begun else ("gone", "unregistered")))}
    begun = begun or {row.who: row for row in ledger.of("clusters")}
    if not begun:
        raise Missing("the ledger has no `begins` or `clusters` event")
    yield from (f"{name} never ended; the last row is {ledger.rows[-1]}" for name in begun if name not in ends)
    yield from harmed(ledger)
    return f"{', '.join(sorted(begun))} ended"


def harmed(ledger: Ledger) -> Iterator[str]:
    """Pipelines that ended with an error, although neither they nor the desk failed."""
    over = dead(ledger) | {ledger.desk}
    for row in ledger.of("ended"):
        if row.who not in over and row.get("why") == "error":
            yield f"{row}: it ended with an error: {row.get('error', '')}"


def dead(ledger: Ledger) -> set[str]:
    """Pipelines that died, and those that the desk's failure stopped."""
    gone = {row.who for row in ledger.of("died") if "replica" not in row.ids}
    return gone | {row.who for row in ledger.of("error") if row.get("of") == ledger.desk}


@as_check
def dead_pipeline_leaves(ledger: Ledger) -> Finding:
    """Are the devices of a dead pipeline freed in time, and do the other pipelines finish?"""
    limit, slowest = ledger.limit("operation_ms", 60_000) / 1000, 0.0
    deaths: dict[str, tuple[Row, set[int]]] = {}
    left: set[str] = set()
    for row, books in ledger.replay():
        name = row.who
        if row.event == "died" and "replica" not in row.ids and name in books.clusters and name not in deaths:
            owned = {at for at, some in books.owners().items() if any(of_pipeline(one, name) for one in some)}
            deaths[name] = row, owned
        elif row.event == "gone" and name in deaths and name not in left:
            died, owned = deaths[name]
            left.add(name)
            slowest = max(slowest, row.time - died.time)
            if row.time - died.time > limit:
                yield f"{died}: it was let go only {row.time - died.time:.3f} s later (limit {limit:g} s)"
            if "idle" in row.ids and (kept := sorted(owned - {*numbers(str(row["idle"]))})):
                yield f"{row}: its devices {kept} are not idle"
    if not deaths:
        raise NotMeasured("no pipeline died")
    yield from (f"{died}: the desk never let it go" for name, (died, _) in deaths.items() if name not in left)
    yield from harmed(ledger)
    return f"{', '.join(sorted(deaths))} died; its devices were idle {slowest:.3f} s later"


def of_pipeline(owner: str, name: str) -> bool:
    """Whether an owner in the books ("replica 1 of a") is of this pipeline."""
    return owner.rpartition(" of ")[2] == name


CHECKS = {
    check.__name__: check
    for check in (drained_before_sleep, empty_set_suspends, version_after_wake, no_deadlock, dead_pipeline_leaves)
}
