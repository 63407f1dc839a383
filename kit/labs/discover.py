"""The labs and their configs on the notebook side. Labs are packages in this folder and entry points `kit.labs` of installed packages.
A config from user input is checked before any rank starts, with one sentence per mistake. Runs of a folder are listed by their config."""

from __future__ import annotations

import functools
import json
import os
import pkgutil
import typing
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kit import target as targets
from kit.errors import BadInput, hint
from kit.labs.definition import (
    Definition,
    Fault,
    Field,
    LabConfig,
    as_settings,
    combined,
    fields,
    holder,
    in_a_notebook,
    known_fields,
    world_machines,
    world_sizes,
)
from kit.machine import has_gpu_driver
from kit.megatron.config import dtype_on, forced_tf32
from kit.results import Rule, list_runs, old
from kit.results.records import OWN_LAB, flat
from kit.results.run import STATUSES
from kit.results.runtable import Facts, facts_on_disk, run_frame
from kit.routing import NCCL2
from kit.world import World, asked, warm
from kit.world.agentside import AGENT
from kit.world.asked import check_engine, check_layout, check_ranks, check_worlds
from kit.world.launch import RAY, TORCHRUN, launch_commands

if TYPE_CHECKING:
    import pandas as pd

    from kit.draw.album import Charts


class Found(NamedTuple):
    labs: dict[str, Definition]
    broken: dict[str, str]


@functools.cache
def discover() -> Found:
    """Every lab. A broken third-party package is reported and does not affect the others."""
    from importlib.metadata import entry_points

    packages = pkgutil.iter_modules([str(Path(__file__).parent)])
    own = [import_module(f"kit.labs.{info.name}.lab").LAB for info in packages if info.ispkg]
    discovered = Found({lab.name: lab for lab in own}, {})
    for point in entry_points(group="kit.labs"):
        try:
            lab = point.load()
        except Exception as error:  # noqa: BLE001 - importing a third-party package may raise anything
            discovered.broken[point.name] = f"{point.value} cannot be loaded: {type(error).__name__}: {error}"
            continue
        if not isinstance(lab, Definition):
            discovered.broken[point.name] = f"{point.value} is not a kit.labs.definition.Definition"
        elif lab.name in discovered.labs:
            discovered.broken[point.name] = f"{point.value} has the name {lab.name!r}, which another lab uses"
        else:
            discovered.labs[lab.name] = lab
    return discovered


def tagged(tag: str = "") -> dict[str, Definition]:
    """The labs with this tag; without one, those that are no bench and not about the machine."""
    return {name: lab for name, lab in discover().labs.items() if lab.tag == tag}


def find(name: str) -> Definition:
    labs, broken = discover()
    if name not in labs:
        raise BadInput(
            f"lab {name!r}: {broken[name]}" if name in broken else f"unknown lab {name!r}; {hint(name, labs)}"
        )
    return labs[name]


def rules_of(name: str) -> Sequence[Rule]:
    """The checks of a lab; for an unknown lab, such as a run recorded by your own script, those of the observers."""
    lab = discover().labs.get(name)
    return lab.all_rules() if lab else tuple(targets.load("kit.results.growth:OBSERVED"))


def charts_of(name: str) -> Charts | None:
    lab = discover().labs.get(name)
    return cast("Charts", targets.load(lab.charts)) if lab and lab.charts else None


# -- a config from user input --------------------------------------------------------------------------------------------


WITH_KIT = """
import importlib.util, runpy, sys
if importlib.util.find_spec("kit") is None:
    runpy.run_path(sys.argv[1])["make_kit_importable"]()
"""
PROBE = f'{WITH_KIT}sys.exit(runpy.run_path(sys.argv[2])["refusal"](sys.argv[3]) or 0)'
FIND = f"""{WITH_KIT}
module = sys.argv[3].partition(":")[0]
if importlib.util.find_spec(module) is None:
    raise ModuleNotFoundError(f"No module named {{module!r}}")
"""
LOOK_UP_S = 120.0
ASK_NCCL2 = "import torch, torch.distributed as dist; print(torch.__version__, hasattr(dist, 'ProcessGroupNCCL2'))"


