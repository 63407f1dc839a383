"""The driven phases of the lab `stream`, on live ranks and on simulated ones, and the controller's ports. Notebook side.

Three loops start from the same base weights, over the same ranks. `plain` has no controller: it generates all samples of a step, then
trains them in order of their groups. `lockstep` gives the same work to the controller with staleness 0; `stream` runs the config.

On live ranks orders become calls in flight, and answers become events. A replica has one call at a time: it takes its new orders, decodes a
few tokens of every request, and answers what happened. So aborts and syncs come between two calls and never in the middle of one. The
trainer has one call at a time too; its orders wait in a queue. A sync starts once the trainer and every replica that takes part are idle;
until it ends none of them gets another call.

`simulated_stream` and `simulated_resume` run the controller on a virtual clock, in milliseconds. Every ledger check is judged as on live
ranks; nothing is generated or trained, so nothing is recomputed. The trainer fails one microbatch, in the step of version 1, so that a step
that is aborted is part of every simulated run; that step is tried again once. The logger raises.
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
from kit.labs.drive import Drive
from kit.labs.stream import broken
from kit.labs.stream.config import StreamConfig, replica_names, settings
from kit.loop.messages import Command, Event, Memory, Row, listed, numbers
from kit.loop.runner import Core, Port, RealClock, Runner, Stalled
from kit.results.records import new_row
from kit.stream import core, simulated
from kit.stream.core import Controller
from kit.stream.ports import Foreign, Log, Meter, Watched, Watcher
from kit.stream.settings import Resume, Settings, opening
from kit.stream.simulated import Durations, drawn_length
from kit.target import load_callable
from kit.world.pending import Pending

Ended = Callable[[Pending], Iterable[Event]]

TRAINER = "trainer"
STUCK_S = 1.0  # without any call under way
PATIENCE = 0.1  # of the deadline, in which a trainer notices by itself that a replica of its sync died


class Ranks:
    """All ranks of a run, and what they are doing. `trainer`, `replica` and `sync` are its ports."""

    def __init__(self, drive: Drive, replicas: Iterable[str], *, pipeline: str = "") -> None:
        self.drive = drive
        self.pipeline = pipeline
        self.orders: dict[str, list[dict[str, Any]]] = {name: [] for name in replicas}  # of every live replica
        self.active: dict[str, set[tuple[int, int]]] = {name: set() for name in self.orders}  # requests that it decodes
        self.queue: deque[Command] = deque()  # the trainer's
        self.syncs: deque[Command] = deque()
        self.busy: dict[str, Pending] = {}  # by role
        self.flying: dict[int, tuple[Pending, tuple[str, ...], Ended]] = {}
        self.arrived: list[Event] = []
        self.in_vain: tuple[float, Pending] | None = (
            None  # the trainer's sync with a dead replica, and until when it may wait
        )
        self.heard = time.monotonic()  # when a call was last under way
        self.stuck: RankTimeout | None = None  # a call past the run's deadline: nothing more can be asked of its ranks

    # -- what the runner asks -------------------------------------------------------------------------------------------

    def wait(self, seconds: float) -> None:
        """Until a call ends. With the runner's clock: `RealClock(ranks.wait)`."""
        self.start()
        if self.flying:
            self.heard = time.monotonic()
        if self.arrived:
            return
        if self.flying:
            self.drive.wait([pending for pending, _, _ in self.flying.values()], timeout_s=self.patient(seconds))
        else:
            if time.monotonic() - self.heard > STUCK_S:
                raise Stalled("the controller waits for an answer, but no call is under way", ())
            time.sleep(min(seconds, STUCK_S / 10))

    def take(self) -> list[Event]:
        """What has happened. Ranks that became free get their next call once the controller has heard all of it: one event after the other
        brings orders, and what comes after a call began waits for its end."""
        self._give_up()
        for number, (pending, roles, ended) in [*self.flying.items()]:
            if pending.done():
                del self.flying[number]
                for role in roles:
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

    def _call(self, roles: tuple[str, ...], method: str, args: dict[str, Any], ended: Ended) -> None:
        ranks = [rank for role in roles for rank in self.drive.roles[role]]
        pending = self.drive.submit(method, args=args, ranks=ranks, timeout_s=self.drive.config.deadline_s)
        self.busy |= dict.fromkeys(roles, pending)
        self.flying[id(pending)] = pending, roles, ended

    def _train(self, command: Command) -> None:
        args = {name: [*numbers(str(value))] if name == "groups" else value for name, value in command.ids}

        def ended(pending: Pending) -> list[Event]:
            try:
                answer = pending.result()[0]
            except KitError as error:
                return self._failed(error, command)
            if command.name == "discard":  # nothing waits for it
                return []
            more = {"tokens": answer["tokens"]} if command.name == "microbatch" else {}
            return [Event("done", self.pipeline, **{**dict(command.ids), "of": command.name, **more})]

        self._call((TRAINER,), command.name, args, ended)

    def _decode(self, name: str) -> None:
        orders, self.orders[name] = self.orders[name], []
        for order in orders:
            key = order["group"], order["sample"]
            (self.active[name].add if order["order"] == "generate" else self.active[name].discard)(key)

        def ended(pending: Pending) -> list[Event]:
            try:
                happened = pending.result()[0]
            except KitError as error:
                return self._lost(name, error)
            for what in happened:
                if what["event"] in ("completed", "failed", "cancelled"):
                    self.active[name].discard((what["group"], what["sample"]))
            return [Event(what.pop("event"), self.pipeline, replica=number_of(name), **what) for what in happened]

        self._call((name,), "decode", {"orders": orders}, ended)

    def _sync(self, command: Command) -> None:
        """A call for the trainer and one for each replica, so that a death is an event at once."""
        names = [name for name in map(name_of, numbers(command.replicas)) if name in self.orders]
        args = {"version": command.version, "at_sync": command.at_sync, "replicas": names}
        left, ids = {TRAINER, *names}, {"version": command.version}
        failures: list[str] = []

        def ended(role: str, pending: Pending) -> list[Event]:
            left.discard(role)
            happened: list[Event] = []
            try:
                pending.result()
            except RankTimeout:
                raise
            except KitError as error:
                failures.append(str(error).partition("\n")[0])
                if isinstance(error, RankDied):
                    happened += self._lost(role, error)
                    if TRAINER in left and len(self.drive.roles[TRAINER]) == 1:
                        until = time.monotonic() + PATIENCE * self.drive.config.deadline_s
                        self.in_vain = until, self.busy[TRAINER]
            else:
                if role != TRAINER:
                    happened.append(Event("published", self.pipeline, replica=number_of(role), **ids))
            if not left and failures:
                happened.append(Event("error", self.pipeline, of="sync", why=failures[0], **ids))
            elif not left:
                happened.append(Event("synced", self.pipeline, **ids))
            return happened

        for role in (*names, TRAINER):
            self._call((role,), "sync", args, functools.partial(ended, role))

    def _give_up(self) -> None:
        """Interrupt a trainer that waits for the call of a replica which died before it made it; only the trainer can wait so. It lets the
        other replicas know, and the sync is then tried with them. Limit: several ranks are not interrupted, as some wait in a collective.
        """
        if self.in_vain is not None and self.in_vain[0] <= time.monotonic():
            _, pending = self.in_vain
            self.in_vain = None
            pending.cancel()

    def patient(self, seconds: float) -> float:
        """At most so long, and not beyond the time at which a call is given up."""
        return seconds if self.in_vain is None else min(seconds, max(0.0, self.in_vain[0] - time.monotonic()))

    def _failed(self, error: KitError, command: Command) -> list[Event]:
        """A call that raised. Ranks that died are events of their own."""
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
    """A replica's role."""
    return f"replica {replica}"


