"""What a ledger shows as unanswered: requests for devices and to replicas, and who holds what a stuck pipeline waits for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from kit.results.records import Row, numbers
from kit.results.units import counted
from kit.share.books import RUNS_ON, TRAINER_CALLS, Books, DeskLedger, Request, cluster_of, replica_of, request_of

# -- requests and their ends ------------------------------------------------------------------------------------------------


def device_requests(ledger: DeskLedger) -> Iterator[tuple[Row, Row | None]]:
    """Yield each request for devices and the row that ends it: its answer, its release, or the end of its pipeline. Requests without an
    end come last."""
    asked: dict[tuple[str, str], Row] = {}
    for row in ledger.of("acquire", "gone", "error", "granted", "release", "planned_release"):
        own_keys = [key for key in asked if key[0] == row.who]
        if row.event == "acquire" and row.at not in ledger.refused:
            released = row.get("release", "")
            ended = [
                key for key in own_keys if key[1] == RUNS_ON.get(released, released) and asked[key]["kind"] == released
            ]
        elif row.event == "gone" or (row.event == "error" and row.get("of") == ledger.desk):
            ended = own_keys
        elif row.event in ("granted", "release", "planned_release") or (
            row.event == "error" and row.get("of", "acquire") == "acquire"
        ):
            kind = row.get("kind", "generation")
            ended = [key for key in own_keys if key[1] == cluster_of(row) and asked[key]["kind"] == kind]
        else:
            continue
        yield from ((asked.pop(key), row) for key in ended)
        if row.event == "acquire" and row.at not in ledger.refused:
            asked.setdefault((row.who, cluster_of(row)), row)
    yield from ((wait, None) for wait in asked.values())


def flights(ledger: DeskLedger) -> Iterator[tuple[Row, dict[Request, Row]]]:
    """Yield each row and the requests to replicas in flight before it, each with the row that sent it."""
    flying: dict[Request, Row] = {}
    for row in ledger.rows:
        yield row, flying
        if row.event == "sent":
            flying[request_of(row)] = row
        elif row.event in ("completed", "cancelled", "failed") and "sample" in row.ids:
            flying.pop(request_of(row), None)
        elif row.event in ("left", "shrink", "died", "gone"):
            gone = (row.who, row["replica"]) if "replica" in row.ids else None  # None: the whole pipeline
            flying = {
                request: sent
                for request, sent in flying.items()
                if sent.who != row.who or gone not in (None, replica_of(sent))
            }


def stranded(ledger: DeskLedger) -> dict[Request, tuple[Row, Row]]:
    """Requests that were never sent again after their replica left, although their group goes on: the rows that sent them, and
    `left`."""
    stranded_pairs: dict[Request, tuple[Row, Row]] = {}
    for row, flying in flights(ledger):
        if row.event == "sent":
            stranded_pairs.pop(request_of(row), None)
        elif row.event in ("cleared", "aborted", "evicted", "dropped", "failed", "replaced") and "group" in row.ids:
            if row.event != "failed" or "sample" not in row.ids:
                stranded_pairs = {
                    request: pair for request, pair in stranded_pairs.items() if request[:2] != request_of(row)[:2]
                }
        elif row.event in ("left", "shrink"):  # requests sent between the two are stranded too
            stranded_pairs |= {
                request: (sent, row) for request, sent in flying.items() if replica_of(sent) == replica_of(row)
            }
        elif row.event == "died" and "replica" not in row.ids:
            stranded_pairs = {request: pair for request, pair in stranded_pairs.items() if request[0] != row.who}
    return stranded_pairs


def trainer_calls(ledger: DeskLedger, name: str) -> list[Row]:
    """The calls of a pipeline's trainer without an answer."""
    calls: list[Row] = []
    for row in ledger.rows:
        if row.who == name and row.get("to") == "trainer" and row.event in TRAINER_CALLS:
            calls.append(row)
        elif row.who == name and row.event == "abort":
            calls = []
        elif row.who == name and row.event in ("done", "error") and row.get("of") in TRAINER_CALLS:
            calls = [call for call in calls if call.event != row["of"]]
    return calls


def open_syncs(ledger: DeskLedger, name: str) -> list[tuple[Row, list[int]]]:
    """The syncs of a pipeline, with the replicas that have not published the version."""
    syncs: list[tuple[Row, set[int]]] = []
    for row in ledger.rows:
        if row.who != name:
            continue
        if row.event == "sync" and "replicas" in row.ids:
            syncs.append((row, {*numbers(row["replicas"])}))
        elif row.event in ("published", "left", "died") and "replica" in row.ids:
            for _, waits in syncs:
                waits.discard(row["replica"])
    return [(sync, sorted(waits)) for sync, waits in syncs if waits]


# -- who waits for what -----------------------------------------------------------------------------------------------------


