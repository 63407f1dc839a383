"""The rule of how many groups may be in the buffer and in flight, and when a group may start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import zip_longest

from kit.results.records import Id, Row
from kit.results.rules import Missing, Violations
from kit.results.units import counted
from kit.stream.judge.given_up import failed_requests
from kit.stream.judge.history import BY_TARGET, GATED, NO_AGE_LIMIT, LoopLedger, limits_age

LOST = ("failed", "dropped", "aborted")  # ends after which another group may take the group's place in the batch


def capacity_kept(ledger: LoopLedger) -> Violations:
    """Do the groups in the buffer and in flight stay within their limits, and does no group start too early?"""
    ledger.need("reserved", "group")
    counts = []
    for name in ("places", "slots"):
        if ledger.setting(name) is not None:
            counts += [(yield from _occupied(ledger, name, ledger.size(name)))]
    counts += filter(None, [(yield from admitted(ledger))])
    if not counts:
        raise Missing("the ledger has no `capacity` event with `places`, `slots`, or the window of a gate")
    return ", ".join(counts)


REQUESTED = ("sent", "started", "tokens", "completed", "ready")  # events of a group only once it has been dispatched


def _occupied(ledger: LoopLedger, name: str, limit: int) -> Violations:
    """Count groups in the buffer or in flight, from the permit or `reserved` on. A permit returned early does not free its place; one taken
    just after `reserved` is early enough for the first request."""
    permit, leaving = name[:-1], _leaving(ledger, name)
    where = "are in the buffer" if name == "places" else "are in flight"
    # Without the permit's return, a group that is replaced leaves when the other takes its place.
    unreturned = ledger.leaves_out(f"{permit}_back")
    replaces = {row.get("by"): row["group"] for row in ledger.by_event["replaced"] if unreturned}
    inside: set[Id] = set()
    holding: set[Id] = set()
    leave, most = set[int](), 0
    dispatched: set[int] = set()
    for rows in ledger.life.values():
        dispatched |= {row.at for row in [row for row in rows if row.event in REQUESTED][:1]}
        earlier_samples = [row.at for row in rows if row.event == "completed"][:-1]
        own_rows = [
            row
            for row in rows
            if (row.event in (permit, f"{permit}_back", leaving, "selected") or ledger.is_end(row))
            and row.at not in earlier_samples
        ]
        for row, after in zip_longest(own_rows, own_rows[1:]):
            soon = row.event == f"{permit}_back" and after is not None and after.event == leaving
            leave |= {row.at} if row.event != permit and not soon else set()
    for row in ledger.rows:
        group = row.get("group")
        if row.event == permit and group is not None:
            holding.add(group)
        elif row.at in dispatched and ledger.by_event[permit] and group not in holding:
            yield f"{row}: dispatched without a {permit}"
        if row.event in (permit, "reserved") and group is not None:
            inside.discard(replaces.get(group, group))
            inside.add(group)
            most = max(most, len(inside))
            if len(inside) > limit:
                yield f"{row}: {len(inside)} groups {where}, {name}: {limit}"
        elif row.at in leave:
            inside.discard(group)
            holding.discard(group)
    return f"at most {most} of {limit} {name}"


def _leaving(ledger: LoopLedger, name: str) -> str:
    """The event with which a group leaves the buffer or the slots. If another system does not write it, one that comes before it."""
    events = ("selected", "ready") if name == "places" else ("ready",)
    return next((event for event in events if not ledger.leaves_out(event)), "completed")


def admitted(ledger: LoopLedger) -> Violations:
    """Check the gate: at most (window + version + 1) batches since version 0, no batch beyond version + window, and none without a step."""
    sampler, window, batch = ledger.setting("sampler"), ledger.limit("window"), ledger.limit("groups_per_step")
    if ":" in str(sampler) and window is not None and limits_age(ledger):
        return (yield from _own_targets(ledger, window))
    if (
        (sampler not in GATED and limits_age(ledger))
        or window is None
        or batch is None
        or not ledger.by_event["bumped"]
    ):
        return ""
    failed = failed_requests(ledger)
    if failed and ledger.leaves_out_ends:
        return ""  # groups were lost, which no row shows
    heirs = {row.get("by") for row in ledger.by_event["replaced"]}  # groups that replace another in its batch
    lost = LOST if limits_age(ledger) or sampler in NO_AGE_LIMIT else (*LOST, "evicted")
    ahead, started = 0 if sampler == "strict" else window, ledger.start * batch
    gone = {_lost_at(ledger, end, failed) for end in ledger.of(*lost, "filtered") if ledger.is_end(end)}
    for row in ledger.rows:
        started -= row.at in gone
        if row.event == "reserved":
            started += row["group"] not in heirs
            now = ledger.version_at(row)
            allowed = (ahead + now + 1) * batch
            if started > allowed:
                yield f"{row}: {counted(started, 'group')} started up to version {now}; the window allows {allowed}"
            elif sampler in BY_TARGET and not now <= row.number("target", now) <= now + ahead:
                yield f"{row}: started for version {row['target']} at version {now}; the window allows {now} to {now + ahead}"
    yield from _beyond_the_run(ledger, batch, heirs, failed)
    return f"{counted(started, 'group')} started in time"


def _beyond_the_run(
    ledger: LoopLedger, batch: int, heirs: Set[Id], failed: Mapping[Id, Sequence[Row]]
) -> Iterator[str]:
    """Yield a violation per group that no step of the run can train: it is for a later one, or all steps had groups that were not lost.
    What is given up after the last step does not count as lost."""
    steps, sampler = ledger.limit("steps"), ledger.setting("sampler")
    # An own sampler does not know the steps, and "capacity" goes by what is running.
    if steps is None or sampler not in GATED or sampler == "capacity":
        return
    last = ledger.by_event["bumped"][-1]
    until = last.at if last["version"] >= steps else ledger.rows[-1].at + 1
    ends = (end for end in ledger.of(*LOST, "evicted", "filtered") if ledger.is_end(end))
    started = ledger.start * batch - sum(_lost_at(ledger, end, failed) < until for end in ends)
    for row in ledger.by_event["reserved"]:
        started += row["group"] not in heirs
        target = row.number("target", -1)
        if target >= steps:
            yield f"{row}: started for version {target}; the run ends at version {steps}"
        elif target < 0 and started > steps * batch:
            yield f"{row}: the {counted(steps, 'step')} of the run had all their groups"


def _lost_at(ledger: LoopLedger, end: Row, failed: Mapping[Id, Sequence[Row]]) -> int:
    """The row from which another group may take the place of one that ends: a filtered group's end may follow later, and other requests of
    a failed one must be cancelled first."""
    filtered = [row for row in ledger.life[end["group"]] if row.event == "filtered"]
    reasons = [*filtered, *(failed.get(end["group"], ()) if end.event == "failed" else ())]
    return max((row.at for row in reasons if row.at < end.at), default=end.at)


def _own_targets(ledger: LoopLedger, window: int) -> Violations:
    """Check the targets of an own sampler: none beyond the window, and none of a step before the version at which the run began."""
    rows = [row for row in ledger.by_event["reserved"] if row.number("target", -1) >= 0]
    for row in rows:
        target, now = row.number("target"), ledger.version_at(row)
        if target < ledger.start:
            yield f"{row}: started for version {target}; the run began at version {ledger.start}"
        elif target > now + window:
            yield f"{row}: started for version {target} at version {now}; the window allows {now} to {now + window}"
    return f"{counted(len(rows), 'group')} started for a version inside the window" if rows else ""
