"""The ports of a loop on live ranks: orders become calls in flight, answers become events. Notebook side.

A replica has one call at a time: it takes its new orders, decodes a few tokens of every request, and reports the results. So aborts and
syncs happen between two calls, never within one. The trainer also has one call at a time; its orders wait in a queue. A sync starts once
the trainer and all live and awake replicas are idle; until it ends, none of them gets another call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kit.errors import KitError, RankDied, RankTimeout
from kit.loop.messages import Command, Event, Memory
from kit.loop.runner import Port, Stalled
from kit.results.records import Row, numbers
from kit.stream.ports import replica_number, replica_role
from kit.stream.settings import Resume

if TYPE_CHECKING:
    from kit.world.calls import Pending

Ended = Callable[["Pending"], Iterable[Event]]

TRAINER = "trainer"
STUCK_S = 1.0  # longest time without a call in flight
PATIENCE = 0.1  # share of the deadline in which a trainer should notice that a replica of its sync died


class RoleCalls(Protocol):
    """Calls to the ranks of roles, as a driver makes them. `lost`: ranks that were ended on purpose."""

    @property
    def config(self) -> Any: ...
    @property
    def roles(self) -> Mapping[str, tuple[int, ...]]: ...
    def submit(
        self, method: str, *, args: Mapping[str, Any] | None, ranks: Sequence[int] | None, timeout_s: float | None
    ) -> Pending: ...
    def wait(self, pendings: Sequence[Pending], *, timeout_s: float | None) -> object: ...


class Records(Protocol):
    """A run's records, to which a ledger is appended."""

    def append(self, rows: Sequence[Row]) -> None: ...


class LiveRanks(Port):
    """All ranks of a run, and what they are doing: the ports "trainer", "replica" and "sync"."""

    def __init__(self, drive: RoleCalls, replicas: Iterable[str], *, pipeline: str = "") -> None:
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
        if self.stuck is not None:  # the controller knows, and can do nothing
            raise self.stuck
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
            self.orders.get(replica_role(command.replica), []).append({"order": command.name, **dict(command.ids)})
        else:
            (self.syncs if command.name == "sync" else self.queue).append(command)
        return ()

    def take(self) -> list[Event]:
        """The new events. Idle ranks get their next call only after the controller has handled all of them, because each event may bring
        orders and an order that comes after a call began waits for its end."""
        if self.stuck is not None:  # the reason is known, and a look at each further silent rank takes a second
            return []
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

    def settle(self) -> None:
        """Wait until no call is in flight, after a loop has ended. Nobody hears of the answers."""
        while self.flying:
            if self.stuck is not None:
                raise self.stuck
            pendings = [pending for pending, _, _ in self.flying.values()]
            self.drive.wait(pendings, timeout_s=self.patient(self.drive.config.deadline_s))
            self.take()

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
            trained = {"tokens": answer["tokens"]} if command.name == "microbatch" else {}
            return [Event("done", self.pipeline, **{**dict(command.ids), "of": command.name, **trained})]

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
            return [Event(ids.pop("event"), self.pipeline, replica=replica_number(name), **ids) for ids in happened]

        self._call(name, "decode", {"orders": orders}, ended)

    def _sync(self, command: Command) -> None:
        """One call for the trainer and one for each replica, so a death is an event at once."""
        names = [name for name in map(replica_role, numbers(command.replicas)) if name in self.orders]
        args = self._sync_args(command, names)
        left, ids = {TRAINER, *names}, {"version": command.version}
        failures: list[str] = []

        def ended(role: str, pending: Pending) -> list[Event]:
            left.discard(role)
            happened: list[Event] = []
            try:
                pending.result()
                if role != TRAINER:
                    happened.append(Event("published", self.pipeline, replica=replica_number(role), **ids))
            except RankTimeout as error:
                raise culprit_of(error, calls) from None
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
        calls = [self.busy[role] for role in (*names, TRAINER)]

    def _sync_args(self, command: Command, names: Sequence[str]) -> dict[str, Any]:
        return {"version": command.version, "at_sync": command.at_sync, "replicas": names}

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
        """A replica that died, or in which a call raised: it gets no more calls."""
        if name == TRAINER or isinstance(error, RankTimeout):
            raise error
        self.orders.pop(name, None)
        self.active.pop(name, None)
        return [Event("died", self.pipeline, replica=replica_number(name), why=str(error).partition("\n")[0])]


def culprit_of(error: RankTimeout, calls: Iterable[Pending]) -> RankTimeout:
    """The timeout of a sync to report. Each role has its own call: one that only waits may be over before that of a rank it waits for."""
    for call in calls:
        if error.culprits:
            break
        try:
            call.result()  # all began together, so it is over soon
        except RankTimeout as other:
            error = other if other.culprits else error
        except KitError:
            continue
    return error


# -- the ledger, and the ports beside the ranks ---------------------------------------------------------------------------


class RunLedger:
    """A ledger that is appended to the records of a run."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.rows: list[Row] = []

    def write(self, row: Row) -> None:
        self.rows.append(row)

    def flush(self) -> None:
        rows, self.rows = self.rows, []
        if rows:
            self.records.append(rows)


@contextlib.contextmanager
def written_rows(records: Records) -> Iterator[Memory]:
    """A ledger written to the run's records, even if the run breaks."""
    base, rows = time.time(), Memory()
    try:
        yield rows
    finally:
        starts = (None if row.start is None else base + row.start for row in rows)
        records.append(
            [
                dataclasses.replace(row, time=base + row.time, start=start)
                for row, start in zip(rows, starts, strict=True)
            ]
        )


class Prompts(Port):
    """Prompts by number: first those to repeat, then from `first` on without end. Replicas make each prompt from the seed."""

    def __init__(self, start: Resume | None = None) -> None:
        self.numbers = itertools.count() if start is None else itertools.chain(start.open, itertools.count(start.next))

    def send(self, command: Command) -> Iterable[Event]:
        return [Event("prompt", command.pipeline, group=next(self.numbers))]


class OpenDesk(Port):
    """Grants every request at once, because this pipeline does not share its devices."""

    def send(self, command: Command) -> Iterable[Event]:
        return [Event("granted", command.pipeline, kind=command.kind)] if command.name == "acquire" else []
