"""The controller's ports on live ranks: orders become calls in flight, answers become events. Notebook side.

A replica has one call at a time: it takes its new orders, decodes a few tokens of every request, and answers what happened. So aborts
and syncs come between two calls and never in the middle of one. The trainer has one call at a time too; its orders wait in a queue. A sync
starts once the trainer and every replica that takes part are idle; until it ends none of them gets another call.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from kit.errors import KitError, RankDied, RankTimeout
from kit.labs.lab import Drive
from kit.loop.messages import Command, Event, numbers
from kit.loop.runner import Port, Stalled
from kit.world.calls import Pending

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
