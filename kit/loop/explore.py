"""Exploration: a core in thousands of random worlds on the virtual clock, and the first failure made small. Knows no lab.

A lab brings its `Worlds`: how a world is drawn from a seed, run and judged, and which smaller worlds to try in its place. A world is plain
JSON, so one line replays it. All of a world follows from its seed: neither the order of the seeds nor their number matters.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from kit.loop.limit import time_limit
from kit.loop.messages import Memory
from kit.loop.runner import CoreRaised

World = dict[str, Any]
Findings = dict[str, str]  # why each rule failed

WALL_S = 5.0  # a world takes milliseconds; a core that has not returned by then never will
BUSY = 6  # times that, on a machine that is busy with other work
SHRINK_S = 60.0
A_SECOND = 5_000  # events in one virtual second; a world has hundreds in all
# Findings that are no rule of a lab.
NEVER_RETURNED = "never_returned"
RAISED = "raised"


@dataclass(slots=True)
class Judged:
    """`findings` are the rules that failed; `unmeasured` those that the ledger has no rows for."""

    findings: Findings = field(default_factory=dict)
    unmeasured: list[str] = field(default_factory=list)


class Worlds(Protocol):
    """Made with the settings that name own code, which `own` lists, and `like`, the settings of a run whose layout worlds are to have.

    `phase`: the lab's phase that has the ledger's rows.

    `rooms`: the modules in which worlds should show bugs; `beyond`: faults in them that no world can show, each with its reason.
    """

    own: ClassVar[tuple[str, ...]]
    phase: ClassVar[str]
    rooms: ClassVar[tuple[str, ...]]
    beyond: ClassVar[Mapping[str, str]]

    def draw(self, rng: random.Random) -> World: ...
    def run(self, world: World, rows: Memory) -> None:
        """Run the world to its end, and write its ledger. What own code raises goes on to the caller."""

    def judge(self, rows: Memory) -> Judged: ...
    def smaller(self, world: World) -> Iterable[World]:
        """Yield worlds with one thing less, the largest steps first."""

    def sizes(self, world: World) -> dict[str, int]: ...
    def config(self, world: World) -> Any:
        """Return the lab's config of this world, which own code gets."""


@dataclass(slots=True, kw_only=True)
class Played:
    """A world after its run: its ledger, and what is wrong with it."""

    rows: Memory
    findings: Findings
    unmeasured: list[str]
    wall_s: float

    @property
    def rule(self) -> str:
        """The finding that a shrink follows: the core broke, else the first rule that failed. Empty if nothing is wrong."""
        broke = [name for name in (RAISED, NEVER_RETURNED) if name in self.findings]
        return next(iter([*broke, *self.findings]), "")


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of a seed. `seconds` are virtual, `wall_s` real."""

    seed: int
    sizes: dict[str, int] = field(default_factory=dict)
    events: int = 0
    seconds: float = 0.0
    wall_s: float = 0.0
    findings: Findings = field(default_factory=dict)
    unmeasured: list[str] = field(default_factory=list)


class NeverReturnedError(BaseException):
    """No `Exception`: a core that catches those must not go on."""


def world_of(worlds: Worlds, seed: int) -> World:
    return worlds.draw(random.Random(seed))  # noqa: S311 - a draw that can be repeated


def outcome_of(worlds: Worlds, seed: int, wall_s: float = WALL_S) -> Outcome:
    world = world_of(worlds, seed)
    played = play(worlds, world, wall_s)
    return Outcome(
        seed=seed,
        sizes=worlds.sizes(world),
        events=len(played.rows),
        seconds=played.rows[-1].time if played.rows else 0.0,
        wall_s=played.wall_s,
        findings=played.findings,
        unmeasured=played.unmeasured,
    )


def play(worlds: Worlds, world: World, wall_s: float = WALL_S) -> Played:
    """Run a world and judge it. A core that raises or does not return is a finding, and its rows up to there are kept."""
    rows, judged, began = Memory(), Judged(), time.perf_counter()
    limit = time_limit(wall_s, NeverReturnedError, at_most=BUSY * wall_s)
    try:
        with limit:
            worlds.run(world, rows)
        judged = worlds.judge(rows)  # a ledger that no rule can read is a finding too
    except NeverReturnedError:
        judged.findings = {NEVER_RETURNED: f"the world did not end within {wall_s:g} s; {last_words(rows)}"}
    except Exception as error:  # noqa: BLE001 - whatever own code raises is what was found
        words = str(error) if isinstance(error, CoreRaised) else f"{type(error).__name__}: {error}"
        judged.findings = {RAISED: f"{words}; {last_words(rows)}"}
    finally:
        limit.end()
    wall_s = time.perf_counter() - began
    return Played(rows=rows, findings=judged.findings, unmeasured=judged.unmeasured, wall_s=wall_s)


def last_words(rows: Memory) -> str:
    if not rows:
        return "there is no row"
    owner = f" of {rows[-1].who}" if rows[-1].who else ""
    return f"the last of {len(rows)} rows is `{rows[-1].event}`{owner} at {rows[-1].time:.3f} s"


@dataclass(slots=True)
class Shrunk:
    """The smallest world that was found with the same failure, and how many were tried."""

    world: World
    played: Played
    tried: int = 0


def shrink(worlds: Worlds, world: World, *, wall_s: float = WALL_S, limit_s: float = SHRINK_S) -> Shrunk:
    """Take the first smaller world in which the same rule fails, again and again, until there is none or the time is over."""
    until = time.monotonic() + limit_s
    smallest = Shrunk(world, play(worlds, world, wall_s))
    rule = smallest.played.rule
    wall_s = min(wall_s, 1.0) if rule == NEVER_RETURNED else wall_s  # each try takes as long
    tried, shrinks = 0, bool(rule)
    while shrinks:
        shrinks = False
        for candidate in worlds.smaller(smallest.world):
            if time.monotonic() > until:
                break
            tried += 1
            played = play(worlds, candidate, wall_s)
            if rule in played.findings:
                smallest, shrinks = Shrunk(candidate, played), True
                break
    smallest.tried = tried
    return smallest


def rates(outcomes: Iterable[Outcome]) -> Mapping[str, int]:
    """How many worlds each finding was made in."""
    counts: dict[str, int] = {}
    for outcome in outcomes:
        for rule in outcome.findings:
            counts[rule] = counts.get(rule, 0) + 1
    return counts
