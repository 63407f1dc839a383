"""The rule of the versions of a sample's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from kit.results.records import Id, Row
from kit.results.rules import Violations
from kit.results.units import counted
from kit.stream.judge.history import LoopLedger, Sample, by


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
