"""A ledger of leases, kept again from its rows: who has which device, who waits, who generates where. No count of the desk's is used.

Rows that a runner writes twice, as a command and as the event of another core, count once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kit.errors import BadInput
from kit.loop.messages import numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

ORDER = ("initialisation", "training", "critic", "logprobs", "reference", "values", "generation")
RUNS_ON = {
    "initialisation": "trainer",
    "training": "trainer",
    "critic": "critic",
    "logprobs": "trainer",
    "values": "critic",
}
ANSWERS = (
    "registered",
    "admitted",
    "granted",
    "error",
    "left",
    "joined",
    "released",
    "resized",
    "unregistered",
)  # of the desk


@dataclass(frozen=True, slots=True)
class Row:
    """`who` is the pipeline that it is about, `turn` the number of the desk's turn that it belongs to."""

    at: int
    event: str
    time: float
    since: float
    who: str
    turn: int
    ids: Mapping[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        return self.ids.get(name, default)

    def __getitem__(self, name: str) -> Any:
        return self.ids[name]

    @property
    def cluster(self) -> str:
        kind = str(self.get("kind", "generation"))
        return str(self.get("cluster", RUNS_ON.get(kind, kind)))

    def __str__(self) -> str:
        about = "".join(f" {name}={self.ids[name]}" for name in ("kind", "replica", "number") if name in self.ids)
        return f"`{self.event}` of {self.who}{about} (row {self.at}, {self.since:.3f} s)"


class Ledger:
    """The rows that concern the desk, in order. Each is a mapping with `event`, `time` and ids."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        found = list(rows)
        limits = next((row for row in found if row.get("event") == "limits"), {})
        self.desk = str(limits.get("pipeline", "desk"))
        self.limits = dict(limits)
        self.rows: list[Row] = []
        turn = 0
        for at, row in enumerate(found):
            if "event" not in row or not isinstance(row.get("time"), int | float):
                raise BadInput(
                    f"row {at} of the ledger is {dict(row)!r}; a row needs an `event` and a `time` in seconds"
                )
            core, ours = row.get("core"), row.get("pipeline") == self.desk
            turn += core == self.desk or (core is None and row["event"] in OPERATIONS)
            if row.get("to") == self.desk or (core not in (None, self.desk) and row["event"] in ANSWERS):
                continue  # it comes, or came, a second time
            ids = {name: value for name, value in row.items() if name not in ("event", "time", "pipeline")}
            who = str(row.get("who", self.desk if ours else row.get("pipeline", "")))
            self.rows.append(Row(at, str(row["event"]), row["time"], row["time"] - found[0]["time"], who, turn, ids))
        self.refused = self._refused()

    def of(self, *events: str) -> list[Row]:
        return [row for row in self.rows if row.event in events]

    def limit(self, name: str, default: int) -> int:
        return int(self.limits.get(name, default))

    def replay(self) -> Iterator[tuple[Row, Books]]:
        """Each row with the books before it, up to the desk's end; `books.take(row)` is done when the next one is asked for."""
        books = Books(self.limit("devices", 0))
        for row in self.rows:
            yield row, books
            if row.event == "ended" and row.who == self.desk:
                return
            if row.at not in self.refused:
                books.take(row)

    def turns(self) -> Iterator[tuple[Row, Books]]:
        """The last row of each of the desk's turns, and the books after it."""
        last: Row | None = None
        for row, books in self.replay():
            if last is not None and row.turn != last.turn:
                yield last, books
            last = row

    def _refused(self) -> set[int]:
        """Operations that the same turn answers with an error."""
        asked = {row.turn: row for row in self.rows if row.event in OPERATIONS}
        errors = [row for row in self.rows if row.event == "error" and row.get("of") in OPERATIONS]
        pairs = [(asked.get(row.turn), row) for row in errors]
        return {one.at for one, row in pairs if one and (one.who, one.event) == (row.who, row["of"])}


OPERATIONS = (
    "register",
    "admit",
    "acquire",
    "release",
    "planned_release",
    "resize",
    "unregister",
    "progress",
    "progress_end",
)


@dataclass(slots=True)
class Books:
    """What follows from the rows so far. A replica is (pipeline, number), a cluster (pipeline, name)."""

    devices: int
    clusters: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)  # in order of registration
    tp: dict[str, int] = field(default_factory=dict)
    admitted: set[str] = field(default_factory=set)
    set_up: set[str] = field(default_factory=set)
    handed_over: set[str] = field(default_factory=set)
    over: set[tuple[str, str]] = field(default_factory=set)  # sides of the admission that reached their limit
    waiting: dict[tuple[str, str], tuple[str, int, int, float]] = field(
        default_factory=dict
    )  # kind, number, target, since
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
    plan: Row | None = None  # the one under way

    def bundle(self, name: str, replica: int) -> frozenset[int]:
        tp = self.tp[name]
        return frozenset(self.clusters[name]["generation"][replica * tp : (replica + 1) * tp])

    def replicas(self, name: str) -> range:
        return range(len(self.clusters[name].get("generation", ())) // self.tp[name])

    def progress(self, name: str) -> tuple[int, int]:
        reports = self.streams.get(name, {}).values()
        return sum(min(done, target) for done, target in reports), sum(target for _, target in reports)

    def owners(self) -> dict[int, list[str]]:
        """Who has each device: a replica from the order to wake until it sleeps, a cluster from its grant until its release."""
        found: dict[int, list[str]] = {device: [] for device in range(self.devices)}
        moving = self.sleeping | self.waking
        for name, replica in moving | {(name, one) for name, some in self.active.items() for one in some}:
            for device in self.bundle(name, replica):
                found.setdefault(device, []).append(f"replica {replica} of {name}")
        for name, cluster in self.held:
            for device in self.clusters[name][cluster]:
                found.setdefault(device, []).append(f"{cluster} of {name}")
        return found

    def idle(self) -> set[int]:
        return {device for device, owners in self.owners().items() if not owners}

    def copy(self) -> Books:
        new = Books(self.devices, dict(self.clusters), dict(self.tp), waiting=dict(self.waiting), held=dict(self.held))
        new.active = {name: set(some) for name, some in self.active.items()}
        new.generating, new.out, new.dead, new.leaving = {*self.generating}, {*self.out}, {*self.dead}, {*self.leaving}
        new.sleeping, new.waking, new.streams = {*self.sleeping}, {*self.waking}, {**self.streams}
        return new

    # -- rows -------------------------------------------------------------------------------------------------------------

    def take(self, row: Row) -> None:
        if row.event == "clusters" or row.who in self.clusters or row.event in ("plan", "commit"):
            getattr(self, f"_{row.event}", lambda _: None)(row)

    def _clusters(self, row: Row) -> None:
        known = ("trainer", "critic", "reference", "generation")
        self.clusters[row.who] = {name: numbers(str(row[name])) for name in known if name in row.ids}
        self.tp[row.who] = int(row.get("tp", 1))
        self.active[row.who] = set()

    def _admitted(self, row: Row) -> None:
        self.admitted.add(row.who)

    def _admission_limit(self, row: Row) -> None:
        self.over.add((row.who, row["side"]))

    def _acquire(self, row: Row) -> None:
        if "release" in row.ids:
            for cluster in (row.cluster, RUNS_ON.get(row["release"], row["release"])):
                self.free(row.who, cluster, row["release"])
        if row["kind"] == "generation":
            self.set_up.add(row.who)

    def _queued(self, row: Row) -> None:
        self.waiting[row.who, row.cluster] = (row["kind"], int(row["number"]), int(row.get("target", 0)), row.time)

    def _granted(self, row: Row) -> None:
        self.waiting.pop((row.who, row.cluster), None)
        if row["kind"] != "generation":
            self.held[row.who, row.cluster] = row["kind"]

    def _expired(self, row: Row) -> None:
        self.waiting.pop((row.who, row.cluster), None)

    _withdrawn = _expired

    def _release(self, row: Row) -> None:
        if row["kind"] == "generation":
            self.leaving.add(row.who)
        else:
            self.free(row.who, row.cluster, row["kind"])

    def _planned_release(self, row: Row) -> None:
        self.leaving.add(row.who)

    def free(self, name: str, cluster: str, kind: str) -> None:
        if self.held.get((name, cluster)) == kind:
            del self.held[name, cluster]
            self.handed_over |= {name} if kind == "training" else set()

    def _unregister(self, row: Row) -> None:
        for (name, cluster), kind in [one for one in self.held.items() if one[0][0] == row.who]:
            self.free(name, cluster, kind)
        self.leaving.add(row.who)
        self.closing.add(row.who)
        self.streams.pop(row.who, None)

    def _released(self, row: Row) -> None:
        self.leaving -= {row.who} - self.closing
        self.generating.discard(row.who)

    def _resize(self, row: Row) -> None:
        add, remove = ({(row.who, one) for one in numbers(str(row.get(name, "")))} for name in ("add", "remove"))
        self.out = (self.out | remove) - add

    def _progress(self, row: Row) -> None:
        report = (int(row["completed"]), int(row["target"]))
        self.streams.setdefault(row.who, {})[row.get("stream", "training")] = report

    def _progress_end(self, row: Row) -> None:
        self.streams.get(row.who, {}).pop(row.get("stream", "training"), None)

    def _left(self, row: Row) -> None:
        self.active[row.who].discard(row["replica"])
        self.sleeping.add((row.who, row["replica"]))

    def _shrunk(self, row: Row) -> None:
        self.sleeping.discard((row.who, row["replica"]))

    def _expand(self, row: Row) -> None:
        self.waking.add((row.who, row["replica"]))

    def _expanded(self, row: Row) -> None:
        if (row.who, row["replica"]) in self.waking:
            self.waking.discard((row.who, row["replica"]))
            self.active[row.who].add(row["replica"])
            self.generating.add(row.who)

    def _error(self, row: Row) -> None:
        if row.get("of") == "expand":
            self.lose(row.who, row["replica"])

    def _died(self, row: Row) -> None:
        """A pipeline hears at once that a replica of it died, the desk once the devices are free: until then it may still shrink it."""
        if row.get("core") == row.who:
            return
        if "replica" in row.ids:
            self.lose(row.who, row["replica"])
        else:
            self._gone(row)

    def lose(self, name: str, replica: int) -> None:
        if replica in self.replicas(name):
            self.dead.add((name, replica))
            self.active[name].discard(replica)
            self.sleeping.discard((name, replica))
            self.waking.discard((name, replica))

    def _gone(self, row: Row) -> None:
        name = row.who
        for table in (self.clusters, self.tp, self.active, self.streams):
            table.pop(name, None)
        self.waiting = {key: value for key, value in self.waiting.items() if key[0] != name}
        self.held = {key: value for key, value in self.held.items() if key[0] != name}
        for some in (self.sleeping, self.waking):
            some -= {one for one in some if one[0] == name}
        self.generating.discard(name)

    def _plan(self, row: Row) -> None:
        self.plan = row

    def _commit(self, _: Row) -> None:
        self.plan = None
