"""The runner: one inbox, any number of named cores, routing by address, a clock and the ledger.

It gives one event at a time to its core and delivers the commands: to a port, to another core (which gets the command as an event), to
the ledger ("ledger", a note) or to itself ("runner": `ended` ends that core). Every wait has a deadline. An exception in a port becomes an
`error` event with the command's ids; an exception in a core is a bug and ends the run, by name. Not thread-safe.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from kit.errors import BadInput, KitError
from kit.loop.limit import returned
from kit.loop.messages import NOTES, Command, Event, Memory, Sink, command_row, event_row
from kit.results.records import Row
from kit.target import load_callable, raised_in_words

Answers = Iterable[tuple[float, Event]]  # each after so many seconds
Answer = Callable[[Command], Answers]

S = TypeVar("S")
Made = TypeVar("Made")
ITSELF = "runner"
BEGINS = "begins"  # the row before a core's first commands
OPENING = ("capacity", "resumed", BEGINS)  # a loop's first rows, which are not the core's to state
A_SECOND = 100_000  # events of all cores in one second of their clock: a core that makes more makes them for ever


class Core(Protocol[S]):
    """A pure state machine. States are hashable and immutable; neither method uses a clock, I/O or random numbers."""

    def begin(self) -> tuple[S, tuple[Command, ...]]: ...
    def step(self, state: S, event: Event) -> tuple[S, tuple[Command, ...]]: ...


class Port(Protocol):
    """Executes commands. `send` returns the events known at once, `take` those that arrived since; neither blocks."""

    def send(self, command: Command) -> Iterable[Event]: ...
    def take(self) -> Iterable[Event]:
        return ()


class RunnerClock(Protocol):
    """`wait` returns when something may have arrived or the seconds are over; False if nothing can ever arrive."""

    def now(self) -> float: ...
    def wait(self, seconds: float) -> bool: ...


class Stalled(KitError):  # noqa: N818 - reads as what happened
    """Nothing arrived before the deadline, or nothing can arrive. `cores`: those that have not ended."""

    def __init__(self, message: str, cores: tuple[str, ...]) -> None:
        super().__init__(message)
        self.cores = cores


class Restless(KitError):  # noqa: N818 - reads as what happened
    """The cores made events from events and their clock hardly moved."""


class CoreRaised(KitError):  # noqa: N818 - reads as what happened
    """A core, which may be own code, raised an error: the words name the core, the event and the line. Or what was made is no core."""


def core_raised(at: str, error: Exception) -> CoreRaised:
    return CoreRaised(f"{at} raised {raised_in_words(error)}")


def made_core(target: str, *given: Any) -> Any:
    """The core that own code makes."""
    core = made_code(target, *given)
    if lacks := [name for name in ("begin", "step") if not callable(getattr(core, name, None))]:
        raise CoreRaised(f"{target} returned {type(core).__name__}, which has no {' and '.join(lacks)}")
    return core


def made_code(target: str, *given: Any) -> Any:
    """What own code makes: a core, or a pipeline's own side of the desk."""
    return made_by(load_callable(target), target, *given)


def made_by(make: Callable[..., Made], target: str, *given: Any, **named: Any) -> Made:
    """What `make`, which is `target`, returns."""
    try:
        return make(*given, **named)
    except KitError:
        raise
    except Exception as error:
        raise core_raised(target, error) from error


