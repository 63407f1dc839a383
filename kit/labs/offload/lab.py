"""Offload: a Megatron job releases everything, is measured while it holds nothing, reloads, and trains on bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from kit.errors import refuse_if
from kit.labs.definition import Definition, JobConfig, Option, Step, check_fits, model_of
from kit.labs.offload.faults import FAULTS, KIT_RELEASER
from kit.machine import free_gpu_bytes
from kit.megatron.config import ModelConfig, check, model_bytes

CYCLE = ("train", "fingerprint", "release", "idle", "reload", "talk", "verify")
KINDS = ("weights", "grads", "optimizer")  # of tensors that can be released
KIT_MODEL = "kit.labs.offload.ranks.job:build"


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadConfig(JobConfig):
    """A training job, its layout over ranks, what is released and how often."""

    tp: Annotated[int, Option("tensor parallel size", low=1, high=64)] = 2
    pp: Annotated[int, Option("pipeline parallel size", low=1, high=64)] = 1
    vpp: Annotated[int | None, Option("virtual pipeline stages per pipeline rank; null: none", low=2, high=64)] = None
    cp: Annotated[int, Option("context parallel size; each rank trains on its own whole sequences", low=1, high=64)] = 1
    ep: Annotated[int, Option("expert parallel size", low=1, high=64)] = 1
    etp: Annotated[int | None, Option("expert tensor parallel size; null: Megatron's default", low=1, high=64)] = None
    experts: Annotated[int, Option("experts per layer; 0: a dense model", low=0, high=256)] = 0
    order: Annotated[str, Option("order of the parallel dimensions over the ranks")] = "tp-cp-ep-dp-pp"
    gloo_groups: Annotated[bool, Option("let Megatron create gloo groups beside the device's groups")] = True
    distributed_optimizer: Annotated[bool, Option("shard optimizer state over data-parallel ranks")] = False
    overlap_grad_reduce: Annotated[bool, Option("reduce gradients during the backward pass")] = False
    seq: Annotated[int | None, Option("sequence length; null: that of the size", low=2, high=32768)] = None
    micro_batch: Annotated[int, Option("sequences per microbatch", low=1, high=1024)] = 1
    microbatches: Annotated[int, Option("microbatches per step", low=1, high=1024)] = 2
    steps: Annotated[int, Option("training steps between two releases", low=1, high=1000)] = 2
    cycles: Annotated[int, Option("number of release and reload cycles", low=1, high=1000)] = 4
    mode: Annotated[
        Literal["exact", "abort", "manual", "official", "suspend"],
        Option(
            "how groups are released: exact or abort (the kit's), manual or official (in common use), suspend (by NCCL); docs/offload.md"
        ),
    ] = "exact"
    include_world: Annotated[bool, Option("destroy and rebuild WORLD too (not with mode=manual or official)")] = False
    groups: Annotated[bool, Option("release communicators")] = True
    weights: Annotated[bool, Option("release weights")] = True
    grads: Annotated[bool, Option("release gradient buffers")] = True
    optimizer: Annotated[bool, Option("release optimizer state")] = True
    dropped_grads: Annotated[
        bool, Option("allow a release to drop gradients: after the reload they may be zeros or gone")
    ] = False
    hashes: Annotated[bool, Option("hash every tensor before and after; if false, a cycle is unchecked")] = True
    meet_timeout_s: Annotated[
        float, Option("how long ranks wait for each other before groups are destroyed", low=0.5, high=3600, unit="s")
    ] = 30.0
    model: Annotated[
        str,
        Option(
            "your own job, module:attr; attr(ctx) has chunks, optimizer, step(n) -> [{loss, grad_norm}]", target=True
        ),
    ] = KIT_MODEL
    implementation: Annotated[
        str,
        Option("your own releaser, module:attr; attr(ctx) has release and restore, or destroy and reload", target=True),
    ] = KIT_RELEASER

    def __post_init__(self) -> None:
        if self.model == KIT_MODEL:
            check(model_config(self), self.ranks)
        refuse_if(
            self.implementation != KIT_RELEASER and self.mode != "exact",
            f"mode={self.mode} configures the kit's own releaser: leave it out with implementation={self.implementation}",
        )
        refuse_if(
            self.include_world and not self.groups,
            "include_world=true needs groups=true: with groups=false no group is released",
        )
        refuse_if(
            self.include_world and self.mode in ("manual", "official"),
            f"include_world=true needs mode=exact, abort or suspend, not {self.mode!r}, which cannot rebuild WORLD",
        )
        refuse_if(
            self.mode == "suspend" and self.routing != "torch",
            f"mode=suspend needs routing=torch: {self.routing} cannot suspend a communicator",
        )
        refuse_if(
            self.mode == "suspend" and self.device == "cpu",
            "mode=suspend needs CUDA: only NCCL can suspend communicators, and device=cpu has none",
        )
        refuse_if(
            not (self.groups or self.kinds),
            "nothing would be released: set groups, weights, grads or optimizer to true",
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(kind for kind in KINDS if getattr(self, kind))


def model_config(config: OffloadConfig) -> ModelConfig:
    # Values that are no default, so that a fall-back to a default shows; and dropout, so that random numbers matter.
    return model_of(config, dropout=0.1, timeout_minutes=23, odd_options=True)


def plan(config: OffloadConfig) -> list[Step]:
    """Two controls that train without a release, then the job that is released and reloaded, then the rehearsed failures."""
    controls = [Step(cycle, "control") for cycle in range(1, config.cycles + 2)]
    cycles = [Step(cycle, phase) for cycle in range(1, config.cycles + 1) for phase in CYCLE]
    last = config.cycles + 1
    return [
        Step(0, "start"),
        Step(0, "control_build"),
        *controls,
        Step(0, "control_end"),
        Step(0, "second_control"),
        Step(0, "baseline"),
        Step(0, "build"),
        *cycles,
        Step(last, "train"),
        Step(0, "compare"),
        Step(0, "rehearse_restore"),
        Step(0, "rehearse_failure"),
        Step(0, "end"),
        Step(0, "ownership"),
    ]


def fits(config: OffloadConfig) -> None:
    refuse_if(
        config.mode == "suspend" and not free_gpu_bytes(),
        "mode=suspend needs CUDA: only NCCL can suspend communicators, and this machine has no GPU driver",
    )
    if config.model != KIT_MODEL:
        return  # the kit does not know the size of your own job
    stages = [model_bytes(model_config(config), ranks=config.ranks, stage=stage) for stage in range(config.pp)]
    largest = max(stages, key=lambda stage: stage["total"])
    arena = sum(largest[{"weights": "params"}.get(kind, kind)] for kind in config.kinds)
    check_fits(config, job=largest["total"], host=arena, kept="to keep them while released")


LAB = Definition(
    name="offload",
    summary="a Megatron job releases communicators, weights, gradients and optimizer, reloads them, and trains on bit for bit",
    config=OffloadConfig,
    plan=plan,
    fits=fits,
    phases="kit.labs.offload.ranks.phases:Offload",
    rules="kit.labs.offload.rules:RULES",
    presets="kit.labs.offload.rules:PRESETS",
    charts="kit.labs.offload.charts:CHARTS",
    first=("size", "ranks", "tp", "pp", "ep", "cycles", "steps", "mode", "implementation"),
    faults=FAULTS,
    preload=("megatron.core",),
)
