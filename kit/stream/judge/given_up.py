"""The rules of work that is given up: each group and each attempt ends for a reason that the settings allow and that other rows show.

A controller could otherwise drop every slow group, evict fresh ones, or generate samples twice, and pass the other rules: such a group has
its end, and such tokens are counted as wasted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain, pairwise

from kit.results.records import Id, Row
from kit.results.rules import Missing, NotMeasured, Violations
from kit.results.units import counted
from kit.stream.judge.history import BY_START, BY_TARGET, NO_AGE_LIMIT, LoopLedger, by, ends_group

BEGINS = ("reserved", "selected", "begin")  # rows of a loop that continues


def eviction_justified(ledger: LoopLedger) -> Violations:
    """Is every group that is given up too old, failed, or empty, as the settings allow?"""
    ledger.need("reserved", "group", "version")
    given_up = [row for rows in ledger.life.values() for row in rows if ends_group(row) and row.event != "cleared"]
    evidence = _failures(ledger)
    undone = _undone(ledger)
    chosen = _chosen(ledger)
    evicts_by = ledger.stated("evicts_by")
    last = _goes_on_until(ledger, {*evidence})
    before = [row for row in given_up if row.at < last]  # at its end a loop gives up whatever is left
    if before and ledger.setting("sampler") is None and ledger.setting("on_failed") is None:
        raise NotMeasured(
            "the ledger has no `capacity` event with `sampler` or `on_failed`, so any end may be intended"
        )
    judged, unwritten = 0, ""
    for row in before:
        failures = [failure for failure in evidence.get(row["group"], ()) if failure.at < row.at]
        judged += 1
        if row.event in ("evicted", "aborted"):
            why = (
                ""
                if undone.get(row["group"], row.at) < row.at
                else _not_chosen(row, chosen) or _not_too_old(ledger, row)
            )
            if why and (lacks := _unwritten(ledger, row)):
                unwritten, why = unwritten or f"the ledger has no {lacks}, so {row} may have a reason", ""
            if why and evicts_by and not _not_chosen(row, chosen):
                judged, why = judged - 1, ""  # the sampler says that it goes by something else
        elif row.event == "dropped":
            why = _not_dropped(ledger, row)
        else:
            why = _not_failed(ledger, row, failures)
        if why:
            yield f"{row}: {why}"
    if unwritten:
        raise Missing(unwritten)
    if judged < len(before):
        raise NotMeasured(
            f"{counted(len(before) - judged, 'group')} evicted that were not too old; the sampler states evicts_by={evicts_by!r}, which "
            "no row of the ledger shows"
        )
    return f"{counted(len(before), 'group')} given up before the end of the loop, each for a reason"


def _unwritten(ledger: LoopLedger, end: Row) -> str:
    """What another system leaves out that could show why a group was evicted or aborted."""
    if ledger.leaves_out("selected") and any(abort.at < end.at for abort in ledger.by_event["abort"]):
        return "`selected` event"
    sampler = ledger.setting("sampler")
    if sampler in NO_AGE_LIMIT:
        return ""
    if ledger.leaves_out("bumped"):
        return "`bumped` event"
    begun = next(row for row in ledger.life[end["group"]] if row.event == "reserved")
    if sampler not in BY_TARGET or begun.number("version") == ledger.version_at(end):
        return ""
    return "`reserved` event with `target`" if ledger.leaves_out("reserved", "target") else ""


def _goes_on_until(ledger: LoopLedger, failed: Set[Id]) -> int:
    """The last row before the end of the loop: what begins last, or the bump of a last step that shrank by more groups than failed or were
    dropped for a reason."""
    last = max(row.at for name in BEGINS for row in ledger.by_event[name])
    step, groups = next(reversed(ledger.steps), None), ledger.limit("groups_per_step")
    if step is None or step.bumped is None or groups is None or ledger.setting("on_failed") != "shrink":
        return last
    selected = {row["group"] for row in step.of("selected")}
    excused = failed | {row["group"] for row in ledger.by_event["dropped"] if not _not_dropped(ledger, row)}
    return max(last, step.bumped.at) if selected and groups - len(selected) > len(excused) else last


def _chosen(ledger: LoopLedger) -> Mapping[Id, int] | None:
    """For each group that an own sampler gave up, the row of its answer; None if the ledger has no answers of a sampler."""
    answers = ledger.by_event["chosen"]
    groups = ((group, row.at) for row in answers for name in ("evicted", "aborted") for group in row.numbers(name))
    return dict(reversed([*groups])) if answers else None


def _not_chosen(end: Row, chosen: Mapping[Id, int] | None) -> str:
    if chosen is None or chosen.get(end["group"], end.at) < end.at:
        return ""
    return "the sampler did not give up this group"


def no_needless_waste(ledger: LoopLedger) -> Violations:
    """Is every sample generated once, except after a sync, a failure or a lost replica, and are requests of aborted groups cancelled?"""
    ledger.need("sent", "group", "sample", "replica")
    ledger.need("tokens", "group", "sample", "count")
    at_sync, repeated, lost = ledger.setting("at_sync"), 0, 0
    moves = ledger.of("bumped", "hold", "sync_begin", "sync", "synced")
    gone = {name: ledger.by_event[name] for name in ("died", "left")}
    evidence = failed_requests(ledger)
    for group, samples in ledger.samples.items():
        for name, sample in samples.items():
            for before, again in pairwise(sample.sent):
                repeated += 1
                between = range(before.at, again.at)
                lost += (tokens := _tokens_between(ledger, before, again))
                failed = any(row.at in between and row["sample"] == name for row in evidence.get(group, ()))
                left = any(
                    row.at in between and row.get("replica") == before["replica"]
                    for rows in gone.values()
                    for row in rows
                )
                synced = _sync_aborts([row for row in moves if row.at in between], at_sync)
                if tokens and not (failed or left or synced):
                    yield (
                        f"{again}: {counted(tokens, 'token')} of the attempt in row {before.at} lost; its request did not fail, its "
                        f"replica did not leave, and no sync ended it (at_sync={at_sync or 'not stated'})"
                    )
    yield from _never_cancelled(ledger)
    generated = sum(row.number("count") for row in ledger.by_event["tokens"])
    given_up = generated - lost - ledger.tokens({row["group"] for row in ledger.trained()})
    return (
        f"{counted(generated, 'token')} generated: {lost} lost in {counted(repeated, 'attempt')} that had to be repeated, "
        f"{given_up} in groups that were not trained"
    )


def _sync_aborts(moves: Sequence[Row], setting: Id | None) -> bool:
    """Whether a sync may have ended a request: by its own `at_sync`, else by the setting, if there is one."""
    own = [row["at_sync"] for row in moves if row.event == "sync" and "at_sync" in row.ids]
    return "abort" in own if own else bool(moves) and setting in (None, "abort")


def _never_cancelled(ledger: LoopLedger) -> Iterator[str]:
    """Yield a violation per unfinished group that was given up and whose requests all ran to their end, none of them cancelled; and per
    request that did so although others of its group were cancelled."""
    if ledger.foreign:  # another system need not write what it asks of its replicas
        return
    of_group = by(ledger.by_event["cancel"], "group")
    apart = {*of_group, *(row["group"] for row in ledger.by_event["ready"])}
    for end in ledger.by_event["aborted"]:
        group = end["group"]
        done = [sample for sample in ledger.samples[group].values() if sample.completed]
        if len(done) == ledger.limit("group") and group not in apart:
            yield f"{end}: no request of it was cancelled, and all were generated to their end"
        if cancels := of_group.get(group):
            yield from _left_out(ledger, end, cancels)


def _left_out(ledger: LoopLedger, end: Row, cancels: Sequence[Row]) -> Iterator[str]:
    """A later request shows that the cancels were not the group's end: a sync cancels, too."""
    cancelled, last = {row["sample"]: row.at for row in cancels}, cancels[-1].at
    requests = [(name, sample.sent[-1], sample) for name, sample in ledger.samples[end["group"]].items() if sample.sent]
    too_old = any(last < row.at < end.at for row in ledger.by_event["bumped"])  # the cancels had another reason
    if too_old or any(sent.at > last for _, sent, _ in requests):
        return
    for name, sent, sample in requests:
        late = next((row for row in sample.completed if row.at > last), None)
        gone = (row for event in ("died", "left") for row in ledger.by_event[event] if row.at > sent.at)
        if late and cancelled.get(name, -1) < sent.at and all(row.get("replica") != sent["replica"] for row in gone):
            yield f"{late}: generated to its end, although the other requests of its group were cancelled by row {last}"


