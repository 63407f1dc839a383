"""Rebuilds the state of the desk from a ledger's rows: who has which device, who waits, who generates where; and plans from that state.
It uses neither the desk's code nor its counts.

Rows that a runner writes twice, as a command and as another core's event, count once.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from kit.errors import BadInput
from kit.results.ledger import Ledger, by_cores
from kit.results.records import Row, numbers, value_in_words
from kit.results.rules import Missing

ORDER = ("initialisation", "training", "critic", "logprobs", "reference", "values", "generation")
RUNS_ON = {
    "initialisation": "trainer",
    "training": "trainer",
    "critic": "critic",
    "logprobs": "trainer",
    "values": "critic",
}
TRAINER_CALLS = ("begin", "microbatch", "finish", "logprobs")
CLUSTERS = ("trainer", "critic", "reference", "generation")
OPERATIONS = [
    "register",
    "admit",
    "acquire",
    "release",
    "planned_release",
    "resize",
    "unregister",
    "progress",
    "progress_end",
]
# From the desk.
ANSWERS = [
    "registered",
    "admitted",
    "granted",
    "error",
    "left",
    "joined",
    "released",
    "resized",
    "unregistered",
]

# The rows that change the books, by what they change.
OF_MEMBERSHIP = frozenset(
    {"admitted", "admission_limit", "resize", "progress", "progress_end", "unregister", "gone", "died"}
)
OF_REQUESTS = frozenset(
    {"acquire", "queued", "granted", "expired", "withdrawn", "release", "planned_release", "released", "error"}
)
MOVES = frozenset({"left", "shrunk", "expand", "expanded"})
OF_REPLICAS = MOVES | {"error", "died", "restarted"}
CHANGES = OF_MEMBERSHIP | OF_REQUESTS | OF_REPLICAS

Request = tuple[str, Any, Any]  # to a replica: pipeline, group, sample


def cluster_of(row: Row) -> str:
    kind = str(row.get("kind", "generation"))
    return str(row.get("cluster", RUNS_ON.get(kind, kind)))


def request_of(row: Row) -> Request:
    return row.who, row.get("group"), row.get("sample")


def replica_of(row: Row) -> tuple[str, int]:
    return row.who, row.number("replica")


class DeskLedger(Ledger):
    """The rows that concern the desk, each once; `turn` has the number of the desk's turn of a row, by its position.

    `unheard` are operations that the desk never read, because it had ended or the run stopped."""

    def __init__(self, rows: Iterable[Row | Mapping[str, Any]]) -> None:
        super().__init__(rows)
        self.limits: Mapping[str, Any] = next((row.ids for row in self.by_event["limits"]), {})
        self.desk = str(self.limits.get("pipeline", "desk"))
        self.turn: dict[int, int] = {}
        # Before the first row, the second, ... as far as they were read.
        self._books = [Books(self.limit("devices", 0))]
        self._replayed: list[tuple[Row, Books]] | None = None  # all of it, once a rule has read that far
        self.of_cores = by_cores(self.rows)
        turn = 0
        once: list[Row] = []
        sent: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
        for row in self.rows:
            core = row.get("core")
            turn += core == self.desk or (core is None and row.event in OPERATIONS)
            turn += row.event == "died" and not self.of_cores  # what follows answers no operation
            if row.event in OPERATIONS and row.get("to") == self.desk:
                sent[row.who, row.event].append(row)
            elif row.event in OPERATIONS and core == self.desk:
                sent[row.who, row.event] = sent[row.who, row.event][1:]
            if row.get("to") == self.desk or (core not in (None, self.desk) and row.event in ANSWERS):
                continue  # written twice: as a command and as another core's event
            self.turn[row.at] = turn
            once.append(row)
        self.index(once if self.by_event["clusters"] else [*with_clusters(once)])
        self.unheard = sorted(itertools.chain(*sent.values()), key=lambda row: row.at)
        asked = {self.turn[row.at]: row for row in self.rows if row.event in OPERATIONS}
        patience = self.limit("request_ms", 0) / 1000 * 0.999 or math.inf  # a later error says that it waited too long
        # The error of a request that expired ends an earlier request.
        expired = {(row.who, self.turn[row.at]) for row in self.by_event["expired"]}
        refusals = {  # of operations that the same turn answers with an error
            row.at: operation.at
            for row in self.by_event["error"]
            if (operation := asked.get(self.turn[row.at]))
            and (operation.who, operation.event) == (row.who, row.get("of"))
            and row.get("kind") in (None, operation.get("kind"))
            and row.time - operation.time < patience
            and (row.who, self.turn[row.at]) not in expired
        }
        self.refused = {*refusals.values()}
        self._without_effect = self.refused | refusals.keys()
        self._not_noted = {*self._requests_not_noted()}

    def limit(self, name: str, default: int) -> int:
        value = self.limits.get(name, default)
        try:
            return int(value)
        except (TypeError, ValueError) as error:
            raise BadInput(
                f"the row `limits` of the ledger has {name}={value_in_words(value)}; write a whole number"
            ) from error

    @property
    def dead(self) -> set[str]:
        """The pipelines that died, with all their replicas."""
        return {row.who for row in self.by_event["died"] if "replica" not in row.ids}

    def replay(self) -> Iterator[tuple[Row, Books]]:
        """Each row with the books before it, up to the desk's end. All rules read the same books, which each row is booked into once."""
        return self._booked() if self._replayed is None else iter(self._replayed)

    def _booked(self) -> Iterator[tuple[Row, Books]]:
        for number, row in enumerate(self.rows):
            books = self._books[number]
            yield row, books
            if row.event == "ended" and row.who == self.desk:
                break
            if number + 1 == len(self._books):
                self._books.append(self._next(books, row))
        self._replayed = [*zip(self.rows, self._books, strict=False)][: number + 1] if self.rows else []

    def _next(self, books: Books, row: Row) -> Books:
        if row.at in self._without_effect:
            return books
        # Of a run of the kit, the ports' rows show when a request ends, not what the desk notes of it.
        if row.event in ("withdrawn", "expired") and self.of_cores and (row.who, cluster_of(row)) in books.asked:
            return books
        after = books.after(row)
        return after.after(replace(row, metric="queued")) if row.at in self._not_noted else after

    def _requests_not_noted(self) -> Iterator[int]:
        """The rows of requests for devices that no `queued` follows before their grant, or follows in the same turn, perhaps after its
        plan: they wait from the first."""
        open_: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        for row in self.of("acquire", "queued", "granted"):
            key = row.who, cluster_of(row)
            if row.event == "queued":
                yield from (at for at in open_.pop(key, []) if self.turn[at] == self.turn[row.at])
            elif row.event == "granted":
                yield from open_.pop(key, [])
            elif row.at not in self.refused:
                open_[key].append(row.at)
        yield from itertools.chain(*open_.values())

    def last_books(self) -> Books:
        for _ in self.replay():
            pass
        return self._books[-1]

    def turns(self) -> Iterator[tuple[Row, Books]]:
        """The last row of each of the desk's turns, and the books after it."""
        last: Row | None = None
        for row, books in self.replay():
            if last is not None and self.turn[row.at] != self.turn[last.at]:
                yield last, books
            last = row


