"""Steps on the notebook side: a driven step, which sends calls to roles until it is done, and the table of any step."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.errors import BadInput, KitError
from kit.results import Record
from kit.results.records import NOTEBOOK, Recording, label, rank_name
from kit.results.units import amount, columns, table_html
from kit.world import World
from kit.world.calls import Observer, Pending, wait
from kit.world.world import Printer, Worlds

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


@dataclass(kw_only=True, eq=False)
class Drive(Recording):
    """What a driver works with: `submit` a method to a role, `wait`, `record`. The driver returns when the step is done."""

    world: World | Worlds
    config: Any
    fault: str | None
    cycle: int
    phase: str
    roles: Mapping[str, tuple[int, ...]]
    folder: Path  # the run's, with everything that was recorded so far
    write: Write
    quiet: Quiet
    lost: set[int] = field(default_factory=set)  # ranks that the step ended on purpose; no later call goes to them
    flying: list[Pending] = field(default_factory=list)

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
            observer=self.quiet,
            on_news=self.write,
        )
        self.flying = [one for one in self.flying if not one.settled] + [pending]
        return pending

    def wait(self, pendings: Iterable[Pending], *, first: bool = True, timeout_s: float | None = None) -> list[Pending]:
        return wait(pendings, first=first, timeout_s=timeout_s)

    def _send(self, row: dict[str, Any]) -> None:
        self.append([row])

    def append(self, rows: list[dict[str, Any]]) -> None:
        self.write(NOTEBOOK, rows)

    def cancel(self) -> list[Pending]:
        """Cancel what is still in flight."""
        left = [one for one in self.flying if not one.settled]
        for one in left:
            one.cancel()
        return left

    def finish(self) -> None:
        """A driver that returns before its calls are over has a bug."""
        if calls := ", ".join(f"{one.phase} on ranks {one.ranks}" for one in self.cancel()):
            raise KitError(
                f"the driver of {self.phase!r} returned while calls were in flight ({calls}); wait for them first"
            )


# In the records; in the way here.
HIDDEN = (
    *("overhead_seconds", "observers_seconds", "shared_rss", "peak_rss", "file_rss", "shm_rss", "pinned_bytes"),
    *("memfds", "shared_maps", "shared_bytes", "shm_files", "temp_files", "children"),
)


@dataclass(frozen=True, slots=True, repr=False)
class Stepped:
    """One phase that every rank has run. `records` are what was appended."""

    cycle: int
    phase: str
    records: Sequence[Record]
    done: int
    planned: int
    roles: Mapping[int, str] = field(default_factory=dict)

    def rows(self) -> list[list[str]]:
        """The heading, then a row per metric; where a level changed, what it was before the phase."""
        ranks = sorted({record.rank for record in self.records})
        values = {(label(record.metric, record.ids), record.rank): record for record in self.records}
        found = [m for m in dict.fromkeys(m for m, _ in values) if not m.endswith("_before") and m not in HIDDEN]
        names = sorted(found, key=lambda m: m != "seconds")  # the time comes first

        def cell(name: str, rank: int) -> str:
            now, before = (values.get((name + when, rank)) for when in ("", "_before"))
            if now is None or now.value is None:
                return (now and now.text) or "-"
            text = amount(now.value, now.unit)
            if before is None or before.value is None or amount(before.value, now.unit) == text:
                return text
            return f"{amount(before.value, now.unit)} → {text}"

        body = [[name, *(cell(name, rank) for rank in ranks)] for name in names]
        return [["", *(rank_name(rank, self.roles) for rank in ranks)], *body]

    def __repr__(self) -> str:
        return f"{self._head()}\n{columns(self.rows())}"

    def _repr_html_(self) -> str:
        head, *body = [[html.escape(cell) for cell in row] for row in self.rows()]
        return table_html(head, body, caption=html.escape(self._head()))

    def _head(self) -> str:
        return f"{self.phase}, cycle {self.cycle} (phase {self.done} of {self.planned})"
