"""The parts of a lab: the fields of its config, its phases, roles, checks and faults. Both sides load it.

`Annotated[int, Option("...", low=1, high=64)]` gives a field's help text and allowed values. The notebook side validates it (pydantic calls
the marker), `kit` prints it and widgets are made from it; ranks do not validate again. A `Definition` has only data and names, so listing
labs and faults loads nothing else.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from kit.errors import BadInput
from kit.machine import GIB, free_gpu_bytes, free_memory
from kit.megatron.config import ModelConfig, dtype_on
from kit.results.records import flat
from kit.target import from_outside, load
from kit.world.asked import RANK_BYTES

if TYPE_CHECKING:
    from kit.results import Rule
    from kit.results.curves import Curves


@dataclasses.dataclass(frozen=True)
class Option:
    """A field's help text, its range (both ends allowed), and whether it names code (`module:attr`) for the ranks, or with `here` for the
    notebook side. `names` are words that such a field accepts instead of code, such as "auto". A field with configs by name (a, b, c, ...)
    offers the settings `nested` of each: as `a.steps`, or as `steps` for all of them."""

    help: str
    _: dataclasses.KW_ONLY
    low: float | None = None
    high: float | None = None
    unit: str = ""
    target: bool = False
    here: bool = False
    names: tuple[str, ...] = ()
    nested: tuple[str, ...] = ()

    def check(self, value: Any) -> Any:
        if self.names and isinstance(value, str) and value not in self.names and ":" not in value:
            raise ValueError(f"must be {self.range()}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            low, high = (-math.inf if self.low is None else self.low), (math.inf if self.high is None else self.high)
            if not (low <= value <= high and math.isfinite(value)):
                raise ValueError(f"must be {self.range()}")
        return value

    def range(self) -> str:
        if self.names:
            return f"one of {', '.join(self.names)}, or module:attr"
        if self.high is None:
            return "" if self.low is None else f"of at least {self.low}"
        return f"of at most {self.high}" if self.low is None else f"from {self.low} to {self.high}"

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        function = {"type": "no-info", "function": self.check}
        return {"type": "function-after", "function": function, "schema": handler(source)}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LabConfig:
    """The settings of every lab. A lab adds fields by inheritance; violated rules between fields raise a ValueError in __post_init__."""

    ranks: Annotated[int, Option("number of ranks", low=1, high=4096)] = 2
    device: Annotated[Literal["auto", "cpu", "cuda"], Option("device of the ranks; auto: CUDA if it is usable")] = (
        "auto"
    )
    timeout_s: Annotated[float, Option("time limit of a phase", low=0.1, high=86400, unit="s")] = 120.0
    python: Annotated[
        str, Option("Python interpreter of the ranks; empty: the first on this machine with torch and megatron.core")
    ] = ""
    nodes: Annotated[int, Option("number of machines; ranks are spread evenly over them", low=1, high=4096)] = 1
    endpoint: Annotated[
        str,
        Option("with several machines: host:port of this one, where torchrun's ranks meet and which the others reach"),
    ] = ""
    launch: Annotated[
        str,
        Option(
            "how other machines start: print (shows the command to paste), ssh:HOST1,HOST2, slurm, ray, or your own command with "
            "{command} and {node}"
        ),
    ] = "print"
    engine: Annotated[
        Literal["torchrun", "ray"],
        Option("what starts the ranks: torchrun, or Ray as its actors; the controller of a loop is then an actor too"),
    ] = "torchrun"
    routing: Annotated[
        Literal["torch", "torchcomms", "nccl2"],
        Option("backend of collectives: torch's own, torchcomms, or torch's nccl2 (CUDA only)"),
    ] = "torch"
    memory_snapshot: Annotated[
        bool, Option("record PyTorch's memory history and write it for each rank (CUDA only; phases take longer)")
    ] = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig(LabConfig):
    size: Annotated[Literal["tiny", "small", "125m", "qwen2.5-0.5b"], Option("model size")] = "tiny"
    layers: Annotated[int | None, Option("number of layers; null: as in the model size", low=1, high=200)] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Option("dtype of the weights; auto: bfloat16 on CUDA, float32 on the CPU"),
    ] = "auto"
    seed: Annotated[int, Option("seed for weights and data", low=0, high=2**31)] = 1234


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BenchConfig(LabConfig):
    """The settings of a bench: a lab without ranks. Its parts start the Worlds that they measure. With `quick`, settings
    that were not given are those of QUICK."""

    QUICK: ClassVar[Mapping[str, Any]] = {}

    ranks: Annotated[int, Option("a bench has no ranks", low=0, high=0)] = 0
    quick: Annotated[bool, Option("measure less; takes a minute or two")] = False
    parts: Annotated[str, Option("parts to measure, separated by commas; X means every X.Y; empty: all of them")] = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if self.quick and field.name in self.QUICK and getattr(self, field.name) == field.default:
                object.__setattr__(self, field.name, self.QUICK[field.name])


def driven_parts(config: BenchConfig, parts: Sequence[str], driver: str) -> list[Step]:
    """A driven step for each part that the config asks for, in the order of the bench."""
    words = [word.strip() for word in config.parts.split(",") if word.strip()]
    for word in words:
        if not any(part == word or part.startswith(f"{word}.") for part in parts):
            raise BadInput(f"there is no part {word!r} in this bench; its parts are: {', '.join(parts)}")
    wanted = [part for part in parts if not words or any(part == word or part.startswith(f"{word}.") for word in words)]
    return [Step(0, part, driver=driver) for part in wanted]


def model_of(config: JobConfig, **more: Any) -> ModelConfig:
    """The Megatron job of a lab's config, from the settings with equal names; `more` are set by the lab."""
    same = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(ModelConfig)
        if hasattr(config, field.name)
    }
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
    def holds(self) -> type[Any] | None:
        """The class of the configs that this field has by name."""
        return typing.get_args(self.kind)[1] if self.option.nested else None

    @property
    def kinds(self) -> tuple[Any, ...]:
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
    """The settings of a config. A nested config is not one of them; `nested_fields` has its settings."""
    return [field for field in _fields(config) if field.holds is None]


