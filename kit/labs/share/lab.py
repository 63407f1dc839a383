"""The settings of the lab `share`, its roles, and its phases in order."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from kit.errors import BadInput, refuse_if
from kit.labs.definition import (
    EVERY,
    EXPLORED,
    NAMES,
    Definition,
    JobConfig,
    Option,
    Role,
    Step,
    WorldCount,
    check_fits,
    in_a_notebook,
    own_code,
)
from kit.labs.share.faults import FAULTS
from kit.labs.stream.lab import WAITS, StreamConfig, check_range
from kit.machine import free_gpu_bytes
from kit.megatron.config import LoraOptions, LoraTargets, model_bytes
from kit.stream.ports import replica_number

DRIVER = "kit.labs.share.drive"
TRAINER = "trainer"
DESK = "desk"
OBSERVER = "observer "  # begins the role of a rank that watches those of its machine, where the notebook is not
MAIN = "shared"  # the phase in which all pipelines run
ALONE = "alone_"  # before a pipeline's name: the phase in which it runs alone
LOCK = "device-{}.lock"  # the file of a device, which the rank that holds the device locks
BETWEEN_LOOKS_S = 0.1  # an observer samples every 20 ms; what lasts less may go unseen
PLANNERS = ("gap-ratio", "home", "fifo", "static")
SCHEDULER = "kit.labs.share.drive:scheduler"
PIPELINE = "kit.share.member:Pipeline"
OWN = ("scheduler", "planner", "pipeline")  # settings that name code of the notebook side
SEED_APART = 100_003  # between the seeds of two pipelines: more than a run has groups
# Defaults of the scenarios E and F.
LARGER = {"devices": 4, "infer": (0, 1, 2, 3), "tp": 2, "infer_tp": 2, "layers": 2}
SINGLE = ("A", "C", "E")  # scenarios with one pipeline
# Defaults of the pipelines with adapters: that of scenario C, and b of scenario D.
ADAPTED = {"adapters": 4, "steps": 8}


# Defaults of each gate; those of a pipeline apply to all. With a window there are requests while the trainer has its devices.
GATES: dict[str, dict[str, Any]] = {
    # A replica that wakes late on a busy machine may be asked to sleep before it serves: there are seven occasions.
    "1": {"scenario": "A", "window": 1, "steps": 8},
    "2": {"scenario": "A", "window": 1, "infer_tp": 2},
    # A real model with 174 MiB per replica, clearly above the noise of resident memory.
    "2.5": {
        "release_groups": True,
        "size": "125m",
        "layers": 1,
        "steps": 2,
        "groups": 2,
        "group": 2,
        "answer": (4, 4),
        "decode": 1,
        "warm": 0,
        "rehearse": False,
        "deadline_s": 120.0,
    },
    "3": {"scenario": "A"},
    "4": {},
    "5": {},  # with pipeline=
}
# Each pipeline has its own value of these settings.
OF_A_PIPELINE = (
    *("train", "infer", "tp", "infer_tp", "steps", "groups", "group", "micro_batch", "answer", "numbers", "decode"),
    *("lr", "warm", "slots", "window", "pace_ms", "train_pace_ms", "tail", "tools", "tool_ms", "reward_ms"),
    *("adapters", "lora_rank", "lora_alpha", "lora_targets", "lora_merged"),
)


def member_name(owner: str, place: int, size: int) -> str:
    """The name of a rank of an owner such as "a.trainer". Ranks of a role with several ranks are numbered; each has its own device."""
    return f"{owner}#{place}" if size > 1 else owner


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig(StreamConfig):
    """The loop of one pipeline, as the lab `stream` runs it, and its devices. What all pipelines have in common comes from the ShareConfig
    that holds it. A step waits for all its groups, because once the trainer holds its devices, the pipeline may have no device to
    generate on."""

    train: Annotated[
        tuple[int, ...] | None, Option("devices of the trainer, one per rank; null: by the pipeline's number")
    ] = None
    infer: Annotated[tuple[int, ...], Option("devices of the replicas, infer_tp for each in turn")] = (0, 1)
    steps: Annotated[int, Option("training steps; each gives a new weight version", low=1, high=10_000)] = 3
    slots: Annotated[int | None, Option("groups in flight at once; null: all that may start", low=1)] = 2
    window: Annotated[
        int, Option("how many versions older than its training step a group may be; 0: in order", low=0, high=64)
    ] = 0
    reward_ms: Annotated[
        tuple[int, ...],
        Option("shortest and longest wait for the last reward of a step, with a long tail; without devices", unit="ms"),
    ] = (0, 0)
    adapters: Annotated[
        int,
        Option(
            "low-rank adapters that train in turn on a frozen base; 0: all weights are trained; in scenario C, and for b in D, 0 means 4",
            low=0,
            high=64,
        ),
    ] = 0
    lora_rank: Annotated[int, Option("rank of each adapter", low=1, high=512)] = 4
    lora_alpha: Annotated[float, Option("an adapter is scaled by alpha / rank", low=0.01, high=4096)] = 8.0
    lora_targets: Annotated[LoraTargets, Option("linear layers with adapters")] = "all"
    lora_merged: Annotated[bool, Option("replicas merge the adapter into the base; only with adapters=1")] = False

    ranks: Annotated[int, Option("number of trainer and replica ranks; 0: not known yet", low=0, high=4096)] = 0

    def __post_init__(self) -> None:
        if self.ranks:  # else this is only what was given
            check_range("reward_ms", self.reward_ms, WAITS)
            StreamConfig.__post_init__(self)

    @property
    def lora(self) -> LoraOptions:
        return LoraOptions(rank=self.lora_rank, alpha=self.lora_alpha, targets=self.lora_targets)

    @property
    def own_window(self) -> int:
        """The window in which every group is generated by the weights that it trains: adapters train in turn, so the next step of one
        is as many versions away as there are others."""
        return max(0, self.adapters - 1)

    def on_devices(self, role: str) -> tuple[int, ...]:
        assert self.train is not None
        return self.train if role == TRAINER else self.bundle(replica_number(role))

    def bundle(self, replica: int) -> tuple[int, ...]:
        return self.infer[replica * self.infer_tp : (replica + 1) * self.infer_tp]


def check_devices(name: str, loop: PipelineConfig, train: tuple[int, ...], count: int) -> None:
    """Refuse a pipeline's mapping that cannot work on this number of devices."""
    for setting, devices, size, per in (
        ("train", train, loop.tp, "tp"),
        ("infer", loop.infer, loop.infer_tp, "infer_tp"),
    ):
        words = f"{name}.{setting}={list(devices)}"
        refuse_if(not devices, f"{words} names no device; name at least {name}.{per}={size}")
        for device in devices:
            refuse_if(not 0 <= device < count, f"{words} names device {device}; devices={count} are 0 to {count - 1}")
        refuse_if(len(set(devices)) < len(devices), f"{words} names a device twice; name each once")
        refuse_if(len(devices) % size, f"{name}.{per}={size} does not divide the number of devices of {words}")
    refuse_if(
        {*train} & {*loop.infer} and {*train} - {*loop.infer},
        f"{name}.train={sorted(train)} and {name}.infer={sorted(loop.infer)} share only some of the trainer's devices; its "
        "replicas must use all or none of them",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareConfig(JobConfig):
    """Pipelines named a, b, c, ..., each with its own trainer and replicas, on shared devices. The ranks of a come first."""

    ranks: Annotated[int, Option("total number of trainer and replica ranks; 0: as needed", low=0, high=4096)] = 0
    scenario: Annotated[
        Literal["A", "B", "C", "D", "E", "F"],
        Option(
            "A: one pipeline; B: two; C: one with four adapters; D: two, b with four adapters; "
            "E and F: as A and B, by default with 4 devices, tp=2, infer_tp=2 and 2 layers"
        ),
    ] = "B"
    devices: Annotated[int, Option("number of shared devices; on the CPU each is one core", low=1, high=512)] = 2
    pipelines: Annotated[
        int | None, Option("number of pipelines; null: 1 in the scenarios A, C and E, else 2", low=1, high=len(NAMES))
    ] = None
    loops: Annotated[dict[str, PipelineConfig], Option("the settings of each pipeline", nested=OF_A_PIPELINE)] = field(
        default_factory=dict
    )
    sleep_level: Annotated[
        Literal[2, 1], Option("a sleeping replica drops its weights (2) or keeps them in host memory (1)")
    ] = 2
    release_groups: Annotated[
        bool,
        Option("a trainer destroys its process groups when it leaves its devices and remakes them when it returns"),
    ] = False
    planner: Annotated[
        str,
        Option(
            "planner that assigns devices: a name, or your own as module:attr", target=True, here=True, names=PLANNERS
        ),
    ] = "gap-ratio"
    scheduler: Annotated[
        str, Option("the desk: the kit's, or your own core as module:attr", target=True, here=True)
    ] = SCHEDULER
    pipeline: Annotated[
        str,
        Option("the last pipeline's side of the desk: the kit's, or your own as module:attr", target=True, here=True),
    ] = PIPELINE
    controls: Annotated[
        Literal["alone", "all"],
        Option("runs to compare with: each pipeline alone; all: also all at once, each on its part of the devices"),
    ] = "alone"
    rehearse: Annotated[bool, Option("at the end, run all again and kill a replica and a trainer on purpose")] = True
    gate: Annotated[
        Literal["", "1", "2", "2.5", "3", "4", "5"],
        Option(
            "defaults for one scenario. 1: one of two replicas sleeps; 2: the only one, of two ranks, sleeps; "
            "2.5: a real model frees its memory and process groups; 3: one pipeline hands over; 4: two share; "
            "5: two, one with your own pipeline="
        ),
    ] = ""
    request_ms: Annotated[int, Option("longest wait of a request at the desk", low=1, unit="ms")] = 60_000
    operation_ms: Annotated[int, Option("longest time for a replica to sleep or wake", low=1, unit="ms")] = 60_000
    admission_ms: Annotated[
        int, Option("longest wait of one pipeline for another at the start; 0: none waits", low=0, unit="ms")
    ] = 60_000
    watchdog_ms: Annotated[int, Option("time between two checks for a pipeline without progress", low=1, unit="ms")] = (
        5_000
    )
    deadline_s: Annotated[float, Option("longest wait of a core", low=0.5, high=3600, unit="s")] = 60.0
    worlds: WorldCount = 200
    simulated: Annotated[
        bool, Option("run all pipelines and the desk on simulated ranks and a virtual clock; real ranks stay idle")
    ] = False

    def __post_init__(self) -> None:
        refuse_if(
            self.gate == "5" and self.pipeline == PIPELINE,
            "gate=5 needs your own pipeline; give it as pipeline=module:attr",
        )
        refuse_if(
            self.nodes > 1 and self.simulated,
            f"nodes={self.nodes} is for live ranks; leave nodes=1 with simulated=true",
        )
        self._default(GATES.get(self.gate, {}))
        if self.scenario in ("E", "F"):
            self._default(LARGER)
        if self.scenario in ("C", "D"):
            self._default(ADAPTED, only="b" if self.scenario == "D" else "")
        count = self.pipelines or (1 if self.scenario in SINGLE else 2)
        object.__setattr__(self, "pipelines", count)
        object.__setattr__(self, "loops", {name: self._loop(name) for name in NAMES[:count]})
        for name, loop in self.loops.items() if self.nodes > 1 else ():
            self._check_machines(name, loop)
        needed = 1 if self.simulated else sum(loop.ranks for loop in self.loops.values()) + self.nodes - 1
        who = "trainers and replicas" if self.nodes == 1 else "trainers, replicas and an observer on each other machine"
        refuse_if(self.ranks not in (0, needed), f"ranks={self.ranks}, but {who} need {needed}; leave ranks out")
        object.__setattr__(self, "ranks", needed)

    def _default(self, values: dict[str, Any], only: str = "") -> None:
        """The scenario's and gate's values for settings that still have their defaults, of all pipelines or of `only` one."""
        of_a_pipeline = {name: value for name, value in values.items() if name in OF_A_PIPELINE}
        loops = {EVERY: PipelineConfig(), **self.loops}
        if only:
            loops.setdefault(only, loops[EVERY])
        defaults = {
            name: with_defaults(loop, of_a_pipeline) if only in ("", name) else loop for name, loop in loops.items()
        }
        object.__setattr__(self, "loops", defaults)
        for setting in fields(self):
            if setting.name in values and getattr(self, setting.name) == setting.default:
                object.__setattr__(self, setting.name, values[setting.name])

    def _loop(self, name: str) -> PipelineConfig:
        """The settings of a pipeline, complete: its own, those in common, and what follows from both."""
        loop, at = self.loops.get(name) or self.loops.get(EVERY) or PipelineConfig(), NAMES.index(name)
        train = loop.train
        if train is None:  # each on other devices than the one before it
            larger = self.scenario in ("E", "F")
            train = ((0, 1), (2, 3))[at % 2] if larger else (at % 2,)
        check_devices(name, loop, train, self.devices)
        refuse_if(
            loop.adapters and loop.window not in (0, loop.own_window),
            f"{name}.window={loop.window} is not allowed with {name}.adapters={loop.adapters}: each adapter trains on samples of its "
            f"own last version; leave {name}.window out",
        )
        refuse_if(
            loop.lora_merged and loop.adapters != 1,
            f"{name}.lora_merged=true needs {name}.adapters=1, because a merged base serves one adapter",
        )
        window = loop.own_window if loop.adapters else loop.window
        common = {setting.name: getattr(self, setting.name) for setting in fields(JobConfig)}
        follows = {
            "ranks": len(train) + len(loop.infer),
            "replicas": len(loop.infer) // loop.infer_tp,
            "seed": self.seed + at * SEED_APART,
            "deadline_s": self.deadline_s,
            "min_groups": loop.groups,
            "window": window,
            "sampler": "in-order" if window else "strict",
            "previous": "recorded",
            "phases": "stream",
        }
        try:
            return replace(loop, train=train, **{**common, **follows})
        except BadInput as error:
            raise BadInput(f"pipeline {name}: {error}") from None

    def _check_machines(self, name: str, loop: PipelineConfig) -> None:
        """A trainer and a replica are a World each, and that is on one machine."""
        refuse_if(
            self.devices % self.nodes,
            f"devices={self.devices} cannot be spread evenly over nodes={self.nodes}; give a multiple of {self.nodes}",
        )
        for role in role_names(loop):
            devices = loop.on_devices(role)
            refuse_if(
                len({self.machine_of(device) for device in devices}) > 1,
                f"{name}'s {role} uses the devices {list(devices)}, which are not on one machine: with devices={self.devices} and "
                f"nodes={self.nodes} each machine has {self.devices // self.nodes}, in the order of their numbers",
            )

    def machine_of(self, device: int) -> int:
        return device * self.nodes // self.devices

    def devices_on(self, machine: int) -> list[int]:
        return [device for device in range(self.devices) if self.machine_of(device) == machine]

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.loops,)


