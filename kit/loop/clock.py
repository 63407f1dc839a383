"""Real and virtual time, and a port that simulates: durations are functions of a command's ids, failures come at the n-th command."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from typing import TYPE_CHECKING

from kit.loop.messages import Command, Event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Answer = Callable[[Command], Iterable[tuple[float, Event]]]


class RealClock:
    """Unix seconds. `wait` is what waits for the ports: it takes seconds, and returns when something may have arrived.

    For calls in flight on ranks: `RealClock(lambda seconds: kit.wait(pendings, timeout_s=seconds))`.
    """

    def __init__(self, wait: Callable[[float], object] = time.sleep) -> None:
        self._wait = wait

    def now(self) -> float:
        return time.time()

    def wait(self, seconds: float) -> bool:
        self._wait(max(0.0, seconds))
        return True


class VirtualClock:
    """Time that jumps to what happens next. What is due at the same time happens in the order in which it was scheduled."""

    def __init__(self) -> None:
        self._now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def now(self) -> float:
        return self._now

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Call `what` once that time has passed."""
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"{seconds} s is no time from now on")
        heapq.heappush(self._due, (self._now + seconds, next(self._count), what))

    def wait(self, seconds: float) -> bool:
        """Jump to the next thing that is due and let it happen; at most so far."""
        if not self._due:
            return False
        if self._due[0][0] > self._now + seconds:
            self._now += seconds
            return True
        self._now, _, what = heapq.heappop(self._due)
        what()
        return True


class Simulated:
    """A port on a virtual clock. `answers` gives, for each command by name, events and the seconds until each arrives.

    `fail_at` names commands that fail, by their number (from 0, in the order in which this port gets them): the port raises.
    """

    def __init__(
        self, clock: VirtualClock, answers: Mapping[str, Answer], *, fail_at: Mapping[int, str] | None = None
    ) -> None:
        self.clock = clock
        self.answers = dict(answers)
        self.fail_at = dict(fail_at or {})
        self.sent = 0
        self.arrived: list[Event] = []

    def send(self, command: Command) -> Iterable[Event]:
        number, self.sent = self.sent, self.sent + 1
        if number in self.fail_at:
            raise RuntimeError(self.fail_at[number])
        for seconds, event in self.answers[command.name](command):
            self.deliver(seconds, event)
        return ()

    def deliver(self, seconds: float, event: Event) -> None:
        self.clock.after(seconds, lambda: self.arrived.append(event))

    def take(self) -> Iterable[Event]:
        arrived, self.arrived = self.arrived, []
        return arrived
