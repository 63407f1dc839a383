"""The driven phases of the lab `stream`, on live and simulated ranks, and the controller's ports. Notebook side.

Three loops start from the same base weights, over the same ranks. `plain` has no controller: it generates all samples of a step, then
trains them in order of their groups. `lockstep` runs the same work under the controller with staleness 0; `stream` runs the config.

On live ranks, orders become calls in flight and answers become events. A replica has one call at a time: it takes its new orders, decodes
a few tokens of every request, and reports the results. So aborts and syncs happen between two calls, never within one. The trainer also
has one call at a time; its orders wait in a queue. A sync starts once the trainer and all live and awake
replicas are idle; until it ends, none of them gets another call.

`simulated_stream` and `simulated_resume` run the controller on a virtual clock, within milliseconds. Every ledger check applies as on live
ranks; nothing is generated or trained, so nothing is recomputed. The trainer fails one microbatch, in the step of version 1, so every
simulated run has an aborted step; that step is retried once. The logger raises.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kit.errors import KitError, RankDied, RankTimeout
from kit.labs.lab import Drive
from kit.labs.stream.lab import StreamConfig, replica_names, settings
from kit.loop.messages import Command, Event, Memory
from kit.loop.runner import Core, Port, RealClock, Runner, Stalled
from kit.results import Run
from kit.results.frames import events_of
from kit.results.records import Id, Row, numbers
from kit.stream import core, simulated
from kit.stream.core import Controller
from kit.stream.ports import Foreign, Log, Meter, Watched
from kit.stream.settings import Resume, StreamSettings, opening
from kit.stream.simulated import Durations, drawn_length
from kit.target import load_callable
from kit.world.calls import Pending

Ended = Callable[[Pending], Iterable[Event]]

TRAINER = "trainer"
STUCK_S = 1.0  # longest time without a call in flight
PATIENCE = 0.1  # share of the deadline in which a trainer should notice that a replica of its sync died


class Ranks(Port):
    """All ranks of a run, and what they are doing: the ports "trainer", "replica" and "sync"."""

    def __init__(self, drive: Drive, replicas: Iterable[str], *, pipeline: str = "") -> None:
        self.drive = drive
        self.pipeline = pipeline
        self.orders: dict[str, list[dict[str, Any]]] = {name: [] for name in replicas}  # by live replica
        self.active: dict[str, set[tuple[int, int]]] = {name: set() for name in self.orders}  # requests being decoded
        self.queue: deque[Command] = deque()  # commands for the trainer
        self.syncs: deque[Command] = deque()
        self.busy: dict[str, Pending] = {}  # by role
        self.flying: dict[int, tuple[Pending, str, Ended]] = {}
        self.arrived: list[Event] = []
        # the trainer's sync with a dead replica, and its deadline
        self.in_vain: tuple[float, Pending] | None = None
        self.heard = time.monotonic()  # when a call was last in flight
        self.stuck: RankTimeout | None = None  # a call past the run's deadline; its ranks can take no further calls

    # -- what the runner asks -------------------------------------------------------------------------------------------

    def wait(self, seconds: float) -> None:
        """Wait until a call ends. For the runner's clock: `RealClock(ranks.wait)`."""
        self.start()
        if self.flying:
            self.heard = time.monotonic()
        if self.arrived:
            return
        if self.flying:
            self.drive.wait([pending for pending, _, _ in self.flying.values()], timeout_s=self.patient(seconds))
        elif time.monotonic() - self.heard > STUCK_S:
            raise Stalled("the controller waits for an answer, but no call is in flight", ())
        else:
            time.sleep(min(seconds, STUCK_S / 10))

    def send(self, command: Command) -> Iterable[Event]:
        """Orders wait for the next call. A dead replica answers nothing; its death was an event."""
        if command.name in ("generate", "cancel"):
            self.orders.get(name_of(command.replica), []).append({"order": command.name, **dict(command.ids)})
        else:
            (self.syncs if command.name == "sync" else self.queue).append(command)
        return ()

    def take(self) -> list[Event]:
        """The new events. Idle ranks get their next call only after the controller has handled all of them, because each event may bring
        orders and an order that comes after a call began waits for its end."""
        if self.in_vain is not None and self.in_vain[0] <= time.monotonic():
            # A trainer of one rank may wait for a replica that died before it called. It notifies the other replicas, and the sync is
            # then tried with them. Limit: several ranks are not interrupted, because some wait in a collective.
            self.in_vain[1].cancel()
            self.in_vain = None
        for number, (pending, role, ended) in [*self.flying.items()]:
            if pending.done():
                del self.flying[number]
                self.busy.pop(role, None)
                try:
                    self.arrived += ended(pending)
                except RankTimeout as error:
                    self.stuck = error
                    raise
        arrived, self.arrived = self.arrived, []
        return arrived

    def start(self) -> None:
        """Give every idle role its next call; a sync that waits comes first."""
        if self.syncs:
            if self.busy.keys().isdisjoint((TRAINER, *self.orders)):
                self._sync(self.syncs.popleft())
            return
        if self.queue and TRAINER not in self.busy:
            self._train(self.queue.popleft())
        for name in self.orders:
            if name not in self.busy and (self.orders[name] or self.active[name]):
                self._decode(name)

    # -- calls ----------------------------------------------------------------------------------------------------------

    def _call(self, role: str, method: str, args: dict[str, Any], ended: Ended) -> None:
        ranks, timeout_s = self.drive.roles[role], self.drive.config.deadline_s
        pending = self.busy[role] = self.drive.submit(method, args=args, ranks=ranks, timeout_s=timeout_s)
        self.flying[id(pending)] = pending, role, ended

    def _train(self, command: Command) -> None:
        args = {name: [*numbers(value)] if name == "groups" else value for name, value in command.ids}

        def ended(pending: Pending) -> list[Event]:
            try:
                answer = pending.result()[0]
            except KitError as error:
                return self._failed(error, command)
            if command.name == "discard":  # it needs no answer
                return []
            more = {"tokens": answer["tokens"]} if command.name == "microbatch" else {}
            return [Event("done", self.pipeline, **{**dict(command.ids), "of": command.name, **more})]

        self._call(TRAINER, command.name, args, ended)

    def _decode(self, name: str) -> None:
        orders, self.orders[name] = self.orders[name], []
        for order in orders:
            active = self.active[name]
            (active.add if order["order"] == "generate" else active.discard)((order["group"], order["sample"]))

        def ended(pending: Pending) -> list[Event]:
            try:
                happened = pending.result()[0]
            except KitError as error:
                return self._lost(name, error)
            for ids in happened:
                if ids["event"] in ("completed", "failed", "cancelled"):
                    self.active[name].discard((ids["group"], ids["sample"]))
            return [Event(ids.pop("event"), self.pipeline, replica=number_of(name), **ids) for ids in happened]

        self._call(name, "decode", {"orders": orders}, ended)

    def _sync(self, command: Command) -> None:
        """One call for the trainer and one for each replica, so a death is an event at once."""
        names = [name for name in map(name_of, numbers(command.replicas)) if name in self.orders]
        args = {"version": command.version, "at_sync": command.at_sync, "replicas": names}
        left, ids = {TRAINER, *names}, {"version": command.version}
        failures: list[str] = []

        def ended(role: str, pending: Pending) -> list[Event]:
            left.discard(role)
            happened: list[Event] = []
            try:
                pending.result()
                if role != TRAINER:
                    happened.append(Event("published", self.pipeline, replica=number_of(role), **ids))
            except RankTimeout:
                raise
            except KitError as error:
                failures.append(str(error).partition("\n")[0])
                if isinstance(error, RankDied):
                    happened += self._lost(role, error)
                    if TRAINER in left and len(self.drive.roles[TRAINER]) == 1:
                        self.in_vain = time.monotonic() + PATIENCE * self.drive.config.deadline_s, self.busy[TRAINER]
            if left:
                return happened
            if failures:
                return [*happened, Event("error", self.pipeline, of="sync", why=failures[0], **ids)]
            return [*happened, Event("synced", self.pipeline, **ids)]

        for role in (*names, TRAINER):
            self._call(role, "sync", args, functools.partial(ended, role))

    def patient(self, seconds: float) -> float:
        """Wait at most this long, and not beyond the deadline of a call."""
        return seconds if self.in_vain is None else min(seconds, max(0.0, self.in_vain[0] - time.monotonic()))

    def _failed(self, error: KitError, command: Command) -> list[Event]:
        """Handle a call that raised. Dead ranks are separate events."""
        if isinstance(error, RankTimeout):
            raise error
        dead: list[Event] = []
        if isinstance(error, RankDied):
            dead = self._lost(next(role for role, ranks in self.drive.roles.items() if error.rank in ranks), error)
        why = str(error).partition("\n")[0]
        return [*dead, Event("error", self.pipeline, **{**dict(command.ids), "of": command.name, "why": why})]

    def _lost(self, name: str, error: KitError) -> list[Event]:
        """A replica that died, or whose call raised: it gets no more calls."""
        if name == TRAINER or isinstance(error, RankTimeout):
            raise error
        self.orders.pop(name, None)
        self.active.pop(name, None)
        return [Event("died", self.pipeline, replica=number_of(name), why=str(error).partition("\n")[0])]


