"""The rule that a step begins with the groups that are complete, while its last ones are still being generated."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from statistics import median

from kit.results.records import Id, Row
from kit.results.rules import NotMeasured, Violations
from kit.results.units import counted
from kit.stream.judge.history import BY_START, BY_TARGET, GATED, REACTION, LoopLedger, StepRows, ends_sync

BETWEEN_TURNS = 0.05  # seconds at most between two looks of another system's controller at its groups


def trains_before_straggler(ledger: LoopLedger) -> Violations:
    """Does a step begin with `min_groups` complete groups, while its last groups are still being generated?"""
    ledger.need("trained", "group", "step")
    ledger.need("completed", "group", "sample")
    least, whole = ledger.limit("min_groups"), ledger.limit("groups_per_step")
    if least is None:
        raise NotMeasured("the ledger has no `capacity` event with `min_groups`, so no step has to begin early")
    yield from _begun_too_early(ledger, least)
    if whole is not None and least >= whole:
        raise NotMeasured(f"min_groups={least} lets no step begin before all its groups are complete")
    free, judged = 0, 0
    reaction = max(REACTION, _step_seconds(ledger) / 10)
    starts: dict[Id, Row | None] = {}
    waits = _waits(ledger)
    for step in ledger.steps:
        # A begin may be empty. A step that is tried again began with the first try, whose groups it may keep.
        start = starts.setdefault(step.id, next(iter(step.of("selected") or step.of("begin", "microbatch")), None))
        rows = _completions(ledger, step)
        if start is not None and step.finished and len(rows) > least:
            last = rows[-1]
            could = _after_waits(waits, ledger.rows[max(free, _enough(ledger, step, rows, least).at)], last)
            if last.time > could.time + reaction and last.at > could.at and not _in_one_turn(ledger, could.at, last):
                judged += 1
                if start.at > last.at:
                    yield (
                        f"step {step.id} began in row {start.at}, after its last group ({last}); possible at {could.since:.3f} s "
                        f"with min_groups={least}; set min_groups={whole or len(rows)} if it is to wait for whole batches"
                    )
        free = _free_after(ledger, step)
    if not judged:
        raise NotMeasured("no step had a straggler")
    return f"{counted(judged, 'step')} began before the last group was complete"


def _begun_too_early(ledger: LoopLedger, least: int) -> Iterator[str]:
    """The first microbatch of a step has `min_groups` complete groups to choose from, or all groups of a smaller step."""
    for step in ledger.steps:
        first, rows = next(iter(step.of("microbatch")), None), _last_completions(ledger, step)
        if first is not None and step.finished and step.abort is None:
            there = sum(row.at < first.at for row in rows)
            if there < min(least, len(rows)):
                yield f"{first}: the step began with {counted(there, 'complete group')}; min_groups={least}"


def _in_one_turn(ledger: LoopLedger, since: int, last: Row) -> bool:
    """Whether another system's controller may have seen all groups since a row at once."""
    rows = ledger.rows[since : last.at]
    shows_a_turn = any(row.event in ("reserved", "sent", "selected", "begin", "sync_begin") for row in rows)
    return ledger.foreign and not shows_a_turn and last.time <= rows[0].time + BETWEEN_TURNS


def _step_seconds(ledger: LoopLedger) -> float:
    """The median time of a step. A controller's time to react is judged relative to it, as a busy machine slows both."""
    times = [ledger.rows[_free_after(ledger, step)].time - step.rows[0].time for step in ledger.steps if step.finished]
    return median(times) if times else 0.0


def _completions(ledger: LoopLedger, step: StepRows) -> list[Row]:
    """Return the rows that completed the groups of a step, in order; with weight-fifo, only groups with the oldest start."""
    rows = _last_completions(ledger, step)
    if ledger.setting("sampler") != "weight-fifo":
        return rows
    reserved = (row for group in {row["group"] for row in step.of("trained")} for row in ledger.life[group])
    start = {row["group"]: row.number("version", 0) for row in reserved if row.event == "reserved"}
    return [row for row in rows if start.get(row["group"], 0) == min(start.values(), default=0)]


def _last_completions(ledger: LoopLedger, step: StepRows) -> list[Row]:
    """Return the row that completed each group of a step, in order."""
    completions = (
        [row for row in ledger.life[group] if row.event in ("ready", "completed")]
        for group in {row["group"] for row in step.of("trained")}
    )
    return sorted((rows[-1] for rows in completions if rows), key=lambda row: row.at)


def _enough(ledger: LoopLedger, step: StepRows, completions: list[Row], least: int) -> Row:
    """The completion after which a step may begin. Another sampler than the kit's may train groups in the order in which they were
    reserved, and within the batch of a version so may another core, as the step then shows."""
    sampler = ledger.setting("sampler")
    begun = {row["group"]: row.at for row in ledger.by_event["reserved"]}
    taken = [begun.get(row["group"], 0) for row in step.of("selected") or step.of("trained")]
    if sampler in (*GATED, *BY_START) and (sampler not in BY_TARGET or taken != sorted(taken)):
        return completions[least - 1]
    in_order = sorted(completions, key=lambda row: begun.get(row["group"], 0))
    return max(completions[least - 1], *in_order[:least], key=lambda row: row.at)


def _free_after(ledger: LoopLedger, step: StepRows) -> int:
    """Return the row after which the trainer can take another step: the end of the abort or of the sync, if the ledger has it."""
    end = (step.abort or step.bumped or step.rows[-1]).at
    if step.abort:
        rows = [row for name in ("done", "error") for row in ledger.by_event[name] if row.get("of") == "abort"]
    else:
        rows = ledger.by_event["resume"] or ledger.by_event["synced"]
    return next((row.at for row in rows if row.at > end), end)


def _syncs(ledger: LoopLedger) -> list[tuple[Row, Row]]:
    """The first and the last row of each sync that ends. One for a replica that joins may first wait for requests to be cancelled."""
    syncs: list[tuple[Row, Row]] = []
    first: Row | None = None
    for row in ledger.of("joined", "begin", "sync_begin", "synced", "error"):
        if row.event in ("joined", "sync_begin"):
            first = first or row
        elif row.event == "begin" and first and first.event == "joined":
            first = None  # it did not wait for a sync
        elif first and ends_sync(row):
            syncs.append((first, row))
            first = None
    return syncs


def _waits(ledger: LoopLedger) -> list[tuple[Row, Row]]:
    """The first and the last row of each time in which no step can begin: syncs, holds, and waits for the trainer's devices."""
    waits = _syncs(ledger)
    for begins, ends in (("hold", "resume"), ("acquire", "granted")):
        first: Row | None = None
        for row in ledger.of(begins, ends):
            if row.get("kind", "training") != "training":
                continue
            if row.event == begins:
                first = first or row
            elif first:
                waits.append((first, row))
                first = None
    return sorted(waits, key=lambda wait: wait[1].at)


def _after_waits(waits: Sequence[tuple[Row, Row]], row: Row, last: Row) -> Row:
    """Return the row that ends the wait under way at a row, as the sync of a replica that joins: a step would change what is being sent.
    The sync of the next such replica may follow at once. Devices may be requested until the last group is complete, as a step that begins
    then is early enough."""
    for begin, end in waits[bisect_right(waits, row.at, key=lambda wait: wait[1].at) :]:
        if begin.time <= row.time + REACTION or (begin.event == "acquire" and begin.at < last.at):
            row = end
    return row
