"""The rules of versions: how old a trained token may be, and when the version rises."""

from __future__ import annotations

import math

from kit.results.records import Id
from kit.results.rules import NotMeasured, Violations
from kit.results.units import counted
from kit.stream.judge.history import NO_AGE_LIMIT, LoopLedger, StepRows, ends_group, limits_age


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
