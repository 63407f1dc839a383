"""The rules of a ledger of leases. Each yields a sentence for each violation and returns a summary; any system may have written the ledger.

A rule raises `Missing` (null), which names the event, if the ledger lacks an event that it needs.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kit.results.ledger import by_cores, is_note
from kit.results.progress import GroupTally, only_training
from kit.results.records import Id, Row, numbers, value_in_words
from kit.results.rules import Measured, Missing, NotMeasured, Violations
from kit.results.units import counted
from kit.share.books import (
    RUNS_ON,
    SPECIFIED,
    TRAINER_CALLS,
    Books,
    DeskLedger,
    Request,
    before_sharing,
    cluster_of,
    off_balance,
    replica_of,
    specified,
)
from kit.share.state import KINDS
from kit.share.stuck import (
    circle,
    device_requests,
    devices_and_holders,
    failure_of_desk,
    failure_of_pipeline,
    flights,
    listed_values,
    never_ended,
    open_requests,
    stranded,
)

ON_PURPOSE = "wrong on purpose"  # in `limits`: a planner whose plans a right desk refuses


def need(ledger: DeskLedger, *events: str) -> list[Row]:
    rows = ledger.of(*events)
    if not rows:
        raise Missing(f"the ledger has no {' or '.join(f'`{event}`' for event in events)} event")
    return rows


def need_plans(ledger: DeskLedger) -> list[Row]:
    """The plans of a ledger that also says which requests wait: without those a grant looks as if nobody had asked for it."""
    plans = need(ledger, "plan")
    if ledger.of("granted"):
        need(ledger, "acquire", "queued")
    return plans


def pipeline_rows(rows: Sequence[Row], name: str) -> list[Row]:
    """The rows of one pipeline's loop, for the checks of `stream`. A combined release and request is split into two rows."""
    own = (
        core_rows(rows, name) if by_cores(rows) else [row for row in rows if row.who == name and row.event != "begins"]
    )
    split: list[Row] = []
    for row in own:
        if "release" in row.ids:
            split.append(replace(row, metric="release", ids={**row.ids, "kind": row["release"]}))
        split.append(row)
    return split


def core_rows(rows: Iterable[Row], name: str) -> list[Row]:
    """The rows of one pipeline's core: those from an event that it got to the next core's.

    It begins when the pipeline is admitted, with all replicas. Its member takes them back at once, because they sleep until the desk wakes
    them: these rows `joined` have the id `asleep`.
    """
    own: list[Row] = []
    inside = admitted = False
    for row in rows:
        inside = row["core"] == name if "core" in row.ids else inside
        if inside and row.event == "admitted":
            own, admitted = [Row(metric="begins", time=row.time, ids={"core": name})], True
        elif inside and admitted and row.event == "joined" and is_note(row):
            own.append(replace(row, ids={**row.ids, "asleep": 1}))
        elif inside and row.get("to") != name:
            own.append(row)
    return own


# -- devices ----------------------------------------------------------------------------------------------------------------


def gives_devices(row: Row, books: Books) -> bool:
    """Whether a replica is ordered to wake or a cluster is granted. A repeated grant does not count."""
    if row.event == "granted":
        return bool(row["kind"] != "generation" and (row.who, cluster_of(row)) not in books.held)
    return row.event == "expand"


def one_owner(ledger: DeskLedger) -> Violations:
    """Does every device have at most one owner at a time, according to leases and observers?"""
    need(ledger, "expand", "granted")
    devices = ledger.limit("devices", 0)
    count, seen = 0, dict[int, str]()
    for row, books in ledger.replay():
        if row.event == "granted" and row.get("kind") not in (None, *KINDS):
            yield f"{row}: there is no kind {row['kind']!r} of work; the kinds are {', '.join(KINDS)}"
        if gives_devices(row, books):
            count += 1
            owners = books.owners()
            for device in numbers(row["devices"]):
                if strangers := [
                    owner for owner in owners.get(device, []) if owner != f"{cluster_of(row)} of {row.who}"
                ]:
                    yield f"{row}: device {device} belongs to {strangers[0]}"
                if devices and not 0 <= device < devices:
                    yield f"{row}: there is no device {device} (`limits`: {counted(devices, 'device')})"
            yield from on_others_devices(row, books)
        elif row.event == "taken":
            if seen.get(row["device"], row.who) != row.who:
                yield f"{row}: device {row['device']} is still held by {seen[row['device']]}"
            seen[row["device"]] = row.who
        elif row.event == "freed" and seen.get(row["device"]) == row.who:
            del seen[row["device"]]
        elif row.event in ("died", "gone"):
            seen = {device: name for device, name in seen.items() if name != row.who}
    yield from released_early(ledger)
    return f"devices were assigned {count} times; number of devices: {devices}"