def number_of(name: str) -> int:
    return int(name.rpartition(" ")[2])


class OfRanks(Port):
    """A port of these ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks


class TrainerPort(OfRanks):
    """begin, microbatch, finish, abort, clear, discard, logprobs: one after the other."""

    def send(self, command: Command) -> Iterable[Event]:
        self.ranks.queue.append(command)
        return ()

    def take(self) -> Iterable[Event]:
        return self.ranks.take()


class ReplicaPort(OfRanks):
    """generate and cancel, to the replica that the command names. One that is gone answers nothing: its death was an event."""

    def send(self, command: Command) -> Iterable[Event]:
        orders = self.ranks.orders.get(name_of(command.replica))
        if orders is not None:
            orders.append({"order": command.name, **dict(command.ids)})
        return ()


class SyncPort(OfRanks):
    """Weights from the trainer to every live replica."""

    def send(self, command: Command) -> Iterable[Event]:
        self.ranks.syncs.append(command)
        return ()


# -- the phases -----------------------------------------------------------------------------------------------------------

PIPELINE = "a"
ASKS_S = 0.02  # between two questions from outside, at first
ASKS = 50  # from then on the time between two grows, so that their number grows with the logarithm of the time
UNITS = {"steps_per_second": "1/s", "exposed_generation": "s"}


def plain(drive: Drive) -> None:
    """Every sample first, then every group in order; no controller."""
    config = drive.config
    loop = Straight(drive)
    for step in range(config.steps):
        loop.sync(step)
        groups = range(step * config.groups, (step + 1) * config.groups)
        loop.generate(groups)
        loop.train(step, groups)
    loop.sync(config.steps)


def lockstep(drive: Drive) -> None:
    """The controller without staleness: a step's groups are trained in order once all are complete."""
    run(drive, strict(drive.config, drive.config.steps))


