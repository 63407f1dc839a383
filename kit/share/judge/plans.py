"""The rules of plans: each is feasible, and those of the kit's planners are the specified ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from kit.results.records import Row, numbers, value_in_words
from kit.results.rules import Measured, Missing, NotMeasured, Violations
from kit.results.units import counted
from kit.share.judge.admission import without_held_back
from kit.share.judge.books import LEASES, Books, DeskLedger, cluster_of, need, need_lines, need_plans
from kit.share.judge.devices import gives_devices
from kit.share.judge.specified import SPECIFIED, before_sharing, off_balance, specified


def unplanned(books: Books) -> Iterable[tuple[str, str]]:
    """The clusters whose requests could be granted while no plan is made."""
    return before_sharing(books)[2] if books.plan is None and books.waiting else ()


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
    need_lines(ledger, *LEASES)
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
    need_lines(ledger, *LEASES, "planned_release", "progress", "unregister")
    for row, books in ledger.replay():
        if row.event == "plan":
            need_estimates(ledger, books)
            shrinks, _, expands = map(sorted, specified(without_held_back(ledger, books, row.time), planner))
            differing = [
                sorted({(name, device) for name, _, devices in ops(row, which) for device in devices})
                for which in ("shrinks", "expands")
            ]
            if differing != [shrinks, expands]:
                yield f"{row} shrinks {differing[0]} and expands {differing[1]}; specified: {shrinks} and {expands}"
    yield from not_planned(ledger)
    return f"{len(plans)} plans"


def need_estimates(ledger: DeskLedger, books: Books) -> None:
    """Raise `Missing` if a request to generate waits in another system's ledger, beside no report, and no row may say for how much."""
    asks = [name for name, cluster in books.waiting if cluster == "generation" and not books.streams.get(name)]
    if asks and not ledger.of_cores:
        need(ledger, "queued")


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
    need_lines(ledger, *LEASES, "planned_release", "progress", "unregister")
    count = 0
    for row, books in ledger.turns():
        if books.plan is None and off_balance(books):
            count += 1
            shrinks, _, expands = specified(without_held_back(ledger, books, row.time), planner)
            if shrinks or expands:
                yield f"{row}: shares are unbalanced, and expanding {sorted(expands)} would help"
    return f"{count} times shares were unbalanced but no move would help"


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
