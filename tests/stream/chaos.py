"""Ports without time: every command waits for its answer, and a seeded choice picks the next answer and what fails.

Rules for any schedule, however bad, are checked while it runs (`Watch`) and at its end (`check_end`).
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kit.loop.messages import Command, Event
from kit.stream.core import Controller
from kit.stream.generation import RUNNING, StreamState
from kit.stream.settings import StreamSettings

TRAINER = ("begin", "microbatch", "finish", "abort", "clear", "logprobs")
ENDS = ("cleared", "evicted", "aborted", "failed", "dropped", "replaced")
BOUNDED = ("strict", "in-order", "weight-fifo", "windowed")


class Deadlock(AssertionError):  # noqa: N818 - it is what was found
    pass


@dataclass
class Chaos:
    """`fail_at`: the number of the command that fails, at once or when its answer is due; `churn`: how often replicas come and go."""

    seed: int
    prompts: int
    fail_at: int | None = None
    churn: float = 0.0
    flat: float = 0.0
    empty: float = 0.0
    crash: float = 0.0  # how often a sample fails
    sent: int = 0
    failed: str = ""
    channels: dict[Any, list[Event]] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    serial: int = 0
    given: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def push(self, channel: Any, *events: Event) -> None:
        self.channels.setdefault(channel, []).extend(events)

    def alone(self, event: Event) -> None:
        """Push an answer that may come at any time."""
        self.serial += 1
        self.push(self.serial, event)

    def send(self, command: Command) -> None:
        number, self.sent = self.sent, self.sent + 1
        name, ids, pipeline = command.name, dict(command.ids), command.pipeline
        if number == self.fail_at:
            self.failed = name
            event = Event("error", pipeline, **{**ids, "of": name, "why": "injected"})
            late = name in TRAINER and self.random.random() < 0.5
            self.push("trainer", event) if late else self.alone(event)
            return
        if name in TRAINER:
            self.push("trainer", Event("done", pipeline, **{**ids, "of": name}))
        elif name == "next_prompt":
            given, self.given = self.given, self.given + 1
            self.alone(Event("prompt", pipeline, group=given) if given < self.prompts else Event("exhausted", pipeline))
        elif name == "generate":
            self.generate(command)
        elif name == "cancel":
            channel = (command.group, command.sample)
            if self.channels.get(channel) and self.random.random() < 0.7:  # else it completes before the order is seen
                ids = {"group": command.group, "sample": command.sample, "replica": command.replica}
                self.channels[channel] = [Event("cancelled", pipeline, **ids)]
        elif name == "sync":
            there = command.replicas
            published = [Event("published", pipeline, version=command.version, replica=one) for one in there]
            self.push("sync", *published, Event("synced", pipeline, version=command.version))
        elif name == "acquire":
            self.alone(Event("granted", pipeline, kind=command.kind))
        else:
            assert name in ("release", "metrics", "progress", "answer", "discard"), name

    def generate(self, command: Command) -> None:
        ids = {"group": command.group, "sample": command.sample, "replica": command.replica}
        version = self.versions[command.replica]
        chance = random.Random(f"{self.seed} {command.group} {command.sample}")
        length = 0 if random.Random(f"{self.seed} {command.group}").random() < self.empty else chance.randint(1, 6)
        flat = random.Random(f"{self.seed} flat {command.group}").random() < self.flat
        events = [Event("started", command.pipeline, version=version, **ids)]
        if length:
            events.append(Event("tokens", command.pipeline, version=version, first=0, count=length, **ids))
        reward = "0.0" if flat else str(command.sample % 2)
        about = {"version": version, "newest": version, "length": length, "reward": reward}
        if random.Random(f"{self.seed} crash {command.group} {command.sample} {command.attempt}").random() < self.crash:
            events.append(Event("failed", command.pipeline, **ids, why="crashed"))
        else:
            events.append(Event("completed", command.pipeline, **ids, **about))
        self.push((command.group, command.sample), *events)

    def next(self) -> Event:
        if self.churn and self.random.random() < self.churn:
            return self.come_or_go()
        return self.take(self.random.choice(self.preferred(self.live())))

    def live(self) -> list[Any]:
        """Return the channels with an answer under way."""
        found = [channel for channel, events in self.channels.items() if events]
        if not found:
            raise Deadlock("nothing is under way")
        return found

    def take(self, channel: Any) -> Event:
        """Take the next answer of a channel."""
        event = self.channels[channel].pop(0)
        if event.name == "published" and event.replica not in self.gone:
            self.versions[event.replica] = event.version
        if not self.channels[channel]:
            del self.channels[channel]
        return event

    def preferred(self, live: list[Any]) -> list[Any]:
        """Depending on its seed, a schedule has slow replicas, a slow trainer, or neither."""
        samples = [channel for channel in live if isinstance(channel, tuple)]
        others = [channel for channel in live if not isinstance(channel, tuple)]
        first = ((), others, samples)[self.seed // 2 % 3]
        return list(first) if first and self.random.random() < 0.9 else live

    def come_or_go(self) -> Event:
        there = sorted(self.versions)
        if len(there) > 1 and self.random.random() < 0.5:
            gone = self.random.choice(there)
            del self.versions[gone]
            self.gone.add(gone)
            for channel, events in list(self.channels.items()):
                if isinstance(channel, tuple) and events and events[-1].replica == gone:
                    self.channels[channel] = []
            return Event(self.random.choice(["left", "died"]), "", replica=gone)
        self.serial += 1
        return Event("joined", "", replica=100 + self.serial)


@dataclass
class Run:
    settings: StreamSettings
    states: list[StreamState]
    events: list[Event]
    commands: list[Command]
    ended: Command

    def notes(self, *names: str) -> list[Command]:
        return [one for one in self.commands if one.name in names]


class Play:
    """A run in progress, event by event; every state on the way is checked."""

    def __init__(self, settings: StreamSettings, chaos: Chaos, core: Controller | None = None) -> None:
        self.chaos = chaos
        self.core = core or Controller(settings)
        self.watch = Watch(settings)
        chaos.versions = dict.fromkeys(range(settings.replicas), 0)
        self.state, commands = self.core.begin()
        self.done = Run(settings, [self.state], [], list(commands), commands[0])
        self.watch.see(commands)
        carry(chaos, commands)

    def step(self, event: Event) -> None:
        self.state, commands = self.core.step(self.state, event)
        self.done.events.append(event)
        self.done.commands += commands
        self.watch.see(commands)
        check_state(self.state, self.done.settings)
        carry(self.chaos, commands)

    def finish(self, limit: int = 20_000) -> Run:
        """Run to the end by the schedule's own choices, and check the whole."""
        done = self.done
        while not self.state.closed:
            self.step(self.chaos.next())
            assert len(done.events) < limit, "it does not end"
        done.states.append(self.state)
        done.ended = done.commands[-1]
        assert done.ended.name == "ended"
        check_end(done)
        return done


