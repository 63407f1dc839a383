"""Who is who behind a World: what was planned, the ranks, the agents, and how processes ended. Data only."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kit.errors import KitError
from kit.world.channel import Link, Malformed, Message
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
    logs: Path | None
    start_timeout_s: float
    group_timeout_s: float
    part: Part
    devices: tuple[int, ...] = ()

    @property
    def numbers(self) -> range:
        """The ranks' numbers."""
        return range(self.part.first, self.part.first + self.ranks)

    @property
    def neighbours(self) -> int:
        """How many ranks work on one machine, those of other Worlds among them."""
        return self.part.total // self.nodes


HELLO = ("rank", "node", "pid", "started", "device", "why", "host", "seat")  # what a rank says of itself
MALFORMED = (Malformed, KeyError, TypeError, ValueError)  # what a message of an unknown kind leads to


def check_node(hello: Message, plan: Plan) -> int:
    """The number of the machine that an agent reports for."""
    node = hello["node"]
    if type(node) is not int or not 0 <= node < plan.nodes or type(hello["pid"]) is not int:
        raise Malformed(f"node {node!r}, pid {hello['pid']!r}")
    return node


def check_rank(hello: Message, plan: Plan) -> int:
    """The number of a rank that reports."""
    known = {name: hello[name] for name in HELLO}
    numbers = all(type(known[name]) is int for name in HELLO[:4])
    if not numbers or known["rank"] not in plan.numbers or hello["role"] not in {"work", "watch"}:
        raise Malformed(f"role {hello['role']!r}, {known}")
    return int(known["rank"])


def malformed(who: str, error: Exception) -> KitError:
    return KitError(
        f"{who} sent a malformed message ({type(error).__name__}: {error}); is it the same version of the kit?"
    )


class InFlight(Protocol):
    """A call that ranks have not answered yet, as far as those who receive answers need to know it (`kit.world.calls.Call`)."""

    request: Message
    gone: set[int]

    def hear(self, member: Member, message: Message) -> None: ...
    def lost(self, rank: int) -> None: ...
    def advance(self) -> None: ...
    def give_up(self, error: BaseException) -> None: ...
    @property
    def die(self) -> Callable[[str, KitError], None]: ...


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
    seat: int | None
    phase: str = "idle"
    call: InFlight | None = None  # the one that it has not answered
    since: float = 0.0
    log: int = 0  # how much of its log was shown
    asked: bool = False  # for news, and has not answered
    news: list[str] = field(default_factory=list)  # what it reported, not handed on yet

    @property
    def busy(self) -> bool:
        return self.call is not None


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
    error: str = ""  # what torchrun said of it
    statuses: dict[int, int] = field(default_factory=dict)
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