def _tokens_between(ledger: LoopLedger, before: Row, again: Row) -> int:
    """Count the tokens of a request that are lost: those that a later request does not go on from, as turns and partial rollouts do."""
    rows = [row for row in ledger.life[before["group"]] if row.get("sample") == before["sample"] and row.at > before.at]
    lost = [row for row in rows if row.event == "tokens" and row.at < again.at]
    if not lost:
        return 0
    replica: Id | None = None
    begins = lost[0].number("first", 0)
    generated = sum(row.number("count") for row in lost)
    later = rows[rows.index(again) :]
    # A request that adds no token loses none, unless its answer states a shorter sample.
    goes_on = begins if any(row.event == "tokens" for row in later) else begins + generated
    for row in later:
        if row.event == "sent":
            replica = row.get("replica")
        elif row.event == "tokens" and row.get("replica") == replica:
            goes_on = row.number("first", 0)
            break
        elif row.event == "completed" and row.get("replica", replica) == replica:
            goes_on = row.number("length", goes_on)
            break
    return max(0, generated - max(0, goes_on - begins))


def failed_requests(ledger: LoopLedger) -> Mapping[Id, Sequence[Row]]:
    """For each group, the rows that show that one of its requests failed."""
    rows: dict[Id, list[Row]] = {}
    for row in chain(ledger.by_event["failed"], ledger.by_event["error"]):
        if "sample" in row.ids and "group" in row.ids:
            rows.setdefault(row["group"], []).append(row)
    return rows