def on_others_devices(row: Row, books: Books) -> Iterator[str]:
    """Yield a violation if a replica wakes, or a cluster is granted, on other devices than those that its pipeline registered for it."""
    registered = books.clusters.get(row.who, {})
    if row.event == "expand" and registered and row["replica"] in books.replicas(row.who):
        own, about = books.bundle(row.who, row["replica"]), f"replica {row['replica']} wakes"
    elif row.event == "granted" and cluster_of(row) in registered:
        own, about = frozenset(registered[cluster_of(row)]), f"the {cluster_of(row)} is granted work"
    else:
        return
    if (given := {*numbers(row["devices"])}) != own:
        there = listed_values(sorted(given)) if given else "none"
        yield f"{row}: {about} on devices {there}; its own are {listed_values(sorted(own))}"


def released_early(ledger: DeskLedger) -> Iterator[str]:
    """Yield a violation per release of the trainer's devices while the trainer is in a call, so still on them."""
    calls: dict[str, Row] = {}  # the last call of each pipeline's trainer, until its answer
    for row in ledger.rows:
        if row.get("to") == "trainer" and row.event in TRAINER_CALLS:
            calls[row.who] = row
        elif row.event in ("abort", "died", "gone", "ended"):  # the step is given up, perhaps because the trainer died
            calls.pop(row.who, None)
        elif row.who in calls:
            call = calls[row.who]
            kind = row.get("release", row.get("kind") if row.event == "release" else None)
            if row.event in ("done", "error") and row.get("of") == call.event:
                del calls[row.who]
            elif RUNS_ON.get(kind) == "trainer":
                yield f"{row}: {kind} is released, but the trainer of {row.who} has not answered {call}"


def shrink_before_expand(ledger: DeskLedger) -> Violations:
    """Do all shrinks of a cycle, from its plan to its commit, end before its first expand and its first grant?"""
    count = 0
    first: Row | None = None  # expand or grant of the cycle
    need(ledger, "plan")
    lost = ledger.of("died", "gone", "error")  # after one of these a desk may plan anew
    for row, books in ledger.replay():
        before = books.plan if row.event == "plan" else None
        if before is not None and not any(before.at < loss.at < row.at for loss in lost):
            yield f"{row}: the plan in row {before.at} has no `commit` yet"
        if row.event in ("plan", "commit"):
            first = None
        elif gives_devices(row, books):
            count, first = count + 1, first or row
            for name, replica in sorted(books.sleeping)[:1]:
                yield f"{row}: replica {replica} of {name} is not asleep yet"
        elif row.event == "left" and first is not None:  # even if it frees other devices
            yield f"{row}: ordered to sleep after {first}, the first {first.event} of the cycle"
    return f"{count} expands and grants"


def devices_conserved(ledger: DeskLedger) -> Violations:
    """Is every device always either idle or owned, according to both the desk's records and the leases?"""
    rows = [row for row in need(ledger, "plan", "commit") if "idle" in row.ids]
    if not rows:
        raise NotMeasured("no `plan` or `commit` event has the id `idle`")
    last: Row | None = None
    # Of pipelines that leave: a desk may count these devices as idle at once, or once the pipeline is gone.
    given_back: dict[str, set[int]] = {}
    for row, books in ledger.replay():  # the books are as they were after `last`
        if last is not None and last.event in ("plan", "commit", "gone") and "idle" in last.ids:
            stated, idle = set(numbers(last["idle"])), books.idle()
            if not idle - set[int]().union(*given_back.values()) <= stated <= idle:
                yield f"{last} states the idle devices {sorted(stated)}; according to the leases they are {sorted(idle)}"
        if row.event == "unregister":
            held = [books.clusters[name][cluster] for name, cluster in books.held if name == row.who]
            given_back.setdefault(row.who, set(itertools.chain(*held)))
        elif row.event in ("gone", "clusters"):
            given_back.pop(row.who, None)
        last = row
    yield from idle_too_early(ledger)
    return f"idle devices match at {len(rows)} counts"


