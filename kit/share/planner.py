"""Plans, and the conditions that every plan must satisfy. A cycle plans releases, then requests by precedence, then shares the remaining
devices among the generating pipelines.

A planner decides the last part: it gets a view and calls `shrink` and `expand` on it. `gap-ratio` gives each pipeline devices in proportion
to the remaining work of its step; `home` does too, but lends the devices of pipelines without work, and keeps pipelines off devices on
which others train; `fifo` gives all to the first to arrive; `static` gives each a fixed equal part.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from kit.share.state import GENERATION, NO_CLUSTER, DeskFields, Op, PipelineState, Plan, Request


@dataclass(slots=True)
class Share:
    """One pipeline's generation. `completed` and `target` are its progress; `asks` is the target of its pending request, -1: none.

    `touched`: replicas that this cycle has shrunk or activated, and lost ones; they do not change again. `trains`: the devices that its
    other requests take, such as those for training.
    """

    name: str
    tp: int
    bundles: tuple[frozenset[int], ...]
    active: set[int]
    touched: set[int]
    completed: int = 0
    target: int = 0
    asks: int = -1
    since: int = -1  # its position in order of arrival, -1: neither request nor lease
    trains: frozenset[int] = frozenset()

    @property
    def free(self) -> Iterator[int]:
        return (
            replica
            for replica in range(len(self.bundles))
            if replica not in self.active and replica not in self.touched
        )

    @property
    def remaining(self) -> int:
        """What its reports leave; without a report, twice the estimate of its request, so that a new pipeline starts with enough."""
        return max(self.target - self.completed, 0) if self.target else 2 * max(self.asks, 0)

    @property
    def is_known(self) -> bool:
        """Whether there is progress or an estimate; a pipeline with neither is not considered."""
        return self.target > 0 or self.asks > 0

    @property
    def is_eligible(self) -> bool:
        return self.since >= 0 or bool(self.active)

    @property
    def percent(self) -> float:
        return self.remaining / (self.target or self.asks)


class View:
    """What a planner may read and do. `shares` is in order of registration; `idle` are the devices not given away yet.

    `names` are all expected pipelines, including those that have left or not registered yet.
    """

    def __init__(self, shares: Iterable[Share], idle: Iterable[int], devices: int, names: tuple[str, ...] = ()) -> None:
        self.names = names
        self.shares = {share.name: share for share in shares}
        self.idle = set(idle)
        self.devices = devices
        self.shrunk: list[tuple[str, int]] = []
        self.expanded: list[tuple[str, int]] = []

    def shrink(self, name: str, replica: int) -> None:
        share = self.shares[name]
        share.active.discard(replica)
        share.touched.add(replica)
        self.idle |= share.bundles[replica]
        self.shrunk.append((name, replica))

    def expand(self, name: str, replica: int) -> None:
        share = self.shares[name]
        share.active.add(replica)
        share.touched.add(replica)
        self.idle -= share.bundles[replica]
        self.expanded.append((name, replica))


Planner = Callable[[View], object]


# -- gap-ratio ------------------------------------------------------------------------------------------------------------


class Gaps:
    """Shares of the budget as integers, so equal shares compare equal: everything is multiplied by `weight` x `budget`.

    share = remaining x tp / weight, with the weight summed over eligible pipelines; budget = idle devices and
    active devices of known pipelines; bundles = floor(share x budget / tp + 0.5), at least one;
    gap = share - the current part of the budget.
    """

    def __init__(self, view: View) -> None:
        self.known = [share for share in view.shares.values() if share.is_known]
        self.eligible = [share for share in self.known if share.is_eligible]
        self.weight = sum(share.remaining * share.tp for share in self.eligible)
        self.budget = len(view.idle) + sum(len(share.active) * share.tp for share in self.known)
        self.bundles = {share.name: self.target(share) for share in self.eligible}

    def target(self, share: Share) -> int:
        doubled = 2 * share.remaining * self.budget + self.weight
        return max(1, doubled // (2 * self.weight) if self.weight else 0)

    def gap(self, share: Share) -> int:
        return share.remaining * share.tp * self.budget - len(share.active) * share.tp * self.weight

    def lacks(self, share: Share) -> bool:
        """Without demand a pipeline may keep a replica, and gets none."""
        return share.remaining > 0 and len(share.active) < self.bundles[share.name]

    def order(self, share: Share) -> tuple[float, int, str]:
        """Sort key: largest relative gap (gap / share), then largest gap, then name."""
        relative = len(share.active) / share.remaining  # 1 - relative gap, scaled
        return relative, -self.gap(share), share.name

    def replicas(self, share: Share) -> Sequence[int]:
        """The order in which replicas are tried on idle devices."""
        return range(len(share.bundles))

    def donors_order(self, share: Share, replica: int, percents: list[float]) -> tuple[object, ...]:  # noqa: ARG002 - others look at them
        """Sort key of a replica that needs donors with these parts of work left: those with the largest parts come first."""
        return (sorted([-percent for percent in percents], reverse=True),)


def gap_ratio(view: View) -> None:
    share_by_gaps(view, Gaps(view))


def share_by_gaps(view: View, gaps: Gaps) -> None:
    """Activate replicas one by one, each for the pipeline that lacks most, on idle devices, else on devices of pipelines with too many."""
    waiting = [(gaps.order(share), share.name) for share in gaps.eligible if gaps.lacks(share)]
    heapq.heapify(waiting)
    starts: Counter[str] = Counter()
    while waiting:  # each iteration activates a replica for good or drops a pipeline
        _, name = heapq.heappop(waiting)
        share = view.shares[name]
        replica = idle_replica(view, gaps, share, starts)
        donors: tuple[tuple[str, int], ...] = ()
        if replica < 0:
            replica, donors = from_donors(view, gaps, share)
        if replica < 0:  # none becomes possible later, since only donors free devices
            continue
        for donor in donors:
            view.shrink(*donor)
        view.expand(name, replica)
        if gaps.lacks(share):
            heapq.heappush(waiting, (gaps.order(share), name))
        if any(
            not view.shares[who].bundles[donor] <= share.bundles[replica] for who, donor in donors
        ):  # devices are left over
            starts.clear()


def idle_replica(view: View, gaps: Gaps, share: Share, starts: Counter[str]) -> int:
    """Return the first replica that fits on idle devices, or -1. Those before `starts` fit only if more devices become idle."""
    replicas = gaps.replicas(share)
    for at in range(starts[share.name], len(replicas)):
        replica = replicas[at]
        if share.bundles[replica] <= view.idle and replica not in share.active and replica not in share.touched:
            starts[share.name] = at + 1
            return replica
    starts[share.name] = len(share.bundles)
    return -1


def from_donors(view: View, gaps: Gaps, share: Share) -> tuple[int, tuple[tuple[str, int], ...]]:
    """Return a replica, or -1, and the donors' replicas that must sleep for it: first by the order of donors, then the lowest replica.
    A donor keeps the bundles of its share."""
    spare = {gap.name: left for gap in gaps.eligible if (left := len(gap.active) - gaps.bundles[gap.name]) > 0}
    if not spare:
        return -1, ()
    percent = {name: view.shares[name].percent for name in spare}
    owners = {
        device: (name, replica)
        for name in spare
        for replica in view.shares[name].active
        for device in view.shares[name].bundles[replica]
    }
    owned = {*owners}
    shares = []
    for replica in share.free:
        missing = share.bundles[replica] - view.idle
        if not missing <= owned:
            continue
        donors = sorted({owners[device] for device in missing})
        names = [name for name, _ in donors]
        if all(names.count(name) <= spare[name] for name in {*names}):
            order = gaps.donors_order(share, replica, [percent[name] for name in names])
            shares.append((order, replica, tuple(donors)))
    _, replica, chosen = min(shares, default=((), -1, ()))
    return replica, chosen


# -- home -----------------------------------------------------------------------------------------------------------------


class HomeGaps(Gaps):
    """Without work a pipeline keeps no replica that another one lacks, and gives before others do. A replica wakes where the fewest other
    pipelines train, since it would fall asleep for their steps and start its requests again; then where its own pipeline trains, which
    generates nothing meanwhile."""

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self.trainers = Counter(device for share in view.shares.values() for device in share.trains)
        self.ordered: dict[str, list[int]] = {}

    def target(self, share: Share) -> int:
        return super().target(share) if share.remaining else 0

    def distance(self, share: Share, replica: int) -> tuple[int, bool]:
        bundle = share.bundles[replica]
        own = bundle & share.trains
        return sum(self.trainers[device] for device in bundle) - len(own), not own

    def replicas(self, share: Share) -> Sequence[int]:
        if share.name not in self.ordered:
            self.ordered[share.name] = sorted(
                super().replicas(share), key=lambda replica: self.distance(share, replica)
            )
        return self.ordered[share.name]

    def donors_order(self, share: Share, replica: int, percents: list[float]) -> tuple[object, ...]:
        return any(percents), self.distance(share, replica), *super().donors_order(share, replica, percents)


def home(view: View) -> None:
    share_by_gaps(view, HomeGaps(view))


# -- others ---------------------------------------------------------------------------------------------------------------


def fifo(view: View) -> None:
    """The first to arrive gets every replica that fits on idle devices and keeps them."""
    for share in sorted(view.shares.values(), key=lambda one: one.since):
        if share.since >= 0:
            for replica in list(share.free):
                if share.bundles[replica] <= view.idle:
                    view.expand(share.name, replica)


def static(view: View) -> None:
    """Split the devices into equal parts, one per expected pipeline. A pipeline never generates outside its part, even if others leave."""
    count, parts = len(view.names), {}
    for share in view.shares.values():
        at = view.names.index(share.name)
        parts[share.name] = set(range(at * view.devices // count, (at + 1) * view.devices // count))
        for replica in sorted(share.active):
            if not share.bundles[replica] <= parts[share.name]:
                view.shrink(share.name, replica)
    for share in view.shares.values():
        for replica in list(share.free) if share.since >= 0 else ():
            if share.bundles[replica] <= parts[share.name] & view.idle:
                view.expand(share.name, replica)


PLANNERS: dict[str, Planner] = {"gap-ratio": gap_ratio, "home": home, "fifo": fifo, "static": static}


# -- a cycle --------------------------------------------------------------------------------------------------------------


def make_plan(f: DeskFields, planner: Planner, devices: int, names: tuple[str, ...] = ()) -> Plan:
    removes = tuple(
        sorted((name, GENERATION) for name, pipeline in f.pipelines.items() if pipeline.leaving and f.active(name))
    )
    supply = Supply(f)
    wanted = sorted((request for request in f.requests if not request.held), key=lambda one: one.precedence)
    grants = tuple(
        Op(request.pipeline, request.cluster, (), supply.needs(request))
        for request in wanted
        if request.kind != GENERATION and supply.meets(request)
    )
    view = View((share_of(f, name, supply.shrunk) for name in f.pipelines), supply.idle, devices, names)
    planner(view)
    expands = tuple(
        replace(op, devices=frozenset().union(*(supply.bundles[op.pipeline][replica] for replica in op.replicas)))
        for op in merged(view.expanded)
    )
    return Plan(merged([*supply.shrunk, *view.shrunk]), grants, expands, removes)


def merged(moves: list[tuple[str, int]]) -> tuple[Op, ...]:
    replicas: dict[str, list[int]] = {}
    for name, replica in moves:
        replicas.setdefault(name, []).append(replica)
    return tuple(Op(name, GENERATION, tuple(moved)) for name, moved in sorted(replicas.items()))


class Supply:
    """The devices that a plan can give to requests other than generation: idle ones and those of the replicas that it shrinks."""

    def __init__(self, f: DeskFields) -> None:
        self.f = f
        self.bundles = {name: pipeline.generation.bundles for name, pipeline in f.pipelines.items()}
        self.idle = set(f.idle)
        self.kept: set[int] = set()
        self.owners = {
            device: (name, replica)
            for name, bundles in self.bundles.items()
            for replica in f.active(name)
            for device in bundles[replica]
        }
        self.shrunk: list[tuple[str, int]] = []
        for name, pipeline in f.pipelines.items():
            for replica in sorted(f.active(name)):
                if pipeline.leaving or replica in pipeline.out:  # a planned release, or a resize
                    self.shrink(name, replica)

    def shrink(self, name: str, replica: int) -> None:
        self.shrunk.append((name, replica))
        for device in self.bundles[name][replica]:
            self.idle.add(device)
            del self.owners[device]

    def needs(self, request: Request) -> frozenset[int]:
        return frozenset(self.f.pipelines[request.pipeline].clusters[request.cluster].devices)

    def meets(self, request: Request) -> bool:
        """Grant all of the devices or none: replicas sleep for a request only if that frees enough devices.

        If it does not, later requests must not take its devices, except requests of pipelines that already hold some; these finish first.
        """
        devices = self.needs(request)
        missing = devices - self.idle
        holds = any(name == request.pipeline and lease.kind != GENERATION for (name, _), lease in self.f.leases.items())
        if (devices & self.kept and not holds) or not missing <= self.owners.keys():
            self.kept |= devices
            return False
        for name, replica in sorted({self.owners[device] for device in missing}):
            self.shrink(name, replica)
        self.idle -= devices
        return True


def share_of(f: DeskFields, name: str, shrunk: list[tuple[str, int]]) -> Share:
    pipeline, request, lease = f.pipelines[name], f.waits(name, GENERATION), f.leases.get((name, GENERATION))
    request = request if request is not None and request.kind == GENERATION else None
    since = -1 if pipeline.leaving else lease.since if lease is not None else -1 if request is None else request.number
    done, target = pipeline.progress
    touched = {replica for who, replica in shrunk if who == name}
    active = f.active(name) - touched
    lost = pipeline.out | pipeline.dead
    if since < 0 or (lease is not None and lease.kind != GENERATION):  # no replica may start
        lost = frozenset(range(len(pipeline.generation.bundles))) - active
    asks = -1 if request is None else request.target
    return Share(
        name,
        pipeline.generation.tp,
        pipeline.generation.bundles,
        set(active),
        touched | lost,
        done,
        target,
        asks,
        since,
        frozenset().union(*(cluster.devices for name, cluster in pipeline.clusters.items() if name != GENERATION)),
    )


def is_off_balance(f: DeskFields) -> bool:
    """Whether a pipeline with demand has no replica; or, if none waits, whether the half that has completed least has a share of
    the devices that differs from its share of the demand by more than 10 points.
    """
    waits = [request for request in f.requests if not request.held]
    if any(request.kind == GENERATION for request in waits):
        return True
    rows = []
    for (name, cluster), lease in f.leases.items():
        if cluster != GENERATION or lease.kind != GENERATION:
            continue
        done, target = f.pipelines[name].progress
        if target > done and not lease.active and not f.under_way(name):
            return True
        tp = f.pipelines[name].generation.tp
        rows.append((done / target if target else 0.0, name, (target - done) * tp, len(lease.active) * tp))
    if len(rows) < 2 or waits:
        return False
    demand, devices = sum(row[2] for row in rows), sum(row[3] for row in rows)
    worse = sorted(rows)[: (len(rows) + 1) // 2]
    off = abs(sum(row[2] for row in worse) * devices - sum(row[3] for row in worse) * demand)
    return bool(10 * off > demand * devices)


# -- validation -----------------------------------------------------------------------------------------------------------


def violations(f: DeskFields, plan: Plan, devices: int) -> list[str]:
    """Return the violated conditions of a plan, tried on a copy before execution: sentences that start with the condition's number."""
    return [*wrong_form(f, plan), *wrong_steps(f, plan, devices)]