def strict(config: StreamConfig, steps: int) -> Settings:
    """Without staleness, up to so many steps."""
    groups = config.groups
    return dataclasses.replace(
        settings(config), sampler="strict", window=0, min_groups=groups, places=groups, slots=groups, steps=steps
    )


def stream(drive: Drive) -> None:
    """The controller with the config, and with the fault that is on."""
    with broken.switched_on(drive.fault):
        run(drive, settings(drive.config))


def bound(drive: Drive) -> None:
    """The same config on simulated ranks, with the durations of the phase `stream`: what its controller could reach with them.

    Its ledger begins when that of `stream` did, so that both can be laid over one another.
    """
    config = drive.config
    rows = simulated.rows_of(drive.folder, "stream")
    controller = load_callable(config.implementation)(settings(config))
    own = load_callable(config.sampler) if ":" in config.sampler else None
    possible = simulated.simulate(settings(config), simulated.measured(rows), core=controller, sampler=own).rows
    drive.append([new_row(row.name, None, "", rows[0].time + row.time, ids=row.ids) for row in possible])
    for loop, ledger in (("stream", rows), ("bound", possible)):
        for metric, value in simulated.pace(ledger).items():
            drive.record(metric, value, UNITS[metric], loop=loop)


def rehearse(drive: Drive) -> None:
    """What must not end training: the logger raises at every step, a microbatch of the first step raises, and the last replica is killed
    while it decodes."""
    again = dataclasses.replace(settings(drive.config), on_dead_replica="go-on", step_retries=1)
    ranks = started(drive, Losing)
    drive.submit("fail_next", role=TRAINER).result()
    run(drive, again, logger=broken_logger, ranks=ranks)


def resume(drive: Drive) -> None:
    """The lockstep loop, stopped half-way: fresh jobs, the trainer's from its saved state, and a new controller go on."""
    config, half = drive.config, drive.config.steps // 2
    state = run(drive, strict(config, half))
    drive.submit("save", role=TRAINER).result()
    ranks = started(drive)
    drive.submit("load", args={"version": half}, role=TRAINER).result()
    start = core.resume_from(state)
    run(drive, strict(config, config.steps), start, ranks=ranks)


def run(
    drive: Drive,
    limits: Settings,
    start: Resume | None = None,
    *,
    logger: Callable[[dict[str, float], int], object] | None = None,
    ranks: Ranks | None = None,
) -> Any:
    """The controller with these settings over live ranks until it ends; its last state. `start` is where it goes on."""
    machine: Core[Any] = load_callable(drive.config.implementation)(limits, *([] if start is None else [start]))
    live, asker, meter = ranks or started(drive), Asker(), Meter()
    ports: dict[str, Port] = {
        "trainer": TrainerPort(live),
        "replica": ReplicaPort(live),
        "sync": SyncPort(live),
        "data": Data() if start is None else Data(start.next, start.open),
        "desk": Desk(),
        "log": Log(meter, logger or silent),
        "asker": asker,
    }
    written = Written(drive)
    for name, ids in opening(limits, start):
        row = Row(name, time.time(), ids)
        written.write(row)
        meter.see(row)  # its time begins where the ledger does, however long it takes until the loop does
    watchers: list[Watcher] = [meter]
    with contextlib.ExitStack() as scope:
        if ":" in drive.config.sampler:  # a core that has one of our samplers never asks it
            kind = load_callable(drive.config.sampler)
            foreign = Foreign(kind, settings(drive.config), pipeline=PIPELINE, resume=start)
            scope.callback(foreign.close)
            ports["sampler"] = foreign
            watchers.append(foreign)
        runner = Runner(
            {PIPELINE: machine},
            ports,
            clock=RealClock(lambda seconds: live.wait(min(seconds, asker.left()))),
            ledger=Watched(written, *watchers),
            deadline_s=drive.config.deadline_s,
        )
        ended = runner.run()[PIPELINE]
    drive.record("controller_seconds", sum(runner.own), "s", events=len(runner.own))
    drive.record("answers", len(asker.seconds))
    drive.record("answer_seconds", statistics.median(asker.seconds or [math.nan]), "s")
    if ended.get("why") == "error":
        raise live.stuck or KitError(f"the controller ended with an error: {ended.get('error', 'no reason given')}")
    return runner.states[PIPELINE]


