"""What a ledger shows as unanswered: requests for devices and to replicas, and who holds what a stuck pipeline waits for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kit.results.ledger import is_note
from kit.results.records import Row, numbers
from kit.results.units import counted
from kit.share.judge.books import RUNS_ON, TRAINER_CALLS, Books, DeskLedger, Request, cluster_of, replica_of, request_of

MOST_NAMED = 4  # devices, or those who hold them; of more only the first
WITH_ANSWER = ("register", "admit", "acquire", "planned_release", "resize", "unregister")
# Operations that an answer ends; a pipeline that was admitted has been registered.
ENDED_BY = {
    "registered": ("register",),
    "admitted": ("register", "admit"),
    "granted": ("register", "admit"),
    "released": ("release", "planned_release"),
    "resized": ("resize",),
    "unregistered": (*WITH_ANSWER, "release"),
}

# -- requests and their ends ------------------------------------------------------------------------------------------------


def device_requests(ledger: DeskLedger) -> Iterator[tuple[Row, Row | None]]:
    """Yield each request for devices and the row that ends it: its answer, its release, or the end of its pipeline. Requests without an
    end come last."""
    asked: dict[tuple[str, str], Row] = {}
    rows = ledger.of("acquire", "gone", "error", "granted", "release", "planned_release")
    # A desk may note that a pipeline is gone before it answers what that one asked for.
    for row in sorted(rows, key=lambda row: (ledger.turn[row.at], row.event == "gone")):
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


def open_requests(ledger: DeskLedger) -> Iterator[tuple[Row, Books, dict[tuple[str, str], Row]]]:
    """Yield each row with the books before it and the requests for devices that were open before it, by pipeline and cluster. A request
    is open from its `acquire` to its end, whatever the desk notes about it."""
    ends = {asked.at: -1 if end is None else end.at for asked, end in device_requests(ledger)}
    asked: dict[tuple[str, str], Row] = {}
    for row, books in ledger.replay():
        yield row, books, asked
        for key in [key for key, request in asked.items() if ends[request.at] == row.at]:
            del asked[key]
        if row.at in ends:
            asked[row.who, cluster_of(row)] = row


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
        finished = row.event == "completed" and "sample" in row.ids  # a replica may finish what it has, then sleep
        if row.event == "sent" or finished:
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
        elif row.event in ("published", "left", "shrink", "died") and "replica" in row.ids:
            for _, waits in syncs:
                waits.discard(row["replica"])
    return [(sync, sorted(waits)) for sync, waits in syncs if waits]


def unanswered_operations(ledger: DeskLedger, name: str) -> list[Row]:
    """The operations of a pipeline without an answer, apart from requests for devices that the desk has read."""
    waits: list[Row] = []
    for row in ledger.rows:
        if row.who == name and row.at not in ledger.refused:
            if has_answer(row) and row.event != "acquire":
                waits.append(row)
            elif row.event == "error" and row.get("of") == ledger.desk:
                waits = []
            else:
                ended = {row.get("of")} if row.event == "error" else ENDED_BY.get(row.event, ())
                waits = [wait for wait in waits if wait.event not in ended]
    return waits + [row for row in ledger.unheard if row.who == name and has_answer(row)]


def has_answer(operation: Row) -> bool:
    """Whether the desk owes an answer to it."""
    of_generation = operation.event == "release" and cluster_of(operation) == "generation"
    return of_generation or operation.event in WITH_ANSWER


# -- who waits for what -----------------------------------------------------------------------------------------------------


def never_ended(ledger: DeskLedger, names: Iterable[str]) -> str:
    """What each of these cores waits for. Those with an unanswered request come first, and the desk, which waits for all, last."""
    waits = {name: unanswered(ledger, name) for name in names}
    order = sorted(waits, key=lambda name: (name == ledger.desk, not waits[name]))
    return "; ".join(f"{name} never ended; {waits_of(ledger, name)}" for name in order)


def waits_of(ledger: DeskLedger, name: str) -> str:
    """What a pipeline or the desk waits for at the end of a ledger. Without any of it, the last row of its core."""
    books = ledger.last_books()
    waits = [*unanswered(ledger, name), *unanswered_samples(ledger, name), *without_replica(books, name)]
    if not waits:
        waits += desk_waits(ledger, books) if name == ledger.desk else not_requested(books, name)
    rows = [row for row in ledger.rows if name in (row.get("core"), row.who)]
    return "; ".join(waits) or f"its last row is {rows[-1] if rows else ledger.rows[-1]}"


def unanswered(ledger: DeskLedger, name: str) -> list[str]:
    """The requests of a core to others that have no answer."""
    books = ledger.last_books()
    return [
        *without_answer(ledger, unanswered_operations(ledger, name)),
        *(
            f"it waits for {wanted_devices(books, asked)}"
            for asked, end in device_requests(ledger)
            if end is None and asked.who == name
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
        *not_joined(ledger, books, name),
    ]


def without_answer(ledger: DeskLedger, operations: Sequence[Row]) -> Iterator[str]:
    if operations:
        over = [row for row in ledger.of("ended") if row.who == ledger.desk]
        why = f", because the desk had ended (row {over[0].at})" if over and over[0].at < operations[0].at else ""
        yield f"{listed_values(operations)} {'has' if len(operations) == 1 else 'have'} no answer{why}"


def unanswered_orders(books: Books, name: str | None) -> Iterator[str]:
    """The replicas of a pipeline, or of all, that were ordered to sleep or to wake and have not."""
    for replicas, order in ((books.sleeping, "fall asleep"), (books.waking, "wake")):
        for who, replica in sorted(replicas):
            if name in (None, who):
                yield f"replica {replica} of {who} was ordered to {order} and has not answered"


def not_joined(ledger: DeskLedger, books: Books, name: str) -> Iterator[str]:
    """The replicas of a pipeline that are awake, which the desk has not told it. Another system's ledger may leave it out."""
    woken: dict[Any, Row] = {}
    for row in ledger.rows if ledger.of("begins") else ():
        if row.event == "expanded" and row.who == name:
            woken[row.get("replica")] = row
        elif row.event == "joined" and row.who == name and not is_note(row):
            woken.pop(row.get("replica"), None)
    if awake := [replica for replica in woken if replica in books.active.get(name, ())]:
        yield f"the desk has sent no `joined` of replica {listed_values(awake)} of {name}, awake since row {woken[awake[0]].at}"


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
        asks = name in books.generating or any(
            (name, "generation") in by_key for by_key in (books.asked, books.waiting)
        )
        never = "" if asks else ", and it has not requested generation"
        yield f"it has no replica awake and {target - done} of {target} groups left{never}"


