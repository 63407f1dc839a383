"""Groups: each ends once, is trained at most once and whole, and no token is lost."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kit.results.verdict import Missing, NotMeasured
from kit.stream.history import ENDS
from kit.stream.judge.rules import counted, many

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kit.stream.history import Id, Ledger, Row
    from kit.stream.judge.rules import Finding

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
