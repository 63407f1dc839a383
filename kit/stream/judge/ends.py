"""The rules of how a loop ends, and of replicas that died."""

from __future__ import annotations

from kit.results.records import Row
from kit.results.rules import NotMeasured, Violations
from kit.results.units import counted
from kit.stream.judge.history import LoopLedger


def ends_cleanly(ledger: LoopLedger) -> Violations:
    """Does the loop end once, with a reason, no unfinished step, and nothing begun after the end?"""
    for row in ledger.by_event["exhausted"][:1]:
        if not ledger.ended:
            yield f"{row}: the data ended but the loop did not; the last row is {ledger.rows[-1]}"
    end = ledger.need("ended")[0]
    why = end.get("why")
    if why not in ("done", "exhausted", "error"):
        yield f"{end} states why={why!r}; it must be done, exhausted or error"
    if why == "error" and not end.get("error"):
        yield f"{end} does not say what failed (`error`)"
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
    answers = ledger.by_event["cancelled"] and not ledger.leaves_out("completed", "sample")
    for row in _without_answer(ledger) if why != "error" and answers else ():
        yield f"{row}: the loop ended before the request was answered"
    for row in ledger.by_event["aborted"] if why == "exhausted" and not ledger.foreign else ():
        if row.time == end.time and any(event.event == "ready" for event in ledger.life[row["group"]]):
            yield f"{row}: a complete group was left over, so the loop should have ended with an error"
    return f"{why} in row {end.at}"


def dead_rollout_named(ledger: LoopLedger) -> Violations:
    """Is every dead replica named, and is each of its requests resent or ended?"""
    trained, left = {row["group"] for row in ledger.trained()}, 0
    for row in (died := ledger.by_event["died"]):
        if "replica" not in row.ids:
            yield f"{row}: the row does not name the replica"
            continue
        for group, name, sample in ledger.on_replica(row):
            over = any(end.at > row.at for end in ledger.ends(group)) or any(
                request.at > row.at for request in sample.sent
            )
            if over:
                continue
            left += 1
            if ledger.ended:
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
    if left and not ledger.ended:
        raise NotMeasured(
            f"the loop did not end, and {counted(left, 'request')} of dead replicas were neither sent again nor ended"
        )
    return f"{counted(len(died), 'replica')} died, named: {', '.join(str(row['replica']) for row in died)}"


def _without_answer(ledger: LoopLedger) -> list[Row]:
    """Return requests without an answer on replicas that neither left nor died."""
    gone = {row.get("replica") for name in ("died", "left") for row in ledger.by_event[name]}
    samples = (sample for by_name in ledger.samples.values() for sample in by_name.values() if sample.waiting)
    return [sample.sent[-1] for sample in samples if sample.sent[-1].get("replica") not in gone]
