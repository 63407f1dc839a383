"""The settings of the lab `share`, its roles, and its phases in order."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, NamedTuple

from kit.errors import BadInput
from kit.labs.definition import Definition, JobConfig, Option, Role, Step, check_fits
from kit.labs.share.faults import FAULTS
from kit.labs.stream.lab import StreamConfig, replica_model, replica_names, trainer_model
from kit.machine import free_gpu_bytes
from kit.megatron.config import model_bytes

DRIVER = "kit.labs.share.drive"
TRAINER = "trainer"
DESK = "desk"
LOCK = "device-{}.lock"  # the file of a device, which the rank that holds the device locks
BETWEEN_LOOKS_S = 0.1  # an observer samples every 20 ms; what lasts less may go unseen
PIPELINES = ("a", "b")
PLANNERS = ("gap-ratio", "fifo", "static")
SCHEDULER = "kit.labs.share.drive:scheduler"
PIPELINE = "kit.share.member:Pipeline"
SEED_APART = 100_003  # between the seeds of two pipelines: more than a run has groups
# Defaults of the scenarios E and F.
LARGER = {
    "devices": 4,
    "train_a": (0, 1),
    "infer_a": (0, 1, 2, 3),
    "train_b": (2, 3),
    "infer_b": (0, 1, 2, 3),
    "tp": 2,
    "infer_tp": 2,
    "layers": 2,
}


# Defaults of each gate. With a window there are requests while the trainer has its devices.
GATES: dict[str, dict[str, Any]] = {
    "1": {"scenario": "A", "window": 1},
    "2": {"scenario": "A", "window": 1, "infer_tp": 2},
    # A real model with 174 MiB per replica, clearly above the noise of resident memory.
    "2.5": {
        "release_groups": True,
        "size": "125m",
        "layers": 1,
        "steps_a": 2,
        "steps_b": 2,
        "groups": 2,
        "group": 2,
        "answer_a": (4, 4),
        "answer_b": (4, 4),
        "decode": 1,
        "warm": 0,
        "rehearse": False,
        "deadline_s": 120.0,
    },
    "3": {"scenario": "A"},
    "4": {},
    "5": {},  # with pipeline=
}


class Mapping(NamedTuple):
    """The devices of one pipeline: of its trainer, one per rank, and of its replicas, `tp` for each in turn."""

    train: tuple[int, ...]
    infer: tuple[int, ...]
    tp: int

    def bundle(self, replica: int) -> tuple[int, ...]:
        return self.infer[replica * self.tp : (replica + 1) * self.tp]

    def devices(self, role: str) -> tuple[int, ...]:
        return self.train if role == TRAINER else self.bundle(number_of(role))

    @property
    def replicas(self) -> int:
        return len(self.infer) // self.tp

    @property
    def ranks(self) -> int:
        return len(self.train) + len(self.infer)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareConfig(JobConfig):
    """Two pipelines, each with its own trainer and replicas, on shared devices. The ranks of A come first."""

    ranks: Annotated[int, Option("total number of trainer and replica ranks; 0: as needed", low=0, high=4096)] = 0
    scenario: Annotated[
        Literal["A", "B", "E", "F"],
        Option(
            "A: one pipeline; B: two; E and F: as A and B, by default with 4 devices, tp=2, infer_tp=2 and 2 layers"
        ),
    ] = "B"
    devices: Annotated[int, Option("number of shared devices; on the CPU each is one core", low=1, high=512)] = 2
    train_a: Annotated[tuple[int, ...], Option("devices of pipeline A's trainer, one per rank")] = (0,)
    infer_a: Annotated[tuple[int, ...], Option("devices of pipeline A's replicas, infer_tp for each in turn")] = (0, 1)
    train_b: Annotated[tuple[int, ...], Option("devices of pipeline B's trainer, one per rank")] = (1,)
    infer_b: Annotated[tuple[int, ...], Option("devices of pipeline B's replicas, infer_tp for each in turn")] = (0, 1)
    tp: Annotated[int, Option("tensor parallel size of each trainer", low=1, high=64)] = 1
    infer_tp: Annotated[int, Option("tensor parallel size of each replica", low=1, high=64)] = 1
    steps_a: Annotated[int, Option("training steps of pipeline A", low=1, high=10_000)] = 3
    steps_b: Annotated[int, Option("training steps of pipeline B", low=1, high=10_000)] = 3
    groups: Annotated[int, Option("groups (prompts) per step", low=1, high=4096)] = 4
    group: Annotated[int, Option("samples per group", low=2, high=512)] = 4
    micro_batch: Annotated[int, Option("samples per microbatch", low=1, high=512)] = 2
    answer_a: Annotated[tuple[int, ...], Option("fewest and most tokens of an answer in pipeline A")] = (4, 20)
    answer_b: Annotated[tuple[int, ...], Option("fewest and most tokens of an answer in pipeline B")] = (4, 20)
    numbers: Annotated[int, Option("upper bound (exclusive) of the numbers in a prompt", low=1, high=10)] = 10
    decode: Annotated[int, Option("tokens that a replica decodes before it takes new orders", low=1, high=4096)] = 4
    temperature: Annotated[float, Option("sampling temperature", low=0.05, high=10)] = 1.0
    lr: Annotated[float, Option("learning rate", low=1e-8, high=1)] = 1e-3
    warm: Annotated[int, Option("updates on right answers before version 0, so some samples are right", low=0)] = 30
    slots: Annotated[int | None, Option("groups in flight at once per pipeline; null: all that may start", low=1)] = 2
    window: Annotated[
        int, Option("how many versions older than its training step a group may be; 0: in order", low=0, high=64)
    ] = 0
    pace_ms: Annotated[
        tuple[int, ...],
        Option("least time of a replica of A, and of B, per token of a sample", unit="ms"),
    ] = (0, 0)
    train_pace_ms: Annotated[
        tuple[int, ...], Option("least time of the trainer of A, and of B, per sample", unit="ms")
    ] = (0, 0)
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
        Option("runs to compare with: each pipeline alone; all: also in sequence, and on half of the devices each"),
    ] = "alone"
    rehearse: Annotated[bool, Option("at the end, run both again and kill a replica and a trainer on purpose")] = True
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
        int, Option("longest wait of one pipeline for the other at the start; 0: neither waits", low=0, unit="ms")
    ] = 60_000
    watchdog_ms: Annotated[int, Option("time between two checks for a pipeline without progress", low=1, unit="ms")] = (
        5_000
    )
    deadline_s: Annotated[float, Option("longest wait of a core", low=0.5, high=3600, unit="s")] = 60.0
    simulated: Annotated[
        bool, Option("run both pipelines and the desk on simulated ranks and a virtual clock; real ranks stay idle")
    ] = False

    def __post_init__(self) -> None:
        if self.gate == "5" and self.pipeline == PIPELINE:
            raise BadInput("gate=5 needs your own pipeline; give it as pipeline=module:attr")
        self._default(GATES.get(self.gate, {}))
        if self.scenario in ("E", "F"):
            self._default(LARGER)
        for name, value in (("pace_ms", self.pace_ms), ("train_pace_ms", self.train_pace_ms)):
            if len(value) != 2 or min(value) < 0:
                raise BadInput(f"{name}={list(value)} must be two numbers of at least 0, one for A and one for B")
        for name, value in (("answer_a", self.answer_a), ("answer_b", self.answer_b)):
            if len(value) != 2 or not 1 <= value[0] <= value[1]:
                raise BadInput(f"{name}={list(value)} must be two numbers: the fewest and the most tokens of an answer")
        for name in self.pipelines:
            self._check_mapping(name)
        needed = 1 if self.simulated else sum(self.mapping(name).ranks for name in self.pipelines)
        if self.ranks not in (0, needed):
            raise BadInput(f"ranks={self.ranks}, but trainers and replicas need {needed}; leave ranks out")
        object.__setattr__(self, "ranks", needed)
        for name in self.pipelines:
            try:
                pipeline_config(self, name)
            except BadInput as error:
                raise BadInput(f"pipeline {name}: {error}") from None

    def _default(self, values: dict[str, Any]) -> None:
        """The scenario's and gate's values for settings that still have their defaults."""
        for one in fields(self):
            if one.name in values and getattr(self, one.name) == one.default:
                object.__setattr__(self, one.name, values[one.name])

    def _check_mapping(self, pipeline: str) -> None:
        train, infer = (f"{cluster}_{pipeline}" for cluster in ("train", "infer"))
        for name, size, per in ((train, self.tp, "tp"), (infer, self.infer_tp, "infer_tp")):
            devices: tuple[int, ...] = getattr(self, name)
            if not devices:
                raise BadInput(f"{name}=[] names no device; name at least {per}={size}")
            if wrong := [one for one in devices if not 0 <= one < self.devices]:
                raise BadInput(
                    f"{name}={list(devices)} names device {wrong[0]}; devices={self.devices} are 0 to {self.devices - 1}"
                )
            if len(set(devices)) < len(devices):
                raise BadInput(f"{name}={list(devices)} names a device twice; name each once")
            if len(devices) % size:
                raise BadInput(f"{per}={size} does not divide the number of devices of {name}={list(devices)}")
        mine, others = set(getattr(self, train)), set(getattr(self, infer))
        if mine & others and mine - others:
            raise BadInput(
                f"{train}={sorted(mine)} and {infer}={sorted(others)} share only some of the trainer's devices; its replicas "
                "must use all or none of them"
            )

    @property
    def pipelines(self) -> tuple[str, ...]:
        return PIPELINES[:1] if self.scenario in ("A", "E") else PIPELINES

    def mapping(self, pipeline: str) -> Mapping:
        train, infer = (self.train_a, self.infer_a) if pipeline == "a" else (self.train_b, self.infer_b)
        return Mapping(train, infer, self.infer_tp)


def pipeline_config(config: ShareConfig, pipeline: str) -> StreamConfig:
    """The settings of one pipeline as a loop of the lab `stream`. A step waits for all its groups, because once the trainer holds its
    devices, the pipeline may have no device to generate on."""
    of, at = config.mapping(pipeline), PIPELINES.index(pipeline)
    same = {one.name: getattr(config, one.name) for one in fields(StreamConfig) if hasattr(config, one.name)}
    return StreamConfig(
        **{
            **same,
            "simulated": False,
            "ranks": of.ranks,
            "replicas": of.replicas,
            "steps": (config.steps_a, config.steps_b)[at],
            "answer": (config.answer_a, config.answer_b)[at],
            "pace_ms": config.pace_ms[at],
            "train_pace_ms": config.train_pace_ms[at],
            "seed": config.seed + at * SEED_APART,
            "min_groups": config.groups,
            "sampler": "in-order" if config.window else "strict",
            "previous": "recorded",
            "phases": "stream",
        }
    )


def number_of(role: str) -> int:
    return int(role.rpartition(" ")[2])


def role_names(config: ShareConfig, pipeline: str) -> dict[str, int]:
    """The roles of one pipeline in rank order, and the number of ranks of each. Names are those of the lab `stream`."""
    of = config.mapping(pipeline)
    return {TRAINER: len(of.train)} | dict.fromkeys(replica_names(pipeline_config(config, pipeline)), of.tp)


def roles(config: ShareConfig) -> tuple[Role, ...]:
    """Every trainer and every replica is a separate World. In a simulated run all ranks are idle."""
    if config.simulated:
        return (Role(name="idle", ranks=tuple(range(config.ranks)), phases="kit.labs.stream.ranks:Idle"),)
    found: list[Role] = []
    first = 0
    # With fewer GPUs than devices, several devices are the same one.
    gpus = 0 if config.device == "cpu" else len(free_gpu_bytes())
    for pipeline in config.pipelines:
        for name, count in role_names(config, pipeline).items():
            kind = "Trainer" if name == TRAINER else "Replica"
            ranks = tuple(range(first, first + count))
            found.append(
                Role(
                    name=f"{pipeline} {name}",
                    ranks=ranks,
                    world=len(found),
                    devices=tuple(one % gpus for one in config.mapping(pipeline).devices(name)) if gpus else (),
                    phases=f"kit.labs.share.ranks.roles:{kind}",
                )
            )
            first += count
    return tuple(found)


def plan(config: ShareConfig) -> list[Step]:
    """Each loop starts from version 0: first every pipeline alone, then both together. The phase rehearse, in which ranks die, is last."""
    if config.simulated:
        phases = {"shared": 3, "scripted": 3, "rehearse": 6}
        return [Step(cycle, phase, driver=f"kit.labs.share.simulated:{phase}") for phase, cycle in phases.items()]
    alone = [f"alone_{name}" for name in config.pipelines]
    both = config.controls == "all" and len(config.pipelines) > 1
    steps = [
        *(Step(number, phase, driver=f"{DRIVER}:{phase}") for number, phase in enumerate(alone, 1)),
        Step(3, "shared", driver=f"{DRIVER}:shared"),
        *(
            Step(number, phase, driver=f"{DRIVER}:{phase}")
            for number, phase in enumerate(("serial", "static") if both else (), 4)
        ),
        *([Step(6, "rehearse", driver=f"{DRIVER}:rehearse")] if config.rehearse else []),
    ]
    return [Step(0, "prepare"), *steps, Step(0, "end")]


def fits(config: ShareConfig) -> None:
    """In a phase with one pipeline alone, all of it is awake at once; everything off its device is in host memory."""
    if config.simulated:
        return
    jobs, held = 0, 0
    for pipeline in config.pipelines:
        one, of = pipeline_config(config, pipeline), config.mapping(pipeline)
        jobs = max(jobs, model_bytes(trainer_model(one), ranks=len(of.train))["total"])
        held = max(
            held, 3 * model_bytes(replica_model(one), ranks=1)["params"] * of.tp
        )  # the base, and two copies in the cache
    check_fits(config, job=jobs, host=jobs + held, kept="for offloaded state, the base weights and the cache")


LAB = Definition(
    name="share",
    summary="two pipelines time-share devices; each computes bit for bit what it computes alone",
    config=ShareConfig,
    plan=plan,
    roles=roles,
    isolate=True,
    fits=fits,
    phases="kit.labs.share.ranks.roles:Trainer",
    rules="kit.labs.share.rules:RULES",
    presets="kit.labs.share.rules:PRESETS",
    pictures="kit.labs.share.pictures:PICTURES",
    foreign="kit.labs.share.foreign:settings_of",
    first=("scenario", "steps_a", "steps_b", "answer_a", "answer_b", "groups", "group", "planner", "controls"),
    faults=FAULTS,
    preload=("megatron.core",),
)