def idle_too_early(ledger: DeskLedger) -> Iterator[str]:
    """Yield a violation per device that the desk states idle although an observer saw its owner on it, or a replica on it is awake or
    falls asleep while its pipeline leaves."""
    seen: dict[int, str] = {}  # by observers: the owner of a device
    died: set[str] = set()  # their ranks have left their devices
    for row, books in ledger.replay():
        if row.event == "taken":
            seen[row["device"]] = row.who
        elif row.event == "freed" and seen.get(row["device"]) == row.who:
            del seen[row["device"]]
        elif row.event == "died":
            died |= {row.who} if "replica" not in row.ids else set()
            seen = {device: name for device, name in seen.items() if name != row.who}
        elif row.event in ("plan", "commit", "gone") and "idle" in row.ids:
            idle = set(numbers(row["idle"]))
            yield from (f"{row} states device {at} idle; {seen[at]} was seen on it" for at in sorted(idle & {*seen}))
            leaves = row.event == "gone" and row.who in books.clusters and row.who not in died
            for name, replica in sorted(books.awake() | books.sleeping) if leaves else ():
                if name == row.who and books.bundle(name, replica) & idle:
                    yield f"{row} states the devices of replica {replica} of {name} idle; it has not fallen asleep"


# -- requests ---------------------------------------------------------------------------------------------------------------


def no_request_lost(ledger: DeskLedger) -> Violations:
    """Does every request end, also on replicas that fell asleep, and is it answered once?"""
    count, has_ended = len(need(ledger, "acquire")), bool(ledger.of("ended"))
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
    return f"{count} requests"


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
    for row, books in ledger.replay():
        # A pipeline notes itself that a replica joined: only the desk's command counts.
        serves = "to" in row.ids if row.event == "joined" else row.event == "granted" and row["kind"] == "generation"
        if serves and shows_who_wakes and row.who in books.clusters and not is_awake(row, books):
            yield f"{row}: {'it has not' if row.event == 'joined' else 'none of its replicas has'} woken"
        if row.event == "granted" and row.at not in answers and (row.who, cluster_of(row)) not in books.waiting:
            if repeated[row.who, row.get("kind")]:
                repeated[row.who, row.get("kind")] -= 1
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
    return f"{len(sent)} requests"


def priority_kept(ledger: DeskLedger) -> Violations:
    """Are requests served by priority, and first in, first out within a priority?"""
    plans = need_plans(ledger)
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


def without_held_back(ledger: DeskLedger, books: Books, now: float) -> Books:
    waiting = {
        key: request
        for key, request in books.waiting.items()
        if not is_held_back(ledger, books, key[0], request.kind, now - request.time)
    }
    return replace(books, waiting=waiting) if len(waiting) < len(books.waiting) else books


def unplanned(books: Books) -> Iterable[tuple[str, str]]:
    """The clusters whose requests could be granted while no plan is made."""
    return before_sharing(books)[2] if books.plan is None and books.waiting else ()


def no_starvation(ledger: DeskLedger) -> Violations:
    """Is every request for devices served within its deadline, counted from the request?"""
    limit = ledger.limit("request_ms", 0) / 1000
    if not limit:
        raise Missing("the ledger has no `limits` event with `request_ms`")
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


def could_be_served(books: Books, name: str) -> bool:
    if books.active.get(name) or (name, "generation") not in books.waiting or not has_work(books, name):
        return False
    if name not in books.admitted or any(who == name for who, _ in books.sleeping | books.waking):
        return False
    idle = books.idle()
    return any(bundle <= idle for bundle in sleeping_bundles(books, name))


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


def is_held_back(ledger: DeskLedger, books: Books, name: str, kind: str, waited: float) -> bool:
    """Whether a request to train must wait until the next pipeline is set up, which the desk may await for `admission_ms`."""
    if kind != "training":
        return False
    longest = ledger.limit("admission_ms", 0) / 1000 * 1.001
    return waited <= longest and bool(not_set_up(books, name))


def not_set_up(books: Books, name: str) -> list[str]:
    """The pipeline that must be set up before this one trains again after its first hand-over, if it is not."""
    names = list(books.clusters)
    if name not in books.handed_over or name not in names or (name, "trains") in books.over:
        return []
    if books.followed.get(name, name) not in names:  # that one has left
        return []
    after = names[names.index(name) + 1 :][:1]
    return [following for following in after if following not in books.set_up | books.closing]


