"""A lab's config from what a person gave: checked before any rank starts, one sentence for each thing that is wrong."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.errors import BadInput
from kit.labs.discover import hint
from kit.labs.options import Field, fields
from kit.world import interpreter
from kit.world.capacity import check_ranks

if TYPE_CHECKING:
    from kit.labs.definition import Definition, Fault
    from kit.labs.options import LabConfig

GPU_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/kfd"))
PROBE = """
import importlib, importlib.util, runpy, sys
if importlib.util.find_spec("kit") is None:
    runpy.run_path(sys.argv[1])["make_kit_importable"]()
module, _, names = sys.argv[2].partition(":")
found = importlib.import_module(module)
for name in names.split("."):
    found = getattr(found, name)
if not callable(found):
    raise TypeError("it is not callable")
"""


def configure(lab: Definition, given: Mapping[str, Any], fault: Fault | None) -> LabConfig:
    """The lab's defaults, under what the fault needs, under what was given; checked against this machine too."""
    config = validate(lab, {**(fault.set if fault else {}), **given})
    driver = any(path.exists() for path in GPU_DRIVERS)
    if config.device == "cuda" and not driver:
        raise BadInput("device=cuda needs a GPU driver, and this machine has none; use cpu or auto")
    if fault is not None:
        refuse_device(fault, "cuda" if driver and config.device != "cpu" else "cpu")
    check_ranks(config.ranks)
    if lab.fits is not None:
        lab.fits(config)
    ranks_python = interpreter.find(config.python or None).path
    for field in fields(lab.config):
        target = getattr(config, field.name)
        if field.option.target and target != field.default and target not in field.option.names:
            check_target(field.name, target, ranks_python)
    return config


def validate(lab: Definition, values: Mapping[str, Any]) -> LabConfig:
    """A config of the lab from plain values."""
    import pydantic

    known = {field.name: field for field in fields(lab.config)}
    for name in values:
        if name not in known:
            raise BadInput(f"lab {lab.name!r} has no setting {name!r}; {hint(name, list(known))}")
    try:
        text = json.dumps(dict(values))
    except (TypeError, ValueError):
        wrong = ", ".join(name for name, value in values.items() if not _is_json(value))
        raise BadInput(
            f"settings must be plain values (numbers, text, true, false, null, lists); {wrong} is not"
        ) from None
    try:
        # Strict, so that "3" is no number; by way of JSON, so that a list may fill a tuple.
        config: LabConfig = pydantic.TypeAdapter(lab.config).validate_json(text, strict=True)
    except pydantic.ValidationError as error:
        raise BadInput("; ".join(dict.fromkeys(_sentence(row, known, values) for row in error.errors()))) from None
    return config


def from_text(lab: Definition, pairs: Mapping[str, str]) -> dict[str, Any]:
    """Values from the command line: text where the field is text, else JSON, else the text itself for the check to refuse."""
    kinds = {field.name: field.kind for field in fields(lab.config)}
    return {name: text if kinds.get(name) is str else _json_or_text(text) for name, text in pairs.items()}


def refuse_device(fault: Fault, device: str) -> None:
    if device not in fault.devices:
        raise BadInput(
            f"fault {fault.name!r} needs {' or '.join(fault.devices)}, and ranks would work on {device} here"
        )


def find_fault(lab: Definition, name: str | None) -> Fault | None:
    if name is None:
        return None
    faults = {fault.name: fault for fault in lab.faults}
    if name not in faults:
        raise BadInput(f"lab {lab.name!r} has no fault {name!r}; {hint(name, list(faults))}")
    return faults[name]


def check_target(name: str, target: str, python: str) -> None:
    """Ask the ranks' own interpreter, which may be the only one that has the module."""
    module, colon, attribute = target.partition(":")
    if not (colon and module and attribute):
        raise BadInput(f"{name} must be 'module:attr', not {target!r}")
    agent = Path(interpreter.__file__).with_name("agent.py")
    try:
        done = subprocess.run(
            [python, "-c", PROBE, agent, target], capture_output=True, text=True, timeout=120, check=False
        )
    except subprocess.TimeoutExpired:
        raise BadInput(f"{name}={target}: importing it took {python} more than 120 s") from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise BadInput(
            f"{name}={target} cannot be loaded by the ranks' Python {python}: {why}; give a 'module:attr' that can"
        )


def _sentence(row: Any, known: Mapping[str, Field], values: Mapping[str, Any]) -> str:
    if not row["loc"]:  # raised by the config itself: a rule among fields
        return str(row["ctx"]["error"]) if "ctx" in row else str(row["msg"])
    field = known[str(row["loc"][0])]
    if row["type"] == "missing":
        return f"{field.name} must be given: {field.allowed()}"
    return f"{field.name} must be {field.allowed()}, not {values[field.name]!r}"


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def as_json(config: LabConfig) -> dict[str, Any]:
    return dataclasses.asdict(config)
