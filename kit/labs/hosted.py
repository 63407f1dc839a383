"""With engine=ray, drivers run in an asynchronous actor of Ray, the controller's, and call the actors of ranks by Ray.

The controller's actor is the only rank of a World, so the notebook starts, watches and ends it as any rank. For each driven step the
other Worlds lend it their ranks. Ray carries calls and answers, which are JSON; what ranks send each other goes by the kit's transports,
and their rows to the notebook by the World's channel.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import importlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kit import machine
from kit.errors import BadInput, Cancelled, KitError, RankDied, RankError, RankProblem, RankTimeout
from kit.results.records import NOTEBOOK
from kit.world import World, asked, leftovers, rayside
from kit.world.asked import NodePart
from kit.world.calls import (
    GRACE_S,
    INTERRUPT_AGAIN_S,
    TICK_S,
    Pending,
    WorldObserver,
    failure_of,
    ranks_word,
    refuse_silence,
    wait,
)
from kit.world.channel import Message
from kit.world.launch import RAY
from kit.world.world import Worlds

GIVEN_BACK_S = 10.0
WATCHED_S = 1.0
NewRows = Callable[[int, list[dict[str, Any]]], None]

# -- on the notebook side --------------------------------------------------------------------------------------------------


class ControllerActor:
    """`first`: its rank's number, after all others."""

    def __init__(self, first: int, *, python: str, logs: Path, observer: WorldObserver | None) -> None:
        part = NodePart(first=first, before=first, neighbours=first + 1)
        self.world = World(
            1, engine=RAY, asynchronous=True, device="cpu", python=python, logs=logs, observer=observer, part=part
        )

    def run(
        self,
        target: str,
        args: Mapping[str, Any],
        *,
        world: World | Worlds,
        ranks: Sequence[int],
        phase: str,
        observer: WorldObserver,
        write: NewRows,
        silent_s: float,
    ) -> Any:
        """Call `target(lent=..., **args)` there, with these ranks lent to it; return its value, or raise what it describes as `error`.

        The call itself has no deadline, as a driver in this process has none; a process that is silent for `silent_s` is given up.
        """

        def hear(_: int, values: list[Any]) -> None:
            for value in values:
                write(value["rank"], value["rows"])

        parts = world.worlds if isinstance(world, Worlds) else [world]
        given = [[rank for rank in part.numbers if rank in ranks] for part in parts]
        seats = {row["rank"]: row for row in world.status()}
        lent = {
            rank: [world.actors[rank], seats[rank]["pid"], machine.start_time(seats[rank]["pid"])] for rank in ranks
        }
        pendings: list[Pending] = []
        quiet: dict[str, Any] = {"phase": phase, "timeout_s": asked.MOST_SECONDS, "observer": observer}
        try:
            # One by one: what was lent before another part refused is given back.
            pendings.extend(world.lend(own, phase=phase, observer=observer, on_news=write) for own in given if own)
            running = self.world.submit(target, args={**args, "lent": lent}, on_news=hear, **quiet)
            while not running.over():
                wait([running, *(pending for pending in pendings if not pending.settled)], timeout_s=WATCHED_S)
                refuse_silence(running, silent_s)
            answer = running.result()[0]
        except (RankDied, RankTimeout) as error:
            for part in parts:
                part.die("its ranks were lent to a controller, which cannot give them back any more")
            if isinstance(error, RankTimeout):
                raise
            text = f"the controller's actor ended: {error}"
            raise RankDied(text, rank=NOTEBOOK, phase=phase, signal=error.signal, exitcode=error.exitcode) from error
        finally:
            wait(pendings, first=False, timeout_s=GIVEN_BACK_S)
            for pending in pendings:
                if not pending.settled:
                    pending.cancel()
        if answer["error"] is not None:
            raise as_raised(answer["error"], pendings, world)
        return answer

    def close(self) -> None:
        self.world.close()


RAISED: dict[str, type[Any]] = {kind.__name__: kind for kind in (BadInput, Cancelled, RankError, RankDied, RankTimeout)}


def description(error: KitError) -> dict[str, Any]:
    """An error as JSON."""
    fields = dataclasses.asdict(error) if isinstance(error, RankProblem) else {}
    fields.pop("message", None)
    return {"kind": type(error).__name__, "text": str(error), "fields": fields}


def as_raised(described: Mapping[str, Any], pendings: Sequence[Pending], world: World | Worlds) -> KitError:
    """The error again. What the Worlds themselves know of a dead or a silent rank is more than Ray knows."""
    kind, text = described["kind"], described["text"]
    fields: dict[str, Any] = dict(described["fields"])
    if kind == RankDied.__name__:
        for pending in pendings:
            if fields["rank"] in pending.ranks and pending.settled:
                try:
                    pending.result()
                except KitError as known:
                    return known
    if kind == RankTimeout.__name__:
        stacks = world.stacks()
        fields["stacks"] = {rank: stacks[rank] for rank in fields["ranks"] if rank in stacks}
        text += "".join(f"\nrank {rank}:\n{stack}" for rank, stack in fields["stacks"].items())
    for name in {"ranks", "culprits"} & fields.keys():
        fields[name] = tuple(fields[name])
    error: KitError = RAISED[kind](text, **fields) if kind in RAISED else KitError(f"{kind}: {text}")
    return error


# -- in the controller's actor ---------------------------------------------------------------------------------------------