def name_of(replica: int) -> str:
    return f"replica {replica}"


def number_of(name: str) -> int:
    return int(name.rpartition(" ")[2])


# -- the phases -----------------------------------------------------------------------------------------------------------

PIPELINE = "a"
ASKS_S = 0.02  # initial interval between two questions from outside
ASKS = 50  # questions after which the interval grows, so their number grows with the logarithm of the time
UNITS = {"steps_per_second": "1/s", "exposed_generation": "s"}


def plain(drive: Drive) -> None:
    """Each call ends before the next begins; log-probabilities are recomputed before the first update of a step."""
    config, plan = drive.config, settings(drive.config)
    ranks = started(drive)

    def events() -> Iterator[Event]:
        while True:
            ranks.wait(config.deadline_s)
            for event in ranks.take():
                if event.name in ("error", "died", "failed"):
                    raise KitError(f"{event.name} in the plain loop: {event.get('why', event.ids)}")
                yield event

    def do(name: str, **ids: Id) -> None:
        ranks.send(Command(name, "", **ids))
        next(event for event in events() if event.name == ("synced" if name == "sync" else "done"))

    def sync(version: int) -> None:
        do("sync", version=version, at_sync="keep", replicas=tuple(range(config.replicas)))

    def generate(groups: Sequence[int]) -> None:
        """Generate all samples of these groups, distributed over the replicas."""
        wanted = {(group, sample) for group in groups for sample in range(config.group)}
        for number, (group, sample) in enumerate(sorted(wanted)):
            ranks.send(Command("generate", "", group=group, sample=sample, replica=number % config.replicas, attempt=0))
        arrived = events()
        while wanted:
            event = next(arrived)
            if event.name == "completed":
                wanted.discard((event.group, event.sample))

    for step in range(config.steps):
        sync(step)
        groups = range(step * config.groups, (step + 1) * config.groups)
        generate(groups)
        for which in plan.logprobs:
            do("logprobs", step=step, groups=tuple(groups), which=which)
        for update, start in enumerate(range(0, len(groups), plan.minibatch)):
            ids, fed = {"step": step, "update": update}, tuple(groups[start : start + plan.minibatch])
            do("begin", **ids)
            do("microbatch", groups=fed, **ids)
            do("finish", **ids)
            do("clear", groups=fed, **ids)
    sync(config.steps)


