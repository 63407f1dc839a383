"""A core driven by hand, one event at a time, with a view of the commands that wait for an answer."""

from __future__ import annotations

from typing import Any

from kit.loop.messages import Command, Event
from kit.stream.core import Controller
from kit.stream.generation import StreamState
from kit.stream.settings import Resume, StreamSettings

TRAINER = ("begin", "microbatch", "finish", "abort", "clear", "logprobs")


class Driver:
    """Commands in `answers` and `at_once` are answered as soon as they come; the others wait in `asked`."""

    def __init__(
        self,
        settings: StreamSettings,
        *,
        at_once: tuple[str, ...] = (),
        answers: tuple[str, ...] = ("acquire", "next_prompt", "sync"),
        prompts: int = 10_000,
        resume: Resume | None = None,
    ) -> None:
        self.core = Controller(settings, resume=resume)
        self.at_once = (*answers, *at_once)
        self.given = 0
        self.prompts = prompts
        self.log: list[Command] = []
        self.asked: list[Command] = []
        self.state: StreamState
        self.state, commands = self.core.begin()
        self.carry(commands)

    def carry(self, commands: tuple[Command, ...]) -> None:
        self.log += commands
        for command in commands:
            if command.to in ("ledger", "runner") or command.name in ("release", "metrics", "progress", "discard"):
                continue
            self.asked.append(command)
            if command.name in self.at_once:
                self.answer(command)

    def event(self, name: str, **ids: Any) -> tuple[Command, ...]:
        self.state, commands = self.core.step(self.state, Event(name, **ids))
        self.carry(commands)
        return commands

    def answer(self, command: Command, **more: Any) -> None:
        self.asked.remove(command)
        name, ids = command.name, dict(command.ids)
        if name in TRAINER:
            self.event("done", **{**ids, "of": name, **more})
        elif name == "acquire":
            self.event("granted", kind=command.kind)
        elif name == "next_prompt":
            number, self.given = self.given, self.given + 1
            self.event("prompt", group=number) if number < self.prompts else self.event("exhausted")
        elif name == "sync":
            for replica in command.replicas:
                self.event("published", version=command.version, replica=replica)
            self.event("synced", version=command.version)
        elif name == "generate":
            self.complete(command, **more)
        elif name == "cancel":
            about = command.group, command.sample
            self.asked = [one for one in self.asked if one.name != "generate" or (one.group, one.sample) != about]
            self.event("cancelled", group=command.group, sample=command.sample)

    def complete(
        self, command: Command, version: int | None = None, length: int = 4, reward: str | None = None
    ) -> None:
        version = self.state.version if version is None else version
        ids = {"group": command.group, "sample": command.sample, "replica": command.replica, "version": version}
        if length:
            self.event("tokens", **ids, first=0, count=length)
        text = str(command.sample) if reward is None else reward
        self.event("completed", **ids, newest=version, length=length, reward=text)

    def finish_group(self, *groups: int, **more: Any) -> None:
        """Complete every sample of these groups."""
        for group in groups:
            for command in [one for one in self.asked if one.name == "generate" and one.group == group]:
                self.answer(command, **more)

    def fail(self, command: Command, why: str = "injected") -> None:
        self.asked.remove(command)
        self.event("error", **{**dict(command.ids), "of": command.name, "why": why})

    def wants(self, name: str) -> list[Command]:
        """Return the commands of that name that have no answer yet."""
        return [one for one in self.asked if one.name == name]

    def one(self, name: str) -> Command:
        (command,) = self.wants(name)
        return command

    def did(self, *names: str) -> list[Command]:
        return [one for one in self.log if one.name in names]

    def groups(self, name: str) -> list[int]:
        """Return the groups of all notes of that name, in order."""
        return [one.group for one in self.log if one.name == name and one.to == "ledger"]

    @property
    def ended(self) -> dict[str, Any]:
        assert self.state.closed, "it has not ended"
        (command,) = self.did("ended")
        return dict(command.ids)


SMALL = {"groups": 2, "group": 2, "train_global_batch_size": 4, "places": 4, "slots": 4, "steps": 2, "replicas": 1}


def small(**more: Any) -> StreamSettings:
    return StreamSettings(**{**SMALL, "previous": "off", "correction": True, **more})


def train_step(driver: Driver) -> None:
    """Answer all commands to the trainer."""
    while found := [one for one in driver.asked if one.name in TRAINER]:
        driver.answer(found[0])
