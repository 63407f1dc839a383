"""A controller of whole batches: a step begins when all groups of its batch are complete, and one call is open at a time.
In milliseconds, without ranks:
kit run stream --set simulated=true --set worlds=0 --set min_groups=4 --set implementation=docs.examples.own_controller:WholeBatches"""

import copy
from dataclasses import dataclass, field
from typing import Any

from kit.loop.messages import Command, Event
from kit.stream.settings import Resume, StreamSettings


@dataclass
class Group:
    target: int  # the version whose step trains it
    oldest: int  # the version of its oldest token
    flying: dict[int, int] = field(default_factory=dict)  # sample: its replica, or -1 while it waits for one
    attempts: dict[int, int] = field(default_factory=dict)
    tokens: int = 0


@dataclass
class State:
    version: int
    updates: int
    steps: int
    next: int  # prompts that became groups
    started: int  # the same, of batches that this loop began
    replicas: dict[int, int]  # the version that each serves
    groups: dict[int, Group] = field(default_factory=dict)  # that did not end
    batch: list[int] = field(default_factory=list)  # of the open step
    calls: list[Command] = field(default_factory=list)  # of the open step; each waits for the answer to the one before
    step: int | None = None
    owed: tuple[int, ...] = ()  # targets of groups that failed and are replaced
    held: bool = True
    exhausted: bool = False
    asked: bool = False  # for a prompt
    granted: set[str] = field(default_factory=set)  # kinds of devices
    retried: int = 0
    cancelled: set[tuple[int, int]] = field(default_factory=set)  # after an error
    error: str = ""
    over: bool = False

    def resume(self) -> Resume:
        again = tuple(sorted(self.groups))
        return Resume(version=self.version, updates=self.updates, steps=self.steps, next=self.next, open=again)