def with_defaults(loop: PipelineConfig, values: dict[str, Any]) -> PipelineConfig:
    usual = {setting.name: setting.default for setting in fields(PipelineConfig)}
    return replace(loop, **{name: value for name, value in values.items() if getattr(loop, name) == usual[name]})


def role_names(loop: PipelineConfig) -> dict[str, int]:
    """The roles of one pipeline in rank order, and the number of ranks of each. Names are those of the lab `stream`."""
    return {TRAINER: len(loop.on_devices(TRAINER))} | dict.fromkeys(loop.replica_names, loop.infer_tp)


def roles(config: ShareConfig) -> tuple[Role, ...]:
    """Every trainer and every replica is a separate World. In a simulated run all ranks are idle."""
    if config.simulated:
        return (Role(name="idle", ranks=tuple(range(config.ranks)), phases="kit.actors.common:Idle"),)
    every: list[Role] = []
    first, here = 0, config.devices // config.nodes  # devices of a machine
    # With fewer GPUs than devices, several devices are the same one.
    gpus = 0 if config.device == "cpu" else len(free_gpu_bytes())
    for pipeline, loop in config.loops.items():
        for name, count in role_names(loop).items():
            kind = "Trainer" if name == TRAINER else "Replica"
            actor = f"adapters:Adapters{kind}" if loop.adapters else f"roles:Leased{kind}"
            on = loop.on_devices(name)
            every.append(
                Role(
                    name=f"{pipeline} {name}",
                    ranks=tuple(range(first, first + count)),
                    world=len(every),
                    devices=tuple(device % here % gpus for device in on) if gpus else (),
                    phases=f"kit.labs.share.ranks.{actor}",
                    machine=config.machine_of(on[0]),
                    called=name == TRAINER,
                )
            )
            first += count
    for machine in range(1, config.nodes):
        phases = "kit.labs.share.ranks.observer:FarObserver"
        name = f"{OBSERVER}{machine}"
        every.append(Role(name=name, ranks=(first,), world=len(every), devices=None, phases=phases, machine=machine))
        first += 1
    return tuple(every)


