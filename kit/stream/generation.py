"""The controller's state, and its rules for dispatch, samples, replicas, syncs and the ends of groups.

The state is frozen and hashable. A turn is a mutable copy of it with the commands so far.

Every group ends exactly once and then returns its permits. What a sync does with requests in flight:

| at_sync | tokens so far | KV cache | version stamps | place and slot |
|---|---|---|---|---|
| keep | kept | kept: later tokens attend to entries of the old weights | of both versions | kept |
| recompute | kept | recomputed with the new weights | of both versions | kept |
| abort | discarded, counted as wasted, sampled again with the same random numbers | none | of the new version | kept |
| drain | the sync waits until nothing is in flight | none is left | of the old version | kept until selection |
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from kit.loop.messages import NOTES, Command, Event, Frozen, Map
from kit.results.records import Id
from kit.stream.settings import NO_TARGET, Sampler, SamplerView, StreamSettings

WAITING, RUNNING, CANCELLING, DONE = "waiting", "running", "cancelling", "done"
UNPUBLISHED = -1


@dataclass(frozen=True, slots=True)
class SampleState:
    """`tokens` counts the tokens of this attempt. A waiting sample has no replica yet."""

    status: str = WAITING
    replica: int = -1
    attempt: int = 0
    tokens: int = 0
    length: int = 0
    reward: str = ""

    @property
    def in_flight(self) -> bool:
        return self.status in (RUNNING, CANCELLING)


@dataclass(frozen=True, slots=True)
class Group:
    """`version`: the version at which the group was reserved; `order`: its rank by completion (-1: unfinished).

    `ends`: how an unfinished group will end once none of its requests is in flight: (end, why).
    """

    id: int
    version: int
    target: int
    samples: tuple[SampleState, ...]
    oldest: int = -1
    newest: int = -1
    order: int = -1
    ends: tuple[str, str] | None = None

    @property
    def length(self) -> int:
        return sum(sample.length for sample in self.samples)

    @property
    def tokens(self) -> int:
        return sum(sample.tokens for sample in self.samples)

    @property
    def varies(self) -> bool:
        return len({sample.reward for sample in self.samples}) > 1

    @property
    def in_flight(self) -> bool:
        return any(sample.in_flight for sample in self.samples)

    def put(self, number: int, **changes: Any) -> Group:
        samples = list(self.samples)
        samples[number] = replace(samples[number], **changes)
        return replace(self, samples=tuple(samples))


@dataclass(frozen=True, slots=True)
class OpenStep:
    """An open step. Of its groups, in order of selection, the first `scored` have log-probabilities, the first `fed` were sent to the
    trainer, and the first `finished` are in the weights.

    `chunks`: the end of each selection; `begun`: whether the current update has a begin; `unanswered`: how many of its commands
    (begin, microbatch) have no answer yet; `unrun`: the groups of chunks without a valid token.
    """

    id: int
    groups: tuple[Group, ...] = ()
    chunks: tuple[int, ...] = ()
    scoring: tuple[str, ...] = ()
    scored: int = 0
    fed: int = 0
    finished: int = 0
    update: int = 0
    begun: bool = False
    unanswered: int = 0
    finishing: bool = False
    aborting: bool = False
    unrun: frozenset[int] = frozenset()

    def chunk_end(self, start: int) -> int:
        return next(end for end in self.chunks if end > start)

    @property
    def on_the_trainer(self) -> bool:
        """Whether the trainer may hold state of this step, so that only an abort closes it."""
        return self.begun or self.unanswered > 0 or bool(self.scoring)


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """`version`: the version published there; `load`: its requests in flight."""

    version: int = UNPUBLISHED
    load: int = 0


@dataclass(frozen=True, slots=True)
class Sync:
    """A sync in progress: of the current version to all replicas after a step, or only to replicas that joined."""

    version: int
    replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Owed:
    """A place in a batch that passed the gate and lost its group. `replaces`: the group that ends when a new one takes its place."""

    target: int
    replaces: Group | None = None


@dataclass(slots=True)
class StreamFields:
    """Everything that the controller knows. Groups in `buffer` hold the places, `unfinished` ones the slots."""

    version: int = 0
    updates: int = 0
    last: int = 0  # the version at which the run ends
    steps: int = 0  # number of steps opened so far, and the id of the next one
    index: int = -1
    position: int = 0
    completed: int = 0  # groups with all samples complete
    accepted: int = 0  # the same, without groups that were filtered out
    failed_in_a_row: int = 0  # groups that failed since the last one completed
    unfinished: int = 0
    buffer: Map = field(default_factory=Map)  # Group by id, in order of id
    waiting: tuple[tuple[int, int], ...] = ()  # samples without a replica: (group, sample)
    owed: tuple[Owed, ...] = ()
    shrunk: Map = field(default_factory=Map)  # by version: how many groups its step lacks
    news: bool = False  # a selection may have become possible
    updates_at: Map = field(default_factory=Map)  # `updates` by version
    step: OpenStep | None = None
    clearing: Map = field(default_factory=Map)  # groups being cleared, by (step, update)
    replicas: Map = field(default_factory=Map)  # Replica by number
    prompt: int = -1  # the next prompt, -1: none yet
    prompt_asked: bool = False
    exhausted: bool = False
    held: bool = True  # dispatch waits for the current version
    sync_due: bool = True
    sync: Sync | None = None
    admitted: tuple[int, ...] = ()  # the target of a foreign sampler's unused admission
    foreign_target: int = NO_TARGET  # the target of the last batch that it admitted
    asked: frozenset[str] = frozenset()  # unanswered requests to the desk or to a foreign sampler
    granted: frozenset[str] = frozenset()
    retried: int = 0
    progress: int = -1
    ending: str = ""
    error: str = ""
    closed: bool = False
    counts: Map = field(default_factory=Map)

    @property
    def in_flight(self) -> int:
        """The number of requests without a last answer."""
        return sum(replica.load for replica in self.replicas.values())


NAMES = tuple(StreamFields.__dataclass_fields__)


class StreamState(Frozen, StreamFields):
    """The fields, frozen."""

    __slots__ = ()


class StreamTurn(StreamFields):
    __slots__ = ("commands", "pipeline", "sampler", "settings")

    def __init__(self, fields: StreamFields, settings: StreamSettings, sampler: Sampler | None, pipeline: str) -> None:
        for name in NAMES:
            setattr(self, name, getattr(fields, name))
        self.settings = settings
        self.sampler = sampler
        self.pipeline = pipeline
        self.commands: list[Command] = []

    def do(self, name: str, to: str, **ids: Id) -> None:
        self.commands.append(Command(name, to, self.pipeline, **ids))

    def note(self, name: str, **ids: Id) -> None:
        self.commands.append(Command(name, NOTES, self.pipeline, **ids))

    def count(self, name: str, amount: int = 1) -> None:
        self.counts = self.counts.plus(name, amount)

    def view(self) -> SamplerView:
        return SamplerView(
            version=self.version,
            window=self.settings.window,
            groups=self.settings.groups,
            last=self.last,
            index=self.index,
            position=self.position,
            accepted=self.accepted,
            running=self.unfinished,
            buffer=self.buffer,
        )

    @property
    def need(self) -> int:
        return self.settings.groups - int(self.shrunk.get(self.version, 0))

    def put(self, group: Group) -> None:
        self.buffer = self.buffer.put(group.id, group)


def about(target: int) -> dict[str, Id]:
    return {} if target == NO_TARGET else {"target": target}


# -- how groups leave -----------------------------------------------------------------------------------------------------


def end_with_error(t: StreamTurn, why: str) -> None:
    """End the run with an error. The first error is kept; later failures never hide it."""
    if not t.error:
        t.error = why
        t.ending = "error"


def leave(t: StreamTurn, group: Group) -> None:
    t.buffer = t.buffer.without(group.id)
    t.note("place_back", group=group.id)
    if group.order < 0:
        t.unfinished -= 1
        t.note("slot_back", group=group.id)


def discard(t: StreamTurn, group: Group) -> None:
    """Drop the rows of a group that will not be trained. There is no answer to wait for."""
    if any(sample.length for sample in group.samples):
        t.do("discard", "trainer", group=group.id)


def close_group(t: StreamTurn, group: Group, how: str, why: str) -> None:
    """End a group that is not trained."""
    if group.id in t.buffer:
        leave(t, group)
    discard(t, group)
    t.note(how, group=group.id, why=why, version=t.version)
    t.count(how)
    t.count("wasted", group.tokens)


def doom(t: StreamTurn, group: Group, how: str, why: str) -> None:
    """Cancel the requests of an unfinished group, and end it once none is in flight."""
    if group.ends is not None:
        return
    for number, sample in enumerate(group.samples):
        if sample.status == RUNNING:
            group = group.put(number, status=CANCELLING)
            t.do("cancel", "replica", group=group.id, sample=number, replica=sample.replica)
        elif sample.status == WAITING:
            group = group.put(number, status=DONE)
    t.waiting = tuple(request for request in t.waiting if request[0] != group.id)
    group = replace(group, ends=(how, why))
    t.put(group)
    end_if_idle(t, group)


def end_if_idle(t: StreamTurn, group: Group) -> None:
    """End a doomed group once none of its requests is in flight. A group to be replaced ends when another takes its place in the batch."""
    if group.ends is None or group.in_flight:
        return
    how, why = group.ends
    if how == "replaced" and not t.ending:
        leave(t, group)
        discard(t, group)
        t.owed += (Owed(group.target, group),)
    else:
        close_group(t, group, "failed" if how == "replaced" else how, why)


def complete(t: StreamTurn, group: Group) -> None:
    """Complete a group: it returns its slot and can be selected, or is filtered out and replaced."""
    group = replace(group, order=t.completed)
    if group.oldest < 0:  # it has no token
        group = replace(group, oldest=group.version, newest=group.version)
    t.put(group)
    t.completed += 1
    t.failed_in_a_row = 0
    t.accepted += 1
    t.unfinished -= 1
    t.note("slot_back", group=group.id)
    t.note("ready", group=group.id, version=group.oldest, newest=group.newest)
    t.news = True
    if not group.varies:
        t.count("flat")
        if t.settings.filter:
            t.accepted -= 1
            t.note("filtered", group=group.id)
            close_group(t, group, "dropped", "no variance")
            t.owed += (Owed(group.target),)


def put_back(t: StreamTurn) -> None:
    """Return the groups of a step that was given up to their places, before any new dispatch. A group without a free place ends."""
    assert t.step is not None
    for group in t.step.groups[t.step.finished :]:
        if len(t.buffer) < t.settings.places:
            t.put(group)
            t.note("place", group=group.id)
        else:
            close_group(t, group, "aborted", f"step {t.step.id} was given up and no place is free")
            if not t.ending:
                t.owed += (Owed(group.target),)
    t.buffer = Map(sorted(t.buffer.items()))
    t.step = None
    t.news = True


# -- dispatch -------------------------------------------------------------------------------------------------------------


def dispatch(t: StreamTurn) -> None:
    """Reserve groups while a place and a slot are free and the gate is open, checked in this order for every group."""
    while may_dispatch(t):
        if t.prompt < 0:
            if not t.prompt_asked:
                t.prompt_asked = True
                t.do("next_prompt", "data")
            return
        reserve(t)


def may_dispatch(t: StreamTurn) -> bool:
    ready = not t.held and not (t.exhausted and t.prompt < 0) and active(t)
    return bool(ready and place_is_free(t) and slot_is_free(t) and (t.owed or gate_is_open(t)))


def place_is_free(t: StreamTurn) -> bool:
    return len(t.buffer) < t.settings.places


def slot_is_free(t: StreamTurn) -> bool:
    return t.unfinished < t.settings.slots


def gate_is_open(t: StreamTurn) -> bool:
    if t.sampler is not None:
        return t.sampler.admits(t.view())
    if t.position == 0 and not t.admitted and "admit" not in t.asked:
        t.asked |= {"admit"}
        t.do("admit", "sampler", version=t.version)
    return t.position > 0 or bool(t.admitted)


def reserve(t: StreamTurn) -> None:
    """Make the next prompt a group of a batch that lost one, else of the batch that passed the gate."""
    number, t.prompt = t.prompt, -1
    owed = t.owed[0] if t.owed else None
    target = batch_target(t) if owed is None else owed.target
    samples = (SampleState(),) * t.settings.group
    t.put(Group(id=number, version=t.version, target=target, samples=samples))
    t.unfinished += 1
    t.note("place", group=number)
    t.note("slot", group=number)
    t.note("reserved", group=number, version=t.version, **about(target))
    t.count("reserved")
    t.waiting += tuple((number, sample) for sample in range(t.settings.group))
    if owed is not None:
        t.owed = t.owed[1:]
        if owed.replaces is not None:
            t.note("replaced", group=owed.replaces.id, by=number)
            t.count("replaced")
            t.count("wasted", owed.replaces.tokens)
    send_waiting(t)


def batch_target(t: StreamTurn) -> int:
    """Return the target of the next group. The index rises at the first group of a batch."""
    if t.position == 0:
        t.index += 1
        if t.sampler is None:
            t.foreign_target, t.admitted = t.admitted[0], ()
    t.position = (t.position + 1) % t.settings.groups
    if t.sampler is None:
        return t.foreign_target
    return t.index if t.sampler.stamps else NO_TARGET


# -- samples --------------------------------------------------------------------------------------------------------------


def active(t: StreamTurn) -> list[int]:
    return [number for number, replica in t.replicas.items() if replica.version == t.version]


def send_waiting(t: StreamTurn) -> None:
    """Send every waiting sample to a replica that serves its group (prefix cache), else to the one with the fewest requests."""
    there = active(t)
    if t.held or not there:
        return
    waiting, t.waiting = t.waiting, ()
    for number, sample in waiting:
        group = t.buffer[number]
        near = [peer.replica for peer in group.samples if peer.in_flight and peer.replica in there]
        chosen = near[0] if near else min(there, key=lambda replica: (t.replicas[replica].load, replica))
        attempt = group.samples[sample].attempt
        t.put(group.put(sample, status=RUNNING, replica=chosen))
        change_load(t, chosen, 1)
        ids = {"group": number, "sample": sample, "replica": chosen, "attempt": attempt}
        t.do("generate", "replica", **ids)
        t.note("sent", **ids)


def change_load(t: StreamTurn, number: int, change: int) -> None:
    replica = t.replicas[number]
    t.replicas = t.replicas.put(number, replace(replica, load=replica.load + change))


def cancel_all(t: StreamTurn) -> None:
    """Cancel every sample in flight; each is sent again later with the same random numbers."""
    for group in list(t.buffer.values()):
        for number, sample in enumerate(group.samples):
            if sample.status == RUNNING:
                t.put(t.buffer[group.id].put(number, status=CANCELLING))
                t.do("cancel", "replica", group=group.id, sample=number, replica=sample.replica)


def answered(t: StreamTurn, event: Event) -> Group | None:
    """Return the group of an answer, or None if the answer is outdated: the sample moved to another replica, or its group is gone."""
    group: Group | None = t.buffer.get(event.group)
    if group is None:
        return None
    sample = group.samples[event.sample]
    return group if sample.in_flight and event.get("replica", sample.replica) == sample.replica else None


def on_tokens(t: StreamTurn, event: Event) -> None:
    t.count("generated", event.count)
    group = answered(t, event)
    if group is None:
        t.count("wasted", event.count)
    else:
        t.put(group.put(event.sample, tokens=group.samples[event.sample].tokens + event.count))


def on_completed(t: StreamTurn, event: Event) -> None:
    if (group := answered(t, event)) is None:
        return
    change_load(t, group.samples[event.sample].replica, -1)
    group = group.put(event.sample, status=DONE, length=event.length, reward=str(event.reward))
    if event.length:  # a sample without a token has no version
        oldest = event.version if group.oldest < 0 else min(group.oldest, event.version)
        group = replace(group, oldest=oldest, newest=max(group.newest, event.newest))
    t.put(group)
    if group.ends is not None:
        end_if_idle(t, group)
    elif all(sample.status == DONE for sample in group.samples):
        complete(t, group)


def on_cancelled(t: StreamTurn, event: Event) -> None:
    if (group := answered(t, event)) is not None:
        change_load(t, group.samples[event.sample].replica, -1)
        give_up_attempt(t, group, event.sample)


def give_up_attempt(t: StreamTurn, group: Group, number: int) -> None:
    """Handle a sample that is no longer in flight. Its group ends, or it waits for another attempt, which has the same tokens under the
    same versions."""
    if group.ends is not None:
        group = group.put(number, status=DONE)
        t.put(group)
        end_if_idle(t, group)
        return
    sample = group.samples[number]
    t.count("wasted", sample.tokens)
    t.count("again")
    t.put(group.put(number, status=WAITING, replica=-1, attempt=sample.attempt + 1, tokens=0))
    t.waiting += ((group.id, number),)


def on_failed(t: StreamTurn, event: Event) -> None:
    """Count a failed request. The setting `on_failed` decides what happens to the group."""
    if (group := answered(t, event)) is None:
        return
    change_load(t, group.samples[event.sample].replica, -1)
    group = group.put(event.sample, status=DONE)
    t.put(group)
    t.count("failures")
    if group.ends is not None:
        end_if_idle(t, group)
        return
    why = f"group {group.id} sample {event.sample} failed: {event.why}"
    t.failed_in_a_row += 1
    if t.settings.on_failed == "stop":
        end_with_error(t, why)
    elif t.failed_in_a_row > t.settings.slots + t.settings.groups:  # replacing them would never end
        end_with_error(t, f"{t.failed_in_a_row} groups failed and none completed; the last: {why}")
    if t.settings.on_failed == "shrink":
        shrink_step(t, group)
    doom(t, group, "replaced" if t.settings.on_failed == "replace" else "failed", why)


def shrink_step(t: StreamTurn, group: Group) -> None:
    """Take one group off the step of the group's batch, else off the next step that is not full. Below the floor the run fails."""
    full = t.step is not None and len(t.step.groups) >= t.need
    version = group.target if group.target != NO_TARGET else t.version + full
    t.shrunk = t.shrunk.plus(version)
    t.news = True  # the remaining groups of the step may be complete already
    if (left := t.settings.groups - t.shrunk[version]) < t.settings.floor:
        end_with_error(t, f"groups left for the step of version {version}: {left}, below floor={t.settings.floor}")


