"""The ports "log" and "sampler". Both watch the ledger: the meter measures times, a foreign sampler tracks the buffer.

All time is attributed to one activity: the trainer's oldest unanswered command (training or log-probabilities), else a sync, else waiting
for generation (`exposed_generation`). `replicas_idle` is the replicas' mean time without a request.

A sampler with NeMo-RL's protocol is called through a port, so its answers are events and a replay needs no sampler. Its buffer has
`start_weight_list`, `target_step_list`, `ready_list`, `meta_list` and `remove(indices, remove_in_dp)`. Its coroutines run on a clock that
stops between two polls; a sleeping gate is polled again when the version or the buffer changes. Limits: `select` and `evict` must not
wait; the constructor takes the buffer and one of `WINDOWS`.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kit.errors import BadInput, KitError
from kit.loop.limit import returned
from kit.loop.messages import Command, Event, Sink
from kit.loop.runner import Port, made_by
from kit.results.records import Id, Row
from kit.stream.settings import NO_TARGET, Resume, StreamSettings, refuse_lacking

PARTS = ("training", "logprobs", "sync", "exposed_generation")
TRAINER = {"begin": "training", "microbatch": "training", "finish": "training", "logprobs": "logprobs"}


def replica_role(number: int) -> str:
    return f"replica {number}"


def replica_number(role: str) -> int:
    return int(role.rpartition(" ")[2])


class Meter:
    """`see` each row, then `take` the seconds since the last `take`."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._trainer: list[str] = []  # its commands without an answer, in order
        self._syncing = False
        self._where: dict[int, set[tuple[Id, Id]]] = {}  # requests by replica
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def see(self, row: Row) -> None:
        name, ids = row.event, row.ids
        passed = 0.0 if self._last is None else row.time - self._last
        self._last = row.time
        doing = TRAINER[self._trainer[0]] if self._trainer else "sync" if self._syncing else "exposed_generation"
        self._seconds[doing] += passed
        if self._where:
            idle = sum(not requests for requests in self._where.values())
            self._seconds["replicas_idle"] += passed * idle / len(self._where)
        is_event = "core" in ids
        if ids.get("to") == "trainer" and name in TRAINER:
            self._trainer.append(name)
        elif name == "sync_begin":
            self._syncing = True
        elif is_event and (name == "synced" or ids.get("of") == "sync"):
            self._syncing = False
        elif is_event and name in ("done", "error") and ids.get("of") in self._trainer:
            self._trainer.remove(str(ids["of"]))
        elif "to" in ids:
            pass  # on its way: a replica that the desk wakes is there once the pipeline's core has read `joined`
        elif name == "joined":
            self._where.setdefault(row.number("replica"), set())
        elif name in ("died", "left"):
            self._where.pop(row.number("replica"), None)
        elif name in ("sent", "completed", "failed", "cancelled") and "sample" in ids:
            for replica, requests in self._where.items():
                # An answer of another replica is a late one, of a replica that the sample has left.
                if name == "sent" or ids.get("replica", replica) == replica:
                    requests.discard((ids["group"], ids["sample"]))
            if name == "sent" and row.number("replica") in self._where:
                self._where[row.number("replica")].add((ids["group"], ids["sample"]))

    def take(self) -> dict[str, float]:
        seconds = {name: self._seconds[name] for name in (*PARTS, "replicas_idle")}
        self._seconds.clear()
        return {"total": sum(seconds[name] for name in PARTS), **seconds}


def spent(rows: Iterable[Row]) -> dict[str, float]:
    meter = Meter()
    for row in rows:
        meter.see(row)
    return meter.take()


class TrainerCall(NamedTuple):
    """A command to the trainer, and when it ran."""

    row: Row
    left: float
    right: float
    failed: bool


def calls(rows: Iterable[Row]) -> Iterator[TrainerCall]:
    """Yield the finished calls of the trainers of all pipelines. A trainer executes one at a time, in order. The only core of a loop may
    leave its pipeline out of its commands; the trainer's answers have it."""
    waiting: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
    free: dict[str, float] = {}
    for row in rows:
        of = str(row.get("of"))
        if row.get("to") == "trainer":
            waiting[row.who, row.event].append(row)
        elif row.event in ("done", "error") and (asked := waiting[row.who, of] or waiting["", of]):
            call = asked.pop(0)
            yield TrainerCall(call, max(free.get(row.who, call.time), call.time), row.time, row.event == "error")
            free[row.who] = row.time


def sync_spans(rows: Iterable[Row]) -> Iterator[tuple[float, float]]:
    began: dict[Id, float] = {}
    for row in rows:
        if row.event == "sync_begin":
            began[row["version"]] = row.time
        elif row.event == "synced" and row["version"] in began:
            yield began.pop(row["version"]), row.time