def with_clusters(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows of a desk that does not note the devices of a pipeline's clusters: they are those with which it registered."""
    asked: dict[str, Row] = {}
    present: set[str] = set()
    for row in rows:
        yield row
        if row.event == "register" and row.ids.keys() & {*CLUSTERS}:
            asked[row.who] = row
        elif row.event == "registered" and row.who in asked and row.who not in present:
            present.add(row.who)
            yield replace(row, metric="clusters", ids={**row.ids, **asked[row.who].ids})
        elif row.event in ("gone", "unregistered", "died") and "replica" not in row.ids:
            present.discard(row.who)


class WaitingRequest(NamedTuple):
    """A request that the desk has queued. `at` is the row that made it."""

    kind: str
    at: int
    target: int
    time: float

    @property
    def precedence(self) -> tuple[int, int]:
        return ORDER.index(self.kind), self.at


@dataclass(slots=True)
class Books:
    """The state according to the rows so far. A replica is (pipeline, number), a cluster (pipeline, name)."""

    devices: int
    clusters: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)  # in order of registration
    tp: dict[str, int] = field(default_factory=dict)
    followed: dict[str, str] = field(default_factory=dict)  # by pipeline: the one that registered just after it
    admitted: set[str] = field(default_factory=set)
    set_up: set[str] = field(default_factory=set)
    handed_over: set[str] = field(default_factory=set)
    over: set[tuple[str, str]] = field(default_factory=set)  # sides of the admission that reached their limit
    asked: dict[tuple[str, str], tuple[str, int]] = field(
        default_factory=dict
    )  # by cluster, until the end: kind and row of `acquire`
    waiting: dict[tuple[str, str], WaitingRequest] = field(default_factory=dict)
    held: dict[tuple[str, str], str] = field(default_factory=dict)  # leases other than generation: their kind
    generating: set[str] = field(default_factory=set)  # pipelines with a lease of generation
    active: dict[str, set[int]] = field(default_factory=dict)
    sleeping: set[tuple[str, int]] = field(default_factory=set)
    waking: set[tuple[str, int]] = field(default_factory=set)
    out: set[tuple[str, int]] = field(default_factory=set)
    dead: set[tuple[str, int]] = field(default_factory=set)
    leaving: set[str] = field(default_factory=set)
    closing: set[str] = field(default_factory=set)
    streams: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    plan: Row | None = None  # in progress

    def bundle(self, name: str, replica: int) -> frozenset[int]:
        tp = self.tp[name]
        return frozenset(self.clusters[name].get("generation", ())[replica * tp : (replica + 1) * tp])

    def replicas(self, name: str) -> range:
        return range(len(self.clusters[name].get("generation", ())) // self.tp[name])

    def progress(self, name: str) -> tuple[int, int]:
        reports = self.streams.get(name, {}).values()
        return sum(min(done, target) for done, target in reports), sum(target for _, target in reports)

    def owners(self) -> dict[int, list[str]]:
        """Return the owners of each device: a replica from its wake order until it sleeps, a cluster from its grant to its release."""
        uses: dict[int, list[str]] = {device: [] for device in range(self.devices)}
        for name, replica in self.sleeping | self.waking | self.awake():
            for device in self.bundle(name, replica):
                uses.setdefault(device, []).append(f"replica {replica} of {name}")
        for name, cluster in self.held:
            for device in self.clusters[name][cluster]:
                uses.setdefault(device, []).append(f"{cluster} of {name}")
        return uses

    def awake(self) -> set[tuple[str, int]]:
        return {(name, replica) for name, replicas in self.active.items() for replica in replicas}

    def idle(self) -> set[int]:
        return {device for device, owners in self.owners().items() if not owners}

    # -- rows -------------------------------------------------------------------------------------------------------------

    def after(self, row: Row) -> Books:
        """The books after a row: new ones, or these if it changes nothing."""
        of_known = row.event in CHANGES and row.who in self.clusters  # few of all rows are
        if not of_known and row.event not in ("plan", "commit", "clusters"):
            return self
        books = self.copy()
        books.take(row)
        return books

    def copy(self) -> Books:
        """Books that may change. What a pipeline registered never does."""
        return Books(
            self.devices,
            {**self.clusters},
            {**self.tp},
            {**self.followed},
            {*self.admitted},
            {*self.set_up},
            {*self.handed_over},
            {*self.over},
            {**self.asked},
            {**self.waiting},
            {**self.held},
            {*self.generating},
            {name: {*replicas} for name, replicas in self.active.items()},
            {*self.sleeping},
            {*self.waking},
            {*self.out},
            {*self.dead},
            {*self.leaving},
            {*self.closing},
            {name: {**reports} for name, reports in self.streams.items()},
            self.plan,
        )

    def take(self, row: Row) -> None:
        if row.event == "plan":
            self.plan = row
        elif row.event == "commit":
            self.plan = None
        elif row.event == "clusters":
            self._forget_earlier(row.who)
            self.followed |= {last: row.who for last in [*self.clusters][-1:] if last not in self.followed}
            self.clusters[row.who] = {name: numbers(row[name]) for name in CLUSTERS if name in row.ids}
            self.tp[row.who] = int(row.get("tp", 1))
            self.active[row.who] = set()
        else:
            if row.event in OF_MEMBERSHIP:
                self._take_membership(row)
            if row.event in OF_REQUESTS:
                self._take_request(row)
            if row.event in OF_REPLICAS and ("replica" in row.ids or row.event in MOVES):
                self._take_replica(row, replica_of(row))

    def _forget_earlier(self, name: str) -> None:
        """Forget what a pipeline of this name did before it died: new ranks register in its place."""
        for names in (self.admitted, self.set_up, self.handed_over, self.leaving, self.closing):
            names.discard(name)
        for pairs in (self.out, self.dead, self.over):
            pairs -= {pair for pair in pairs if pair[0] == name}

    def _take_membership(self, row: Row) -> None:
        match row.event:
            case "admitted":
                self.admitted.add(row.who)
            case "admission_limit":
                self.over.add((row.who, row["side"]))
            case "resize":
                add, remove = (
                    {(row.who, replica) for replica in numbers(row.get(way, ()))} for way in ("add", "remove")
                )
                self.out = (self.out | remove) - add
            case "progress":
                report = (int(row["completed"]), int(row["target"]))
                self.streams.setdefault(row.who, {})[row.get("stream", "training")] = report
            case "progress_end":
                self.streams.get(row.who, {}).pop(row.get("stream", "training"), None)
            case "unregister":
                for (name, cluster), kind in [*self.held.items()]:
                    if name == row.who:
                        self.free(name, cluster, kind)
                self.withdraw(row.who)
                self.leaving.add(row.who)
                self.closing.add(row.who)
                self.streams.pop(row.who, None)
            # A pipeline learns at once that its replica died; the desk, which may still shrink it, only when the devices are free.
            case "gone" | "died" if "replica" not in row.ids and row.get("core") != row.who:
                self.forget(row.who)

    def _take_request(self, row: Row) -> None:
        key = row.who, cluster_of(row)
        match row.event:
            case "acquire":
                if "release" in row.ids:
                    for cluster in (cluster_of(row), RUNS_ON.get(row["release"], row["release"])):
                        self.free(row.who, cluster, row["release"])
                self.set_up |= {row.who} if row["kind"] == "generation" else set()
                if self.asked.get(key, ("", 0))[0] != row["kind"]:  # one that is repeated keeps its place
                    self.asked[key] = row["kind"], row.at
            case "queued":
                (_, asked), before = self.asked.get(key, ("", row.at)), self.waiting.get(key)
                since = before.time if before is not None and before.at == asked else row.time
                self.waiting[key] = WaitingRequest(row["kind"], asked, int(row.get("target", 0)), since)
            case "granted" | "expired":
                self.end_request(key)
                if row.event == "granted" and row["kind"] != "generation":
                    self.held[key] = row["kind"]
            # The request that takes the place of a withdrawn one has been asked before the note.
            case "withdrawn":
                self.waiting.pop(key, None)
            case "error" if row.get("of") == "acquire":
                self.end_request(key)
            case "release" if row["kind"] != "generation":
                self.free(*key, row["kind"])
            case "release" | "planned_release":
                self.end_request(key)
                self.leaving.add(row.who)
            case "released":
                self.leaving -= {row.who} - self.closing
                self.generating.discard(row.who)

    def _take_replica(self, row: Row, key: tuple[str, int]) -> None:
        name, replica = key
        match row.event:
            case "left":
                self.active[name].discard(replica)
                self.sleeping.add(key)
            case "shrunk":
                self.sleeping.discard(key)
            case "expand":
                self.waking.add(key)
            case "expanded" if key in self.waking:
                self.waking.discard(key)
                self.active[name].add(replica)
                self.generating.add(name)
            case "error" if row.get("of") == "expand" and key in self.waking:  # not of one whose ranks have died since
                self.lose(key)
            case "died" if row.get("core") != name:
                self.lose(key)
            case "restarted":
                self.dead.discard(key)

    def lose(self, key: tuple[str, int]) -> None:
        name, replica = key
        if replica in self.replicas(name):
            self.dead.add(key)
            self.active[name].discard(replica)
            self.sleeping.discard(key)
            self.waking.discard(key)

    def free(self, name: str, cluster: str, kind: str) -> None:
        request = self.waiting.get((name, cluster))
        # One that the admission holds back has been asked for, but does not wait yet.
        if kind in (self.asked.get((name, cluster), ("", 0))[0], request.kind if request is not None else ""):
            self.end_request((name, cluster))
        if self.held.get((name, cluster)) == kind:
            del self.held[name, cluster]
            self.handed_over |= {name} if kind == "training" else set()

    def end_request(self, key: tuple[str, str]) -> None:
        self.asked.pop(key, None)
        self.waiting.pop(key, None)

    def withdraw(self, name: str) -> None:
        for key in [key for key in self.asked | self.waiting if key[0] == name]:
            self.end_request(key)

    def forget(self, name: str) -> None:
        for by_name in (self.clusters, self.tp, self.active, self.streams):
            by_name.pop(name, None)
        self.withdraw(name)
        self.held = {key: kind for key, kind in self.held.items() if key[0] != name}
        for replicas in (self.sleeping, self.waking):
            replicas -= {replica for replica in replicas if replica[0] == name}
        self.generating.discard(name)


ON_PURPOSE = "wrong on purpose"  # in `limits`: a planner whose plans a right desk refuses


def need(ledger: DeskLedger, *events: str) -> list[Row]:
    rows = ledger.of(*events)
    if not rows:
        raise Missing(f"the ledger has no {' or '.join(f'`{event}`' for event in events)} event")
    return rows


def has_ended(ledger: DeskLedger) -> bool:
    return any(row.who != ledger.desk for row in ledger.of("ended"))


def was_ordered(ledger: DeskLedger, *which: str) -> bool:
    """Whether the desk says that it has carried out a plan with such operations."""
    return bool(ledger.of("commit")) and any(row.get(name) for row in ledger.of("plan") for name in which)


def has_served(ledger: DeskLedger) -> bool:
    return has_ended(ledger) and any(row.get("kind") == "generation" for row in ledger.of("granted"))


def has_worked(ledger: DeskLedger) -> bool:
    """Whether a pipeline has ended and one has worked on its devices, or worked on them a second time."""
    work = [(row.who, cluster_of(row)) for row in ledger.of("granted") if row.get("kind", "generation") != "generation"]
    ends = has_ended(ledger) and bool(work)
    return (ends or len({*work}) < len(work)) and not any("release" in row.ids for row in ledger.of("acquire"))


def has_released(ledger: DeskLedger) -> bool:
    """Whether a pipeline has ended, and a plan only puts replicas to sleep, of one that neither leaves nor removes any."""
    others: set[str] = set()
    for row in ledger.of("plan", "unregister", "resize") if has_ended(ledger) else ():
        names = {text.partition(".")[0] for text in str(row.get("shrinks", "")).split()}
        if row.event != "plan":
            others.add(row.who)
        elif names - others and not row.get("grants") and not row.get("expands"):
            return True
    return False


# Lines of docs/ledger.md that the books are rebuilt from: by one of its events, all of them and what shows that another system left it
# out. A ledger of the kit's cores leaves nothing out: there a desk that writes no such row did no such thing.
LINES: Mapping[str, tuple[tuple[str, ...], Callable[[DeskLedger], bool]]] = {
    "limits": (("limits",), lambda _: True),
    "acquire": (("acquire", "granted"), lambda ledger: has_ended(ledger) or was_ordered(ledger, "grants")),
    "release": (("release", "planned_release", "released"), has_worked),
    "planned_release": (("release", "planned_release", "released"), has_released),
    "expand": (
        ("expand", "expanded", "joined", "left", "shrunk"),
        lambda ledger: has_served(ledger) or was_ordered(ledger, "shrinks", "expands"),
    ),
    "progress": (("progress", "progress_end"), has_ended),
    "unregister": (("unregister", "unregistered"), has_ended),
}
LEASES = ("limits", "acquire", "release", "expand")  # who has which device


def need_lines(ledger: DeskLedger, *lines: str) -> None:
    """Raise `Missing` if another system's ledger leaves one of these lines out."""
    for line in () if ledger.of_cores else lines:
        events, happened = LINES[line]
        if not ledger.of(*events) and happened(ledger):
            need(ledger, *events)


def need_plans(ledger: DeskLedger) -> list[Row]:
    """The plans of a ledger that also says which requests wait: without those a grant looks as if nobody had asked for it."""
    plans = need(ledger, "plan")
    if ledger.of("granted"):
        need(ledger, "acquire", "queued")
    return plans
