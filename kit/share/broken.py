"""The faults of the desk: rules with one bug each, and for each a small run on simulated devices that exposes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

from kit.loop.messages import Command, Event, Map
from kit.loop.runner import VirtualClock
from kit.share import core
from kit.share.core import Scheduler
from kit.share.planner import Gaps, Share, Supply, View
from kit.share.simulated import Devices, Script, Simulation, simulate
from kit.share.state import GENERATION, PRIORITY, Op, Request, Settings, Turn

Line = tuple[int, str, dict[str, int | str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Scripted pipelines: the clusters that they register, and their requests with times (ms)."""

    lines: Mapping[str, tuple[Line, ...]]
    clusters: Mapping[str, dict[str, int | str]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    planner: Callable[[View], object] | None = None
    until_s: float = 10.0

    def run(self) -> Simulation:
        clock = VirtualClock()
        settings = {"devices": 2, "admission_ms": 0, "request_ms": 3000, "watchdog_ms": 500, **self.settings}
        cores: dict[str, Any] = {name: Script(name, *self.script(name)) for name in self.clusters}
        cores["desk"] = Scheduler(Settings(pipelines=tuple(self.clusters), **settings), planner=self.planner)
        return simulate(cores, {}, clock, Devices(clock, {}), until_s=self.until_s)

    def script(self, name: str) -> Iterator[Line]:
        yield 0, "register", self.clusters[name]
        yield 1, "admit", {}
        yield from self.lines[name]
        leaves = int(self.until_s * 1000) - 1000
        yield leaves, "progress_end", {}
        yield leaves, "unregister", {}
        yield leaves + 900, "ended", {}


def generates(at: int, target: int = 10) -> tuple[Line, ...]:
    return (at, "progress", {"completed": 0, "target": target}), (at, "acquire", {"kind": GENERATION})


def trains(at: int, until: int, kind: str = "training") -> tuple[Line, ...]:
    return (at, "acquire", {"kind": kind}), (until, "release", {"kind": kind})


ALL: dict[str, int | str] = {"trainer": "0", "generation": "0,1,2,3"}
CROWD = Scenario(
    lines={
        "a": (*generates(5), *trains(200, 1000)),
        "b": (*generates(6), *trains(202, 1500, "logprobs")),
        "c": (*generates(7), *trains(203, 1400)),
        "d": (*generates(8), *trains(204, 1600)),
    },
    clusters=dict.fromkeys("abcd", ALL),
    settings={"devices": 4},
)
PAIR = Scenario(
    lines={"a": (*generates(5), *trains(200, 600)), "b": (*generates(50), *trains(250, 700))},
    clusters={"a": {"trainer": "0", "generation": "0,1"}, "b": {"trainer": "1", "generation": "0,1"}},
)
DEATH = replace(PAIR, lines={**PAIR.lines, "a": (*generates(5), *trains(200, 900), (400, "died", {"who": "a"}))})
SMALL_DEMAND = replace(
    PAIR,
    lines={"a": generates(5, 1000), "b": generates(50, 1)},
    clusters={"a": {"generation": "0"}, "b": {"generation": "0,1"}},
)
WIDE_CLUSTER: dict[str, int | str] = {"generation": "0,1,2,3,4,5,6,7"}
SHIFT = Scenario(
    lines={
        "a": (*generates(5, 100), (500, "progress", {"completed": 95, "target": 100})),
        "b": (*generates(10, 100), (300, "progress", {"completed": 5, "target": 100})),
    },
    clusters=dict.fromkeys("ab", WIDE_CLUSTER),
    settings={"devices": 8},
)
WIDE = replace(
    SHIFT, clusters={"a": {"generation": "0,1,2,3,4,5,6,7", "tp": 4}, "b": {"generation": "0,1,2,3,4,5,6,7"}}
)
RELEASE = replace(
    PAIR,
    lines={
        "a": (*generates(5), (300, "planned_release", {}), (305, "died", {"who": "a", "replica": 1})),
        "b": (*generates(1000), (1500, "planned_release", {}), (1501, "planned_release", {})),
    },
)
STREAMS = replace(
    PAIR,
    lines={
        "a": (
            *generates(5),
            (100, "progress", {"stream": "validation", "completed": 1, "target": 4}),
            (101, "progress", {"stream": "test", "completed": 9, "target": 4}),
            (300, "progress_end", {"stream": "validation"}),
            (700, "progress_end", {"stream": "test"}),
        ),
        "b": (*generates(50), *trains(400, 600)),
    },
)
ONE_DEVICE: dict[str, int | str] = {"trainer": "0", "generation": "0"}
PREEMPTED = replace(
    PAIR,
    lines={"a": generates(5), "b": trains(200, 600)},
    clusters=dict.fromkeys("ab", ONE_DEVICE),
    settings={"devices": 1},
)
UNREPORTED = replace(
    PREEMPTED, lines={"a": ((5, "acquire", {"kind": GENERATION, "target": 5}),), "b": trains(200, 600)}
)
STAGGERED = replace(
    PAIR,
    lines={
        "a": (*generates(5), *trains(200, 600), *trains(700, 900)),
        "b": ((610, "progress", {"completed": 0, "target": 10}), (1500, "acquire", {"kind": GENERATION})),
    },
    settings={"admission_ms": 4000},
)
QUITTER = replace(CROWD, lines={**CROWD.lines, "d": (*trains(204, 1600), (300, "unregister", {}))})
STUCK = Scenario(
    lines={"a": generates(5), "b": trains(100, 3000), "c": (*trains(200, 2800), (3500, "progress_end", {}))},
    clusters={"a": {"generation": "0,1"}, "b": {"trainer": "0"}, "c": {"trainer": "0,1"}},
    settings={"request_ms": 4000},
)
LATE = replace(
    PREEMPTED, lines={"a": trains(5, 8500), "b": trains(200, 8500)}, settings={"devices": 1, "request_ms": 1000}
)


# -- wrong rules ------------------------------------------------------------------------------------------------------------


Swap = tuple[Any, str, Any]  # module or class, name, and the fault's replacement
meets, measure = Supply.meets, Gaps.__init__
right = SimpleNamespace(**vars(core))  # the correct rules of the desk, unaffected by swaps


def gives_twice(supply: Supply, request: Request) -> bool:
    idle = set(supply.idle)
    met = meets(supply, request)
    supply.idle |= idle
    return met


def grant_unseen(t: Turn, op: Op) -> None:
    idle, t.idle = t.idle, t.idle | op.devices
    right.grant(t, op)
    t.idle = idle - op.devices


def advance_at_once(t: Turn) -> None:
    sleeping, t.sleeping = t.sleeping, frozenset()
    right.advance(t)
    t.sleeping = sleeping


def drop_without_devices(t: Turn, name: str, how: str) -> None:
    t.leases = Map({key: lease for key, lease in t.leases.items() if key[0] != name})
    right.drop(t, name, how)


def target_without_floor(gaps: Gaps, share: Share) -> int:
    return (2 * share.remaining * gaps.budget + gaps.weight) // (2 * gaps.weight) if gaps.weight else 0


def gaps_without_tp(gaps: Gaps, view: View) -> None:
    measure(gaps, View([replace(share, tp=1) for share in view.shares.values()], view.idle, view.devices))
    shares = [view.shares[share.name] for share in gaps.known]
    gaps.eligible = [share for share in shares if share.name in gaps.bundles]
    gaps.known = shares


def takes_all(view: View) -> None:
    for share in view.shares.values():
        for replica in list(share.free):
            view.expand(share.name, replica)


def half_a_replica(t: Turn, op: Op, replica: int) -> None:
    right.expand(t, op, replica)
    if t.commands and t.commands[-1].name == "expand":
        wrong = t.commands.pop()
        devices = str(wrong.devices).rpartition(",")[0] or str(wrong.devices)
        t.commands.append(Command("expand", wrong.to, wrong.pipeline, **{**dict(wrong.ids), "devices": devices}))


def forgets_what_it_shrank(t: Turn, name: str, replica: int) -> None:
    right.shrink(t, name, replica)
    if not t.active(name):
        t.leases = t.leases.without((name, GENERATION))


def lose_and_forget(t: Turn, name: str, replica: int) -> None:
    right.lose(t, name, replica)
    if t.pipelines[name].releasing:
        t.change(name, waiters=0)


def reports_unclamped(t: Turn, event: Event) -> None:
    if (one := t.pipelines.get(event.pipeline)) is not None:
        stream = event.get("stream", "training")
        t.change(event.pipeline, streams=Map({**one.streams, stream: (0, event.target)}), moved=one.moved + 1)


def waiters_sleep_on(t: Turn, name: str, _: str) -> None:
    t.requests = tuple(one for one in t.requests if one.pipeline != name)


def when_all_are_active(t: Turn) -> None:
    for request in t.requests:
        if request.kind == GENERATION and len(t.active(request.pipeline)) == len(
            t.pipelines[request.pipeline].generation.bundles
        ):
            core.answer(t, request)


def shrinks_for_nothing(supply: Supply, request: Request) -> bool:
    for one in sorted({supply.owners[device] for device in supply.needs(request) if device in supply.owners}):
        supply.shrink(*one)
    return meets(supply, request)


def handles(event: str, wrong: Callable[[Turn, Event], None]) -> Swap:
    return (core, "HANDLERS", {**core.HANDLERS, event: wrong})


class Fault(NamedTuple):
    check: str
    scenario: Scenario
    swaps: tuple[Swap, ...]


UNCHECKED: Swap = (core, "violations", lambda *_: [])
LAST_FIRST = property(lambda request: (-PRIORITY[request.kind], request.number))
YOUNGEST_FIRST = property(lambda request: (PRIORITY[request.kind], -request.number))
FAULTS = {
    "double-allocation": Fault(
        "one_owner", CROWD, ((Supply, "meets", gives_twice), (core, "grant", grant_unseen), UNCHECKED)
    ),
    "expand-first": Fault("shrink_before_expand", PAIR, ((core, "advance", advance_at_once),)),
    "lost-device": Fault("devices_conserved", DEATH, ((core, "drop", drop_without_devices),)),
    "priority-inverted": Fault("priority_kept", CROWD, ((Request, "precedence", LAST_FIRST),)),
    "youngest-first": Fault("priority_kept", CROWD, ((Request, "precedence", YOUNGEST_FIRST),)),
    "no-floor": Fault("no_starvation", SMALL_DEMAND, ((Gaps, "target", target_without_floor),)),
    "no-validation": Fault("plan_valid", replace(PAIR, planner=takes_all), (UNCHECKED,)),
    "never-rebalances": Fault("fair_share", SHIFT, ((core, "is_off_balance", lambda _: False),)),
    "planner-ignores-tp": Fault("plan_as_specified", WIDE, ((Gaps, "__init__", gaps_without_tp),)),
    "shrinks-for-nothing": Fault("plan_as_specified", STUCK, ((Supply, "meets", shrinks_for_nothing),)),
    "half-replica": Fault("plan_valid", WIDE, ((core, "expand", half_a_replica),)),
    "stomps-planned-release": Fault("planned_release_once", RELEASE, ((core, "lose", lose_and_forget),)),
    "progress-not-ended": Fault("progress_ended", STREAMS, (handles("progress_end", lambda *_: None),)),
    "progress-unclamped": Fault("progress_ended", STREAMS, (handles("progress", reports_unclamped),)),
    "one-shot-generation": Fault("no_starvation", PREEMPTED, ((core, "shrink", forgets_what_it_shrank),)),
    "no-watchdog": Fault(
        "no_starvation", UNREPORTED, ((core, "watch", lambda t: t.alarm(t.settings.watchdog_ms, "watchdog")),)
    ),
    "waits-for-all": Fault("no_starvation", PAIR, ((core, "grant_generation", when_all_are_active),)),
    "admits-at-init": Fault("admission", STAGGERED, ((core, "may_start", lambda *_: True),)),
    "trains-on-at-once": Fault("admission", STAGGERED, ((core, "is_held", lambda *_: False),)),
    "forgets-waiters": Fault("no_request_lost", QUITTER, ((core, "wake_waiters", waiters_sleep_on),)),
}


@contextlib.contextmanager
def swapped(swaps: Iterable[Swap]) -> Iterator[None]:
    with contextlib.ExitStack() as scope:
        for swap in swaps:
            scope.enter_context(patch.object(*swap))
        yield
