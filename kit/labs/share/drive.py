"""The driven phases of the lab `share`: each pipeline alone, then all under the desk, from the same base weights and on the same ranks.

Alone, a pipeline has its devices to itself: the same loop and ports, but every request is granted at once and nothing sleeps. The results
of the phase `shared` are compared with it. `shared` and `rehearse` also run on simulated ranks (`simulated.py`), in milliseconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.labs.lab import Drive
from kit.labs.share.desk import Limited, desk_settings
from kit.labs.share.lab import ALONE, DESK, PIPELINE, TRAINER, ShareConfig
from kit.labs.share.ledgers import spans
from kit.labs.share.observer import Observer
from kit.labs.share.ports import AlarmClock, Live, LiveDevices, Ranks, pipeline_roles, started, vacate
from kit.labs.share.scenarios import SCENARIOS, for_config
from kit.labs.share.simulated import AS_CONFIGURED, Scene, ShareSide, refuse_broken, scenes, simulated_side
from kit.labs.stream.lab import settings
from kit.loop.messages import Command, Event, Memory
from kit.loop.runner import Core, Port, RealClock, Runner, Stalled, VirtualClock, made_code
from kit.results import Row, Unjudged
from kit.results.records import Id
from kit.share import core
from kit.share.judge.books import DeskLedger
from kit.share.member import Member, Own, begin_without
from kit.share.planner import PLANNERS
from kit.share.simulated import DeskSimulation, Devices, Ports
from kit.share.state import Cluster
from kit.stream.adapters import ReportsByAdapter
from kit.stream.core import Controller
from kit.stream.live import OpenDesk, Prompts, RunLedger, written_rows
from kit.stream.ports import Meter, StepLog, Watched, replica_role
from kit.stream.rewards import AwaitsRewards
from kit.stream.settings import opening
from kit.stream.sides import LoopSide, silent
from kit.stream.simulated import ADDRESSES, System, durations
from kit.target import load_callable
from kit.train.draws import reward_wait_s


def alone(drive: Drive) -> None:
    name = drive.phase.removeprefix(ALONE)
    without_desk(drive, {name: range(drive.config.loops[name].replicas)})


def static(drive: Drive) -> None:
    """All pipelines at once, each on the part of the devices that has its trainer. If they cannot be split so, none runs."""
    config = drive.config
    parts = {name: own_part(config, name) for name in config.names}
    if all(replicas for _, replicas in parts.values()) and len({at for at, _ in parts.values()}) == len(parts):
        without_desk(drive, {name: replicas for name, (_, replicas) in parts.items()})


def shared(drive: Drive) -> None:
    together(drive, AS_CONFIGURED)


def rehearse(drive: Drive) -> None:
    """Failures that must not end the others. On ranks a replica of a is killed while it wakes, and b's trainer in its second step."""
    for scene in scenes(drive.config) if drive.config.simulated else (DEATHS,):
        together(drive, scene)


def scripted(drive: Drive) -> None:
    """The desk with scripted pipelines on a virtual clock; with a fault of the desk, only the script that exposes it."""
    with written_rows(drive) as rows:
        names = [drive.scene["scenario"]] if "scenario" in drive.scene else for_config(drive.config)
        for name in names:
            rows.extend(SCENARIOS[name].run(drive.config).rows)


def together(drive: Drive, scene: Scene) -> None:
    """All pipelines under the desk, once."""
    config = drive.config
    if config.simulated:
        with written_rows(drive) as rows:
            ended = simulate_pipelines(config, scene, rows).ended
            with contextlib.suppress(Unjudged):  # a ledger that does not add up has no owners; the rules say so
                rows.extend(owned_devices(rows))
        if scene is AS_CONFIGURED:
            refuse_broken(ended, (*config.names, DESK))
        return
    with begun(drive, pipeline_roles(drive), alone=False) as observer:
        kinds = LIVE_DEATHS if scene is DEATHS else {}
        parts = {name: kinds.get(name, Ranks)(drive, name, observer=observer) for name in config.names}
        desk: dict[str, Port] = {"devices": LiveDevices(parts, observer), "clock": AlarmClock()}
        run_cores(under_desk(config, scene), config, live_side(drive, parts, desk, observer))


