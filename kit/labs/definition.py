"""What a lab is made of. Data and names only, so that listing labs and faults loads nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from kit.labs.options import LabConfig
    from kit.results import Check


class Step(NamedTuple):
    """One phase of one cycle. A phase may come in many cycles."""

    cycle: int
    phase: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A known bug that can be switched on. `set` is the config that exposes it, `exit` what the run must then end with.

    `needs` are the values of a setting with which its check can tell the bug: with others the check fails anyway, or cannot be asked.
    """

    name: str
    breaks: str
    check: str
    exit: int = 1
    set: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    needs: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu", "cuda")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Definition:
    """A lab. `plan` lists its phases for a config.

    `phases` names (`module:attr`) what each rank makes once from a Context: an object with a method for every phase of the
    plan, called with the cycle. `checks` names a sequence of kit.results.Check, `presets` sets of their
    tolerances by name. `preload` is imported before ranks start.
    `worlds` gives the sizes of the Worlds that a config's ranks live in, in rank order; without it they live in one.
    `fits` is called on the notebook's side and raises BadInput, with the arithmetic, where this machine cannot carry a config.
    """

    name: str
    summary: str
    config: type[LabConfig]
    plan: Callable[[Any], Sequence[Step]]
    phases: str
    checks: str
    presets: str = ""
    worlds: Callable[[Any], Sequence[int]] | None = None
    fits: Callable[[Any], None] | None = None
    faults: tuple[Fault, ...] = ()
    preload: tuple[str, ...] = ()

    def world_sizes(self, config: LabConfig) -> tuple[int, ...]:
        """How many ranks each World has."""
        sizes = tuple(self.worlds(config)) if self.worlds else (config.ranks,)
        if sum(sizes) != config.ranks:
            raise ValueError(f"lab {self.name!r} has Worlds of {sizes} ranks for a config of {config.ranks}")
        return sizes

    def load_checks(self) -> Sequence[Check]:
        module, _, name = self.checks.partition(":")
        checks: Sequence[Check] = getattr(import_module(module), name)
        return checks

    def all_checks(self) -> Sequence[Check]:
        """The lab's own and those of every lab, which ask only of runs that they are about."""
        common: Sequence[Check] = import_module("kit.labs.routed").EVERY_LAB
        return [*self.load_checks(), *common]

    def load_presets(self) -> Mapping[str, Mapping[str, float]]:
        """Sets of tolerances by name; none where the lab names none."""
        if not self.presets:
            return {}
        module, _, name = self.presets.partition(":")
        presets: Mapping[str, Mapping[str, float]] = getattr(import_module(module), name)
        return presets