def is_needy(books: Books, name: str) -> bool:
    """Whether a pipeline has no replica but waits to generate, or generates and has work left by its reports (or never reports). One whose
    replicas are dead or removed, or sleep on devices that its own clusters hold, waits for nobody else."""
    done, target = books.progress(name)
    waits = (name, "generation") in books.waiting
    wants = waits or (name in books.generating and (target > done or name not in books.streams))
    own = {device for who, cluster in books.held if who == name for device in books.clusters[name][cluster]}
    busy = all(
        books.bundle(name, replica) & own or (name, replica) in books.out | books.dead
        for replica in books.replicas(name)
    )
    return wants and not busy and name not in books.leaving and not books.active.get(name)


# -- plans ------------------------------------------------------------------------------------------------------------------


def ops(row: Row, which: str) -> list[tuple[str, str, tuple[int, ...]]]:
    """The operations of a plan, such as "a.generation:0,1 b.trainer:3": one for each cluster, which the text may divide."""
    operations: defaultdict[tuple[str, str], tuple[int, ...]] = defaultdict(tuple)
    for text in str(row.get(which, "")).split():
        where, _, devices_text = text.rpartition(":")
        name, _, cluster = where.rpartition(".")
        operations[name, cluster] += numbers(devices_text)
    return [(name, cluster, on) for (name, cluster), on in operations.items()]


def plan_valid(ledger: DeskLedger) -> Violations:
    """Is every plan feasible: whole bundles, only active ones shrink, only inactive ones wake, no device freed or given twice?"""
    plans = need(ledger, "plan")
    for row, books in ledger.replay():
        if row.event == "plan":
            yield from (f"{row}: {wrong}" for wrong in impossible(row, books))
            continue
        if not is_planned(row, books):
            yield f"{row}: no plan orders it"
        if row.event == "expand" and set(numbers(row["devices"])) != books.bundle(row.who, row["replica"]):
            yield f"{row} takes the devices {value_in_words(row['devices'])}; the bundle is {sorted(books.bundle(row.who, row['replica']))}"
        elif row.event == "granted" and row["kind"] != "generation":
            mapping = sorted(books.clusters[row.who][cluster_of(row)])
            if sorted(numbers(row["devices"])) != mapping:
                yield f"{row} gives the devices {value_in_words(row['devices'])}; the mapping is {mapping}"
    return f"{len(plans)} plans"


def is_planned(row: Row, books: Books) -> bool:
    """Whether the plan in progress has this order, if it is one."""
    if row.event == "granted" and gives_devices(row, books):
        key = row.who, cluster_of(row)
        return books.plan is not None and key in {(name, cluster) for name, cluster, _ in ops(books.plan, "grants")}
    which = (
        "expands" if row.event == "expand" else "shrinks" if row.event == "left" and row.get("to") == row.who else ""
    )
    if not which:
        return True
    planned = ops(books.plan, which) if books.plan is not None else []
    return any(name == row.who and row["replica"] in replicas for name, _, replicas in planned)


def impossible(row: Row, books: Books) -> Iterator[str]:
    free, freed, free_granted = books.idle(), set[int](), set[int]()
    for name, _, replicas in ops(row, "shrinks"):
        for replica in replicas:
            if replica not in books.active.get(name, ()):
                yield f"replica {replica} of {name} shrinks but is not active"
                continue
            if books.bundle(name, replica) & freed:
                yield f"replica {replica} of {name} frees devices a second time"
            freed |= books.bundle(name, replica)
    free |= freed
    wanted = [
        (f"{name}.{cluster}", set(devices)) for name, cluster, devices in ops(row, "grants") if cluster != "generation"
    ]
    for name, _, replicas in ops(row, "expands"):
        for replica in replicas:
            if replica in books.active.get(name, ()) or (name, replica) in books.dead | books.out:
                yield f"replica {replica} of {name} expands but is active, removed or dead"
            elif replica not in books.replicas(name):
                yield f"replica {replica} of {name} expands but {name} has only {len(books.replicas(name))} replicas"
            else:
                wanted.append((f"replica {replica} of {name}", {*books.bundle(name, replica)}))
    for about, devices in wanted:
        if lack := sorted((devices - free) | (devices & free_granted)):
            yield f"{about} gets the devices {lack}, which are not free"
        free_granted |= devices


