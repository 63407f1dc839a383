"""The rules of requests to the desk: each is answered once, in its turn and in time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from kit.results.records import Row
from kit.results.rules import Missing, Violations
from kit.results.units import counted
from kit.share.judge.admission import is_held_back, without_held_back
from kit.share.judge.books import (
    LEASES,
    ON_PURPOSE,
    RUNS_ON,
    Books,
    DeskLedger,
    cluster_of,
    need,
    need_lines,
    need_plans,
    replica_of,
)
from kit.share.judge.demand import could_be_served, is_needy
from kit.share.judge.plans import ops
from kit.share.judge.specified import before_sharing
from kit.share.judge.stuck import device_requests, devices_and_holders, open_requests, stranded


def no_request_lost(ledger: DeskLedger) -> Violations:
    """Does every request end, also on replicas that fell asleep, and is it answered once?"""
    count, has_ended = len(need(ledger, "acquire")), bool(ledger.of("ended"))
    need_lines(ledger, "release")
    patience = (ledger.limit("request_ms", 60_000) + ledger.limit("admission_ms", 0)) / 1000
    for asked, end in device_requests(ledger):
        if end is not None and end.event == "gone":
            yield f"{asked} has no answer although the pipeline is gone (row {end.at})"
        elif end is None and (has_ended or ledger.rows[-1].time - asked.time > patience):
            yield f"{asked} has no answer"
    yield from unanswered_resizes(ledger, patience)
    yield from removed_but_awake(ledger)
    yield from (f"{row} is refused, but nothing speaks against it" for row in refused_needlessly(ledger))
    yield from answered_twice(ledger)
    yield from stranded_requests(ledger)
    return counted(count, "request")


def unanswered_resizes(ledger: DeskLedger, patience: float) -> Iterator[str]:
    """Yield a violation per resize that the desk read and left without an answer until its pipeline had gone, or for too long. One answer
    may be to several."""
    last, open_ = ledger.rows[-1], list[Row]()
    for row in ledger.of("resize", "resized", "error", "died", "gone", "unregistered"):
        own = [asked for asked in open_ if asked.who == row.who]
        if row.event == "resize" and row.at not in ledger.refused and row not in ledger.unheard:
            open_.append(row)
        elif "replica" not in row.ids and (row.event != "error" or row.get("of") in ("resize", ledger.desk)):
            open_ = [asked for asked in open_ if asked not in own]
            yield from (f"{asked} has no answer" for asked in own if row.event in ("gone", "unregistered"))
    yield from (f"{row} has no answer" for row in open_ if ledger.of("ended") or last.time - row.time > patience)


def removed_but_awake(ledger: DeskLedger) -> Iterator[str]:
    """Yield a violation per replica that a resize has removed and that the desk does not order to sleep, for longer than between two looks
    at such replicas."""
    limit = ledger.limit("watchdog_ms", 0) / 1000
    since: dict[tuple[str, int], float] = {}
    before: tuple[Row, Books] | None = None
    for row, books in ledger.replay() if limit and ledger.of("resize") else ():
        if before is not None and before[1].plan is None:
            stay = before[1].out & before[1].awake()
            since = {replica: since.get(replica, 0.0) + row.time - before[0].time for replica in stay}
            for name, replica in sorted(key for key, seconds in since.items() if seconds > limit):
                yield f"{row}: a resize has removed replica {replica} of {name}; it is still awake {since[name, replica]:.3f} s later"
                since[name, replica] = -math.inf
        before = row, books


def refused_needlessly(ledger: DeskLedger) -> Iterator[Row]:
    """Yield the refused requests of pipelines that are admitted, neither leave nor release anything, have no other request or lease for the
    cluster, and to generate have a replica that may wake."""
    for row, books in ledger.replay():
        served = books.clusters.keys() & books.admitted - books.leaving
        if row.event != "acquire" or row.at not in ledger.refused or row.who not in served:
            continue
        cluster, kind = cluster_of(row), row.get("kind")
        fits = cluster in books.clusters[row.who] and (RUNS_ON.get(kind, kind) == cluster or kind == "initialisation")
        taken = (row.who, cluster) in books.asked.keys() | books.waiting.keys() | books.held.keys()
        lost = {replica for name, replica in books.out | books.dead if name == row.who}
        cannot = row.who in books.generating or lost.issuperset(books.replicas(row.who))
        if fits and not taken and not (kind == "generation" and cannot) and "release" not in row.ids:
            need_lines(ledger, "unregister")  # it may have been leaving
            yield row


def answered_twice(ledger: DeskLedger) -> Iterator[str]:
    """Yield a violation per grant for which no request waits, neither the pipeline's nor one that the desk repeated; and per replica that
    joins again without having left."""
    requests = [*device_requests(ledger)]
    answers = {end.at for _, end in requests if end is not None}
    first = {asked.at for asked, _ in requests} | ledger.refused
    repeated: Counter[tuple[str, Any]] = Counter()  # requests while an equal one waits: each may be granted too
    joined: dict[tuple[str, Any], Row] = {}
    shows_who_wakes = bool(ledger.of("expanded"))
    asked_again: set[str] = set()  # a desk may ask for a pipeline that lost all its replicas, without the note `queued`
    for row, books in ledger.replay():
        if not ledger.by_event["queued"]:
            asked_again |= {name for name in books.generating if not books.active.get(name)}
        # A pipeline notes itself that a replica joined: only the desk's command counts.
        serves = "to" in row.ids if row.event == "joined" else row.event == "granted" and row["kind"] == "generation"
        if serves and shows_who_wakes and row.who in books.clusters and not is_awake(row, books):
            yield f"{row}: {'it has not' if row.event == 'joined' else 'none of its replicas has'} woken"
        if row.event == "granted" and row.at not in answers and (row.who, cluster_of(row)) not in books.waiting:
            if repeated[row.who, row.get("kind")]:
                repeated[row.who, row.get("kind")] -= 1
            elif row.get("kind") == "generation" and row.who in asked_again:
                asked_again.discard(row.who)
            else:
                yield f"{row}: no request waits for it"
        elif row.event == "acquire" and row.at not in first:
            repeated[row.who, row["kind"]] += 1
        elif row.event in ("release", "planned_release"):
            repeated.pop((row.who, row.get("kind", "generation")), None)
        elif row.event == "joined" and "to" in row.ids:  # of the desk: a pipeline notes what it hears
            if (before := joined.get(replica_of(row))) is not None:
                yield f"{row}: the replica has joined before (row {before.at}) and not left"
            joined[replica_of(row)] = row
        elif row.event in ("left", "shrink", "shrunk", "died", "gone"):
            gone = {replica_of(row)} if "replica" in row.ids else {key for key in joined if key[0] == row.who}
            joined = {key: row_of for key, row_of in joined.items() if key not in gone}


def is_awake(row: Row, books: Books) -> bool:
    """Whether the replica that a row names is awake; of a row without one, whether any replica of its pipeline is."""
    active = books.active.get(row.who, set())
    return row["replica"] in active if "replica" in row.ids else bool(active)


def stranded_requests(ledger: DeskLedger) -> Iterator[str]:
    ended = {row.who for row in ledger.of("ended")}
    limit = ledger.limit("request_ms", 60_000) / 1000
    yield from (
        f"{sent} was never sent again after its replica left (row {left.at})"
        for key, (sent, left) in stranded(ledger).items()
        if key[0] in ended or ledger.rows[-1].time - left.time > limit
    )


def priority_kept(ledger: DeskLedger) -> Violations:
    """Are requests served by priority, and first in, first out within a priority?"""
    plans = need_plans(ledger)
    need_lines(ledger, *LEASES)
    passed: dict[Asked, Row] = {}  # the first plan that left out a request which it could grant
    limit = ledger.limit("watchdog_ms", 5_000) / 1000
    for row, books in ledger.replay():
        if row.event == "plan":
            granted = {(name, cluster) for name, cluster, _ in ops(row, "grants") if cluster != "generation"}
            passed = {
                asked: passed.get(asked, row) for asked in grantable(ledger, books, row.time) if asked[0] not in granted
            }
            for (name, cluster), _ in [asked for asked, first in passed.items() if row.time - first.time > limit]:
                yield f"{row}: {books.waiting[name, cluster].kind} of {name} waits although its devices are available"
            in_turn = {*before_sharing(books)[2], *before_sharing(without_held_back(ledger, books, row.time))[2]}
            for name, cluster in sorted(granted - in_turn):
                yield f"{row}: {name}.{cluster} is granted out of turn or without all its devices"
    since: dict[Asked, float] = {}
    before: tuple[Row, Books] | None = None
    for row, books in ledger.replay():
        if before is not None and before[1] is not books:
            idle_for = grantable(ledger, books, before[0].time) if books.plan is None else ()
            since = {asked: since.get(asked, before[0].time) for asked in idle_for}
        for asked in [asked for asked, begun in since.items() if row.time - begun > limit]:
            where = ".".join(asked[0])
            yield f"{row}: the devices of {where} were available for {row.time - since[asked]:.3f} s and no plan was made"
            since[asked] = math.inf
        before = row, books
    return f"{len(plans)} plans"


Asked = tuple[tuple[str, str], int]  # a request: the cluster, and the row that asked for it


def grantable(ledger: DeskLedger, books: Books, now: float) -> list[Asked]:
    """The requests to grant within `watchdog_ms`: all their devices are idle, and no earlier request waits for one of them."""
    if not books.waiting:
        return []
    books = without_held_back(ledger, books, now)
    could, idle = before_sharing(books)[2], books.idle()
    waiting = [
        (request.precedence, {*books.clusters[key[0]][key[1]]})
        for key, request in books.waiting.items()
        if request.kind != "generation" and key not in could
    ]
    asked = [(key, books.waiting[key], {*books.clusters[key[0]][key[1]]}) for key in could]
    return [
        (key, request.at)
        for key, request, devices in asked
        if devices <= idle and not any(before < request.precedence and devices & kept for before, kept in waiting)
    ]


def no_starvation(ledger: DeskLedger) -> Violations:
    """Is every request for devices served within its deadline, counted from the request?"""
    limit = ledger.limit("request_ms", 0) / 1000
    if not limit:
        raise Missing("the ledger has no `limits` event with `request_ms`")
    need_lines(ledger, *LEASES, "planned_release")
    longest, reported = 0.0, set[tuple[Wait, float]]()
    for row, books, waits in waits_so_far(ledger):
        if row.event == "expired":
            reported |= {
                (wait, begun) for wait, begun in waits if (wait.name, wait.cluster) == (row.who, cluster_of(row))
            }
            devices, holders = devices_and_holders(books, row.who, cluster_of(row))
            yield f"{row}: the request waited for {limit:g} s for {devices}: {holders}"
        denied = row.event == "error" and row.get("of") == "acquire"
        for wait, begun in waits:
            longest = max(longest, row.time - begun)
            is_over = limit * (0.999 if denied and (wait.name, wait.cluster) == (row.who, cluster_of(row)) else 1.001)
            if row.time - begun > is_over and (wait, begun) not in reported:
                reported.add((wait, begun))
                devices, holders = devices_and_holders(books, wait.name, wait.cluster or "generation")
                yield f"{row}: {wait} since {row.time - begun:.3f} s (limit {limit:g} s); {devices}: {holders}"
    yield from left_waiting(ledger)
    return f"longest wait {longest:.3f} s, limit {limit:g} s"


def left_waiting(ledger: DeskLedger) -> Iterator[str]:
    """Yield a violation per pipeline that waits for its first replica although the devices of one are idle, for longer than between two
    looks of the desk at such pipelines. Right planners serve it at once; `static` may not.
    """
    limit = ledger.limit("watchdog_ms", 0) / 1000
    if not limit or ledger.limits.get("planner") in ("static", ON_PURPOSE):
        return
    waited: dict[tuple[str, int], float] = {}  # by pipeline and request
    before: Row | None = None
    for row, books in ledger.replay():
        if before is not None and row.time > before.time and books.plan is None:
            names = [name for name in books.clusters if could_be_served(books, name)]
            fits = [(name, books.waiting[name, "generation"].at) for name in names]
            waited = {asked: waited.get(asked, 0.0) + row.time - before.time for asked in fits}
            for asked in [asked for asked, seconds in waited.items() if seconds > limit]:
                seconds = f"{waited[asked]:.3f} s although devices of one were idle (limit {limit:g} s)"
                yield f"{row}: {asked[0]} has had no replica for {seconds}"
                waited[asked] = -math.inf
        if row.event == "expand":
            waited = {asked: seconds for asked, seconds in waited.items() if asked[0] != row.who}
        before = row


class Wait(NamedTuple):
    name: str
    kind: str = ""
    cluster: str = ""

    def __str__(self) -> str:
        return (
            f"{self.kind} of {self.name} waits for {self.cluster}"
            if self.kind
            else f"{self.name} has demand and no replica"
        )


def waits_so_far(ledger: DeskLedger) -> Iterator[tuple[Row, Books, list[tuple[Wait, float]]]]:
    """Yield each row with the books before it and what waits at its time, and since when.

    A request waits from its `acquire`, unless the admission of the next pipeline holds it back for longer.
    """
    held_until: dict[int, float] = {}  # by the row of a request
    needy: dict[str, float] = {}
    read: Books | None = None
    for row, books, asked in open_requests(ledger):
        if books is not read:
            read, needy = books, {name: needy.get(name, row.time) for name in books.clusters if is_needy(books, name)}
        held_until |= {
            request.at: row.time
            for (name, _), request in asked.items()
            if is_held_back(ledger, books, name, request["kind"], row.time - request.time)
        }
        waits = [  # repeated by the desk itself, for a pipeline that lost all its replicas
            (Wait(key[0], request.kind, key[1]), request.time)
            for key, request in books.waiting.items()
            if key not in asked
        ]
        waits += [
            (Wait(name, request["kind"], cluster), held_until.get(request.at, request.time))
            for (name, cluster), request in asked.items()
        ]
        waits += [(Wait(name), begun) for name, begun in needy.items()]
        yield row, books, waits