def plan(config: ShareConfig) -> list[Step]:
    """Each loop starts from version 0: first every pipeline alone, then all together. The phase rehearse, in which ranks die, is last."""
    own = own_code(config, OWN)
    explored = [EXPLORED] if own and config.worlds and not in_a_notebook(config, OWN) else []
    if config.simulated:
        phases = {MAIN: 3, "scripted": 3, "rehearse": 6}
        if own == ("pipeline",):  # no script runs it
            del phases["scripted"]
        if not config.rehearse:
            del phases["rehearse"]
        return explored + [Step(cycle, phase, driver=f"{DRIVER}:{phase}", case="") for phase, cycle in phases.items()]
    controls = config.controls == "all" and len(config.loops) > 1
    with_adapters = tuple(f"{name} {TRAINER}" for name, loop in config.loops.items() if loop.adapters)
    # A rank has its first loop in cycle 1 or 2, so that later cycles can be compared with them.
    alone = [
        Step(min(at, 2), f"{ALONE}{name}", driver=f"{DRIVER}:alone", case="") for at, name in enumerate(config.names, 1)
    ]
    return [
        *explored,
        Step(0, "prepare"),
        *alone,
        Step(3, MAIN, driver=f"{DRIVER}:shared", case=""),
        *([Step(3, "verify", with_adapters, case="")] if with_adapters else []),
        *([Step(5, "static", driver=f"{DRIVER}:static", case="")] if controls else []),
        *([Step(6, "rehearse", driver=f"{DRIVER}:rehearse", case="")] if config.rehearse else []),
        Step(0, "end"),
    ]


