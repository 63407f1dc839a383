"""What the split lab can be told, and its phases in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from kit.errors import BadInput
from kit.labs.definition import Step
from kit.labs.options import LabConfig, Option
from kit.labs.split.recipes import RECIPES, Recipe
from kit.megatron.config import ModelConfig, check, dtype_on
from kit.train.options import ClippedOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kit.train.options import Level

KIT_SPLIT = "kit.labs.split.backends:split_step"
KIT_LOSS = "kit.labs.split.losses:of_recipe"
KIT_MODEL = "kit.labs.split.backends:assemble"
LEVELS: tuple[Level, ...] = ("tokens", "sequences")
LOSS_OPTIONS = (
    *("clip_low", "clip_high", "dual_clip", "ratio", "importance", "truncation", "band_low", "band_high"),
    *("kl", "kl_kind", "kl_input_clamp", "kl_output_clamp", "positive_nll"),
)
NORMALIZERS = (None, "tokens", "sequences")  # what a metric may be divided by


class Case(NamedTuple):
    """One way to cut a step, at one level of the loss. Its cycle is its place in the run; cycle 0 belongs to no case."""

    cycle: int
    level: str
    chunks: int
    first: bool  # of its level: the plain step comes with it


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitConfig(LabConfig):
    """A training job, a loss, and how its steps are cut."""

    backend: Annotated[
        Literal["megatron", "fsdp2"], Option("what trains: Megatron, or FSDP2 on a plain torch model")
    ] = "megatron"
    size: Annotated[Literal["tiny", "125m", "qwen2.5-0.5b"], Option("geometry of the model")] = "tiny"
    tp: Annotated[int, Option("tensor parallel size", low=1, high=64)] = 1
    pp: Annotated[int, Option("pipeline parallel size", low=1, high=64)] = 1
    ep: Annotated[int, Option("expert parallel size", low=1, high=64)] = 1
    experts: Annotated[int, Option("experts of each layer; 0: a dense model", low=0, high=256)] = 0
    aux_loss: Annotated[float, Option("coefficient of the experts' load-balancing loss", low=0, high=10)] = 0.01
    distributed_optimizer: Annotated[bool, Option("whether optimizer state is sharded over data ranks")] = False
    overlap_grad_reduce: Annotated[
        bool, Option("whether plain steps reduce gradients while the backward pass runs")
    ] = False
    reduce: Annotated[
        Literal["sum", "mean"], Option("how Megatron's DDP combines gradients of data ranks; experts need mean")
    ] = "sum"
    layers: Annotated[int | None, Option("layers; null: the size's own", low=1, high=200)] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Option("type of the weights; auto: bfloat16 on CUDA, float32 on the CPU"),
    ] = "auto"
    seed: Annotated[int, Option("seed of weights and data", low=0, high=2**31)] = 1234
    steps: Annotated[int, Option("optimizer steps of every way", low=1, high=1000)] = 5
    micro_batch: Annotated[int, Option("sequences in a microbatch", low=1, high=1024)] = 2
    microbatches: Annotated[int, Option("microbatches of each data rank in a step", low=1, high=1024)] = 10
    length: Annotated[int, Option("tokens in a row, padding included", low=24, high=32768)] = 32
    chunks: Annotated[tuple[int, ...], Option("in how many calls a step is fed; 0: every microbatch on its own")] = (
        1,
        2,
        5,
    )
    level: Annotated[
        Literal["tokens", "sequences", "both"], Option("whether the loss is a mean over tokens or over sequences")
    ] = "both"
    recipe: Annotated[Recipe, Option("the loss, by its name in common use")] = "grpo"
    clip_low: Annotated[float | None, Option("ratios are clipped to 1 - clip_low; null: the recipe's own", low=0)] = (
        None
    )
    clip_high: Annotated[float | None, Option("ratios are clipped to 1 + clip_high; null: the recipe's own", low=0)] = (
        None
    )
    dual_clip: Annotated[
        float | None,
        Option("where the advantage A is negative the loss is at most -A dual_clip; null: the recipe's own", low=1),
    ] = None
    ratio: Annotated[
        Literal["recipe", "tokens", "sequences", "none"],
        Option("ratio of a token, or of its sequence; none: REINFORCE, RLOO; recipe: the recipe's own"),
    ] = "recipe"
    importance: Annotated[
        Literal["recipe", "none", "tokens", "sequences"],
        Option("importance weight of what the engine sampled; recipe: the recipe's own"),
    ] = "recipe"
    truncation: Annotated[
        Literal["recipe", "none", "tis", "icepop", "seq-mask-tis"],
        Option("what is done to importance weights outside the band; recipe: the recipe's own"),
    ] = "recipe"
    band_low: Annotated[float | None, Option("lower end of the weights' band; null: the recipe's own", low=0)] = None
    band_high: Annotated[float | None, Option("upper end of the weights' band; null: the recipe's own", low=0)] = None
    kl: Annotated[
        float | None, Option("coefficient of the penalty for leaving the reference; null: the recipe's own", low=0)
    ] = None
    kl_kind: Annotated[
        Literal["recipe", "k1", "k2", "k3"], Option("estimate of the penalty's KL; recipe: the recipe's own")
    ] = "recipe"
    kl_input_clamp: Annotated[
        float | None, Option("largest difference to the reference that the penalty sees; null: none", low=0)
    ] = None
    kl_output_clamp: Annotated[float | None, Option("largest penalty of a token; null: none", low=0)] = None
    positive_nll: Annotated[
        float | None, Option("coefficient of -log p of tokens with a positive advantage; null: the recipe's own", low=0)
    ] = None
    loss: Annotated[
        str,
        Option(
            "the loss, module:attr; attr(ctx) has level, normalizers() and is called as docs/losses.md says",
            target=True,
        ),
    ] = KIT_LOSS
    model: Annotated[
        str, Option("the Megatron job, module:attr; attr(ctx) has chunks, optimizer and scheduler", target=True)
    ] = KIT_MODEL
    masks: Annotated[
        Literal["ragged", "full", "empty-rank"],
        Option("ragged answers with masked samples; all valid; or one data rank without a valid token"),
    ] = "ragged"
    batching: Annotated[
        Literal["fixed", "dynamic", "packed"], Option("how fsdp2 makes microbatches of rows; megatron: fixed")
    ] = "fixed"
    token_budget: Annotated[int, Option("tokens in a dynamic or packed microbatch", low=16, high=1 << 20)] = 96
    implementation: Annotated[
        str,
        Option("the code under test, module:attr; attr(ctx) has begin, microbatch, finish, abort", target=True),
    ] = KIT_SPLIT

    def __post_init__(self) -> None:
        if not self.chunks:
            raise BadInput("chunks is empty: name at least one way to cut a step, such as [1, 5]")
        for count in self.chunks:
            if not 0 <= count <= self.microbatches:
                raise BadInput(
                    f"chunks: {count} calls cannot share {self.microbatches} microbatches; give 1 to {self.microbatches}, or 0 for all"
                )
        if len(set(self.chunks)) < len(self.chunks):
            raise BadInput(f"chunks names a number twice: {list(self.chunks)}")
        check(model_config(self), self.ranks)
        if self.ep > 1 and not self.experts:
            raise BadInput(f"ep={self.ep} needs experts: set experts to a multiple of {self.ep}")
        if self.experts and self.reduce != "mean":
            raise BadInput(
                "experts need reduce=mean: Megatron scales their load-balancing loss for means over data ranks"
            )
        if self.backend == "fsdp2" and (self.tp, self.pp, self.experts) != (1, 1, 0):
            raise BadInput("backend=fsdp2 shards over data ranks alone: leave tp, pp and experts out")
        if self.backend == "megatron" and self.batching != "fixed":
            raise BadInput(
                f"batching={self.batching} is for backend=fsdp2; Megatron's packed rows need Transformer Engine"
            )
        if self.batching != "fixed" and self.token_budget < self.length:
            raise BadInput(f"token_budget={self.token_budget} must hold a whole row of length={self.length}")
        if self.recipe == "gspo" and self.level != "sequences":
            raise BadInput(
                f"recipe=gspo needs level=sequences, not {self.level!r}: its ratio is one of the whole sequence"
            )
        check_loss(self)
        if self.model != KIT_MODEL and (self.backend != "megatron" or self.experts or self.layers is not None):
            raise BadInput(
                f"model={self.model} needs backend=megatron without experts and layers: they shape the kit's model"
            )
        if self.masks == "empty-rank" and self.data_ranks < 2:
            raise BadInput("masks=empty-rank needs two data ranks or more: one of them has no valid token")

    @property
    def data_ranks(self) -> int:
        return self.ranks // (self.tp * self.pp)

    @property
    def batch(self) -> int:
        """Sequences of a step over all data ranks."""
        return self.data_ranks * self.microbatches * self.micro_batch

    @property
    def has_twin(self) -> bool:
        """Whether a plain torch model has the same weights as the job: the oracle and FSDP2 work on that."""
        return not self.experts and self.model == KIT_MODEL

    @property
    def balances(self) -> bool:
        """Whether experts have a load-balancing loss."""
        return self.experts > 0 and self.aux_loss > 0

    @property
    def levels(self) -> tuple[Level, ...]:
        return LEVELS if self.level == "both" else (self.level,)


def loss_settings(config: SplitConfig) -> dict[str, Any]:
    """What the kit's loss is made with, apart from its level: the recipe, under what was set."""
    return {**RECIPES[config.recipe], **set_options(config)}


