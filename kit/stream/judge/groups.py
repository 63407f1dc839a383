"""Groups and permits: each group ends once and is trained at most once and whole; places, slots, grants and the end of a loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from kit.results.verdict import Missing, NotMeasured
from kit.stream.history import ENDS, Finding, Id, Ledger, Row, Sample, counted, many

FEWEST = 8  # tokens from which on equal samples are no coincidence


@counted
def every_group_once(ledger: Ledger) -> Finding:
    """Does every group that began end exactly once: cleared after it was trained, or by another named end?"""
    if not any(row.ends_group for name in ENDS for row in ledger.by_event[name]):
        raise Missing(f"the ledger has no event that ends a group ({', '.join(ENDS)})")
    left, how = 0, Counter[str]()
    for group, rows in ledger.life.items():
        ends = ledger.ends(group)
        how.update(row.event for row in ends)
        yield from _life(rows, ends)
        if not ends and {row.event for row in rows} & BEGINNINGS:
            left += 1
            if ledger.ended:
                yield f"group {group} has no end; its last row is {rows[-1]}"
    for row in ledger.by_event["replaced"]:
        if row.get("by", row["group"]) not in ledger.life:
            yield f"{row}: group {row['by']}, which replaces it, never began"
    if left and not ledger.ended:
        raise Missing(f"the ledger has no `ended` event, so {many(left, 'group')} may be in flight")
    return f"{many(len(ledger.life), 'group')}: " + ", ".join(f"{number} {name}" for name, number in how.most_common())


BEGINNINGS = {"reserved", "sent", "tokens", "completed", "ready"}


def _life(rows: Sequence[Row], ends: Sequence[Row]) -> Iterator[str]:
    starts = [row for row in rows if row.event == "reserved"]
    names = {row.event for row in rows}
    if len(starts) > 1:
        yield f"{starts[1]}: the group was reserved before, in row {starts[0].at}"
    if len(ends) > 1:
        yield f"group {ends[0]['group']} ends {len(ends)} times: {ends[0]}, then {ends[1]}"
    if "filtered" in names and names & {"selected", "trained"}:
        yield f"group {rows[0]['group']} was filtered out and counts all the same ({rows[-1]})"
    if not ends:
        return
    if not names & BEGINNINGS:
        yield f"{ends[0]}: the group never began"
    elif ends[0].event == "cleared" and not any(row.event == "trained" and row.at < ends[0].at for row in rows):
        yield f"{ends[0]}: the group was not trained before"
    elif after := [row for row in rows if row.at > ends[0].at and row.event in ("sent", "selected", "trained")]:
        yield f"{after[0]}: the group ended before, by {ends[0]}"


@counted
def trained_once(ledger: Ledger) -> Finding:
    """Is every group trained at most once? Updates that were aborted do not count."""
    ledger.need("trained", "group")
    before: dict[Id, Row] = {}
    for row in ledger.trained():
        if (first := before.setdefault(row["group"], row)) is not row:
            yield f"{row}: the group was trained before, by {first}"
    return f"{many(len(before), 'group')} trained once"


@counted
def groups_whole(ledger: Ledger) -> Finding:
    """Does every trained group have all its samples, each once?"""
    size, trained = ledger.size("group"), ledger.need("trained", "group")
    ledger.need("completed", "group", "sample")
    for row in [*trained, *ledger.by_event["ready"]]:
        samples = ledger.samples[row["group"]].items()
        there = [name for name, one in samples if any(done.at < row.at for done in one.completed)]
        if len(there) != size:
            yield f"{row}: {len(there)} of {size} samples were complete ({', '.join(map(str, there)) or 'none'})"
        for name, one in samples:
            if one.repeated:
                yield f"{row}: sample {name} was completed {len(one.completed)} times"
    return f"{many(len(trained), 'group')} trained, each with {many(size, 'sample')}"


@counted
def samples_differ(ledger: Ledger) -> Finding:
    """Do the samples of a group differ? Equal ones point to random numbers that were reset."""
    ledger.need("completed", "group", "sample", "digest")
    judged = 0
    for group, samples in ledger.samples.items():
        last = [one.completed[-1] for one in samples.values() if one.completed]
        if len(last) > 1 and min(row.number("length", FEWEST) for row in last) >= FEWEST:
            judged += 1
            if len({row["digest"] for row in last}) == 1:
                yield f"all {len(last)} samples of group {group} have the same tokens (digest {last[0]['digest']})"
    if not judged:
        raise NotMeasured(f"no group has 2 samples of {FEWEST} tokens")
    return f"{many(judged, 'group')} compared"


@counted
def order_fair(ledger: Ledger) -> Finding:
    """Is no complete group passed over by more younger groups than the window allows?"""
    allowed, most = ledger.size("groups_per_step") * (ledger.size("window") + 1), 0
    age = {row["group"]: row.at for row in reversed(ledger.need("reserved", "group"))}
    selected = ledger.need("selected", "group")
    for ready in ledger.need("ready", "group"):
        group = ready["group"]
        later = [
            row.at for row in ledger.life[group] if row.at > ready.at and (row.event == "selected" or row.ends_group)
        ]
        until = min(later, default=len(ledger.rows))
        ahead = sum(ready.at < row.at < until and age.get(row["group"], 0) > age.get(group, 0) for row in selected)
        most = max(most, ahead)
        if ahead > allowed:
            yield f"{ready}: {ahead} younger groups were selected before this group, at most {allowed} may be"
    return f"at most {many(most, 'younger group')} went ahead of a complete one (limit {allowed})"


@counted
def tokens_conserved(ledger: Ledger) -> Finding:
    """Is every generated token trained or wasted, and counted once?"""
    generated = sum(row.number("count") for row in ledger.need("tokens", "group", "sample", "count"))
    ledger.need("completed", "group", "sample")
    for group, name, sample in ledger.completed():
        if (length := sample.completed[-1].number("length", sample.tokens)) != sample.tokens:
            yield f"group {group} sample {name} has length {length}; {many(sample.tokens, 'token')} were generated for it"
    if not ledger.ended:
        raise Missing("the ledger has no `ended` event, so tokens may be in flight")
    for group, rows in ledger.life.items():
        tokens = sum(row.number("count") for row in rows if row.event == "tokens")
        if tokens and not ledger.ends(group):
            yield f"{many(tokens, 'token')} of group {group} are neither trained nor wasted: the group has no end"
    trained = ledger.tokens({row["group"] for row in ledger.trained()})
    stated = {"generated": generated, "trained": trained, "wasted": generated - trained}
    for name, number in stated.items():
        if ledger.ended.number(name, number) != number and not (name == "wasted" and ledger.error):
            yield f"{ledger.ended} states {ledger.ended[name]} {name} tokens; {number} by the rows"
    return f"{generated} tokens generated = {trained} trained + {generated - trained} wasted"


GATED = ("strict", "in-order", "weight-fifo", "ready-first", "capacity")  # start at most (window + version + 1) batches
TARGETED = ("strict", "in-order")
LOST = ("failed", "dropped", "aborted")  # ends after which another group may take the place in the batch
PERMITS = (("place", "place_back", "group"), ("slot", "slot_back", "group"), ("acquire", "release", "kind"))


@counted
def capacity_kept(ledger: Ledger) -> Finding:
    """Are never more groups in the buffer and in flight than allowed, and does nothing start too early?"""
    ledger.need("reserved", "group")
    told = []
    for name in ("places", "slots"):
        if ledger.setting(name) is not None:
            told += [(yield from _occupied(ledger, name, ledger.size(name)))]
    told += filter(None, [(yield from admitted(ledger))])
    if not told:
        raise Missing("the ledger has no `capacity` event with `places` or `slots`, or with the window of a gate")
    return ", ".join(told)


def _occupied(ledger: Ledger, name: str, limit: int) -> Finding:
    """Groups in the buffer, or in flight, from the permit or `reserved` on. A permit that comes back early frees nothing."""
    permit, leaving = name[:-1], "selected" if name == "places" else "ready"
    where = "are in the buffer" if name == "places" else "are in flight"
    inside: set[Id] = set()
    holding: set[Id] = set()
    leave, most = set[int](), 0
    for rows in ledger.life.values():
        mine = [row for row in rows if row.event in (permit, f"{permit}_back", leaving, "selected") or row.ends_group]
        for row, after in zip(mine, [*mine[1:], None], strict=True):
            soon = row.event == f"{permit}_back" and after is not None and after.event == leaving
            leave |= {row.at} if row.event != permit and not soon else set()
    for row in ledger.rows:
        group = row.get("group")
        if row.event == permit and group is not None:
            holding.add(group)
        elif row.event == "reserved" and ledger.by_event[permit] and group not in holding:
            yield f"{row}: dispatched without a {permit}"
        if row.event in (permit, "reserved") and group is not None:
            inside.add(group)
            most = max(most, len(inside))
            if len(inside) > limit:
                yield f"{row}: {len(inside)} groups {where}, {name}: {limit}"
        elif row.at in leave:
            inside.discard(group)
            holding.discard(group)
    return f"at most {most} of {limit} {name}"


def admitted(ledger: Ledger) -> Finding:
    """The gate: at most (window + version + 1) batches since version 0, and no batch beyond version + window."""
    sampler, window, batch = ledger.setting("sampler"), ledger.limit("window"), ledger.limit("groups_per_step")
    if sampler not in GATED or window is None or batch is None or not ledger.by_event["bumped"]:
        return ""
    heirs = {row.get("by") for row in ledger.by_event["replaced"]}  # take the place of another in its batch
    ahead, started = 0 if sampler == "strict" else window, ledger.start * batch
    for row in ledger.rows:
        started -= row.ends_group and row.event in LOST
        if row.event == "reserved":
            started += row["group"] not in heirs
            now = ledger.version_at(row)
            allowed = (ahead + now + 1) * batch
            if started > allowed:
                yield f"{row}: {many(started, 'group')} started by version {now}; the window allows {allowed}"
            elif sampler in TARGETED and not now <= row.number("target", now) <= now + ahead:
                yield f"{row}: started for version {row['target']} at version {now}; the window allows {now} to {now + ahead}"
    return f"{many(started, 'group')} started in time"


@counted
def permits_return(ledger: Ledger) -> Finding:
    """Is every place, slot and device grant given back exactly once?"""
    pairs = [pair for pair in PERMITS if ledger.by_event[pair[0]] or ledger.by_event[pair[1]]]
    if not pairs:
        raise Missing("the ledger has no `place`, `slot` or `acquire` event")
    left: list[Row] = []
    in_use = 0
    for taken, back, of in pairs:
        out: dict[Id, Row] = {}
        ended: dict[Id, Row] = {}
        for row in ledger.rows:
            if row.event == taken:
                if before := out.get(row[of]):
                    yield f"{row}: {of} {row[of]} has one since row {before.at}"
                out[row[of]] = row
            elif row.event == back and out.pop(row[of], None) is None:
                yield f"{row}: {of} {row[of]} has none to give back"
            elif row.event == "granted" and of == "kind" and row[of] not in out:
                yield f"{row}: {of} {row[of]} was not asked for"
            elif row.ends_group and of == "group":
                ended[row[of]] = row
        left += [row for row in out.values() if ledger.ended or row.get("group") in ended]
        in_use += len(out)
    for row in left:
        yield f"{row}: never given back"
    if in_use and not ledger.ended:
        raise Missing(f"the ledger has no `ended` event, so {many(in_use, 'permit')} may be in use")
    return f"{many(sum(len(ledger.by_event[taken]) for taken, _, _ in pairs), 'permit')} taken and given back"


@counted
def ends_cleanly(ledger: Ledger) -> Finding:
    """Does the loop end once, with a reason, with no step cut short, and with nothing after its end?"""
    for row in ledger.by_event["exhausted"][:1]:
        if not ledger.ended:
            yield f"{row}: the data ended and the loop did not; the last row is {ledger.rows[-1]}"
    end = ledger.need("ended")[0]
    why = end.get("why")
    if why not in ("done", "exhausted", "error"):
        yield f"{end} states why={why!r}; it must be done, exhausted or error"
    for row in ledger.rows[end.at + 1 :]:
        if row.event in ("ended", "reserved", "sent", "selected", "begin", "bumped", "hold"):
            yield f"{row}: the loop ended before, in row {end.at}"
    steps = ledger.limit("steps")
    if why == "done" and ledger.by_event["bumped"] and steps not in (None, ledger.version_at(end)):
        yield f"{end}: done at version {ledger.version_at(end)}, and the loop has {steps} steps"
    for step in ledger.steps if why != "error" else ():
        if step.abort is None and step.bumped is None and (ledger.by_event["bumped"] or not step.finished):
            yield f"step {step.id} is cut short by an end without an error; its last row is {step.rows[-1]}"
    for row in _unanswered(ledger) if why != "error" and ledger.by_event["cancelled"] else ():
        yield f"{row}: the request has no answer, and the loop ended"
    for row in ledger.by_event["aborted"] if why == "exhausted" else ():
        if row.time == end.time and any(one.event == "ready" for one in ledger.life[row["group"]]):
            yield f"{row}: a complete group was left over, so the end of the data is an error"
    return f"{why} in row {end.at}"


@counted
def dead_rollout_named(ledger: Ledger) -> Finding:
    """Is every dead replica named, and is each of its requests sent again or ended?"""
    for row in (died := ledger.by_event["died"]):
        if "replica" not in row.ids:
            yield f"{row}: the row does not name the replica"
            continue
        for group, name, sample in _asked(ledger, row["replica"], row):
            over = any(end.at > row.at for end in ledger.ends(group)) or any(one.at > row.at for one in sample.sent)
            if ledger.ended and not over:
                yield f"{row}: sample {name} of group {group} was there, was not sent again, and its group has no end"
        back = [one.at for one in ledger.by_event["joined"] if one.get("replica") == row["replica"] and one.at > row.at]
        for one in ledger.by_event["sent"]:
            if one.get("replica") == row["replica"] and row.at < one.at < min(back, default=len(ledger.rows)):
                yield f"{one}: the replica died in row {row.at}"
    if not died:
        waiting = _unanswered(ledger)
        reason = ledger.by_event["error"] or ledger.by_event["failed"] or (ledger.ended and ledger.ended.get("error"))
        if not ledger.error or reason or not waiting:
            raise NotMeasured("no replica died")
        yield f"the loop ended with an error while {waiting[0]} had no answer, and no row names what failed"
    return f"{many(len(died), 'replica')} died, named: {', '.join(str(row['replica']) for row in died)}"


def _unanswered(ledger: Ledger) -> list[Row]:
    """Requests without an answer, on replicas that did not go."""
    gone = {row.get("replica") for name in ("died", "left") for row in ledger.by_event[name]}
    samples = (one for some in ledger.samples.values() for one in some.values() if one.waiting)
    return [one.sent[-1] for one in samples if one.sent[-1].get("replica") not in gone]


def _asked(ledger: Ledger, replica: Id, died: Row) -> Iterator[tuple[Id, Id, Sample]]:
    """Samples that a replica had when it died: sent there last, and neither completed nor of a group that was over."""
    for group, samples in ledger.samples.items():
        for name, sample in samples.items():
            before = [row for row in sample.sent if row.at < died.at]
            done = any(row.at < died.at for row in (*sample.completed, *ledger.ends(group)))
            if before and before[-1].get("replica") == replica and not done:
                yield group, name, sample
