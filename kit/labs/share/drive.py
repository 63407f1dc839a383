"""The driven phases of the lab `share`: each pipeline alone, then all under the desk, from the same base weights and on the same ranks.

Alone, a pipeline has its devices to itself: the same loop and ports, but every request is granted at once and nothing sleeps. The results
of the phase `shared` are compared with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.errors import KitError
from kit.labs.lab import Drive
from kit.labs.share.lab import ALONE, DESK, PIPELINE, TRAINER, ShareConfig
from kit.labs.share.observer import Observer
from kit.labs.share.ports import Clock, Devices, Live, Ranks, every, started
from kit.labs.stream.lab import settings
from kit.loop.messages import Command, Event, Sink
from kit.loop.runner import Core, Port, RealClock, Runner
from kit.results import Row
from kit.share import core
from kit.share.member import Member, Own
from kit.share.planner import PLANNERS
from kit.share.simulated import Ports
from kit.share.state import Cluster, DeskSettings
from kit.stream.core import Controller
from kit.stream.live import OpenDesk, Prompts, RunLedger, silent
from kit.stream.ports import Log, Meter, Watched, replica_role
from kit.stream.settings import opening
from kit.target import load_callable


def alone(drive: Drive) -> None:
    name = drive.phase.removeprefix(ALONE)
    without_desk(drive, {name: range(drive.config.loops[name].replicas)})


def serial(drive: Drive) -> None:
    for name, loop in drive.config.loops.items():
        without_desk(drive, {name: range(loop.replicas)})


def static(drive: Drive) -> None:
    """All pipelines at once, each on the part of the devices that has its trainer. If they cannot be split so, none runs."""
    config = drive.config
    parts = {name: own_part(config, name) for name in config.names}
    if all(replicas for _, replicas in parts.values()) and len({at for at, _ in parts.values()}) == len(parts):
        without_desk(drive, {name: replicas for name, (_, replicas) in parts.items()})


def rehearse(drive: Drive) -> None:
    """Failures that must not end the others: a replica of a is killed while it wakes, and b's trainer in its second step."""
    shared(drive, {"a": WakingDies, "b": TrainerDies}, on_dead_replica="go-on")


def kill(drive: Drive, role: str) -> None:
    ranks = drive.roles[role]
    drive.lost |= {*ranks}
    drive.record("killed", None, text=role)
    os.kill(drive.world.pids[ranks[0]], signal.SIGKILL)


class WakingDies(Ranks):
    """A replica is killed when it is ordered to wake for the second time, if another one is left."""

    expands = 0

    def _move(self, name: str, command: Command) -> None:
        self.expands += command.name == "expand"
        if self.expands == len(self.moves) + 1 and command.name == "expand" and len(self.moves) > 1:
            kill(self.drive_of_run, f"{self.pipeline} {name}")
        super()._move(name, command)


class TrainerDies(Ranks):
    """The trainer is killed when it is ordered to train in its second step, or in its only one."""

    def _train(self, command: Command) -> None:
        if command.name == "microbatch" and command.step == min(1, self.drive.config.steps - 1):
            kill(self.drive_of_run, f"{self.pipeline} {TRAINER}")
        super()._train(command)


