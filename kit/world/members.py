"""Who is who behind a World: what was planned, the ranks, the agents, and how processes ended. Data only."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.world.channel import Link
from kit.world.interpreter import Interpreter


@dataclass(frozen=True, slots=True)
class Part:
    """Where a World stands among several: its ranks' numbers begin at `first`, and all Worlds together have `total` ranks."""

    first: int
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to start. All checked by World before."""

    ranks: int
    nodes: int
    endpoint: str
    device: str
    python: Interpreter
    env: Mapping[str, str]
    preload: Sequence[str]
    logs: Path
    start_timeout_s: float
    group_timeout_s: float
    part: Part

    @property
    def numbers(self) -> range:
        """The ranks' numbers."""
        return range(self.part.first, self.part.first + self.ranks)

    @property
    def neighbours(self) -> int:
        """How many ranks work on one machine, those of other Worlds among them."""
        return self.part.total // self.nodes


@dataclass(slots=True)
class Member:
    """One rank as the notebook knows it."""

    rank: int
    node: int
    pid: int
    started: int
    device: str
    why: str
    host: str
    work: Link
    watch: Link
    phase: str = "idle"
    busy: int | None = None  # the request it has not answered
    since: float = 0.0
    log: int = 0  # how much of its log was shown


@dataclass(slots=True)
class Exit:
    """How a rank's process ended, as its node's agent saw it. `at` orders the ends on one node."""

    rank: int
    status: int | None  # None: not seen; torchrun's own account follows
    at: float

    @property
    def victim(self) -> bool:
        """torchrun ends the others with SIGTERM when one has failed."""
        return self.status == -signal.SIGTERM


@dataclass(slots=True)
class AgentEnd:
    """One node's agent: its link and, on this machine, its process."""

    node: int
    link: Link
    pid: int
    ended: int = -1  # the last generation whose ranks torchrun has seen the end of
    answers: dict[int, Any] = field(default_factory=dict)


def ending(status: int | None) -> dict[str, Any]:
    """A process's status as RankDied's keywords."""
    if status is not None and status < 0:
        return {"signal": signal_name(-status)}
    return {"exitcode": status}


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
