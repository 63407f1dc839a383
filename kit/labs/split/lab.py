"""The settings of the split lab, and its phases in order."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from kit.errors import refuse_if
from kit.labs.definition import Definition, JobConfig, Option, Step, check_fits, model_of
from kit.labs.split.faults import FAULTS, KIT_LOSS, KIT_MODEL, KIT_SPLIT
from kit.megatron.config import ModelConfig, check, model_bytes
from kit.train.options import ClippedOptions, Level

Recipe = Literal[
    "grpo", "dapo", "gspo", "cispo", "tis", "icepop", "seq-mask-tis", "on-policy", "reinforce", "vapo", "nll"
]

# Options of kit.train.losses.ClippedPolicyGradient; nll is the negative log-likelihood, which has none.
RECIPES: dict[Recipe, dict[str, Any]] = {
    "grpo": {"kl": 0.05},
    "dapo": {"clip_high": 0.28, "dual_clip": 3.0},
    "gspo": {"ratio": "sequences", "clip_low": 0.03, "clip_high": 0.04},
    "cispo": {"cispo": True, "clip_high": 0.28},
    "tis": {"importance": "tokens", "truncation": "tis", "band_high": 2.0},
    "icepop": {"importance": "tokens", "truncation": "icepop", "band_low": 0.5, "band_high": 2.0},
    "seq-mask-tis": {"importance": "tokens", "truncation": "seq-mask-tis", "band_low": 0.9, "band_high": 1.1},
    "on-policy": {"on_policy": True, "importance": "sequences", "kl": 0.05, "kl_kind": "k2"},
    "reinforce": {"ratio": "none", "kl": 0.05, "kl_kind": "k2"},
    "vapo": {"clip_high": 0.28, "positive_nll": 0.1},
    "nll": {},
}


LEVELS: tuple[Level, ...] = ("tokens", "sequences")
LOSS_OPTIONS = (
    *("clip_low", "clip_high", "dual_clip", "ratio", "importance", "truncation", "band_low", "band_high"),
    *("kl", "kl_kind", "kl_input_clamp", "kl_output_clamp", "positive_nll"),
)
NORMALIZERS = (None, "tokens", "sequences")  # allowed divisors of a metric
STEPS = 2  # the gradients of the plain and the split step are kept


class Case(NamedTuple):
    """One number of chunks at one level of the loss. Cycles count the cases from 1; cycle 0 belongs to no case."""

    cycle: int
    level: str
    chunks: int
    first: bool  # of its level: the plain step runs before it

    @property
    def words(self) -> str:
        return f"{self.level}, chunks={self.chunks}"


def by_recipe(help_text: str, low: float) -> Option:
    return Option(f"{help_text}; null: from the recipe", low=low)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitConfig(JobConfig):
    backend: Annotated[
        Literal["megatron", "fsdp2"], Option("training backend: Megatron, or FSDP2 on a plain torch model")
    ] = "megatron"
    tp: Annotated[int, Option("tensor parallel size", low=1, high=64)] = 1
    pp: Annotated[int, Option("pipeline parallel size", low=1, high=64)] = 1
    cp: Annotated[
        int,
        Option(
            "context parallel size: ranks that share the columns of their rows; needs backend=fsdp2", low=1, high=64
        ),
    ] = 1
    ep: Annotated[int, Option("expert parallel size", low=1, high=64)] = 1
    experts: Annotated[int, Option("experts per layer; 0: a dense model", low=0, high=256)] = 0
    aux_loss: Annotated[float, Option("coefficient of the load-balancing loss", low=0, high=10)] = 0.01
    router_bias: Annotated[
        bool, Option("experts are balanced by a bias of their routers that each step moves, in place of a loss")
    ] = False
    distributed_optimizer: Annotated[bool, Option("shard optimizer state over data-parallel ranks")] = False
    overlap_grad_reduce: Annotated[bool, Option("reduce gradients during the backward pass in plain steps")] = False
    reduce: Annotated[
        Literal["sum", "mean"],
        Option("how Megatron's DDP combines the gradients of data-parallel ranks; experts need mean"),
    ] = "sum"
    steps: Annotated[int, Option("optimizer steps for each number of chunks", low=1, high=1000)] = 5
    micro_batch: Annotated[int, Option("sequences per microbatch", low=1, high=1024)] = 2
    microbatches: Annotated[int, Option("microbatches per step on each data-parallel rank", low=1, high=1024)] = 10
    length: Annotated[int, Option("tokens per row, including padding", low=24, high=32768)] = 32
    chunks: Annotated[tuple[int, ...], Option("numbers of chunks to run; 0: one chunk per microbatch")] = (1, 2, 5)
    level: Annotated[
        Literal["tokens", "sequences", "both"],
        Option("whether the loss is a mean over tokens, over sequences, or each in turn"),
    ] = "both"
    recipe: Annotated[Recipe, Option("loss, by its name in common use; see docs/losses.md")] = "grpo"
    clip_low: Annotated[float | None, by_recipe("lower clip: ratios are at least 1 - clip_low", low=0)] = None
    clip_high: Annotated[float | None, by_recipe("upper clip: ratios are at most 1 + clip_high", low=0)] = None
    dual_clip: Annotated[
        float | None, by_recipe("dual clip: if the advantage A is negative, the loss is at most -A dual_clip", low=1)
    ] = None
    ratio: Annotated[
        Literal["recipe", "tokens", "sequences", "none"],
        Option("probability ratio per token or per sequence; none: REINFORCE, RLOO; recipe: from the recipe"),
    ] = "recipe"
    importance: Annotated[
        Literal["recipe", "none", "tokens", "sequences"],
        Option("importance weight of the engine's samples, per token or per sequence; recipe: from the recipe"),
    ] = "recipe"
    truncation: Annotated[
        Literal["recipe", "none", "tis", "icepop", "seq-mask-tis"],
        Option("treatment of importance weights outside the band; recipe: from the recipe"),
    ] = "recipe"
    band_low: Annotated[float | None, by_recipe("lower end of the band of importance weights", low=0)] = None
    band_high: Annotated[float | None, by_recipe("upper end of the band of importance weights", low=0)] = None
    kl: Annotated[float | None, by_recipe("coefficient of the KL penalty against the reference", low=0)] = None
    kl_kind: Annotated[
        Literal["recipe", "k1", "k2", "k3"], Option("estimator of the KL penalty; recipe: from the recipe")
    ] = "recipe"
    kl_input_clamp: Annotated[
        float | None, Option("clamp of the difference to the reference in the KL penalty; null: no clamp", low=0)
    ] = None
    kl_output_clamp: Annotated[float | None, Option("clamp of the KL penalty of a token; null: no clamp", low=0)] = None
    positive_nll: Annotated[
        float | None, by_recipe("coefficient of -log p for tokens with a positive advantage", low=0)
    ] = None
    loss: Annotated[
        str,
        Option(
            "your own loss as module:attr; attr(ctx) returns an object with level, normalizers() and a call (docs/own-code.md)",
            target=True,
        ),
    ] = KIT_LOSS
    model: Annotated[
        str,
        Option(
            "your own Megatron job as module:attr; attr(ctx) returns an object with chunks, optimizer, scheduler",
            target=True,
        ),
    ] = KIT_MODEL
    masks: Annotated[
        Literal["ragged", "full", "empty-rank"],
        Option(
            "ragged: answers of different lengths, some samples masked; full: all valid; empty-rank: no valid token on one data rank"
        ),
    ] = "ragged"
    batching: Annotated[
        Literal["fixed", "dynamic", "packed"], Option("how fsdp2 groups rows into microbatches; megatron: fixed")
    ] = "fixed"
    token_budget: Annotated[int, Option("most tokens in a dynamic or packed microbatch", low=16, high=1 << 20)] = 96
    implementation: Annotated[
        str,
        Option(
            "your own split step as module:attr; attr(ctx) has begin, microbatch, finish, abort, version", target=True
        ),
    ] = KIT_SPLIT

    def __post_init__(self) -> None:
        refuse_if(not self.chunks, "chunks is empty: give at least one number of chunks, such as [1, 5]")
        most = self.microbatches
        for count in self.chunks:
            refuse_if(
                not 0 <= count <= most,
                f"chunks={count} is not between 1 and the {most} microbatches of a step; "
                f"use 1 to {most}, or 0 for one chunk per microbatch",
            )
        repeats = len(set(self.chunks)) < len(self.chunks)
        refuse_if(repeats, f"chunks={list(self.chunks)} repeats a number: give each number once")
        refuse_if(
            self.cp > 1 and self.backend == "megatron",
            f"cp={self.cp} needs backend=fsdp2: Megatron's local attention does not work on a part of a sequence",
        )
        check(model_config(self), self.ranks)
        refuse_if(
            self.ep > 1 and not self.experts,
            f"ep={self.ep} needs a model with experts: set experts to a multiple of {self.ep}",
        )
        refuse_if(
            self.router_bias and self.experts < 3,
            "router_bias=true needs a model with 3 or more experts: a token goes to 2 of them",
        )
        refuse_if(
            self.experts and self.reduce != "mean",
            "experts need reduce=mean: Megatron scales their load-balancing loss for a mean over data-parallel ranks",
        )
        refuse_if(
            self.backend == "fsdp2" and (self.tp, self.pp, self.experts) != (1, 1, 0),
            "backend=fsdp2 supports data and context parallelism only: leave out tp, pp and experts",
        )
        refuse_if(
            self.backend == "megatron" and self.batching != "fixed",
            f"batching={self.batching} needs backend=fsdp2: with Megatron, packed rows need Transformer Engine",
        )
        refuse_if(
            self.batching != "fixed" and self.token_budget < self.length,
            f"token_budget={self.token_budget} is less than a row of length={self.length}: use at least {self.length}",
        )
        refuse_if(
            self.recipe == "gspo" and self.level != "sequences",
            f"recipe=gspo needs level=sequences, not {self.level!r}: its ratio is per sequence",
        )
        options = ", ".join(self.set_options)
        refuse_if(
            self.loss != KIT_LOSS and (options or self.recipe != "grpo"),
            f"loss={self.loss} replaces the recipe and its options: leave out {options or 'recipe'}",
        )
        refuse_if(
            self.recipe == "nll" and options,
            f"recipe=nll (negative log-likelihood) does not have {options}: use another recipe",
        )
        for level in self.levels if self.recipe != "nll" else ():
            ClippedOptions(level=level, **loss_settings(self))
        refuse_if(
            self.model != KIT_MODEL and (self.backend != "megatron" or self.experts or self.layers is not None),
            f"model={self.model} needs backend=megatron, without experts and layers: they configure the kit's own model only",
        )
        refuse_if(
            self.masks == "empty-rank" and self.data_ranks < 2,
            "masks=empty-rank needs at least 2 data-parallel ranks: one of them has no valid token",
        )

    @property
    def data_ranks(self) -> int:
        return self.ranks // (self.tp * self.pp * self.cp)

    @property
    def batch(self) -> int:
        """Sequences of a step over all data-parallel ranks."""
        return self.data_ranks * self.microbatches * self.micro_batch

    @property
    def has_twin(self) -> bool:
        """Whether a plain torch model can take the weights of the job, as the oracle and FSDP2 need."""
        return not self.experts and self.model == KIT_MODEL

    @property
    def balancing_loss(self) -> bool:
        return bool(self.experts and self.aux_loss and not self.router_bias)

    @property
    def set_options(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in LOSS_OPTIONS}
        return {name: value for name, value in values.items() if value not in (None, "recipe")}

    @property
    def levels(self) -> tuple[Level, ...]:
        return LEVELS if self.level == "both" else (self.level,)


def loss_settings(config: SplitConfig) -> dict[str, Any]:
    """The options of the kit's loss, except its level: those of the recipe, then those that were set."""
    return {**RECIPES[config.recipe], **config.set_options}