def lockstep(drive: Drive) -> None:
    run(drive, strict(drive.config, drive.config.steps))


def strict(config: StreamConfig, steps: int) -> StreamSettings:
    whole = dict.fromkeys(("min_groups", "places", "slots"), config.groups)
    return dataclasses.replace(settings(config), sampler="strict", window=0, steps=steps, **whole)  # type: ignore[arg-type]


def stream(drive: Drive) -> None:
    run(drive, settings(drive.config))


def bound(drive: Drive) -> None:
    """The same config on simulated ranks, with the durations of the phase `stream`: the bound for its controller.

    Its ledger begins at the same time as that of `stream`, so both can be overlaid.
    """
    config, plan = drive.config, settings(drive.config)
    rows = events_of(Run(drive.folder).frame(), "stream")
    possible = simulated.simulate(
        plan, simulated.measured(rows), core=load_callable(config.implementation)(plan), sampler=own_sampler(config)
    ).rows
    drive.append([dataclasses.replace(row, time=rows[0].time + row.time) for row in possible])
    for loop, ledger in (("stream", rows), ("bound", possible)):
        for metric, value in simulated.pace(ledger).items():
            drive.record(metric, value, UNITS[metric], loop=loop)


def rehearse(drive: Drive) -> None:
    """Failures that must not end training: the logger raises at every step, a microbatch of the first step raises, and the last replica
    is killed while it decodes."""
    again = dataclasses.replace(settings(drive.config), on_dead_replica="go-on", step_retries=1)
    ranks = started(drive, Losing)
    drive.submit("fail_next", role=TRAINER).result()
    run(drive, again, logger=broken_logger, ranks=ranks)