def planner_of(ledger: DeskLedger) -> str:
    if "planner" not in ledger.limits:
        raise Missing("the ledger has no `limits` event with `planner`")
    return str(ledger.limits["planner"])


def plan_as_specified(ledger: DeskLedger) -> Violations:
    """Does an independent planner make the same plans?"""
    plans = need_plans(ledger)
    if (planner := planner_of(ledger)) not in SPECIFIED:
        raise NotMeasured(f"only the planners {' and '.join(SPECIFIED)} are specified; this run used {planner}")
    for row, books in ledger.replay():
        if row.event == "plan":
            shrinks, _, expands = map(sorted, specified(without_held_back(ledger, books, row.time), planner))
            differing = [
                sorted({(name, device) for name, _, devices in ops(row, which) for device in devices})
                for which in ("shrinks", "expands")
            ]
            if differing != [shrinks, expands]:
                yield f"{row} shrinks {differing[0]} and expands {differing[1]}; specified: {shrinks} and {expands}"
    yield from not_planned(ledger)
    return f"{len(plans)} plans"


def not_planned(ledger: DeskLedger) -> Iterator[str]:
    """Yield a violation per turn after which the desk makes no plan: a request could be granted, or other replicas than before may serve
    and a plan would move some."""
    changed = {
        ledger.turn[row.at]: row
        for row in ledger.of("died", "restarted", "resize")
        if row.get("core") in (None, ledger.desk)
    }
    served: tuple[object, ...] = ()
    for row, books in ledger.turns():
        yield from (
            f"{row}: the devices of {name}.{cluster} are available but no plan is made"
            for name, cluster in unplanned(without_held_back(ledger, books, row.time))
        )
        before, served = served, (books.dead, books.out, {*books.clusters})
        if books.plan is None and before != served and (change := changed.get(ledger.turn[row.at])):
            planned = without_held_back(ledger, books, row.time)
            shrinks, _, expands = map(sorted, specified(planned, planner_of(ledger)))
            if shrinks or expands:
                yield f"{change}: no plan follows; specified: it shrinks {shrinks} and expands {expands}"


def fair_share(ledger: DeskLedger) -> Violations:
    """Are devices moved whenever shares are more than 10 points off and a move helps?"""
    need_plans(ledger)
    if (planner := planner_of(ledger)) not in SPECIFIED:
        raise NotMeasured(f"the planner {planner} does not share by demand")
    count = 0
    for row, books in ledger.turns():
        if books.plan is None and off_balance(books):
            count += 1
            shrinks, _, expands = specified(without_held_back(ledger, books, row.time), planner)
            if shrinks or expands:
                yield f"{row}: shares are unbalanced, and expanding {sorted(expands)} would help"
    return f"{count} times shares were unbalanced but no move would help"


def idle_while_needed(ledger: DeskLedger) -> Iterator[tuple[float, Row, list[int], list[str]]]:
    """Yield periods between two plans in which pipelines had work: seconds, the row that ends it, the idle devices that their sleeping
    replicas fit on, and the pipelines of these replicas.
    """
    before: Row | None = None
    for row, books in ledger.replay():
        lasts = before is not None and row.time > before.time and books.plan is None
        working = [name for name in books.clusters if has_work(books, name)] if lasts else []
        if before is not None and working:
            idle = books.idle()
            fits = [(name, bundle) for name in working for bundle in sleeping_bundles(books, name) if bundle <= idle]
            devices = sorted(set[int]().union(*(bundle for _, bundle in fits)))
            yield row.time - before.time, row, devices, sorted({name for name, _ in fits})
        before = row


def has_work(books: Books, name: str) -> bool:
    """Whether a pipeline may generate and its reports leave work."""
    done, target = books.progress(name)
    wants = name in books.generating or (name, "generation") in books.waiting
    return wants and target > done and name not in books.leaving and (name, "generation") not in books.held


def sleeping_bundles(books: Books, name: str) -> list[frozenset[int]]:
    away = books.awake() | books.sleeping | books.waking | books.dead | books.out
    return [books.bundle(name, replica) for replica in books.replicas(name) if (name, replica) not in away]


MOST_SLEEPS = 10.0  # right planners stay at 1; those that move devices at every event pass hundreds