def owned_devices(rows: Iterable[Row]) -> Iterator[Row]:
    """A span for the timeline for each owner of each device, which on ranks the observer sees."""
    for span in spans(DeskLedger(rows)):
        at: dict[str, Any] = {"start": span.left, "time": span.right, "text": f"{span.pipeline}.{span.role}"}
        for device in span.devices:
            ids: dict[str, Id] = {"track": f"device {device}", "device": device}
            yield Row(metric="owned", value=span.right - span.left, unit="s", ids=ids, **at)


def simulate_pipelines(config: ShareConfig, scene: Scene = AS_CONFIGURED, rows: Memory | None = None) -> DeskSimulation:
    """All pipelines and the desk on simulated ranks; `ended` lacks those that have not ended. `rows` is the ledger to write."""
    rows = Memory() if rows is None else rows
    runners: list[Runner] = []
    with contextlib.suppress(Stalled):
        run_cores(under_desk(config, scene), config, simulated_side(config, scene, rows, runners.append))
    return DeskSimulation(rows, runners[0].ended, runners[0])


def simulate_alone(config: ShareConfig, pipeline: str, replicas: Collection[int]) -> float:
    """The seconds of one pipeline with these replicas and without a desk, on simulated ranks."""
    clock, rows, loop = VirtualClock(), Memory(), config.loops[pipeline]
    system = System(clock, durations(loop), replicas=loop.replicas, pipeline=pipeline)
    ports: dict[str, Port] = {**dict.fromkeys(ADDRESSES, system), "clock": Devices(clock, {})}
    side = ShareSide(clock=clock, ports=ports, ledger=rows, deadline_s=config.deadline_s)
    run_cores({pipeline: without(config, pipeline, replicas)}, config, side)
    return rows[-1].time


def under_desk(config: ShareConfig, scene: Scene) -> dict[str, Core[Any]]:
    pipelines: dict[str, Core[Any]] = {name: member(config, name, **scene.settings) for name in config.names}
    return {**pipelines, DESK: Limited(dataclasses.replace(config, **scene.limits))}


# -- deaths on ranks ------------------------------------------------------------------------------------------------------


def kill(drive: Drive, role: str) -> None:
    ranks = drive.roles[role]
    drive.lost |= {*ranks}
    drive.record("killed", None, text=role)
    drive.world.kill_rank(ranks[0])


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


DEATHS = Scene(name="a replica of a dies while it wakes, and the trainer of b", settings={"on_dead_replica": "go-on"})
LIVE_DEATHS: Mapping[str, type[Ranks]] = {"a": WakingDies, "b": TrainerDies}


# -- without a desk -------------------------------------------------------------------------------------------------------


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
        cores = {name: without(drive.config, name, numbers) for name, numbers in replicas.items()}
        run_cores(cores, drive.config, live_side(drive, parts, {"desk": OpenDesk(), "clock": AlarmClock()}, observer))


# -- a run ----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def begun(drive: Drive, roles: Sequence[str], *, alone: bool) -> Iterator[Observer]:
    """These roles at version 0, watched by an observer. Locks of this machine's devices are in the run's folder during the phase."""
    with (
        tempfile.TemporaryDirectory(prefix="devices-", dir=drive.folder) as folder,
        Observer(drive, Path(folder), for_desk=not alone) as observer,
    ):
        started(drive, roles, observer, alone=alone)
        observer.look()  # earlier events are not the desk's
        yield observer
        vacate(drive, [name for name in pipeline_roles(drive) if not {*drive.roles[name]} & drive.lost])


