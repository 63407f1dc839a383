"""A pipeline's core under the desk: it registers, waits to be admitted, and leaves. The core itself knows only `acquire` and `release`.

A loop that was not written for a shared cluster makes six calls at fixed points. `Pipeline` makes the right ones; your code may inherit
from it. Without these calls the same loop runs unchanged (the lab's phases `alone`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kit.loop.messages import Command, Event
from kit.loop.runner import Core
from kit.results.records import Id
from kit.share.state import GENERATION, Cluster

# The pipeline's core does not wait for these. Nor does it see the error of a refused resize, which it did not request.
ANSWERS = ("registered", "admitted", "released", "resized", "unregistered")


@dataclass(frozen=True, slots=True)
class Joined:
    """`core` is the state of the pipeline's core, None before it is admitted. `ended` is its last command, kept while its replicas fall
    asleep.

    `alone`: the desk has failed or regards this pipeline as dead; it no longer answers.
    """

    core: Any = None
    ended: Command | None = None
    alone: bool = False


def begin_without(core: Core[Any], name: str, replicas: Iterable[int]) -> tuple[Any, tuple[Command, ...]]:
    """Begin a pipeline's core, which expects to have all its replicas, and take these from it."""
    state, commands = core.begin()
    for replica in replicas:
        state, last_commands = core.step(state, Event("left", name, replica=replica))
        commands += last_commands
    return state, commands


class Member:
    """Wraps a core that begins with all replicas: it gets `left` for each, and `joined` whenever the desk wakes one.

    A release and a request in one turn become one operation. When the core ends, the member ends its progress report and unregisters;
    the end is passed on once its replicas sleep.
    """

    first = Joined()

    def __init__(self, core: Core[Any], name: str, clusters: Mapping[str, Cluster], *, desk: str = "desk") -> None:
        self.core = core
        self.name = name
        self.clusters = dict(clusters)
        self.desk = desk

    def begin(self) -> tuple[Joined, tuple[Command, ...]]:
        devices = {name: tuple(cluster.devices) for name, cluster in self.clusters.items()}
        return self.first, (self.ask("register", tp=self.clusters[GENERATION].tp, **devices), self.ask("admit"))

    def step(self, state: Joined, event: Event) -> tuple[Joined, tuple[Command, ...]]:
        name, of = event.name, event.get("of")
        commands: tuple[Command, ...] = ()
        # A desk owes nothing to a pipeline that has died, and may have ended with it.
        alone = name == "unregistered" or (name == "error" and of in (self.desk, "trainer"))
        state = replace(state, alone=state.alone or alone)
        if state.ended is not None and state.alone:
            return state, (state.ended,)
        if state.core is None and name == "admitted":
            return self.start()
        if state.core is None and name == "error":
            return state, (Command("ended", "runner", self.name, why="error", error=event.why),)
        if name == "error" and of == "shrink":
            return state, (Command("error", self.desk, self.name, **dict(event.ids)),)
        if state.core is not None and name not in ANSWERS and of != "resize":
            state, commands = self.adapted(state, *self.core.step(state.core, event))
        if name == "left":
            commands += (Command("shrink", "devices", self.name, replica=event.replica, devices=event.devices),)
        return state, commands

    def start(self) -> tuple[Joined, tuple[Command, ...]]:
        every_replica = range(len(self.clusters[GENERATION].bundles))
        return self.adapted(self.first, *begin_without(self.core, self.name, every_replica))

    def ask(self, name: str, **ids: Id) -> Command:
        return Command(name, self.desk, self.name, **ids)

    def adapted(self, state: Joined, core: Any, commands: tuple[Command, ...]) -> tuple[Joined, tuple[Command, ...]]:
        ended = next((command for command in commands if command.name == "ended" and command.to == "runner"), None)
        released = [
            command
            for command in commands
            if command.name == "release" and command.to == self.desk and command.kind != GENERATION
        ]
        asked = [command for command in commands if command.name == "acquire" and command.to == self.desk]
        if released and asked:
            combined = self.ask("acquire", **dict(asked[0].ids), release=released[0].kind)
            commands = tuple(
                combined if command == asked[0] else command for command in commands if command != released[0]
            )
        if ended is not None and not state.alone:
            commands = (*(command for command in commands if command != ended), *self.leave(state))
        return replace(state, core=core, ended=ended or state.ended), commands

    def leave(self, _: Joined) -> tuple[Command, ...]:
        return self.ask("progress_end"), self.ask("unregister")


# -- the user's calls to the desk -----------------------------------------------------------------------------------------


class Desk:
    """The requests that a pipeline may make to the desk. No call blocks; the loop continues once the desk has answered."""

    def __init__(self, ask: Callable[..., Command]) -> None:
        self._ask = ask
        self.asked: list[Command] = []

    def request(self, kind: str) -> None:
        self.asked.append(self._ask("acquire", kind=kind))

    def release(self, kind: str) -> None:
        self.asked.append(self._ask("release", kind=kind))

    def progress(self, completed: int, target: int) -> None:
        """Report how many groups of the awaited step are complete."""
        self.asked.append(self._ask("progress", completed=completed, target=target))

    def progress_end(self) -> None:
        self.asked.append(self._ask("progress_end"))


