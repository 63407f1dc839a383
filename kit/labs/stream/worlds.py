"""Random worlds for the lab `stream`: a controller, the kit's or the user's own, with simulated replicas, trainer, data and sync.

A world has settings of the loop, a pace of everything, lengths of answers with or without a long tail, and what goes wrong. The lab's own
rules judge its ledger.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from kit.labs.definition import made, own_code
from kit.labs.stream.drive import Stopped, Stopping
from kit.labs.stream.lab import OWN, StreamConfig, settings
from kit.labs.stream.sides import PIPELINE, broken_logger
from kit.loop.explore import A_SECOND, Judged, World
from kit.loop.messages import Memory
from kit.loop.runner import Stalled, made_core
from kit.results.records import Unjudged
from kit.results.rules import Measured, Missing, NotMeasured, Violations, settle
from kit.stream import core
from kit.stream.judge import RULES, resume_equals
from kit.stream.judge.history import LoopLedger
from kit.stream.settings import SAMPLERS, Resume, StreamSettings
from kit.stream.simulated import Durations, System, simulate
from kit.target import load_callable

OF_THE_LAB = (  # what a world and the lab's config have in common
    "window",
    "groups",
    "group",
    "min_groups",
    "places",
    "slots",
    "steps",
    "replicas",
    "at_sync",
    "filter",
    "on_failed",
    "floor",
)
# As in a config, where there is one; the sizes only of a loop with at most MOST_SAMPLES samples at once.
MANNERS = ("sampler", "window", "at_sync", "filter", "on_failed")
LOOP_SIZES = ("groups", "group", "updates", "min_groups", "floor", "places", "slots", "replicas")
MOST_SAMPLES = 64
HAPPENS = ("died", "left", "joined")
FAILS = ("begin", "microbatch", "finish", "clear")
FIRST_JOINED = 100  # the number of the first replica that joins
BOUNDS = {"groups": 1, "group": 2, "steps": 1, "replicas": 1, "window": 0}  # the least of each


class StreamWorlds:
    """`settings` are those of the lab that name own code. Worlds have the loop of the config `like`, if there is one; a loop too large for
    a world only its manners."""

    own: ClassVar[tuple[str, ...]] = OWN
    phase: ClassVar[str] = "stream"
    rooms: ClassVar[tuple[str, ...]] = ("kit.stream.core", "kit.stream.generation", "kit.stream.settings")
    beyond: ClassVar[Mapping[str, str]] = {}

    def __init__(self, like: Mapping[str, Any] | None = None, **settings: Any) -> None:
        self.like: StreamConfig | None = None if like is None else made(StreamConfig, like)
        # What worlds have as the config has it.
        self.kept = () if self.like is None else MANNERS + LOOP_SIZES * is_explorable(self.like)
        self.settings = settings
        # Own code may wait for whole steps, unless a config says that it does not.
        self.own_code = bool(own_code(settings, OWN))

    def draw(self, rng: random.Random) -> World:
        world = awaits_prompts(self.draw_any(rng), rng)
        return world if self.like is None else with_loop(world, self.like, self.kept)

    def draw_any(self, rng: random.Random) -> World:
        sampler = self.settings.get("sampler") or rng.choice([*SAMPLERS])
        window = 0 if sampler == "strict" else rng.choice([0, 1, 1, 2, 3])
        groups = rng.choice([1, 2, 2, 3, 4, 6])
        places = groups * (window + 1) + rng.choice([0, 0, 1, groups])
        steps, replicas = rng.choice([1, 2, 3, 4, 6]), rng.choice([1, 2, 2, 3, 4])
        retries = rng.choice([0, 0, 1, 2])
        happens = draw_happens(rng, replicas)
        stops = steps > 1 and not happens and rng.random() < 0.3
        return {
            "sampler": sampler,
            "window": window,
            "groups": groups,
            "group": rng.choice([2, 2, 3, 4]),
            "updates": rng.choice([count for count in (1, 1, 2, 3) if groups % count == 0]),
            "min_groups": max(rng.randint(1, groups), groups * self.own_code),
            "places": places,
            "slots": rng.choice([places, rng.randint(1, places)]),
            "steps": steps,
            "replicas": replicas,
            "at_sync": rng.choice(["keep", "recompute", "abort", "drain"]),
            "filter": rng.random() < 0.1,
            "retries": retries,
            "lengths": [rng.randint(1, 4), rng.choice([4, 8, 40])],
            "tail": rng.random() < 0.3,
            "lengths_seed": rng.randrange(1000),
            "flat": rng.choice([0.0, 0.0, 0.3]),
            "token_ms": rng.choice([1, 10, 40]),
            "span": rng.choice([1, 4, 8]),
            "train_ms": rng.choice([0, 1, 50, 400]),
            "sync_ms": rng.choice([0, 5, 100]),
            "prompts": None if stops else rng.choice([None, None, None, rng.randint(0, groups * (steps + 1))]),
            "fails": {} if stops else draw_failures(rng, groups, steps, retries),
            "on_failed": rng.choice(["replace", "shrink"]) if groups > 1 else "replace",
            "logger": rng.choice(["works", "works", "raises"]),
            "resume": rng.randint(1, steps - 1) if stops else 0,  # after this version also stopped and resumed; 0: not
            "happens": happens,
            "prompt_ms": rng.choice([0, 0, 5, 50]),
            "later": rng.choice([0, 0, 1, 2, 4]),  # how many events after that version it stops
            "floor": rng.choice([1, groups]),  # with `groups`, a step that would shrink ends the loop
        }

    def sizes(self, world: World) -> dict[str, int]:
        return {name: world[name] for name in ("steps", "groups", "group", "replicas")} | {
            "incidents": len(world["happens"]) + len(world["fails"])
        }

    # -- a run ----------------------------------------------------------------------------------------------------------------

    def run(self, world: World, rows: Memory) -> None:
        self.loop(world, rows)
        if world["resume"]:
            resumed = Memory()
            try:
                self.loop(world, resumed, start=core.resume_from(self.state_at_stop(world)))
            finally:
                rows += [dataclasses.replace(row, phase="resume") for row in resumed]

    def state_at_stop(self, world: World) -> Any:
        """The state of a loop that stops, in some worlds with a prompt at hand, if there is such a moment."""
        stopping = self.loop(world, Memory(), until=world["resume"], has_prompt=world.get("has_prompt", False))
        if not stopping.stopped and stopping.has_prompt:
            stopping = self.loop(world, Memory(), until=world["resume"])
        return stopping.state

    def loop(
        self,
        world: World,
        rows: Memory,
        *,
        until: int | None = None,
        has_prompt: bool = False,
        start: Resume | None = None,
    ) -> Stopping:
        """Run the controller to its end or up to a version."""
        plan = loop_settings(world)
        target = self.settings.get("implementation") or StreamConfig().implementation
        made = made_core(target, plan, *([] if start is None else [start]))
        later = 0 if has_prompt else world.get("later", 0)
        machine = Stopping(made, until, later=later, has_prompt=has_prompt)

        def happen(system: System) -> None:
            for milliseconds, event, replica in world["happens"]:
                system.schedule(event, replica, milliseconds / 1000)

        with contextlib.suppress(Stopped, Stalled):  # a ledger without an end says that it stalled
            simulate(
                plan,
                pace_of(world),
                prompts=world["prompts"],
                core=machine,
                resume=start,
                sampler=load_callable(plan.sampler) if ":" in plan.sampler else None,
                prepare=happen,
                logger=broken_logger if world["logger"] == "raises" else None,
                rows=rows,
                pipeline=PIPELINE,
                fails=world["fails"],
                a_second=A_SECOND,
            )
        return machine

    def judge(self, rows: Memory) -> Judged:
        whole, resumed = (
            LoopLedger([row for row in rows if (row.phase == "resume") is again]) for again in (False, True)
        )
        judged = Judged()
        for ledger in (resumed, whole) if resumed.rows else (whole,):
            ask(judged, "no_deadlock", lambda ledger=ledger: ends_well(ledger))  # type: ignore[misc]
            for rule in RULES:
                ask(judged, rule.__name__, lambda rule=rule, ledger=ledger: answer_of_rule(rule, ledger))  # type: ignore[misc]
        if resumed.rows:
            ask(judged, "resume_equals", lambda: resume_equals(whole, resumed))
        return judged

    def config(self, world: World) -> StreamConfig:
        """What of the world the lab's config has; the rest is in the world."""
        low, high = world["lengths"]
        return StreamConfig(
            simulated=True,
            ranks=1,
            **{name: world[name] for name in OF_THE_LAB if name in world},
            **{"sampler": world["sampler"], **self.settings},
            batch=world["groups"] * world["group"] // world["updates"],
            answer=(low, max(low, high)),
            on_dead_replica="go-on",
            pace_ms=float(world["token_ms"]),
        )

    # -- smaller worlds ---------------------------------------------------------------------------------------------------------

    def smaller(self, world: World) -> Iterator[World]:
        for candidate in self.reduced(world):
            if all(candidate[name] == world[name] for name in self.kept):
                yield candidate

    def reduced(self, world: World) -> Iterator[World]:
        for at in range(len(world["happens"])):
            yield {**world, "happens": world["happens"][:at] + world["happens"][at + 1 :]}
        for name in world["fails"]:
            yield {**world, "fails": {other: step for other, step in world["fails"].items() if other != name}}
        if world["resume"]:
            yield {**world, "resume": 0}
        for name, least in BOUNDS.items():
            for value in sorted({least, (world[name] + least) // 2, world[name] - 1}):
                if least <= value < world[name] and not (name == "window" and world["sampler"] == "strict"):
                    yield consistent_world({**world, name: value})
        low, _ = world["lengths"]
        plain = {
            "tail": False,
            "filter": False,
            "flat": 0.0,
            "retries": 0,
            "logger": "works",
            "prompts": None,
            "updates": 1,
            "min_groups": 1,
            "floor": 1,
            "lengths": [low, low],
            "span": 1,
            "train_ms": 1,
            "sync_ms": 1,
            "token_ms": 1,
            "prompt_ms": 0,
            "later": 0,
            "has_prompt": False,
        }
        for name, value in plain.items():
            if world.get(name, value) != value and not (name == "retries" and world["fails"]):
                yield {**world, name: value}


def ask(judged: Judged, name: str, violations: Callable[[], Measured | Violations]) -> None:
    """Add the answer of a rule. It is unmeasured if no ledger of the world has what it needs."""
    try:
        measured = settle(violations())
    except NotMeasured:
        judged.unmeasured.append(name)
    except (Unjudged, KeyError, ValueError, IndexError) as error:
        judged.findings[name] = f"{type(error).__name__}: {error}"
    else:
        judged.findings |= {name: measured.why} if measured.value else {}


def answer_of_rule(rule: Callable[[LoopLedger], Measured | Violations], ledger: LoopLedger) -> Measured:
    """The answer of a rule. A loop that has cleared a step has done all that rules look at: its core left the missing rows out."""
    try:
        return settle(rule(ledger))
    except Missing as missing:
        if any(row.get("of") == "clear" for row in ledger.by_event["done"]):
            raise Unjudged(str(missing)) from missing
        raise


def ends_well(ledger: LoopLedger) -> Violations:
    """Does the controller end on its own, without an error?

    Of what happens in a world, only the data's end, rows that cannot be cleared, a sync that fails, more failed steps than may be retried
    and a step that would shrink below `floor` are reasons for one. The data's end is none if the open step has all its groups.
    """
    ends = ledger.by_event["ended"]
    failed = [row.get("of") for row in ledger.by_event["error"]]
    steps = sum(name in FAILS for name in failed)
    excused = (
        (ledger.by_event["exhausted"] and not only_trains(ledger))
        or {"clear", "sync"} & {*failed}
        or steps > (ledger.limit("step_retries") or 0)
        or shrinks_too_far(ledger)
    )
    if not ends:
        yield f"the controller never ended; the last row is {ledger.rows[-1]}"
    for row in ends:
        if row.get("why") == "error" and not excused:
            yield f"{row}: ended with an error: {row.get('error', '')}"
    return "the controller ended"


def only_trains(ledger: LoopLedger) -> bool:
    """Whether the last step has all its groups, did not fail, and is no version yet: it needs no more data."""
    selected = Counter(row.get("step") for row in ledger.by_event["selected"])
    over = {row.get("step") for name in ("error", "bumped") for row in ledger.by_event[name]}
    return any(
        count == ledger.limit("groups_per_step") and step == max(selected) and step not in over
        for step, count in selected.items()
    )


def shrinks_too_far(ledger: LoopLedger) -> bool:
    """Whether the replicas lost so many groups that the step of all of them would be smaller than `floor`."""
    lost = {row["group"] for row in ledger.by_event["failed"] if {"core", "group", "sample"} <= row.ids.keys()}
    groups, floor = (ledger.limit(name) or 0 for name in ("groups_per_step", "floor"))
    return ledger.setting("on_failed") == "shrink" and groups - len(lost) < floor


def draw_failures(rng: random.Random, groups: int, steps: int, retries: int) -> dict[str, int]:
    """The step at which each failing command fails, once; the group of a failing sample, and the version of a failing sync."""
    fails: dict[str, int] = {}
    if retries and rng.random() < 0.5:
        fails |= {name: rng.randrange(steps) for name in rng.sample(FAILS, rng.choice([1, 1, 2]))}
    if rng.random() < 0.2:
        fails["generate"] = rng.randrange(groups * steps)
    if rng.random() < 0.05:
        fails["sync"] = rng.randint(0, steps)
    return fails


def awaits_prompts(world: World, rng: random.Random) -> World:
    """Half of the worlds that stop do so with a prompt at hand. There the data are slower than all else but a sync, during which nothing is
    dispatched: then a prompt asked for before a step ended often comes after it."""
    if not world["resume"] or rng.random() < 0.5:
        return world
    return {**world, "has_prompt": True, "prompt_ms": 50, "sync_ms": 100}


def draw_happens(rng: random.Random, replicas: int) -> list[list[Any]]:
    """Replicas that die, leave or join, each once; replica 0 stays."""
    spare = [*range(1, replicas)]
    happens: list[list[Any]] = []
    for number in range(rng.choice([0, 0, 0, 1, 1, 2])):
        event = rng.choice(HAPPENS)
        if event != "joined" and not spare:
            continue
        replica = FIRST_JOINED + number if event == "joined" else spare.pop(rng.randrange(len(spare)))
        happens.append([rng.randint(0, 2000), event, replica])
    return happens


def loop_settings(world: Mapping[str, Any]) -> StreamSettings:
    return StreamSettings(
        **{name: world[name] for name in ("sampler", *OF_THE_LAB) if name in world},
        train_global_batch_size=world["groups"] * world["group"] // world["updates"],
        step_retries=world["retries"],
        on_dead_replica="go-on",
    )


def is_explorable(config: StreamConfig) -> bool:
    return config.groups * (config.window + 1) * config.group <= MOST_SAMPLES and config.replicas <= MOST_SAMPLES


def with_loop(world: World, config: StreamConfig, kept: tuple[str, ...]) -> World:
    """The world with these settings of a config's loop: durations, the number of steps and what goes wrong stay random."""
    plan = settings(config)
    as_configured = {**dataclasses.asdict(plan), "updates": plan.groups // plan.minibatch}
    loop = {name: as_configured[name] for name in kept} | {"steps": min(world["steps"], config.steps)}
    fails = {name: at for name, at in world["fails"].items() if name != "generate" or plan.on_failed != "stop"}
    resume = world["resume"] if config.runs("resume") else 0
    # Again, since what follows from the loop is as in the config too.
    return {**consistent_world({**world, **loop, "fails": fails, "resume": resume}), **loop}


def consistent_world(world: World) -> World:
    """The world with the settings that follow from others within what they allow."""
    groups = world["groups"]
    updates = world["updates"] if groups % world["updates"] == 0 else 1
    places = groups * (world["window"] + 1)
    last = {"generate": groups * world["steps"] - 1, "sync": world["steps"]}
    return {
        **world,
        "updates": updates,
        "min_groups": min(world["min_groups"], groups),
        "floor": min(world.get("floor", 1), groups),
        "places": places,
        "slots": min(world["slots"], places),
        "on_failed": world.get("on_failed", "replace") if groups > 1 else "replace",
        "resume": min(world["resume"], world["steps"] - 1),
        "fails": {
            name: min(step, last[name] if name in last else world["steps"] - 1) for name, step in world["fails"].items()
        },
        "happens": [
            [at, event, replica]
            for at, event, replica in world["happens"]
            if event == "joined" or replica < world["replicas"]
        ],
    }


def pace_of(world: Mapping[str, Any]) -> Durations:
    low, high = world["lengths"]
    high = max(low, high)
    about = f"{world['lengths_seed']}"

    def length(group: int, sample: int) -> int:
        drawn = random.Random(f"{about} {group} {sample}")  # noqa: S311 - a draw that can be repeated
        return min(high, round(low * drawn.paretovariate(1.1))) if world["tail"] else drawn.randint(low, high)

    def reward(group: int, sample: int) -> str:
        flat = random.Random(f"{about} {group}").random() < world["flat"]  # noqa: S311
        return "0.0" if flat else str(sample % 2)

    return Durations(
        prompt_s=world.get("prompt_ms", 0) / 1000,  # an older line has none
        token_s=world["token_ms"] / 1000,
        span=world["span"],
        train_s=world["train_ms"] / 1000,
        logprobs_s=world["train_ms"] / 2000,
        sync_s=world["sync_ms"] / 1000,
        length=length,
        reward=reward,
    )
