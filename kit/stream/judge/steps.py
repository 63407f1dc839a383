"""Steps: their updates, batches, clears, failures, and when they begin."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from kit.results.verdict import NotMeasured
from kit.stream.judge.rules import REACTION, by, counted, many

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.stream.history import Id, Ledger, Row, Step
    from kit.stream.judge.rules import Finding


@counted
def one_step_per_batch(ledger: Ledger) -> Finding:
    """Is every update one begin, its microbatches, and one finish or an abort, with a whole batch of groups?"""
    ledger.need("begin", "step")
    if not ledger.by_event["abort"]:
        ledger.need("finish", "step")
    for step in ledger.steps:
        yield from _update_order(step)
    for before, after in pairwise([step for step in ledger.steps if step.of("begin")]):
        first, last = after.of("begin")[0], before.abort or next(reversed(before.of("finish")), None)
        if last is None or last.at > first.at:
            yield f"{first}: step {before.id} has neither finish nor abort yet"
    if ledger.by_event["trained"]:
        yield from _batch_sizes(ledger)
    return f"{many(len(ledger.finishes()), 'optimizer step')} in {many(len(ledger.steps), 'step')}"


def _update_order(step: Step) -> Iterator[str]:
    current: int | None = None
    done: list[int] = []
    for row in step.of("begin", "microbatch", "finish", "bumped"):
        update = row.number("update", 0)
        if row.event == "bumped":
            if current is not None:
                yield f"{row}: update {current} of the step has no finish"
        elif update in done:
            yield f"{row}: this update was finished before"
        elif row.event == "begin":
            if current is not None or update != len(done):
                yield f"{row}: {many(len(done), 'update')} of the step {'was' if len(done) == 1 else 'were'} finished before"
            current = update
        elif current != update:
            yield f"{row}: this update has no begin"
        elif row.event == "finish":
            done.append(update)
            current = None


def _batch_sizes(ledger: Ledger) -> Iterator[str]:
    """Every update trains a whole batch; a step may be smaller by groups that failed, and by nothing else."""
    whole = [
        step
        for step in ledger.steps
        if step.bumped or (step.finished and not step.abort and ledger.ended and not ledger.error)
    ]
    sizes = [Counter(row.number("update", 0) for row in step.of("trained")) for step in whole]
    filtered = {row["group"] for row in ledger.by_event["filtered"]}
    lost = {
        row["group"]: row.at
        for name in ("failed", "dropped")
        for row in ledger.by_event[name]
        if row.ends_group and row["group"] not in filtered
    }
    batch, group, wanted = (ledger.limit(name) for name in ("train_global_batch_size", "group", "groups_per_step"))
    largest = max((max(one.values(), default=0) for one in sizes), default=0)
    most = batch // group if batch and group else largest
    excused = 0
    for step, trained in zip(whole, sizes, strict=True):
        updates = sorted(step.finished)
        spare = sum(row["group"] in lost for row in step.of("selected"))
        for update in updates:
            if trained[update] > most or (update != updates[-1] and trained[update] + spare < most):
                yield f"step {step.id} update {update} trained {many(trained[update], 'group')}; an optimizer step takes {most}"
        total = sum(trained.values())
        short = 0 if wanted is None else wanted - total
        excuses = sum(at < step.rows[-1].at for at in lost.values()) - excused
        if short < 0 or short > excuses:
            yield f"step {step.id} trained {many(total, 'group')} (row {step.rows[-1].at}); a step has {wanted}, {excuses} failed"
        excused += max(short, 0)


@counted
def one_clear_per_finish(ledger: Ledger) -> Finding:
    """Are the rows of an update cleared once, after its finish, and only then?"""
    cleared, finishes, clears = ledger.need("cleared", "group"), ledger.finishes(), ledger.by_event["clear"]
    of_group = by(cleared, "group")
    failed = [row for row in ledger.by_event["error"] if row.get("of") == "clear"]
    if not finishes:
        ledger.need("finish", "step")
    for step in ledger.steps:
        for row in step.of("trained"):
            done = step.finished.get(row.number("update", 0), [])
            mine = of_group.get(row["group"], [])
            if mine and (not done or mine[0].at < done[0].at):
                yield f"{mine[0]}: cleared before its update was finished ({f'row {done[0].at}' if done else 'it never was'})"
            elif len(mine) > 1:
                yield f"{mine[1]}: the group was cleared before, in row {mine[0].at}"
            elif done and not mine and ledger.ended and not any(one.get("step") == step.id for one in failed):
                yield f"{row}: trained and never cleared"
        calls, wanted = sum(row.get("step") == step.id for row in clears), sum(map(len, step.finished.values()))
        if clears and (calls > wanted or (calls < wanted and ledger.ended)):
            yield f"step {step.id} was cleared {calls} times after {wanted} finishes"
        for row in failed if ledger.by_event["bumped"] else ():
            early = step.bumped is None or step.bumped.at > row.at
            if row.get("step") == step.id and early and len(step.trained) >= len(step.of("selected")):
                yield f"{row}: the version had not risen although the step was finished"
    return f"{many(len(cleared), 'group')} cleared, {many(len(finishes), 'optimizer step')}"


@counted
def trains_before_straggler(ledger: Ledger) -> Finding:
    """Does a step begin while its last groups are still generated?"""
    ledger.need("trained", "group", "step")
    ledger.need("completed", "group", "sample")
    least, free, judged = ledger.limit("min_groups") or 1, 0, 0
    for step in ledger.steps:
        start = next(iter(step.of("selected") or step.of("begin", "microbatch")), None)
        rows = _completions(ledger, step)
        if start is not None and step.finished and len(rows) > least:
            could, last = ledger.rows[max(free, rows[least - 1].at)], rows[-1]
            if last.time > could.time + REACTION and last.at > could.at:
                judged += 1
                if start.at > last.at:
                    yield f"step {step.id} began in row {start.at}, after its last group ({last}); it could at {could.since:.3f} s"
        free = _free_after(ledger, step)
    if not judged:
        raise NotMeasured("no step had a straggler")
    return f"{many(judged, 'step')} began before the last group was complete"


def _completions(ledger: Ledger, step: Step) -> list[Row]:
    """When each group of a step was complete, in order. weight-fifo waits for those of the oldest start."""
    when: dict[Id, Row] = {}
    start: dict[Id, int] = {}
    for group in {row["group"] for row in step.of("trained")}:
        rows = [row for row in ledger.life[group] if row.event in ("ready", "completed")]
        when |= {group: rows[-1]} if rows else {}
        start[group] = next((row.number("version", 0) for row in ledger.life[group] if row.event == "reserved"), 0)
    oldest = min(start.values(), default=0)
    one_start = ledger.setting("sampler") == "weight-fifo"
    return sorted(
        (row for group, row in when.items() if not one_start or start[group] == oldest), key=lambda row: row.at
    )


def _free_after(ledger: Ledger, step: Step) -> int:
    """The row from which on the trainer can take another step: after its abort, or the sync, where the ledger shows how these end."""
    end = (step.abort or step.bumped or step.rows[-1]).at
    if step.abort:
        rows = [row for name in ("done", "error") for row in ledger.by_event[name] if row.get("of") == "abort"]
    else:
        rows = ledger.by_event["resume"] or ledger.by_event["synced"]
    return next((row.at for row in rows if row.at > end), end)


@counted
def abort_on_failure(ledger: Ledger) -> Finding:
    """Is a step that failed aborted, with the version unchanged and all its groups accounted for?"""
    ledger.need("begin", "step")
    broken = [step for step in ledger.steps if step.abort or step.errors or (step.is_open and ledger.ended)]
    if not broken:
        raise NotMeasured("no step failed")
    for step in broken:
        error, gone = next(iter(step.errors), None), {row["group"] for row in step.trained}
        for row in step.of("begin", "microbatch", "finish", "bumped"):
            if error and row.at > error.at:
                yield f"{row}: the step failed before, by {error}"
        if step.abort is None:
            if step.of("begin"):
                yield f"step {step.id} was not aborted; {error or step.of('begin')[-1]}"
            continue
        for row in step.of("selected", "trained"):
            life = ledger.life[row["group"]]
            over = [one for one in life if one.ends_group and row.at < one.at <= step.abort.at]
            back = any(one.event in ("place", "selected") or one.ends_group for one in life if one.at > step.abort.at)
            if row["group"] in gone:
                continue
            if over and over[0].event == "cleared":
                yield f"{over[0]}: cleared, and its step was aborted (row {step.abort.at})"
            elif not over and not back and ledger.ended:
                yield f"{row}: the group neither ended nor became trainable again after the abort (row {step.abort.at})"
    return f"{many(len(broken), 'step')} failed and aborted"
