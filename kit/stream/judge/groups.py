"""The rules of groups: each begins and ends once, is trained once and whole, and is not overtaken; and all tokens count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from kit.results.records import Id, Row
from kit.results.rules import Missing, NotMeasured, Violations
from kit.results.units import counted
from kit.stream.judge.history import BY_TARGET, ENDS, LoopLedger, ends_group, kept_groups, limits_age, listed

FEWEST = 8  # equal samples with at least this many tokens are no coincidence


def every_group_once(ledger: LoopLedger) -> Violations:
    """Does every group that began end exactly once: cleared after it was trained, or by another named end?"""
    if not any(ends_group(row) for name in ENDS for row in ledger.by_event[name]):
        raise Missing(f"the ledger has no event that ends a group ({', '.join(ENDS)})")
    if ledger.by_event["trained"] and ledger.leaves_out("cleared", "group"):
        ledger.need("cleared", "group")  # without it trained groups have no end
    left, how = 0, Counter[str]()
    kept = kept_groups(ledger)
    for group, rows in ledger.life.items():
        ends = ledger.ends(group)
        how.update(row.event for row in ends)
        yield from _life(rows, ends, trains=not ledger.leaves_out("trained", "group"))
        if not ends and group not in kept and {row.event for row in rows} & BEGINNINGS:
            left += 1
            if ledger.ended:
                yield f"group {group} has no end; its last row is {rows[-1]}"
    for row in ledger.by_event["replaced"]:
        if row.get("by", row["group"]) not in ledger.life:
            yield f"{row}: its replacement, group {row['by']}, never began"
    if left and not ledger.ended:
        raise Missing(f"the ledger has no `ended` event, so {counted(left, 'group')} may be in flight")
    return f"{counted(len(ledger.life), 'group')}: " + ", ".join(
        f"{number} {name}" for name, number in how.most_common()
    )


BEGINNINGS = {"reserved", "sent", "tokens", "completed", "ready"}


def _life(rows: Sequence[Row], ends: Sequence[Row], *, trains: bool) -> Iterator[str]:
    starts = [row for row in rows if row.event == "reserved"]
    names = {row.event for row in rows}
    if len(starts) > 1:
        yield f"{starts[1]}: the group was already reserved in row {starts[0].at}"
    if len(ends) > 1:
        yield f"group {ends[0]['group']} ends {len(ends)} times: {ends[0]}, then {ends[1]}"
    if "filtered" in names and names & {"selected", "trained"}:
        yield f"group {rows[0]['group']} was filtered out but still used ({rows[-1]})"
    if not ends:
        return
    if not names & BEGINNINGS:
        yield f"{ends[0]}: the group never began"
    elif (
        trains
        and ends[0].event == "cleared"
        and not any(row.event == "trained" and row.at < ends[0].at for row in rows)
    ):
        yield f"{ends[0]}: the group was not trained before"
    elif after := [row for row in rows if row.at > ends[0].at and row.event in ("sent", "selected", "trained")]:
        yield f"{after[0]}: the group had already ended: {ends[0]}"


def trained_once(ledger: LoopLedger) -> Violations:
    """Is every group trained at most once? Aborted updates do not count."""
    ledger.need("trained", "group")
    before: dict[Id, Row] = {}
    for row in ledger.trained():
        if (first := before.setdefault(row["group"], row)) is not row:
            yield f"{row}: the group was already trained: {first}"
    return f"{counted(len(before), 'group')} trained once"


def groups_whole(ledger: LoopLedger) -> Violations:
    """Does every trained group have all its samples, each once?"""
    size, trained = ledger.size("group"), ledger.need("trained", "group")
    ledger.need("completed", "group", "sample")
    for row in [*trained, *ledger.by_event["ready"]]:
        samples = ledger.samples[row["group"]].items()
        there = [name for name, sample in samples if any(done.at < row.at for done in sample.completed)]
        if len(there) != size:
            yield f"{row}: {len(there)} of {size} samples were complete ({', '.join(map(str, there)) or 'none'})"
        for name, sample in samples:
            if sample.repeated:
                yield f"{row}: sample {name} was completed {len(sample.completed)} times"
    named = {str(group): [*samples.values()] for group, samples in ledger.samples.items()}
    for row in ledger.by_event["microbatch"]:
        for group in named.keys() & listed(row) if "groups" in row.ids else ():
            fed = sum(any(done.at < row.at for done in sample.completed) for sample in named[group])
            if fed < size:
                yield f"{row}: {fed} of {size} samples of group {group} were complete"
    return f"{counted(len(trained), 'group')} trained, each with {counted(size, 'sample')}"


def samples_differ(ledger: LoopLedger) -> Violations:
    """Do the samples of a group differ? Equal samples suggest that random numbers were reset."""
    ledger.need("completed", "group", "sample", "digest")
    judged, equal = 0, list[str]()
    for group, samples in ledger.samples.items():
        last = [sample.completed[-1] for sample in samples.values() if sample.completed]
        if len(last) > 1 and min(row.number("length", FEWEST) for row in last) >= FEWEST:
            judged += 1
            if len({row["digest"] for row in last}) == 1:
                equal.append(
                    f"all {len(last)} samples of group {group} have the same tokens (digest {last[0]['digest']})"
                )
    if not judged:
        raise NotMeasured(f"no group has 2 samples of at least {FEWEST} tokens")
    if 2 * len(equal) > judged:  # a converged policy repeats some samples; random numbers that are reset, nearly all
        yield from equal
    return f"{counted(judged, 'group')} compared"


def order_fair(ledger: LoopLedger) -> Violations:
    """Is each complete group selected before too many younger groups overtake it, and none before its target version?"""
    allowed, most = ledger.size("groups_per_step") * (ledger.size("window") + 1), 0
    reserved, selected = ledger.need("reserved", "group"), ledger.need("selected", "group")
    age = {row["group"]: row.at for row in reversed(reserved)}
    meant = {row["group"]: row.number("target", -1) for row in reserved} if limits_age(ledger) else {}
    in_batches = ledger.setting("sampler") in BY_TARGET
    for row in selected:
        target = meant.get(row["group"], -1)
        now = target if target < 0 else ledger.version_during(row)
        if target > now or (in_batches and target < now):
            yield f"{row}: selected for version {now}, but started for version {target}"
    if ledger.setting("sampler") == "weight-fifo":
        yield from _passed_older_starts(ledger)
    for ready in ledger.need("ready", "group"):
        group = ready["group"]
        later = [
            row.at
            for row in ledger.life[group]
            if row.at > ready.at and (row.event == "selected" or ledger.is_end(row))
        ]
        until = min(later, default=len(ledger.rows))
        passed = (row["group"] for row in selected if ready.at < row.at < until)  # a step may be tried several times
        ahead = sum(age.get(other, 0) > age.get(group, 0) for other in {*passed})
        most = max(most, ahead)
        if ahead > allowed:
            yield f"{ready}: {ahead} younger groups were selected before this group (limit {allowed})"
    return f"at most {counted(most, 'younger group')} overtook a complete one (limit {allowed})"


def _passed_older_starts(ledger: LoopLedger) -> Iterator[str]:
    """Yield a violation per group that is selected while a complete one with an older start in the window waits for another step."""
    window = ledger.size("window")
    start = {row["group"]: row.number("version") for row in ledger.need("reserved", "group", "version")}
    selected = {(row["group"], row.get("step")) for row in ledger.by_event["selected"]}
    waiting: set[Id] = set()
    for row in ledger.rows:
        group = row.get("group", "")
        if ledger.waits_from(row):
            waiting.add(group)
        elif row.event == "selected" or ledger.is_end(row):
            waiting.discard(group)
        if row.event == "selected" and group in start:
            oldest = ledger.version_at(row) - window
            older = [
                other
                for other in waiting
                if oldest <= start.get(other, oldest - 1) < start[group] and (other, row.get("step")) not in selected
            ]
            if older:
                yield f"{row}: started at version {start[group]}; group {older[0]}, complete, started at version {start[older[0]]}"


def tokens_conserved(ledger: LoopLedger) -> Violations:
    """Is every generated token trained or wasted, and counted once?"""
    generated = sum(row.number("count") for row in ledger.need("tokens", "group", "sample", "count"))
    ledger.need("completed", "group", "sample")
    for group, name, sample in ledger.completed():
        if (length := sample.completed[-1].number("length", sample.tokens)) != sample.tokens:
            yield f"group {group} sample {name} has length {length}, but {counted(sample.tokens, 'token')} were generated for it"
    if not ledger.ended:
        raise Missing("the ledger has no `ended` event, so tokens may be in flight")
    endless, any_ends = 0, not ledger.leaves_out_ends
    no_ends = ledger.leaves_out("cleared", "group")
    over = {row["group"] for row in ledger.by_event["trained"]} if no_ends else kept_groups(ledger)
    for group, rows in ledger.life.items():
        tokens = sum(row.number("count") for row in rows if row.event == "tokens")
        if not tokens or group in over or ledger.ends(group):
            continue
        endless += 1
        if any_ends:
            yield f"{counted(tokens, 'token')} of group {group} are neither trained nor wasted, because the group has no end"
    trained = ledger.tokens({row["group"] for row in ledger.trained()})
    stated = {"generated": generated}
    if not ledger.leaves_out("trained", "group"):
        stated |= {"trained": trained, "wasted": generated - trained}
    for name, number in stated.items():
        if ledger.ended.number(name, number) != number and not (name == "wasted" and ledger.error):
            yield f"{ledger.ended} states {ledger.ended[name]} {name} tokens; counted from the rows: {number}"
    if endless and not any_ends:
        raise Missing(f"the ledger has no event that ends a group ({', '.join(ENDS)})")
    return f"{generated} tokens generated = {trained} trained + {generated - trained} wasted"