_DECLARED: dict[Any, list[Field]] = {}  # by class, since type hints take long to resolve


def _fields(config: type) -> list[Field]:
    if config not in _DECLARED:
        _DECLARED[config] = _declared(config)
    return _DECLARED[config]


def _declared(config: type) -> list[Field]:
    hints = typing.get_type_hints(config, include_extras=True)
    declared = []
    for field in dataclasses.fields(config):
        kind, *marks = typing.get_args(hints[field.name]) or (None,)
        option = next((mark for mark in marks if isinstance(mark, Option)), None)
        if option is None:
            raise TypeError(f"config field {field.name!r} has no Option; give it one with a help text")
        declared.append(Field(field.name, kind, field.default, option))
    return declared


# -- configs that hold other configs by name -----------------------------------------------------------------------------

NAMES = "abcdefghijklmnopqrstuvwxyz"  # of nested configs
EVERY = ""  # the name of settings for all of them


def holder(config: type) -> Field | None:
    """The field with nested configs, if there is one."""
    return next((field for field in _fields(config) if field.holds is not None), None)


def nested_fields(config: type, name: str = EVERY) -> list[Field]:
    """The settings of each nested config, as those of the one with this name."""
    held = holder(config)
    if held is None or held.holds is None:
        return []
    by_name = {field.name: field for field in fields(held.holds)}
    dot = f"{name}." if name else ""
    return [dataclasses.replace(by_name[setting], name=dot + setting) for setting in held.option.nested]


def known_fields(config: type) -> dict[str, Field]:
    """Every name that a setting may be given under."""
    every = [field for name in (EVERY, *NAMES) for field in nested_fields(config, name)]
    return {field.name: field for field in [*every, *fields(config)]}


