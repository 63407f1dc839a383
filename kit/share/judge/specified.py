"""A second planner, written from the specification: every plan of the kit's desk is compared with it."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import ceil
from typing import NamedTuple

from kit.share.judge.books import Books

SPECIFIED = ("gap-ratio", "home")  # planners


def specified(
    books: Books, planner: str = "gap-ratio"
) -> tuple[set[tuple[str, int]], list[tuple[str, str]], set[tuple[str, int]]]:
    """Plan the shrinks, grants and expands: releases, then requests by priority and arrival, then shares of the remaining devices."""
    books, shrinks, grants, idle = before_sharing(books)
    return shrinks, grants, share_out(books, idle, shrinks, lends=planner == "home")


def before_sharing(books: Books) -> tuple[Books, set[tuple[str, int]], list[tuple[str, str]], set[int]]:
    """Plan all but the sharing; return a copy of the books after it, the shrinks, the grants except generation, and the idle devices."""
    books = replace(books, active={name: {*replicas} for name, replicas in books.active.items()})
    idle, shrinks, grants = books.idle(), set[tuple[str, int]](), list[tuple[str, str]]()

    def shrink(name: str, replica: int) -> None:
        books.active[name].discard(replica)
        shrinks.add((name, replica))
        idle.update(books.bundle(name, replica))

    for name, replica in books.awake():
        if name in books.leaving or (name, replica) in books.out:
            shrink(name, replica)
    kept: set[int] = set()
    for (name, cluster), request in sorted(books.waiting.items(), key=lambda waiting: waiting[1].precedence):
        if request.kind == "generation":
            continue
        wanted = set(books.clusters[name][cluster])
        victims = [replica for replica in books.awake() if books.bundle(*replica) & (wanted - idle)]
        covered = idle.union(*(books.bundle(*victim) for victim in victims))
        if not wanted <= covered or (wanted & kept and not any(who == name for who, _ in books.held)):
            kept |= wanted
            continue
        for victim in victims:
            shrink(*victim)
        idle -= wanted
        grants.append((name, cluster))
    return books, shrinks, grants, idle


class Shares(NamedTuple):
    """What the pipelines with demand may have of the devices. A share is `parts` of all parts, which gaps are counted in too: whole
    numbers. `bundles` are the replicas that an eligible pipeline is to have."""

    left: dict[str, int]  # groups, of every pipeline
    whole: dict[str, int]  # groups of the step, or of its estimate
    parts: dict[str, int]  # of every pipeline that has told its demand
    weight: int
    budget: int
    bundles: dict[str, int]

    def gap(self, books: Books, name: str) -> int:
        return self.parts[name] * self.budget - len(books.active[name]) * books.tp[name] * self.weight


def shares_of(books: Books, idle: set[int], *, lends: bool) -> Shares:
    asks = {
        name: request.target
        for (name, cluster), request in books.waiting.items()
        if request.kind == "generation" == cluster
    }
    target = {name: books.progress(name)[1] for name in books.clusters}
    left = {
        name: max(target[name] - books.progress(name)[0], 0) if target[name] else 2 * asks.get(name, 0)
        for name in target
    }
    known = [name for name in target if target[name] > 0 or asks.get(name, 0) > 0]
    eligible = [
        name
        for name in known
        if name not in books.leaving and (name in asks or name in books.generating or books.active[name])
    ]
    parts = {name: left[name] * books.tp[name] if name in eligible else 0 for name in known}
    weight = sum(parts.values()) or 1
    budget = len(idle) + sum(len(books.active[name]) * books.tp[name] for name in known)
    bundles = {
        name: 0 if lends and not left[name] else max(1, (2 * left[name] * budget + weight) // (2 * weight))
        for name in eligible
    }
    return Shares(left, {name: target[name] or asks.get(name, 0) for name in target}, parts, weight, budget, bundles)


def share_out(books: Books, idle: set[int], shrinks: set[tuple[str, int]], *, lends: bool) -> set[tuple[str, int]]:
    """Activate replicas one by one for the pipeline that lacks most; return them, and add donors' replicas to `shrinks`.

    `lends`: a pipeline without work keeps no last replica, donors without work come first, and replicas are chosen by `trained_on`.
    """
    touched, expands = {*shrinks}, set[tuple[str, int]]()
    shares = shares_of(books, idle, lends=lends)

    def activate(name: str) -> bool:
        options = []
        busy = {device for (who, cluster) in books.held for device in books.clusters[who][cluster]}
        for replica in books.replicas(name):
            bundle = books.bundle(name, replica)
            lost = (name, replica) in touched | books.dead | books.out or (name, "generation") in books.held
            if replica in books.active[name] or lost or bundle & busy:
                continue
            donors = [
                (who, donor)
                for who in shares.parts
                for donor in sorted(books.active[who])
                if (who, donor) not in touched
                and shares.gap(books, who) < 0
                and books.bundle(who, donor) & (bundle - idle)
            ]
            counts = {who: sum(donor[0] == who for donor in donors) for who, _ in donors}
            spare = all(len(books.active[who]) - count >= shares.bundles.get(who, 0) for who, count in counts.items())
            if spare and bundle <= idle.union(*(books.bundle(*donor) for donor in donors)):
                percents = sorted(Fraction(shares.left[who], shares.whole[who]) for who, _ in donors)
                place = (max(percents, default=0) > 0, *trained_on(books, name, bundle)) if lends else ()
                options.append((bool(donors), place, [-percent for percent in percents], replica, donors))
        if not options:
            return False
        *_, replica, donors = min(options, key=lambda option: option[:4])
        for who, donor in donors:
            books.active[who].discard(donor)
            shrinks.add((who, donor))
            touched.add((who, donor))
            idle.update(books.bundle(who, donor))
        idle.difference_update(books.bundle(name, replica))
        books.active[name].add(replica)
        touched.add((name, replica))
        expands.add((name, replica))
        return True

    def lack(name: str) -> tuple[Fraction, int, str]:
        gap = shares.gap(books, name)
        return Fraction(-gap, shares.parts[name]), -gap, name

    while shares.budget:
        acceptors = [
            name
            for name, most in shares.bundles.items()
            if shares.gap(books, name) > 0 and len(books.active[name]) < most
        ]
        if not any(activate(name) for name in sorted(acceptors, key=lack)):
            break
    return expands


def trained_on(books: Books, name: str, bundle: frozenset[int]) -> tuple[int, int]:
    """How often a device of a bundle is one on which another pipeline trains; and 0 if the pipeline itself trains on one, else 1."""
    used = {
        who: {device for cluster, devices in clusters.items() if cluster != "generation" for device in devices}
        for who, clusters in books.clusters.items()
    }
    others = sum(len(devices & bundle) for who, devices in used.items() if who != name)
    return others, 0 if used[name] & bundle else 1


def off_balance(books: Books) -> bool:
    """Whether a pipeline with demand has no replica, or, if none waits, whether shares are more than 10 points off."""
    if any(request.kind == "generation" for request in books.waiting.values()):
        return True
    rows = []
    moving = {name for name, _ in books.sleeping | books.waking}
    for name in sorted(books.generating - books.leaving):
        done, target = books.progress(name)
        if target > done and not books.active[name] and name not in moving:
            return True
        tp = books.tp[name]
        rows.append((done, target, name, (target - done) * tp, len(books.active[name]) * tp))
    demand, devices = sum(row[3] for row in rows), sum(row[4] for row in rows)
    if len(rows) < 2 or books.waiting or not demand or not devices:
        return False
    rows.sort(key=lambda row: (Fraction(row[0], row[1] or 1), *row[2:]))
    worse = rows[: ceil(len(rows) / 2)]
    off = Fraction(sum(row[3] for row in worse), demand) - Fraction(sum(row[4] for row in worse), devices)
    return abs(off) > Fraction(1, 10)