def silent(_: dict[str, float], __: int) -> None:
    """A logger that drops everything: the numbers are in the ledger."""


def broken_logger(_: dict[str, float], __: int) -> None:
    raise RuntimeError("a logger that raises, on purpose")


class Losing(Ranks):
    """Live ranks, of which the last replica's first one is killed once it decodes with version 1."""

    killed_at = 0.0

    def take(self) -> list[Event]:
        arrived = super().take()
        last = self.drive.config.replicas - 1
        if not self.killed_at and any(
            event.name == "tokens" and event.replica == last and event.version for event in arrived
        ):
            ranks = self.drive.roles[name_of(last)]
            self.drive.lost |= {*ranks}
            self.killed_at = time.time()
            os.kill(self.drive.world.pids[ranks[0]], signal.SIGKILL)
        if any(event.name == "died" for event in arrived):
            self.drive.record("named_seconds", time.time() - self.killed_at, "s")
        return arrived


class Asker(Port):
    """Somebody outside who asks for the status at fixed times, and notes how long after each time the answer came."""

    def __init__(self) -> None:
        self.began = time.time()
        self.due = self.began + ASKS_S
        self.asked: dict[int, float] = {}
        self.seconds: list[float] = []

    def left(self) -> float:
        """Seconds until the next question."""
        return max(0.0, self.due - time.time())

    def take(self) -> Iterable[Event]:
        """All that are due: a controller that was blocked is late with each of them."""
        asked = []
        while time.time() >= self.due:
            number = len(self.asked)
            self.asked[number] = self.due
            self.due += max(ASKS_S, (self.due - self.began) / ASKS)
            asked.append(Event("ask", PIPELINE, of="status", question=number, asker="asker"))
        return asked

    def send(self, command: Command) -> Iterable[Event]:
        self.seconds.append(time.time() - self.asked[command.question])
        return []


def started(drive: Drive, ranks: type[Ranks] = Ranks) -> Ranks:
    """All ranks at version 0, as if nothing had run before."""
    pendings = [drive.submit("reset", role=role) for role in drive.roles]
    drive.wait(pendings, first=False)
    for pending in pendings:
        pending.result()
    return ranks(drive, replica_names(drive.config), pipeline=PIPELINE)


class Written:
    """The ledger among the run's records."""

    def __init__(self, drive: Drive) -> None:
        self.drive = drive
        self.rows: list[dict[str, Any]] = []

    def write(self, row: Row) -> None:
        self.rows.append(new_row(row.name, None, "", row.time, ids=row.ids))

    def flush(self) -> None:
        rows, self.rows = self.rows, []
        if rows:
            self.drive.append(rows)


class Straight:
    """Calls one after the other, each waited for."""

    def __init__(self, drive: Drive) -> None:
        self.config: StreamConfig = drive.config
        self.ranks = started(drive)

    def generate(self, groups: Sequence[int]) -> None:
        """All samples of these groups, dealt out over the replicas."""
        wanted = {(group, sample) for group in groups for sample in range(self.config.group)}
        names = [*self.ranks.orders]
        for number, (group, sample) in enumerate(sorted(wanted)):
            order = {"order": "generate", "group": group, "sample": sample, "attempt": 0}
            self.ranks.orders[names[number % len(names)]].append(order)
        for event in self.events():
            if event.name == "completed":
                wanted.discard((event.group, event.sample))
            if not wanted:
                return

    def train(self, step: int, groups: Sequence[int]) -> None:
        """One step, cut into its updates; log-probabilities that are recomputed come before the first."""
        plan = settings(self.config)
        for which in plan.logprobs:
            self.do(Command("logprobs", TRAINER, step=step, groups=listed(groups), which=which))
        for update, start in enumerate(range(0, len(groups), plan.minibatch)):
            ids = {"step": step, "update": update}
            self.do(Command("begin", TRAINER, **ids))
            self.do(Command("microbatch", TRAINER, groups=listed(groups[start : start + plan.minibatch]), **ids))
            self.do(Command("finish", TRAINER, **ids))
            self.do(Command("clear", TRAINER, groups=listed(groups[start : start + plan.minibatch]), **ids))

    def sync(self, version: int) -> None:
        replicas = listed(range(self.config.replicas))
        self.do(Command("sync", "sync", version=version, at_sync="keep", replicas=replicas))

    def do(self, command: Command) -> None:
        """One call of the trainer, or a sync."""
        (self.ranks.syncs if command.name == "sync" else self.ranks.queue).append(command)
        last = "synced" if command.name == "sync" else "done"
        next(event for event in self.events() if event.name == last)

    def events(self) -> Iterator[Event]:
        while True:
            self.ranks.wait(self.config.deadline_s)
            for event in self.ranks.take():
                if event.name in ("error", "died", "failed"):
                    raise KitError(f"{event.name} in the plain loop: {event.get('why', event.ids)}")
                yield event


