"""Random worlds for the lab `share`: devices, pipelines with replicas of different sizes on overlapping devices, and what goes wrong there.
The desk and its planner are the lab's, or the user's own; pipelines are `Worker`s.

A `Worker` asks for devices as a loop does, with the work of each group as milliseconds and without samples, tokens or weights, so a world
takes milliseconds. Its rows are those of the lab's phase `shared`, and the lab's own rules judge them.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kit.labs.definition import NAMES, made, own_code
from kit.labs.share.desk import Limited
from kit.labs.share.drive import simulate_pipelines
from kit.labs.share.lab import DESK, MAIN, OWN, PipelineConfig, ShareConfig
from kit.labs.share.ledgers import judged_loop, loops_in, settled
from kit.labs.share.simulated import Scene, serial_s
from kit.loop.explore import A_SECOND, Judged, World
from kit.loop.messages import Command, Event, Memory
from kit.loop.runner import Answers, Runner, VirtualClock
from kit.results.records import Unjudged
from kit.results.rules import NotMeasured
from kit.share.judge import BY_DEMAND, RULES
from kit.share.judge.books import DeskLedger
from kit.share.judge.plans import MOST_SLEEPS, sleeps_in_a_row
from kit.share.simulated import Devices, simulate

SIZES = (1, 2, 2, 3, 4, 4, 4, 6, 8, 8, 12, 16, 32, 64)  # devices: mostly few, since most bugs need few
CROWDS = (1, 2, 2, 2, 3, 3, 4, 5, 6)  # pipelines
TENSOR_PARALLEL = (1, 1, 2, 2, 4)  # devices of a replica
MANY = 12  # devices: one of them is less than the 10 points by which shares may be off
PATIENCE = 20  # times the milliseconds that all pipelines take one after the other: what waits longer is stuck
FATES = (
    "pipeline dies",
    "replica dies",
    "replica dies",
    "replica removed",
    "planned release",
    "planned release",
    "leaves",
)


INCIDENTS = ("happens", "broken", "frail")


@dataclass(slots=True)
class Worker:
    """A pipeline with replicas that generate one group at a time each; it trains once all groups of a step are complete."""

    name: str
    pipeline: Mapping[str, Any]  # as in a world
    desk: str = DESK
    step_number: int = 0
    left: list[int] = field(default_factory=list)  # milliseconds of the groups that nobody generates
    # By replica: its alarm and the group's milliseconds.
    running: dict[int, tuple[int, int]] = field(default_factory=dict)
    awake: set[int] = field(default_factory=set)
    completed: int = 0
    serial: int = 0
    # The alarm that makes it release the trainer's devices, and what it has them for.
    busy: tuple[int, str] = (-1, "")
    generates: bool = True  # else it waits for the answer to its request
    admitted: bool = False
    leaving: bool = False

    def begin(self) -> tuple[int, tuple[Command, ...]]:
        return 0, (self.alarm(self.pipeline["start_ms"]),)

    def step(self, turns: int, event: Event) -> tuple[int, tuple[Command, ...]]:
        return turns + 1, tuple(self.react(event))

    def react(self, event: Event) -> Iterator[Command]:  # noqa: PLR0912 - one event a branch
        match event.name:
            case "alarm":
                yield from self.rings(event.number)
            case "admitted":
                self.admitted = True
                yield from self.starts()
            case "joined":
                self.awake.add(event.replica)
                yield from self.feed()
            case "left" | "died" if "replica" in dict(event.ids):
                yield from self.loses(event.replica)
                if event.name == "left":
                    ids = {"replica": event.replica, "devices": event.devices}
                    yield Command("shrink", "devices", self.name, **ids)
            case "released" if not self.leaving and self.step_number < len(self.pipeline["steps"]):
                yield from self.requests_generation()
            case "granted" if event.kind == "generation":
                self.generates = True
                yield from self.feed()
            case "granted" if not self.leaving:
                self.busy = self.serial + 1, event.kind
                yield self.alarm(self.pipeline[f"{event.kind}_ms"])
            case "error" if event.get("of") in ("pipeline", self.desk):
                yield Command("ended", "runner", self.name, why="error", error=event.get("why", ""))
            case "error" if event.get("of") in ("acquire", "register", "admit"):
                yield from self.leaves()
            case "leaves" if self.admitted:
                yield from self.leaves()
            case "releases" if self.admitted and not self.leaving:
                yield self.ask("planned_release")
            case "unregistered":
                yield Command("ended", "runner", self.name, why="done")

    def rings(self, number: int) -> Iterator[Command]:
        if number == 1:
            devices = {"trainer": self.pipeline["train"], "generation": self.pipeline["infer"]}
            yield self.ask("register", tp=self.pipeline["tp"], **devices)
            yield self.ask("admit")
        elif number == self.busy[0]:
            kind, self.busy = self.busy[1], (-1, "")
            yield from self.computed(kind)
        else:
            for replica, (alarm, _) in [*self.running.items()]:
                if alarm == number:
                    del self.running[replica]
                    yield from self.generated()

    # -- its steps ------------------------------------------------------------------------------------------------------------

    def starts(self) -> Iterator[Command]:
        if self.pipeline["initialisation_ms"]:
            yield self.ask("acquire", kind="initialisation")
        else:
            yield from self.awaits()
            yield from self.requests_generation()

    def requests_generation(self) -> Iterator[Command]:
        self.generates = not self.pipeline["waits"]
        groups = len(self.pipeline["steps"][self.step_number])
        estimate = {"target": groups} if self.pipeline["estimates"] else {}
        yield self.ask("acquire", kind="generation", **estimate)

    def awaits(self) -> Iterator[Command]:
        """The next step begins: all its groups are to be generated."""
        self.left = [*self.pipeline["steps"][self.step_number]]
        self.completed = 0
        yield from self.reports()
        if self.pipeline["validates"]:
            yield self.ask("progress", stream="validation", completed=0, target=2)
        yield from self.feed()

    def reports(self) -> Iterator[Command]:
        if self.pipeline["reports"]:
            target = len(self.pipeline["steps"][self.step_number])
            yield self.ask("progress", completed=self.completed, target=target)

    def generated(self) -> Iterator[Command]:
        self.completed += 1
        if self.pipeline["validates"]:
            yield self.ask("progress_end", stream="validation")
        if self.completed == len(self.pipeline["steps"][self.step_number]) and not self.leaving:
            yield self.ask("acquire", kind="logprobs" if self.pipeline["logprobs_ms"] else "training")
        yield from self.reports()
        yield from self.feed()

    def computed(self, kind: str) -> Iterator[Command]:
        """The trainer is done: with its set-up, with log-probabilities, or with a step."""
        if kind == "logprobs":
            yield self.ask("acquire", kind="training", release=kind)
        elif kind == "initialisation":
            yield self.ask("release", kind=kind)
            yield from self.awaits()
            yield from self.requests_generation()
        else:
            self.step_number += 1
            over = self.step_number == len(self.pipeline["steps"])
            if not over:
                yield from self.awaits()
            yield self.ask("release", kind=kind)
            if over:
                yield from self.leaves()

    def feed(self) -> Iterator[Command]:
        for replica in sorted(self.awake - self.running.keys()):
            if self.left and self.generates and not self.leaving:
                milliseconds = self.left.pop(0)
                command = self.alarm(milliseconds)
                self.running[replica] = self.serial, milliseconds
                yield command

    def loses(self, replica: int) -> Iterator[Command]:
        """What the replica generated is lost; another one starts from the beginning."""
        self.awake.discard(replica)
        if replica in self.running:
            self.left.insert(0, self.running.pop(replica)[1])
        yield from self.feed()

    def leaves(self) -> Iterator[Command]:
        if not self.leaving:
            self.leaving = True
            for stream in ("training", "validation"):
                yield self.ask("progress_end", stream=stream)
            yield self.ask("unregister")

    def ask(self, name: str, **ids: Any) -> Command:
        ids = {key: tuple(value) if isinstance(value, list) else value for key, value in ids.items()}
        return Command(name, self.desk, self.name, **ids)

    def alarm(self, milliseconds: int) -> Command:
        self.serial += 1
        return Command("after", "clock", self.name, number=self.serial, ms=milliseconds)


class Mortal(Devices):
    """`frail` replicas die when they are ordered to sleep, and answer nothing."""

    def __init__(self, clock: VirtualClock, frail: Iterable[tuple[str, int]], **options: Any) -> None:
        super().__init__(clock, {}, **options)
        self.frail = set(frail)

    def shrink(self, command: Command) -> Answers:
        name, replica = command.pipeline, command.replica
        if (name, replica) in self.frail:
            yield from ((self.sleep_s / 2, event) for _, event in events_of_death(name, replica))
        else:
            yield from super().shrink(command)


class ShareWorlds:
    """`settings` are those of the lab that name own code. Worlds have the layout of the config `like`, if there is one and it is no larger
    than theirs are."""

    own: ClassVar[tuple[str, ...]] = OWN
    phase: ClassVar[str] = MAIN
    rooms: ClassVar[tuple[str, ...]] = ("kit.share.core", "kit.share.planner", "kit.share.state")
    beyond: ClassVar[Mapping[str, str]] = {
        "no-validation": "the desk's trial of a plan matters only with a planner that makes wrong plans",
        "ignores-the-next-step": "how long devices stay idle is judged over a run of the lab: a right planner may waste a small world's",
    }

    def __init__(self, like: Mapping[str, Any] | None = None, **settings: Any) -> None:
        config: ShareConfig | None = None if like is None else made(ShareConfig, like)
        self.like = config if config is not None and is_small(config) else None
        self.settings = settings
        self.own_desk = bool(own_code(settings, ("scheduler",)))
        self.whole = "pipeline" in settings  # loops with samples, tokens and weights instead of `Worker`s

    # -- the draw -----------------------------------------------------------------------------------------------------------

    def draw(self, rng: random.Random) -> World:
        devices = rng.choice(SIZES) if self.like is None else self.like.devices
        world: World = {
            "devices": devices,
            "sleep_ms": rng.choice([1, 10, 50]),
            "wake_ms": rng.choice([1, 20, 80]),
            "admission": rng.random() < 0.3,
            "pipelines": [*self.draw_pipelines(rng, devices)],
            "broken": [],
            "happens": [],
            "frail": [],
        }
        for _ in range(0 if self.whole else rng.choice([0, 0, 0, 1, 1, 2])):
            draw_fates(rng, world)
        at = rng.randrange(len(world["pipelines"]))
        if not self.whole and rng.random() < 0.15 and (spare := spare_replicas(world["pipelines"][at])):
            world["frail"].append([at, rng.choice(spare)])
        if world["admission"] and rng.random() < 0.5:  # some pipelines come too late
            world["admission_ms"] = rng.choice([50, 500])
        if not self.whole:
            draw_losses(rng, world)
        if not (self.whole or self.own_desk):  # an own desk need not know that ranks restart
            draw_restarts(rng, world)
        return world

    def draw_pipelines(self, rng: random.Random, devices: int) -> Iterator[dict[str, Any]]:
        if self.like is not None:
            for loop in self.like.loops.values():
                yield draw_pipeline(rng, layout_of(loop))
        else:
            for _ in range(rng.choice(CROWDS)):
                yield draw_pipeline(rng, draw_layout(rng, devices))

    def sizes(self, world: World) -> dict[str, int]:
        return {
            "pipelines": len(world["pipelines"]),
            "devices": world["devices"],
            "steps": max(len(pipeline["steps"]) for pipeline in world["pipelines"]),
            "incidents": sum(len(world[key]) for key in INCIDENTS if key in world),
        }

    # -- a run ----------------------------------------------------------------------------------------------------------------

    def run(self, world: World, rows: Memory) -> None:
        config = self.config(world)
        if self.whole:
            times = {"sleep_s": world["sleep_ms"] / 1000, "wake_s": world["wake_ms"] / 1000}
            simulate_pipelines(config, Scene(name="explored", devices=times), rows)
            return
        clock, names = VirtualClock(), config.names
        cores: dict[str, Any] = {
            name: Worker(name, pipeline) for name, pipeline in zip(names, world["pipelines"], strict=True)
        }
        cores[DESK] = Limited(config)
        devices = Mortal(
            clock,
            [(names[at], replica) for at, replica in world.get("frail", [])],  # an older line has none
            desk=DESK,
            sleep_s=world["sleep_ms"] / 1000,
            wake_s=world["wake_ms"] / 1000,
            broken=[(names[at], replica) for at, replica in world["broken"]],
        )

        def happen(runner: Runner) -> None:
            for milliseconds, *fate in world["happens"]:
                clock.after(milliseconds / 1000, lambda fate=fate: runner.inbox.extend(events_of_fate(names, *fate)))  # type: ignore[misc]

        until_s = 3 * config.request_ms / 1000
        simulate(cores, {}, clock, devices, until_s=until_s, a_second=A_SECOND, prepare=happen, rows=rows)

    def judge(self, rows: Memory) -> Judged:
        ledger, judged = DeskLedger(rows), Judged()
        for rule in RULES:
            if self.own_desk and rule in BY_DEMAND:
                judged.unmeasured.append(rule.__name__)  # it divides devices as it likes
                continue
            try:
                measured = settled(rule, ledger)
            except NotMeasured:
                judged.unmeasured.append(rule.__name__)
            except Unjudged as error:
                judged.findings[rule.__name__] = str(error)
            else:
                judged.findings |= {rule.__name__: measured.why} if measured.value else {}
        with contextlib.suppress(NotMeasured):  # then `plan_valid` is not measured either
            measured = sleeps_in_a_row(ledger)
            judged.findings |= {"no_thrash": measured.why} if (measured.value or 0.0) > MOST_SLEEPS else {}
        if wrong := [*self.judge_loops(rows)] if self.whole else []:
            judged.findings["loops_right"] = wrong[0]
        return judged

    def judge_loops(self, rows: Memory) -> Iterator[str]:
        """Yield each rule of the lab stream that a pipeline's loop violates."""
        for name, loop in loops_in(rows):
            for rule, measured in judged_loop(loop):
                if measured.value:
                    yield f"pipeline {name}: {rule}: {measured.why}"

    def config(self, world: World) -> ShareConfig:
        """The lab's config of this world: own code gets it as it would in a run of the lab."""
        loops = {
            name: PipelineConfig(
                infer=tuple(pipeline["infer"]),
                infer_tp=pipeline["tp"],
                train=tuple(pipeline["train"]),
                steps=len(pipeline["steps"]),
                groups=len(pipeline["steps"][0]),
                slots=None,
                group=max(2, len(pipeline["train"])),
                micro_batch=1,
                pace_ms=max(1.0, pipeline["steps"][0][0] / 20),
                train_pace_ms=max(1.0, pipeline["training_ms"] / 10),
            )
            for name, pipeline in zip(NAMES, world["pipelines"], strict=False)
        }
        length = round(1000 * sum(map(serial_s, loops.values()))) if self.whole else serial_ms(world)
        return ShareConfig(
            simulated=True,
            size="125m",  # its heads can be divided by each tp; nothing is computed with it
            devices=world["devices"],
            pipelines=len(loops),
            loops=loops,
            request_ms=PATIENCE * length,
            operation_ms=PATIENCE * (world["sleep_ms"] + world["wake_ms"]),
            admission_ms=world.get("admission_ms", PATIENCE * length) if world["admission"] else 0,
            watchdog_ms=max(1, length // 4),
            **self.settings,
        )

    # -- smaller worlds -----------------------------------------------------------------------------------------------------

    def smaller(self, world: World) -> Iterator[World]:
        """One thing less each, the largest first. The layout of a config stays."""
        for candidate in self.reduced(world):
            if self.like is None or layouts(candidate) == layouts(world):
                yield candidate

    def reduced(self, world: World) -> Iterator[World]:
        for at in reversed(range(len(world["pipelines"]))):
            if len(world["pipelines"]) > 1:
                yield without_pipeline(world, at)
        for key in INCIDENTS:
            for at in range(len(world.get(key, []))):
                yield {**world, key: world[key][:at] + world[key][at + 1 :]}
        if world["admission"]:
            yield {**world, "admission": False}
        for at, pipeline in enumerate(world["pipelines"]):
            for change in smaller_pipelines(pipeline):
                changed = {**world, "pipelines": [*world["pipelines"]]}
                changed["pipelines"][at] = {**pipeline, **change}
                yield changed
        if len(used := sorted(used_devices(world))) < world["devices"]:
            yield on_devices(world, used)


def is_small(config: ShareConfig) -> bool:
    return config.devices <= max(SIZES) and len(config.loops) <= max(CROWDS)


def layouts(world: World) -> tuple[Any, ...]:
    return world["devices"], [[pipeline[name] for name in ("tp", "infer", "train")] for pipeline in world["pipelines"]]


def layout_of(loop: PipelineConfig) -> dict[str, Any]:
    return {"tp": loop.infer_tp, "infer": [*loop.infer], "train": [*(loop.train or ())]}


def draw_layout(rng: random.Random, devices: int) -> dict[str, Any]:
    """A trainer, and replicas of tp devices each, on any devices; replicas use all of the trainer's devices, or none."""
    tp = rng.choice([size for size in TENSOR_PARALLEL if size <= devices])
    order = rng.sample(range(devices), devices) if rng.random() < 0.4 else [*range(devices)]
    most = devices // tp
    replicas = most if rng.random() < 0.5 else rng.randint(1, most)
    infer = order[: min(replicas, 16) * tp]
    apart = [device for device in range(devices) if device not in infer]
    pool = apart if apart and rng.random() < 0.3 else infer
    train = sorted(rng.sample(pool, rng.choice([1, 1, min(2, len(pool)), rng.randint(1, min(len(pool), 8))])))
    return {"tp": tp, "infer": infer, "train": train}


def draw_pipeline(rng: random.Random, layout: Mapping[str, Any]) -> dict[str, Any]:
    """A pipeline with this layout: how it works, and how long everything takes."""
    heavy, reports = rng.random() < 0.3, rng.random() < 0.85
    return {
        **layout,
        "start_ms": rng.choice([0, 0, 0, rng.randint(1, 2000)]),
        "steps": [
            [draw_milliseconds(rng, heavy=heavy) for _ in range(rng.choice([1, 2, 3, 4, 8]))]
            for _ in range(rng.choice([1, 1, 2, 3]))
        ],
        "initialisation_ms": rng.choice([0, 0, 10, 300]),
        "logprobs_ms": rng.choice([0, 0, 0, 20, 200]),
        "training_ms": rng.choice([1, 50, 200, 1000]),
        "reports": reports,
        "estimates": not reports or rng.random() < 0.3,  # the desk must know its demand from one of the two
        "validates": reports and rng.random() < 0.2,
        "waits": rng.random() < 0.3,
    }


def draw_fates(rng: random.Random, world: World) -> None:
    """Something happens to a pipeline, and sometimes something else to the same one right after it. Its replica 0 stays."""
    at = rng.randrange(len(world["pipelines"]))
    pipeline = world["pipelines"][at]
    spare = spare_replicas(pipeline)
    when = rng.randint(1, 1 + serial_ms(world) // rng.choice([1, 2, 4, 8]))  # pipelines at the same time end earlier
    if spare and rng.random() < 0.2:
        world["broken"].append([at, rng.choice(spare)])
    for _ in range(rng.choice([1, 2, 2])):
        fate = rng.choice(FATES)
        if not fate.startswith("replica"):
            world["happens"].append([when, fate, at, -1])
        elif spare:
            world["happens"].append([when, fate, at, rng.choice(spare)])
        when += rng.randint(1, 1 + world["sleep_ms"])  # while replicas still fall asleep


def draw_losses(rng: random.Random, world: World) -> None:
    """Where there are many devices, several replicas die: each loss is too small to put shares out of balance."""
    if world["devices"] < MANY:
        return
    for _ in range(rng.choice([0, 8, 16])):
        at = rng.randrange(len(world["pipelines"]))
        if spare := spare_replicas(world["pipelines"][at]):
            when = rng.randint(1, 1 + serial_ms(world) // rng.choice([8, 16, 32]))
            world["happens"].append([when, "replica dies", at, rng.choice(spare)])


def draw_restarts(rng: random.Random, world: World) -> None:
    """New ranks replace some of the replicas that die."""
    for when, fate, at, replica in [*world["happens"]]:
        if fate == "replica dies" and rng.random() < 0.5:
            world["happens"].append([when + rng.randint(1, 1 + serial_ms(world) // 8), "replica restarts", at, replica])


def spare_replicas(pipeline: Mapping[str, Any]) -> range:
    return range(1, len(pipeline["infer"]) // pipeline["tp"])


def draw_milliseconds(rng: random.Random, *, heavy: bool) -> int:
    """The time of a group: about 100 ms, or with a long tail."""
    return round(min(5000.0, 50 * rng.paretovariate(1.2))) if heavy else rng.randint(20, 200)


def serial_ms(world: World) -> int:
    """What all pipelines take one after the other on one replica each, at most."""
    moves = 2 * (world["sleep_ms"] + world["wake_ms"])
    return sum(
        pipeline["start_ms"]
        + pipeline["initialisation_ms"]
        + sum(
            sum(step) + sum(pipeline[name] for name in ("logprobs_ms", "training_ms")) + moves
            for step in pipeline["steps"]
        )
        for pipeline in world["pipelines"]
    )


def events_of_fate(names: Sequence[str], fate: str, at: int, replica: int) -> Iterator[tuple[str, Event]]:
    name = names[at]
    match fate:
        case "pipeline dies":
            yield DESK, Event("died", DESK, who=name)
            yield name, Event("error", name, of="pipeline", why="killed, on purpose")
        case "replica dies":
            yield from events_of_death(name, replica)
        case "replica restarts":
            yield DESK, Event("restarted", DESK, who=name, replica=replica)
        case "replica removed":
            yield DESK, Event("resize", name, remove=(replica,))
        case "planned release":
            yield name, Event("releases", name)
        case "leaves":
            yield name, Event("leaves", name)


def events_of_death(name: str, replica: int) -> Iterator[tuple[str, Event]]:
    yield DESK, Event("died", DESK, who=name, replica=replica)
    yield name, Event("died", name, replica=replica)


# -- smaller worlds -------------------------------------------------------------------------------------------------------------


def without_pipeline(world: World, at: int) -> World:
    """Pipelines after it move up by one."""

    def moved(index: int) -> int:
        return index - (index > at)

    return {
        **world,
        "pipelines": world["pipelines"][:at] + world["pipelines"][at + 1 :],
        "happens": [[ms, fate, moved(who), replica] for ms, fate, who, replica in world["happens"] if who != at],
        **{
            key: [[moved(who), replica] for who, replica in world.get(key, []) if who != at]
            for key in ("broken", "frail")
        },
    }


def smaller_pipelines(pipeline: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Changes to a pipeline, each of which makes it smaller or plainer."""
    steps, infer, train, tp = (pipeline[name] for name in ("steps", "infer", "train", "tp"))
    if len(steps) > 1:
        yield {"steps": steps[:1]}
        yield {"steps": steps[:-1]}
    for at, groups in enumerate(steps):
        if len(groups) > 1:
            yield {"steps": [*steps[:at], groups[: len(groups) // 2], *steps[at + 1 :]]}
    if len(train) > 1 or train != infer[:1]:
        yield {"infer": infer[:tp], "train": infer[:1]}
    outside = not {*train} & {*infer}
    fewer = [infer[:count] for count in sorted({tp, len(infer) // tp // 2 * tp}) if 0 < count < len(infer)]
    fewer += [infer[:at] + infer[at + tp :] for at in range(0, len(infer), tp) if len(infer) > tp]
    yield from ({"infer": kept} for kept in fewer if outside or {*train} <= {*kept})
    if len(train) > 1:
        yield {"train": train[:1]}
    if tp > 1:
        yield {"tp": 1}
    if infer != sorted(infer):
        yield {"infer": sorted(infer)}
    plain = {
        **dict.fromkeys(("start_ms", "initialisation_ms", "logprobs_ms"), 0),
        **dict.fromkeys(("validates", "waits"), False),
        "training_ms": 100,
        "steps": [[100] * len(groups) for groups in steps],
    }
    # Together, since the desk must know the demand from one of the two.
    demand: dict[str, Any] = {"reports": True, "estimates": False}
    for change in (demand, *({name: value} for name, value in plain.items())):
        if not change.items() <= pipeline.items():
            yield change


def used_devices(world: World) -> set[int]:
    return {device for pipeline in world["pipelines"] for device in (*pipeline["infer"], *pipeline["train"])}


def on_devices(world: World, used: Sequence[int]) -> World:
    """The same world without the devices that nobody names."""
    number = {device: at for at, device in enumerate(used)}
    pipelines = [
        {**pipeline, **{name: [number[device] for device in pipeline[name]] for name in ("infer", "train")}}
        for pipeline in world["pipelines"]
    ]
    return {**world, "devices": len(used), "pipelines": pipelines}