def configure(
    lab: Definition, given: Mapping[str, Any], fault: Fault | None, *, world: World | None = None
) -> LabConfig:
    """The config: given settings override those of the fault, which override the lab's defaults. Checked against this machine. Code named
    by a setting is looked up as on the ranks, with the Python and the environment of `world`."""
    config = validate(lab, fault.set if fault else {}, given)
    refuse_unused(config, given)
    if refused := next(refused_here(lab, config, fault), None):
        raise BadInput(refused[1])
    ranks_python = world.python if world else asked.find_python(config.python or None).path
    if "megatron.core" in lab.preload and not asked.probe_python(ranks_python, "").megatron:
        others = [python.path for python in asked.search_pythons() if python.torch and python.megatron]
        instead = f"use one that has it: export KIT_PYTHON={others[0]}" if others else "install megatron-core there"
        why = f"needs megatron.core, which the ranks' Python {ranks_python} does not have; {instead}"
        raise BadInput(f"lab {lab.name!r} {why}")
    if config.routing == NCCL2:
        check_nccl2(ranks_python)
    env, needs_megatron = world.env if world else {}, "megatron.core" in lab.preload
    for name, target in own_targets(lab, config, here=False):
        check_target(name, target, ranks_python, env, config=config, megatron=needs_megatron)
    return config


def own_targets(lab: Definition, config: LabConfig, *, here: bool) -> Iterator[tuple[str, str]]:
    """The settings that name a person's code for this process, or for the ranks, and that code."""
    for field in fields(lab.config):
        target = getattr(config, field.name)
        own = field.option.target and target != field.default and target not in field.option.names
        if own and field.option.here is here:
            yield field.name, target


def unloadable_here(lab: Definition, config: LabConfig) -> Iterator[tuple[str, str]]:
    for name, target in own_targets(lab, config, here=True):
        try:
            check_target(name, target)
        except BadInput as error:
            yield name, str(error)


