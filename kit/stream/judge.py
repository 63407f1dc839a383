"""The rules of a ledger. Each yields a sentence for each violation and returns a summary; `docs/ledger.md` lists the events.

Any system may have written the ledger. A rule raises `Missing` (null), which names the event, if the ledger lacks an event that it
needs. Rows that contradict each other, or lack an id that other rows of the event have, are violations.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest
from statistics import median

from kit.results.records import Id, Row, value_in_words
from kit.results.rules import Missing, NotMeasured, Violations, settle
from kit.results.units import counted
from kit.stream import backed
from kit.stream.given_up import eviction_justified, failed_requests, no_needless_waste
from kit.stream.history import (
    BY_START,
    BY_TARGET,
    ENDS,
    GATED,
    NO_AGE_LIMIT,
    REACTION,
    STEP,
    LoopLedger,
    Sample,
    StepRows,
    by,
    ends_group,
    ends_sync,
    open_sync,
)
from kit.stream.requests import attempts_distinct, requests_spread

MISSED = 2  # versions that a replica may miss after it joined: a sync may be under way, and the next may have begun
FEWEST = 8  # equal samples with at least this many tokens are no coincidence


def one_step_per_batch(ledger: LoopLedger) -> Violations:
    """Is every update one begin, its microbatches, and one finish or abort, with a whole batch of groups?"""
    ledger.need("begin", "step")
    if not ledger.by_event["abort"]:
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
        if short < 0 or short > excuses:
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
    kept = _kept(ledger)
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
    kept = _kept(ledger)
    for step in ledger.steps:
        repeated = [row for row in failed if row.get("step") == step.id]
        for row in step.trained:
            finishes = step.finished.get(row.number("update", 0), [])
            orders = [order for order in of_group.get(str(row["group"]), ()) if order.get("step") == step.id]
            again = [error for error in repeated if "groups" not in error.ids or str(row["group"]) in _named(error)]
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
        for group in _named(row):
            named[group].append(row)
    return named


def _named(row: Row, name: str = "groups") -> Sequence[str]:
    """What a row lists, such as its groups, as texts: a group may have a name."""
    return [text for text in value_in_words(row[name]).split(",") if text]


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


def _kept(ledger: LoopLedger) -> list[StepRows]:
    """The step that a loop which ended by an error trained last: it need not clear it."""
    return [step for step in ledger.steps if step.of("trained")][-1:] if ledger.error else []


def _kept_groups(ledger: LoopLedger) -> set[Id]:
    return {row["group"] for step in _kept(ledger) for row in step.of("trained")}


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
            could = _after_waits(waits, ledger.rows[max(free, _enough(ledger, rows, least).at)], last)
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


def _enough(ledger: LoopLedger, completions: list[Row], least: int) -> Row:
    """The completion after which a step may begin. Another sampler than the kit's may train groups in the order in which they were
    reserved."""
    if ledger.setting("sampler") in (*GATED, *BY_START):
        return completions[least - 1]
    begun = {row["group"]: row.at for row in ledger.by_event["reserved"]}
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


def limits_age(ledger: LoopLedger) -> bool:
    return ledger.setting("sampler") not in NO_AGE_LIMIT and ledger.stated("limits") != "start"


def no_sample_too_old(ledger: LoopLedger) -> Violations:
    """Is every token within the window when its group trains?"""
    trained, sampler, worst = ledger.need("trained", "group"), ledger.setting("sampler"), 0
    if not limits_age(ledger):
        stated = ", as it states" * (sampler not in NO_AGE_LIMIT)
        raise NotMeasured(f"the sampler {sampler} limits which groups start, not how old they are when trained{stated}")
    if not ledger.by_event["tokens"]:
        ledger.need("completed", "group", "sample", "version")
    window = 0 if sampler == "strict" else ledger.size("window")
    for row in trained:
        now, ages = ledger.version_during(row), ledger.oldest(row["group"])
        if ledger.is_empty(row["group"]):
            continue
        if not ages:
            yield f"{row}: no token of the group has a version"
            continue
        sample, oldest = min(ages.items(), key=lambda age: age[1])
        worst = max(worst, now - oldest)
        if not 0 <= now - oldest <= window:
            where = f"group {row['group']} trained at version {now} (row {row.at})"
            yield f"{where}; sample {sample} has a token of version {oldest}, window {window}"
    return f"{counted(len(trained), 'group')} trained, largest lag {worst}, window {window}"


def version_monotone(ledger: LoopLedger) -> Violations:
    """Does the version rise by exactly one per finished step, and does every row state the current version?"""
    given_up = ledger.error and not ledger.foreign and not ledger.by_event["bumped"]  # in the first step
    bumps, finishes = [] if given_up else ledger.need("bumped", "version"), ledger.finishes()
    base = 0
    latest: dict[Id, int] = {}
    for number, row in enumerate(bumps):
        if row.number("version") != ledger.version_at(row) + 1:
            yield f"{row}: the version jumps from {ledger.version_at(row)} to {row['version']}"
        if "updates" in row.ids and finishes:
            done = sum(finish.at < row.at for finish in finishes)
            base = row.number("updates") - done if ledger.resumed and not number else base
            if row.number("updates") != base + done:
                yield f"{row} states {row['updates']} updates; {base + done} were finished"
    of_steps = (finishes or ledger.by_event["abort"]) and not ledger.leaves_out("bumped", "step")
    for step in ledger.steps if of_steps else ():
        yield from _rises_once(ledger, step)
    for row in ledger.rows:
        if "version" in row.ids and (row.event in CURRENT or ends_group(row)):
            current = {"trained": ledger.version_during, "metrics": ledger.version_logged}
            now = current.get(row.event, ledger.version_at)(row)
            if row.number("version") != now:
                yield f"{row} states version {row['version']}; the current version is {now}"
        if row.event in ("joined", "left", "died"):
            latest.pop(row.get("replica", ""), None)
        elif row.event == "published":
            before, after = latest.get(row["replica"]), row.number("version")
            # A replica may miss versions, but none can come before it is made. Other systems may publish before they write `bumped`.
            most = math.inf if ledger.foreign else ledger.version_at(row) + 1
            if before is not None and not before <= after <= most:
                yield f"{row}: the replica jumps from version {before} to {after}"
            latest[row["replica"]] = after
    updates = f", {counted(len(finishes), 'update')}" if finishes else ""
    return f"from version {ledger.start} to {ledger.start + len(bumps)}{updates}"


CURRENT = ("reserved", "selected", "trained", "hold", "resume", "metrics")  # events that state the current version


def _rises_once(ledger: LoopLedger, step: StepRows) -> Violations:
    """The version rises once, with the last finish of a step. An error may end a run between two updates of a step."""
    bumped, last = step.of("bumped"), max((rows[-1].at for rows in step.finished.values()), default=None)
    cut = ledger.error and len(step.trained) != ledger.limit("groups_per_step")
    if len(bumped) > 1:
        yield f"{bumped[1]}: the version already rose for this step, in row {bumped[0].at}"
    if bumped and last is None:
        yield f"{bumped[0]}: no update of the step was finished"
    elif bumped and last is not None and last > bumped[0].at:
        yield f"{bumped[0]}: the step is not finished until row {last}"
    elif last is not None and not bumped and step.abort is None and ledger.ended and not cut:
        yield f"step {step.id} was finished (row {last}) but the version did not rise"
    return ""


def publish_before_use(ledger: LoopLedger) -> Violations:
    """Is each version published on a replica before its use there, and does dispatch wait for it?"""
    published, bumped, used = ledger.need("published", "version", "replica"), ledger.by_event["bumped"], 0
    base = [] if any(row.number("version") == ledger.start for row in published) else [ledger.start]
    there: defaultdict[Id, list[int]] = defaultdict(lambda: [*base])  # versions by replica, the current one last
    late: dict[Id, list[int]] = {}  # versions of replicas that left: answers of a call in progress may arrive later
    held: Row | None = None
    bumps_hold = bool(ledger.by_event["hold"]) and not ledger.foreign
    ends_of_holds = [] if _shows_resumes(ledger) else published
    shows_syncs = any(ends_sync(row) for row in ledger.rows)
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
            awaited |= {(name, row.number("version")) for name in _named(row, "replicas")}
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
    if ledger.foreign and end and end.get("why") in ("done", "exhausted"):
        return  # another system may have nothing left to dispatch
    if end and end.get("why") == "done":
        yield f"{end}: dispatch has been held since {held}, so the last version was never served"
    elif synced and (end is None or end.time > synced[-1].time + REACTION):
        yield f"{held}: dispatch never continued, although the weights were published by row {synced[-1].at}"


def _dispatched(row: Row, held: Row | None, serves: Sequence[int], now: int | None) -> Iterator[str]:
    if held:
        yield f"{row}: dispatched while dispatch was held (row {held.at})"
    elif "replica" in row.ids and now is not None and serves[-1:] != [now]:
        yield f"{row}: the replica has version {serves[-1] if serves else 'none'}; the current version is {now}"


def stamps_per_token(ledger: LoopLedger) -> Violations:
    """Do the version spans cover every token of a completed sample once, in order, with versions that never go down?"""
    ledger.need("tokens", "group", "sample", "version", "first", "count")
    ledger.need("completed", "group", "sample", "version")
    judged = spanning = 0
    published = by(ledger.by_event["published"], "replica")
    at_syncs = {row.number("version"): row["at_sync"] for row in ledger.by_event["sync"] if "at_sync" in row.ids}
    at_sync = ledger.setting("at_sync")
    if ledger.setting("sampler") == "strict":  # it trains each sample with the version that generated it
        at_syncs, at_sync = {}, "drain"
    for group, name, sample in ledger.completed():
        judged += 1
        spanning += len({row.number("version") for row in sample.spans}) > 1
        if why := next(_stamps(sample), "") or _old_stamp(sample, published) or _spans(sample, at_syncs, at_sync):
            yield f"group {group} sample {name}: {why}"
    for row in ledger.by_event["ready"]:
        spans = [span for sample in ledger.samples[row["group"]].values() for span in sample.spans if span.at < row.at]
        oldest = min((span.number("version") for span in spans), default=None)
        if oldest is not None and "version" in row.ids and row.number("version") != oldest:
            yield f"{row} states version {row['version']}; the oldest token has version {oldest}"
    return f"{counted(judged, 'sample')}, {spanning} with tokens of several versions"


def _stamps(sample: Sample) -> Iterator[str]:
    done, reached, version = sample.completed[-1], 0, -1
    for row in sample.spans:
        first, length = row.number("first"), row.number("count")
        if first != reached or length < 1:
            stamp = "stamped twice" if first < reached else "not stamped" if first > reached else "in an empty span"
            yield f"token {min(first, reached)} is {stamp} (row {row.at}: {counted(length, 'token')} starting at {first})"
        if row.number("version") < version:
            yield f"the version falls from {version} to {row['version']} at token {first} (row {row.at})"
        reached, version = reached + length, row.number("version")
    if done.number("length", reached) != reached:
        yield f"{counted(reached, 'token')} stamped; `completed` states length {done['length']} (row {done.at})"
    if not sample.spans and "length" not in done.ids:
        yield f"no token has a stamp (row {done.at})"
    for name, kind, span in (("version", "oldest", sample.spans[:1]), ("newest", "newest", sample.spans[-1:])):
        for row in span:
            if done.number(name, row.number("version")) != row.number("version"):
                yield f"`completed` states {name} {done[name]}; the {kind} token has version {row['version']} (row {done.at})"


def _spans(sample: Sample, at_syncs: Mapping[int, Id], setting: Id | None) -> str:
    """No sample may span a sync that aborts or drains requests in flight: by its own `at_sync`, else by the setting."""
    for before, after in pairwise(row.number("version") for row in sample.spans):
        own = [at_sync for version, at_sync in at_syncs.items() if before < version <= after]
        others = [setting] if after - before > len(own) else []
        if {*own, *others} & {"abort", "drain"}:
            return f"it has tokens of versions {before} and {after}, but nothing may be in flight at a sync"
    return ""


def _old_stamp(sample: Sample, published: Mapping[Id, list[Row]]) -> str:
    """A second span after a publication on the replica cannot have an older version than the published one."""
    for before, after in pairwise(sample.spans):
        there = published.get(after.get("replica", ""), []) if after.get("replica") == before.get("replica") else []
        latest = next((row for row in reversed(there) if row.at < before.at), None)
        if latest and latest.number("version", 0) > after.number("version"):
            return f"rows {before.at} and {after.at} are stamped with version {after['version']}, after {latest}"
    return ""


def every_group_once(ledger: LoopLedger) -> Violations:
    """Does every group that began end exactly once: cleared after it was trained, or by another named end?"""
    if not any(ends_group(row) for name in ENDS for row in ledger.by_event[name]):
        raise Missing(f"the ledger has no event that ends a group ({', '.join(ENDS)})")
    if ledger.by_event["trained"] and ledger.leaves_out("cleared", "group"):
        ledger.need("cleared", "group")  # without it trained groups have no end
    left, how = 0, Counter[str]()
    kept = _kept_groups(ledger)
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
        for group in named.keys() & _named(row) if "groups" in row.ids else ():
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
    endless, any_ends = 0, not ledger.foreign or any(ledger.ends(group) for group in ledger.life)
    no_ends = ledger.leaves_out("cleared", "group")
    over = {row["group"] for row in ledger.by_event["trained"]} if no_ends else _kept_groups(ledger)
    for group, rows in ledger.life.items():
        tokens = sum(row.number("count") for row in rows if row.event == "tokens")
        if not tokens or group in over or ledger.ends(group):
            continue
        endless += 1
        if any_ends:
            yield f"{counted(tokens, 'token')} of group {group} are neither trained nor wasted, because the group has no end"
    trained = ledger.tokens({row["group"] for row in ledger.trained()})
    stated = {"generated": generated, "trained": trained, "wasted": generated - trained}
    for name, number in stated.items():
        if ledger.ended.number(name, number) != number and not (name == "wasted" and ledger.error):
            yield f"{ledger.ended} states {ledger.ended[name]} {name} tokens; counted from the rows: {number}"
    if endless and not any_ends:
        raise Missing(f"the ledger has no event that ends a group ({', '.join(ENDS)})")
    return f"{generated} tokens generated = {trained} trained + {generated - trained} wasted"


LOST = ("failed", "dropped", "aborted")  # ends after which another group may take the group's place in the batch
PERMITS = (("place", "place_back"), ("slot", "slot_back"))


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
    """Check the gate: at most (window + version + 1) batches since version 0, and no batch beyond version + window."""
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
    heirs = {row.get("by") for row in ledger.by_event["replaced"]}  # groups that replace another in its batch
    lost = LOST if limits_age(ledger) or sampler in NO_AGE_LIMIT else (*LOST, "evicted")
    ahead, started = 0 if sampler == "strict" else window, ledger.start * batch
    failed = failed_requests(ledger)
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
    return f"{counted(started, 'group')} started in time"


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


def permits_return(ledger: LoopLedger) -> Violations:
    """Is every place, slot and device grant returned exactly once?"""
    pairs = [pair for pair in PERMITS if ledger.by_event[pair[0]] or ledger.by_event[pair[1]]]
    requests = ledger.by_event["acquire"]
    if not (pairs or requests or ledger.by_event["release"]):
        raise Missing("the ledger has no `place`, `slot` or `acquire` event")
    left: list[Row] = []
    in_use = 0
    for taken, back in pairs:
        out: dict[Id, Row] = {}
        ended: set[Id] = set()
        for row in ledger.rows:
            if row.event == taken:
                if before := out.get(row["group"]):
                    yield f"{row}: group {row['group']} already has one, since row {before.at}"
                out[row["group"]] = row
            elif row.event == back and out.pop(row["group"], None) is None:
                yield f"{row}: group {row['group']} has none to return"
            elif ledger.is_end(row):
                ended.add(row["group"])
        left += [row for row in out.values() if ledger.ended or row["group"] in ended]
        in_use += len(out)
    granted = yield from _grants(ledger)
    for row in [*left, *(granted if ledger.ended else ())]:
        yield f"{row}: never returned"
    if (in_use or granted) and not ledger.ended:
        raise Missing(f"the ledger has no `ended` event, so {counted(in_use + len(granted), 'permit')} may be in use")
    return f"{counted(sum(len(ledger.by_event[taken]) for taken, _ in pairs) + len(requests), 'permit')} taken and returned"


REFUSALS = ("expired", "withdrawn", "error")  # of a request for devices


def _grants(ledger: LoopLedger) -> Generator[str, None, list[Row]]:
    """Check requests for devices, one per kind and cluster, and return those that are left. Only a `release` must have one to return,
    which may have been refused: a loop that ends by this error releases all."""
    open_: list[Row] = []
    refused: list[Row] = []
    for row in ledger.of("acquire", "granted", "release", "planned_release", *REFUSALS):
        if row.event == "error" and row.get("of") != "acquire":
            continue
        if row.event == "acquire" and "release" in row.ids:  # this kind is released first
            open_ = [asked for asked in open_ if asked["kind"] != row["release"]]
        matching = [asked for asked in open_ if _same_devices(asked, row)]
        if row.event == "acquire":
            if matching:
                yield f"{row}: kind {row['kind']} already has one, since row {matching[0].at}"
            open_.append(row)
        elif row.event == "granted":
            if not matching:
                yield f"{row}: kind {row['kind']} was not requested"
        else:
            open_ = [asked for asked in open_ if asked not in matching]
            refused += matching if row.event in REFUSALS else []
            if row.event == "release" and not matching:
                again = [asked for asked in refused if _same_devices(asked, row)]
                refused = [asked for asked in refused if asked not in again]
                if not again:
                    yield f"{row}: kind {row['kind']} has none to return"
    return open_


def _same_devices(asked: Row, row: Row) -> bool:
    """Whether a row may be about the devices of a request. It need not name their cluster; `withdrawn` may name only the cluster."""
    kind, cluster = row.get("kind", row.get("cluster")), asked.get("cluster", row.get("cluster"))
    return bool(asked["kind"] == kind and cluster == row.get("cluster", cluster))


def ends_cleanly(ledger: LoopLedger) -> Violations:
    """Does the loop end once, with a reason, no unfinished step, and nothing begun after the end?"""
    for row in ledger.by_event["exhausted"][:1]:
        if not ledger.ended:
            yield f"{row}: the data ended but the loop did not; the last row is {ledger.rows[-1]}"
    end = ledger.need("ended")[0]
    why = end.get("why")
    if why not in ("done", "exhausted", "error"):
        yield f"{end} states why={why!r}; it must be done, exhausted or error"
    for row in ledger.rows[end.at + 1 :]:
        if row.event in ("ended", "reserved", "sent", "selected", "begin", "bumped", "hold"):
            yield f"{row}: the loop had already ended in row {end.at}"
    steps = ledger.limit("steps")
    if why == "done" and ledger.by_event["bumped"] and steps not in (None, ledger.version_at(end)):
        yield f"{end}: done at version {ledger.version_at(end)}, but the loop has {steps} steps"
    rises = ledger.by_event["bumped"] and not ledger.leaves_out("bumped", "step")
    for step in ledger.steps if why != "error" and not ledger.leaves_out("finish", "step") else ():
        if step.abort is None and step.bumped is None and (rises or not step.finished):
            yield f"step {step.id} is unfinished although the loop ended without an error; its last row is {step.rows[-1]}"
    for row in _without_answer(ledger) if why != "error" and ledger.by_event["cancelled"] else ():
        yield f"{row}: the loop ended before the request was answered"
    for row in ledger.by_event["aborted"] if why == "exhausted" and not ledger.foreign else ():
        if row.time == end.time and any(event.event == "ready" for event in ledger.life[row["group"]]):
            yield f"{row}: a complete group was left over, so the loop should have ended with an error"
    return f"{why} in row {end.at}"


def dead_rollout_named(ledger: LoopLedger) -> Violations:
    """Is every dead replica named, and is each of its requests resent or ended?"""
    trained = {row["group"] for row in ledger.trained()}
    for row in (died := ledger.by_event["died"]):
        if "replica" not in row.ids:
            yield f"{row}: the row does not name the replica"
            continue
        for group, name, sample in ledger.on_replica(row):
            over = any(end.at > row.at for end in ledger.ends(group)) or any(
                request.at > row.at for request in sample.sent
            )
            if ledger.ended and not over:
                yield f"{row}: its sample {name} of group {group} was not resent, and the group has no end"
        back = [
            joined.at
            for joined in ledger.by_event["published" if ledger.leaves_out("joined") else "joined"]
            if joined.get("replica") == row["replica"] and joined.at > row.at
        ]
        dead = range(row.at + 1, min(back, default=len(ledger.rows)))
        for request in ledger.by_event["sent"]:
            if request.get("replica") == row["replica"] and request.at in dead:
                yield f"{request}: the replica died in row {row.at}"
        for answer in ledger.by_event["completed"]:
            sample = ledger.samples[answer["group"]][answer["sample"]]
            asked = sample.sent[-1:]  # the request that it answers
            of_the_dead = all(own.get("replica") == row["replica"] for own in (*asked, answer))
            if asked and asked[0].at < row.at and of_the_dead and answer.at in dead and answer["group"] in trained:
                yield f"{answer}: the replica died in row {row.at}, and the group was trained with this answer"
    if not died:
        waiting = _without_answer(ledger)
        reason = ledger.by_event["error"] or ledger.by_event["failed"] or (ledger.ended and ledger.ended.get("error"))
        if not ledger.error or reason or not waiting:
            raise NotMeasured("no replica died")
        yield f"the loop ended with an error while {waiting[0]} had no answer, and no row names what failed"
    return f"{counted(len(died), 'replica')} died, named: {', '.join(str(row['replica']) for row in died)}"


def _without_answer(ledger: LoopLedger) -> list[Row]:
    """Return requests without an answer on replicas that neither left nor died."""
    gone = {row.get("replica") for name in ("died", "left") for row in ledger.by_event[name]}
    samples = (sample for by_name in ledger.samples.values() for sample in by_name.values() if sample.waiting)
    return [sample.sent[-1] for sample in samples if sample.sent[-1].get("replica") not in gone]


def resume_equals(whole: LoopLedger, resumed: LoopLedger) -> Violations:
    """Does a resumed run continue where it stopped: no group trained twice or lost, none started too early?

    `whole` is the ledger of the stopped run. If it continues past the stop, that part is compared with the resumed run.
    """
    start, bumps = resumed.need("resumed", "version")[0], whole.need("bumped", "version")
    at, last = start.number("version"), whole.start + len(bumps)
    if not whole.start <= at <= last:
        yield f"{start}: resumed at version {at}; the run before went from {whole.start} to {last}"
        return ""
    cut = bumps[at - whole.start - 1].at if at > whole.start else -1
    done = {row["group"]: row for row in whole.trained() if whole.version_during(row) < at}
    begun = {row["group"] for row in whole.rows[: cut + 1] if row.event in ("reserved", "sent")}
    for row in resumed.trained():
        if row["group"] in done:
            yield f"{row}: trained before the stop, in row {done[row['group']].at} of the run before"
    for group in sorted(begun - done.keys() - resumed.life.keys(), key=str):
        if not any(row.at <= cut or row.event != "cleared" for row in whole.ends(group)):
            before_stop = [row for row in whole.life[group] if row.at <= cut]
            waited = any(row.event == "ready" for row in before_stop)
            where = "waited in the buffer" if waited else "was in flight"
            yield f"group {group} {where} when the run stopped and is lost; its last row before the stop is {before_stop[-1]}"
    numbers, numbers_before = (
        sorted(group for group in groups if isinstance(group, int)) for groups in ({*begun, *resumed.life}, whole.life)
    )
    # Only if the run before numbered its groups without gaps does a gap show a lost prompt.
    gapless = len(numbers_before) > 1 and all(after == before + 1 for before, after in pairwise(numbers_before))
    for before, after in pairwise(numbers):
        if gapless and after > before + 1:
            yield f"group {before + 1} is in neither run, unlike groups {before} and {after}"
    yield from admitted(resumed)
    if limits_age(resumed) and resumed.limit("window") is not None:
        too_old = settle(no_sample_too_old(resumed))
        if too_old.value:
            yield too_old.why
    # Without a window, a sampler that gives groups a target trains the same ones again; others may have given some up.
    strict = resumed.setting("sampler") == "strict" or (
        resumed.limit("window") == 0 and resumed.setting("sampler") in (None, "in-order")
    )
    resumed_rows, theirs = (_by_version(ledger) if strict else {} for ledger in (resumed, whole))
    shared = sorted(resumed_rows.keys() & theirs.keys())
    for version in shared:
        for group in sorted(resumed_rows[version].keys() | theirs[version].keys(), key=str):
            pair = resumed_rows[version].get(group), theirs[version].get(group)
            if pair[0] != pair[1]:
                yield f"version {version} trains group {group} with {pair[0]} after the resume and with {pair[1]} without it"
    same = f"{counted(len(shared), 'step')} the same as without a stop" if shared else "no step could be compared"
    return f"resumed at version {at} after {counted(len(done), 'group')}; {same}"


def _by_version(ledger: LoopLedger) -> Mapping[int, dict[Id, str]]:
    """Return the lengths, rewards and digests of the samples, by version and trained group."""
    versions: defaultdict[int, dict[Id, str]] = defaultdict(dict)
    for row in ledger.trained():
        samples = sorted(ledger.samples[row["group"]].items(), key=lambda named: str(named[0]))
        last = [(name, sample.completed[-1]) for name, sample in samples if sample.completed]
        parts = (
            f"sample {name}: " + " ".join(str(done.get(id_, "")) for id_ in ("length", "reward", "digest"))
            for name, done in last
        )
        versions[ledger.version_during(row)][row["group"]] = "; ".join(parts)
    return versions


RULES = (
    no_sample_too_old, version_monotone, publish_before_use, stamps_per_token,
    every_group_once, trained_once, groups_whole, samples_differ, order_fair,
    tokens_conserved, one_step_per_batch, one_clear_per_finish, trains_before_straggler,
    abort_on_failure, capacity_kept, permits_return, ends_cleanly,
    dead_rollout_named, eviction_justified, no_needless_waste,
    attempts_distinct, requests_spread, backed.metrics_true, backed.notes_backed,
)  # fmt: skip
