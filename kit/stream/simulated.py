"""A whole system on a virtual clock: data, replicas, trainer, sync, desk. Used for bounds, property tests, forecasts and ledger faults.

A replica is single-threaded: it decodes up to `span` tokens of each request, then handles its orders; `batch` requests decode in the time
of one. The trainer takes one command at a time, in order. Durations are fixed per command; lengths depend on group and sample.

A forecast uses the durations from the ledger of a run, with another sampler or window. Lengths that the run did not generate are drawn
from those that it did. Limits: durations are medians (the trainer's per group), a replica's requests share its time, and a replica's
work between two calls takes no time.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Protocol

from kit.errors import BadInput
from kit.loop.messages import Command, Event, Memory, Sink
from kit.loop.runner import A_SECOND, Answers, Core, Runner, Simulated, VirtualClock
from kit.results.records import Id, Row, numbers
from kit.stream.core import TRAINERS, Controller
from kit.stream.ports import calls, spent, sync_spans
from kit.stream.settings import Resume, StreamSettings, read_settings, refusals
from kit.stream.sides import Logger, LoopSide, run_loop

REHEARSED = "a failure that is rehearsed"
OF_A_STEP = ("begin", "microbatch", "finish")  # after an error in one of them the trainer accepts only `abort`
PER_GROUP = ("microbatch", "logprobs")  # commands that take longer with more groups
ADDRESSES = ("data", "replica", "trainer", "sync", "desk", "asker")


def drawn_length(low: int, high: int, seed: int = 0) -> Callable[[int, int], int]:
    """Lengths that depend only on seed, group and sample."""
    return lambda group, sample: random.Random(f"{seed} {group} {sample}").randint(low, high)  # noqa: S311


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds, except for `span` (tokens) and `batch` (requests). `train_s` and `logprobs_s` are per group."""

    prompt_s: float = 0.0
    token_s: float = 0.01
    span: int = 8
    batch: int = 1
    begin_s: float = 0.0
    train_s: float = 0.1
    logprobs_s: float = 0.0
    finish_s: float = 0.02
    clear_s: float = 0.0
    sync_s: float = 0.05
    length: Callable[[int, int], int] = field(default_factory=lambda: drawn_length(8, 32))
    tools: Callable[[int, int], Mapping[int, float]] = lambda *_: {}  # seconds of each call, by the tokens before it
    reward: Callable[[int, int], str] = lambda _, sample: str(sample % 2)  # it varies within every group

    def of_trainer(self, command: Command) -> float:
        if command.name in PER_GROUP:
            return (self.train_s if command.name == "microbatch" else self.logprobs_s) * len(numbers(command.groups))
        return {"begin": self.begin_s, "finish": self.finish_s, "clear": self.clear_s}.get(command.name, 0.0)


