"""A driven step: code on the notebook side sends calls to roles until it is done, and adds records of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.errors import BadInput, KitError
from kit.labs.definition import Role
from kit.results.records import NOTEBOOK, Recording
from kit.world import World
from kit.world.pending import Observer, Pending, wait
from kit.world.several import Worlds
from kit.world.world import Printer

RANKSIDE = "kit.labs.rankside"
Write = Callable[[int, list[dict[str, Any]]], None]


class Quiet(Printer):
    """An observer of one call of a driven step: it shows output and may stop the step, and leaves the step's progress alone."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def output(self, rank: int, text: str) -> None:
        self._observer.output(rank, text)

    def tick(self, answered: Sequence[int]) -> None:  # noqa: ARG002 - the answers of one call say nothing about the step
        self._observer.tick(())


class Drive(Recording):
    """What a driver works with: `submit` a method to a role, `wait`, `record`. The driver returns when the step is done."""

    def __init__(
        self,
        *,
        world: World | Worlds,
        config: Any,
        fault: str | None,
        cycle: int,
        phase: str,
        roles: Sequence[Role],
        observer: Observer,
        write: Write,
        folder: Path,
    ) -> None:
        self.world = world
        self.config = config
        self.fault = fault
        self.cycle = cycle
        self.phase = phase
        self.folder = folder  # the run's, with everything that was recorded so far
        self.roles: Mapping[str, tuple[int, ...]] = {role.name: role.ranks for role in roles}
        self.lost: set[int] = set()  # ranks that the step ended on purpose; nothing is asked of them afterwards
        self._observer = Quiet(observer)
        self._write = write
        self._flying: list[Pending] = []

    def submit(
        self,
        method: str,
        *,
        args: Mapping[str, Any] | None = None,
        role: str | None = None,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> Pending:
        """Have the ranks of a role, or these ranks, run `method(**args)` of their phases object."""
        if (role is None) == (ranks is None):
            raise BadInput("submit needs role= or ranks=, and not both")
        if role is not None and role not in self.roles:
            raise BadInput(f"there is no role {role!r} in this step; its roles are {', '.join(map(repr, self.roles))}")
        pending = self.world.submit(
            f"{RANKSIDE}:act",
            args={"method": method, "args": dict(args or {})},
            ranks=self.roles[role] if role is not None else ranks,
            timeout_s=self.config.timeout_s if timeout_s is None else timeout_s,
            phase=self.phase,
            observer=self._observer,
            on_news=self._write,
        )
        self._flying = [one for one in self._flying if not one.settled] + [pending]
        return pending

    def wait(self, pendings: Iterable[Pending], *, first: bool = True, timeout_s: float | None = None) -> list[Pending]:
        return wait(pendings, first=first, timeout_s=timeout_s)

    def _send(self, row: dict[str, Any]) -> None:
        self.append([row])

    def append(self, rows: list[dict[str, Any]]) -> None:
        self._write(NOTEBOOK, rows)

    def cancel(self) -> list[Pending]:
        """Cancel what is still in flight."""
        left = [one for one in self._flying if not one.settled]
        for one in left:
            one.cancel()
        return left

    def finish(self) -> None:
        """A driver that returns before its calls are over has a bug."""
        if calls := ", ".join(f"{one.phase} on ranks {one.ranks}" for one in self.cancel()):
            raise KitError(
                f"the driver of {self.phase!r} returned while calls were in flight ({calls}); wait for them first"
            )
