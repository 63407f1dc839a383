"""The rules of devices: each has one owner, is freed before it is given away, and is idle or owned."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kit.results.records import Row, numbers
from kit.results.rules import NotMeasured, Violations
from kit.results.units import counted
from kit.share.judge.books import LEASES, ORDER, RUNS_ON, TRAINER_CALLS, Books, DeskLedger, cluster_of, need, need_lines
from kit.share.judge.stuck import listed_values


def gives_devices(row: Row, books: Books) -> bool:
    """Whether a replica is ordered to wake or a cluster is granted. A repeated grant does not count."""
    if row.event == "granted":
        return bool(row["kind"] != "generation" and (row.who, cluster_of(row)) not in books.held)
    return row.event == "expand"


def one_owner(ledger: DeskLedger) -> Violations:
    """Does every device have at most one owner at a time, according to leases and observers?"""
    need(ledger, "expand", "granted")
    yield from held_twice(ledger)
    need_lines(ledger, "release")
    devices, count = ledger.limit("devices", 0), 0
    for row, books in ledger.replay():
        if row.event == "granted" and row.get("kind") not in (None, *ORDER):
            yield f"{row}: there is no kind {row['kind']!r} of work; the kinds are {', '.join(ORDER)}"
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
    yield from released_early(ledger)
    return f"devices were assigned {count} times; number of devices: {devices}"


def held_twice(ledger: DeskLedger) -> Iterator[str]:
    """Yield a violation per device that one takes before another has freed it, as observers saw it."""
    seen: dict[int, str] = {}
    for row in ledger.of("taken", "freed", "died", "gone"):
        if row.event == "taken":
            if seen.get(row["device"], row.who) != row.who:
                yield f"{row}: device {row['device']} is still held by {seen[row['device']]}"
            seen[row["device"]] = row.who
        elif row.event == "freed":
            if seen.get(row["device"]) == row.who:
                del seen[row["device"]]
        else:
            seen = {device: name for device, name in seen.items() if name != row.who}


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
    need_lines(ledger, *LEASES)
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