def refused_here(lab: Definition, config: LabConfig, fault: Fault | None) -> Iterator[tuple[str, str]]:
    """What this machine or the fault does not allow: the field ("" for no single one) and a sentence."""
    driver, on_cuda = has_gpu_driver(), runs_on_gpus(config.device)
    if config.device == "cuda" and not driver:
        yield "device", "device=cuda needs a GPU driver, which this machine does not have; use cpu or auto"
    # Ranks get this process's environment.
    if on_cuda and getattr(config, "dtype", "") == "float32" and (why := forced_tf32()):
        yield "dtype", why
    if config.routing == NCCL2 and not on_cuda:
        why = "ranks on the CPU have none" if driver else "this machine has no GPU driver"
        yield "routing", f"routing=nccl2 needs NCCL, and {why}; use torch or torchcomms"
    if config.memory_snapshot and config.device == "cpu":
        why = "PyTorch records no memory history on the CPU"
        yield "memory_snapshot", f"memory_snapshot=true needs CUDA: {why}; use cuda or auto"
    yield from misplaced(lab, config)
    rules: list[tuple[str, Callable[[], object]]] = [
        ("engine", lambda: check_engine(config.engine, config.nodes, config.python)),
        ("ranks", lambda: check_ranks(config.ranks // config.nodes)),
        ("launch", lambda: launch_commands(config.launch, config.nodes)),
    ]
    if config.nodes > 1 or config.endpoint:
        roles = lab.roles_of(config)
        sizes = world_sizes(roles)
        if len(sizes) > 1:
            on = world_machines(roles)
            rules.append(("endpoint", lambda: check_worlds(sizes, config.nodes, config.endpoint, on)))
        else:
            rules.append(("endpoint", lambda: check_layout(config.ranks, config.nodes, config.endpoint)))
    if fault is not None:
        yield from undetectable(lab, config, fault)
        rules.insert(0, ("", lambda: refuse_device(fault, "cuda" if on_cuda else "cpu")))
    unloadable = dict(unloadable_here(lab, config))
    yield from unloadable.items()
    if lab.fits is not None and not unloadable:  # it may look into this code
        rules.append(("", functools.partial(lab.fits, config)))
    for name, rule in rules:
        try:
            rule()
        except BadInput as error:
            yield name, str(error)


def misplaced(lab: Definition, config: LabConfig) -> Iterator[tuple[str, str]]:
    """Where the lab's ranks, or own code of its controller, cannot run."""
    for name, default in (("nodes", 1), ("engine", TORCHRUN)) if not config.ranks else ():
        if (value := getattr(config, name)) != default:
            yield name, f"{name}={value} is not possible here: lab {lab.name!r} has no ranks; leave {name}={default}"
    here = [field.name for field in fields(lab.config) if field.option.here]
    if config.engine == RAY and lab.hosted and (why := in_a_notebook(config, here)):
        yield "engine", f"engine=ray runs the controller in another process: {why}"


def undetectable(lab: Definition, config: LabConfig, fault: Fault) -> Iterator[tuple[str, str]]:
    """The settings with which the fault's check fails anyway, or is null, so the run would end as without the fault."""
    settings = {name: getattr(config, name) for name in fault.needs}
    wrong = {name: value for name, value in settings.items() if value not in fault.needs[name]}
    for name, value in wrong.items():
        words = " or ".join(map(setting_text, fault.needs[name]))
        yield name, f"fault {fault.name!r} cannot be detected with {name}={setting_text(value)}; use {name}={words}"
    rule = next((rule for rule in lab.all_rules() if rule.name == fault.caught_by), None)
    if rule is not None and not wrong and (reason := rule.unanswerable(as_settings(config))):
        why = f"{rule.name} is not measured ({reason})"
        yield "", f"fault {fault.name!r} cannot be detected with these settings: {why}"


def with_dtype(values: Mapping[str, Any]) -> dict[str, Any]:
    """Resolve `dtype=auto`, so a run's config states the dtype that it used."""
    if values.get("dtype") != "auto":
        return dict(values)
    return {**values, "dtype": dtype_on("auto", "cuda" if runs_on_gpus(values.get("device", "auto")) else "cpu")}


def runs_on_gpus(device: str) -> bool:
    return device != "cpu" and has_gpu_driver()


def check_nccl2(python: str) -> None:
    printed, why = asked.run_python(python, ASK_NCCL2, timeout_s=120)
    if why:
        raise BadInput(
            f"routing=nccl2: cannot determine whether the torch of the ranks' Python {python} has that backend: {why}"
        )
    version, has_it = printed.splitlines()[-1].split()
    if has_it != "True":
        raise BadInput(
            f"routing=nccl2 needs a torch with the backend nccl2, which the ranks' torch {version} lacks; use torch or torchcomms"
        )


class ConfigReading(NamedTuple):
    """The config, None where a value is not allowed; and what `configure` would refuse: a sentence per field, under "" for a rule about
    several."""

    config: LabConfig | None
    problems: dict[str, str]


def read_config(lab: Definition, given: Mapping[str, Any], fault: Fault | None) -> ConfigReading:
    """Fast enough to call on every keystroke, because code for the ranks (`module:attr`) is not looked up; code for this process is."""
    config = _read(lab, fault.set if fault else {}, given)
    if isinstance(config, dict):
        return ConfigReading(None, config)
    problems: dict[str, str] = {}
    for name, why in refused_here(lab, config, fault):
        problems.setdefault(name, why)
    return ConfigReading(config, problems)


def complaints(lab: Definition, given: Mapping[str, Any], fault: Fault | None) -> dict[str, str]:
    return read_config(lab, given, fault).problems


def validate(lab: Definition, *layers: Mapping[str, Any]) -> LabConfig:
    """The config of these settings; later layers go over earlier ones."""
    config = _read(lab, *layers)
    if isinstance(config, dict):
        raise BadInput("; ".join(dict.fromkeys(config.values())))
    return config


def _read(lab: Definition, *layers: Mapping[str, Any]) -> LabConfig | dict[str, str]:
    """The config, or the errors by setting. An error without a setting raises."""
    import pydantic

    known, adapter, held = _known(cast("Hashable", lab.config))
    layers = tuple(current_names(lab, layer) for layer in layers)
    if "dtype" in known:
        together = {"dtype": known["dtype"].default, **{name: layer[name] for layer in layers for name in layer}}
        layers = (*layers, {"dtype": with_dtype(together)["dtype"]})
    settings = combined(lab.config, *layers)
    try:
        # Strict, so "3" is not a number; via JSON, so a list may fill a tuple.
        config: LabConfig = adapter.validate_json(json.dumps(settings), strict=True)
    except pydantic.ValidationError as error:
        wrong: dict[str, str] = {}
        given = {name: value for layer in layers for name, value in layer.items()}
        for row in error.errors():
            place = [str(step) for step in row["loc"]]
            if held is not None and place[:1] == [held.name]:  # [holder, name, setting] of a nested config
                place = [".".join(filter(None, place[1:3]))]
            name = place[0] if place else ""
            if name.partition(".")[2] not in wrong or name in given:  # else the sentence names the setting for all
                wrong.setdefault(name, _field_sentence(row, name, known, given))
        return wrong
    return config


def refuse_unused(config: LabConfig, given: Mapping[str, Any]) -> None:
    """Refuse settings of a nested config that this config does not have."""
    held = holder(type(config))
    names = [] if held is None else [*getattr(config, held.name)]
    for path in flat(given):
        name, dot, _ = path.partition(".")
        if dot and name not in names:
            raise BadInput(f"{path} is a setting of {name!r}, but this config has only {', '.join(names)}")


def current_names(lab: Definition, layer: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that a person gave: flat, known, with their current names, and plain values."""
    known, flat_layer = _known(cast("Hashable", lab.config))[0], flat(layer)
    for name, value in flat_layer.items():
        current = old.current_setting(lab.name, name, value)
        if instead := old.dropped(lab.name, name):
            why = f"setting {name} of lab {lab.name!r} no longer exists and is ignored: {instead}"
            warnings.warn(why, old.Renamed, stacklevel=2)
        elif name not in known and not {*current} <= {*known}:
            alike = [one for one in known if one[1:2] != "." or one[0] == name[0]]  # not each name of a nested config
            raise BadInput(f"lab {lab.name!r} has no setting {name!r}; {hint(name, alike)}")
        elif [*current] != [name]:
            words = " ".join(f"{new}={setting_text(setting)}" for new, setting in current.items())
            warnings.warn(f"setting {name} of lab {lab.name!r} is now {words}", old.Renamed, stacklevel=2)
    values = old.current_settings(lab.name, flat_layer)
    for name, value in values.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            why = "settings must be plain values (numbers, text, true, false, null, lists)"
            raise BadInput(f"{why}; {name} is not") from None
    # A choice that looks like a number (`gate: 1` in a file) is meant as text.
    return {
        name: str(value) if type(value) in (int, float) and str(value) in known[name].choices else value
        for name, value in values.items()
    }


@functools.cache
def _known(config: Any) -> tuple[dict[str, Field], Any, Field | None]:
    import pydantic

    return known_fields(config), pydantic.TypeAdapter(config), holder(config)


def from_text(lab: Definition, pairs: Mapping[str, str]) -> dict[str, Any]:
    """Values from the command line: text if the field is text, else JSON, else the text itself, which validation refuses. A list needs no
    brackets."""
    known = known_fields(lab.config)
    fields_of = {name: known.get(next(iter(old.current_setting(lab.name, name, pairs[name])))) for name in pairs}
    return {name: _value_of(text, fields_of[name]) for name, text in pairs.items()}


def _value_of(text: str, field: Field | None) -> Any:
    kinds = field.kinds if field else ()
    if str in kinds:
        return text
    is_list = any(typing.get_origin(kind) is tuple for kind in kinds)
    if text.startswith("[") or (is_list and text == "null"):
        return value_of(text)
    value = value_of(f"[{text}]" if is_list else text)
    # An older setting may have been a list: pace_ms=20,0
    return value_of(f"[{text}]") if value == text and "," in text else value


def refuse_device(fault: Fault, device: str) -> None:
    if device not in fault.devices:
        raise BadInput(f"fault {fault.name!r} needs {' or '.join(fault.devices)}, but the ranks would run on {device}")


def find_fault(lab: Definition, name: str | None) -> Fault | None:
    faults = {fault.name: fault for fault in lab.faults}
    if name is not None and name not in faults:
        raise BadInput(f"lab {lab.name!r} has no fault {name!r}; {hint(name, faults)}")
    return None if name is None else faults[name]


def check_target(
    name: str,
    target: str,
    python: str = "",
    env: Mapping[str, str] | None = None,
    *,
    config: LabConfig | None = None,
    megatron: bool = False,
) -> None:
    """Load code where it will run: in the ranks' interpreter and environment, which may be the only ones with the module. Without `python`
    in this process, where it may also be a name of the notebook (`__main__:Name`). The process from which the ranks of this config will
    come tries it if there is one, so that what it imports is imported once."""
    if not targets.is_target(target):
        raise BadInput(f"{name} must be 'module:attr', not {target!r}")
    if not python:
        if refused := targets.refusal(target):
            raise BadInput(f"{name}={target} cannot be loaded here: {refused}")
        return
    why = None
    if config is not None and not env:
        # A misspelt module is named before the waiting agent has imported torch.
        why = _ask_python(python, FIND, target, {}) or warm.look_up(
            target, python, config.device, config.ranks, megatron=megatron, seconds=LOOK_UP_S
        )
    if why is None:
        why = _ask_python(python, PROBE, target, env or {})
    if why:
        raise BadInput(
            f"{name}={target} cannot be loaded by the ranks' Python {python}: {why}; give a 'module:attr' that can"
        )


def _ask_python(python: str, code: str, target: str, env: Mapping[str, str]) -> str:
    arguments = str(AGENT), targets.__file__, target
    return asked.run_python(python, code, *arguments, timeout_s=LOOK_UP_S, env={**os.environ, **env})[1]


def _field_sentence(row: Any, name: str, known: Mapping[str, Field], values: Mapping[str, Any]) -> str:
    if name not in known:  # raised by the config itself: a rule among fields
        return str(row["ctx"]["error"]) if "ctx" in row else str(row["msg"])
    if row["type"] == "missing":
        return f"{name} must be given: {known[name].allowed()}"
    return f"{name} must be {known[name].allowed()}, not {values[name]!r}"


def value_of(text: str) -> Any:
    """A setting as in run.json: a number, true, false, null, a list, or the text itself."""
    try:
        return json.loads(text)
    except RecursionError:
        raise BadInput(f"the brackets of {text} are nested too deeply") from None
    except ValueError:
        return text


def setting_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# -- runs --------------------------------------------------------------------------------------------------------------


ANSWERS = ("failed", "passed", "not judged")
ENDS = (*STATUSES, "interrupted", "damaged")


def describe_folder(path: Path) -> Facts:
    return facts_on_disk(path, defaults)


@functools.cache
def defaults(lab_name: str) -> Mapping[str, Any]:
    if (lab := discover().labs.get(lab_name)) is None:
        return {}
    values = {field.name: field.default for field in fields(lab.config)}
    if holder(lab.config) is not None:  # its nested configs follow from the others
        values = {**flat(as_settings(validate(lab, {}))), **values}
    return {name: json_value(value) for name, value in with_dtype(values).items()}


def select_runs(
    folders: Iterable[Path],
    *,
    lab: str | None = None,
    fault: str | None = None,
    status: str | None = None,
    verdict: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """The runs that match all of this, as `described`. A fault of "" matches runs without one; settings include defaults."""
    for name, value, allowed in (("verdict", verdict, ANSWERS), ("status", status, ENDS)):
        if value is not None and value not in allowed:
            raise BadInput(f"there is no {name} {value!r}; {hint(value, allowed)}")
    wanted = {"lab": lab, "fault": fault, "status": status, "answer": verdict}
    rows = [describe_folder(path) for path in folders]
    labs, broken = discover()
    existing = {
        "lab": {*labs, *broken, OWN_LAB},
        "fault": {known.name for each in labs.values() for known in each.faults},
    }
    for name, names in existing.items():
        names |= {row[name] for row in rows if row[name]}  # those of another kit or of a person's own job too
        if (value := wanted[name]) and value not in names:
            raise BadInput(f"there is no {name} {value!r}; {hint(value, sorted(names))}")
    if config:
        known = sorted({name for row in rows for name in row["config"]})
        if known and (unknown := [name for name in config if name not in known]):
            raise BadInput(f"no run has a setting {unknown[0]!r}; {hint(unknown[0], known)}")
        values = {name: json_value(value) for name, value in config.items()}
        rows = [row for row in rows if all(row["config"].get(name, ...) == value for name, value in values.items())]
    return [row for row in rows if all(one is None or one == (row[name] or "") for name, one in wanted.items())]


def table(folder: Path, **asked: Any) -> pd.DataFrame:
    """The runs, with their ids, for programs."""
    rows = [row for row in select_runs(list_runs(folder), **asked) if row["status"] != "damaged"]
    frame = run_frame(rows)
    frame = frame.assign(run=[row["id"] for row in rows], answer=[row["answer"] for row in rows])
    return frame.assign(dir=[row["run"] for row in rows]).rename(columns={"differs": "set"})


def json_value(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
