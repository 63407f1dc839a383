"""The rule of a run that was stopped and resumed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise

from kit.results.records import Id, Row
from kit.results.rules import Violations, settle
from kit.results.units import counted
from kit.stream.judge.capacity import admitted
from kit.stream.judge.history import REACTION, LoopLedger, ends_group, limits_age
from kit.stream.judge.versions import no_sample_too_old

WAITS = 2  # as many show what a gate counts


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
    yield from _admitted_sooner(whole, resumed)
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


def _admitted_sooner(whole: LoopLedger, resumed: LoopLedger) -> Iterator[str]:
    """Yield a violation if an own sampler that waits for versions is further ahead of them after the resume than it ever was before.

    Only waits that all ended a run of as many batches show such a gate: others wait for room, or are slow. A gate may admit batches for
    groups that are lost, and one that counts groups may admit less than a batch more.
    """
    waits, batch = _waits(whole), whole.limit("groups_per_step")
    most = max((lead for _, _, lead in _leads(whole)), default=0)
    if batch is None or len(waits) < WAITS or {*waits} != {most}:
        return
    for row, lost, lead in _leads(resumed):
        if lead - lost / batch >= most + 1:
            yield (
                f"{row}: the sampler is {lead} batches ahead of version {resumed.version_at(row)}; in the run before it waited at "
                f"{counted(len(waits), 'version')}, each time {most} ahead"
            )


def _leads(ledger: LoopLedger) -> Iterator[tuple[Row, int, int]]:
    """Yield each admission, the groups lost before it, and how many batches it is ahead of the trained ones."""
    for count, row in enumerate(ledger.by_event["admitted"], start=1):
        lost = sum(end.at < row.at for end in ledger.of("evicted", "aborted", "failed") if ends_group(end))
        yield row, lost, count - (ledger.version_at(row) - ledger.start)


def _waits(ledger: LoopLedger) -> list[int]:
    """For each version that rose while an admission was awaited, how many batches the sampler was ahead."""
    asked: Row | None = None
    admissions, waits = 0, []
    for row in ledger.rows:
        if row.event == "admit":
            asked = row
        elif row.event == "admitted":
            asked, admissions = None, admissions + 1
        elif row.event == "bumped" and asked is not None and row.time - asked.time > REACTION:
            waits.append(admissions - (ledger.version_at(row) - ledger.start))
    return waits


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