def sleeps_in_a_row(ledger: DeskLedger) -> Measured:
    """How often the replicas of a pipeline fell asleep before it made progress: the most times, per replica.

    Replicas that sleep in a plan with a grant do not count: a request of higher priority needs their devices.
    """
    need(ledger, "plan")
    need(ledger, "progress", "acquire")
    most, why, grants = 0.0, "no replica had to sleep, except for requests of higher priority", False
    counts: defaultdict[str, int] = defaultdict(int)
    reports: dict[tuple[str, Any], tuple[Any, Any]] = {}
    for row, books in ledger.replay():
        if row.event == "plan":
            grants = bool(ops(row, "grants"))
        elif row.event == "progress":
            report = row.get("completed"), row.get("target")
            if reports.get((row.who, row.get("stream"))) != report:
                counts[row.who] = 0
            reports[row.who, row.get("stream")] = report
        elif row.event in ("acquire", "release", "planned_release", "completed", "trained"):
            counts[row.who] = 0
        elif row.event == "left" and not grants and row.who in books.clusters:
            counts[row.who] += 1
            replicas = max(1, len(books.replicas(row.who)))
            if counts[row.who] > most * replicas:
                most = counts[row.who] / replicas
                times = counted(counts[row.who], "time")
                why = f"{row}: {counted(replicas, 'replica')} of {row.who} fell asleep {times} without progress of {row.who}"
    return Measured(most, why)


# -- operations -------------------------------------------------------------------------------------------------------------


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
    return f"{count} planned releases"


def not_asleep(row: Row, books: Books) -> Iterator[str]:
    if books.active.get(row.who):
        yield f"{row}: replicas {sorted(books.active[row.who])} are still active"
    for _, replica in sorted(pair for pair in books.sleeping | books.waking if pair[0] == row.who):
        yield f"{row}: replica {replica} has not fallen asleep yet (no `shrunk`)"


def admission(ledger: DeskLedger) -> Violations:
    """Does each pipeline start only after the first hand-over of the one before it?"""
    rows = need(ledger, "admitted")
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


def progress_ended(ledger: DeskLedger) -> Violations:
    """Does the desk clamp every progress stream to its target, and does every stream end?"""
    plans = [row for row in need(ledger, "plan") if "demand" in row.ids]
    if not plans:
        raise NotMeasured("no `plan` event has the id `demand`")
    for row, books in ledger.replay():
        if row.event == "plan" and "demand" in row.ids:
            stated = {text.rpartition(":")[0]: int(text.rpartition(":")[2]) for text in str(row["demand"]).split()}
            sums = {name: books.progress(name) for name in books.clusters if books.streams.get(name)}
            counted = {name: target - done for name, (done, target) in sums.items()}
            # No demand may be stated as 0.
            if any(stated.get(name, 0) != counted.get(name, 0) for name in {*stated, *counted} - books.closing):
                yield f"{row} states the demand {stated}; according to the reports it is {counted}"
        elif row.event == "unregister" and books.streams.get(row.who) and row.at not in ledger.refused:
            yield f"{row}: its progress of {', '.join(books.streams[row.who])} has not ended"
    return f"{len(plans)} plans"


def progress_true(ledger: DeskLedger) -> Violations:
    """Does every pipeline report the groups that its loop has and needs, no more?

    A group is there from `ready` until it is trained or ends; a step needs `groups_per_step`, or fewer if groups were lost. In the kit's
    own ledgers the group belongs to one adapter, if there are any, and counts only in the reports of that one.
    """
    need(ledger, "capacity")
    if ledger.of("trained"):
        need(ledger, "ready")
    size = {row.who: row.number("groups_per_step") for row in ledger.of("capacity") if "groups_per_step" in row.ids}
    # The window of adapters is one less than their number. Another system may number its groups in another way.
    own = by_cores(ledger.rows)
    adapters = {row.who: row.number("window") + 1 for row in ledger.of("capacity") if own and "window" in row.ids}

    def streams(name: str) -> Callable[[Id], Iterable[str]]:
        def with_adapter(group: Any) -> Iterable[str]:
            return "training", f"adapter {int(group) // size[name] % adapters[name]}"

        return with_adapter if name in adapters else only_training

    loops = {name: GroupTally(groups, streams(name)) for name, groups in size.items()}
    count = 0
    for row in ledger.rows:
        if row.who not in loops:
            continue
        if row.event == "progress" and is_of_training(row):
            count += 1
            stream = str(row.get("stream", "training")) if row.who in adapters else "training"
            yield from loops[row.who].wrong(row, stream)
        elif row.event == "capacity":  # new ranks may take the place of dead ones, whose last reports come late
            loops[row.who] = GroupTally(size[row.who], streams(row.who))
        else:
            loops[row.who].take(row)
    if not count:
        raise Missing("no pipeline with a `capacity` event has a `progress` event")
    return f"{counted(count, 'report')} of {', '.join(sorted(size))}"