# -- replicas and syncs ---------------------------------------------------------------------------------------------------


def on_joined(t: StreamTurn, event: Event) -> None:
    """Add a replica. It serves once the current version is published there."""
    if event.replica not in t.replicas:
        t.replicas = t.replicas.put(event.replica, ReplicaState())


def on_died(t: StreamTurn, event: Event) -> None:
    if event.replica in t.replicas:
        if t.settings.on_dead_replica == "stop":
            end_with_error(t, f"replica {event.replica} died{': ' + event.why if event.get('why') else ''}")
        t.count("dead_replicas")
        on_left(t, event)


def on_left(t: StreamTurn, event: Event) -> None:
    """Remove a replica. Its requests in flight are sent to others, with the same random numbers."""
    if event.replica not in t.replicas:
        return
    t.replicas = t.replicas.without(event.replica)
    for group in list(t.buffer.values()):
        for number, sample in enumerate(group.samples):
            if sample.in_flight and sample.replica == event.replica:
                give_up_attempt(t, t.buffer[group.id], number)


def hold(t: StreamTurn) -> None:
    """Hold dispatch until the current version is published."""
    t.held = t.sync_due = True
    t.note("hold", version=t.version)


def sync_if_due(t: StreamTurn) -> None:
    """Start the sync of the current version once the requests in flight allow it, or one for replicas that joined. One at a time.

    While the trainer finishes an update, its weights are not those of the current version; nor are they between two updates of a step.
    Limit: replicas must not join a loop with several updates per step.
    """
    if t.sync is not None or "generation" not in t.granted or (t.step is not None and t.step.finishing):
        return
    if t.sync_due:
        if t.settings.at_sync == "abort":
            cancel_all(t)
        if t.in_flight and t.settings.at_sync in ("abort", "drain"):
            return
        t.sync_due = False
        start_sync(t, tuple(t.replicas))
    elif behind := tuple(number for number, replica in t.replicas.items() if replica.version != t.version):
        start_sync(t, behind)