def _failures(ledger: LoopLedger) -> Mapping[Id, Sequence[Row]]:
    """Also the rows of replicas that died or left with one of the group's requests."""
    rows = {group: [*failures] for group, failures in failed_requests(ledger).items()}
    for gone in ledger.of("died", "left"):
        for group, _, _ in ledger.on_replica(gone):
            rows.setdefault(group, []).append(gone)
    return rows


def _undone(ledger: LoopLedger) -> Mapping[Id, int]:
    """For each group of a step that was aborted, or that could not be cleared, the row that undid it."""
    undone: dict[Id, int] = {}
    for step in ledger.steps:
        failed = [row.at for row in ledger.by_event["error"] if row.get("of") == "clear" and row.get("step") == step.id]
        for at in [*failed, *([] if step.abort is None else [step.abort.at])]:
            undone |= {row["group"]: min(at, undone.get(row["group"], at)) for row in step.of("selected", "trained")}
    return undone


def _not_too_old(ledger: LoopLedger, end: Row) -> str:
    """Why a group that ends as too old is not; empty if it is. An own sampler may go by the start of a group or by its target."""
    sampler, window = ledger.setting("sampler"), ledger.limit("window")
    if sampler is None or window is None:
        return ""
    if sampler in NO_AGE_LIMIT:
        return f"the sampler {sampler} gives up no group"
    if end.event == "aborted" and sampler in (*BY_TARGET, "weight-fifo"):
        return f"the sampler {sampler} gives up no unfinished group"
    begun = next(row for row in ledger.life[end["group"]] if row.event == "reserved")
    now, start, target = ledger.version_at(end), begun.number("version"), begun.number("target", -1)
    late = target >= 0 and target < now
    old = start < now - window
    if (late and sampler not in BY_START) or (old and (sampler not in BY_TARGET or target < 0)):
        return ""
    intended = f", for version {target}" if target >= 0 else ""
    return f"the group started at version {start}{intended}; at version {now} with window {window} it is not too old"


def _is_filtered(ledger: LoopLedger, end: Row) -> bool:
    """Whether a group was filtered by a loop that may filter groups."""
    may_filter = ledger.setting("filter") in (None, True)
    return may_filter and any(row.event == "filtered" for row in ledger.life[end["group"]])


def _not_dropped(ledger: LoopLedger, end: Row) -> str:
    if _is_filtered(ledger, end) or ledger.is_empty(end["group"]):
        return ""
    if ledger.setting("on_failed") is None and ledger.setting("filter") is None:
        return ""
    if any(row.event == "filtered" for row in ledger.life[end["group"]]):
        return "the group was filtered although filter=false"
    return "the group was neither filtered nor without a token"


def _not_failed(ledger: LoopLedger, end: Row, failures: Iterable[Row]) -> str:
    """Why a group may not end as `failed` or `replaced`; empty if it may."""
    on_failed = ledger.setting("on_failed")
    if _is_filtered(ledger, end):
        return ""
    if not [*failures]:
        return "none of its requests failed"
    if on_failed == "stop":
        return "the loop continues although on_failed=stop"
    if end.event == "replaced" and on_failed == "shrink":
        return "the group was replaced although on_failed=shrink"
    return ""