def resume(drive: Drive) -> None:
    """The lockstep loop, stopped half-way and continued by fresh jobs, the trainer's from its saved state, and a new controller."""
    config, half = drive.config, drive.config.steps // 2
    state = run(drive, strict(config, half))
    drive.submit("save", role=TRAINER).result()
    ranks = started(drive)
    drive.submit("load", args={"version": half}, role=TRAINER).result()
    run(drive, strict(config, config.steps), core.resume_from(state), ranks=ranks)


def silent(_: dict[str, float], __: int) -> None:
    """A logger that drops everything, since the ledger has the numbers."""


def run(
    drive: Drive,
    limits: StreamSettings,
    start: Resume | None = None,
    *,
    logger: Callable[[dict[str, float], int], object] = silent,
    ranks: Ranks | None = None,
) -> Any:
    """Run the controller with these settings on live ranks until it ends; returns its last state. `start`: where it resumes."""
    machine: Core[Any] = load_callable(drive.config.implementation)(limits, *([] if start is None else [start]))
    live, asker, meter = ranks or started(drive), Asker(), Meter()
    ports: dict[str, Port] = {
        **dict.fromkeys((TRAINER, "replica", "sync"), live),
        "data": Data(start),
        "desk": Desk(),
        "log": Log(meter, logger),
        "asker": asker,
    }
    ledger = Watched(Written(drive), meter)
    for name, ids in opening(limits, start):  # the meter's time begins here, however late the loop begins
        ledger.write(Row(metric=name, time=time.time(), ids=ids))
    with contextlib.ExitStack() as scope:
        if kind := own_sampler(drive.config):  # a core with a built-in sampler never asks it
            foreign = ports["sampler"] = Foreign(kind, settings(drive.config), pipeline=PIPELINE, resume=start)
            scope.callback(foreign.close)
            ledger.watchers.append(foreign)
        runner = Runner(
            {PIPELINE: machine},
            ports,
            clock=RealClock(lambda seconds: live.wait(min(seconds, asker.left()))),
            ledger=ledger,
            deadline_s=drive.config.deadline_s,
        )
        ended = runner.run()[PIPELINE]
    drive.record("controller_seconds", sum(runner.own), "s", events=len(runner.own))
    drive.record("answers", len(asker.seconds))
    drive.record("answer_seconds", statistics.median(asker.seconds or [math.nan]), "s")
    if ended.get("why") == "error":
        raise live.stuck or KitError(f"the controller ended with an error: {ended.get('error', 'no reason given')}")
    return runner.states[PIPELINE]


def own_sampler(config: StreamConfig) -> Any:
    return load_callable(config.sampler) if ":" in config.sampler else None


def broken_logger(_: dict[str, float], __: int) -> None:
    raise RuntimeError("a logger that raises, on purpose")


class Losing(Ranks):
    """Live ranks; the first rank of the last replica is killed once it decodes with version 1."""

    killed_at = 0.0

    def take(self) -> list[Event]:
        arrived = super().take()
        last = self.drive.config.replicas - 1
        decoding = (event for event in arrived if event.name == "tokens" and event.replica == last)
        if not self.killed_at and any(event.version for event in decoding):
            ranks = self.drive.roles[name_of(last)]
            self.drive.lost |= {*ranks}
            self.killed_at = time.time()
            os.kill(self.drive.world.pids[ranks[0]], signal.SIGKILL)
        if any(event.name == "died" for event in arrived):
            self.drive.record("named_seconds", time.time() - self.killed_at, "s")
        return arrived


class Asker(Port):
    """Asks for the status at fixed times from outside, and records how long after each time the answer came."""

    def __init__(self) -> None:
        self.began = time.time()
        self.due = self.began + ASKS_S
        self.asked: list[float] = []  # when each question was due
        self.seconds: list[float] = []

    def left(self) -> float:
        return max(0.0, self.due - time.time())

    def take(self) -> Iterable[Event]:
        """All questions that are due; a blocked controller is late with each of them."""
        asked = []
        while time.time() >= self.due:
            asked.append(Event("ask", PIPELINE, of="status", question=len(self.asked), asker="asker"))
            self.asked.append(self.due)
            self.due += max(ASKS_S, (self.due - self.began) / ASKS)
        return asked

    def send(self, command: Command) -> Iterable[Event]:
        self.seconds.append(time.time() - self.asked[command.question])
        return []


