"""A pipeline's core under the desk: it registers, waits to be admitted, and leaves. The core itself knows only `acquire` and `release`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kit.loop.messages import Command, Event, listed
from kit.share.state import GENERATION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kit.loop.runner import Core
    from kit.share.state import Cluster

# A pipeline's core does not wait for them; nor does it hear that a resize was refused, which somebody else asked for.
ANSWERS = ("registered", "admitted", "released", "resized", "unregistered")


@dataclass(frozen=True, slots=True)
class Joined:
    """`core` is the state of the pipeline's core, None before it is admitted. `ended` is how it ended, while its replicas fall asleep.

    `alone`: the desk has failed, or holds this pipeline for dead; it answers nothing any more.
    """

    core: Any = None
    ended: Command | None = None
    alone: bool = False


class Member:
    """Wraps a core whose replicas are all there when it begins: it is told that they left, and that each joins when the desk wakes it.

    A release and a request of one turn become one operation. At its end the core's progress ends, its replicas sleep, and it leaves.
    """

    first = Joined()

    def __init__(self, core: Core[Any], name: str, clusters: Mapping[str, Cluster], *, desk: str = "desk") -> None:
        self.core = core
        self.name = name
        self.clusters = dict(clusters)
        self.desk = desk

    def begin(self) -> tuple[Joined, tuple[Command, ...]]:
        devices = {name: listed(cluster.devices) for name, cluster in self.clusters.items()}
        tp = self.clusters[GENERATION].tp
        return self.first, (self.ask("register", tp=tp, **devices), self.ask("admit"))

    def step(self, state: Joined, event: Event) -> tuple[Joined, tuple[Command, ...]]:
        name, of = event.name, event.get("of")
        commands: tuple[Command, ...] = ()
        state = replace(state, alone=state.alone or name == "unregistered" or (name == "error" and of == self.desk))
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
            ids = {"replica": event.replica, "devices": event.devices}
            commands += (Command("shrink", "devices", self.name, **ids),)
        return state, commands

    def start(self) -> tuple[Joined, tuple[Command, ...]]:
        core, commands = self.core.begin()
        for replica in range(len(self.clusters[GENERATION].bundles)):
            core, more = self.core.step(core, Event("left", self.name, replica=replica))
            commands += more
        return self.adapted(self.first, core, commands)

    def ask(self, name: str, **ids: int | str) -> Command:
        return Command(name, self.desk, self.name, **ids)

    def adapted(self, state: Joined, core: Any, commands: tuple[Command, ...]) -> tuple[Joined, tuple[Command, ...]]:
        ended = next((one for one in commands if one.name == "ended" and one.to == "runner"), None)
        released = [one for one in commands if one.name == "release" and one.to == self.desk and one.kind != GENERATION]
        asked = [one for one in commands if one.name == "acquire" and one.to == self.desk]
        if released and asked:
            both = self.ask("acquire", **dict(asked[0].ids), release=released[0].kind)
            commands = tuple(both if one == asked[0] else one for one in commands if one != released[0])
        if ended is not None and not state.alone:
            commands = (*(one for one in commands if one != ended), *self.leave(state))
        return replace(state, core=core, ended=ended or state.ended), commands

    def leave(self, _: Joined) -> tuple[Command, ...]:
        return self.ask("progress_end"), self.ask("unregister")
