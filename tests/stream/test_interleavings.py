"""Every order of answers of a small instance, with one failed command or dead replica: each run ends and loses nothing."""

from __future__ import annotations

from typing import Any

import pytest

from kit.loop.messages import Command, Event
from kit.stream.core import Controller
from kit.stream.generation import StreamState
from kit.stream.settings import StreamSettings
from tests.stream.chaos import ENDS, TRAINER, check_state

Channels = frozenset[tuple[str, tuple[Event, ...]]]
TINY = {
    "groups": 1,
    "group": 2,
    "train_global_batch_size": 2,
    "places": 2,
    "slots": 2,
    "replicas": 1,
    "previous": "off",
}

BATCHES = {"groups": 2, "places": 4, "slots": 4, "train_global_batch_size": 4, "steps": 2}  # on top of TINY


class Explorer:
    """Depth-first search over (state of the core, what is under way, failures left)."""

    def __init__(self, settings: StreamSettings, *, failures: int, prompts: int = 6) -> None:
        self.core = Controller(settings)
        self.settings = settings
        self.prompts = prompts
        self.seen: set[Any] = set()
        self.ends: dict[str, int] = {}
        state, commands = self.core.begin()
        self.todo = self.after(state, commands, {}, failures)

    def run(self) -> None:
        while self.todo:
            node = self.todo.pop()
            if node in self.seen:
                continue
            self.seen.add(node)
            state, channels, failures = node
            check_state(state, self.settings)
            if state.closed:
                self.check_end(state)
                continue
            assert channels, "a deadlock"
            for name, events in channels:
                left = dict(channels)
                left.pop(name)
                if len(events) > 1:
                    left[name] = events[1:]
                after, commands = self.core.step(state, events[0])
                self.todo += self.after(after, commands, left, failures)
            if failures and self.settings.on_dead_replica == "go-on" and len(state.replicas) > 1:
                for replica in state.replicas:
                    self.todo += self.death(state, dict(channels), replica, failures)

    def death(self, state: StreamState, channels: dict[str, Any], replica: int, failures: int) -> list[Any]:
        """Return the nodes after a replica's death: its samples in flight get no answer, a sync continues without it."""
        left = {
            name: tuple(event for event in events if event.get("replica") != replica)
            for name, events in channels.items()
        }
        after, commands = self.core.step(state, Event("died", replica=replica))
        return self.after(after, commands, {name: events for name, events in left.items() if events}, failures - 1)

    def after(
        self, state: StreamState, commands: tuple[Command, ...], channels: dict[str, Any], failures: int
    ) -> list[Any]:
        """Return the nodes after some commands: one with all of them carried out, and one for each of them failed."""
        asked = [
            one
            for one in commands
            if one.to not in ("ledger", "runner") and one.name not in ("progress", "metrics", "discard")
        ]
        nodes = []
        for failing in (None, *(range(len(asked)) if failures else ())):
            found = dict(channels)
            for number, command in enumerate(asked):
                self.carry(command, found, state, failed=number == failing)
            nodes.append((state, frozenset(found.items()), failures - (failing is not None)))
        return nodes

    def carry(self, command: Command, channels: dict[str, Any], state: StreamState, *, failed: bool) -> None:
        name, ids = command.name, dict(command.ids)
        where = f"{name} {ids}"
        if failed:
            channels[f"failed {where}"] = (Event("error", **{**ids, "of": name, "why": "injected"}),)
        elif name in TRAINER:
            channels["trainer"] = (*channels.get("trainer", ()), Event("done", **{**ids, "of": name}))
        elif name == "next_prompt":
            given = int(state.counts.get("reserved", 0))
            prompt = Event("prompt", group=given) if given < self.prompts else Event("exhausted")
            channels[where] = (prompt,)
        elif name == "generate":
            about = {"group": command.group, "sample": command.sample, "replica": command.replica}
            done = {
                **about,
                "version": state.version,
                "newest": state.version,
                "length": 1,
                "reward": str(command.sample),
            }
            channels[f"{command.group} {command.sample}"] = (Event("completed", **done),)
        elif name == "cancel":
            key = f"{command.group} {command.sample}"
            if key in channels:
                channels[key] = (
                    Event("cancelled", group=command.group, sample=command.sample, replica=command.replica),
                )
        elif name == "sync":
            published = [Event("published", version=command.version, replica=one) for one in command.replicas]
            channels["sync"] = (*published, Event("synced", version=command.version))
        elif name == "acquire":
            channels[where] = (Event("granted", kind=command.kind),)

    def check_end(self, state: StreamState) -> None:
        self.ends[state.ending] = self.ends.get(state.ending, 0) + 1
        counts = state.counts
        assert counts.get("reserved", 0) == sum(counts.get(name, 0) for name in ENDS)
        assert not state.buffer
        if state.ending == "done":
            assert state.version == self.settings.steps


@pytest.mark.drawn(3, of="orders")
@pytest.mark.parametrize(
    ("more", "failures"),
    [
        ({"steps": 2, "window": 1}, 0),
        ({"steps": 1, "window": 0, "sampler": "strict", "places": 1, "step_retries": 1}, 1),
        ({"steps": 1, "sampler": "windowed"}, 0),
        ({"steps": 2, "replicas": 2, "on_dead_replica": "go-on"}, 1),
        (BATCHES, 0),
        ({**BATCHES, "slots": 2}, 1),
    ],
)
def test_every_order_ends_and_loses_nothing(more: dict[str, Any], failures: int) -> None:
    explorer = Explorer(StreamSettings(**{**TINY, **more}), failures=failures)
    explorer.run()
    assert explorer.ends["done"]
    assert not failures or explorer.ends["error"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "more",
    [
        {"steps": 1, "sampler": "windowed", "on_failed": "replace"},
        {"steps": 2, "window": 1, "at_sync": "abort", "on_failed": "replace"},
        {"steps": 2, "sampler": "capacity", "at_sync": "drain", "step_retries": 1},
        {
            **BATCHES,
            "slots": 2,
            "at_sync": "abort",
            "train_global_batch_size": 2,
            "step_retries": 1,
            "on_failed": "replace",
        },
        {**BATCHES, "slots": 2, "replicas": 2, "on_dead_replica": "go-on", "at_sync": "abort"},
    ],
)
def test_every_order_with_a_failure_anywhere(more: dict[str, Any]) -> None:
    explorer = Explorer(StreamSettings(**{**TINY, **more}), failures=1)
    explorer.run()
    assert explorer.ends["done"]
    assert explorer.ends["error"]
