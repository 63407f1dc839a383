"""The rules of optimizer steps: their calls, their batches, what is cleared after them, and what an abort undoes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from kit.results.records import Row
from kit.results.rules import NotMeasured, Violations
from kit.results.units import counted
from kit.stream.judge.history import STEP, LoopLedger, StepRows, by, ends_group, kept_steps, listed


def one_step_per_batch(ledger: LoopLedger) -> Violations:
    """Is every update one begin, its microbatches, and one finish or abort, with a whole batch of groups?"""
    ledger.need("begin", "step")
    done = ledger.by_event["bumped"] or ledger.finishes()
    if not ledger.by_event["abort"] or (done and ledger.leaves_out("finish")):
        ledger.need("finish", "step")
    for step in ledger.steps:
        yield from _update_order(step)
    for before, after in pairwise([step for step in ledger.steps if step.of("begin")]):
        first, last = after.of("begin")[0], before.abort or next(reversed(before.of("finish")), None)
        if last is None or last.at > first.at:
            yield f"{first}: step {before.id} has neither finish nor abort yet"
    if ledger.by_event["trained"] and not ledger.leaves_out("trained", "step"):
        yield from _batch_sizes(ledger)
    aborted = sum(step.abort is not None for step in ledger.steps)
    beside = f", {aborted} aborted" if aborted else ""
    return f"{counted(len(ledger.finishes()), 'optimizer step')} in {counted(len(ledger.steps), 'step')}{beside}"


def _update_order(step: StepRows) -> Iterator[str]:
    current: int | None = None
    done = sorted({row.number("update", 0) for row in step.kept})
    for row in step.of("begin", "microbatch", "finish", "bumped"):
        update = row.number("update", 0)
        if row.event == "bumped":
            if current is not None:
                yield f"{row}: update {current} of the step has no finish"
        elif update in done:
            several = "" if "update" in row.ids else "; a step with several updates needs the id `update`"
            yield f"{row}: this update is already finished{several}"
        elif row.event == "begin":
            if current is not None or update != len(done):
                yield f"{row}: {counted(len(done), 'update')} of the step {'was' if len(done) == 1 else 'were'} already finished"
            current = update
        elif current != update:
            yield f"{row}: this update has no begin"
        elif row.event == "finish":
            done.append(update)
            current = None


def _batch_sizes(ledger: LoopLedger) -> Iterator[str]:
    """Every update trains a whole batch; a step may only lack groups without a token, and with on_failed=shrink those that failed."""
    whole = [
        step
        for step in ledger.steps
        if step.bumped or (step.finished and not step.abort and ledger.ended and not ledger.error)
    ]
    sizes = [Counter(row.number("update", 0) for row in (*step.kept, *step.of("trained"))) for step in whole]
    lost = {
        row["group"]: row.at for name in ("failed", "dropped") for row in ledger.by_event[name] if _excuses(ledger, row)
    }
    batch, group, wanted = (ledger.limit(name) for name in ("train_global_batch_size", "group", "groups_per_step"))
    largest = max((max(counts.values(), default=0) for counts in sizes), default=0)
    most = batch // group if batch and group else largest
    size_known = bool(batch and group) or not ledger.foreign  # another system's updates may vary in size
    unwritten = ledger.setting("on_failed") == "shrink" and ledger.leaves_out_ends  # of groups that a step may lack
    excused = 0
    for step, trained in zip(whole, sizes, strict=True):
        updates = sorted(step.finished)
        spare = sum(row["group"] in lost for row in step.of("selected"))
        for update in updates if size_known else ():
            if trained[update] > most or (update != updates[-1] and trained[update] + spare < most):
                yield f"step {step.id} update {update} trained {counted(trained[update], 'group')}; an optimizer step trains {most}"
        total = sum(trained.values())
        short = 0 if wanted is None else wanted - total
        empty = sum(ledger.is_empty(row["group"]) for row in step.of("selected"))
        excuses = sum(at < step.rows[-1].at for at in lost.values()) - excused
        if short < 0 or (short > excuses and not unwritten):
            yield f"step {step.id} trained {counted(total, 'group')} (row {step.rows[-1].at}); a step has {wanted}, {excuses} failed"
        elif short > 0 and ledger.setting("on_failed") == "shrink" and total + empty < (ledger.limit("floor") or 1):
            yield f"step {step.id} trained {counted(total, 'group')} (row {step.rows[-1].at}), fewer than floor={ledger.limit('floor')}"
        excused += max(short, 0)


def _excuses(ledger: LoopLedger, end: Row) -> bool:
    """Whether a step may lack a group because of this end. A ledger without `on_failed` may shrink its steps."""
    on_failed = ledger.setting("on_failed")
    if not ends_group(end) or any(row.event == "filtered" for row in ledger.life[end["group"]]):
        return False
    if on_failed is None:
        return True
    return ledger.is_empty(end["group"]) if end.event == "dropped" else on_failed == "shrink"


def one_clear_per_finish(ledger: LoopLedger) -> Violations:
    """Are the rows of an update cleared exactly once, after its finish?"""
    cleared, finishes, clears = ledger.need("cleared", "group"), ledger.finishes(), ledger.by_event["clear"]
    of_group = by(cleared, "group")
    in_weights = {row["group"] for row in ledger.trained()}
    failed = [row for row in ledger.by_event["error"] if row.get("of") == "clear"]
    if not finishes:
        ledger.need("finish", "step")
    kept = kept_steps(ledger)
    by_group = bool(clears) and all("groups" in row.ids for row in clears)
    if by_group:
        yield from _clears_of_groups(ledger, clears, failed)
    for step in ledger.steps:
        for row in step.of("trained"):
            done = step.finished.get(row.number("update", 0), [])
            cleared_rows = of_group.get(row["group"], [])
            if step.abort is not None and not done and row["group"] in in_weights:
                continue  # undone, and trained again in another step
            if cleared_rows and (not done or cleared_rows[0].at < done[0].at):
                yield f"{cleared_rows[0]}: cleared before its update was finished ({f'row {done[0].at}' if done else 'never finished'})"
            elif len(cleared_rows) > 1:
                yield f"{cleared_rows[1]}: the group was already cleared in row {cleared_rows[0].at}"
            elif (
                done
                and not cleared_rows
                and ledger.ended
                and step not in kept
                and not any(error.get("step") == step.id for error in failed)
            ):
                yield f"{row}: trained but never cleared"
        # A step that was aborted may be trained again under its number.
        tries = [other for other in ledger.steps if other.id == step.id]
        if not by_group:
            wanted = sum(len(rows) for other in tries for rows in other.finished.values())
            calls = sum(row.get("step") == step.id for row in clears)
            repeated = sum(row.get("step") == step.id for row in failed)
            if clears and (calls > wanted + repeated or (calls < wanted and ledger.ended and step not in kept)):
                yield f"step {step.id} was cleared {calls} times after {wanted} finishes"
        for row in failed if ledger.by_event["bumped"] else ():
            never = step.abort is None and step.bumped is None
            if row.get("step") == step.id and never and _all_trained(ledger, tries, row):
                yield f"{row}: the version never rose although the step was finished"
    return f"{counted(len(cleared), 'group')} cleared, {counted(len(finishes), 'optimizer step')}"


def _clears_of_groups(ledger: LoopLedger, clears: Sequence[Row], failed: Sequence[Row]) -> Iterator[str]:
    """Each trained group is named by one `clear` after the finish of its update, and by one more for each that failed. Which groups a
    command names together is the controller's choice."""
    of_group = _by_named_group(clears)
    kept = kept_steps(ledger)
    for step in ledger.steps:
        repeated = [row for row in failed if row.get("step") == step.id]
        for row in step.trained:
            finishes = step.finished.get(row.number("update", 0), [])
            orders = [order for order in of_group.get(str(row["group"]), ()) if order.get("step") == step.id]
            again = [error for error in repeated if "groups" not in error.ids or str(row["group"]) in listed(error)]
            if not finishes:
                continue
            if orders and orders[0].at < finishes[0].at:
                yield f"{orders[0]}: sent before the update of group {row['group']} was finished (row {finishes[0].at})"
            elif len(orders) > 1 + len(again):
                yield f"{orders[-1]}: group {row['group']} was cleared {len(orders)} times in step {step.id}"
            elif not orders and ledger.ended and step not in kept:
                yield f"{row}: no `clear` of step {step.id} names the group"