class LentRanks:
    """Ranks that were lent: the part of World that a driver uses. `lent`: the name, pid and start time of each rank's actor; `device`: the
    kind that they are on."""

    def __init__(self, lent: Mapping[str, Sequence[Any]], device: str) -> None:
        ray = importlib.import_module("ray")
        self.device = device
        self.processes = {int(rank): (pid, started) for rank, (_, pid, started) in lent.items()}
        self.actors = {int(rank): ray.get_actor(name) for rank, (name, _, _) in lent.items()}

    def submit(
        self,
        target: str,
        *,
        args: Mapping[str, Any] | None = None,
        ranks: Sequence[int] | None = None,
        timeout_s: float,
        phase: str,
        **_: Any,
    ) -> LentCall:
        request = asked.check_call(target, args, {})[1]
        flying = {
            rank: asyncio.run_coroutine_threadsafe(self._answer(rank, phase, request), rayside.LOOP)
            for rank in asked.check_chosen(ranks or [*self.actors], range(max(self.actors) + 1))
        }
        return LentCall(self, flying, phase, timeout_s)

    async def _answer(self, rank: int, phase: str, request: Message) -> Message:
        answer: Message = await self.actors[rank].act.remote(phase, request)
        return answer

    def status(self) -> list[dict[str, Any]]:
        """A row for each rank up to the last one; a rank that was not lent is dead."""
        rows = {rank: {"rank": rank, "pid": pid, "node": 0} for rank, (pid, _) in self.processes.items()}
        return [rows.get(rank, {"rank": rank, "pid": 0, "node": 0}) for rank in range(max(rows) + 1)]

    def interrupt(self, rank: int) -> None:
        leftovers.interrupt_process(*self.processes[rank])

    def kill_rank(self, rank: int) -> None:
        leftovers.kill_process(*self.processes[rank])

    def give_back(self) -> None:
        """Each rank serves the notebook again once it has answered what it was asked."""
        for actor in self.actors.values():
            actor.serve.remote()


class LentCall:
    """A call in flight on lent ranks; the interface of Pending."""

    def __init__(
        self,
        world: LentRanks,
        flying: dict[int, concurrent.futures.Future[Message]],
        phase: str,
        timeout_s: float,
    ) -> None:
        self.world, self.flying, self.phase, self.timeout_s = world, flying, phase, timeout_s
        self.ranks = list(flying)
        self.deadline = time.monotonic() + timeout_s
        self.answers: dict[int, Message] = {}
        self.error: KitError | None = None
        self.failed_at: float | None = None
        self._interrupted_at = math.inf

    @property
    def settled(self) -> bool:
        """As a World's call is: every rank answered, one died, or one raised and the others had their time to answer."""
        for rank in [rank for rank, future in self.flying.items() if future.done()]:
            self._hear(rank, self.flying.pop(rank))
        late = self.failed_at is not None and time.monotonic() > self.failed_at + GRACE_S
        return self.error is not None or not self.flying or late

    def _hear(self, rank: int, future: concurrent.futures.Future[Message]) -> None:
        lost = importlib.import_module("ray.exceptions").RayActorError
        try:
            self.answers[rank] = future.result()
        except lost as error:
            pid, _ = self.world.processes[rank]
            why = str(error).partition("\n")[0]
            text = f"rank {rank} (pid {pid}) is gone in phase {self.phase!r}; Ray reports: {why}"
            self.error = self.error or RankDied(text, rank=rank, phase=self.phase)
        else:
            if "error" in self.answers[rank] and self.failed_at is None:
                self.failed_at = time.monotonic()

    def over(self) -> bool:
        return self.settled or time.monotonic() >= self.deadline

    done = over

    def result(self, timeout_s: float | None = None) -> list[Any]:
        until = self.deadline if timeout_s is None else time.monotonic() + timeout_s
        while not self.settled and time.monotonic() < until:
            wait_for_lent([self], timeout_s=until - time.monotonic(), overdue=True)
        if self._interrupted_at < math.inf:
            raise Cancelled(f"the call of phase {self.phase!r} on {ranks_word(self.ranks)} was cancelled")
        if not self.settled:
            silent = tuple(self.flying)
            text = f"no answer from {ranks_word(silent)} within {self.timeout_s:g} s"
            raise RankTimeout(text, phase=self.phase, ranks=silent, culprits=silent, stacks={})
        if error := self.error or failure_of(self.answers, [*self.flying], self.phase, self.failed_at):
            raise error
        return [self.answers[rank]["value"] for rank in self.ranks]

    def cancel(self) -> bool:
        if self.settled:
            return False
        self._interrupted_at = -math.inf
        self.insist()
        return True

    def insist(self) -> None:
        """Interrupt the ranks again if they were and did not answer, as a World does."""
        if time.monotonic() - self._interrupted_at >= INTERRUPT_AGAIN_S:
            self._interrupted_at = time.monotonic()
            for rank in self.flying:
                self.world.interrupt(rank)


def cancel_lent(calls: Sequence[LentCall]) -> None:
    for call in calls:
        call.cancel()


def wait_for_lent(
    calls: Sequence[LentCall], *, first: bool = True, timeout_s: float | None = None, overdue: bool = False
) -> list[LentCall]:
    """As `kit.wait`. `overdue`: also past the calls' own deadlines."""
    until = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while True:
        ended = [call for call in calls if (call.settled if overdue else call.over())]
        now = time.monotonic()
        if len(ended) == len(calls) or (first and ended) or now >= until:
            return ended
        if rayside.is_interrupted():
            raise KeyboardInterrupt
        for call in calls:
            call.insist()
        flying = [future for call in calls for future in call.flying.values()]
        with contextlib.suppress(TimeoutError):
            concurrent.futures.wait(flying, min(TICK_S, until - now), concurrent.futures.FIRST_COMPLETED)