class Paced(Protocol):
    """A config with the pace of its ranks, and the lengths of its answers."""

    @property
    def seed(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def answer(self) -> tuple[int, ...]: ...
    @property
    def tail(self) -> bool: ...
    @property
    def decode(self) -> int: ...
    @property
    def pace_ms(self) -> float: ...
    @property
    def train_pace_ms(self) -> float: ...
    def drawn_length(self, group: int, sample: int) -> int: ...
    def tool_calls(self, group: int, sample: int) -> Mapping[int, float]: ...


def durations(config: Paced) -> Durations:
    """Durations of tokens and samples at the config's pace; without a pace, training takes about as long as generation."""
    paces = {"token_s": config.pace_ms / 1000, "train_s": config.train_pace_ms * config.group / 1000}
    own_paces: dict[str, Any] = {name: seconds for name, seconds in paces.items() if seconds}
    low, high = config.answer
    length = config.drawn_length if config.tail else drawn_length(low, high, config.seed)
    return Durations(length=length, tools=config.tool_calls, span=config.decode, **own_paces)


@dataclass(slots=True)
class SimulatedRequest:
    group: int
    sample: int
    length: int
    tools: Mapping[int, float]
    done: int = 0
    ready: float = 0.0  # when its last tool call is answered
    oldest: int = -1
    newest: int = -1


class SimulatedReplica:
    def __init__(self, number: int, system: System) -> None:
        self.number = number
        self.system = system
        self.version = -1
        self.requests: dict[tuple[int, int], SimulatedRequest] = {}
        self.orders: list[Callable[[], float | None]] = []
        self.busy = self.gone = False

    def order(self, act: Callable[[], float | None]) -> None:
        """Run `what` between two turns; it may return the seconds that it takes."""
        self.orders.append(act)
        if not self.busy and not self.gone:
            self.busy = True
            self.turn()

    def turn(self) -> None:
        if self.gone:
            return
        durations = self.system.durations
        self.busy = bool(self.orders or self.requests)
        if self.orders:
            self.system.clock.after(self.orders.pop(0)() or 0.0, self.turn)
        elif tokens := self.next_tokens():
            seconds = sum(tokens.values()) * durations.token_s / min(len(tokens), durations.batch)
            self.system.clock.after(seconds, lambda: self.decoded(tokens))

    def next_tokens(self) -> dict[tuple[int, int], int]:
        """How many tokens each request gets next. If all wait for tools, the replica is idle until the first is answered."""
        now, span = self.system.clock.now(), self.system.durations.span
        tokens = {
            key: min(
                span,
                request.length - request.done,
                *(stop - request.done for stop in request.tools if stop > request.done),
            )
            for key, request in self.requests.items()
            if request.ready <= now
        }
        if self.requests and not tokens:
            self.busy = False
            first = min(request.ready for request in self.requests.values())
            self.system.clock.after(first - now, lambda: self.order(lambda: None))
        return tokens

    def decoded(self, tokens: Mapping[tuple[int, int], int]) -> None:
        for key, count in tokens.items() if not self.gone else ():
            request = self.requests[key]
            ids = {"group": request.group, "sample": request.sample, "replica": self.number, "version": self.version}
            if request.oldest < 0:
                request.oldest = self.version
                self.system.say("started", **ids)
            request.newest = self.version
            if count:
                self.system.say("tokens", **ids, first=request.done, count=count)
                request.done += count
            if request.done in request.tools:
                seconds = request.tools[request.done]
                request.ready = self.system.clock.now() + seconds
                called = {name: ids[name] for name in ("group", "sample", "replica")}
                self.system.say("tool_called", **called, ms=round(1000 * seconds))
            if request.done == request.length:
                del self.requests[key]
                ids |= {"version": request.oldest, "newest": request.newest, "length": request.length}
                reward = self.system.durations.reward(request.group, request.sample)
                self.system.say("completed", **ids, digest=f"{request.group}/{request.sample}", reward=reward)
        self.turn()

    def generate(self, command: Command) -> None:
        if command.group in self.system.failing:
            self.system.failing.discard(command.group)
            ids = {"group": command.group, "sample": command.sample, "replica": self.number}
            self.system.say("failed", **ids, why=REHEARSED)
            return
        key = command.group, command.sample
        length, tools = self.system.durations.length(*key), self.system.durations.tools(*key)
        self.requests[key] = SimulatedRequest(*key, length, tools)

    def cancel(self, command: Command) -> None:
        if self.requests.pop((command.group, command.sample), None) is not None:
            self.system.say("cancelled", group=command.group, sample=command.sample, replica=self.number)

    def publish(self, version: int, left: set[int]) -> float:
        """Load new weights, used from the next token on. The last replica of a sync completes it."""

        def published() -> None:
            self.version = version
            self.system.say("published", version=version, replica=self.number)
            left.discard(self.number)
            self.system.sync_over(version, left)

        self.orders.insert(0, published)
        return self.system.durations.sync_s


class System(Simulated):
    """Every port of one pipeline. `prompts` None: the data never ends. A resumed run gets the groups `again`, then those from `first`.

    `fails` maps a command to the step at which the trainer answers it with an error, once; `generate` to a group, or to groups, of each of
    which a request fails; `sync` to a version that is not sent.
    """

    def __init__(
        self,
        clock: VirtualClock,
        durations: Durations,
        *,
        replicas: int,
        pipeline: str = "",
        prompts: int | None = None,
        first: int = 0,
        again: Sequence[int] = (),
        fail_at: Mapping[int, str] | None = None,
        fails: Mapping[str, int | Sequence[int]] | None = None,
    ) -> None:
        answers: dict[str, Callable[[Command], Answers]] = {
            **dict.fromkeys(TRAINERS, self.trainer),
            **dict.fromkeys(("generate", "cancel"), self.request),
            **dict.fromkeys(("release", "progress", "answer", "discard"), lambda _: ()),
            "acquire": lambda command: [(0.0, Event("granted", command.pipeline, kind=command.kind))],
            "next_prompt": self.prompt,
            "sync": self.sync,
        }
        super().__init__(clock, answers, fail_at=fail_at)
        self.durations = durations
        self.pipeline = pipeline
        self.replicas = {number: SimulatedReplica(number, self) for number in range(replicas)}
        self.prompts = itertools.chain(again, range(first, prompts) if prompts is not None else itertools.count(first))
        self.fails = dict(fails or {})
        failing = self.fails.pop("generate", ())
        self.failing = {failing} if isinstance(failing, int) else {*failing}
        self.trainer_free = 0.0
        self.broken: dict[str, str] = {}  # by pipeline: why its open step can only be aborted
        self.weights_move = (0.0, 0.0)  # start and end of the trainer's last finish
        self.syncing: set[int] = set()  # replicas that the current sync has not reached
        self.sync_version = -1

    def say(self, name: str, **ids: Id) -> None:
        self.arrived.append(self.event(name, **ids))

    def event(self, name: str, **ids: Id) -> Event:
        return Event(name, self.pipeline, **ids)

    def prompt(self, _: Command) -> Answers:
        group = next(self.prompts, None)
        yield self.durations.prompt_s, self.event("exhausted") if group is None else self.event("prompt", group=group)

    def request(self, command: Command) -> Answers:
        replica = self.replicas[command.replica]
        replica.order(lambda: getattr(replica, command.name)(command))
        return ()

    def trainer(self, command: Command) -> Answers:
        """One call at a time, in order. After an error in a step's calls, only `abort` is allowed, as on a real trainer."""
        ids = {**dict(command.ids), "of": command.name}
        now = self.clock.now()
        begins = max(now, self.trainer_free)
        if command.name == "abort":
            self.broken.pop(command.pipeline, None)
        why = self.broken.get(command.pipeline, "") if command.name in OF_A_STEP else ""
        if self.fails.get(command.name) == command.step:
            del self.fails[command.name]
            why = REHEARSED
            if command.name in OF_A_STEP:
                self.broken[command.pipeline] = f"step {command.step} failed in {command.name} and is not aborted"
        if why:
            yield begins - now, Event("error", command.pipeline, **ids, why=why)
            return
        self.trainer_free = begins + self.durations.of_trainer(command)
        if command.name == "finish":
            self.weights_move = begins, self.trainer_free
        yield self.trainer_free - now, Event("done", command.pipeline, **ids)

    def sync(self, command: Command) -> Answers:
        """Send a version to replicas. Fails while the trainer finishes an update: once it can send, its weights are a later version."""
        begun, over = self.weights_move
        why = ""
        if begun <= self.clock.now() < over:
            why = f"cannot send version {command.version}: the trainer is at a later one"
        elif self.fails.get("sync") == command.version:
            del self.fails["sync"]
            why = REHEARSED
        if why:
            self.say("error", **{**dict(command.ids), "of": "sync", "why": why})
            return ()
        left = {number for number in numbers(command.replicas) if not self.replicas[number].gone}
        self.syncing, self.sync_version = left, command.version
        self.sync_over(command.version, left)
        for replica in [self.replicas[number] for number in sorted(left)]:
            replica.order(lambda replica=replica: replica.publish(command.version, left))  # type: ignore[misc]
        return ()

    def sync_over(self, version: int, left: set[int]) -> None:
        if not left:
            self.say("synced", version=version)

    def add(self, number: int) -> None:
        self.replicas[number] = SimulatedReplica(number, self)

    def remove(self, number: int) -> None:
        """Remove a replica. A sync in progress continues without it."""
        self.replicas[number].gone = True
        if number in self.syncing:
            self.syncing.discard(number)
            self.sync_over(self.sync_version, self.syncing)

    def schedule(self, event: str, number: int, at: float) -> None:
        def happens() -> None:
            self.say(event, replica=number)
            (self.add if event == "joined" else self.remove)(number)

        self.clock.after(at, happens)


@dataclass(frozen=True, slots=True)
class Simulation:
    """A simulated run: its ledger, how it ended, what was logged per optimizer step, and the runner."""

    rows: Memory
    ended: Command
    logged: list[dict[str, float]]
    runner: Runner

    @property
    def seconds(self) -> float:
        return self.rows[-1].time


def simulated_side(
    settings: StreamSettings,
    durations: Durations | None = None,
    *,
    ledger: Sink,
    prompts: int | None = None,
    resume: Resume | None = None,
    prepare: Callable[[System], None] = lambda _: None,
    pipeline: str = "",
    a_second: int = A_SECOND,
    **failures: Any,
) -> LoopSide:
    """All ports of one pipeline on its own clock. `failures` are `fail_at` and `fails` of the system; `prepare` may schedule deaths
    and joins."""
    clock = VirtualClock()
    options: dict[str, Any] = {} if resume is None else {"first": resume.next, "again": resume.open}
    about: dict[str, Any] = {"replicas": settings.replicas, "pipeline": pipeline, "prompts": prompts}
    system = System(clock, durations or Durations(), **about, **options, **failures)
    prepare(system)
    return LoopSide(
        clock=clock, ports=dict.fromkeys(ADDRESSES, system), ledger=ledger, deadline_s=1e6, a_second=a_second
    )


def simulate(
    settings: StreamSettings,
    durations: Durations | None = None,
    *,
    core: Core[Any] | None = None,
    resume: Resume | None = None,
    sampler: Any = None,
    logger: Logger | None = None,
    rows: Memory | None = None,
    **options: Any,
) -> Simulation:
    """Run a controller against the simulated system. `options` are those of `simulated_side`; `core` replaces our controller; `sampler` is
    a class with NeMo-RL's protocol. `rows` is the ledger to write; it is kept even if the run breaks."""
    rows, logged = Memory() if rows is None else rows, list[dict[str, float]]()
    side = simulated_side(settings, durations, ledger=rows, resume=resume, **options)
    pipeline = options.get("pipeline", "")
    runner = run_loop(
        core or Controller(settings, pipeline=pipeline, resume=resume),
        settings,
        side,
        pipeline=pipeline,
        start=resume,
        sampler=sampler,
        logger=logger or (lambda values, version: logged.append({"version": version, **values})),
    )
    return Simulation(rows, runner.ended[pipeline], logged, runner)


def forecast(rows: Iterable[Row], **changes: Any) -> Simulation:
    """Simulate the run of a ledger with changed settings, such as `sampler` and `window`. Places grow as the sampler requires."""
    known = list(rows)
    settings = read_settings(next((row.ids for row in known if row.event == "capacity"), {}))
    changed = replace(settings, **changes)
    if changes and "places" not in changes:
        places = max(changed.places, changed.groups * (changed.window + 1))
        changed = replace(changed, places=places, slots=places if settings.slots == settings.places else changed.slots)
    if refused := refusals(changed):
        raise BadInput("; ".join(refused))
    return simulate(changed, measured(known))


def pace(rows: Sequence[Row]) -> dict[str, float]:
    """Return the steps per second of a loop, and the seconds spent only waiting for samples."""
    seconds, steps = spent(rows), sum(row.event == "bumped" for row in rows)
    return {
        "steps_per_second": steps / seconds["total"] if seconds["total"] else 0.0,
        "exposed_generation": seconds["exposed_generation"],
    }


def measured(rows: Sequence[Row]) -> Durations:
    """Return the durations in a ledger, which needs at least one completed sample and one finished update."""
    completed = {sample_of(row): row for row in rows if row.event == "completed" and "core" in row.ids}
    taken: defaultdict[str, list[float]] = defaultdict(list)
    for call in calls(rows):
        if not call.failed:
            groups = len(call.row.numbers("groups")) if call.row.event in PER_GROUP else 1
            taken[call.row.event].append((call.right - call.left) / max(1, groups))
    if not completed or not taken["finish"]:
        raise BadInput(
            "the ledger has no completed sample or no finished update; a forecast needs the durations of one step"
        )
    lengths = {sample: row.number("length") for sample, row in completed.items()}
    drawn = sorted(lengths.values())
    token_s, span = _decoding(rows)
    middle = {name: median(taken[name] or [0.0]) for name in ("begin", "microbatch", "logprobs", "finish", "clear")}
    return Durations(
        token_s=token_s,
        span=span,
        begin_s=middle["begin"],
        train_s=middle["microbatch"],
        logprobs_s=middle["logprobs"],
        finish_s=middle["finish"],
        clear_s=middle["clear"],
        sync_s=median([right - left for left, right in sync_spans(rows)] or [0.0]),
        length=lambda *sample: lengths.get(sample) or random.Random("{} {}".format(*sample)).choice(drawn),  # noqa: S311
        reward=lambda *sample: str(completed[sample]["reward"] if sample in completed else sample[1] % 2),
    )


def sample_of(row: Row) -> tuple[int, int]:
    return row.number("group"), row.number("sample")


def _decoding(rows: Sequence[Row]) -> tuple[float, int]:
    """Return seconds per token while a replica is busy, with any number of requests, and tokens per call."""
    last: dict[Any, float] = {}
    load: Counter[Any] = Counter()
    where: dict[tuple[int, int], Any] = {}
    busy, tokens, span = 0.0, 0, 1
    for row in rows:
        replica = row.get("replica")
        if row.event == "sent":
            where[sample_of(row)] = replica
            if not load[replica]:  # it was idle until now
                last[replica] = row.time
            load[replica] += 1
        elif row.event == "published":
            last[replica] = row.time  # the time of a sync is not decoding time
        elif row.event == "tokens":
            busy += row.time - last.get(replica, row.time)
            last[replica] = row.time
            tokens += row.number("count")
            span = max(span, row.number("count"))
        elif row.event in ("completed", "cancelled", "failed") and "sample" in row.ids:
            load[where.pop(sample_of(row), None)] -= 1
    return busy / max(1, tokens), span