def run(settings: StreamSettings, chaos: Chaos, *, limit: int = 20_000, core: Controller | None = None) -> Run:
    """Run a whole schedule."""
    return Play(settings, chaos, core).finish(limit)


def carry(chaos: Chaos, commands: tuple[Command, ...]) -> None:
    for command in commands:
        if command.to not in ("ledger", "runner"):
            chaos.send(command)


def check_state(state: StreamState, settings: StreamSettings) -> None:
    """Check that redundant parts of the state agree."""
    unfinished = in_flight = 0
    loads: Counter[int] = Counter()
    for group in state.buffer.values():
        unfinished += group.order < 0
        for sample in group.samples:
            if sample.status not in ("waiting", "done"):
                in_flight += 1
                loads[sample.replica] += 1
    assert state.unfinished == unfinished
    assert state.in_flight == in_flight
    assert all(replica.load == loads[number] for number, replica in state.replicas.items())
    assert len(state.buffer) <= settings.places
    assert unfinished <= settings.slots
    assert list(state.buffer) == sorted(state.buffer) or settings.step_retries


class Watch:
    """Checks the rules for the order of commands."""

    def __init__(self, settings: StreamSettings) -> None:
        self.settings = settings
        self.held = True
        self.version = 0
        self.begun: tuple[int, int] | None = None
        self.open_microbatches = 0
        self.step = -1
        self.kinds: set[str] = set()
        self.cancelled: set[tuple[int, int]] = set()

    def see(self, commands: tuple[Command, ...]) -> None:  # noqa: PLR0912 - one rule a branch
        for one in commands:
            name = one.name
            if name == "hold":
                self.held = True
            elif name == "resume":
                assert one.version == self.version
                self.held = False
            elif name == "cancel":
                assert (one.group, one.sample) not in self.cancelled, "cancelled twice"
                self.cancelled.add((one.group, one.sample))
            elif name == "bumped":
                assert one.version == self.version + 1
                self.version = one.version
            elif name in ("generate", "reserved"):
                assert not self.held, f"{name} while dispatch is held"
                self.cancelled.discard((one.group, one.get("sample", -1)))
            elif name == "begin":
                assert self.begun is None
                self.begun = one.step, one.update
            elif name == "microbatch":
                assert self.begun == (one.step, one.update)
            elif name == "finish":
                assert self.begun == (one.step, one.update)
                self.begun = None
            elif name == "abort":
                self.begun = None
            elif name == "selected":
                assert not self.held
                assert one.version == self.version
            elif name == "acquire":
                assert one.kind not in self.kinds
                self.kinds.add(one.kind)
                assert not {"training", "logprobs"} <= self.kinds, "two kinds of the trainer's devices"
            elif name == "release":
                self.kinds.remove(one.kind)
            elif name == "ended":
                assert not self.kinds, f"{self.kinds} were never released"


