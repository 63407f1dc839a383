"""The desk's state: pipelines with their clusters, requests, leases, the current plan. Frozen, hashable, without a clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from kit.errors import BadInput
from kit.loop.messages import NOTES, Command, Frozen, Map
from kit.results.records import Id

GENERATION = "generation"
# In order of priority: each kind and its default cluster.
KINDS = {
    "initialisation": "trainer",
    "training": "trainer",
    "critic": "critic",
    "logprobs": "trainer",
    "reference": "reference",
    "values": "critic",
    GENERATION: GENERATION,
}
PRIORITY = {kind: number for number, kind in enumerate(KINDS)}
CLUSTERS = tuple(dict.fromkeys(KINDS.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeskSettings:
    """`pipelines` are the expected ones; the desk ends when the last has left. `planner` is a built-in name or `module:attr`.

    Every wait has a limit: a request, a shrink or an expand, each side of the admission (0: all are admitted at once).
    """

    devices: int
    pipelines: tuple[str, ...]
    planner: str = "gap-ratio"
    request_ms: int = 60_000
    operation_ms: int = 60_000
    admission_ms: int = 60_000
    watchdog_ms: int = 5_000

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise BadInput(f"devices={self.devices} must be at least 1")
        if not self.pipelines or len(set(self.pipelines)) < len(self.pipelines):
            raise BadInput(f"pipelines={self.pipelines} must be names, each once")
        for name in ("request_ms", "operation_ms", "watchdog_ms"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name}={getattr(self, name)} must be at least 1, because every wait has a limit")


@dataclass(frozen=True)
class Cluster:
    """Devices in rank order. Replica r of a generation cluster has the r-th bundle of `tp` devices."""

    devices: tuple[int, ...]
    tp: int = 1

    @cached_property
    def bundles(self) -> tuple[frozenset[int], ...]:
        return tuple(frozenset(self.devices[at : at + self.tp]) for at in range(0, len(self.devices), self.tp))

    @cached_property
    def all(self) -> frozenset[int]:
        return frozenset(self.devices)


NO_CLUSTER = Cluster(())


@dataclass(frozen=True, slots=True)
class PipelineState:
    """`streams`: reports of progress, (completed, target) by name. `out`: replicas removed by a resize; `dead`: those that died.

    `estimate`: the target of the last generation request. `moved` counts changes of progress, `watched` those seen by the watchdog.
    `waiters`: planned releases without an answer. `releasing` and `closing`: all replicas must sleep.
    """

    clusters: Mapping[str, Cluster]
    asked: bool = False  # it has asked to be admitted
    admitted: bool = False
    set_up: bool = False  # it has asked for generation
    handed_over: bool = False  # it has released training after its first step
    overdue: frozenset[str] = frozenset()  # sides of the admission that reached their limit
    streams: Map = field(default_factory=Map)
    estimate: int = 0
    moved: int = 0
    watched: int = -1
    out: frozenset[int] = frozenset()
    dead: frozenset[int] = frozenset()
    releasing: bool = False
    waiters: int = 0
    closing: bool = False

    @property
    def generation(self) -> Cluster:
        return self.clusters.get(GENERATION, NO_CLUSTER)

    @property
    def leaving(self) -> bool:
        return self.releasing or self.closing

    @property
    def progress(self) -> tuple[int, int]:
        done = sum(min(completed, target) for completed, target in self.streams.values())
        return done, sum(target for _, target in self.streams.values())

    @property
    def remaining(self) -> int:
        done, target = self.progress
        return target - done


@dataclass(frozen=True, slots=True)
class Request:
    """`target`: the demand that it adds while it waits. `held`: it waits for the admission of another pipeline.

    `again`: repeated by the watchdog, so it needs no answer.
    """

    pipeline: str
    cluster: str
    kind: str
    number: int
    target: int = 0
    held: bool = False
    again: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.pipeline, self.cluster

    @property
    def precedence(self) -> tuple[int, int]:
        return PRIORITY[self.kind], self.number


@dataclass(frozen=True, slots=True)
class Lease:
    """Devices of a cluster. A lease of generation has the bundles of its active replicas; without active replicas it is suspended."""

    kind: str
    since: int
    devices: frozenset[int] = frozenset()
    active: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Op:
    """A change to one cluster: replicas that sleep or wake, or the grant of a whole cluster."""

    pipeline: str
    cluster: str
    replicas: tuple[int, ...] = ()
    devices: frozenset[int] = frozenset()

    def __str__(self) -> str:
        numbers = self.replicas or sorted(self.devices)
        return f"{self.pipeline}.{self.cluster}:{','.join(map(str, numbers))}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The changes of one cycle. `removes`: leases of generation that end once their replicas sleep."""

    shrinks: tuple[Op, ...] = ()
    grants: tuple[Op, ...] = ()
    expands: tuple[Op, ...] = ()
    removes: tuple[tuple[str, str], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.shrinks or self.grants or self.expands)


@dataclass(slots=True)
class DeskFields:
    idle: frozenset[int] = frozenset()
    pipelines: Map = field(default_factory=Map)  # Pipeline by name, in order of registration
    requests: tuple[Request, ...] = ()  # in order of arrival
    leases: Map = field(default_factory=Map)  # Lease by (pipeline, cluster)
    plan: Plan | None = None  # in progress
    sleeping: frozenset[tuple[str, int]] = frozenset()  # replicas with a shrink in progress
    waking: frozenset[tuple[str, int]] = frozenset()  # replicas with an expand in progress
    due: bool = False  # something changed, so a new plan may be needed
    serial: int = 0
    cycles: int = 0
    alarms: Map = field(default_factory=Map)  # the subject of each alarm, by its number
    left: frozenset[str] = frozenset()  # pipelines that have left
    error: str = ""
    closed: bool = False

    def active(self, name: str) -> frozenset[int]:
        lease = self.leases.get((name, GENERATION))
        return lease.active if lease is not None and lease.kind == GENERATION else frozenset()

    def under_way(self, name: str) -> bool:
        return any(replica[0] == name for replica in (*self.sleeping, *self.waking))

    def waits(self, name: str, cluster: str) -> Request | None:
        return next((request for request in self.requests if request.key == (name, cluster)), None)


class DeskState(Frozen, DeskFields):
    __slots__ = ()


class DeskTurn(DeskFields):
    """The processing of one event: mutable fields and the commands so far."""

    __slots__ = ("commands", "desk", "settings")

    def __init__(self, fields: DeskFields, settings: DeskSettings, desk: str) -> None:
        for name in DeskFields.__dataclass_fields__:
            setattr(self, name, getattr(fields, name))
        self.settings = settings
        self.desk = desk
        self.commands: list[Command] = []

    def say(self, name: str, who: str, **ids: Id) -> None:
        self.commands.append(Command(name, who, who, **ids))

    def note(self, name: str, who: str, **ids: Id) -> None:
        self.commands.append(Command(name, NOTES, who, **ids))

    def alarm(self, ms: int, *what: Id) -> None:
        """Schedule an event `alarm` about a subject. It changes nothing if the subject is gone by then."""
        self.serial += 1
        self.alarms = self.alarms.put(self.serial, what)
        self.commands.append(Command("after", "clock", self.desk, number=self.serial, ms=ms))

    def change(self, name: str, **changes: Any) -> None:
        self.pipelines = self.pipelines.put(name, replace(self.pipelines[name], **changes))

    def lease(self, key: tuple[str, str], **changes: Any) -> None:
        self.leases = self.leases.put(key, replace(self.leases[key], **changes))
