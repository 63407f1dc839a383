"""Box: the preflight of a machine. `kit doctor --deep` runs it first on a new box.

A step is a probe. Ranks start before the first one, so no probe's time limit covers a start. A probe that hangs or dies is named, and
the following ones get fresh ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from kit.errors import BadInput, hint, refuse_if
from kit.labs.box.faults import FAULTS
from kit.labs.definition import Definition, LabConfig, Option, Role, Step

DEADLINE_S = 3.0  # of a wait for a peer that never comes


class Probe(NamedTuple):
    """A phase of the plan: on these roles (none: on all ranks), or driven from the notebook side."""

    phase: str
    roles: tuple[str, ...] = ()
    driver: str = ""


# What may damage ranks comes late, and what changes how a rank computes (Megatron's deterministic mode) after it, on fresh ranks.
PROBES = (
    Probe("seats"),
    Probe("all_reduce"),
    Probe("groups"),
    Probe("suspend"),
    Probe("host_memory", ("owner",)),
    Probe("resize", ("owner",)),
    Probe("resize_expandable", ("owner",)),
    Probe("driver_memory"),
    Probe("ipc"),
    Probe("ipc_expandable"),
    Probe("absent_peer", driver="kit.labs.box.drive:absent_peer"),
    Probe("killed_rank", driver="kit.labs.box.drive:killed_rank"),
    Probe("rebuild"),
    Probe("job_tp"),
    Probe("job_pp"),
    Probe("job_experts"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxConfig(LabConfig):
    """The probes of a preflight."""

    probes: Annotated[str, Option("names of the probes to run, separated by commas; empty: all")] = ""

    def __post_init__(self) -> None:
        refuse_if(self.ranks % 2, f"ranks must be even, not {self.ranks}: the probes of jobs cut a model in two")
        chosen(self.probes)


def chosen(names: str) -> list[str]:
    """The probes that a config names, in the order of the plan."""
    known = [probe.phase for probe in PROBES]
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise BadInput(f"there is no probe {name!r}; {hint(name, known)}")
    return [name for name in known if name in wanted or not wanted]


def plan(config: BoxConfig) -> list[Step]:
    names = chosen(config.probes)
    return [Step(1, probe.phase, probe.roles, probe.driver) for probe in PROBES if probe.phase in names]


def roles(config: BoxConfig) -> tuple[Role, ...]:
    """The owner of the memory that another rank opens, and its peers."""
    return Role(name="owner", ranks=(0,)), Role(name="peer", ranks=tuple(range(1, config.ranks)))


LAB = Definition(
    name="box",
    summary="measures what a box can do, in a probe each: devices, collectives, groups, memory, absent peers, tiny jobs",
    config=BoxConfig,
    plan=plan,
    phases="kit.labs.box.ranks.probes:Probes",
    rules="kit.labs.box.rules:RULES",
    first=("probes", "ranks", "device", "timeout_s"),
    tag="box",
    roles=roles,
    goes_on=True,
    faults=FAULTS,
    preload=("kit.labs.box.ranks.probes",),  # loads Megatron too where it is installed, before ranks are forked
)