class Runner:
    """`Runner({"a": core}, {"trainer": port, ...}).run()` returns how each core ended: its `ended` command.

    An event from a port goes to the core of its pipeline, or to the only core. `own` has the seconds that each event took in the core and
    the runner, without the ports.
    """

    def __init__(
        self,
        cores: Mapping[str, Core[Any]],
        ports: Mapping[str, Port],
        *,
        clock: RunnerClock,
        ledger: Sink | None = None,
        deadline_s: float = 60.0,
        a_second: int = A_SECOND,
    ) -> None:
        if not cores:
            raise BadInput("a runner needs at least one core")
        if both := sorted({*cores} & {*ports}):
            raise BadInput(f"{both[0]!r} names a core and a port; give them different names")
        if taken := sorted({NOTES, ITSELF} & {*cores, *ports}):
            raise BadInput(f"{taken[0]!r} is the runner's own address; give the core or port another name")
        if not deadline_s > 0:
            raise BadInput(f"deadline_s={deadline_s} must be above 0, because every wait has a deadline")
        self.cores = dict(cores)
        self.ports = dict(ports)
        self.clock = clock
        self.ledger = Memory() if ledger is None else ledger
        self.deadline_s = deadline_s
        self.a_second = a_second
        self.second = (0, 0)  # of the clock, and the events in it so far
        self.states: dict[str, Any] = {}
        self.ended: dict[str, Command] = {}
        self.own = array("d")
        self.began: float | None = None
        self.written = 0  # rows
        self.inbox: deque[tuple[str, Event]] = deque()

    def run(self) -> dict[str, Command]:
        try:
            for name in self.cores:
                self._turn(name, None)
            while len(self.ended) < len(self.cores):
                self._next()
        finally:
            self.ledger.flush()
        return self.ended

    def post(self, event: Event) -> None:
        self.inbox += [(name, event) for name in self._cores_of(event)]

    def _next(self) -> None:
        self._take()
        if self.inbox:
            name, event = self.inbox.popleft()
            if name not in self.ended:  # events after a core's end are ignored
                self._turn(name, event)
        else:
            self._wait()

    def _take(self) -> None:
        for name, port in self.ports.items():
            try:
                arrived = list(port.take())
            except Exception as error:  # noqa: BLE001 - any exception of a port becomes an event for the cores
                arrived = [
                    Event("error", core, of="port", port=name, why=_error_sentence(error)) for core in self.cores
                ]
            for event in arrived:
                self.post(event)

    def _wait(self) -> None:
        self.ledger.flush()
        until = self.clock.now() + self.deadline_s
        while self.clock.wait(until - self.clock.now()):
            self._take()
            if self.inbox:
                return
            if self.clock.now() >= until:
                self._stalled(f"no event arrived within {self.deadline_s:g} s")
        self._stalled("no further event can arrive")

    def _stalled(self, words: str) -> None:
        left = tuple(name for name in self.cores if name not in self.ended)
        raise Stalled(f"{words}; not ended: {', '.join(left)}", left)

    def _turn(self, name: str, event: Event | None) -> None:
        """Pass one event to its core. The ledger has the event before its commands run."""
        began = time.perf_counter()
        now = self.clock.now()
        self.began = now if self.began is None else self.began
        self._count(name, event, int(now))
        place = self.written, now - self.began  # rows that have their place in the ledger need no copies to be judged
        if event is None:
            self.ledger.write(Row(metric=BEGINS, time=now, ids={"core": name}, at=place[0], since=place[1]))
        else:
            self.ledger.write(event_row(event, name, now, *place))
        self.states[name], commands = self._answer(name, event)
        self.written += 1
        for command in commands:
            if command.to == NOTES and command.name in OPENING:
                continue
            self.ledger.write(command_row(command, now, self.written, place[1]))
            self.written += 1
        self.own.append(time.perf_counter() - began)
        for command in commands:
            if command.to != NOTES:
                self._carry(name, command)

    def _answer(self, name: str, event: Event | None) -> tuple[Any, tuple[Command, ...]]:
        core = self.cores[name]

        def at() -> str:
            return f"{name} in {'its start' if event is None else f'the event {event.name}'}"

        def answer() -> tuple[Any, tuple[Command, ...]]:
            state, commands = core.begin() if event is None else core.step(self.states[name], event)
            return state, checked(commands)

        try:
            return returned(answer, at)
        except KitError:
            raise
        except Exception as error:
            raise core_raised(at(), error) from error

    def _count(self, name: str, event: Event | None, second: int) -> None:
        before, count = self.second
        self.second = second, count + 1 if second == before else 1
        if self.second[1] > self.a_second:
            last = "its start" if event is None else f"the event {event.name}"
            raise Restless(
                f"more than {self.a_second} events within a second of the cores' clock; the last is {last} for {name}"
            )

    def _carry(self, name: str, command: Command) -> None:
        if command.to == ITSELF:
            if command.name == "ended":
                self.ended[name] = command
        elif command.to in self.cores:
            self.inbox.append((command.to, Event(command.name, command.pipeline, **dict(command.ids))))
        elif command.to in self.ports:
            try:
                answers = list(self.ports[command.to].send(command))
            except Exception as error:  # noqa: BLE001 - any exception of a port becomes an event for the core
                ids = {**dict(command.ids), "of": command.name, "why": _error_sentence(error)}
                self.inbox.append((name, Event("error", command.pipeline, **ids)))
            else:
                for event in answers:
                    self.post(event)
        else:
            raise BadInput(f"{name} sends {command.name} to {command.to!r}, which is neither a core nor a port")

    def _cores_of(self, event: Event) -> list[str]:
        if event.pipeline in self.cores:
            return [event.pipeline]
        if len(self.cores) == 1:
            return list(self.cores)
        raise BadInput(f"the event {event.name} belongs to the pipeline {event.pipeline!r}, which has no core")


def checked(commands: Iterable[Any]) -> tuple[Command, ...]:
    commands = tuple(commands)
    if wrong := [command for command in commands if not isinstance(command, Command)]:
        raise TypeError(f"{wrong[0]!r} stands among its commands and is no Command")
    return commands


def _error_sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


class RealClock:
    """Unix seconds, by a clock that does not jump when the system's is set. `wait` blocks for up to the given seconds and returns when
    something may have arrived.

    For calls in flight on ranks: `RealClock(lambda seconds: kit.wait(pendings, timeout_s=seconds))`.
    """

    def __init__(self, wait: Callable[[float], object] = time.sleep) -> None:
        self._wait = wait
        self._began = time.time() - time.monotonic()

    def now(self) -> float:
        return self._began + time.monotonic()

    def wait(self, seconds: float) -> bool:
        self._wait(max(0.0, seconds))
        return True


class VirtualClock:
    """Time that jumps to the next scheduled action. Actions due at the same time run in the order in which they were scheduled."""

    def __init__(self) -> None:
        self._now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def now(self) -> float:
        return self._now

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"{seconds} s must be finite and at least 0")
        heapq.heappush(self._due, (self._now + seconds, next(self._count), act))

    def wait(self, seconds: float) -> bool:
        """Jump to the next action, at most `seconds` ahead, and run it."""
        if not self._due:
            return False
        if self._due[0][0] > self._now + seconds:
            self._now += seconds
            return True
        self._now, _, due = heapq.heappop(self._due)
        due()
        return True


class Simulated:
    """A port on a virtual clock. `answers` maps a command's name to its events and the seconds until each arrives.

    `fail_at` maps the number of a command (from 0, in the order in which this port gets them) to the error that the port raises.
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