class WholeBatches:
    """Needs `min_groups` equal to `groups`. Lets requests go on over a sync, as `at_sync=keep` and `recompute` do."""

    def __init__(self, settings: StreamSettings, resume: Resume | None = None) -> None:
        if settings.at_sync not in ("keep", "recompute") or settings.min_groups != settings.groups:
            raise ValueError("WholeBatches needs at_sync=keep or recompute, and min_groups equal to groups")
        self.settings, self.start = settings, resume or Resume(version=0, updates=0, steps=0, next=0)
        self.out: list[Command] = []

    def begin(self) -> tuple[State, list[Command]]:
        start, replicas = self.start, range(self.settings.replicas)
        first = start.next - len(start.open)
        state = State(start.version, start.updates, start.steps, first, 0, dict.fromkeys(replicas, -1))
        self.out = []
        for replica in replicas:
            self.note("joined", replica=replica)
        self.note("hold", version=state.version)
        self.do("acquire", "desk", kind="generation")
        return state, self.out

    def step(self, state: State, event: Event) -> tuple[State, list[Command]]:
        state, self.out = copy.deepcopy(state), []
        if not state.over:
            getattr(self, f"on_{event.name}", lambda *_: None)(state, event)
            self.go_on(state)
        return state, self.out

    def do(self, name: str, to: str, **ids: Any) -> None:
        self.out.append(Command(name, to, **ids))

    def note(self, name: str, **ids: Any) -> None:
        self.do(name, "ledger", **ids)

    # -- what follows from the state, after every event

    def go_on(self, t: State) -> None:
        if t.error and not t.calls:
            self.give_up(t)
        elif not t.error and not t.held:
            self.dispatch(t)
            mine = sorted(
                number for number, group in t.groups.items() if group.target == t.version and not group.flying
            )
            if t.step is None and len(mine) == self.settings.groups:
                self.open_step(t, mine)

    def dispatch(self, t: State) -> None:
        limits, unfinished = self.settings, sum(bool(group.flying) for group in t.groups.values())
        room = len(t.groups) < limits.places and unfinished < limits.slots
        if (
            room
            and not (t.asked or t.exhausted)
            and (t.owed or self.next_target(t) <= min(t.version + limits.window, limits.steps - 1))
        ):
            t.asked = True
            self.do("next_prompt", "data")
        for number, group in t.groups.items():
            for sample in [sample for sample, replica in group.flying.items() if replica < 0]:
                loads = {
                    replica: self.load(t, replica) for replica, version in t.replicas.items() if version == t.version
                }
                if loads:
                    group.flying[sample] = replica = min(loads, key=lambda one: (loads[one], one))
                    request = {"group": number, "sample": sample, "replica": replica, "attempt": group.attempts[sample]}
                    self.do("generate", "replica", **request)
                    self.note("sent", **request)

    def load(self, t: State, replica: int) -> int:
        return sum(where == replica for group in t.groups.values() for where in group.flying.values())

    def next_target(self, t: State) -> int:
        return self.start.version + t.started // self.settings.groups

    def open_step(self, t: State, mine: list[int]) -> None:
        t.step, t.batch, size = t.steps, mine, self.settings.minibatch
        for number in mine:
            self.note("place_back", group=number)
            self.note("selected", group=number, step=t.step, version=t.version)
        self.call(t, "acquire", "desk", kind="training")
        for which in self.settings.logprobs:
            self.call(t, "logprobs", "trainer", step=t.step, groups=tuple(mine), which=which)
        for update, first in enumerate(range(0, len(mine), size)):
            ids: dict[str, Any] = {"step": t.step, "update": update}
            groups = tuple(mine[first : first + size])
            self.call(t, "begin", "trainer", **ids)
            self.call(t, "microbatch", "trainer", **ids, groups=groups)
            self.call(t, "finish", "trainer", **ids)
            self.call(t, "clear", "trainer", **ids, groups=groups)
        self.out.append(t.calls[0])

    def call(self, t: State, name: str, to: str, **ids: Any) -> None:
        t.calls.append(Command(name, to, **ids))

    def answered(self, t: State) -> None:
        """The open call has its answer: the next one, or the sync after the last."""
        del t.calls[0]
        if t.calls:
            self.out.append(t.calls[0])
            return
        t.step, t.batch, t.steps = None, [], t.steps + 1
        self.release(t, "training")
        self.sync(t)

    def sync(self, t: State) -> None:
        self.note("sync_begin", version=t.version)
        self.do("sync", "sync", version=t.version, at_sync=self.settings.at_sync, replicas=tuple(t.replicas))

    def give_up(self, t: State) -> None:
        """After an error: cancel what is in flight, and end when nothing is."""
        flying = [
            (number, *request)
            for number, group in t.groups.items()
            for request in group.flying.items()
            if request[1] >= 0
        ]
        for number, sample, replica in flying:
            if (number, sample) not in t.cancelled:
                t.cancelled.add((number, sample))
                self.do("cancel", "replica", group=number, sample=sample, replica=replica)
        if not flying:
            for number in [*t.groups]:
                self.end_group(t, number, "aborted")
            self.end(t, "error", error=t.error)

    def end_group(self, t: State, number: int, how: str) -> None:
        group = t.groups.pop(number)
        if number not in t.batch:
            self.note("place_back", group=number)
        if group.flying:
            self.note("slot_back", group=number)
        if len(group.flying) < self.settings.group:
            self.do("discard", "trainer", group=number)
        self.note(how, group=number, version=t.version)

    def end(self, t: State, why: str, **more: str) -> None:
        t.over = True
        for kind in sorted(t.granted):
            self.release(t, kind)
        self.do("ended", "runner", why=why, **more)

    # -- data and replicas

    def on_prompt(self, t: State, event: Event) -> None:
        t.asked, number = False, event.group
        target, t.owed = (t.owed[0], t.owed[1:]) if t.owed else (self.next_target(t), ())
        t.started += target == self.next_target(t)
        t.next += 1
        samples = range(self.settings.group)
        t.groups[number] = Group(target, t.version, dict.fromkeys(samples, -1), dict.fromkeys(samples, 0))
        self.note("place", group=number)
        self.note("slot", group=number)
        self.note("reserved", group=number, version=t.version, target=target)

    def on_exhausted(self, t: State, _: Event) -> None:
        t.asked, t.exhausted = False, True
        t.error = t.error or "the data ended before the last step"

    def on_completed(self, t: State, event: Event) -> None:
        if not self.is_awaited(t, event):
            return
        group = t.groups[event.group]
        del group.flying[event.sample]
        group.tokens += event.length
        group.oldest = min(group.oldest, event.version) if group.tokens > event.length else event.version
        if not group.flying:
            self.note("slot_back", group=event.group)
            self.note("ready", group=event.group, version=group.oldest)

    def is_awaited(self, t: State, event: Event) -> bool:
        group = t.groups.get(event.group)
        return group is not None and group.flying.get(event.sample) == event.replica

    def on_failed(self, t: State, event: Event) -> None:
        if self.is_awaited(t, event):
            t.groups[event.group].flying[event.sample] = -1
            t.error = t.error or f"a request of group {event.group} failed: {event.why}"

    def on_cancelled(self, t: State, event: Event) -> None:
        if self.is_awaited(t, event):
            t.groups[event.group].flying[event.sample] = -1

    def on_joined(self, t: State, event: Event) -> None:
        t.replicas.setdefault(event.replica, -1)  # it serves from the next sync on

    def on_left(self, t: State, event: Event) -> None:
        t.replicas.pop(event.replica, None)
        for group in t.groups.values():
            for sample in [sample for sample, replica in group.flying.items() if replica == event.replica]:
                group.flying[sample] = -1  # sent again
                group.attempts[sample] += 1

    def on_died(self, t: State, event: Event) -> None:
        self.on_left(t, event)
        if self.settings.on_dead_replica == "stop" or not t.replicas:
            t.error = t.error or f"replica {event.replica} died"

    def on_ask(self, t: State, event: Event) -> None:
        counts = {"groups": len(t.groups), "replicas": len(t.replicas)}
        self.do("answer", event.asker, of=event.of, question=event.question, version=t.version, **counts)

    # -- syncs and devices

    def release(self, t: State, kind: str) -> None:
        t.granted.discard(kind)
        self.do("release", "desk", kind=kind)

    def on_granted(self, t: State, event: Event) -> None:
        t.granted.add(event.kind)
        if event.kind == "generation":
            self.sync(t)
        else:
            self.answered(t)

    def on_published(self, t: State, event: Event) -> None:
        if event.replica in t.replicas:
            t.replicas[event.replica] = event.version

    def on_synced(self, t: State, _: Event) -> None:
        t.held = False
        self.note("resume", version=t.version)
        if t.version == self.settings.steps:
            self.end(t, "done")

    # -- the trainer

    def on_done(self, t: State, event: Event) -> None:
        if event.of == "finish":
            self.trained(t, event)
        elif event.of == "clear":
            for number in t.calls[0].groups:
                del t.groups[number]
                self.note("cleared", group=number, step=event.step)
        elif event.of == "abort":
            self.aborted(t)
        if t.calls:
            self.answered(t)

    def trained(self, t: State, event: Event) -> None:
        """Of two updates of a step, the second raises the version."""
        numbers = t.calls[1].groups  # of the clear that follows
        for number in numbers:
            self.note("trained", group=number, step=event.step, update=event.update, version=t.version)
        groups = [t.groups[number] for number in numbers]
        lag = max(t.version - group.oldest for group in groups)
        t.updates += 1
        if len(t.calls) == 2:
            t.version += 1
            t.held = True
            self.note("bumped", version=t.version, updates=t.updates, step=event.step)
            self.note("hold", version=t.version)
        tokens = sum(group.tokens for group in groups)
        counts = {"groups": len(groups), "tokens": tokens, "lag_max": lag}
        self.do("metrics", "log", step=event.step, update=event.update, version=t.version, **counts)

    def on_error(self, t: State, event: Event) -> None:
        """A call failed. A step of which nothing is in the weights is tried again."""
        why = f"{event.of} failed: {event.why}"
        if event.of in ("sync", "clear", "abort") or not t.calls:
            t.error, t.calls = t.error or why, []
            return
        if t.groups.keys() >= {*t.batch} and t.retried < self.settings.step_retries:
            t.retried += 1
        else:
            t.error = t.error or why
        t.calls = [Command("abort", "trainer", step=t.step)]
        self.out.append(t.calls[0])

    def aborted(self, t: State) -> None:
        """The groups of the step go back to their places."""
        self.release(t, "training")
        for number in t.batch:
            if number in t.groups:
                self.note("place", group=number)
        t.step, t.batch, t.steps, t.calls = None, [], t.steps + 1, []


class WholeBatchesThatDoNotWait(WholeBatches):
    """Sends requests while the weights of a version are on their way."""

    def sync(self, t: State) -> None:
        super().sync(t)
        t.held, t.replicas = False, dict.fromkeys(t.replicas, t.version)