def model_config(config: SplitConfig) -> ModelConfig:
    aux_loss = config.aux_loss if config.balancing_loss else 0.0
    return model_of(config, aux_loss=aux_loss, sum_gradients=config.reduce == "sum", seq=config.length)


def cases(config: SplitConfig) -> list[Case]:
    return cases_of({"level": config.level, "chunks": config.chunks})


def cases_of(config: Mapping[str, Any]) -> list[Case]:
    """Every number of chunks at every level, in the order of the run; from the config of a run on disk."""
    levels = LEVELS if config["level"] == "both" else (config["level"],)
    ways = enumerate(itertools.product(levels, config["chunks"]), start=1)
    return [Case(cycle, level, count, first=count == config["chunks"][0]) for cycle, (level, count) in ways]


def plan(config: SplitConfig) -> list[Step]:
    """For each level the plain step, then the split step for each number of chunks; at the end the rehearsed failures."""
    plain = ["sync", "oracle", *(["other_backend"] if config.backend == "fsdp2" else [])]
    steps: list[Step] = []
    for case in cases(config):
        if case.first:
            steps += [Step(case.cycle, phase, case=f"{case.level}, plain") for phase in plain]
        steps += [Step(case.cycle, phase, case=case.words) for phase in ("split", "compare")]
    return [Step(0, "prepare"), *steps, Step(0, "rehearse"), Step(0, "end")]