def live_side(drive: Drive, parts: Mapping[str, Ranks], desk: Mapping[str, Port], observer: Observer) -> ShareSide:
    """The ranks of these pipelines. `desk`: the ports of the desk, or one that replaces it."""
    live, clock = Live(drive, parts.values()), desk.get("clock")
    began = time.time()

    def wait(seconds: float) -> None:
        live.wait(min(seconds, clock.left()) if isinstance(clock, AlarmClock) else seconds)

    def ends(runner: Runner) -> None:
        for part in parts.values():
            if part.stuck is not None:
                raise part.stuck
            if part.ended_by is not None and not {*drive.roles[f"{part.pipeline} {TRAINER}"]} & drive.lost:
                raise part.ended_by  # it was not killed on purpose
        drive.record("makespan", time.time() - began, "s", pipelines=" ".join(parts))
        drive.record("core_seconds", sum(runner.own), "s", events=len(runner.own))
        # A pipeline may end with its trainer's last call, before all its replicas have left their devices.
        gone = {name for name, part in parts.items() if part.ended_by is not None}
        refuse_broken({name: end for name, end in runner.ended.items() if name not in gone})

    ports: dict[str, Port] = {
        **dict.fromkeys(("trainer", "replica", "sync"), Ports(parts)),
        "data": Ports({name: Prompts() for name in parts}),
        **desk,
    }
    ledger = ObservedLedger(drive, observer)
    return ShareSide(clock=RealClock(wait), ports=ports, ledger=ledger, deadline_s=drive.config.deadline_s, ends=ends)


def run_cores(cores: Mapping[str, Core[Any]], config: ShareConfig, side: ShareSide) -> None:
    """Run pipelines, with or without a desk, until all have ended."""
    meters = {name: Meter() for name in cores if name in config.loops}
    ledger = opened(side, meters, config)
    ledger.watchers += side.watchers
    ports = {**side.ports, "log": Ports({name: StepLog(meter, silent) for name, meter in meters.items()})}
    runner = Runner(cores, ports, clock=side.clock, ledger=ledger, deadline_s=side.deadline_s)
    side.begins(runner)
    runner.run()
    side.ends(runner)


def opened(side: LoopSide, meters: Mapping[str, Meter], config: ShareConfig) -> Watched:
    """A side's ledger with the first rows of every pipeline. A meter's time begins with them, however late the loop starts."""
    watched = Watched(side.ledger, *(OfPipeline(name, meter) for name, meter in meters.items()))
    for name in meters:
        for event, ids in opening(settings(config.loops[name])):
            watched.write(Row(metric=event, time=side.clock.now(), ids={**ids, "pipeline": name}))
    return watched


# -- cores ----------------------------------------------------------------------------------------------------------------


def controller(config: ShareConfig, pipeline: str, **changes: Any) -> Core[Any]:
    loop = config.loops[pipeline]
    core_of_it = Controller(dataclasses.replace(settings(loop), **changes), pipeline=pipeline)
    if not loop.reward_ms[1]:
        return core_of_it
    seconds = functools.partial(reward_wait_s, loop.seed, loop.reward_ms)
    return AwaitsRewards(core_of_it, pipeline, seconds)


def member(config: ShareConfig, pipeline: str, **changes: Any) -> Member:
    core_of_it, known = controller(config, pipeline, **changes), clusters(config, pipeline)
    if config.pipeline != PIPELINE and pipeline == config.names[-1]:
        return Own(core_of_it, pipeline, known, desk=DESK, make=functools.partial(made_code, config.pipeline))
    loop = config.loops[pipeline]
    if loop.adapters:
        core_of_it = ReportsByAdapter(core_of_it, pipeline, adapters=loop.adapters, groups=loop.groups)
    return Member(core_of_it, pipeline, known, desk=DESK)


def clusters(config: ShareConfig, pipeline: str) -> dict[str, Cluster]:
    loop = config.loops[pipeline]
    return {"trainer": Cluster(loop.on_devices(TRAINER)), "generation": Cluster(loop.infer, loop.infer_tp)}


def scheduler(config: ShareConfig) -> core.Scheduler:
    planner = None if config.planner in PLANNERS else load_callable(config.planner)
    return core.Scheduler(desk_settings(config), desk=DESK, planner=planner)


def without(config: ShareConfig, pipeline: str, replicas: Collection[int]) -> Without:
    gone = [replica for replica in range(config.loops[pipeline].replicas) if replica not in replicas]
    return Without(controller(config, pipeline), pipeline, gone)


class Without:
    """A loop without a desk, with some of its replicas only."""

    def __init__(self, core: Core[Any], name: str, gone: Collection[int]) -> None:
        self.core = core
        self.name = name
        self.gone = gone

    def begin(self) -> tuple[Any, tuple[Command, ...]]:
        return begin_without(self.core, self.name, self.gone)

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
