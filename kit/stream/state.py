"""The controller's state: frozen, hashable, without a clock. A turn is a copy of it that the rules write on, and their commands."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from kit.loop.messages import NOTES, Command, Frozen, Id, Map
from kit.stream.settings import NO_TARGET, Sampler, Settings, View

WAITING, RUNNING, CANCELLING, DONE = "waiting", "running", "cancelling", "done"
UNPUBLISHED = -1


@dataclass(frozen=True, slots=True)
class Sample:
    """`tokens` are those of this attempt so far. One that is waiting has no replica yet."""

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
    """`version` is the current one when it was reserved, `order` counts complete groups (-1: unfinished).

    `ends` is how an unfinished group will end, once nothing of it is in flight: (end, why).
    """

    id: int
    version: int
    target: int
    samples: tuple[Sample, ...]
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
        """The group with one sample changed."""
        samples = list(self.samples)
        samples[number] = replace(samples[number], **changes)
        return replace(self, samples=tuple(samples))


@dataclass(frozen=True, slots=True)
class Step:
    """An open step: of its groups, in the order of selection, the first `scored` have log-probabilities, the first `fed` went to the
    trainer, the first `finished` are in the weights.

    `chunks` are the ends of what was selected at once, `begun` whether the current update has a begin, `unanswered` how many of its
    commands (begin, microbatch) have no answer yet, `unrun` the groups of chunks without a valid token.
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
        """The end of the chunk that holds the group at `start`."""
        return next(end for end in self.chunks if end > start)

    @property
    def on_the_trainer(self) -> bool:
        """Whether the trainer may hold something of this step, so that only an abort closes it."""
        return self.begun or self.unanswered > 0 or bool(self.scoring)


@dataclass(frozen=True, slots=True)
class Replica:
    """`version` is the one that was published there; `load` its requests in flight."""

    version: int = UNPUBLISHED
    load: int = 0


@dataclass(frozen=True, slots=True)
class Sync:
    """A sync under way: of the current version after a step, or only for replicas that joined."""

    version: int
    replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Owed:
    """A place in a batch that has passed the gate and lost its group. `replaces`: the group that ends when another takes its place."""

    target: int
    replaces: Group | None = None


@dataclass(slots=True)
class Fields:
    """Everything that the controller knows. A place is an entry of `buffer`, a slot an unfinished one: no permit is counted apart."""

    version: int = 0
    updates: int = 0
    last: int = 0  # the version at which the run ends
    steps: int = 0  # ids of steps that were opened
    index: int = -1
    position: int = 0
    completed: int = 0  # groups, all samples of which completed
    accepted: int = 0  # the same without those that were filtered out
    failed_in_a_row: int = 0  # groups that failed since the last one that completed
    unfinished: int = 0
    in_flight: int = 0
    buffer: Map = field(default_factory=Map)  # Group by id, in order of id
    waiting: tuple[tuple[int, int], ...] = ()  # samples without a replica: (group, sample)
    owed: tuple[Owed, ...] = ()
    shrunk: Map = field(default_factory=Map)  # groups that a version's step does without
    news: bool = False  # a selection may have become possible
    updates_at: Map = field(default_factory=Map)  # `updates` by version
    step: Step | None = None
    clearing: Map = field(default_factory=Map)  # rows that are being cleared: groups by (step, update)
    replicas: Map = field(default_factory=Map)  # Replica by number
    prompt: int = -1  # a prompt at hand
    prompt_asked: bool = False
    exhausted: bool = False
    held: bool = True  # dispatch waits for the current version
    sync_due: bool = True
    sync: Sync | None = None
    admitted: tuple[int, ...] = ()  # a foreign sampler's admission at hand: its target
    foreign_target: int = NO_TARGET  # the target of the batch that it admitted last
    asked: frozenset[str] = frozenset()  # what was asked of the desk or of a foreign sampler, and not answered yet
    granted: frozenset[str] = frozenset()
    retried: int = 0
    progress: int = -1
    ending: str = ""
    error: str = ""
    closed: bool = False
    counts: Map = field(default_factory=Map)


NAMES = tuple(Fields.__dataclass_fields__)


class State(Frozen, Fields):
    """The fields, frozen."""

    __slots__ = ()


class Turn(Fields):
    """One event under way: the fields to write on, and the commands so far."""

    __slots__ = ("commands", "pipeline", "sampler", "settings")

    def __init__(self, fields: Fields, settings: Settings, sampler: Sampler | None, pipeline: str) -> None:
        for name in NAMES:
            setattr(self, name, getattr(fields, name))
        self.settings = settings
        self.sampler = sampler
        self.pipeline = pipeline
        self.commands: list[Command] = []

    def do(self, name: str, to: str, **ids: Id) -> None:
        self.commands.append(Command(name, to, self.pipeline, **ids))

    def note(self, name: str, **ids: Id) -> None:
        """A row of the ledger."""
        self.commands.append(Command(name, NOTES, self.pipeline, **ids))

    def count(self, name: str, amount: int = 1) -> None:
        self.counts = self.counts.plus(name, amount)

    def view(self) -> View:
        return View(
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
        """Groups of the step of this version."""
        return self.settings.groups - int(self.shrunk.get(self.version, 0))

    def put(self, group: Group) -> None:
        self.buffer = self.buffer.put(group.id, group)


def about(target: int) -> dict[str, Id]:
    """The id `target`, absent where there is none."""
    return {} if target == NO_TARGET else {"target": target}