def set_options(config: SplitConfig) -> dict[str, Any]:
    """The loss's options that a person set."""
    values = {name: getattr(config, name) for name in LOSS_OPTIONS}
    return {name: value for name, value in values.items() if value not in (None, "recipe")}


def check_loss(config: SplitConfig) -> None:
    """One sentence where the loss cannot have these options."""
    chosen = ", ".join(set_options(config))
    if config.loss != KIT_LOSS and (chosen or config.recipe != "grpo"):
        raise BadInput(f"loss={config.loss} has its own settings: leave {chosen or 'recipe'} out")
    if config.recipe == "nll":
        if chosen:
            raise BadInput(f"recipe=nll is the negative log-likelihood, which has no {chosen}: use another recipe")
        return
    for level in config.levels:
        ClippedOptions(level=level, **loss_settings(config))


def model_config(config: SplitConfig) -> ModelConfig:
    """The part of the config that makes the Megatron job."""
    return ModelConfig(
        size=config.size,
        tp=config.tp,
        pp=config.pp,
        ep=config.ep,
        experts=config.experts,
        aux_loss=config.aux_loss if config.experts else 0.0,
        distributed_optimizer=config.distributed_optimizer,
        overlap_grad_reduce=config.overlap_grad_reduce,
        sum_gradients=config.reduce == "sum",
        layers=config.layers,
        seq=config.length,
        micro_batch=config.micro_batch,
        microbatches=config.microbatches,
        seed=config.seed,
        dtype=dtype_on(config.dtype),
    )


def cases(config: SplitConfig) -> list[Case]:
    """Every way to cut, at every level, in the order of the run."""
    return cases_of({"level": config.level, "chunks": config.chunks})


def cases_of(config: Mapping[str, Any]) -> list[Case]:
    """The same from a run's config, as it is on disk."""
    levels = LEVELS if config["level"] == "both" else (config["level"],)
    ways = [(level, count) for level in levels for count in config["chunks"]]
    return [
        Case(cycle, level, count, first=count == config["chunks"][0])
        for cycle, (level, count) in enumerate(ways, start=1)
    ]


def plan(config: SplitConfig) -> list[Step]:
    """For each level the plain step, then each cut beside it; at the end what was promised of failures."""
    steps = [Step(0, "prepare")]
    for case in cases(config):
        if case.first:
            steps += [Step(case.cycle, "sync"), Step(case.cycle, "oracle")]
            if config.backend == "fsdp2":
                steps.append(Step(case.cycle, "other_backend"))
        steps += [Step(case.cycle, "split"), Step(case.cycle, "compare")]
    return [*steps, Step(0, "rehearse"), Step(0, "end")]