def start_sync(t: StreamTurn, replicas: tuple[int, ...]) -> None:
    if not replicas:  # none to publish to: a replica that joins later gets the current version
        resume_dispatch(t)
        return
    t.sync = Sync(t.version, replicas)
    t.note("sync_begin", version=t.version)
    t.do("sync", "sync", version=t.version, at_sync=t.settings.at_sync, replicas=tuple(replicas))


def on_published(t: StreamTurn, event: Event) -> None:
    if event.replica in t.replicas:
        t.replicas = t.replicas.put(event.replica, replace(t.replicas[event.replica], version=event.version))


def on_synced(t: StreamTurn, event: Event) -> None:
    if t.sync is None or event.version != t.sync.version:
        return
    t.sync = None
    if t.held and not t.sync_due:
        resume_dispatch(t)


def on_sync_error(t: StreamTurn, why: str) -> None:
    """A sync may fail because one of its replicas died. If the loop may continue without it, sync the others again."""
    if t.sync is None:
        return
    lost = [number for number in t.sync.replicas if number not in t.replicas]
    t.sync = None
    if not lost:
        end_with_error(t, f"the sync of version {t.version} failed: {why}")
    elif t.held:
        t.sync_due = True


def resume_dispatch(t: StreamTurn) -> None:
    """The current version is published: release the trainer's devices and continue dispatch."""
    t.held = False
    t.news = True
    t.note("resume", version=t.version)
    if "training" in t.granted:
        t.granted -= {"training"}
        t.do("release", "desk", kind="training")


# -- prompts --------------------------------------------------------------------------------------------------------------


def on_prompt(t: StreamTurn, event: Event) -> None:
    t.prompt_asked = False
    t.prompt = event.group


def on_exhausted(t: StreamTurn, _: Event) -> None:
    t.prompt_asked = False
    t.exhausted = True
