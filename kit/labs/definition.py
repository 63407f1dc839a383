"""What a lab is made of. Data and names only, so that listing labs and faults loads nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kit.target import load

if TYPE_CHECKING:
    from kit.labs.options import LabConfig
    from kit.results import Check


class Step(NamedTuple):
    """One phase of one cycle. Only `roles` are called and measured; none named means all. `driver` makes it a driven step: `module:attr` on
    the notebook side, called with a `kit.labs.drive.Drive`, gives calls to roles until it returns."""

    cycle: int
    phase: str
    roles: tuple[str, ...] = ()
    driver: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """What some ranks are in a lab. `world` numbers their World, `devices` gives a device number per rank, if any; `phases` is what each of
    these ranks makes once, where it differs from the lab's."""

    name: str
    ranks: tuple[int, ...]
    world: int = 0
    devices: tuple[int, ...] = ()
    phases: str = ""


def working(step: Step, roles: Sequence[Role]) -> list[int]:
    return sorted(rank for role in roles if not step.roles or role.name in step.roles for rank in role.ranks)


def role_names(roles: Sequence[Role]) -> dict[int, str]:
    return {rank: role.name for role in roles if role.name for rank in role.ranks}


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """A known bug that can be switched on. `set` is the config that exposes it, `exit` the exit status that the run must have. `needs` are
    the values of a setting with which its check detects the bug: with others the check fails anyway, or is not measured."""

    name: str
    breaks: str
    check: str
    _: dataclasses.KW_ONLY
    exit: int = 1
    set: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    needs: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu", "cuda")


def exposed_by(settings: Mapping[str, Any], *faults: Fault) -> tuple[Fault, ...]:
    """Faults that all need these settings, beside those that each sets itself."""
    return tuple(dataclasses.replace(fault, set={**settings, **fault.set}) for fault in faults)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Definition:
    """A lab. `plan` lists its phases for a config.

    `phases` names (`module:attr`) what each rank makes once from a Context: an object with a method for every phase of the
    plan, called with the cycle. `checks` names a sequence of kit.results.Check, `presets` sets of their
    tolerances by name, `pictures` a kit.draw.plots.Pictures: its plots and tables. `preload` is imported before ranks start.
    `first` names the settings that its panel shows first; without it all are.
    `roles` gives the roles of a config's ranks, which live in one World or in several, in rank order; without it all ranks are alike.
    With `isolate` a World that dies ends alone.
    `foreign` names (`module:attr`) what turns files of other systems into settings: called with their contents by name, it returns the
    settings, and the keys that it has none for.
    `fits` is called on the notebook's side and raises BadInput, with the arithmetic, where this machine cannot carry a config.
    """

    name: str
    summary: str
    config: type[LabConfig]
    plan: Callable[[Any], Sequence[Step]]
    phases: str
    checks: str
    presets: str = ""
    pictures: str = ""
    foreign: str = ""
    first: tuple[str, ...] = ()
    roles: Callable[[Any], Sequence[Role]] | None = None
    isolate: bool = False
    fits: Callable[[Any], None] | None = None
    faults: tuple[Fault, ...] = ()
    preload: tuple[str, ...] = ()

    def roles_of(self, config: LabConfig) -> tuple[Role, ...]:
        """Every rank in exactly one role; a lab without roles has one, without a name."""
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
                f"lab {self.name!r} puts its ranks into Worlds {worlds}; they must be filled in rank order, from 0 on"
            )
        return roles

    def load_checks(self) -> Sequence[Check]:
        checks: Sequence[Check] = load(self.checks)
        return checks

    def all_checks(self) -> Sequence[Check]:
        """The lab's own and those of every lab, which ask only of runs that they are about."""
        common: Sequence[Check] = load("kit.labs.growth:EVERY_LAB")
        return [*self.load_checks(), *common]

    def load_presets(self) -> Mapping[str, Mapping[str, float]]:
        presets: Mapping[str, Mapping[str, float]] = load(self.presets) if self.presets else {}
        return presets
