"""The rule that a replica uses a version only once it has been published there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from kit.results.records import Id, Row
from kit.results.rules import Missing, Violations
from kit.results.units import counted
from kit.stream.judge.history import REACTION, LoopLedger, by, ends_sync, listed, open_sync

MISSED = 2  # versions that a replica may miss after it joined: a sync may be under way, and the next may have begun


def publish_before_use(ledger: LoopLedger) -> Violations:
    """Is each version published on a replica before its use there, and does dispatch wait for it?"""
    published, bumped, used = ledger.need("published", "version", "replica"), ledger.by_event["bumped"], 0
    base = [] if any(row.number("version") == ledger.start for row in published) else [ledger.start]
    there: defaultdict[Id, list[int]] = defaultdict(lambda: [*base])  # versions by replica, the current one last
    late: dict[Id, list[int]] = {}  # versions of replicas that left: answers of a call in progress may arrive later
    held: Row | None = None
    bumps_hold = bool(ledger.by_event["hold"]) and not ledger.foreign
    ends_of_holds = [] if _shows_resumes(ledger) else published
    shows_syncs = any(ends_sync(row) for row in ledger.rows) and not ledger.leaves_out("synced")
    for row in ledger.rows:
        now, serves = ledger.version_at(row), there[row.get("replica", "")]
        if row.event in ("joined", "published"):
            serves += [row.number("version")] if row.event == "published" else []
            late.pop(row.get("replica", ""), None)
        elif row.event in ("left", "died"):
            late |= {row.get("replica", ""): there.pop(row.get("replica", ""), [])}
        elif row.event == "hold" or (row.event == "bumped" and bumps_hold):
            held = row  # the kit's loop holds dispatch from the row at which the version rises
        elif row.event == "resume":
            if held and shows_syncs and (began := open_sync(ledger.rows[held.at : row.at])):
                yield f"{row}: dispatch continues before the end of the sync that began in row {began.at}"
            held = None
        elif row.event == "sent":
            held = None if held and any(held.at < other.at < row.at for other in ends_of_holds) else held
            yield from _dispatched(row, held, serves, now if bumped else None)
        elif row.event in ("started", "tokens", "completed") and {"replica", "version"} <= row.ids.keys():
            used += 1
            version = row.number("newest" if "newest" in row.ids else "version")
            if bumped and version > now:
                yield f"{row}: version {version} is used; the current version is {now}"
            elif version not in serves + late.get(row["replica"], []) and not _is_from_elsewhere(ledger, row):
                yield f"{row}: version {version} is used before it was published on replica {row['replica']}"
    if held and not ends_of_holds:
        yield from _still_held(ledger, held)
    yield from _left_behind(ledger)
    yield from _falls_back(ledger)
    yield from _not_yet_there(ledger)
    if not used:
        raise Missing("no `tokens`, `started` or `completed` event has a `replica` and a `version`")
    return f"{counted(len(published), 'publication')}, {counted(used, 'use')}"


def _is_from_elsewhere(ledger: LoopLedger, row: Row) -> bool:
    """Whether a row states the version of a sample's oldest token, which another replica generated."""
    if row.event != "completed" or "newest" in row.ids:
        return False
    before = [
        other for other in ledger.life[row["group"]] if other.at < row.at and other.get("sample") == row["sample"]
    ]
    return any(other.get("replica", row["replica"]) != row["replica"] for other in before)


def _not_yet_there(ledger: LoopLedger) -> Iterator[str]:
    """Yield a violation per replica that its `sync` names and that has not published the version at `synced`, unless it is gone."""
    awaited: set[tuple[str, int]] = set()
    for row in ledger.of("sync", "published", "left", "died", "synced", "error"):
        replica = str(row.get("replica", ""))
        if row.event == "sync" and "replicas" in row.ids:
            awaited |= {(name, row.number("version")) for name in listed(row, "replicas")}
        elif row.event == "published":
            awaited.discard((replica, row.number("version")))
        elif row.event in ("left", "died"):
            awaited -= {order for order in awaited if order[0] == replica}
        elif ends_sync(row):
            for name, version in sorted(awaited) if row.event == "synced" else ():
                yield f"{row}: version {version} is not published on replica {name} yet"
            awaited.clear()


def _shows_resumes(ledger: LoopLedger) -> bool:
    """Whether a ledger shows when a hold ends. If another system writes no `resume`, dispatch may continue after a publication."""
    return not ledger.foreign or bool(ledger.by_event["resume"]) or not ledger.by_event["sent"]


def _falls_back(ledger: LoopLedger) -> Iterator[str]:
    """Yield a violation per request that begins with an older version than its replica had published before the request was sent."""
    newest: dict[Id, Row] = {}  # by replica
    sent: dict[tuple[Id, Id], Row] = {}
    for row in ledger.rows:
        if row.event == "published":
            newest[row["replica"]] = row
        elif row.event in ("left", "died"):
            newest.pop(row.get("replica", ""), None)
        elif row.event == "sent":
            sent[row["group"], row["sample"]] = row
        elif row.event == "started" and "version" in row.ids and row.get("replica", "") in newest:
            order, published = sent.get((row["group"], row["sample"])), newest[row["replica"]]
            if order and order.at > published.at and row.number("version") < published.number("version"):
                yield f"{row}: begins with version {row['version']}; row {published.at} published version {published['version']} there"


def _left_behind(ledger: LoopLedger) -> Iterator[str]:
    """Yield a violation for a replica that gets no version although the others got several after it joined.

    A replica that sleeps until a desk wakes it (`asleep`) needs none.
    """
    published = by(ledger.by_event["published"], "replica")
    for joined in [row for row in ledger.by_event["joined"] if "asleep" not in row.ids]:
        replica = joined.get("replica", "")
        gone = [row.at for name in ("left", "died") for row in ledger.by_event[name] if row.get("replica") == replica]
        until = min((at for at in gone if at > joined.at), default=len(ledger.rows))
        if any(joined.at < row.at < until for row in published.get(replica, ())):
            continue
        rows = [row for name, others in published.items() if name != replica for row in others]
        missed = {row.number("version") for row in rows if joined.at < row.at < until}
        if len(missed) > MISSED:
            yield f"{joined}: no version was published on this replica, while the others got {len(missed)}"


def _still_held(ledger: LoopLedger, held: Row) -> Iterator[str]:
    """Yield a violation if dispatch is held at the end, unless an error occurred during the sync."""
    end, synced = ledger.ended, [row for row in ledger.by_event["synced"] if row.at > held.at]
    why = end.get("why") if end else ""
    if ledger.foreign and why in ("done", "exhausted"):
        return  # another system may have nothing left to dispatch
    newest = max((row.number("version", 0) for row in ledger.by_event["bumped"]), default=0)
    served = any(row.number("version") >= newest for row in synced if "version" in row.ids)
    if served and (why == "done" or (why == "exhausted" and ledger.by_event["exhausted"])):
        return  # nothing is left to dispatch
    if why == "done":
        yield f"{end}: dispatch has been held since {held}, so the last version was never served"
    elif synced and (end is None or end.time > synced[-1].time + REACTION):
        yield f"{held}: dispatch never continued, although the weights were published by row {synced[-1].at}"


def _dispatched(row: Row, held: Row | None, serves: Sequence[int], now: int | None) -> Iterator[str]:
    if held:
        yield f"{row}: dispatched while dispatch was held (row {held.at})"
    elif "replica" in row.ids and now is not None and serves[-1:] != [now]:
        yield f"{row}: the replica has version {serves[-1] if serves else 'none'}; the current version is {now}"