def fits(config: ShareConfig) -> None:
    """In a phase with one pipeline alone, all of it is awake at once; everything off its device is in host memory."""
    if config.simulated:
        return
    loops = config.loops.values()
    jobs = max(model_bytes(loop.trainer_model, ranks=loop.trainer_ranks)["total"] for loop in loops)
    # The base, and two copies in the cache.
    held = max(3 * model_bytes(loop.replica_model, ranks=1)["params"] * loop.infer_tp for loop in loops)
    check_fits(config, job=jobs, host=jobs + held, kept="for offloaded state, the base weights and the cache")


LAB = Definition(
    name="share",
    summary="pipelines time-share devices; each computes bit for bit what it computes alone",
    config=ShareConfig,
    plan=plan,
    roles=roles,
    isolate=True,
    hosted=True,
    fits=fits,
    phases="kit.labs.share.ranks.roles:LeasedTrainer",
    rules="kit.labs.share.rules:RULES",
    presets="kit.labs.share.rules:PRESETS",
    charts="kit.labs.share.charts:CHARTS",
    foreign="kit.labs.share.foreign:settings_of",
    worlds="kit.labs.share.worlds:ShareWorlds",
    first=("pipelines", "scenario", "devices", "planner", "controls"),
    faults=FAULTS,
    preload=("megatron.core",),
)
