"""The rule of planned releases."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from kit.results.records import Row
from kit.results.rules import Missing, Violations
from kit.results.units import counted
from kit.share.judge.books import Books, DeskLedger, cluster_of, need


def planned_release_once(ledger: DeskLedger) -> Violations:
    """Is every planned release answered once, after every replica has fallen asleep?"""
    need(ledger, "clusters")
    open_: defaultdict[str, list[Row]] = defaultdict(list)
    died: dict[str, int] = {}  # the row: nobody waits for an earlier answer any more
    count = 0
    for row, books in ledger.replay():
        asks = row.event == "planned_release" or (row.event == "release" and cluster_of(row) == "generation")
        if (
            asks
            and row.who in books.clusters
            and row.at not in ledger.refused
            and (row.who, "generation") not in books.held
        ):
            open_[row.who].append(row)
            count += 1
        elif row.event == "released":
            if not open_[row.who]:
                yield f"{row}: no planned release waits for it"
            open_[row.who] = open_[row.who][1:]
            yield from not_asleep(row, books)
        elif row.event == "left" and row["replica"] not in books.active.get(row.who, ()):
            yield f"{row}: the replica is not active"
        elif row.event == "error" and row.get("of") == ledger.desk:
            open_.pop(row.who, None)
        elif row.event == "died" and "replica" not in row.ids:
            died[row.who] = row.at
        elif (
            row.event in ("gone", "unregistered")
            and row.who in books.closing & books.clusters.keys()
            and row.who not in died
        ):
            yield from not_asleep(row, books)
    if not count:
        raise Missing("the ledger has no `planned_release` or `release` of generation")
    unanswered = [row for rows in open_.values() for row in rows if row.at > died.get(row.who, -1)]
    yield from (f"{row} has no answer" for row in unanswered if ledger.of("ended"))
    return counted(count, "planned release")


def not_asleep(row: Row, books: Books) -> Iterator[str]:
    if books.active.get(row.who):
        yield f"{row}: replicas {sorted(books.active[row.who])} are still active"
    for _, replica in sorted(pair for pair in books.sleeping | books.waking if pair[0] == row.who):
        yield f"{row}: replica {replica} has not fallen asleep yet (no `shrunk`)"