def not_requested(books: Books, name: str) -> Iterator[str]:
    done, target = books.progress(name)
    if done == target > 0 and name in books.clusters:
        yield f"{done} of {target} groups of its step are complete, and it has not requested devices to train"


def desk_waits(ledger: DeskLedger, books: Books) -> Iterator[str]:
    """The pipelines that the desk waits for, or that wait for it."""
    expected = [name for name in str(ledger.limits.get("pipelines", "")).split(",") if name]
    came = {row.who for row in ledger.of("clusters", "died", "gone")}
    operations = {name: unanswered_operations(ledger, name) for name in [*books.clusters, *expected]}
    owed = [
        f"`{event}` of {name}"
        for name, rows in operations.items()
        for event in dict.fromkeys(row.event for row in rows)
    ]
    owed += [f"`unregister` of {name}" for name in books.clusters if name in books.closing and not operations[name]]
    if owed:
        yield f"it has not answered {listed_values(owed)}"
    if stays := [name for name in books.clusters if name not in books.closing and not operations[name]]:
        yield f"it waits for {listed_values(stays)} to leave"
    if absent := [name for name in expected if name not in came and not operations[name]]:
        yield f"it waits for {listed_values(absent)} to register"
    if not any(operations.values()) and not books.clusters and not absent and (gone := ledger.of("gone", "died")):
        yield f"every pipeline has left, the last in row {gone[-1].at}"


def wanted_devices(books: Books, asked: Row) -> str:
    """The devices of a request, and their owners."""
    which, holders = devices_and_holders(books, asked.who, cluster_of(asked))
    return f"{which} since {asked.since:.3f} s ({asked['kind']}, row {asked.at}): {holders}"


def devices_and_holders(books: Books, name: str, cluster: str) -> tuple[str, str]:
    """The devices of a pipeline's cluster in words, and those who hold them beside the pipeline itself."""
    devices = books.clusters.get(name, {}).get(cluster, ())
    held: dict[str, list[int]] = {}
    owners = books.owners()
    for device in devices:
        for owner in owners.get(device, ()):
            held.setdefault(owner, []).append(device)
    others = [
        f"{owner} holds {devices_in_words(of_it)}" for owner, of_it in held.items() if not owner.endswith(f" of {name}")
    ]
    more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
    nobody = f"nobody else holds {'it' if len(devices) == 1 else 'them'}"
    return devices_in_words(devices) if devices else cluster, ", ".join(others[:MOST_NAMED]) + more or nobody


def devices_in_words(devices: Sequence[int]) -> str:
    if len(devices) > MOST_NAMED:
        return f"{len(devices)} devices (the first is {devices[0]})"
    return f"{'device' if len(devices) == 1 else 'devices'} {listed_values(devices)}"


# -- why a core failed ------------------------------------------------------------------------------------------------------


def failure_of_desk(ledger: DeskLedger, end: Row) -> str:
    """A desk that ended with an error, and the row that it read last; and what had died before."""
    read = [row for row in ledger.rows if row.at < end.at and ledger.turn[row.at] == ledger.turn[end.at]][:1]
    died = [row for row in ledger.of("died") if row.at < end.at and row not in read][-1:]
    when = f"; the last event that it read is {read[0]}" if read else ""
    after = f", after {died[0]}" if died else ""
    return f"{end}: ended with an error: {end.get('error', '')}{when}{after}"


def failure_of_pipeline(ledger: DeskLedger, end: Row) -> str:
    """A pipeline that ended with an error; if that is a request's, the devices and their holders."""
    error = str(end.get("error", ""))
    words = f"{end}: ended with an error: {error}"
    refused = [
        (asked, answer)
        for asked, answer in device_requests(ledger)
        if answer is not None
        and answer.event == "error"
        and asked.who == end.who
        and str(answer.get("why", "?")) in error
    ]
    if not refused:
        return words
    asked, answer = refused[-1]
    books = next((books for row, books in ledger.replay() if row.at == answer.at), ledger.last_books())
    idle = asked["kind"] == "generation" and not books.streams.get(end.who)
    no_work = f"; {end.who} had reported no work" if idle else ""
    return f"{words}; it had asked for {wanted_devices(books, asked)}{no_work}"


# -- circles ----------------------------------------------------------------------------------------------------------------


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
    *others, last = map(str, values)
    return f"{', '.join(others)} and {last}" if others else last
