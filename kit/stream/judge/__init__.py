"""The checks of a ledger. Each counts violations from the rows alone and names the first; `docs/ledger.md` lists the events.

It does not matter which system wrote the ledger. A check raises `Missing` (null) where the ledger lacks an event that it needs, and names
it. Rows that contradict each other, or lack what others of their kind have, are violations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from kit.stream.history import NO_AGE_LIMIT, Finding, Id, Ledger, counted, many, pipelines
from kit.stream.judge import backed, groups, steps

if TYPE_CHECKING:
    from kit.results.verdict import Measured


@counted
def resume_equals(whole: Ledger, resumed: Ledger) -> Finding:
    """Does a run that was resumed go on where it stopped: no group trained twice or lost, nothing started too early?

    `whole` is the ledger of the run that was stopped; where it went on after that point, it is compared with the resumed one.
    """
    start, bumps = resumed.need("resumed", "version")[0], whole.need("bumped", "version")
    at, last = start.number("version"), whole.start + len(bumps)
    if not whole.start <= at <= last:
        yield f"{start}: resumed at version {at}; the run before went from {whole.start} to {last}"
        return ""
    cut = bumps[at - whole.start - 1].at if at > whole.start else -1
    done = {row["group"]: row for row in whole.trained() if row.at < cut}
    begun = {row["group"] for row in whole.rows[: cut + 1] if row.event in ("reserved", "sent")}
    for row in resumed.trained():
        if row["group"] in done:
            yield f"{row}: trained before the stop, in row {done[row['group']].at} of the run before"
    for group in sorted(begun - done.keys() - resumed.life.keys(), key=str):
        if not any(row.at <= cut or row.event != "cleared" for row in whole.ends(group)):
            yield f"group {group} was in flight when the run stopped and is lost; its last row before is {whole.life[group][-1]}"
    numbers = sorted(group for group in {*begun, *resumed.life} if isinstance(group, int))
    for before, after in pairwise(numbers):
        if after > before + 1:
            yield f"group {before + 1} is in neither run; groups {before} and {after} are"
    yield from groups.admitted(resumed)
    if resumed.setting("sampler") not in NO_AGE_LIMIT and resumed.limit("window") is not None:
        old = steps.no_sample_too_old(resumed)
        yield from [old.why] if old.value else []
    strict = resumed.setting("sampler") == "strict" or resumed.limit("window") == 0
    mine, theirs = (_by_version(one) if strict else {} for one in (resumed, whole))
    both = sorted(mine.keys() & theirs.keys())
    for version in both:
        for group in sorted(mine[version].keys() | theirs[version].keys(), key=str):
            pair = mine[version].get(group), theirs[version].get(group)
            if pair[0] != pair[1]:
                yield f"version {version} trains group {group} with {pair[0]} after the resume and {pair[1]} without"
    return f"resumed at version {at} after {many(len(done), 'group')}; {many(len(both), 'step')} equal to those without a stop"


def _by_version(ledger: Ledger) -> Mapping[int, dict[Id, str]]:
    """What was trained at each version: for each group the lengths, rewards and digests of its samples."""
    found: defaultdict[int, dict[Id, str]] = defaultdict(dict)
    for row in ledger.trained():
        samples = sorted(ledger.samples[row["group"]].items(), key=lambda one: str(one[0]))
        last = [(name, one.completed[-1]) for name, one in samples if one.completed]
        said = (
            f"sample {name}: " + " ".join(str(done.get(id_, "")) for id_ in ("length", "reward", "digest"))
            for name, done in last
        )
        found[ledger.version_during(row)][row["group"]] = "; ".join(said)
    return found


__all__ = ["CHECKS", "Ledger", "pipelines", "resume_equals"]

RULES = (
    steps.no_sample_too_old, steps.version_monotone, steps.publish_before_use, steps.stamps_per_token,
    groups.every_group_once, groups.trained_once, groups.groups_whole, groups.samples_differ, groups.order_fair,
    groups.tokens_conserved, steps.one_step_per_batch, steps.one_clear_per_finish, steps.trains_before_straggler,
    steps.abort_on_failure, groups.capacity_kept, groups.permits_return, groups.ends_cleanly,
    groups.dead_rollout_named, backed.metrics_true, backed.notes_backed,
)  # fmt: skip
CHECKS: Mapping[str, Callable[[Ledger], Measured]] = {rule.__name__: rule for rule in RULES}
