"""The checks of a ledger: each counts violations from the rows alone, and names the first one.

It does not matter which system wrote the ledger; `docs/ledger.md` lists the events. A check raises `Missing` (null) where the ledger lacks an
event that it needs, and names it. Rows that are there and contradict each other, or lack what others of their kind have, are violations.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from math import isclose
from typing import TYPE_CHECKING

from kit.results.verdict import Measured, Missing, NotMeasured
from kit.stream.history import ENDS, Ledger, Row, Step, pipelines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from kit.stream.history import Id, Sample

__all__ = ["CHECKS", "Ledger", "pipelines", "resume_equals"]

NO_AGE_LIMIT = ("ready-first", "capacity")  # samplers that bound admission only
GATED = (
    "strict",
    "in-order",
    "weight-fifo",
    "ready-first",
    "capacity",
)  # may reserve up to (window + version + 1) batches
TARGETED = ("strict", "in-order")
LOST = ("failed", "dropped", "aborted")  # ends after which another group may take the place in the batch
FEWEST = 8  # tokens from which on equal samples are no coincidence
EXACT = 1e-9


def answer(found: Sequence[str], passed: str, lacking: str = "") -> Measured:
    """The number of violations and the first. Without any, what is `lacking` keeps the check from passing."""
    if found:
        return Measured(float(len(found)), found[0] + (f"; {len(found) - 1} more" if len(found) > 1 else ""))
    if lacking:
        raise Missing(lacking)
    return Measured(0.0, passed)


def count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def open_end(ledger: Ledger, what: str) -> str:
    return "" if ledger.ended else f"the ledger has no `ended` event, so {what}"


# -- staleness --------------------------------------------------------------------------------------------------------------


def no_sample_too_old(ledger: Ledger) -> Measured:
    """Was no token older than the window when its group trained?"""
    trained = ledger.need("trained", "group")
    sampler = ledger.setting("sampler")
    if sampler in NO_AGE_LIMIT:
        raise NotMeasured(f"the sampler {sampler} limits what may start, and has no age limit for what is trained")
    if not ledger.by_event["tokens"]:
        ledger.need("completed", "group", "sample", "version")
    window = 0 if sampler == "strict" else ledger.size("window")
    found, lags = [], [0]
    for row in trained:
        ages = {name: one.oldest for name, one in ledger.samples[row["group"]].items() if one.oldest is not None}
        if not ages:
            found.append(f"{row}: no token of the group has a version")
            continue
        sample, oldest = min(ages.items(), key=lambda one: one[1] or 0)
        now = ledger.version_during(row)
        lags.append(now - (oldest or 0))
        if not 0 <= lags[-1] <= window:
            when = "older" if lags[-1] > 0 else "newer"
            found.append(
                f"group {row['group']} trained at version {now} (row {row.at}); sample {sample} has a token of version {oldest}, "
                f"{count(abs(lags[-1]), 'version')} {when} (window {window})"
            )
    return answer(found, f"{count(len(trained), 'group')} trained, largest lag {max(lags)}, window {window}")


def publish_before_use(ledger: Ledger) -> Measured:
    """Was each version published on a replica before it was used there, and did dispatch wait for it?"""
    published = ledger.need("published", "version", "replica")
    at_base = any(row.number("version") == ledger.start for row in published)
    there: dict[Id, set[int]] = defaultdict(lambda: set() if at_base else {ledger.start})
    latest: dict[Id, int] = {} if at_base else defaultdict(lambda: ledger.start)
    found: list[str] = []
    held: Row | None = None
    used = 0
    for row in ledger.rows:
        replica = row.get("replica")
        if row.event == "published":
            latest[row["replica"]] = row.number("version")
            there[row["replica"]].add(row.number("version"))
        elif row.event in ("hold", "resume"):
            if row.event == "resume" and held and (why := _not_synced(ledger, held, row)):
                found.append(why)
            held = row if row.event == "hold" else None
        elif row.event in ("sent", "reserved") and held:
            found.append(f"{row}: dispatched while dispatch was held since row {held.at}")
        elif row.event == "sent" and replica is not None and ledger.by_event["bumped"]:
            now = ledger.version_at(row)
            if latest.get(replica) != now and not (isinstance(latest, defaultdict) and latest[replica] == now):
                found.append(f"{row}: the replica has version {latest.get(replica, 'none')}, the current one is {now}")
        elif row.event in ("started", "tokens", "completed") and replica is not None and "version" in row.ids:
            used += 1
            for version in {
                row.number("version"),
                row.number("newest") if "newest" in row.ids else row.number("version"),
            }:
                if ledger.by_event["bumped"] and version > ledger.version_at(row):
                    found.append(f"{row}: version {version} is used while the current one is {ledger.version_at(row)}")
                elif version not in there[replica] and row.event != "completed":
                    found.append(f"{row}: version {version} is used before it was published on replica {replica}")
    return answer(
        found,
        f"{count(len(published), 'publication')}, {count(used, 'use')}",
        "" if used else "no `tokens`, `started` or `completed` event has a `replica` and a `version`",
    )


def _not_synced(ledger: Ledger, hold: Row, resume: Row) -> str:
    """A sync that began while dispatch was held must end before dispatch goes on, unless it failed."""
    between = [row for row in ledger.rows[hold.at : resume.at] if row.event in ("sync_begin", "synced", "error")]
    last = next((row for row in reversed(between) if row.event != "error" or row.get("of") == "sync"), None)
    if last is None or last.event != "sync_begin":
        return ""
    return f"{resume}: dispatch goes on before the sync of version {last.get('version')} (row {last.at}) ended"


def stamps_per_token(ledger: Ledger) -> Measured:
    """Do the version spans cover every token of each completed sample once, in order, with versions that never go down?"""
    ledger.need("tokens", "group", "sample", "version", "first", "count")
    ledger.need("completed", "group", "sample", "version")
    found: list[str] = []
    judged = spanning = 0
    for group, name, sample in _completed(ledger):
        judged += 1
        spanning += len({row.number("version") for row in sample.spans}) > 1
        if why := _bad_stamps(sample) or _old_stamp(ledger, sample):
            found.append(f"group {group} sample {name}: {why}")
    for row in ledger.by_event["ready"]:
        every = [one for sample in ledger.samples[row["group"]].values() for one in sample.spans if one.at < row.at]
        if every and "version" in row.ids and min(one.number("version") for one in every) != row.number("version"):
            oldest = min(one.number("version") for one in every)
            found.append(f"{row} states version {row['version']}; its oldest token has version {oldest}")
    return answer(found, f"{count(judged, 'sample')}, {spanning} with tokens of several versions")


def _completed(ledger: Ledger) -> Iterator[tuple[Id, Id, Sample]]:
    for group, samples in ledger.samples.items():
        yield from ((group, name, sample) for name, sample in samples.items() if sample.completed)


def _bad_stamps(sample: Sample) -> str:
    done, reached = sample.completed[-1], 0
    for row in sample.spans:
        first, many = row.number("first"), row.number("count")
        if first != reached or many < 1:
            what = (
                "is stamped twice" if first < reached else "has no stamp" if first > reached else "begins an empty span"
            )
            return f"token {min(first, reached)} {what} (row {row.at}: {many} tokens from {first} on, {reached} came before)"
        reached += many
    for before, after in pairwise(sample.spans):
        if after.number("version") < before.number("version"):
            return f"the version goes down from {before['version']} to {after['version']} at token {after['first']} (row {after.at})"
    if "length" in done.ids and done.number("length") != reached:
        return f"{reached} tokens have a stamp, `completed` states length {done['length']} (row {done.at})"
    if not sample.spans:
        return "" if "length" in done.ids else f"no token has a stamp (row {done.at})"
    for name, span in (("version", sample.spans[0]), ("newest", sample.spans[-1])):
        if name in done.ids and done.number(name) != span.number("version"):
            kind = "oldest" if name == "version" else "newest"
            return f"`completed` states {name} {done[name]}, its {kind} token has version {span['version']} (row {done.at})"
    return ""


def _old_stamp(ledger: Ledger, sample: Sample) -> str:
    """Two reports in a row after a publication on the replica cannot both be from before it."""
    for before, after in pairwise(sample.spans):
        replica, version = after.get("replica"), after.number("version")
        for row in ledger.by_event["published"]:
            if (
                row.at < before.at
                and row.get("replica") == replica == before.get("replica")
                and row.number("version") > version
            ):
                return f"tokens after row {row.at} ({row}) are still stamped with version {version} (rows {before.at}, {after.at})"
    return ""


# -- groups ---------------------------------------------------------------------------------------------------------------


def every_group_once(ledger: Ledger) -> Measured:
    """Does every group that began end exactly once: cleared after it was trained, or by another named end?"""
    if not any(row.ends_group for name in ENDS for row in ledger.by_event[name]):
        raise Missing(f"the ledger has no event that ends a group ({', '.join(ENDS)})")
    found, left, began = [], [], 0
    ended: Counter[str] = Counter()
    for group, rows in ledger.life.items():
        names = {row.event for row in rows}
        ends = [row for row in rows if row.ends_group] or [row for row in rows if row.event == "filtered"][:1]
        began += 1
        ended.update(row.event for row in ends)
        if not names & {"reserved", "sent", "tokens", "completed", "ready"}:
            if ends:
                found.append(f"{ends[0]}: the group ends and never began")
            continue
        starts = [row for row in rows if row.event == "reserved"]
        last = ends[0].at if ends else len(ledger.rows)
        after = next(
            (row for row in rows if row.at > last and row.event in ("reserved", "sent", "selected", "trained")), None
        )
        if len(ends) > 1:
            found.append(f"group {group} ends {len(ends)} times: {ends[0]}, then {ends[1]}")
        elif after is not None:
            found.append(f"{after}: the group ended before, by {ends[0]}")
        elif len(starts) > 1:
            found.append(f"{starts[1]}: the group was reserved before, in row {starts[0].at}")
        elif ends and ends[0].event == "cleared" and not any(row.event == "trained" and row.at < last for row in rows):
            found.append(f"{ends[0]}: the group was not trained before")
        elif "filtered" in names and names & {"selected", "trained"}:
            found.append(f"group {group} was filtered out and is trained all the same ({rows[-1]})")
        elif not ends:
            left.append(group)
    for row in ledger.by_event["replaced"]:
        if "by" in row.ids and row["by"] not in ledger.life:
            found.append(f"{row}: group {row['by']}, which replaces it, never began")
    if ledger.ended:
        found += [f"group {group} has no end; its last row is {ledger.life[group][-1]}" for group in left]
    how = ", ".join(f"{many} {name}" for name, many in ended.most_common())
    return answer(
        found,
        f"{count(began, 'group')}: {how}",
        open_end(ledger, f"{len(left)} groups may be in flight") if left else "",
    )


def trained_once(ledger: Ledger) -> Measured:
    """Is every group trained at most once? Updates that were aborted do not count."""
    ledger.need("trained", "group")
    times: defaultdict[Id, list[Row]] = defaultdict(list)
    for row in ledger.trained():
        times[row["group"]].append(row)
    found = [
        f"group {group} is trained {len(rows)} times: {rows[0]}, then {rows[1]}"
        for group, rows in times.items()
        if len(rows) > 1
    ]
    return answer(found, f"{count(len(times), 'group')} trained once")


def groups_whole(ledger: Ledger) -> Measured:
    """Does every trained group have all its samples, each once?"""
    size, trained = ledger.size("group"), ledger.need("trained", "group")
    ledger.need("completed", "group", "sample")
    found = []
    for row in [*trained, *ledger.by_event["ready"]]:
        samples = ledger.samples[row["group"]]
        there = [name for name, one in samples.items() if any(done.at < row.at for done in one.completed)]
        twice = [name for name in there if samples[name].repeated]
        if len(there) != size:
            found.append(
                f"{row}: {len(there)} of {size} samples were complete ({', '.join(map(str, there)) or 'none'})"
            )
        elif twice:
            found.append(f"{row}: sample {twice[0]} was completed {len(samples[twice[0]].completed)} times")
    return answer(found, f"{count(len(trained), 'group')} trained, each with {count(size, 'sample')}")


def samples_differ(ledger: Ledger) -> Measured:
    """Do the samples of a group differ? Equal ones point to random numbers that were reset."""
    ledger.need("completed", "group", "sample", "digest")
    found, judged = [], 0
    for group, samples in ledger.samples.items():
        last = [one.completed[-1] for one in samples.values() if one.completed]
        if len(last) < 2 or min(row.number("length") if "length" in row.ids else FEWEST for row in last) < FEWEST:
            continue
        judged += 1
        if len({row["digest"] for row in last}) == 1:
            found.append(f"all {len(last)} samples of group {group} have the same tokens (digest {last[0]['digest']})")
    return answer(
        found, f"{count(judged, 'group')} compared", "" if judged else f"no group has 2 samples of {FEWEST} tokens"
    )


def order_fair(ledger: Ledger) -> Measured:
    """Is no complete group passed over by more younger groups than the window allows?"""
    allowed = ledger.size("groups_per_step") * (ledger.size("window") + 1)
    order = {row["group"]: row.at for row in reversed(ledger.need("reserved", "group"))}
    selected = ledger.need("selected", "group")
    found, most = [], 0
    for ready in ledger.need("ready", "group"):
        group = ready["group"]
        last = min(
            (row.at for row in ledger.life[group] if row.at > ready.at and (row.event == "selected" or row.ends_group)),
            default=None,
        )
        until = len(ledger.rows) if last is None else last
        passing = [
            row for row in selected if ready.at < row.at < until and order.get(row["group"], 0) > order.get(group, 0)
        ]
        most = max(most, len(passing))
        if len(passing) > allowed:
            found.append(
                f"group {group} was complete (row {ready.at}) while {len(passing)} younger groups were selected; at most {allowed}"
            )
    return answer(found, f"at most {count(most, 'younger group')} went ahead of a complete one (limit {allowed})")


# -- tokens ---------------------------------------------------------------------------------------------------------------


def tokens_conserved(ledger: Ledger) -> Measured:
    """Is every generated token trained or wasted, and counted once?"""
    rows = ledger.need("tokens", "group", "sample", "count")
    ledger.need("completed", "group", "sample")
    found = []
    for group, name, sample in _completed(ledger):
        done = sample.completed[-1]
        if "length" in done.ids and done.number("length") != sample.tokens:
            found.append(
                f"group {group} sample {name} has length {done['length']} (row {done.at}); {sample.tokens} tokens were generated for it"
            )
    generated = sum(row.number("count") for row in rows)
    trained = _tokens(ledger, ledger.trained())
    for group, life in ledger.life.items():
        if ledger.ended and not any(row.ends_group or row.event == "filtered" for row in life):
            many = sum(row.number("count") for row in life if row.event == "tokens")
            found += (
                [f"{count(many, 'token')} of group {group} are neither trained nor wasted: it has no end"]
                if many
                else []
            )
    if ledger.ended:
        stated = {"generated": generated, "trained": trained, "wasted": generated - trained}
        if ledger.ended.get("why") == "error":
            del stated["wasted"]  # what was in flight is in no count
        found += [
            f"`ended` states {ledger.ended[name]} {name} tokens; the ledger has {many} (generated {generated}, trained {trained})"
            for name, many in stated.items()
            if name in ledger.ended.ids and ledger.ended.number(name) != many
        ]
    passed = f"{generated} tokens generated = {trained} trained + {generated - trained} wasted"
    return answer(found, passed, open_end(ledger, "tokens may be in flight"))


def _tokens(ledger: Ledger, trained: Iterable[Row]) -> int:
    """The tokens of groups that went into the weights."""
    groups = {row["group"] for row in trained}
    return sum(sample.tokens for group in groups for sample in ledger.samples[group].values() if sample.completed)


# -- steps ----------------------------------------------------------------------------------------------------------------


def one_step_per_batch(ledger: Ledger) -> Measured:
    """Is every update one begin, its microbatches, and one finish or an abort, with a whole batch of groups?"""
    ledger.need("begin", "step")
    if not ledger.by_event["finish"] and not ledger.by_event["abort"]:
        raise Missing("the ledger has no `finish` event")
    found = [why for step in ledger.steps for why in _update_order(step)]
    found += _interleaved(ledger)
    found += _batch_sizes(ledger)
    finishes = ledger.finishes()
    return answer(found, f"{count(len(finishes), 'optimizer step')}, {count(len(ledger.steps), 'step')}")


def _update_order(step: Step) -> Iterator[str]:
    """begin, microbatches, finish, once for each update, in order."""
    current: Id | None = None
    done: list[Id] = []
    for row in step.of("begin", "microbatch", "finish"):
        update = row.get("update", 0)
        if row.event == "begin":
            if current is not None:
                yield f"{row}: update {current} of the step has no finish yet"
            elif update in done:
                yield f"{row}: update {update} of the step is finished already"
            elif update != len(done):
                yield f"{row}: update {update} begins after {count(len(done), 'update')}"
            current = update
        elif current != update:
            yield (
                f"{row}: update {update} of the step has no begin"
                if update not in done
                else f"{row}: update {update} is finished already"
            )
        elif row.event == "finish":
            done.append(update)
            current = None
    if current is not None and step.abort is None and step.bumped is not None:
        yield f"{step.bumped}: update {current} of the step has no finish"
    for row in (rows[1] for rows in step.finished.values() if len(rows) > 1):
        yield f"{row}: the optimizer step of this update was taken before"


def _interleaved(ledger: Ledger) -> Iterator[str]:
    """No step begins while another is open."""
    for before, after in pairwise([step for step in ledger.steps if step.of("begin")]):
        first = after.of("begin")[0]
        last = before.abort or (before.of("finish") or [None])[-1]
        if last is None or last.at > first.at:
            yield f"{first}: step {before.id} has neither finish nor abort yet"


def _batch_sizes(ledger: Ledger) -> Iterator[str]:
    """Every update trains a whole batch; the last of a step may be smaller by groups that failed."""
    if not ledger.by_event["trained"]:
        return
    whole = [
        step
        for step in ledger.steps
        if step.bumped is not None or (step.finished and step.abort is None and ledger.ended)
    ]
    sizes = {id(step): Counter(row.get("update", 0) for row in step.of("trained")) for step in whole}
    lost = [row for row in ledger.rows if row.ends_group and row.event in ("failed", "dropped")]
    filtered = {row["group"] for row in ledger.by_event["filtered"]}
    batch, group = ledger.setting("train_global_batch_size"), ledger.setting("group")
    most = (
        int(batch) // int(group)
        if batch and group
        else max((max(one.values(), default=0) for one in sizes.values()), default=0)
    )
    wanted = ledger.setting("groups_per_step")
    excused = 0
    for step in whole:
        many, spare = (
            sizes[id(step)],
            sum(row["group"] in {one["group"] for one in step.of("selected")} for row in lost),
        )
        updates = sorted(step.finished, key=str)
        for update in updates:
            if many[update] > most or (update != updates[-1] and many[update] + spare < most):
                yield f"step {step.id} update {update} trained {count(many[update], 'group')}; an optimizer step takes {most}"
        if wanted is None:
            continue
        excuses = sum(row["group"] not in filtered and row.at < step.rows[-1].at for row in lost) - excused
        short = int(wanted) - sum(many.values())
        if short < 0 or short > excuses:
            yield f"step {step.id} trained {sum(many.values())} groups, a step has {wanted}, and {max(excuses, 0)} failed ({step.rows[-1]})"
        excused += max(short, 0)


def version_monotone(ledger: Ledger) -> Measured:
    """Does the version rise by one per finished step, and by nothing else, and do all rows state the current one?"""
    bumps = ledger.need("bumped", "version")
    found = [*_bumps(ledger, bumps), *_stated_versions(ledger), *_publications(ledger)]
    last = ledger.start + len(bumps)
    return answer(
        found, f"from version {ledger.start} to {last} in {count(len(bumps), 'step')}, {len(ledger.finishes())} updates"
    )


def _bumps(ledger: Ledger, bumps: Sequence[Row]) -> Iterator[str]:
    before, finishes = ledger.start, ledger.finishes()
    base = 0
    for number, row in enumerate(bumps):
        if row.number("version") != before + 1:
            yield f"{row}: the version goes from {before} to {row['version']}"
        before = row.number("version")
        if "updates" in row.ids and finishes:
            counted = sum(one.at < row.at for one in finishes)
            base = row.number("updates") - counted if ledger.resumed and not number else base
            if row.number("updates") != base + counted:
                yield f"{row} states {row['updates']} updates; {base + counted} were finished"
    if not finishes and not ledger.by_event["abort"]:
        return  # a ledger without steps
    for step in ledger.steps:
        bumped, last = step.of("bumped"), max((rows[-1].at for rows in step.finished.values()), default=None)
        if len(bumped) > 1:
            yield f"{bumped[1]}: the version has risen for this step in row {bumped[0].at}"
        if bumped and last is None:
            yield f"{bumped[0]}: no update of the step was finished"
        elif bumped and last is not None and last > bumped[0].at:
            yield f"{bumped[0]}: the step is finished only in row {last}"
        elif last is not None and not bumped and step.abort is None and ledger.ended:
            yield f"step {step.id} was finished (row {last}) and the version did not rise"


def _stated_versions(ledger: Ledger) -> Iterator[str]:
    for row in ledger.rows:
        if "version" not in row.ids:
            continue
        if row.event in ("reserved", "selected", "hold", "resume", "sync_begin", "metrics") or row.ends_group:
            now = ledger.version_at(row)
        elif row.event == "trained":
            now = ledger.version_during(row)
        else:
            continue
        if row.number("version") != now:
            yield f"{row} states version {row['version']}; the current one is {now}"


def _publications(ledger: Ledger) -> Iterator[str]:
    """On a replica the version rises one by one, unless the replica went and came back."""
    latest: dict[Id, int] = {}
    for row in ledger.rows:
        if row.event in ("joined", "left", "died") and "replica" in row.ids:
            latest.pop(row["replica"], None)
        elif row.event == "published" and {"version", "replica"} <= row.ids.keys():
            version, before = row.number("version"), latest.get(row["replica"])
            if before is not None and version not in (before, before + 1):
                yield f"{row}: the replica goes from version {before} to {version}"
            latest[row["replica"]] = version


def one_clear_per_finish(ledger: Ledger) -> Measured:
    """Are the rows of an update cleared once, after its finish, and only then?"""
    cleared, finishes = ledger.need("cleared", "group"), ledger.finishes()
    if not finishes:
        ledger.need("finish", "step")
    failed = [row for row in ledger.by_event["error"] if row.get("of") == "clear"]
    of: dict[Id, list[Row]] = defaultdict(list)
    for row in cleared:
        of[row["group"]].append(row)
    found = []
    for step in ledger.steps:
        for row in step.of("trained"):
            done, clears = step.finished.get(row.get("update", 0)), of.pop(row["group"], [])
            if clears and (done is None or clears[0].at < done[0].at):
                found.append(
                    f"{clears[0]}: {'its update was not finished' if done is None else f'its update is finished only in row {done[0].at}'}"
                )
            elif len(clears) > 1:
                found.append(f"{clears[1]}: the group was cleared before, in row {clears[0].at}")
            elif done and not clears and ledger.ended and not any(one.get("step") == step.id for one in failed):
                found.append(f"group {row['group']} of step {step.id} was trained (row {row.at}) and never cleared")
    found += [f"{rows[0]}: the group was in no update" for rows in of.values()]
    found += _clear_calls(ledger, failed)
    return answer(
        found,
        f"{count(len(cleared), 'group')} cleared after {count(len(finishes), 'finish') + ('es' if len(finishes) > 1 else '')}",
    )


def _clear_calls(ledger: Ledger, failed: Sequence[Row]) -> Iterator[str]:
    calls = ledger.by_event["clear"]
    for step in ledger.steps if calls else ():
        mine, finishes = [row for row in calls if row.get("step") == step.id], sum(map(len, step.finished.values()))
        if len(mine) > finishes or (len(mine) < finishes and ledger.ended):
            yield f"step {step.id} was cleared {len(mine)} times after {finishes} finishes"
    for row in failed:
        step = next((one for one in reversed(ledger.steps) if one.id == row.get("step")), None)
        bumped = step.bumped if step else None
        if (
            step
            and ledger.by_event["bumped"]
            and (bumped is None or bumped.at > row.at)
            and len(step.trained) == len(step.of("selected"))
        ):
            yield f"{row}: clear failed, and the version had not risen although the step was finished"


def trains_before_straggler(ledger: Ledger) -> Measured:
    """Does a step begin while its last groups are still generated?"""
    trained = ledger.need("trained", "group", "step")
    ledger.need("completed", "group", "sample")
    least = int(ledger.setting("min_groups") or 1)
    oldest_first = ledger.setting("sampler") == "weight-fifo"
    found, free, judged = [], 0, 0
    for step in ledger.steps:
        if step.bumped is None and not step.finished:
            continue
        mine = {row["group"] for row in trained if row in step.rows}
        start = min((row.at for row in step.of("selected") or step.of("begin", "microbatch")), default=None)
        complete = {group: _complete(ledger, group) for group in mine}
        if oldest_first:  # it waits for groups of its oldest start
            starts = {
                group: next((row.number("version") for row in ledger.life[group] if row.event == "reserved"), 0)
                for group in mine
            }
            complete = {group: row for group, row in complete.items() if starts[group] == min(starts.values())}
        rows = sorted((row for row in complete.values() if row is not None), key=lambda row: row.at)
        if start is not None and len(rows) > least:
            could, last = ledger.rows[max(free, rows[least - 1].at)], rows[-1]
            if last.at > could.at and last.time > could.time:
                judged += 1
                if start > last.at:
                    found.append(
                        f"step {step.id} began in row {start}, after its last group ({last['group']}, {last.since:.3f} s); "
                        f"{count(least, 'group')} and the trainer were ready at {could.since:.3f} s"
                    )
        free = _free_after(ledger, step)
    return answer(
        found,
        f"{count(judged, 'step')} began before their last group was complete",
        "" if judged else "no step had a straggler",
    )


def _complete(ledger: Ledger, group: Id) -> Row | None:
    """The row with which a group is complete."""
    ready = [row for row in ledger.life[group] if row.event == "ready"]
    return max(
        (*ready, *(row for one in ledger.samples[group].values() for row in one.completed[-1:])),
        key=lambda row: row.at,
        default=None,
    )


def _free_after(ledger: Ledger, step: Step) -> int:
    """From which row on the trainer can take another step: after the sync of the new version, where the ledger shows it."""
    end = (step.abort or step.bumped or step.rows[-1]).at
    if step.bumped is None:
        return end
    names = ("resume",) if ledger.by_event["resume"] else ("synced",)
    return next((row.at for row in ledger.rows[end:] if row.event in names), end)


def abort_on_failure(ledger: Ledger) -> Measured:
    """Is a step that failed aborted, with the version unchanged and all its groups accounted for?"""
    ledger.need("begin", "step")
    broken = [
        step
        for step in ledger.steps
        if step.abort or step.errors or (step.of("begin") and not step.finished and ledger.ended)
    ]
    if not broken:
        raise NotMeasured("no step failed")
    found = []
    for step in broken:
        error = step.errors[0] if step.errors else None
        if step.abort is None:
            if step.of("begin"):
                what = f"after {error}" if error else f"it began in row {step.of('begin')[0].at} and was never finished"
                found.append(f"step {step.id} was not aborted: {what}")
            continue
        late = [
            row
            for row in step.of("microbatch", "finish", "bumped")
            if error and row.at > error.at and row.at > step.abort.at
        ]
        found += [f"{row}: the step failed before, by {error}" for row in late]
        for row in step.of("selected"):
            if row["group"] in {one["group"] for one in step.trained}:
                continue
            after = [one for one in ledger.life[row["group"]] if one.at > step.abort.at]
            if not any(
                one.event in ("place", "selected") or (one.ends_group and one.event != "cleared") for one in after
            ):
                found.append(
                    f"group {row['group']} of step {step.id} neither ended nor became trainable again after the abort in row {step.abort.at}"
                )
        cleared = [
            one
            for row in step.of("trained")
            if row not in step.trained
            for one in ledger.life[row["group"]]
            if one.event == "cleared"
        ]
        found += [f"{row}: its step was aborted in row {step.abort.at}" for row in cleared if row.at < step.abort.at]
    return answer(found, f"{count(len(broken), 'step')} failed and aborted")


# -- permits, capacity, ends ----------------------------------------------------------------------------------------------


def capacity_kept(ledger: Ledger) -> Measured:
    """Are never more groups in the buffer and in flight than allowed, and does nothing start too early?"""
    limits = {name: ledger.setting(name) for name in ("places", "slots")}
    reserved = ledger.need("reserved", "group")
    if limits == {"places": None, "slots": None}:
        raise Missing("the ledger has no `capacity` event with `places` or `slots`")
    found, most = [], {}
    for name, permit, leaving in (("places", "place", "selected"), ("slots", "slot", "ready")):
        if limits[name] is not None:
            why, most[name] = _occupied(ledger, permit, leaving, ledger.size(name))
            found += why
    found += _admitted(ledger, reserved)
    return answer(found, ", ".join(f"at most {many} of {limits[name]} {name}" for name, many in most.items()))


def _occupied(ledger: Ledger, permit: str, leaving: str, limit: int) -> tuple[list[str], int]:
    """Groups in the buffer, or in flight: from `reserved` on, or from the permit, until they leave. A permit that came back early frees nothing."""
    taken, back = ledger.by_event[permit], f"{permit}_back"
    leave: dict[int, Id] = {}
    for group, rows in ledger.life.items():
        mine = [row for row in rows if row.event in (permit, back, leaving, "selected") or row.ends_group]
        for row, after in zip(mine, [*mine[1:], None], strict=True):
            if row.event != permit and not (row.event == back and after is not None and after.event == leaving):
                leave[row.at] = group
    inside: set[Id] = set()
    holding: set[Id] = set()
    found, most = [], 0
    for row in ledger.rows:
        group = row.get("group")
        if group is None:
            continue
        if row.event == permit:
            holding.add(group)
        elif row.event == "reserved" and taken and group not in holding:
            found.append(f"{row}: dispatched before it had a {permit}")
        if row.event in (permit, "reserved"):
            inside.add(group)
            most = max(most, len(inside))
            if len(inside) > limit:
                found.append(
                    f"{row}: {len(inside)} groups {'are in the buffer' if permit == 'place' else 'are in flight'}; {permit}s: {limit}"
                )
        elif row.at in leave:
            inside.discard(group)
            holding.discard(group)
    return found, most


def _admitted(ledger: Ledger, reserved: Sequence[Row]) -> Iterator[str]:
    """The gate: at most (window + version + 1) batches since version 0, and no batch beyond version + window."""
    sampler, window, batch = ledger.setting("sampler"), ledger.setting("window"), ledger.setting("groups_per_step")
    if sampler not in GATED or window is None or batch is None or not ledger.by_event["bumped"]:
        return
    by = {row["by"] for row in ledger.by_event["replaced"] if "by" in row.ids}
    allowed, live = int(window) if sampler != "strict" else 0, ledger.start * int(batch)
    for row in ledger.rows:
        if row.ends_group and row.event in LOST:
            live -= 1
        if row.event != "reserved":
            continue
        live += row["group"] not in by
        now = ledger.version_at(row)
        if live > (allowed + now + 1) * int(batch):
            yield f"{row}: {live} groups started by version {now}; the window allows {(allowed + now + 1) * int(batch)}"
        elif sampler in TARGETED and "target" in row.ids and not now <= row.number("target") <= now + allowed:
            yield f"{row}: it is for step {row['target']} at version {now}; the window allows {now} to {now + allowed}"


def permits_return(ledger: Ledger) -> Measured:
    """Is every place, slot and device grant given back exactly once?"""
    pairs = (("place", "place_back", "group"), ("slot", "slot_back", "group"), ("acquire", "release", "kind"))
    there = [pair for pair in pairs if ledger.by_event[pair[0]] or ledger.by_event[pair[1]]]
    if not there:
        raise Missing("the ledger has no `place`, `slot` or `acquire` event")
    found, total = [], 0
    left: list[str] = []
    for taken, back, of in there:
        out: dict[Id, Row] = {}
        for row in ledger.rows:
            if row.event == taken:
                total += 1
                if row[of] in out:
                    found.append(f"{row}: {of} {row[of]} has one since row {out[row[of]].at}")
                out[row[of]] = row
            elif row.event == back and out.pop(row[of], None) is None:
                found.append(f"{row}: {of} {row[of]} has none to give back")
            elif row.event == "granted" and taken == "acquire" and row[of] not in out:
                found.append(f"{row}: {of} {row[of]} was not asked for")
            elif of == "group" and row.ends_group and row.get("group") in out and not _back_at_once(ledger, row, back):
                found.append(f"{row}: the {taken} of row {out.pop(row['group']).at} was not given back")
        left += [f"{row}: never given back" for row in out.values()]
    if ledger.ended:
        found += left
    return answer(
        found,
        f"{count(total, 'permit')} taken and given back",
        open_end(ledger, f"{len(left)} may be in use") if left else "",
    )


def _back_at_once(ledger: Ledger, end: Row, back: str) -> bool:
    return any(row.event == back and row.at > end.at and row.time == end.time for row in ledger.life[end["group"]])


def ends_cleanly(ledger: Ledger) -> Measured:
    """Does the loop end once, with a reason, with no step cut short, and with nothing after its end?"""
    ended, found = ledger.by_event["ended"], []
    exhausted = next(iter(ledger.by_event["exhausted"]), None)
    if not ended:
        if exhausted:
            return answer(
                [f"the data ended in row {exhausted.at} ({exhausted.since:.3f} s) and the loop never ended"], ""
            )
        raise Missing("the ledger has no `ended` event")
    why, end = ended[0].get("why"), ended[0]
    found += [f"{row}: the loop ended before, in row {end.at}" for row in ended[1:]]
    if why not in ("done", "exhausted", "error"):
        found.append(f"{end} states why={why!r}; it must be done, exhausted or error")
    begun = [
        row for row in ledger.rows[end.at :] if row.event in ("reserved", "sent", "selected", "begin", "bumped", "hold")
    ]
    found += [f"{row}: the loop ended before, in row {end.at}" for row in begun]
    for step in ledger.steps:
        if (
            why != "error"
            and step.bumped is None
            and step.abort is None
            and not (step.finished and not ledger.by_event["bumped"])
        ):
            found.append(f"step {step.id} is cut short by an end without an error; its last row is {step.rows[-1]}")
    if why == "exhausted":
        waiting = {row["group"]: row for row in ledger.by_event["reserved"]}
        over = [rows for group in waiting if (rows := [row for row in ledger.life[group] if row.ends_group])]
        kept = [rows[0] for rows in over if rows[0].event == "aborted"]
        found += [f"{row}: a group was left over, so the end of the data is an error" for row in kept]
    quiet = end.time - max((row.time for row in ledger.rows[: end.at]), default=end.time)
    return answer(found, f"{why} in row {end.at}, {quiet:.3f} s after the row before it")


def dead_rollout_named(ledger: Ledger) -> Measured:
    """Is every dead replica named, and every request that it had sent again or ended?"""
    died, found = ledger.by_event["died"], []
    for row in died:
        if "replica" not in row.ids:
            found.append(f"{row} does not name the replica")
            continue
        gone = row["replica"]
        for group, name, sample in _asked(ledger, gone, row):
            again = any(one.at > row.at for one in sample.sent)
            if not again and not any(one.ends_group and one.at > row.at for one in ledger.life[group]) and ledger.ended:
                found.append(
                    f"{row}: sample {name} of group {group} was there, was not sent again, and its group has no end"
                )
        back = next(
            (one.at for one in ledger.by_event["joined"] if one.get("replica") == gone and one.at > row.at),
            len(ledger.rows),
        )
        late = [one for one in ledger.by_event["sent"] if one.get("replica") == gone and row.at < one.at < back]
        found += [f"{one}: the replica died in row {row.at}" for one in late]
    if not died:
        if (
            ledger.ended is None
            or ledger.ended.get("why") != "error"
            or ledger.by_event["error"]
            or ledger.by_event["failed"]
        ):
            raise NotMeasured("no replica died")
        silent = [
            (one.sent[-1], one)
            for some in ledger.samples.values()
            for one in some.values()
            if one.sent and not one.answers
        ]
        if not silent:
            raise NotMeasured("no replica died")
        found.append(
            f"the loop ended with an error while {silent[0][0]} had no answer, and no row names a replica that died"
        )
    return answer(found, f"{count(len(died), 'replica')} died, named: {', '.join(str(row['replica']) for row in died)}")


def _asked(ledger: Ledger, replica: Id, died: Row) -> Iterator[tuple[Id, Id, Sample]]:
    """Samples that a replica had when it died: sent there last, and neither completed nor of a group that was over."""
    for group, samples in ledger.samples.items():
        over = any(row.ends_group and row.at < died.at for row in ledger.life[group])
        for name, sample in samples.items():
            before = [row for row in sample.sent if row.at < died.at]
            done = any(before and before[-1].at < row.at < died.at for row in sample.completed)
            if before and before[-1].get("replica") == replica and not over and not done:
                yield group, name, sample


# -- metrics, resume ------------------------------------------------------------------------------------------------------


def metrics_true(ledger: Ledger) -> Measured:
    """Do the logged numbers equal those counted from the ledger?"""
    rows = ledger.need("metrics", "version")
    found, compared = [], 0
    for row in rows:
        if ledger.by_event["bumped"] and row.number("version") != ledger.version_at(row):
            found.append(f"{row} states version {row['version']}; after that step it is {ledger.version_at(row)}")
        for name, true in _numbers(ledger, row).items():
            if name in row.ids:
                compared += 1
                if not isclose(float(row[name]), true, rel_tol=EXACT, abs_tol=EXACT):
                    found.append(f"{row} states {name} {row[name]}; the ledger has {true:g}")
    names = ", ".join(_numbers(ledger, rows[0])) or "none: no step is known"
    return answer(
        found,
        f"{count(compared, 'number')} in {count(len(rows), 'row')}",
        "" if compared else f"no `metrics` event has a known number ({names})",
    )


def _numbers(ledger: Ledger, metrics: Row) -> dict[str, float]:
    """What the rows before a row of metrics say: of its update, and totals."""
    mine = [
        row
        for row in ledger.by_event["trained"]
        if row.at < metrics.at
        and row.get("step") == metrics.get("step")
        and metrics.get("update", row.get("update")) == row.get("update")
    ]
    before = [row for row in ledger.rows[: metrics.at]]
    totals = Counter(
        row.event
        for row in before
        if row.event in ("reserved", "selected", "filtered", "joined", "died") or row.ends_group
    )
    true: dict[str, float] = {f"total_{name}": totals[name] for name in ("reserved", *ENDS)}
    true["total_generated"] = sum(row.number("count") for row in before if row.event == "tokens")
    true["total_trained"] = _tokens(ledger, [row for row in ledger.trained() if row.at < metrics.at])
    ready = {row["group"] for row in before if row.event == "ready"}
    over = {row["group"] for row in before if row.event == "selected" or row.ends_group}
    if ready and not any(row.event == "abort" for row in before):  # after an abort groups are back
        true["queue"] = len(ready - over)
    lags = [
        ledger.version_during(row) - min(ages)
        for row in mine
        if (ages := [age for one in ledger.samples[row["group"]].values() if (age := one.oldest) is not None])
    ]
    if mine and len(lags) == len(mine):
        true |= {
            "groups": len(mine),
            "tokens": _tokens(ledger, mine),
            "lag_max": max(lags),
            "lag_mean": sum(lags) / len(lags),
        }
    return true


def resume_equals(whole: Ledger, resumed: Ledger) -> Measured:
    """Does a run that was resumed go on where it stopped: no group trained twice or lost, nothing started too early?

    `whole` is the ledger of the run that was stopped; where it went on after that point, it is also compared with the resumed one.
    """
    start = resumed.need("resumed", "version")[0]
    at, bumps = start.number("version"), whole.need("bumped", "version")
    if not whole.start <= at <= whole.start + len(bumps):
        return answer(
            [
                f"{start}: resumed at version {at}; the run before it went from {whole.start} to {whole.start + len(bumps)}"
            ],
            "",
        )
    cut = bumps[at - whole.start - 1].at if at > whole.start else -1
    done = {row["group"]: row for row in whole.trained() if row.at < cut}
    found = [
        f"{row}: the group was trained before the stop, in row {done[row['group']].at}"
        for row in resumed.trained()
        if row["group"] in done
    ]
    begun = {
        group
        for group, rows in whole.life.items()
        if any(row.event in ("reserved", "sent") and row.at <= cut for row in rows)
    }
    for group in sorted(begun - done.keys() - resumed.life.keys(), key=str):
        if not any(row.ends_group for row in whole.life[group]):
            found.append(
                f"group {group} was in flight when the run stopped and is lost; its last row is {whole.life[group][-1]}"
            )
    found += _skipped(begun, resumed)
    found += _admitted(resumed, resumed.by_event["reserved"])
    try:
        old = no_sample_too_old(resumed)
        found += [old.why] if old.value else []
    except NotMeasured:
        pass  # this sampler has no age limit
    compared = 0
    if resumed.setting("sampler") == "strict" or resumed.setting("window") == 0:
        mine, theirs = _by_version(resumed), _by_version(whole)
        for version in sorted(mine.keys() & theirs.keys()):
            compared += 1
            if mine[version] != theirs[version]:
                found.append(
                    f"version {version} trains {_short(mine[version])} after the resume and {_short(theirs[version])} without"
                )
    return answer(
        found,
        f"resumed at version {at}: {count(len(done), 'group')} before; {count(compared, 'step')} equal to those without a stop",
    )


def _skipped(begun: set[Id], resumed: Ledger) -> Iterator[str]:
    """Groups are numbered in the order of their prompts, so none between those before and those after may be missing."""
    numbers = sorted(group for group in {*begun, *resumed.life} if isinstance(group, int))
    for before, after in pairwise(numbers):
        if after > before + 1:
            yield f"group {before + 1} is in neither run, groups {before} and {after} are"
            return


def _by_version(ledger: Ledger) -> dict[int, Mapping[Id, tuple[Id, ...]]]:
    """What was trained at each version: for each group the lengths, rewards and digests of its samples."""
    found: defaultdict[int, dict[Id, tuple[Id, ...]]] = defaultdict(dict)
    for row in ledger.trained():
        samples = sorted(ledger.samples[row["group"]].items(), key=lambda one: str(one[0]))
        last = [one.completed[-1] for _, one in samples if one.completed]
        found[ledger.version_during(row)][row["group"]] = tuple(
            done.get(name, "") for done in last for name in ("length", "reward", "digest")
        )
    return dict(found)


def _short(groups: Mapping[Id, tuple[Id, ...]]) -> str:
    return "groups " + ", ".join(f"{group} ({', '.join(map(str, about))})" for group, about in groups.items())


CHECKS: dict[str, Callable[[Ledger], Measured]] = {
    one.__name__: one
    for one in (
        *(
            no_sample_too_old,
            every_group_once,
            trained_once,
            groups_whole,
            tokens_conserved,
            one_step_per_batch,
            version_monotone,
        ),
        *(
            publish_before_use,
            capacity_kept,
            permits_return,
            ends_cleanly,
            one_clear_per_finish,
            stamps_per_token,
            samples_differ,
        ),
        *(metrics_true, order_fair, trains_before_straggler, abort_on_failure, dead_rollout_named),
    )
}
