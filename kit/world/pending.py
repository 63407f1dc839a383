"""Calls in flight: `submit` gives a Pending, `wait` waits for several, of any number of Worlds. No threads.

One loop takes in whatever the ranks of all Worlds concerned have to say and shows what they print. Nothing moves while nobody waits:
`done`, `result`, `wait` and `cancel` run the loop, in the thread that calls them.

in flight -> settled     every rank answered, one raised, one died, or it was cancelled
in flight -> overdue     its deadline passed: `result` raises RankTimeout, and takes a late answer when it is called again
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from kit.errors import BadInput, Cancelled, KitError, RankDied, RankError, RankTimeout
from kit.world.calls import Call, interrupt, ranks_word
from kit.world.channel import readable

TICK_S = 0.05  # how often logs are read and who looks on is asked, while ranks work
INTERRUPT_S = 3.0
GRACE_S = 3.0  # after a failure in one of several Worlds: how long the others are waited for


class Observer(Protocol):
    """Who looks on while ranks work. Called in the thread that waits; what it raises ends the wait."""

    def started(self, phase: str, ranks: Sequence[int]) -> None: ...
    def output(self, rank: int, text: str) -> None: ...
    def tick(self, answered: Sequence[int]) -> None: ...
    def ended(self) -> None: ...


class Pending:
    """A call in flight on some ranks: `done()`, `result(timeout_s)`, `cancel()`, `ranks`, `phase`."""

    def __init__(
        self,
        calls: Sequence[Call],
        lock: threading.RLock,
        observer: Observer,
        timeout_s: float,
        on_news: Callable[[int, list[Any]], None] | None = None,
    ) -> None:
        self.calls = calls
        self.lock = lock
        self.observer = observer
        self.phase = calls[0].phase
        self.ranks = [member.rank for call in calls for member in call.members]
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self._on_news = on_news
        self._cancelled = False
        self.settled = False
        self._ticked = time.monotonic()
        observer.started(self.phase, self.ranks)
        for call in calls:
            call.send()

    def done(self) -> bool:
        """Whether `result()` would return or raise at once."""
        drive([self], until=0.0)
        return self.over(time.monotonic())

    def result(self, timeout_s: float | None = None) -> list[Any]:
        """Return one value per rank, or raise. `timeout_s`: how long to wait from now on."""
        until = self.deadline if timeout_s is None else time.monotonic() + timeout_s
        drive([self], until=until, overdue=timeout_s is not None)
        with self.lock:
            if self._cancelled:
                raise Cancelled(f"the call of phase {self.phase!r} on {ranks_word(self.ranks)} was cancelled")
            if not self.settled:
                waited = self.timeout_s if timeout_s is None else timeout_s
                raise timeouts([call.timeout(waited) for call in self.calls if not call.settled], waited)
            if error := failure(self.calls):
                raise error
        return [call.answers[member.rank]["value"] for call in self.calls for member in call.members]

    def cancel(self) -> bool:
        """Interrupt the ranks like Ctrl-C and wait until they stop. Returns False if the call had already ended.

        Ranks that do not stop within 3 s are ended, and their World with them.
        """
        drive([self], until=0.0)
        if self.settled:
            return False
        self._cancelled = True
        stop([self])
        return True

    def over(self, now: float) -> bool:
        return self.settled or now >= self.deadline

    def advance(self, *, tick: bool) -> None:
        """Hand on what arrived, and see whether the call is over."""
        if self.settled:
            return
        now = time.monotonic()
        with self.lock:
            self._report()
            for call in self.calls:
                call.advance()
            failed = [call for call in self.calls if call.settled and call.error is not None]
            late = failed and now > min(call.failed_at or now for call in failed) + GRACE_S
            for call in self.calls:
                if late and not call.settled:
                    call.give_up(GivenUp())
            over = all(call.settled for call in self.calls)
            if self._on_news is not None and not over:
                for call in self.calls:
                    call.ask_for_news(now)
        if tick or now - self._ticked >= TICK_S:  # ranks that are always heard from must not keep it away
            self._ticked = now
            for call in self.calls:
                call.show(self.observer.output)
            self.observer.tick([rank for call in self.calls for rank in call.order])
        if over:
            self._end()

    def _end(self) -> None:
        self.settled = True
        try:
            for call in self.calls:
                call.show(self.observer.output, last=True)
        finally:
            self.observer.ended()

    def _report(self) -> None:
        for call in self.calls:
            for member in call.members:
                rows, member.news = member.news, []
                if rows and self._on_news is not None:
                    try:
                        values = [json.loads(row) for row in rows]
                    except (TypeError, ValueError) as error:
                        call.crew.refuse(member, error)
                    else:
                        self._on_news(member.rank, values)


class GivenUp(KitError):  # noqa: N818 - nobody outside sees it
    """A World's share of a call is given up because another World failed; its ranks stay busy."""


def wait(pendings: Iterable[Pending], *, first: bool = True, timeout_s: float | None = None) -> list[Pending]:
    """Wait for the first to finish (`first=False`: for all), at most `timeout_s`; return those that have finished."""
    asked = list(pendings)
    if not all(isinstance(one, Pending) for one in asked):
        raise BadInput("kit.wait takes what submit() returned, in a list")
    drive(asked, until=math.inf if timeout_s is None else time.monotonic() + timeout_s, first=first)
    now = time.monotonic()
    return [one for one in asked if one.over(now)]