def is_of_training(row: Row) -> bool:
    """Whether a report is about a step that the loop trains, of all weights or of an adapter."""
    stream = str(row.get("stream", "training"))
    return stream == "training" or stream.startswith("adapter ")


# -- requests, replicas and versions across sleep and wake: the pipelines' rows beside the desk's ------------------------------


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
    return f"{count} times a replica fell asleep"


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


def no_deadlock(ledger: DeskLedger) -> Violations:
    """Do the desk and all pipelines end on their own, the live ones without an error?"""
    begun = {str(row["core"]): row for row in ledger.rows if row.event == "begins" and "core" in row.ids}
    if begun:
        ends = {row.who for row in ledger.of("ended")}
    else:  # another system's ledger
        begun = {row.who: row for row in ledger.of("clusters")}
        if not begun:
            raise Missing("the ledger has no `begins` or `clusters` event")
        ends = {row.who for row in need(ledger, "ended", "gone", "unregistered")}
    yield from held_and_waited(ledger)
    broke = [*harmed(ledger)]
    left = [name for name in begun if name not in ends]
    if broke or left:  # beside the first cause stands all that has no answer
        yield "; ".join([*broke[:1], *([never_ended(ledger, left)] if left else [])])
    yield from broke[1:]
    return f"{', '.join(sorted(begun))} ended"


def held_and_waited(ledger: DeskLedger) -> Iterator[str]:
    """Yield a violation per circle of pipelines that hold devices and wait for those of the next one, until a request expires or for
    ever."""
    reported: set[frozenset[str]] = set()
    for row, books, asked in open_requests(ledger):
        if row.event == "expired" or row is ledger.rows[-1]:
            names, words = circle(books, asked.values())
            if names and names not in reported:
                reported.add(names)
                yield f"{row}: deadlock: {words}"


def harmed(ledger: DeskLedger) -> Iterator[str]:
    """Yield a violation per core that ended with an error although it was not stopped: a desk that failed, and then no pipeline that it
    stopped."""
    over = ended_by_others(ledger)
    broke = {row.who: row for row in ledger.of("ended") if row.get("why") == "error" and row.who not in over}
    end = broke.pop(ledger.desk, None)
    if end is not None and not let_down(ledger, end):
        yield failure_of_desk(ledger, end)
        over |= {row.who for row in ledger.of("error") if row.get("of") == ledger.desk}
    yield from (failure_of_pipeline(ledger, row) for name, row in broke.items() if name not in over)


def ended_by_others(ledger: DeskLedger) -> set[str]:
    """Pipelines that died, and those stopped by a desk that devices or the clock had let down."""
    return ledger.dead | {
        row.who for row in ledger.of("error") if row.get("of") == ledger.desk and let_down(ledger, row)
    }


def let_down(ledger: DeskLedger, end: Row) -> bool:
    """Whether the desk had a reason to end with an error: an order that failed, or had no answer for `operation_ms`.

    Its own words are no reason: a planner that raises ends the desk with a sentence too.
    """
    if ledger.limits.get("planner") == ON_PURPOSE:
        return True
    patience = ledger.limit("operation_ms", 60_000) / 1000 * 0.999
    ordered: dict[tuple[str, int], Row] = {}
    for row in itertools.takewhile(lambda row: row.at < end.at, ledger.rows):
        if row.event == "error" and row.get("of") in ("shrink", "after"):
            return True
        if row.event in ("left", "expand"):
            ordered[replica_of(row)] = row
        elif row.event in ("shrunk", "expanded", "died", "error") and "replica" in row.ids:
            ordered.pop(replica_of(row), None)
    return any(end.time - row.time >= patience for row in ordered.values())


