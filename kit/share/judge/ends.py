"""The rules of ends: nobody waits for ever, and the dead leave and are replaced."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kit.results.records import Row, numbers
from kit.results.rules import Missing, NotMeasured, Violations
from kit.share.judge.books import ON_PURPOSE, Books, DeskLedger, need, need_lines, replica_of
from kit.share.judge.demand import lacks
from kit.share.judge.stuck import circle, failure_of_desk, failure_of_pipeline, never_ended, open_requests


def no_deadlock(ledger: DeskLedger) -> Violations:
    """Do the desk and all pipelines end on their own, the live ones without an error?"""
    begun = {str(row["core"]): row for row in ledger.rows if row.event == "begins" and "core" in row.ids}
    if begun and (ledger.of_cores or ledger.of("ended")):
        ends = {row.who for row in ledger.of("ended")}
    else:  # another system's ledger; of its desk no other row than `ended` shows that it ended
        begun = {name: row for name, row in begun.items() if name != ledger.desk} or {
            row.who: row for row in ledger.of("clusters")
        }
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
    need_lines(ledger, "limits", "expand")
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