def started(drive: Drive, ranks: type[Ranks] = Ranks) -> Ranks:
    """Reset all ranks to version 0."""
    pendings = [drive.submit("reset", role=role) for role in drive.roles]
    drive.wait(pendings, first=False)
    for pending in pendings:
        pending.result()
    return ranks(drive, replica_names(drive.config), pipeline=PIPELINE)


class Written:
    def __init__(self, drive: Drive) -> None:
        self.drive = drive
        self.rows: list[Row] = []

    def write(self, row: Row) -> None:
        self.rows.append(row)

    def flush(self) -> None:
        rows, self.rows = self.rows, []
        if rows:
            self.drive.append(rows)


class Data(Port):
    """Prompts by number: first those to repeat, then from `first` on without end. Replicas make each prompt from the seed."""

    def __init__(self, start: Resume | None = None) -> None:
        self.numbers = itertools.count() if start is None else itertools.chain(start.open, itertools.count(start.next))

    def send(self, command: Command) -> Iterable[Event]:
        return [Event("prompt", command.pipeline, group=next(self.numbers))]


class Desk(Port):
    """Grants every request at once, because this pipeline does not share its devices."""

    def send(self, command: Command) -> Iterable[Event]:
        return [Event("granted", command.pipeline, kind=command.kind)] if command.name == "acquire" else []


def controller(plan: Any, start: Resume | None = None) -> Core[Any]:
    return Controller(plan, pipeline=PIPELINE, resume=start)


# -- simulated ranks ------------------------------------------------------------------------------------------------------

REHEARSED = {"microbatch": 1}  # commands that fail once, and the step at which they fail


def simulated_stream(drive: Drive) -> None:
    with written(drive) as rows:
        run_simulated(drive.config, rows, **drive.scene)


def simulated_resume(drive: Drive) -> None:
    """The loop of the phase `stream`, stopped half-way and continued by new ranks and a new controller."""
    with written(drive) as rows:
        state = run_simulated(drive.config, Memory(), until=drive.config.steps // 2)
        run_simulated(drive.config, rows, start=core.resume_from(state))


@contextlib.contextmanager
def written(drive: Drive) -> Iterator[Memory]:
    """A ledger written to the run's records, even if the run breaks."""
    base, rows = time.time(), Memory()
    try:
        yield rows
    finally:
        drive.append([dataclasses.replace(row, time=base + row.time) for row in rows])


class Stopped(Exception):  # noqa: N818 - not an error
    """The loop has reached the version at which it should stop."""


class Stopping:
    """A controller that stops after a step once it has reached a version; `state` is its state then."""

    def __init__(self, machine: Core[Any], until: int | None) -> None:
        self.core, self.until = machine, until
        self.state: Any = None

    def begin(self) -> tuple[Any, tuple[Command, ...]]:
        return self.core.begin()

    def step(self, state: Any, event: Event) -> tuple[Any, tuple[Command, ...]]:
        self.state, commands = self.core.step(state, event)
        if self.until is not None:
            core.refuse_state(self.state, ("version", "step"))
            if self.state.version >= self.until and self.state.step is None:
                raise Stopped
        return self.state, commands


def run_simulated(
    config: StreamConfig,
    rows: Memory,
    *,
    fails: Mapping[str, int] = REHEARSED,
    prompts: int | None = None,
    start: Resume | None = None,
    until: int | None = None,
) -> Any:
    """Run the controller to its end or up to a version; returns its last state. `rows`: its ledger; `prompts` None: the data never ends."""
    plan = dataclasses.replace(settings(config), step_retries=1)
    controller = Stopping(load_callable(config.implementation)(plan, *([] if start is None else [start])), until)
    with contextlib.suppress(Stopped):
        ended = simulated.simulate(
            plan,
            durations(config),
            prompts=prompts,
            core=controller,
            resume=start,
            sampler=own_sampler(config),
            logger=broken_logger,
            rows=rows,
            pipeline=PIPELINE,
            fails=fails,
        ).ended
        if ended.get("why") == "error":
            raise KitError(f"the controller ended with an error: {ended.get('error', 'no reason given')}")
    return controller.state


def durations(config: StreamConfig) -> Durations:
    """Durations of tokens and samples at the config's pace; without a pace, training takes about as long as generation."""
    paces = {"token_s": config.pace_ms / 1000, "train_s": config.train_pace_ms * config.group / 1000}
    given: dict[str, Any] = {name: seconds for name, seconds in paces.items() if seconds}
    low, high = config.answer
    return Durations(length=drawn_length(low, high, config.seed), span=config.decode, **given)