def drive(pendings: Sequence[Pending], *, until: float, first: bool = False, overdue: bool = False) -> None:
    """Take in what ranks say until all (or the first) are over, or until then. `overdue`: also past their own deadlines."""
    turned = False
    try:
        while True:
            now = time.monotonic()
            left = [one for one in pendings if not (one.settled if overdue else one.over(now))]
            enough = not left or (first and len(left) < len(pendings))
            if turned and (enough or now >= until):
                return
            ends = until if overdue else min([until, *(one.deadline for one in left)])
            turn(pendings, 0.0 if enough else min(TICK_S, max(0.0, ends - now)))
            turned = True
    except KeyboardInterrupt:
        stop(pendings)
        raise


def turn(pendings: Sequence[Pending], seconds: float) -> None:
    """Wait at most so long for something to arrive, and take it in."""
    crews = list({id(call.crew): (one.lock, call.crew) for one in pendings for call in one.calls}.values())
    ready = readable([fd for _, crew in crews for fd in crew.filenos()], seconds)
    for lock, crew in crews if ready else ():
        with lock:
            crew.take(ready)
    for one in pendings:
        one.advance(tick=not ready)


def stop(pendings: Sequence[Pending]) -> None:
    """Interrupt the ranks of these calls. Those that cannot stop end, so that each World is clearly dead or usable."""
    open_ = [call for one in pendings if not one.settled for call in one.calls if not call.settled]
    for call in open_:
        interrupt(call)
    end = time.monotonic() + INTERRUPT_S
    while any(call.waiting() and not call.gone for call in open_) and time.monotonic() < end:
        crews = {id(call.crew): call.crew for call in open_}.values()
        if readable([fd for crew in crews for fd in crew.filenos()], TICK_S):
            for one in pendings:
                with one.lock:
                    for call in one.calls:
                        call.crew.take()
    stuck: list[int] = []
    for call in open_:
        if left := [member.rank for member in call.waiting()]:
            stuck += left
            why = f"it was interrupted and {ranks_word(left)} did not stop within {INTERRUPT_S:g} s in phase {call.phase!r}"
            call.die(why, KitError(f"this World is dead: {why}; restart() starts fresh ranks"))
    for one in pendings:
        with one.lock:
            for call in one.calls:
                call.advance()
                call.give_up(Cancelled(f"the call of phase {one.phase!r} was interrupted"))
        if not one.settled:
            one._end()
    # The prompt is back; say why the ranks are not. A thread has no prompt: who started it reports in its own way.
    if stuck and threading.current_thread() is threading.main_thread():
        print(f"World ended: {ranks_word(stuck)} did not stop within {INTERRUPT_S:g} s; restart() starts fresh ranks")


def failure(calls: Sequence[Call]) -> BaseException | None:
    """The error to raise: of the worst kind the one that came first. What else went wrong is a note on it."""
    failed = sorted((call for call in calls if call.error is not None), key=lambda one: (rank_of(one.error), at(one)))
    errors = list({id(call.error): call.error for call in failed if call.error is not None}.values())
    if not errors:
        return None
    for call in failed[1:]:
        if isinstance(call.error, GivenUp):
            note = f"{ranks_word([m.rank for m in call.waiting()])} did not answer within {GRACE_S:g} s of it and keep running"
        elif call.error is errors[0]:
            continue
        else:
            note = f"after it: {str(call.error).partition(chr(10))[0]}"
        if note not in getattr(errors[0], "__notes__", ()):
            errors[0].add_note(note)
    return errors[0]


def at(call: Call) -> float:
    return math.inf if call.failed_at is None else call.failed_at


def rank_of(error: BaseException | None) -> int:
    """The order of blame, as in one World: who died, who raised, who only reports another's end, who is silent."""
    if isinstance(error, RankError):
        return 2 if error.victim else 1
    return 4 if isinstance(error, GivenUp) else 0 if isinstance(error, RankDied) else 1


def timeouts(errors: Sequence[RankTimeout], seconds: float) -> RankTimeout:
    """One of several Worlds' timeouts. Ranks of one World that only wait may wait for a culprit in another."""
    if len(errors) == 1:
        return errors[0]
    ranks = sorted(rank for error in errors for rank in error.ranks)
    culprits = tuple(sorted(rank for error in errors for rank in error.culprits))
    waiting = [rank for rank in ranks if rank not in culprits]
    if waiting and culprits:
        why = f"{ranks_word(waiting)} waiting for {ranks_word(culprits)}"
    elif culprits:
        why = "none of them waits for others: busy, stopped or gone"
    else:
        why = "each waits for others, so they wait for different things: compare the stacks"
    bodies = [str(error).partition("\n")[2] for error in errors]
    return RankTimeout(
        "\n".join([f"no answer from {ranks_word(ranks)} within {seconds:g} s; {why}", *bodies]),
        phase=errors[0].phase,
        ranks=tuple(ranks),
        culprits=culprits,
        stacks={rank: stack for error in errors for rank, stack in error.stacks.items()},
    )