def dead_pipeline_leaves(ledger: DeskLedger) -> Violations:
    """Are the devices of a dead pipeline freed in time, and do the other pipelines finish?"""
    limit, slowest = ledger.limit("operation_ms", 60_000) / 1000, 0.0
    deaths: dict[str, tuple[Row, set[int]]] = {}
    left, present = set[str](), set[str]()
    for row, books in ledger.replay():
        name = row.who
        if row.event in ("unregistered", "clusters"):
            present = present - {name} if row.event == "unregistered" else present | {name}
        elif row.event == "died" and "replica" not in row.ids and name in present and name not in deaths:
            deaths[name] = row, devices_of(books, name)
        elif row.event == "gone" and name in deaths and name not in left:
            died, owned = deaths[name]
            left.add(name)
            slowest = max(slowest, row.time - died.time)
            if row.time - died.time > limit:
                yield f"{died}: the desk removed it only {row.time - died.time:.3f} s later (limit {limit:g} s)"
            taken = {at for at, owners in books.owners().items() if owners} - devices_of(books, name)
            if "idle" in row.ids and (kept := sorted(owned - taken - {*numbers(row["idle"])})):
                yield f"{row}: its devices {kept} are not idle"
    if not deaths:
        raise NotMeasured("no pipeline died")
    yield from (f"{died}: the desk never removed it" for name, (died, _) in deaths.items() if name not in left)
    yield from harmed(ledger)
    return f"{', '.join(sorted(deaths))} died; its devices were idle {slowest:.3f} s later"


def devices_of(books: Books, name: str) -> set[int]:
    return {at for at, owners in books.owners().items() if any(owner.endswith(f" of {name}") for owner in owners)}


def dead_replaced(ledger: DeskLedger) -> Violations:
    """Do replicas and pipelines serve again once new ranks have replaced their dead ones?"""
    restarts = [row for row in ledger.of("restarted") if row.get("core") in (None, ledger.desk)]
    if not restarts:
        raise NotMeasured("no dead rank was replaced")
    unused: dict[tuple[str, int], tuple[Row, float]] = {}  # how long a pipeline without replica could have used it
    registers: set[str] = set()
    before: Row | None = None
    for row, books in ledger.replay():
        if before is not None and books.plan is None:
            for (name, replica), (restarted, seconds) in unused.items():
                if name in books.clusters and lacks(books, name, replica):
                    unused[name, replica] = restarted, seconds + row.time - before.time
        before = row
        if row.event == "restarted" and "replica" in row.ids:
            unused[replica_of(row)] = row, 0.0
        elif row.event == "restarted":
            registers.add(row.who)
        elif row.event in ("expand", "died", "clusters"):  # without a replica: of all of the pipeline, gone or new
            ended = {(row.who, row.number("replica", replica)) for _, replica in unused}
            unused = {key: waited for key, waited in unused.items() if key not in ended}
            if row.event == "clusters":
                registers.discard(row.who)
        elif row.event == "error" and row.get("of") == "register" and row.who in registers:
            yield f"{row}: the restarted pipeline was refused: {row.get('why', '')}"
    limit = ledger.limit("watchdog_ms", 0) / 1000
    late = [(restarted, seconds) for restarted, seconds in unused.values() if seconds > limit]
    if late and not limit:
        raise NotMeasured("the ledger has no `limits` event with `watchdog_ms`")
    for restarted, seconds in late:
        yield f"{restarted}: the pipeline had no replica for {seconds:.3f} s although this one could wake (limit {limit:g} s)"
    return f"{len(restarts)} times new ranks replaced dead ones"


def lacks(books: Books, name: str, replica: int) -> bool:
    """Whether a pipeline with work has no replica, and this one could wake."""
    moving = any(who == name for who, _ in books.sleeping | books.waking)
    return (
        has_work(books, name) and not books.active[name] and not moving and books.bundle(name, replica) <= books.idle()
    )


BY_DEMAND = (plan_as_specified, fair_share)  # of the kit's own desk and planner only
RULES = (
    one_owner,
    shrink_before_expand,
    devices_conserved,
    no_request_lost,
    routed_to_awake,
    priority_kept,
    no_starvation,
    plan_valid,
    plan_as_specified,
    fair_share,
    planned_release_once,
    admission,
    progress_ended,
    progress_true,
    drained_before_sleep,
    empty_set_suspends,
    version_after_wake,
    no_deadlock,
    dead_pipeline_leaves,
    dead_replaced,
)
