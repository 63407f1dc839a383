"""Fields of a lab's config: frozen keyword-only dataclasses of the standard library, the same on both sides.

`Annotated[int, Option("...", low=1, high=64)]` says what a field is for and what it may be. The notebook side checks it
(pydantic asks the marker itself), `kit` prints it and widgets are made from it; the ranks take the values as they are.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Annotated, Any, Literal

from kit.errors import BadInput
from kit.machine import free_gpu_bytes, free_memory
from kit.megatron.config import ModelConfig, dtype_on
from kit.world.asked import RANK_BYTES


@dataclasses.dataclass(frozen=True)
class Option:
    """What a field is for, the ends of its range (both allowed), and whether it names code (`module:attr`): for the ranks, or with `here`
    for the notebook side. `names` are words that such a field may have in place of code, such as "auto"."""

    help: str
    _: dataclasses.KW_ONLY
    low: float | None = None
    high: float | None = None
    unit: str = ""
    target: bool = False
    here: bool = False
    names: tuple[str, ...] = ()

    def check(self, value: Any) -> Any:
        """The value, if it is in the range and could be a name or code; for pydantic."""
        if self.names and isinstance(value, str) and value not in self.names and ":" not in value:
            raise ValueError(f"must be {self.range()}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            above = self.low is None or value >= self.low
            below = self.high is None or value <= self.high
            if not (above and below and math.isfinite(value)):
                raise ValueError(f"must be {self.range()}")
        return value

    def range(self) -> str:
        if self.names:
            return f"one of {', '.join(self.names)}, or module:attr"
        if self.low is None and self.high is None:
            return ""
        if self.high is None:
            return f"of at least {self.low}"
        return f"of at most {self.high}" if self.low is None else f"from {self.low} to {self.high}"

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        function = {"type": "no-info", "function": self.check}
        return {"type": "function-after", "function": function, "schema": handler(source)}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LabConfig:
    """What every lab's config has. A lab adds fields by inheriting; rules among fields are a ValueError in __post_init__."""

    ranks: Annotated[int, Option("number of ranks", low=1, high=4096)] = 2
    device: Annotated[Literal["auto", "cpu", "cuda"], Option("device of the ranks; auto: CUDA if it is usable")] = (
        "auto"
    )
    timeout_s: Annotated[float, Option("time limit of a phase", low=0.1, high=86400, unit="s")] = 120.0
    python: Annotated[
        str, Option("Python interpreter of the ranks; empty: the first on this machine with torch and megatron.core")
    ] = ""
    routing: Annotated[
        Literal["torch", "torchcomms", "nccl2"],
        Option("backend of collectives: torch's own, torchcomms, or torch's nccl2 (CUDA only)"),
    ] = "torch"
    memory_snapshot: Annotated[
        bool, Option("record PyTorch's memory history and write it for each rank (CUDA only; phases take longer)")
    ] = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig(LabConfig):
    size: Annotated[Literal["tiny", "125m", "qwen2.5-0.5b"], Option("model size")] = "tiny"
    layers: Annotated[int | None, Option("number of layers; null: that of the size", low=1, high=200)] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Option("dtype of the weights; auto: bfloat16 on CUDA, float32 on the CPU"),
    ] = "auto"
    seed: Annotated[int, Option("seed for weights and data", low=0, high=2**31)] = 1234


def model_of(config: JobConfig, **more: Any) -> ModelConfig:
    """The Megatron job that a lab's config describes, by the settings that have the same names; `more` are set by the lab."""
    same = {one.name: getattr(config, one.name) for one in dataclasses.fields(ModelConfig) if hasattr(config, one.name)}
    return ModelConfig(**{**same, "dtype": dtype_on(config.dtype), **more})


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    name: str
    kind: Any
    default: Any
    option: Option

    @property
    def choices(self) -> tuple[Any, ...]:
        return typing.get_args(self.kind) if typing.get_origin(self.kind) is Literal else ()

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The kinds of a union, or the one."""
        union = typing.get_origin(self.kind) in {typing.Union, types.UnionType}
        return typing.get_args(self.kind) if union else (self.kind,)

    @property
    def optional(self) -> bool:
        return type(None) in self.kinds

    def allowed(self) -> str:
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        kinds = [kind for kind in self.kinds if kind is not type(None) and not self.option.names]
        words = " or ".join(_WORDS.get(kind, str(kind)) for kind in kinds)
        return " ".join(filter(None, [words, self.option.range(), "or null" if self.optional else ""]))


_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    tuple[int, ...]: "a list of whole numbers, such as [1, 2]",
}


def fields(config: type) -> list[Field]:
    hints = typing.get_type_hints(config, include_extras=True)
    found = []
    for field in dataclasses.fields(config):
        kind, *marks = typing.get_args(hints[field.name]) or (None,)
        option = next((mark for mark in marks if isinstance(mark, Option)), None)
        if option is None:
            raise TypeError(f"config field {field.name!r} has no Option: say what it is for")
        found.append(Field(field.name, kind, field.default, option))
    return found


# -- whether a job fits this machine ------------------------------------------------------------------------------------


GIB = 2**30
JOB = "weights, gradients and optimizer"


def check_fits(config: JobConfig, *, job: int, host: int, kept: str) -> None:
    """Refuse a job that does not fit. `job`: bytes of a rank on its device; `host`: other bytes in host memory, which `kept` describes."""
    ranks = config.ranks
    gpus = [] if config.device == "cpu" else free_gpu_bytes()
    if gpus:
        sharing = -(-ranks // len(gpus))  # ranks on the fullest GPU
        least = min(gpus[:ranks])
        if sharing * job > least:
            many = f" on each of {sharing} ranks that share a GPU" if sharing > 1 else " for each rank"
            raise BadInput(
                f"size={config.size} does not fit: {job / GIB:.2f} GiB of {JOB}{many}, "
                f"but {least / GIB:.1f} GiB are free on a GPU; use a smaller size, fewer layers, or more tp or pp"
            )
    here = 0 if gpus else job
    needed = (here + host + RANK_BYTES) * ranks
    free = free_memory()
    if needed > free:
        raise BadInput(
            f"size={config.size} does not fit: {ranks} ranks x ({here / GIB:.2f} GiB of {JOB} + {host / GIB:.2f} GiB {kept} "
            f"+ {RANK_BYTES / GIB:.2f} GiB per process) = "
            f"{needed / GIB:.1f} GiB, but {free / GIB:.1f} GiB are free; use a smaller size, fewer layers, or fewer ranks"
        )