def combined(config: type, *layers: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as a config holds them; later layers go over earlier ones, and within a layer a named config's over those of all."""
    held = holder(config)
    if held is None:
        return {name: value for layer in layers for name, value in layer.items()}
    outer: dict[str, Any] = {}
    by_name: dict[str, dict[str, Any]] = {EVERY: {}}
    own = {field.name for field in fields(config)}
    for layer in map(flat, layers):
        outer |= {name: value for name, value in layer.items() if name in own}
        for setting, value in layer.items():
            if setting in held.option.nested and setting not in own:
                for given in by_name.values():
                    given[setting] = value
        for path, value in layer.items():
            name, dot, setting = path.partition(".")
            if dot:
                by_name.setdefault(name, {**by_name[EVERY]})[setting] = value
    return {**outer, held.name: by_name}


def made(config: type[Any], *layers: Mapping[str, Any]) -> Any:
    """The config with these settings, which a person gave or a run has stored; only the config itself checks them."""
    settings = combined(config, *layers)
    if (held := holder(config)) is not None and held.holds is not None:
        settings[held.name] = {
            name: held.holds(**as_tuples(given)) for name, given in settings[held.name].items() if given
        }
    return config(**as_tuples(settings))


def as_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def as_settings(config: Any) -> dict[str, Any]:
    """A config as a person would give it and as a run stores it: nested configs by their names."""
    settings: dict[str, Any] = {field.name: getattr(config, field.name) for field in fields(type(config))}
    if (held := holder(type(config))) is not None:
        for name, nested in getattr(config, held.name).items():
            settings[name] = {setting: getattr(nested, setting) for setting in held.option.nested}
    return settings


# -- the parts of a lab ------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One phase of one cycle. Only `roles` are called and measured; empty means all. `driver` makes it a driven step: `module:attr` on the
    notebook side, called with a `kit.labs.lab.Drive`, calls roles until it returns. `case`: what people read for the cycle, if its number
    alone says nothing to them; empty: nothing."""

    cycle: int
    phase: str
    roles: tuple[str, ...] = ()
    driver: str = ""
    case: str | None = None

    @property
    def place(self) -> str:
        """Where in the run the phase is, in words: "cycle 2"."""
        number = f"cycle {self.cycle}" if self.cycle else ""
        return number if self.case is None else self.case


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """The role of some ranks. `world`: the number of their World; `devices`: a device number per rank, if any, or None
    for ranks on the CPU whatever the others use; `phases`: the object
    that each of these ranks makes once, if it differs from the lab's. `machine`: where their World is, if not on all in turn; `called`:
    ranks of other machines call the first of these, as they call rank 0."""

    name: str
    ranks: tuple[int, ...]
    world: int = 0
    devices: tuple[int, ...] | None = ()
    phases: str = ""
    machine: int | None = None
    called: bool = False


def world_machines(roles: Sequence[Role]) -> tuple[int, ...]:
    """The machine of each World of these roles; none where they are on all in turn."""
    placed = {role.world: role.machine for role in roles if role.machine is not None}
    return tuple(placed[world] for world in sorted(placed))


def world_sizes(roles: Sequence[Role]) -> tuple[int, ...]:
    """How many ranks each World of these roles has."""
    count = 1 + max(role.world for role in roles)
    return tuple(sum(len(role.ranks) for role in roles if role.world == number) for number in range(count))


# Own cores in random worlds with the layout of the run, as `kit explore` runs them.
EXPLORED = Step(0, "explored", driver="kit.exploration:explored")
WorldCount = Annotated[
    int, Option("random worlds in which own code runs, as with `kit explore`; 0: none", low=0, high=100_000)
]


def check_transport(transport: str, nodes: int) -> None:
    """Refuse memory of one machine for weights that go to others."""
    if nodes > 1 and transport in {"shm", "ipc"}:
        raise BadInput(f"transport={transport} works within one machine, but nodes={nodes}; use transport=auto")


def own_code(config: Any, names: Sequence[str]) -> tuple[str, ...]:
    """Those of these settings that name code from outside the kit; `config` is a config, or the settings of a run."""
    return tuple(name for name in names if from_outside(setting_of(config, name)))


def in_a_notebook(config: Any, names: Sequence[str]) -> str:
    """Why own code cannot run in the processes that explore; empty if it can."""
    targets = {name: str(setting_of(config, name)) for name in names}
    notebooks = (f"{name}={target}" for name, target in targets.items() if target.startswith("__main__:"))
    setting = next(notebooks, "")
    return f"{setting} is code of this notebook; write it to a module" if setting else ""


def setting_of(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name)


def working(step: Step, roles: Sequence[Role]) -> list[int]:
    return sorted(rank for role in roles if not step.roles or role.name in step.roles for rank in role.ranks)


def roles_by_rank(roles: Sequence[Role]) -> dict[int, str]:
    return {rank: role.name for role in roles if role.name for rank in role.ranks}


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """A known bug that can be switched on, for as long as the lab runs or only `during` some phases.

    `patch` names the code that the bug replaces, and its replacement, both as `module:attr`: texts, so that listing faults loads nothing.
    `where` says on which side; the code under test does not know. A replacement's module binds the original when it is imported.
    `caught_by` is the rule that detects it, `exit` the required exit status of the run, `set` the config that exposes it. `needs` are
    the values of a setting with which the rule detects the bug; with others the rule fails anyway or is not measured.
    `scene` has further keyword arguments for a driver or a simulation, without which the bug does not show. `bugs` are the public bugs that
    it shows, as owner/repository#number; docs/bugs.md has a row for each.
    """

    name: str
    breaks: str
    caught_by: str
    _: dataclasses.KW_ONLY
    exit: int = 1
    devices: tuple[str, ...] = ("cpu", "cuda")
    set: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    needs: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    scene: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    patch: Mapping[str, str] = dataclasses.field(default_factory=dict)
    where: Literal["ranks", "notebook"] = "ranks"
    during: tuple[str, ...] = ()
    bugs: tuple[str, ...] = ()

    def patch_in(self, phase: str, where: str) -> Mapping[str, str]:
        """What this fault replaces there in a phase, or with "" for the whole lab."""
        return self.patch if where == self.where and phase in (self.during or ("",)) else {}


def exposed_by(
    settings: Mapping[str, Any], *faults: Fault, needs: Mapping[str, tuple[Any, ...]] | None = None, **alike: Any
) -> tuple[Fault, ...]:
    """Faults that all have these settings, and these values that they need, in addition to their own; and other fields `alike`."""
    return tuple(
        dataclasses.replace(fault, set={**settings, **fault.set}, needs={**(needs or {}), **fault.needs}, **alike)
        for fault in faults
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Definition:
    """A lab. `plan` lists its phases for a config.

    `phases` names (`module:attr`) a class that each rank instantiates once with a Context: it has a method for every phase of the
    plan, called with the cycle; a lab without ranks has none. `rules` names a sequence of kit.results.Rule, `presets` sets of their
    tolerances by name, `charts` a kit.draw.album.Charts with plots and tables. `preload` is imported before ranks start.
    `curves` names a kit.results.curves.Curves that makes points of the lab's own, such as one per optimizer update.
    `first` names the settings that the panel shows first; without it, all.
    `roles` gives the roles of a config's ranks, in one World or several, in rank order; without it all ranks have one role.
    With `isolate`, a World that dies does not end the others. With `hosted` and engine=ray, drivers run in an actor of Ray.
    With `goes_on`, a step that breaks does not keep the following ones from running: they get fresh ranks, and the run fails at its end.
    `tag` lists a lab apart from the others: "bench" for one that measures ways side by side, "box" for one about the machine.
    `foreign` names (`module:attr`) a function that converts files of other systems: called with their contents by name, it returns the
    settings and the keys without a setting.
    `worlds` names a kit.loop.explore.Worlds: random worlds in which `kit explore` runs the lab's cores.
    `fits` is called on the notebook side and raises BadInput, with the arithmetic, if a config does not fit on this machine.
    """

    name: str
    summary: str
    config: type[LabConfig]
    plan: Callable[[Any], Sequence[Step]]
    phases: str = ""
    rules: str
    presets: str = ""
    charts: str = ""
    curves: str = ""
    foreign: str = ""
    worlds: str = ""
    first: tuple[str, ...] = ()
    tag: str = ""  # "bench" or "box": listed apart
    roles: Callable[[Any], Sequence[Role]] | None = None
    isolate: bool = False
    hosted: bool = False
    goes_on: bool = False
    fits: Callable[[Any], None] | None = None
    faults: tuple[Fault, ...] = ()
    preload: tuple[str, ...] = ()

    def roles_of(self, config: LabConfig) -> tuple[Role, ...]:
        """Every rank is in exactly one role; a lab without roles has a single unnamed one."""
        if self.roles is None:
            return (Role(name="", ranks=tuple(range(config.ranks))),)
        roles = tuple(self.roles(config))
        if sorted(rank for role in roles for rank in role.ranks) != list(range(config.ranks)):
            given = {role.name: role.ranks for role in roles}
            raise ValueError(
                f"lab {self.name!r} gives roles {given} to {config.ranks} ranks; each rank needs exactly one"
            )
        if wrong := [role.name for role in roles if role.devices and len(role.devices) != len(role.ranks)]:
            raise ValueError(f"lab {self.name!r} must give role {wrong[0]!r} a device per rank, or none")
        worlds = [number for _, number in sorted((rank, role.world) for role in roles for rank in role.ranks)]
        if worlds != sorted(worlds) or set(worlds) != set(range(max(worlds) + 1)):
            raise ValueError(
                f"lab {self.name!r} puts its ranks into Worlds {worlds}; fill Worlds in rank order, from 0"
            )
        return roles

    def load_rules(self) -> Sequence[Rule]:
        return tuple(load(self.rules))

    def all_rules(self) -> Sequence[Rule]:
        """The lab's own rules and the common ones, without those that an own one of the same name replaces. Each applies only to the runs
        that it concerns."""
        own = self.load_rules()
        names = {rule.name for rule in own}
        return (*own, *(rule for rule in load("kit.results.growth:EVERY_LAB") if rule.name not in names))

    def curves_of_run(self) -> Sequence[Curves]:
        """The curves of a new run: those by cycle, and the lab's own."""
        return [load(name)() for name in ("kit.results.curves:CycleCurves", self.curves) if name]

    def load_presets(self) -> Mapping[str, Mapping[str, float]]:
        return dict(load(self.presets)) if self.presets else {}


# -- whether a job fits this machine ------------------------------------------------------------------------------------


JOB = "weights, gradients and optimizer"


def check_fits(config: JobConfig, *, job: int, host: int, kept: str) -> None:
    """Refuse a job that does not fit. `job`: bytes per rank on its device; `host`: other bytes in host memory, described by `kept`."""
    ranks = config.ranks
    if gpus := [] if config.device == "cpu" else free_gpu_bytes():
        sharing = -(-ranks // len(gpus))  # ranks on the fullest GPU
        least = min(gpus[:ranks])
        if sharing * job > least:
            many = f" on each of {sharing} ranks that share a GPU" if sharing > 1 else " for each rank"
            raise BadInput(
                f"size={config.size} does not fit: {job / GIB:.2f} GiB of {JOB}{many}, "
                f"but {least / GIB:.1f} GiB are free on a GPU; use a smaller size, fewer layers, or more tp or pp"
            )
    local = 0 if gpus else job
    needed = (local + host + RANK_BYTES) * ranks
    if needed > (free := free_memory()):
        raise BadInput(
            f"size={config.size} does not fit: {ranks} ranks x ({local / GIB:.2f} GiB of {JOB} + {host / GIB:.2f} GiB {kept} "
            f"+ {RANK_BYTES / GIB:.2f} GiB per process) = "
            f"{needed / GIB:.1f} GiB, but {free / GIB:.1f} GiB are free; use a smaller size, fewer layers, or fewer ranks"
        )