def check_end(done: Run) -> None:
    """Check that no permit is lost, every group ends once, steps are whole, and versions count outer steps."""
    settings, ended = done.settings, done.ended
    reserved = Counter(one.group for one in done.notes("reserved"))
    ends = Counter(one.group for one in done.notes(*ENDS))
    assert ends == reserved, (ends - reserved, reserved - ends)
    for taken, back in (("place", "place_back"), ("slot", "slot_back")):
        assert Counter(one.group for one in done.notes(taken)) == Counter(one.group for one in done.notes(back))
    trained = [one.group for one in done.notes("trained")]
    assert len(trained) == len(set(trained))
    if ended.why != "error":
        cleared = {one.group for one in done.notes("cleared")}
        assert cleared == set(trained)
    bumps = done.notes("bumped")
    assert [one.version for one in bumps] == list(range(1, len(bumps) + 1))
    if ended.why == "done":
        assert ended.version == settings.steps
        assert done.notes("resume")[-1].version == settings.steps, "the last version is published"
        if not settings.step_retries:
            assert {one.step for one in done.notes("selected")} == {one.step for one in bumps}
    ready = {one.group: one for one in done.notes("ready")}
    consumed = {one.group for one in done.notes("dropped") if one.why == "no valid token"}
    for bump in bumps:
        mine = [one.group for one in done.notes("trained") if one.step == bump.step]
        chosen = [one.group for one in done.notes("selected") if one.step == bump.step]
        assert set(mine) | (consumed & set(chosen)) == set(chosen)
        floor = settings.groups if settings.on_failed != "shrink" else settings.floor
        assert floor <= len(chosen) <= settings.groups
    if settings.sampler in BOUNDED:
        for one in done.notes("trained"):
            assert one.version - ready[one.group].version <= settings.window, "too old"
    for one in done.notes("trained"):
        assert ready[one.group].version <= one.version
    rows = {event.group for event in done.events if event.name == "completed" and event.length} & set(reserved)
    cleared = {one.group for one in done.notes("trained")}
    assert {one.group for one in done.notes("discard")} <= rows
    if ended.why != "error":
        assert {one.group for one in done.notes("discard")} | cleared >= rows - late_answers(done), "rows are left"
    total = sum(event.count for event in done.events if event.name == "tokens")
    count = dict(ended.ids)
    assert total == count.get("generated", 0)
    if ended.why != "error":
        assert total == count.get("trained", 0) + count.get("wasted", 0)
    last = done.states[-1]
    assert not last.buffer
    assert not last.unfinished
    if ended.why != "error":
        assert not last.in_flight
        assert all(one.status != RUNNING for group in last.buffer.values() for one in group.samples)


def late_answers(done: Run) -> set[int]:
    """Groups with a sample that may complete after it was taken back: their rows may belong to an attempt that nobody waits for."""
    return {one.group for one in done.notes("cancel")} | {
        event.group for event in done.events if event.name == "failed"
    }
