"""The phases of the lab `share` without ranks: the pipelines and the desk on a virtual clock, in milliseconds. Notebook side.

`shared` has the config's settings. `scripted` runs the desk with scripted pipelines (`scenarios.py`; with a fault of the desk, only the
one that exposes it). `rehearse` has failures that must not end a run: each scene is a separate run with its own ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kit.errors import KitError
from kit.labs.lab import Drive
from kit.labs.share.drive import OfPipeline, member
from kit.labs.share.lab import DESK, ShareConfig
from kit.labs.share.scenarios import SCENARIOS, for_config
from kit.labs.stream.lab import settings
from kit.loop.messages import Event
from kit.loop.runner import Runner, VirtualClock
from kit.results import Row
from kit.share.simulated import Devices, Ports, Simulation, simulate
from kit.stream.live import silent, written
from kit.stream.ports import Log, Meter, Watched
from kit.stream.settings import opening
from kit.stream.simulated import ADDRESSES, System, durations
from kit.target import load_callable

OF_THE_DESK = ("request_ms", "operation_ms", "admission_ms", "watchdog_ms")  # settings
LATE = (
    20  # times the seconds that all pipelines take one after the other, beside some limits: what takes longer is stuck
)
SHORT_MS = 50  # a limit that a scene reaches


def shared(drive: Drive) -> None:
    with written(drive) as rows:
        done = run(drive.config)
        rows.extend(done.rows)
    finished(done, drive.config)


def scripted(drive: Drive) -> None:
    with written(drive) as rows:
        names = [drive.scene["scenario"]] if "scenario" in drive.scene else for_config(drive.config)
        for name in names:
            rows.extend(SCENARIOS[name].run(drive.config).rows)


def rehearse(drive: Drive) -> None:
    with written(drive) as rows:
        for scene in scenes(drive.config):
            rows.extend(run(drive.config, scene).rows)


def finished(done: Simulation, config: ShareConfig) -> None:
    if left := [name for name in (*config.names, DESK) if name not in done.ended]:
        raise KitError(f"the run is stuck: {', '.join(left)} did not end")
    if errors := [one for one in done.ended.values() if one.get("why") == "error"]:
        raise KitError(f"a core ended with an error: {errors[0].get('error', 'no reason given')}")


# -- scenes -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Events at the first occurrence of a row: `at` is its name and some of its ids; `then` are events by receiving core. `devices` are
    options of the simulated devices, `limits` other settings of the desk."""

    name: str
    at: tuple[str, Mapping[str, Any]] = ("", {})
    then: tuple[tuple[str, Event], ...] = ()
    devices: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)


def dies(pipeline: str) -> tuple[tuple[str, Event], ...]:
    """The desk is informed that a pipeline is dead, and its core that it is over."""
    return (
        (DESK, Event("died", DESK, who=pipeline)),
        (pipeline, Event("error", pipeline, of="pipeline", why="killed, on purpose")),
    )


SCENES = (
    Scene(name="a pipeline dies while it generates", at=("completed", {"pipeline": "a"}), then=dies("a")),
    Scene(name="a pipeline dies while it trains", at=("microbatch", {"pipeline": "a"}), then=dies("a")),
    Scene(name="a pipeline dies while a replica of it wakes", at=("taken", {"who": "a"}), then=dies("a")),
    Scene(name="a pipeline dies while a replica of it falls asleep", at=("shrink", {"pipeline": "b"}), then=dies("b")),
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
    """The scenes that a config allows: all need both pipelines, those that lose a replica also another replica."""
    spare = config.planner != "static" and config.loops["a"].replicas > 1
    return [scene for scene in SCENES if len(config.names) > 1 and (spare or "broken" not in scene.devices)]


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
            self.dead |= {event.who for _, event in self.scene.then if event.name == "died"}


# -- a run ------------------------------------------------------------------------------------------------------------------


def run(config: ShareConfig, scene: Scene = Scene(name="as configured")) -> Simulation:
    clock, systems, cores, first = VirtualClock(), dict[str, System](), dict[str, Any](), list[Row]()
    late = 3 * max(getattr(config, name) for name in OF_THE_DESK) / 1000
    for name, loop in config.loops.items():
        plan, times = settings(loop), durations(loop)
        systems[name] = System(clock, times, replicas=loop.replicas, pipeline=name)
        for replica in systems[name].replicas.values():
            replica.gone = True  # asleep: the desk wakes the first
        cores[name] = member(config, name)
        first += [Row(metric=event, time=0.0, ids={**ids, "pipeline": name}) for event, ids in opening(plan)]
        late += (
            LATE
            * (loop.steps * loop.groups)
            * (loop.group * loop.answer[1] * times.token_s + times.train_s + times.sync_s)
        )
    cores[DESK] = load_callable(config.scheduler)(replace(config, **scene.limits))
    ports = dict.fromkeys([one for one in ADDRESSES if one != DESK], Ports(systems))
    meters = {name: Meter() for name in config.names}
    logs = Ports({name: Log(meter, silent) for name, meter in meters.items()})

    def watched(runner: Runner) -> None:
        devices.runner = runner
        runner.ledger = Watched(runner.ledger, *(OfPipeline(name, one) for name, one in meters.items()), devices)

    devices = Stage(scene, clock, systems)
    done = simulate(cores, {**ports, "log": logs}, clock, devices, until_s=late, prepare=watched)
    done.rows[:0] = first
    return done