def wrong_form(f: DeskFields, plan: Plan) -> Iterator[str]:
    for name in ("shrinks", "grants", "expands"):
        counts = Counter((op.pipeline, op.cluster) for op in getattr(plan, name))
        for (pipeline, cluster), count in counts.items():
            if count > 1:
                yield f"1: {pipeline}.{cluster} is {count} times in the {name}"
    for op in (*plan.shrinks, *plan.expands):
        if op.cluster != GENERATION:
            yield f"2: {op} moves replicas of a cluster that is not for generation"
    granted = {(op.pipeline, op.cluster) for op in (*plan.grants, *plan.expands)}
    for pipeline, cluster in plan.removes:
        if (pipeline, cluster) in granted:
            yield f"3: {pipeline}.{cluster} is both given devices and removed"
        if (pipeline, cluster) not in f.leases:
            yield f"11: {pipeline}.{cluster} is removed but has no lease"


def wrong_steps(f: DeskFields, plan: Plan, devices: int) -> Iterator[str]:
    """Execute the plan on a copy of the state and yield the violations."""
    idle, freed = set(f.idle), set[int]()
    active = {name: set(f.active(name)) for name in f.pipelines}
    bundles = {name: pipeline.generation.bundles for name, pipeline in f.pipelines.items()}
    held = Counter(device for lease in f.leases.values() for device in lease.devices)
    held.update(device for name in active for replica in active[name] for device in bundles[name][replica])
    yield from unbalanced("before", idle, held, devices)
    for op in plan.shrinks:
        for replica in op.replicas:
            if replica not in active.get(op.pipeline, ()):
                yield f"5: {op} shrinks replica {replica}, which is not active"
                continue
            bundle = bundles[op.pipeline][replica]
            if again := sorted(bundle & freed):
                yield f"9: {op} frees the devices {again} a second time"
            active[op.pipeline].discard(replica)
            freed |= bundle
            idle |= bundle
            held.subtract(bundle)
    yield from unbalanced("after the shrinks", idle, held, devices)
    for op in plan.grants:
        yield from taken(f, op, idle, held)
    for op in plan.expands:
        known, there = bundles.get(op.pipeline, ()), active.setdefault(op.pipeline, set())
        if outside := [replica for replica in op.replicas if not 0 <= replica < len(known)]:
            yield f"6: {op} expands the replicas {outside}; the mapping has {len(known)}"
            continue
        if op.devices != frozenset().union(*(known[replica] for replica in op.replicas)):
            yield f"6: {op} takes the devices {sorted(op.devices)}, which are not its replicas' whole bundles"
        if len(there) + len(op.replicas) > len(known):
            yield f"7: {op} makes {len(there) + len(op.replicas)} active replicas of {len(known)}"
        lost = f.pipelines[op.pipeline].out | f.pipelines[op.pipeline].dead
        if any(replica in there | lost for replica in op.replicas) or len({*op.replicas}) < len(op.replicas):
            yield f"5: {op} expands a replica that is active, removed or dead"
        there.update(op.replicas)
        yield from taken(f, op, idle, held)
    yield from unbalanced("at the end", idle, held, devices)


def taken(f: DeskFields, op: Op, idle: set[int], held: Counter[int]) -> Iterator[str]:
    pipeline: PipelineState | None = f.pipelines.get(op.pipeline)
    mapping = NO_CLUSTER if pipeline is None else pipeline.clusters.get(op.cluster, NO_CLUSTER)
    if outside := sorted(op.devices - {*mapping.devices}):
        yield f"6: {op} takes the devices {outside}, which are outside its mapping"
    if missing := sorted(op.devices - idle):
        yield f"10: {op} takes the devices {missing}, which are not idle"
    idle -= op.devices
    held.update(op.devices)


def unbalanced(when: str, idle: set[int], held: Counter[int], devices: int) -> Iterator[str]:
    if held_twice := sorted(device for device in idle if held[device] > 0):
        yield f"4: {when}, the devices {held_twice} are idle and allocated"
    if twice := sorted(device for device in held if held[device] > 1):
        yield f"10: {when}, the devices {twice} are allocated twice"
    if odd := sorted((idle | {device for device in held if held[device] > 0}) ^ {*range(devices)}):
        yield f"8: {when}, the devices {odd} are neither idle nor allocated, or are none of the desk's"
