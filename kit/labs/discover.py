"""Which labs there are: the packages in this folder, and those that installed packages offer as entry points `kit.labs`."""

from __future__ import annotations

import difflib
import functools
import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from kit.errors import BadInput
from kit.labs.definition import Definition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kit.draw.plots import Pictures
    from kit.results import Check

GROUP = "kit.labs"


class Found(NamedTuple):
    """Labs by name, and for what could not be loaded the reason by name."""

    labs: dict[str, Definition]
    broken: dict[str, str]


@functools.cache
def discover() -> Found:
    """Every lab. Somebody else's broken package is told about and does not take the others along."""
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
            found.broken[point.name] = f"{point.value} takes the name {lab.name!r}, which another lab has"
        else:
            found.labs[lab.name] = lab
    return found


def find(name: str) -> Definition:
    labs, broken = discover()
    if name in labs:
        return labs[name]
    if name in broken:
        raise BadInput(f"lab {name!r}: {broken[name]}")
    raise BadInput(f"there is no lab {name!r}; {hint(name, labs)}")


def checks_of(name: str) -> Sequence[Check]:
    """A lab's checks; none for a lab that is not known here, such as a run from somebody's own script."""
    lab = discover().labs.get(name)
    return lab.all_checks() if lab else ()


def pictures_of(name: str) -> Pictures | None:
    """A lab's own plots and tables, if it has any and is known here."""
    lab = discover().labs.get(name)
    return lab.load_pictures() if lab else None


def hint(name: str, allowed: Sequence[str] | dict[str, Definition]) -> str:
    """What was perhaps meant, and what there is."""
    near = difflib.get_close_matches(str(name), allowed, n=1)
    return (f"did you mean {near[0]!r}? " if near else "") + f"allowed are: {', '.join(sorted(allowed)) or 'none'}"