def own_part(config: ShareConfig, pipeline: str) -> tuple[int, tuple[int, ...]]:
    """The part of the devices that has a pipeline's trainer, and its replicas there; none if the trainer does not fit into one part."""
    loop, count = config.loops[pipeline], len(config.loops)
    train = loop.on_devices(TRAINER)
    at = train[0] * count // config.devices
    part = {device for device in range(config.devices) if device * count // config.devices == at}
    return at, tuple(replica for replica in range(loop.replicas) if {*loop.bundle(replica), *train} <= part)


def without_desk(drive: Drive, replicas: Mapping[str, Collection[int]]) -> None:
    """These pipelines at once, each with these replicas, without a desk between them."""
    roles = [f"{name} {role}" for name, numbers in replicas.items() for role in (TRAINER, *map(replica_role, numbers))]
    with begun(drive, roles, alone=True) as observer:
        parts = {
            name: Ranks(drive, name, map(replica_role, numbers), observer=observer)
            for name, numbers in replicas.items()
        }
        cores = {name: Without(controller(drive.config, name), name, numbers) for name, numbers in replicas.items()}
        run(drive, cores, parts, {"desk": OpenDesk()}, observer)


def shared(drive: Drive, kinds: Mapping[str, type[Ranks]] | None = None, **changes: Any) -> None:
    """All pipelines under the desk. `kinds` replaces the class of a pipeline's ranks; `changes`: changes to the controllers' settings."""
    config = drive.config
    with begun(drive, [*drive.roles], alone=False) as observer:
        parts = {name: (kinds or {}).get(name, Ranks)(drive, name, observer=observer) for name in config.names}
        cores: dict[str, Core[Any]] = {name: member(config, name, **changes) for name in config.names}
        cores[DESK] = load_callable(config.scheduler)(config)
        run(drive, cores, parts, {"devices": Devices(parts, observer), "clock": Clock()}, observer)


@contextlib.contextmanager
def begun(drive: Drive, roles: Sequence[str], *, alone: bool) -> Iterator[Observer]:
    """These roles at version 0, watched by an observer. Locks of devices are in the run's folder during the phase."""
    with (
        tempfile.TemporaryDirectory(prefix="devices-", dir=drive.folder) as folder,
        Observer(drive, Path(folder), for_desk=not alone) as observer,
    ):
        started(drive, roles, folder, alone=alone)
        observer.look()  # earlier events are not the desk's
        yield observer
        every(drive, "vacate", [name for name in drive.roles if not {*drive.roles[name]} & drive.lost])


def run(
    drive: Drive,
    cores: Mapping[str, Core[Any]],
    parts: Mapping[str, Ranks],
    more: Mapping[str, Port],
    observer: Observer,
) -> None:
    """Run the cores on live ranks until all have ended. `more` are the ports of the desk, or replace it."""
    clock, live = more.get("clock"), Live(drive, parts.values())
    meters = {name: Meter() for name in parts}
    ports: dict[str, Port] = {
        **dict.fromkeys(("trainer", "replica", "sync"), Ports(parts)),
        "data": Ports({name: Prompts() for name in parts}),
        "log": Ports({name: Log(meters[name], silent) for name in parts}),
        **more,
    }
    ledger = opened(ObservedLedger(drive, observer), meters, drive.config)
    began = time.time()
    runner = Runner(
        cores,
        ports,
        clock=RealClock(lambda seconds: live.wait(min(seconds, clock.left()) if isinstance(clock, Clock) else seconds)),
        ledger=ledger,
        deadline_s=drive.config.deadline_s,
    )
    ended = runner.run()
    for part in parts.values():
        if part.stuck is not None:
            raise part.stuck
        if part.ended_by is not None and not {*drive.roles[f"{part.pipeline} {TRAINER}"]} & drive.lost:
            raise part.ended_by  # it was not killed on purpose
    drive.record("makespan", time.time() - began, "s", pipelines=" ".join(parts))
    drive.record("core_seconds", sum(runner.own), "s", events=len(runner.own))
    for name, end in ended.items():
        if end.get("why") == "error" and not (name in parts and parts[name].gone):
            raise KitError(f"{name} ended with an error: {end.get('error', 'no reason given')}")


def opened(ledger: Sink, meters: Mapping[str, Meter], config: ShareConfig) -> Watched:
    """A ledger with the first rows of every pipeline. A meter's time begins with them, however late the loop starts."""
    watched = Watched(ledger, *(OfPipeline(name, meter) for name, meter in meters.items()))
    for name in meters:
        for event, ids in opening(settings(config.loops[name])):
            watched.write(Row(metric=event, time=time.time(), ids={**ids, "pipeline": name}))
    return watched


def controller(config: ShareConfig, pipeline: str, **changes: Any) -> Controller:
    return Controller(dataclasses.replace(settings(config.loops[pipeline]), **changes), pipeline=pipeline)


def member(config: ShareConfig, pipeline: str, **changes: Any) -> Member:
    core_of_it, known = controller(config, pipeline, **changes), clusters(config, pipeline)
    if config.pipeline == PIPELINE or pipeline != config.names[-1]:
        return Member(core_of_it, pipeline, known, desk=DESK)
    return Own(core_of_it, pipeline, known, desk=DESK, make=load_callable(config.pipeline))


def clusters(config: ShareConfig, pipeline: str) -> dict[str, Cluster]:
    loop = config.loops[pipeline]
    return {"trainer": Cluster(loop.on_devices(TRAINER)), "generation": Cluster(loop.infer, loop.infer_tp)}


def scheduler(config: ShareConfig) -> core.Scheduler:
    planner = None if config.planner in PLANNERS else load_callable(config.planner)
    return core.Scheduler(desk_settings(config), desk=DESK, planner=planner)


def desk_settings(config: ShareConfig) -> DeskSettings:
    return DeskSettings(
        devices=config.devices,
        pipelines=config.names,
        planner=config.planner,
        request_ms=config.request_ms,
        operation_ms=config.operation_ms,
        admission_ms=config.admission_ms if len(config.names) > 1 else 0,
        watchdog_ms=config.watchdog_ms,
    )


class Without:
    def __init__(self, core: Controller, name: str, replicas: Collection[int]) -> None:
        self.core = core
        self.name = name
        self.gone = [replica for replica in range(core.settings.replicas) if replica not in replicas]

    def begin(self) -> tuple[Any, tuple[Command, ...]]:
        state, commands = self.core.begin()
        for replica in self.gone:
            state, last_commands = self.core.step(state, Event("left", self.name, replica=replica))
            commands += last_commands
        return state, commands

    def step(self, state: Any, event: Event) -> tuple[Any, tuple[Command, ...]]:
        return self.core.step(state, event)


class ObservedLedger(RunLedger):
    """Also writes the rows of the observer."""

    def __init__(self, drive: Drive, observer: Observer) -> None:
        super().__init__(drive)
        self.observer = observer

    def flush(self) -> None:
        super().flush()
        self.observer.flush()


class OfPipeline:
    def __init__(self, name: str, meter: Meter) -> None:
        self.name = name
        self.meter = meter

    def see(self, row: Row) -> None:
        if row.ids.get("pipeline") == self.name:
            self.meter.see(row)