class Pipeline:
    """The six calls. The loop awaits the next step as soon as the weights have changed, before they are sent."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk

    def begin_progress(self, completed: int, target: int) -> None:
        """The loop awaits a step: the desk shares devices by the groups still missing. `completed`: groups that are already complete."""
        self.desk.progress(completed, target)

    def collector_created(self) -> None:
        """Requests can be routed: request replicas. Called once, at the start."""
        self.desk.request(GENERATION)

    def before_training(self, step: int) -> None:  # noqa: ARG002 - a subclass may use it
        """The step's groups are complete: request the trainer's devices. The trainer begins once they are granted."""
        self.desk.request("training")

    def before_weight_sync(self, step: int) -> None:
        """The weights of the step are in the cache and the trainer has left its devices. Awake replicas get the weights next."""

    def after_training(self, step: int) -> int:
        """The awake replicas have the weights: release the trainer's devices. Returns the version served from now on."""
        self.desk.release("training")
        return step + 1

    def end_progress(self) -> None:
        """The loop is over, with or without an error."""
        self.desk.progress_end()


@dataclass(frozen=True, slots=True)
class Hooked(Joined):
    """`step`: the step in training, -1 if none; `sent`: its weights are being sent to replicas. `awaited`: the version last announced by
    `begin_progress`. `failed`: a call raised an error or returned a wrong answer; the loop then continues to its end without calls."""

    step: int = -1
    sent: bool = False
    awaited: int = -1
    failed: bool = False


class Own(Member):
    first = Hooked()

    def __init__(
        self, core: Core[Any], name: str, clusters: Mapping[str, Cluster], *, desk: str, make: Callable[[Desk], Any]
    ) -> None:
        super().__init__(core, name, clusters, desk=desk)
        self.side = Desk(self.ask)
        self.own = make(self.side)

    def adapted(self, state: Any, core: Any, commands: tuple[Command, ...]) -> tuple[Joined, tuple[Command, ...]]:
        collected: list[Command] = []
        waiting = [*commands]
        while waiting:
            command = waiting.pop(0)
            try:
                state, asked = (state, (command,)) if state.failed else self.hooked(state, core, command)
            except WrongCallError as error:
                state, asked = replace(state, failed=True), (command,)
                core, last_commands = self.core.step(core, Event("error", self.name, of="pipeline", why=str(error)))
                waiting += last_commands
            collected += asked
        try:
            return super().adapted(state, core, tuple(collected))
        except WrongCallError as error:  # its last call, at the loop's end
            wrong = Command("ended", "runner", self.name, why="error", error=str(error))
            right = [
                (command.to, command.name) == ("runner", "ended") and command.get("why") != "error"
                for command in collected
            ]
            collected = [wrong if ends else checked for ends, checked in zip(right, collected, strict=True)]
            return super().adapted(replace(state, failed=True), core, tuple(collected))

    def hooked(self, state: Hooked, core: Any, one: Command) -> tuple[Hooked, tuple[Command, ...]]:
        version, step = core.version, state.step
        match one.to, one.name, one.get("kind"):
            case "sync", "sync", _ if 0 <= step < version and not state.sent:
                return replace(state, sent=True), (*self.call("before_weight_sync", step), one)
            case self.desk, "acquire", "generation":
                return state, self.call("collector_created")
            case self.desk, "acquire", "training":
                return replace(state, step=version, sent=False), self.call("before_training", version)
            case self.desk, "release", "training" if 0 <= step < version:  # otherwise the step was given up
                before = () if state.sent else self.call("before_weight_sync", step)
                return replace(state, step=-1), before + self.call("after_training", step, version)
            case self.desk, "progress", _ if state.awaited != version < core.last:
                return replace(state, awaited=version), self.call("begin_progress", one.completed, one.target)
        return state, (one,)

    def call(self, name: str, *args: int) -> tuple[Command, ...]:
        """Make a call of the user's code and return its requests to the desk. `after_training` must return `args[1]`, the version."""
        used = args[:1] if name == "after_training" else args
        words = f"{name}({', '.join(map(str, used))}) of the pipeline's own code"
        self.side.asked = []
        try:
            answer = getattr(self.own, name)(*used)
        except Exception as error:
            raise WrongCallError(f"{words} raised {type(error).__name__}: {error}") from error
        if name == "after_training" and answer != args[1]:
            raise WrongCallError(f"{words} returned version {answer}; it must return the loop's version {args[1]}")
        return tuple(self.side.asked)

    def leave(self, state: Any) -> tuple[Command, ...]:
        ended = () if state.failed else self.call("end_progress")
        return (*ended, self.ask("unregister"))


class WrongCallError(Exception):
    """A call of user code raised an error or returned a wrong answer."""
