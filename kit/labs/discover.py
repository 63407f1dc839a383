"""The list of labs: the packages in this folder, and entry points `kit.labs` of installed packages."""

from __future__ import annotations

import functools
import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from kit.errors import BadInput, hint
from kit.labs.definition import Definition
from kit.target import load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kit.draw.plots import Pictures
    from kit.results import Check

GROUP = "kit.labs"


class Found(NamedTuple):
    """Labs by name, and the reason for each lab that could not be loaded."""

    labs: dict[str, Definition]
    broken: dict[str, str]


@functools.cache
def discover() -> Found:
    """Every lab. A broken package of somebody else is reported and does not affect the others."""
    from importlib.metadata import entry_points

    home = import_module("kit.labs")
    own = [import_module(f"kit.labs.{info.name}").LAB for info in pkgutil.iter_modules(home.__path__) if info.ispkg]
    found = Found({lab.name: lab for lab in own}, {})
    for point in entry_points(group=GROUP):
        try:
            lab = point.load()
        except Exception as error:  # noqa: BLE001 - importing a stranger's package may raise anything
            found.broken[point.name] = f"{point.value} cannot be loaded: {type(error).__name__}: {error}"
            continue
        if not isinstance(lab, Definition):
            found.broken[point.name] = f"{point.value} is not a kit.labs.definition.Definition"
        elif lab.name in found.labs:
            found.broken[point.name] = f"{point.value} has the name {lab.name!r}, which another lab uses"
        else:
            found.labs[lab.name] = lab
    return found


def find(name: str) -> Definition:
    labs, broken = discover()
    if name in labs:
        return labs[name]
    if name in broken:
        raise BadInput(f"lab {name!r}: {broken[name]}")
    raise BadInput(f"unknown lab {name!r}; {hint(name, labs)}")


def checks_of(name: str) -> Sequence[Check]:
    """The checks of a lab; for an unknown lab, such as a run recorded by your own script, those of the observers."""
    lab = discover().labs.get(name)
    unknown: Sequence[Check] = load("kit.labs.growth:OBSERVED")
    return lab.all_checks() if lab else unknown


def pictures_of(name: str) -> Pictures | None:
    lab = discover().labs.get(name)
    pictures: Pictures | None = load(lab.pictures) if lab and lab.pictures else None
    return pictures
