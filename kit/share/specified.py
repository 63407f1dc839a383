"""The planner once more, straight from its specification and without a thought of speed. The judge compares every plan with it."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor
from typing import TYPE_CHECKING, NamedTuple

from kit.share.books import ORDER

if TYPE_CHECKING:
    from kit.share.books import Books


class Specified(NamedTuple):
    shrinks: set[tuple[str, int]]
    grants: list[tuple[str, str]]
    expands: set[tuple[str, int]]


def specified(books: Books) -> Specified:
    """Planned releases, requests by priority and arrival, then shares of what is left."""
    books = books.copy()
    shrinks, grants, idle = before_sharing(books)
    return Specified(shrinks, grants, share_out(books, idle, shrinks))


def grants_due(books: Books) -> list[tuple[str, str]]:
    """The requests other than generation that can be met now."""
    return before_sharing(books.copy())[1]


def before_sharing(books: Books) -> tuple[set[tuple[str, int]], list[tuple[str, str]], set[int]]:
    """What shrinks, what is granted and what is idle then; `books` change with it."""
    idle, shrinks, grants = books.idle(), set[tuple[str, int]](), list[tuple[str, str]]()

    def shrink(name: str, replica: int) -> None:
        books.active[name].discard(replica)
        shrinks.add((name, replica))
        idle.update(books.bundle(name, replica))

    for name in books.clusters:
        for replica in sorted(books.active[name]):
            if name in books.leaving or (name, replica) in books.out:
                shrink(name, replica)
    kept: set[int] = set()
    for (name, cluster), waits in sorted(books.waiting.items(), key=lambda one: (ORDER.index(one[1][0]), one[1][1])):
        if waits[0] == "generation":
            continue
        wanted = set(books.clusters[name][cluster])
        victims = [
            (who, one) for who, some in books.active.items() for one in some if books.bundle(who, one) & (wanted - idle)
        ]
        covered = idle.union(*(books.bundle(*victim) for victim in victims))
        if not wanted <= covered or (wanted & kept and not any(who == name for who, _ in books.held)):
            kept |= wanted
            continue
        for victim in victims:
            shrink(*victim)
        idle -= wanted
        grants.append((name, cluster))
    return shrinks, grants, idle


def share_out(books: Books, idle: set[int], shrinks: set[tuple[str, int]]) -> set[tuple[str, int]]:
    """Activates one replica after the other for the pipeline that lacks most; returns them, and adds donors' replicas to `shrinks`."""
    touched, expands = {*shrinks}, set[tuple[str, int]]()
    asks = {name: waits[2] for (name, cluster), waits in books.waiting.items() if waits[0] == "generation" == cluster}
    target = {name: books.progress(name)[1] for name in books.clusters}
    left = {name: max(target[name] - books.progress(name)[0], 0) + asks.get(name, 0) for name in target}
    known = [name for name in target if target[name] > 0 or asks.get(name, 0) > 0]
    eligible = [
        name
        for name in known
        if name not in books.leaving and (name in asks or name in books.generating or books.active[name])
    ]
    weight = sum(left[name] * books.tp[name] for name in eligible)
    budget = len(idle) + sum(len(books.active[name]) * books.tp[name] for name in known)
    if not budget:
        return expands
    share = {
        name: Fraction(left[name] * books.tp[name], weight) if weight and name in eligible else Fraction(0)
        for name in known
    }
    bundles = {name: max(1, floor(share[name] * budget / books.tp[name] + Fraction(1, 2))) for name in eligible}

    def gap(name: str) -> Fraction:
        return share[name] - Fraction(len(books.active[name]) * books.tp[name], budget)

    def relative(name: str) -> Fraction:
        return gap(name) / share[name] if share[name] else Fraction(-(10**9))

    def percent(name: str) -> Fraction:
        return Fraction(left[name], target[name] or asks[name])

    def activate(name: str) -> bool:
        options = []
        busy = {device for (who, cluster) in books.held for device in books.clusters[who][cluster]}
        for replica in books.replicas(name):
            one = name, replica
            bundle = books.bundle(*one)
            if replica in books.active[name] or one in touched | books.dead | books.out or bundle & busy:
                continue
            if (name, "generation") in books.held:
                continue
            donors = [
                (who, other)
                for who in known
                for other in sorted(books.active[who])
                if (who, other) not in touched and gap(who) < 0 and books.bundle(who, other) & (bundle - idle)
            ]
            counts = {who: sum(other[0] == who for other in donors) for who, _ in donors}
            spare = all(len(books.active[who]) - count >= bundles.get(who, 0) for who, count in counts.items())
            if spare and bundle <= idle.union(*(books.bundle(*donor) for donor in donors)):
                options.append(
                    (bool(donors), [-one for one in sorted(percent(who) for who, _ in donors)], replica, donors)
                )
        if not options:
            return False
        _, _, replica, donors = min(options, key=lambda option: option[:3])
        for who, other in donors:
            books.active[who].discard(other)
            shrinks.add((who, other))
            touched.add((who, other))
            idle.update(books.bundle(who, other))
        idle.difference_update(books.bundle(name, replica))
        books.active[name].add(replica)
        touched.add((name, replica))
        expands.add((name, replica))
        return True

    while True:
        acceptors = [name for name in eligible if len(books.active[name]) < bundles[name]]
        acceptors.sort(key=lambda name: (-relative(name), -gap(name), name))
        if not any(activate(name) for name in acceptors):
            return expands


def off_balance(books: Books) -> bool:
    """Whether somebody with demand has no replica; or, where nobody waits, whether shares are more than 10 points off."""
    if any(kind == "generation" for kind, *_ in books.waiting.values()):
        return True
    rows = []
    moving = {name for name, _ in books.sleeping | books.waking}
    for name in sorted(books.generating - books.leaving):
        done, target = books.progress(name)
        if target > done and not books.active[name] and name not in moving:
            return True
        tp = books.tp[name]
        rows.append(
            (
                Fraction(done, target) if target else Fraction(0),
                name,
                (target - done) * tp,
                len(books.active[name]) * tp,
            )
        )
    demand, devices = sum(row[2] for row in rows), sum(row[3] for row in rows)
    if len(rows) < 2 or books.waiting or not demand or not devices:
        return False
    worse = sorted(rows)[: ceil(len(rows) / 2)]
    off = Fraction(sum(row[2] for row in worse), demand) - Fraction(sum(row[3] for row in worse), devices)
    return abs(off) > Fraction(1, 10)