def fits(config: SplitConfig) -> None:
    if config.model != KIT_MODEL:
        return  # the kit does not know the size of your own model
    job = model_config(config)
    stages = [model_bytes(job, ranks=config.ranks, stage=stage)["total"] for stage in range(config.pp)]
    whole = model_bytes(dataclasses.replace(job, tp=1, pp=1, ep=1, dtype="float32"), ranks=1)["params"]
    kept = whole * (STEPS * (config.steps + 2) + 2)  # on rank 0; and the float64 model
    words = f"for the gradients of {config.steps} steps, kept for comparison"
    check_fits(config, job=max(stages), host=kept // config.ranks, kept=words)


LAB = Definition(
    name="split",
    summary="a training step fed as a stream of microbatches gives the loss, gradients, weights and metrics of the plain step",
    config=SplitConfig,
    plan=plan,
    fits=fits,
    phases="kit.labs.split.ranks.phases:SplitSide",
    rules="kit.labs.split.rules:RULES",
    presets="kit.labs.split.rules:PRESETS",
    charts="kit.labs.split.charts:CHARTS",
    first=("backend", "size", "ranks", "tp", "pp", "ep", "steps", "chunks", "recipe", "level", "implementation"),
    faults=FAULTS,
    preload=("megatron.core",),
)