def covered(spans: Iterable[tuple[float, float]], since: float = -math.inf, until: float = math.inf) -> float:
    """The seconds between two moments that these spans cover, which may overlap."""
    seconds, reached = 0.0, since
    for left, right in sorted(spans):
        seconds += max(0.0, min(right, until) - max(left, reached))
        reached = max(reached, min(right, until))
    return seconds


class Watcher(Protocol):
    def see(self, row: Row) -> None: ...


class Watched:
    def __init__(self, ledger: Sink, *watchers: Watcher) -> None:
        self.ledger = ledger
        self.watchers = [*watchers]

    def write(self, row: Row) -> None:
        self.ledger.write(row)
        for watcher in self.watchers:
            watcher.see(row)

    def flush(self) -> None:
        self.ledger.flush()


class StepLog(Port):
    """The port "log": sends a step's counts and times, with prefixes, to a logger under the version after the step, and to the ledger."""

    def __init__(self, meter: Meter, logger: Callable[[dict[str, float], int], object]) -> None:
        self.meter = meter
        self.logger = logger

    def send(self, command: Command) -> Iterable[Event]:
        seconds = self.meter.take()
        names = [name for name, _ in command.ids if name not in ("step", "version")]
        values = {f"train/{name}": number_of(command, name) for name in names}
        values |= {f"timing/{name}": value for name, value in seconds.items()}
        ids: dict[str, Id] = {name: command[name] for name in ("step", "version", "update")}
        ids |= {f"s_{name}": repr(value) for name, value in seconds.items()}
        try:
            self.logger(values, command.version)
        except Exception as error:  # noqa: BLE001 - a logger never ends training
            return [Event("logger_failed", command.pipeline, **ids, why=f"{type(error).__name__}: {error}")]
        return [Event("logged", command.pipeline, **ids)]


def number_of(command: Command, name: str) -> float:
    try:
        return float(command[name])
    except (TypeError, ValueError):
        raise BadInput(f"{name}={command[name]!r} is no number, and a logger takes only numbers") from None


def drifted(differences: Sequence[float]) -> dict[str, float]:
    """Return the drift of tokens; `differences` are the trainer's log-probability minus the engine's for each token.

    `drift_ratio` is the mean importance weight, `drift_kl` the non-negative estimate of KL(engine, trainer).
    """
    count = len(differences)
    ratios = [math.exp(min(difference, 700.0)) for difference in differences]
    return {
        "drift_mean": math.fsum(differences) / count,
        "drift_mismatch": math.fsum(map(abs, differences)) / count,
        "drift_ratio": math.fsum(ratios) / count,
        "drift_kl": math.fsum(ratio - 1 - difference for ratio, difference in zip(ratios, differences, strict=True))
        / count,
    }


# What a sampler's author states of it: what it gives groups up by besides age, and `limits = "start"` if old groups may train.
STATED = ("evicts_by", "limits")
WINDOWS = ("max_staleness_versions", "max_lookahead_versions", "window")
TICK_S = 1.0  # how far each poll advances the sampler's clock
POLLS = 8
GONE = ("selected", "evicted", "aborted", "failed", "dropped", "replaced")


@dataclass(frozen=True, slots=True)
class Meta:
    """Represents a group's rows. `concat` joins several, as a selection does."""

    groups: tuple[int, ...]

    def concat(self, *more: Meta) -> Meta:
        return Meta(tuple(group for meta in (self, *more) for group in meta.groups))


@dataclass(slots=True)
class BufferSlot:
    group: int
    start: int
    target: int | None
    ready: bool = False


class Buffer:
    """The controller's buffer as a sampler sees it: one entry per group, in order of reservation."""

    def __init__(self) -> None:
        self.slots: list[BufferSlot] = []
        self.evicted: list[int] = []
        self._known: dict[Any, BufferSlot] = {}

    start_weight_list = property(lambda self: [slot.start for slot in self.slots])
    target_step_list = property(lambda self: [slot.target for slot in self.slots])
    ready_list = property(lambda self: [slot.ready for slot in self.slots])
    meta_list = property(lambda self: [Meta((slot.group,)) for slot in self.slots])

    def __len__(self) -> int:
        return len(self.slots)

    async def remove(self, indices: Sequence[int], remove_in_dp: bool) -> int:
        """Remove groups: for training, or with `remove_in_dp` because they are too old."""
        gone = {range(len(self.slots))[index] for index in indices}  # an index that does not exist raises
        if remove_in_dp:
            self.evicted += [slot.group for place, slot in enumerate(self.slots) if place in gone]
        self.slots = [slot for place, slot in enumerate(self.slots) if place not in gone]
        return len(gone)

    def follow(self, row: Row) -> None:
        """Apply a row of the ledger. A group of a step that was given up returns to its place."""
        group = row.get("group")
        if "core" in row.ids or (row.event != "reserved" and group not in self._known):
            return
        if row.event == "reserved":
            target = row.get("target")
            slot = BufferSlot(row.number("group"), row.number("version"), None if target is None else int(target))
            self._known[group] = slot
            self.slots.append(slot)
        elif row.event == "ready":
            self._known[group].ready = True
        elif row.event in ("place", "unselected"):
            self.slots = sorted([*self.slots, self._known[group]], key=lambda slot: slot.group)
        elif row.event in GONE:
            self.slots = [slot for slot in self.slots if slot.group != group]
        elif row.event == "cleared":
            del self._known[group]


