"""All pipelines and the desk of the lab `share` without ranks: on a virtual clock, in milliseconds. Notebook side.

A scene has failures that must not end a run. Each is a separate run with its own ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kit.errors import KitError
from kit.labs.share.lab import DESK, SCHEDULER, PipelineConfig, ShareConfig
from kit.loop.messages import Command, Event, Sink
from kit.loop.runner import Port, Runner, Stalled, VirtualClock
from kit.results import Row
from kit.share.simulated import Devices, Ports
from kit.stream.ports import Watcher
from kit.stream.sides import LoopSide
from kit.stream.simulated import ADDRESSES, System, durations

OF_THE_DESK = ("request_ms", "operation_ms", "admission_ms", "watchdog_ms")  # settings
LATE = (
    20  # times the seconds that all pipelines take one after the other, beside some limits: what takes longer is stuck
)
SHORT_MS = 50  # a limit that a scene reaches
REPLACED_AFTER_DEATH = "replicas are replaced after they died"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareSide(LoopSide):
    """`watchers` see every row. `begins` gets the runner before the run, `ends` after it."""

    watchers: tuple[Watcher, ...] = ()
    begins: Callable[[Runner], object] = lambda _: None
    ends: Callable[[Runner], object] = lambda _: None


def refuse_broken(ended: Mapping[str, Command], names: Sequence[str] = ()) -> None:
    """Refuse a run in which one of these cores did not end, or one ended with an error."""
    if left := [name for name in names if name not in ended]:
        raise KitError(f"the run is stuck: {', '.join(left)} did not end")
    for name, end in ended.items():
        if end.get("why") == "error":
            raise KitError(f"{name} ended with an error: {end.get('error', 'no reason given')}")


# -- scenes -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Events at the first occurrence of a row: `at` is its name and some of its ids; `then` are events by receiving core. `devices` are
    options of the simulated devices, `limits` other settings of the desk, `settings` other ones of the pipelines' controllers."""

    name: str
    at: tuple[str, Mapping[str, Any]] = ("", {})
    then: tuple[tuple[str, Event], ...] = ()
    devices: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


AS_CONFIGURED = Scene(name="as configured")


def dies(pipeline: str) -> tuple[tuple[str, Event], ...]:
    """The desk is informed that a pipeline is dead, and its core that it is over."""
    return (
        (DESK, Event("died", DESK, who=pipeline)),
        (pipeline, Event("error", pipeline, of="pipeline", why="killed, on purpose")),
    )


def replicas_die(pipeline: str) -> Iterator[tuple[str, Event]]:
    """Desk and core are informed that both replicas of a pipeline are dead."""
    for replica in (0, 1):
        yield DESK, Event("died", DESK, who=pipeline, replica=replica)
        yield pipeline, Event("died", pipeline, replica=replica, why="killed, on purpose")


SCENES = (
    Scene(name="a pipeline dies while it generates", at=("completed", {"pipeline": "a"}), then=dies("a")),
    Scene(name="a pipeline dies while it trains", at=("microbatch", {"pipeline": "a"}), then=dies("a")),
    Scene(name="a pipeline dies while a replica of it wakes", at=("taken", {"who": "a"}), then=dies("a")),
    Scene(name="a pipeline dies while a replica of it falls asleep", at=("shrink", {"pipeline": "b"}), then=dies("b")),
    Scene(
        name=REPLACED_AFTER_DEATH,
        at=("completed", {"pipeline": "b"}),
        then=(*replicas_die("b"), *((DESK, Event("restarted", DESK, who="b", replica=replica)) for replica in (0, 1))),
        settings={"on_dead_replica": "go-on"},
    ),
    Scene(name="a replica cannot wake", devices={"broken": (("a", 0),)}),
    Scene(
        name="a resize to a replica that is gone",
        at=("failed", {"pipeline": "a"}),
        then=((DESK, Event("resize", "a", add="0")),),
        devices={"broken": (("a", 0),)},
    ),
    Scene(name="the second is set up while the first trains", limits={"admission_ms": SHORT_MS}),
    Scene(
        name="the desk fails",
        devices={"hangs": (("shrink", "a", 0), ("shrink", "a", 1))},
        limits={"operation_ms": SHORT_MS},
    ),
)


def scenes(config: ShareConfig) -> list[Scene]:
    """The scenes that a config allows: all need both pipelines, those that lose a replica also another replica. Your own desk need not know
    that ranks restart."""
    if len(config.names) < 2:
        return []
    spare = config.planner != "static" and config.loops["a"].replicas > 1
    restarts = config.scheduler == SCHEDULER and config.loops["b"].replicas > 1
    return [
        scene
        for scene in SCENES
        if (spare or "broken" not in scene.devices) and (restarts or scene.name != REPLACED_AFTER_DEATH)
    ]


class Stage(Devices):
    """The devices of a scene. They watch the ledger for its row, post its events, and drop events from a dead pipeline's ranks."""

    def __init__(self, scene: Scene, clock: VirtualClock, systems: Mapping[str, System]) -> None:
        super().__init__(clock, systems, **scene.devices)
        self.scene = scene
        self.posted = not scene.then
        self.dead: set[str] = set()
        self.runner: Runner | None = None

    def take(self) -> list[Event]:
        return [event for event in super().take() if event.get("who") not in self.dead]

    def see(self, row: Row) -> None:
        name, ids = self.scene.at
        if self.runner is not None and not self.posted and row.event == name and ids.items() <= row.ids.items():
            self.posted = True
            self.runner.inbox += self.scene.then
            for event in [event for core, event in self.scene.then if core == DESK and event.name == "died"]:
                if (replica := event.get("replica")) is None:
                    self.dead.add(event.who)
                else:
                    self.sleepers[event.who].remove(replica)


# -- a run ----------------------------------------------------------------------------------------------------------------


def serial_s(loop: PipelineConfig) -> float:
    """The seconds that a pipeline takes with one thing after the other, at most."""
    times = durations(loop)
    return loop.steps * loop.groups * (loop.group * loop.answer[1] * times.token_s + times.train_s + times.sync_s)


def simulated_side(config: ShareConfig, scene: Scene, ledger: Sink, begins: Callable[[Runner], object]) -> ShareSide:
    """All pipelines, asleep, and their devices. The run stops if it takes far too long."""
    clock, systems = VirtualClock(), dict[str, System]()
    late = 3 * max(getattr(config, name) for name in OF_THE_DESK) / 1000
    for name, loop in config.loops.items():
        times = durations(loop)
        systems[name] = System(clock, times, replicas=loop.replicas, pipeline=name)
        for replica in systems[name].replicas.values():
            replica.gone = True  # asleep: the desk wakes the first
        late += LATE * serial_s(loop)
    stage = Stage(scene, clock, systems)

    def stop() -> None:
        raise Stalled(f"not ended after {late:g} s", ())

    def starts(runner: Runner) -> None:
        stage.runner = runner
        begins(runner)

    clock.after(late, stop)
    ports: dict[str, Port] = dict.fromkeys([name for name in ADDRESSES if name != DESK], Ports(systems))
    ports |= {"devices": stage, "clock": stage}
    return ShareSide(clock=clock, ports=ports, ledger=ledger, deadline_s=late, watchers=(stage,), begins=starts)