def _by_named_group(rows: Sequence[Row]) -> Mapping[str, list[Row]]:
    named: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        for group in listed(row):
            named[group].append(row)
    return named


def _all_trained(ledger: LoopLedger, tries: Sequence[StepRows], row: Row) -> bool:
    """Whether all groups of a step, which may be tried several times, were trained or lost before a row. Further updates may follow."""
    trained = {other["group"]: other.at for step in tries for other in step.trained}
    selected = {other["group"] for step in tries for other in step.of("selected")}
    groups, whole = selected or {*trained}, ledger.limit("groups_per_step")
    # Of fewer groups, others may be selected yet. Without `selected`, only their number shows that no update is left.
    if not selected if whole is None else len(groups & trained.keys()) != whole:
        return False
    left = [group for group in groups if trained.get(group, row.at) >= row.at]
    waits = [group for group in left if all(end.event == "cleared" or end.at > row.at for end in ledger.ends(group))]
    return bool(groups) and not waits


def abort_on_failure(ledger: LoopLedger) -> Violations:
    """Is every failed step aborted, with the version unchanged and all its groups accounted for?"""
    ledger.need("begin", "step")
    broken = [step for step in ledger.steps if step.abort or step.errors or (step.is_open and ledger.ended)]
    if ledger.leaves_out("finish", "step") and not any(step.abort or step.errors for step in broken):
        ledger.need("finish", "step")  # without it every step looks open
    if not broken:
        raise NotMeasured("no step failed")
    yield from _retried_too_often(ledger)
    for step in broken:
        error, gone = next(iter(step.errors), None), {row["group"] for row in step.trained}
        for row in step.of("begin", "microbatch", "finish", "bumped"):
            if error and row.at > error.at:
                yield f"{row}: the step had already failed: {error}"
        if step.abort is None:
            if step.of("begin"):
                yield f"step {step.id} was not aborted; {error or step.of('begin')[-1]}"
            continue
        for row in step.of("selected", "trained"):
            life = ledger.life[row["group"]]
            over = [end_row for end_row in life if ends_group(end_row) and row.at < end_row.at <= step.abort.at]
            back = any(
                later.event in ("place", "selected", "trained") or ends_group(later)
                for later in life
                if later.at > step.abort.at
            )
            if row["group"] in gone:
                continue
            if over and over[0].event == "cleared":
                yield f"{over[0]}: cleared although its step was aborted (row {step.abort.at})"
            elif not over and not back and ledger.ended:
                yield f"{row}: the group neither ended nor became trainable again after the abort (row {step.abort.at})"
    return f"{counted(len(broken), 'step')} failed and aborted"


def _retried_too_often(ledger: LoopLedger) -> Iterator[str]:
    retries, aborts = ledger.limit("step_retries"), [step.abort.at for step in ledger.steps if step.abort]
    if retries is None or len(aborts) <= retries:
        return
    for row in ledger.rows[aborts[retries] :]:
        if row.event in STEP:
            yield f"{row}: the loop trains on after {counted(retries + 1, 'failed step')}; step_retries={retries}"
            return
