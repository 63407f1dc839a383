"""Small runs of the desk with scripted pipelines on simulated devices. Each exposes some bugs of the desk, and passes without them.

Each runs the configured planner. Those without `any_planner` are about sharing by demand: only gap-ratio and home run in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kit.labs.share.desk import Limited
from kit.labs.share.lab import SCHEDULER, PipelineConfig, ShareConfig
from kit.loop.runner import VirtualClock
from kit.results.records import Id, numbers
from kit.share.core import Scheduler
from kit.share.judge.books import ON_PURPOSE
from kit.share.judge.specified import SPECIFIED
from kit.share.planner import PLANNERS, View
from kit.share.simulated import DeskSimulation, Devices, Script, simulate
from kit.share.state import GENERATION, DeskSettings

Line = tuple[int, str, dict[str, Id]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Scripted pipelines: the clusters that they register, and their requests with times (ms)."""

    lines: Mapping[str, tuple[Line, ...]]
    clusters: Mapping[str, dict[str, Id]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    planner: Callable[[View], object] | None = None
    any_planner: bool = False  # every right planner passes, however it shares
    restarts: bool = False  # your own desk need not know that ranks restart
    devices: Mapping[str, Any] = field(default_factory=dict)  # options of the simulated devices
    until_s: float = 10.0

    def run(self, config: ShareConfig | None = None) -> DeskSimulation:
        clock = VirtualClock()
        settings = {"devices": 2, "admission_ms": 0, "request_ms": 3000, "watchdog_ms": 500, **self.settings}
        if config is not None and self.planner is None:
            settings["planner"] = config.planner
        cores: dict[str, Any] = {name: Script(name, *self.script(name)) for name in self.clusters}
        if config is not None and is_own(config):
            cores["desk"] = Limited(self.with_own(config, settings))
        else:
            cores["desk"] = Scheduler(DeskSettings(pipelines=tuple(self.clusters), **settings), planner=self.planner)
        return simulate(cores, {}, clock, Devices(clock, {}, **self.devices), until_s=self.until_s)

    def with_own(self, config: ShareConfig, settings: dict[str, Any]) -> ShareConfig:
        """The scenario's pipelines, devices and limits, with the planner and the desk of a run."""
        # A scripted pipeline may lack one of the two; a config has both.
        loops = {
            name: PipelineConfig(
                train=numbers(ids["trainer"] if "trainer" in ids else ids["generation"]),
                infer=numbers(ids["generation"] if "generation" in ids else ids["trainer"]),
                infer_tp=int(str(ids.get("tp", 1))),
            )
            for name, ids in self.clusters.items()
        }
        usual = {"scenario": "B", "gate": "", "ranks": 0, "simulated": True, "pipelines": len(loops)}
        return replace(config, loops=loops, **{**usual, **settings})

    def script(self, name: str) -> Iterator[Line]:
        yield 0, "register", self.clusters[name]
        yield 1, "admit", {}
        yield from self.lines[name]
        leaves = int(self.until_s * 1000) - 1000
        yield leaves, "progress_end", {}
        yield leaves, "unregister", {}
        yield leaves + 900, "ended", {}


def for_config(config: ShareConfig) -> list[str]:
    kits_desk = config.scheduler == SCHEDULER
    by_demand = kits_desk and config.planner in SPECIFIED
    return [
        name
        for name, scenario in SCENARIOS.items()
        if (scenario.any_planner or by_demand) and (kits_desk or not scenario.restarts)
    ]


def is_own(config: ShareConfig) -> bool:
    return config.scheduler != SCHEDULER or config.planner not in PLANNERS


def generates(at: int, target: int = 10) -> tuple[Line, ...]:
    return (at, "progress", {"completed": 0, "target": target}), (at, "acquire", {"kind": GENERATION})


def trains(at: int, until: int, kind: str = "training") -> tuple[Line, ...]:
    return (at, "acquire", {"kind": kind}), (until, "release", {"kind": kind})


ALL: dict[str, Id] = {"trainer": (0,), "generation": (0, 1, 2, 3)}
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
    clusters={"a": {"trainer": (0,), "generation": (0, 1)}, "b": {"trainer": (1,), "generation": (0, 1)}},
)
DEATH = replace(
    PAIR,
    lines={**PAIR.lines, "a": (*generates(5), *trains(200, 900), (400, "died", {"who": "a"}))},
    any_planner=True,
)
SMALL_DEMAND = replace(
    PAIR,
    lines={"a": generates(5, 1000), "b": generates(50, 1)},
    clusters={"a": {"generation": (0,)}, "b": {"generation": (0, 1)}},
)
WIDE_CLUSTER: dict[str, Id] = {"generation": (0, 1, 2, 3, 4, 5, 6, 7)}
SHIFT = Scenario(
    lines={
        "a": (*generates(5, 100), (500, "progress", {"completed": 95, "target": 100})),
        "b": (*generates(10, 100), (300, "progress", {"completed": 5, "target": 100})),
    },
    clusters=dict.fromkeys("ab", WIDE_CLUSTER),
    settings={"devices": 8},
)
WIDE = replace(
    SHIFT,
    clusters={"a": {"generation": (0, 1, 2, 3, 4, 5, 6, 7), "tp": 4}, "b": {"generation": (0, 1, 2, 3, 4, 5, 6, 7)}},
)
RELEASE = replace(
    PAIR,
    lines={
        "a": (*generates(5), (300, "planned_release", {}), (305, "died", {"who": "a", "replica": 1})),
        "b": (*generates(1000), (1500, "planned_release", {}), (1501, "planned_release", {})),
    },
    any_planner=True,
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
# a has adapters. What one has beyond its step is not another's.
BY_ADAPTER = replace(
    PAIR,
    lines={
        "a": (
            (5, "progress", {"stream": "adapter 0", "completed": 9, "target": 4}),
            (5, "progress", {"stream": "adapter 1", "completed": 1, "target": 4}),
            (5, "acquire", {"kind": GENERATION}),
            *trains(300, 500),
            (600, "progress", {"stream": "adapter 0", "completed": 0, "target": 4}),
            (800, "progress_end", {"stream": "adapter 0"}),
            (900, "progress_end", {"stream": "adapter 1"}),
        ),
        "b": (*generates(50), *trains(400, 600), *trains(700, 850)),
    },
)
ONE_DEVICE: dict[str, Id] = {"trainer": (0,), "generation": (0,)}
PREEMPTED = replace(
    PAIR,
    lines={"a": generates(5), "b": trains(200, 600)},
    clusters=dict.fromkeys("ab", ONE_DEVICE),
    settings={"devices": 1},
)
UNREPORTED = replace(
    PREEMPTED, lines={"a": ((5, "acquire", {"kind": GENERATION, "target": 5}),), "b": trains(200, 600)}
)
# a trains for the second time once b is set up, b once c is.
STAGGERED = replace(
    PAIR,
    lines={
        "a": (*generates(5), *trains(200, 600), *trains(700, 900)),
        "b": (
            (610, "progress", {"completed": 0, "target": 10}),
            (1500, "acquire", {"kind": GENERATION}),
            *trains(1600, 1800),
            *trains(1900, 2100),
        ),
        "c": generates(2500),
    },
    clusters={**PAIR.clusters, "c": {"trainer": (2,), "generation": (2,)}},
    settings={"devices": 3, "admission_ms": 4000},
)
QUITTER = replace(CROWD, lines={**CROWD.lines, "d": (*trains(204, 1600), (300, "unregister", {}))})
STUCK = Scenario(
    lines={"a": generates(5), "b": trains(100, 3000), "c": (*trains(200, 2800), (3500, "progress_end", {}))},
    clusters={"a": {"generation": (0, 1)}, "b": {"trainer": (0,)}, "c": {"trainer": (0, 1)}},
    settings={"request_ms": 4000},
)


# The gang of b, two devices of three, leaves a one replica.
GANG = replace(
    PAIR,
    lines={"a": generates(5), "b": trains(200, 5000)},
    clusters={"a": {"trainer": (0,), "generation": (0, 1, 2)}, "b": {"trainer": (1, 2)}},
    settings={"devices": 3},
    any_planner=True,
)


# While b trains on device 1, a's first replica has only one of its two devices.
BUNDLES = Scenario(
    lines={"a": generates(300), "b": trains(200, 1500)},
    clusters={
        "a": {"trainer": (0, 1), "generation": (0, 1, 2, 3), "tp": 2},
        "b": {"trainer": (1,), "generation": (2, 3), "tp": 2},
    },
    settings={"devices": 4},
    any_planner=True,
)


# b trains on both devices of a. Afterwards a needs none of them, until it reports the next step.
COMPLETE = replace(
    PAIR,
    lines={
        "a": (
            *generates(5),
            (300, "progress", {"completed": 10, "target": 10}),
            (2500, "progress", {"completed": 0, "target": 10}),
        ),
        "b": trains(400, 600),
    },
    clusters={"a": {"trainer": (0,), "generation": (0, 1)}, "b": {"trainer": (0, 1)}},
    any_planner=True,
)


# a keeps one replica and wakes the other when it reports the next step.
NEXT_STEP = replace(COMPLETE, clusters={"a": {"trainer": (0,), "generation": (0, 1)}, "b": {"trainer": (0,)}})
# Two gangs over the same devices: one after the other.
GANGS = Scenario(
    lines={"a": trains(200, 1000, "critic"), "b": trains(210, 1800, "critic")},
    clusters={"a": {"trainer": (0,), "critic": (0, 1)}, "b": {"trainer": (1,), "critic": (1, 0)}},
)
# b's wide request waits for a. Meanwhile a, which holds a device, may have another one; c, which only generates, may not.
RIVALS = Scenario(
    lines={
        "a": (*trains(100, 1000), *trains(250, 900, "critic")),
        "b": trains(200, 1500),
        "c": (*generates(5), *trains(300, 2000)),
    },
    clusters={
        "a": {"trainer": (0,), "critic": (1,)},
        "b": {"trainer": (0, 1)},
        "c": {"trainer": (1,), "generation": (2,)},
    },
    settings={"devices": 3},
)
# While replica 0 is removed, b's hand-over leads to new plans; then it is allowed again.
RESIZED = Scenario(
    lines={
        "a": (
            *generates(5),
            (300, "resize", {"remove": (0,)}),
            (900, "resize", {"add": (0,)}),
            (1200, "planned_release", {}),
        ),
        "b": (*trains(400, 600), *trains(1205, 1400)),
    },
    clusters={"a": {"generation": (0, 1, 2)}, "b": {"trainer": (1,)}},
    settings={"devices": 3},
)
# Each has half of the devices, or nearly; then a loses a replica, and b has one for its device.
LEFT_OVER = Scenario(
    lines={"a": (*generates(5), (300, "died", {"who": "a", "replica": 1})), "b": generates(10)},
    clusters={"a": {"generation": (0, 1)}, "b": {"generation": (1, 2)}},
    settings={"devices": 3},
    any_planner=True,
)
# All replicas are removed, and only then one is allowed again: a planner has no other choice.
REFILLED = Scenario(
    lines={"a": (*generates(5), (300, "resize", {"remove": (0, 1)}), (900, "resize", {"add": (1,)}))},
    clusters={"a": {"generation": (0, 1)}},
    any_planner=True,
)
# New ranks replace a's only replica, and then the trainer of b, which registers again.
RECOVERY = Scenario(
    lines={
        "a": (
            *generates(5),
            (300, "died", {"who": "a", "replica": 0}),
            (1100, "restarted", {"who": "a", "replica": 0}),
        ),
        "b": (
            *trains(200, 900),
            (400, "died", {"who": "b"}),
            (1400, "restarted", {"who": "b"}),
            (1410, "register", {"trainer": (1,)}),
            (1411, "admit", {}),
            *trains(1420, 2500),
        ),
    },
    clusters={"a": {"generation": (0,)}, "b": {"trainer": (1,)}},
    any_planner=True,
    restarts=True,
)
# Replica 1 of a is ordered to sleep for b and dies before it answers.
LOST = replace(
    PAIR,
    lines={
        "a": (*generates(5), (205, "died", {"who": "a", "replica": 1})),
        "b": trains(200, 4000),
    },
    clusters={"a": {"generation": (0, 1)}, "b": {"trainer": (1,)}},
    devices={"hangs": (("shrink", "a", 1),)},
)
# Replica 1 of a dies while it wakes, and its answer arrives afterwards.
LATE_ANSWER = replace(
    LOST, lines={"a": (*generates(5), (15, "died", {"who": "a", "replica": 1})), "b": trains(200, 900)}, devices={}
)
# As LOST, but the replica says that it cannot leave its devices: the desk must end, because nobody may have them.
STAYS = replace(
    LOST,
    lines={
        **LOST.lines,
        "a": (*generates(5), (205, "error", {"of": "shrink", "who": "a", "replica": 1, "why": "busy"})),
    },
)
# b's request names 30, which its report of 10 replaces; c has only its estimate.
ESTIMATES = Scenario(
    lines={
        "a": generates(5),
        "b": ((10, "progress", {"completed": 0, "target": 10}), (10, "acquire", {"kind": GENERATION, "target": 30})),
        "c": ((500, "acquire", {"kind": GENERATION, "target": 10}),),
    },
    clusters=dict.fromkeys("abc", WIDE_CLUSTER),
    settings={"devices": 8},
)


def takes_all(view: View) -> None:
    """A planner that makes infeasible plans; the desk refuses them."""
    for share in view.shares.values():
        for replica in list(share.free):
            view.expand(share.name, replica)


SCENARIOS: Mapping[str, Scenario] = {
    "crowd": CROWD,
    "pair": PAIR,
    "death": DEATH,
    "small demand": SMALL_DEMAND,
    "infeasible plans": replace(PAIR, planner=takes_all, settings={"planner": ON_PURPOSE}),
    "shift": SHIFT,
    "wide": WIDE,
    "stuck": STUCK,
    "gang": GANG,
    "whole bundles": BUNDLES,
    "complete": COMPLETE,
    "next step": NEXT_STEP,
    "gangs": GANGS,
    "rivals": RIVALS,
    "resized": RESIZED,
    "left over": LEFT_OVER,
    "refilled": REFILLED,
    "recovery": RECOVERY,
    "lost while falling asleep": LOST,
    "lost while waking": LATE_ANSWER,
    "cannot sleep": STAYS,
    "estimates": ESTIMATES,
    "release": RELEASE,
    "streams": STREAMS,
    "by adapter": BY_ADAPTER,
    "preempted": PREEMPTED,
    "unreported": UNREPORTED,
    "staggered": STAGGERED,
    "quitter": QUITTER,
}
