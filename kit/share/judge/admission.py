"""The rule of the order in which pipelines start, and which requests to train it holds back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from kit.results.records import Row
from kit.results.rules import Violations
from kit.share.judge.books import Books, DeskLedger, need, need_lines


def without_held_back(ledger: DeskLedger, books: Books, now: float) -> Books:
    waiting = {
        key: request
        for key, request in books.waiting.items()
        if not is_held_back(ledger, books, key[0], request.kind, now - request.time)
    }
    return replace(books, waiting=waiting) if len(waiting) < len(books.waiting) else books


def is_held_back(ledger: DeskLedger, books: Books, name: str, kind: str, waited: float) -> bool:
    """Whether a request to train must wait until the next pipeline is set up, which the desk may await for `admission_ms`; without that
    it awaits none."""
    longest = ledger.limit("admission_ms", 0) / 1000 * 1.001
    return kind == "training" and longest > 0 and waited <= longest and bool(not_set_up(books, name))


def not_set_up(books: Books, name: str) -> list[str]:
    """The pipeline that must be set up before this one trains again after its first hand-over, if it is not."""
    names = list(books.clusters)
    if name not in books.handed_over or name not in names or (name, "trains") in books.over:
        return []
    if books.followed.get(name, name) not in names:  # that one has left
        return []
    after = names[names.index(name) + 1 :][:1]
    return [following for following in after if following not in books.set_up | books.closing]


def admission(ledger: DeskLedger) -> Violations:
    """Does each pipeline start only after the first hand-over of the one before it?"""
    rows = need(ledger, "admitted")
    need_lines(ledger, "acquire", "release")
    limit = ledger.limit("admission_ms", 0) / 1000 * 0.999
    for row, books in ledger.replay():
        if row.event in ("queued", "granted") and row.who in books.clusters and row.who not in books.admitted:
            yield f"{row}: the pipeline has not been admitted"
    if limit:
        yield from started_early(ledger, limit)
        yield from trained_early(ledger, limit)
    return f"{len(rows)} pipelines"


def started_early(ledger: DeskLedger, limit: float) -> Iterator[str]:
    registered: dict[str, str] = {}  # by pipeline: the one that registered just before it
    departed: set[str] = set()
    asked: dict[str, Row] = {}
    last = ""
    for row, books in ledger.replay():
        if row.event == "clusters":
            registered[row.who], last = last, row.who
            departed.discard(row.who)
        elif row.event == "gone":
            departed.add(row.who)
        elif row.event == "admit":
            asked.setdefault(row.who, row)
        elif row.event == "admission_limit" and row.get("side") == "starts" and is_early(ledger, row, asked, limit):
            yield f"{row}: its wait has not been that long"
        elif row.event == "admitted" and row.who in books.clusters and row.who not in books.admitted:
            before = [*books.clusters][: [*books.clusters].index(row.who)][-1:]
            free = books.handed_over | books.closing | departed
            over = (row.who, "starts") in books.over or row.time - asked.get(row.who, row).time >= limit
            if before and not {*before, registered.get(row.who, before[0])} & free and not over:
                yield f"{row}: {before[0]} has not handed over and the limit is not reached"


def trained_early(ledger: DeskLedger, limit: float) -> Iterator[str]:
    asked: dict[str, Row] = {}
    awaited: dict[str, list[str]] = {}  # by who asks to train: the pipeline that has to be set up first
    for row, books in ledger.replay():
        if row.event == "admission_limit" and row.get("side") == "trains" and is_early(ledger, row, asked, limit):
            yield f"{row}: its wait has not been that long"
        elif row.get("kind") != "training" or row.who not in books.clusters:
            continue
        elif row.event == "queued":
            awaited[row.who] = not_set_up(books, row.who)
        # A desk need not note that it queues a request; one that waits or is granted may be repeated.
        elif row.event == "acquire" and row.who not in awaited and (row.who, "trainer") not in books.held:
            asked[row.who], awaited[row.who] = row, not_set_up(books, row.who)
        elif row.event == "release" or (row.event == "error" and row.get("of") == "acquire"):
            awaited.pop(row.who, None)
        elif row.event == "granted":
            over = row.time - asked.get(row.who, row).time >= limit
            for after in [name for name in awaited.pop(row.who, []) if name in not_set_up(books, row.who) and not over]:
                yield f"{row}: {after} is not set up and the limit is not reached"


def is_early(ledger: DeskLedger, note: Row, asked: Mapping[str, Row], limit: float) -> bool:
    """Whether neither the time since the wait began nor an alarm set for that late is a reason for the note that it reached its limit."""
    if note.who not in asked or note.time - asked[note.who].time >= limit:
        return False
    alarms = {row.get("number") for row in ledger.of("alarm") if ledger.turn[row.at] == ledger.turn[note.at]}
    due = [row for row in ledger.of("after") if row.who == ledger.desk and row.get("number") in alarms]
    return not any(row.number("ms") / 1000 >= limit for row in due)