class Foreign:
    """The port "sampler". It also watches the ledger (`see`) to keep its buffer and version up to date."""

    def __init__(
        self, kind: Any, settings: StreamSettings, *, pipeline: str = "", resume: Resume | None = None
    ) -> None:
        refuse_lacking(kind, settings.sampler)
        self.buffer = Buffer()
        known = inspect.signature(kind).parameters
        window = {name: settings.window for name in WINDOWS if name in known}
        self.sampler = made_by(kind, settings.sampler, self.buffer, **window)
        needed = made_by(self.sampler.required_buffer_capacity, settings.sampler, settings.groups)
        if needed is not None and settings.places < needed:
            raise BadInput(f"places={settings.places} is too few: the sampler {settings.sampler} needs {needed}")
        stated = {name: getattr(self.sampler, name, "") for name in STATED}
        self.declared: dict[str, Id] = {name: str(value) for name, value in stated.items() if value}
        self.pipeline = pipeline
        self.version = 0 if resume is None else resume.version
        self.sampler.set_dispatch_index(self.version)
        self._loop = PolledLoop()
        self._admission: asyncio.Task[int | None] | None = None
        self._changed = True

    def see(self, row: Row) -> None:
        there = len(self.buffer)
        self.buffer.follow(row)
        if row.event == "bumped":
            self.version = row.number("version")
        self._changed |= row.event == "bumped" or len(self.buffer) < there

    def send(self, command: Command) -> Iterable[Event]:
        if command.name == "admit":
            self._admission = self._loop.create_task(self.sampler.admit(trainer_version_fn=lambda: self.version))
            self._changed = True
            return ()
        return [returned(lambda: self._chosen(command), lambda: "the sampler")]

    def take(self) -> Iterable[Event]:
        if self._admission is None or not self._changed:
            return ()
        self._changed = False
        admission = self._admission
        if not returned(lambda: self._loop.poll(admission), lambda: "the sampler"):
            return ()
        self._admission = None
        target = admission.result()
        return [Event("admitted", self.pipeline, target=NO_TARGET if target is None else target)]

    def close(self) -> None:
        if self._admission is not None:
            self._admission.cancel()
            self._loop.poll(self._admission)
        self._loop.close()

    def _chosen(self, command: Command) -> Event:
        """Evict, then abort, then select, as a train pump does. An admission may wait for the room that these make."""
        now, there = command.version, len(self.buffer)
        self._at_once(self.sampler.evict(current_train_weight=now))
        evicted, self.buffer.evicted = self.buffer.evicted, []
        aborted = [
            slot.group
            for slot in self.buffer.slots
            if not slot.ready
            and self.sampler.should_abort_inflight(start_weight_version=slot.start, current_train_weight=now)
        ]
        meta, _ = self._at_once(
            self.sampler.select(
                current_train_weight=now, min_prompt_groups=command.least, max_prompt_groups=command.most
            )
        )
        self._changed |= len(self.buffer) < there
        groups = () if meta is None else tuple(meta.groups)
        if gone := [group for group in self.buffer.evicted if group in groups]:
            raise KitError(
                f"the sampler's select returned group {gone[0]} and removed its rows; what it returns needs remove_in_dp=False"
            )
        if kept := [slot.group for slot in self.buffer.slots if slot.group in groups]:
            raise KitError(
                f"the sampler's select returned group {kept[0]} and left it in the buffer; remove what it returns"
            )
        return Event(
            "chosen",
            self.pipeline,
            groups=groups,
            evicted=tuple(evicted),
            aborted=tuple(aborted),
            **self.declared,
        )

    def _at_once(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        task = self._loop.create_task(coroutine)
        if not self._loop.poll(task, tick_s=0.0):
            task.cancel()
            self._loop.poll(task)
            raise KitError("the sampler's select or evict waits; both must answer at once from the buffer")
        return task.result()


class PolledLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock that moves only when polled, so nothing ever sleeps."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__()

    def time(self) -> float:
        return self._now

    def poll(self, task: asyncio.Task[Any], *, tick_s: float = TICK_S) -> bool:
        """Whether the task is done after some turns of the loop; its clock moves by `tick_s` with each."""
        for _ in range(POLLS):
            if task.done():
                break
            self._now += tick_s
            self.call_soon(self.stop)
            self.run_forever()
        return task.done()