def waits_of(ledger: DeskLedger, name: str) -> str:
    """What a pipeline or the desk waits for at the end of a ledger. Without any of it, the last row of its core."""
    books = ledger.last_books()
    waits = [
        *(
            f"it waits for {wanted_devices(books, asked)}"
            for asked, end in device_requests(ledger)
            if is_open(asked, end, name)
        ),
        *(
            f"its sync of version {sync['version']} (row {sync.at}) has no answer of replica {listed_values(numbers_left)}"
            for sync, numbers_left in open_syncs(ledger, name)
        ),
        *(
            f"{name} trainer has not answered `{call.event}` (row {call.at})"
            for call in trainer_calls(ledger, name)[-1:]
        ),
        *unanswered_orders(books, None if name == ledger.desk else name),
        *unanswered_samples(ledger, name),
        *without_replica(books, name),
    ]
    if name == ledger.desk and not waits:
        stays = [pipeline for pipeline in books.clusters if pipeline not in books.closing]
        waits = [f"it waits for {listed_values(stays)} to leave"] if stays else []
        waits += [
            f"it has not answered `unregister` of {pipeline}" for pipeline in books.clusters if pipeline not in stays
        ]
    rows = [row for row in ledger.rows if name in (row.get("core"), row.who)]
    return "; ".join(waits) or f"its last row is {rows[-1] if rows else ledger.rows[-1]}"


def is_open(asked: Row, end: Row | None, name: str) -> bool:
    return end is None and asked.who == name


def unanswered_orders(books: Books, name: str | None) -> Iterator[str]:
    """The replicas of a pipeline, or of all, that were ordered to sleep or to wake and have not."""
    for replicas, order in ((books.sleeping, "fall asleep"), (books.waking, "wake")):
        for who, replica in sorted(replicas):
            if name in (None, who):
                yield f"replica {replica} of {who} was ordered to {order} and has not answered"


def unanswered_samples(ledger: DeskLedger, name: str) -> Iterator[str]:
    last: dict[Request, Row] = {}
    for _, flying in flights(ledger):
        last = flying
    sent = [row for request, row in last.items() if request[0] == name]
    if sent:
        at = sorted({row.number("replica") for row in sent})
        yield f"{counted(len(sent), 'request')} to replica {listed_values(at)} without an answer, the first is {sent[0]}"
    lost = [pair for request, pair in stranded(ledger).items() if request[0] == name]
    if lost:
        first, left = lost[0]
        yield f"{counted(len(lost), 'request')} never sent again after the replica left (row {left.at}), the first is {first}"


def without_replica(books: Books, name: str) -> Iterator[str]:
    done, target = books.progress(name)
    if target > done and name in books.clusters and not books.active.get(name):
        yield f"it has no replica awake and {target - done} of {target} groups left"


def wanted_devices(books: Books, asked: Row) -> str:
    """The devices of a request, and their owners."""
    cluster = cluster_of(asked)
    devices = books.clusters.get(asked.who, {}).get(cluster, ())
    owners = books.owners()
    held = [f"{owner} holds device {device}" for device in devices for owner in owners.get(device, ())]
    others = [words for words in held if f" of {asked.who} " not in words]
    which = f"device {listed_values(devices)}" if devices else cluster
    return (
        f"{which} since {asked.since:.3f} s ({asked['kind']}, row {asked.at}): {', '.join(others) or 'nobody holds it'}"
    )


def circle(books: Books, asked: Iterable[Row]) -> tuple[frozenset[str], str]:
    """The pipelines of a circle in which each holds a device that the one before it waits for, and a sentence; empty without one.
    Replicas are not in it: the desk may put them to sleep.
    """
    holds = {device: (name, cluster) for name, cluster in books.held for device in books.clusters[name][cluster]}
    waits: dict[str, list[tuple[int, str]]] = {}  # by pipeline: the devices that it waits for, and who holds them
    for row in asked:
        for device in books.clusters.get(row.who, {}).get(cluster_of(row), ()):
            if device in holds and holds[device][0] != row.who:
                waits.setdefault(row.who, []).append((device, holds[device][0]))
    ends: set[str] = set()
    names = next(filter(None, (way_back(waits, (first,), ends) for first in waits)), ())
    return frozenset(names), "; ".join(f"{who} waits for {held_by_others(waits[who], holds)}" for who in names)


def way_back(waits: Mapping[str, Sequence[tuple[int, str]]], path: tuple[str, ...], ends: set[str]) -> tuple[str, ...]:
    """The pipelines of a path from the first one that its last one waits for, whatever else it waits for; empty if no path leads back.
    `ends` are pipelines from which none does, and get more of them."""
    for owner in dict.fromkeys(owner for _, owner in waits.get(path[-1], ())):
        if owner in path:
            return path[path.index(owner) :]
        if owner not in ends and (names := way_back(waits, (*path, owner), ends)):
            return names
    ends.add(path[-1])
    return ()


def held_by_others(waits: list[tuple[int, str]], holds: dict[int, tuple[str, str]]) -> str:
    return " and ".join(f"device {device}, which {name} holds ({holds[device][1]})" for device, name in waits)


def listed_values(values: Iterable[object]) -> str:
    return " and ".join(map(str, values))