class Data(Port):
    """Prompts by number: those that are given again, then from the first on without end. Replicas make each from the seed."""

    def __init__(self, first: int = 0, again: Iterable[int] = ()) -> None:
        self.numbers = itertools.chain(again, itertools.count(first))

    def send(self, command: Command) -> Iterable[Event]:
        return [Event("prompt", command.pipeline, group=next(self.numbers))]


class Desk(Port):
    """Grants whatever is asked for, at once: these devices belong to this pipeline alone."""

    def send(self, command: Command) -> Iterable[Event]:
        return [Event("granted", command.pipeline, kind=command.kind)] if command.name == "acquire" else []


def controller(plan: Any, start: Resume | None = None) -> Core[Any]:
    """The kit's own controller."""
    return Controller(plan, pipeline=PIPELINE, resume=start)


# -- simulated ranks ------------------------------------------------------------------------------------------------------

REHEARSED = {"microbatch": 1}  # commands that fail once, and the step of their first failure


def simulated_stream(drive: Drive) -> None:
    """The controller with the config, and with the fault that is on."""
    with written(drive) as rows, broken.switched_on(drive.fault):
        run_simulated(drive.config, rows, **broken.CONDITIONS.get(drive.fault, {}))


def simulated_resume(drive: Drive) -> None:
    """The loop of the phase `stream`, stopped half-way: new ranks and a new controller go on."""
    with written(drive) as rows, broken.switched_on(drive.fault):
        state = run_simulated(drive.config, Memory(), until=drive.config.steps // 2)
        run_simulated(drive.config, rows, start=core.resume_from(state))


@contextlib.contextmanager
def written(drive: Drive) -> Iterator[Memory]:
    """A ledger that goes to the run's records, also that of a run that breaks."""
    base, rows = time.time(), Memory()
    try:
        yield rows
    finally:
        drive.append([new_row(row.name, None, "", base + row.time, ids=row.ids) for row in rows])


class Stopped(Exception):  # noqa: N818 - it is no error
    """The loop has reached the version at which it is to stop."""


class Stopping:
    """A controller that stops behind a step, from a version on; `state` is what it knew then."""

    def __init__(self, one: Core[Any], until: int | None) -> None:
        self.core, self.until = one, until
        self.state: Any = None

    def begin(self) -> tuple[Any, tuple[Command, ...]]:
        return self.core.begin()

    def step(self, state: Any, event: Event) -> tuple[Any, tuple[Command, ...]]:
        self.state, commands = self.core.step(state, event)
        if self.until is not None and self.state.version >= self.until and self.state.step is None:
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
    """Run the controller until it ends, or up to a version; its last state. `rows` is its ledger; `prompts` None: the data never ends."""
    plan = dataclasses.replace(settings(config), step_retries=1)
    controller = Stopping(load_callable(config.implementation)(plan, *([] if start is None else [start])), until)
    with contextlib.suppress(Stopped):
        ended = simulated.simulate(
            plan,
            durations(config),
            prompts=prompts,
            core=controller,
            resume=start,
            sampler=load_callable(config.sampler) if ":" in config.sampler else None,
            logger=broken_logger,
            rows=rows,
            pipeline=PIPELINE,
            fails=fails,
        ).ended
        if ended.get("why") == "error":
            raise KitError(f"the controller ended with an error: {ended.get('error', 'no reason given')}")
    return controller.state


def durations(config: StreamConfig) -> Durations:
    """Of tokens and samples as the config paces them; without a pace, training takes about as long as generation."""
    low, high = config.answer
    paces = {"token_s": config.pace_ms / 1000, "train_s": config.train_pace_ms * config.group / 1000}
    given: dict[str, Any] = {name: seconds for name, seconds in paces.items() if seconds}
    return Durations(length=drawn_length(low, high, config.seed), span=config.decode, **given)
