"""Two stream pipelines under one desk on a virtual clock, and each of them alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kit.loop.messages import Event
from kit.loop.runner import Runner, VirtualClock
from kit.share.core import Scheduler
from kit.share.member import Member
from kit.share.simulated import DeskSimulation, Devices, Ports, simulate
from kit.share.state import Cluster, DeskSettings
from kit.stream.core import Controller
from kit.stream.settings import StreamSettings
from kit.stream.simulated import ADDRESSES, Durations, System

# A step begins with all its groups: a pipeline that trains where it generates could not finish a step begun with fewer.
STRICT = StreamSettings(
    steps=3, sampler="strict", window=0, previous="off", groups=4, min_groups=4, group=2, train_global_batch_size=8
)
A = {"trainer": Cluster((0,)), "generation": Cluster((0, 1))}
B = {"trainer": Cluster((1,)), "generation": Cluster((0, 1))}


class Log:
    """Steps are not logged here."""

    def send(self, command: Any) -> list[Event]:
        return []

    def take(self) -> list[Event]:
        return []


def shared(
    pipelines: Mapping[str, Mapping[str, Cluster]],
    stream: StreamSettings = STRICT,
    durations: Durations | None = None,
    *,
    devices: int = 2,
    desk: Any = None,
    prepare: Callable[[Runner], None] = lambda _: None,
    more: Mapping[str, Any] | None = None,
    until_s: float = 1e6,
    **settings: Any,
) -> DeskSimulation:
    clock = VirtualClock()
    durations = durations or Durations()
    systems = {}
    cores: dict[str, Any] = {}
    for name, clusters in pipelines.items():
        count = len(clusters["generation"].bundles)
        systems[name] = System(clock, durations, replicas=count, pipeline=name)
        for replica in systems[name].replicas.values():
            replica.gone = True
        core = Controller(replace(stream, replicas=count), pipeline=name)
        cores[name] = Member(core, name, clusters)
    found = DeskSettings(devices=devices, pipelines=tuple(pipelines), **settings)
    cores["desk"] = desk(found) if desk else Scheduler(found)
    ports = dict.fromkeys([one for one in ADDRESSES if one != "desk"], Ports(systems))
    return simulate(
        cores, {**ports, "log": Log()}, clock, Devices(clock, systems, **(more or {})), until_s=until_s, prepare=prepare
    )


def outcome(done: DeskSimulation, name: str) -> list[Any]:
    """What a pipeline computed: what it trained in which step and version, on samples with which tokens."""
    return [
        (row.event, *sorted((key, value) for key, value in row.ids.items() if key != "pipeline"))
        for row in done.rows
        if row.ids.get("pipeline") == name and row.event in ("trained", "bumped")
    ]
