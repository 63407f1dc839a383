"""A desk driven by hand, one operation at a time. Replicas answer at once, unless `slow` is set."""

from __future__ import annotations

from typing import Any

from kit.loop.messages import Command, Event
from kit.share.core import Scheduler
from kit.share.state import DeskSettings, DeskState
from tests.share.chaos import check_state

TRAINER_0 = {"trainer": (0,), "generation": (0, 1)}
TRAINER_1 = {"trainer": (1,), "generation": (0, 1)}


class Drive:
    """`waiting` holds the replicas' answers that are not delivered yet; `answer()` delivers the first."""

    def __init__(self, devices: int = 2, names: str = "ab", *, planner: Any = None, **settings: Any) -> None:
        self.settings = DeskSettings(devices=devices, pipelines=tuple(names), **{"admission_ms": 0, **settings})
        self.core = Scheduler(self.settings, planner=planner)
        self.state: DeskState
        self.log: list[Command] = []
        self.waiting: list[Event] = []
        self.slow = False
        self.state, commands = self.core.begin()
        self.carry(commands)

    def do(self, name: str, pipeline: str = "desk", /, **ids: Any) -> list[Command]:
        """Return all commands that follow, including those that the replicas' answers cause."""
        start = len(self.log)
        self.state, commands = self.core.step(self.state, Event(name, pipeline, **ids))
        check_state(self.state, self.settings.devices)
        self.carry(commands)
        return self.log[start:]

    def carry(self, commands: tuple[Command, ...]) -> None:
        self.log += commands
        for one in commands:
            if one.name in ("left", "expand"):
                name = "shrunk" if one.name == "left" else "expanded"
                self.waiting.append(Event(name, "desk", who=one.pipeline, replica=one.replica))
        while self.waiting and not self.slow:
            self.answer()

    def answer(self, error: str = "") -> list[Command]:
        event = self.waiting.pop(0)
        ids = dict(event.ids)
        if error:
            return self.do("error", of="expand" if event.name == "expanded" else "shrink", why=error, **ids)
        return self.do(event.name, **ids)

    def join(self, name: str, *, target: int = 0, **clusters: Any) -> Drive:
        """Register, admit, and with a target request generation."""
        self.do("register", name, **clusters)
        self.do("admit", name)
        if target:
            self.do("progress", name, completed=0, target=target)
            self.do("acquire", name, kind="generation")
        return self

    def alarm(self, about: str) -> list[Command]:
        """Fire the first alarm about this."""
        number = min(number for number, what in self.state.alarms.items() if what[0] == about)
        return self.do("alarm", number=number)

    def active(self, name: str) -> list[int]:
        return sorted(self.state.active(name))

    def holds(self, name: str, cluster: str = "trainer") -> bool:
        return (name, cluster) in self.state.leases


def message(commands: list[Command], *names: str) -> list[tuple[str, str]]:
    """Return which pipeline got which of these answers."""
    return [(one.name, one.pipeline) for one in commands if one.name in names]


def why(commands: list[Command]) -> str:
    (one,) = [one for one in commands if one.name == "error"]
    return str(one.why)
