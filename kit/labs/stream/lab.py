"""The settings of the lab `stream`, its roles, and its phases in order."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from kit.errors import refuse_if
from kit.labs.definition import (
    EXPLORED,
    Definition,
    JobConfig,
    Option,
    Role,
    Step,
    WorldCount,
    check_fits,
    check_transport,
    in_a_notebook,
    model_of,
    own_code,
)
from kit.labs.served import (
    FOR_ENGINES,
    KITS_ENGINES,
    REPLICA_PYTHON,
    SERVE,
    check_engine_there,
    check_served,
    engine_bytes,
)
from kit.labs.stream.faults import FAULTS, KIT_CORE
from kit.megatron.config import ModelConfig, check, model_bytes
from kit.stream.ports import replica_role
from kit.stream.settings import SAMPLERS, StreamSettings, refusals, refuse_lacking
from kit.target import load_callable
from kit.train.draws import answer_length, tool_stalls

DRIVER = "kit.labs.stream.drive"
LONGEST_PROMPT = 4  # of "9+9="
DOUBLE_BYTES = 8  # of a float64 number
MOST_SAMPLES = 1_000_000  # of a run: its ledger takes 4 KiB of memory for each
OWN = ("implementation", "sampler")  # settings that name code of the notebook side
WAITS = "the shortest and the longest wait"  # the ends of a range of milliseconds
PHASES = {
    EXPLORED.phase: EXPLORED.cycle,
    "plain": 1,
    "lockstep": 2,
    "stream": 3,
    "verify": 3,
    "bound": 3,
    "resume": 4,
    "resume_lockstep": 4,
    "rehearse": 5,
}  # and their cycles, which no reader needs: each phase runs once
ON_SIMULATED_RANKS = (EXPLORED.phase, "stream", "resume", "rehearse")  # phases; the others compare what ranks compute
ALL = "all"


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamConfig(JobConfig):
    """A trainer, replicas that generate, and a controller between them. Trainer ranks come first; each replica is a separate World."""

    ranks: Annotated[int, Option("total number of trainer and replica ranks", low=1, high=4096)] = 3
    tp: Annotated[int, Option("tensor parallel size of the trainer", low=1, high=64)] = 1
    pp: Annotated[int, Option("pipeline parallel size of the trainer", low=1, high=64)] = 1
    infer_tp: Annotated[int, Option("tensor parallel size of each replica", low=1, high=64)] = 1
    replicas: Annotated[int, Option("number of replicas", low=1, high=512)] = 2
    steps: Annotated[int, Option("training steps; each gives a new weight version", low=1, high=10_000)] = 5
    groups: Annotated[int, Option("groups (prompts) per step", low=1, high=4096)] = 4
    group: Annotated[int, Option("samples per group", low=2, high=512)] = 4
    min_groups: Annotated[int, Option("groups that must be complete before a chunk is trained", low=1, high=4096)] = 1
    batch: Annotated[
        int | None, Option("samples per optimizer step, a multiple of group; null: all samples of the step", low=1)
    ] = None
    micro_batch: Annotated[int, Option("samples per microbatch", low=1, high=512)] = 2
    sampler: Annotated[
        str,
        Option(
            "rule for which groups are trained next: a name, or your own as module:Class",
            target=True,
            here=True,
            names=(*SAMPLERS,),
        ),
    ] = "in-order"
    window: Annotated[int, Option("how many versions older than its training step a group may be", low=0, high=64)] = 1
    places: Annotated[int | None, Option("groups that the buffer holds; null: as many as the sampler needs", low=1)] = (
        None
    )
    slots: Annotated[int | None, Option("groups in flight at once; null: as many as there are places", low=1)] = None
    at_sync: Annotated[
        Literal["keep", "recompute", "abort", "drain"],
        Option("requests in flight at a sync: keep the KV cache, recompute it, start again, or end before the sync"),
    ] = "keep"
    on_failed: Annotated[
        Literal["stop", "replace", "shrink"],
        Option("if a group fails: stop the run, replace it, or train a smaller step"),
    ] = "stop"
    floor: Annotated[int, Option("the fewest groups of a step with on_failed=shrink", low=1, high=4096)] = 1
    on_dead_replica: Annotated[
        Literal["stop", "go-on"], Option("if a replica dies: stop the run, or send its requests to other replicas")
    ] = "stop"
    filter: Annotated[bool, Option("replace groups with equal rewards, which train nothing")] = False
    previous: Annotated[
        Literal["recomputed", "recorded"],
        Option("log-probabilities of the previous policy: recomputed by the trainer, or as the replica recorded them"),
    ] = "recomputed"
    reference: Annotated[
        Literal["recomputed", "off"], Option("log-probabilities of the reference policy (version 0)")
    ] = "off"
    correction: Annotated[bool, Option("correct for stale samples with truncated importance weights")] = True
    temperature: Annotated[float, Option("sampling temperature", low=0.05, high=10)] = 1.0
    answer: Annotated[
        tuple[int, ...], Option("fewest and most tokens of an answer; each sample's minimum is drawn from this range")
    ] = (4, 20)
    tail: Annotated[
        bool,
        Option(
            "lengths of answers have a long tail: each has exactly the length that is drawn from the range of answer"
        ),
    ] = False
    tools: Annotated[
        int,
        Option("tool calls of each answer, with tail=true; meanwhile its replica keeps the request", low=0, high=100),
    ] = 0
    tool_ms: Annotated[tuple[int, ...], Option("shortest and longest wait for a tool, with a long tail", unit="ms")] = (
        200,
        2000,
    )
    numbers: Annotated[int, Option("upper bound (exclusive) of the numbers in a prompt", low=1, high=10)] = 10
    decode: Annotated[int, Option("tokens that a replica decodes before it takes new orders", low=1, high=4096)] = 4
    lr: Annotated[float, Option("learning rate at the start; it falls to half", low=1e-8, high=1)] = 1e-3
    warm: Annotated[int, Option("updates on right answers before version 0, so some samples are right", low=0)] = 30
    deadline_s: Annotated[float, Option("longest wait of the controller", low=0.5, high=3600, unit="s")] = 60.0
    pace_ms: Annotated[float, Option("least time of a replica per token, as with a larger model", low=0, unit="ms")] = (
        0.0
    )
    train_pace_ms: Annotated[
        float, Option("least time of the trainer per sample of a microbatch", low=0, unit="ms")
    ] = 0.0
    phases: Annotated[
        str,
        Option(f"phases that run beside prepare and end: all, or a list of {', '.join(PHASES)}, such as plain,stream"),
    ] = ALL
    worlds: WorldCount = 200
    serve: Annotated[str, SERVE] = "megatron"
    replica_python: Annotated[str, REPLICA_PYTHON] = ""
    transport: Annotated[
        str,
        Option(
            "transport of weights: auto (by the location of each receiver), a name, or your own as module:attr",
            target=True,
            names=("auto", "shm", "rendezvous", "serialize", "ipc"),
        ),
    ] = "auto"
    trainer: Annotated[
        str,
        Option(
            "your own split step as module:attr; attr(ctx) has begin, microbatch, finish, abort, version", target=True
        ),
    ] = "kit.megatron.split:split_step"
    simulated: Annotated[
        bool, Option("run the controller against simulated ranks on a virtual clock; real ranks stay idle")
    ] = False
    implementation: Annotated[
        str, Option("the controller: the kit's, or your own core as module:attr", target=True, here=True)
    ] = KIT_CORE

    def __post_init__(self) -> None:
        check_range("answer", self.answer, "the fewest and the most tokens of an answer", least=1)
        check_range("tool_ms", self.tool_ms, WAITS)
        check_transport(self.transport, self.nodes)
        refuse_if(
            self.tools and not self.tail,
            f"tools={self.tools} needs tail=true, because tools are called at known places of an answer",
        )
        # Each rank has its own clock, and would wait for another time.
        refuse_if(self.tools and self.infer_tp > 1, f"tools={self.tools} needs infer_tp=1, not {self.infer_tp}")
        refuse_if(
            self.tools and self.serve != "megatron",
            f"tools={self.tools} needs serve=megatron: in serve={self.serve} all requests take each step together",
        )
        samples = self.steps * self.groups * self.group
        refuse_if(
            samples > MOST_SAMPLES,
            f"steps={self.steps} x groups={self.groups} x group={self.group} are {samples:,} samples; use at most "
            f"{MOST_SAMPLES:,}, because the ledger, which holds every event, stays in memory",
        )
        wanted = phase_wanted(self.phases)
        unknown = {*wanted} - {*PHASES}
        refuse_if(
            unknown,
            f"phases={self.phases!r} names {', '.join(sorted(unknown))!r}; use {ALL}, or a list of {', '.join(PHASES)}",
        )
        for phase, other in {"verify": "stream", "bound": "stream", "resume_lockstep": "lockstep"}.items():
            refuse_if(
                phase in wanted and other not in wanted,
                f"phases={self.phases!r}: {phase} needs the measurements of {other}; add {other}",
            )
        if not self.simulated:
            self._check_ranks()
        refused = refusals(settings(self))
        refuse_if(refused, "; ".join(refused))

    def _check_ranks(self) -> None:
        refuse_if(
            self.trainer_ranks < 1,
            f"ranks={self.ranks} with {self.replicas} replicas of infer_tp={self.infer_tp} leaves {max(self.trainer_ranks, 0)} ranks "
            "for the trainer; give it at least one",
        )
        check(self.trainer_model, self.trainer_ranks)
        check(self.replica_model, self.infer_tp)
        check_served(self, self.replica_model)
        data_ranks = self.trainer_ranks // (self.tp * self.pp)
        refuse_if(
            self.group % (data_ranks * self.micro_batch),
            f"group={self.group} samples do not fill whole microbatches of micro_batch={self.micro_batch} on {data_ranks} data ranks; "
            f"use a multiple of {data_ranks * self.micro_batch}",
        )

    def runs(self, phase: str) -> bool:
        if phase not in phase_wanted(self.phases) or (self.simulated and phase not in ON_SIMULATED_RANKS):
            return False
        explored = bool(self.worlds and own_code(self, OWN) and not in_a_notebook(self, OWN))
        possible = {
            EXPLORED.phase: explored,
            "resume": self.steps > 1,
            "resume_lockstep": self.steps > 1,
            # Random worlds have the failures that are rehearsed on simulated ranks.
            "rehearse": not own_code(self, OWN) if self.simulated else self.replicas > 1,
        }
        return possible.get(phase, True)

    @property
    def measures_noise(self) -> bool:
        """Whether recomputed tokens have a limit from the noise of an engine. One from outside is judged itself, so its noise limits
        nothing."""
        return self.serve in KITS_ENGINES and self.runs("verify")

    @property
    def trainer_ranks(self) -> int:
        return self.ranks - self.infer_tp * self.replicas

    @property
    def length(self) -> int:
        """Tokens of the longest sample: prompt and answer."""
        return LONGEST_PROMPT + self.answer[1]

    def drawn_length(self, group: int, sample: int) -> int:
        return answer_length(self, group, sample)

    def tool_calls(self, group: int, sample: int) -> dict[int, float]:
        return tool_stalls(self, group, sample)

    @property
    def update_samples(self) -> int:
        """Samples of one optimizer step."""
        return self.batch or self.groups * self.group

    @property
    def trainer_model(self) -> ModelConfig:
        return model_of(self, seq=self.length, microbatches=max(1, self.pp))

    @property
    def replica_model(self) -> ModelConfig:
        return model_of(self, seq=self.length, tp=self.infer_tp, pp=1)

    @property
    def replica_names(self) -> list[str]:
        return [replica_role(number) for number in range(self.replicas)]

    @property
    def loss_options(self) -> dict[str, Any]:
        cut = {"importance": "tokens", "truncation": "tis", "band_high": 2.0} if self.correction else {}
        return {**cut, **({"kl": 0.05} if self.reference == "recomputed" else {})}


def check_range(name: str, numbers: tuple[int, ...], ends: str, *, least: int = 0) -> None:
    """Refuse what are not two numbers in order, from `least` on; `ends` says what they are."""
    given = f"{name}={list(numbers)}"
    refuse_if(len(numbers) != 2, f"{given} must be two numbers: {ends}")
    first, second = numbers
    refuse_if(first > second, f"{given} must be {ends}, but {first} exceeds {second}")
    refuse_if(first < least, f"{given} must be {ends}, each at least {least}")


def phase_wanted(phases: str) -> tuple[str, ...]:
    return (*PHASES,) if phases == ALL else tuple(phases.replace(" ", "").split(","))


def settings(config: StreamConfig) -> StreamSettings:
    same = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(StreamSettings)
        if hasattr(config, field.name)
    }
    sampler = SAMPLERS.get(config.sampler)
    needed = sampler.places(config.groups, config.window) if sampler else 0
    places = config.places or needed or config.groups * (config.window + 1)
    return StreamSettings(
        **{**same, "places": places, "slots": config.slots or places, "train_global_batch_size": config.update_samples}
    )


def roles(config: StreamConfig) -> tuple[Role, ...]:
    """The trainer in World 0, each replica in the next one. In a simulated run all ranks are idle."""
    if config.simulated:
        return (Role(name="idle", ranks=tuple(range(config.ranks)), phases="kit.actors.common:Idle"),)
    first, size = config.trainer_ranks, config.infer_tp
    replicas = [
        Role(
            name=name,
            ranks=tuple(range(first + number * size, first + (number + 1) * size)),
            world=number + 1,
            phases=f"kit.labs.stream.ranks.replica:{'Replica' if config.serve == 'megatron' else 'EngineReplica'}",
        )
        for number, name in enumerate(config.replica_names)
    ]
    return (Role(name="trainer", ranks=tuple(range(first))), *replicas)


def plan(config: StreamConfig) -> list[Step]:
    """Each loop starts from version 0. The plain loop comes first; it generates everything before it trains. With several replicas, the
    last one dies in the phase rehearse. Simulated ranks have nothing to prepare."""
    explored = [EXPLORED] if config.runs(EXPLORED.phase) else []
    steps = [
        Step(cycle, phase, ("trainer",), case="")
        if phase == "verify"
        else Step(cycle, phase, driver=f"{DRIVER}:{phase}", case="")
        for phase, cycle in PHASES.items()
        if config.runs(phase) and phase != EXPLORED.phase
    ]
    return explored + (steps if config.simulated else [Step(0, "prepare"), *steps, Step(0, "end")])


def fits(config: StreamConfig) -> None:
    if ":" in config.sampler:
        refuse_lacking(load_callable(config.sampler), config.sampler)
    if config.simulated:
        return
    check_engine_there(config)
    trainer = config.trainer_model
    job = max(model_bytes(trainer, ranks=config.trainer_ranks, stage=stage)["total"] for stage in range(config.pp))
    held = model_bytes(config.replica_model, ranks=1)
    whole = held["params"] * config.infer_tp
    kept = whole * (config.steps + 1) * config.runs("verify")
    # Noise is measured with a float64 model.
    noise = DOUBLE_BYTES * held["parameters"] * config.measures_noise
    engines = (engine_bytes(config, whole) + noise) * config.replicas
    words = "for the weights of every version" + FOR_ENGINES * bool(engines)
    check_fits(config, job=job, host=(kept + engines) // config.ranks, kept=words)


LAB = Definition(
    name="stream",
    summary="replicas generate while the trainer trains; every token's weight version is verified, every group accounted for",
    config=StreamConfig,
    plan=plan,
    roles=roles,
    isolate=True,
    hosted=True,
    fits=fits,
    phases="kit.labs.stream.ranks.trainer:Trainer",
    rules="kit.labs.stream.rules:RULES",
    presets="kit.labs.stream.rules:PRESETS",
    charts="kit.labs.stream.charts:CHARTS",
    curves="kit.stream.curves:UpdateCurves",
    worlds="kit.labs.stream.worlds:StreamWorlds",
    first=("size", "ranks", "tp", "replicas", "steps", "groups", "group", "sampler", "window", "at_sync"),
    faults=FAULTS,
    preload=("megatron.core",),
)
