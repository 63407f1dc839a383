"""What every plan must keep, tried on a copy before anything is carried out. Each violation is a sentence with its condition's number."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kit.share.state import GENERATION, NO_CLUSTER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.share.state import Cluster, Fields, Op, Plan


def violations(f: Fields, plan: Plan, devices: int) -> list[str]:
    return [*_of_form(f, plan), *_Copy(f, devices).carry_out(plan)]


def _of_form(f: Fields, plan: Plan) -> Iterator[str]:
    lists = {"shrinks": plan.shrinks, "grants": plan.grants, "expands": plan.expands}
    for name, ops in lists.items():
        counts = Counter((op.pipeline, op.cluster) for op in ops)
        yield from (
            f"1: {key[0]}.{key[1]} is {count} times in the {name}" for key, count in counts.items() if count > 1
        )
    for op in (*plan.shrinks, *plan.expands):
        if op.cluster != GENERATION:
            yield f"2: {op} moves replicas of a cluster that does not generate"
    given = {(op.pipeline, op.cluster) for op in (*plan.grants, *plan.expands)}
    yield from (f"3: {name}.{cluster} is given devices and removed" for name, cluster in given & {*plan.removes})
    yield from (
        f"11: {name}.{cluster} is removed, and has no lease"
        for name, cluster in plan.removes
        if (name, cluster) not in f.leases
    )


class _Copy:
    """The devices of a state, to try a plan on."""

    def __init__(self, f: Fields, devices: int) -> None:
        self.f = f
        self.universe = set(range(devices))
        self.idle = set(f.idle)
        self.freed: set[int] = set()
        self.active = {name: set(f.active(name)) for name in f.pipelines}
        self.held: Counter[int] = Counter()
        for (name, cluster), lease in f.leases.items():
            bundles = self.cluster(name, cluster).bundles
            self.held.update([*lease.devices, *(device for one in lease.active for device in bundles[one])])

    def cluster(self, name: str, cluster: str) -> Cluster:
        one = self.f.pipelines.get(name)
        found: Cluster = NO_CLUSTER if one is None else one.clusters.get(cluster, NO_CLUSTER)
        return found

    def carry_out(self, plan: Plan) -> Iterator[str]:
        yield from self.balance("before")
        for op in plan.shrinks:
            yield from self.shrink(op)
        yield from self.balance("after the shrinks")
        for op in plan.grants:
            yield from self.take(op, op.devices)
        for op in plan.expands:
            yield from self.expand(op)
        yield from self.balance("at the end")

    def balance(self, when: str) -> Iterator[str]:
        held = {device for device, count in self.held.items() if count > 0}
        if both := sorted(self.idle & held):
            yield f"4: {when}, the devices {both} are idle and allocated"
        if twice := sorted(device for device in held if self.held[device] > 1):
            yield f"10: {when}, the devices {twice} are allocated twice"
        if odd := sorted((self.idle | held) ^ self.universe):
            yield f"8: {when}, the devices {odd} are neither idle nor allocated, or are none of the desk's"

    def shrink(self, op: Op) -> Iterator[str]:
        bundles = self.cluster(op.pipeline, GENERATION).bundles
        for replica in op.replicas:
            if replica not in self.active.get(op.pipeline, ()):
                yield f"5: {op} shrinks replica {replica}, which is not active"
                continue
            self.active[op.pipeline].discard(replica)
            bundle = bundles[replica]
            if again := sorted(bundle & self.freed):
                yield f"9: {op} frees the devices {again} a second time"
            self.freed |= bundle
            self.held.subtract(bundle)
            self.idle |= bundle

    def expand(self, op: Op) -> Iterator[str]:
        bundles = self.cluster(op.pipeline, GENERATION).bundles
        there = self.active.setdefault(op.pipeline, set())
        outside = [replica for replica in op.replicas if not 0 <= replica < len(bundles)]
        if outside:
            yield f"6: {op} expands the replicas {outside}; the mapping has {len(bundles)}"
            return
        if op.devices != frozenset().union(*(bundles[replica] for replica in op.replicas)):
            yield f"6: {op} takes the devices {sorted(op.devices)}, which are not its replicas' whole bundles"
        if len(there) + len(op.replicas) > len(bundles):
            yield f"7: {op} makes {len(there) + len(op.replicas)} active replicas of {len(bundles)}"
        one = self.f.pipelines[op.pipeline]
        for replica in op.replicas:
            if replica in there | one.out | one.dead:
                yield f"5: {op} expands replica {replica}, which is active, removed or dead"
            there.add(replica)
        yield from self.take(op, op.devices)

    def take(self, op: Op, devices: frozenset[int]) -> Iterator[str]:
        if outside := sorted(devices - self.cluster(op.pipeline, op.cluster).all):
            yield f"6: {op} takes the devices {outside}, which are outside its mapping"
        if missing := sorted(devices - self.idle):
            yield f"10: {op} takes the devices {missing}, which are not idle"
        self.idle -= devices
        self.held.update(devices)
