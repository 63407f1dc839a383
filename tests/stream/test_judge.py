"""The checks of a ledger, on right ledgers of every kind and on one wrong ledger for each bug that they are meant to catch."""

from __future__ import annotations

import ast
import functools
import itertools
import json
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kit.errors import BadInput
from kit.results.records import Unjudged
from kit.results.rules import Measured, Missing, NotMeasured, settle
from kit.stream.judge import resume_equals
from kit.stream.judge.history import LoopLedger, pipelines
from kit.stream.judge.requests import requests_spread
from tests.stream.ledgers import AT_SYNC, RULES_BY_NAME, SAMPLERS, Row, System, finding

ROOT = Path(__file__).resolve().parents[2]
OF_RUNNERS = {"notes_backed"}  # needs rows that only a runner writes; see test_backed


def outcome(name: str, rows: list[Row] | LoopLedger) -> Measured | NotMeasured:
    try:
        return finding(name, rows if isinstance(rows, LoopLedger) else LoopLedger(rows))
    except NotMeasured as missing:
        return missing


@functools.cache
def judged_right(settings: str) -> list[Row]:
    rows = System(**ast.literal_eval(settings)).run()
    assert violations(rows) == {}
    return rows


def right(settings: dict[str, Any]) -> list[Row]:
    """Return a right ledger, which is judged once."""
    return [dict(row) for row in judged_right(repr(settings))]


def violations(rows: list[Row]) -> dict[str, str]:
    ledger = LoopLedger(rows)
    found = {name: outcome(name, ledger) for name in RULES_BY_NAME}
    return {name: one.why for name, one in found.items() if isinstance(one, Measured) and one.value}


# -- right ledgers ------------------------------------------------------------------------------------------------------------


def drawn(sampler: str, at_sync: str, seed: int) -> System:
    """Return a system with settings and problems drawn from a seed."""
    draw = random.Random(f"{sampler} {at_sync} {seed}")
    groups = draw.choice([1, 2, 3, 4])
    trouble: dict[str, Any] = draw.choice(
        [
            {},
            {"fails": (1, 5), "on_failed": "replace"},
            {"fails": (2,), "on_failed": "shrink" if groups > 1 else "replace"},
            {"flat": (1, 4)},
            {"dies": (draw.randint(3, 30), 1)},
            {"breaks": draw.choice([0, 1])},
            {"breaks": 1, "stop_on_error": True},
            {"prompts": groups * draw.choice([2, 3])},
        ]
    )
    return System(
        sampler=sampler,
        at_sync=at_sync,
        seed=seed,
        groups=groups,
        group=draw.choice([2, 3]),
        window=draw.choice([0, 1, 2]),
        min_groups=draw.choice([1, 1, groups])
        if sampler != "weight-fifo"
        else 1,  # the oldest version may have fewer groups than the minimum
        updates=draw.choice([one for one in (1, 2) if groups % one == 0]),
        steps=draw.choice([2, 4]),
        more_places=draw.choice([0, 3]),
        slots=draw.choice([0, max(2, groups)]),
        slow=draw.choice([(), (1, 4)]),
        pace=draw.choice([1, 3]),
        replicas=draw.choice([2, 3]),
        **trouble,
    )


@pytest.mark.parametrize(("sampler", "at_sync"), list(product(SAMPLERS, AT_SYNC)))
def test_right_ledgers_pass(sampler: str, at_sync: str) -> None:
    for seed in range(5):
        system = drawn(sampler, at_sync, seed)
        rows = system.run()
        assert rows[-1]["event"] == "ended", system
        assert violations(rows) == {}, system


LONG_ENOUGH = System(steps=40, replicas=3, slow=(1, 4, 9))  # for many requests that have a choice of replicas


def test_the_right_ledgers_have_what_checks_look_at() -> None:
    """Otherwise their passing would mean little."""
    events: Counter[str] = Counter()
    judged: Counter[str] = Counter()
    for sampler, at_sync in product(SAMPLERS, AT_SYNC):
        rows = drawn(sampler, at_sync, 1).run() + drawn(sampler, at_sync, 5).run()
        events.update(row["event"] for row in rows)
    for sampler, seed in product(SAMPLERS, range(6)):
        rows = drawn(sampler, "keep", seed).run()
        ledger = LoopLedger(rows)
        judged.update(name for name in RULES_BY_NAME if isinstance(outcome(name, ledger), Measured))
        events["spanning"] += "0 with" not in str(outcome("stamps_per_token", ledger))
    judged.update(["requests_spread"] * isinstance(outcome("requests_spread", LONG_ENOUGH.run()), Measured))
    wanted = (
        "evicted",
        "aborted",
        "failed",
        "dropped",
        "replaced",
        "cancelled",
        "died",
        "abort",
        "exhausted",
        "spanning",
    )
    assert {name: events[name] for name in wanted if not events[name]} == {}
    assert set(judged) == set(RULES_BY_NAME) - OF_RUNNERS


# -- wrong ledgers: one rule of the system is broken ----------------------------------------------------------------------------

FAULTS: list[tuple[str, dict[str, Any], str, str]] = [  # fault, settings, the check that sees it, what it names
    (
        "off-by-one-window",
        {"more_places": 2},
        "no_sample_too_old",
        r"group 4 trained at version 2 .* version 0, window 1",
    ),
    (
        "off-by-one-window",
        {"sampler": "strict", "more_places": 2},
        "no_sample_too_old",
        r"group 2 .* version 1 .* window 0",
    ),
    (
        "off-by-one-window",
        {"sampler": "capacity", "more_places": 2},
        "capacity_kept",
        r"5 groups started up to version 0.* allows 4",
    ),
    (
        "off-by-one-window",
        {"sampler": "ready-first", "more_places": 2},
        "capacity_kept",
        r"5 groups started up to version 0",
    ),
    ("lost-group", {"sampler": "windowed"}, "every_group_once", r"^group 3 has no end"),
    ("lost-group", {"sampler": "capacity"}, "tokens_conserved", r"27 tokens of group 3 are neither"),
    ("drops-oldest", {"sampler": "windowed"}, "every_group_once", r"^group 1 has no end"),
    ("uncounted-partial", {}, "tokens_conserved", r"states 24 wasted tokens; counted from the rows: 25"),
    ("partial-group", {}, "groups_whole", r"of group 3 .*: 1 of 2 samples were complete \(0\)"),
    (
        "rejected-row-counts",
        {"sampler": "capacity", "flat": (1,)},
        "one_step_per_batch",
        r"step \d trained 1 group .* has 2, 0 failed",
    ),
    (
        "finish-per-chunk",
        {"groups": 4},
        "one_step_per_batch",
        r"step 0 update 0 trained 1 group; an optimizer step trains 4",
    ),
    ("double-bump", {"sampler": "windowed"}, "version_monotone", r"of step 0 .* already rose for this step"),
    (
        "bump-per-update",
        {"sampler": "windowed", "updates": 2},
        "version_monotone",
        r"of step 0 .* already rose for this step",
    ),
    (
        "bump-on-abort",
        {"sampler": "windowed", "breaks": 1},
        "version_monotone",
        r"of step 1 .* no update of the step was finished",
    ),
    (
        "unbounded-buffer",
        {"sampler": "windowed"},
        "capacity_kept",
        r"of group 4 .*: 5 groups are in the buffer, places: 4",
    ),
    ("slot-leak", {}, "permits_return", r"`slot` of group 2 .* never returned"),
    ("slot-twice", {}, "permits_return", r"`slot_back` of group 2 .* none to return"),
    (
        "gate-never-opens",
        {},
        "publish_before_use",
        r"`hold` .* never continued, although the weights were published by row \d+",
    ),
    ("gate-checked-early", {}, "capacity_kept", r"of group 0, .* dispatched without a place"),
    ("waits-at-the-end", {"prompts": 6}, "ends_cleanly", r"the data ended but the loop did not"),
    ("partial-step", {"prompts": 7}, "ends_cleanly", r"step 3 is unfinished although the loop ended without an error"),
    ("no-abort", {"breaks": 1}, "abort_on_failure", r"step 1 was not aborted; `error` of step 1"),
    (
        "cleared-before-finish",
        {"breaks": 1},
        "one_clear_per_finish",
        r"of group \d, step 0 .* before its update was finished",
    ),
    ("cleared-before-finish", {"breaks": 1}, "abort_on_failure", r"step 1 .* cleared although its step was aborted"),
    ("clear-fails-after-finish", {}, "one_clear_per_finish", r"`error` of step 1 .* version never rose"),
    (
        "resumes-too-early",
        {},
        "publish_before_use",
        r"of group 4, sample 0, .* has version 0; the current version is 1",
    ),
    (
        "waits-for-all",
        {"groups": 4, "slow": (7,)},
        "trains_before_straggler",
        r"step 1 began in row \d+, after its last group",
    ),
    ("discard-and-requeue", {"sampler": "windowed"}, "every_group_once", r"of group 3 .* already reserved in row"),
    (
        "freshest-first-starves",
        {"sampler": "ready-first", "pace": 6, "window": 3, "steps": 16},
        "order_fair",
        r"of group 1 .* 30 younger",
    ),
    ("caught-up-too-late", {}, "metrics_true", r"of step 0, .* states version 0; counted from the rows: 1"),
    (
        "stamp-after-reply",
        {"slow": (3, 5)},
        "publish_before_use",
        r"of group 2, .* version 2 is used; the current version is 1",
    ),
    (
        "one-stamp-per-group",
        {"slow": (2, 3, 5)},
        "stamps_per_token",
        r"group 2 sample 0: .* with version 0, after `published`",
    ),
    (
        "aborts-nothing",
        {"at_sync": "abort", "slow": (3,)},
        "stamps_per_token",
        r"versions 0 and 1, but nothing may be in flight",
    ),
    (
        "does-not-drain",
        {"at_sync": "drain", "slow": (3,)},
        "stamps_per_token",
        r"versions 0 and 1, but nothing may be in flight",
    ),
    (
        "last-version-unpublished",
        {},
        "publish_before_use",
        r"dispatch has been held since .*, so the last version was never served",
    ),
    ("rng-reset", {}, "samples_differ", r"all 2 samples of group 0 have the same tokens"),
    ("gap", {}, "stamps_per_token", r"group 0 sample 0: token 3 is not stamped"),
    (
        "rollout-dies",
        {"dies": (6, 1)},
        "dead_rollout_named",
        r"of group 0, sample 0, replica 1 .* no row names what failed",
    ),
]


@pytest.mark.parametrize(
    ("fault", "settings", "check", "why"), FAULTS, ids=lambda one: one if isinstance(one, str) else ""
)
def test_a_broken_rule_fails_its_check(fault: str, settings: dict[str, Any], check: str, why: str) -> None:
    # Without the fault the same system passes; only `waits-at-the-end` and `partial-step` still run out of prompts in the middle of a step.
    if fault not in ("partial-step", "waits-at-the-end"):
        right({name: value for name, value in settings.items() if name != "flat"})
    rows = System(fault=fault, **settings).run()
    if fault == "last-version-unpublished":
        of_the_kit(rows)
    found = outcome(check, rows)
    assert isinstance(found, Measured), found
    assert found.value
    assert re.search(why, found.why), found.why
    assert re.search(r"(group|step|row|replica) \d", found.why), "it names no place"


# -- wrong ledgers: one row is wrong ------------------------------------------------------------------------------------------


def some(rows: list[Row], event: str, number: int = 0) -> int:
    """The index of the n-th row of an event."""
    return [place for place, row in enumerate(rows) if row["event"] == event][number]


Edit = Callable[[list[Row]], object]


def change(event: str, number: int = 0, **ids: Any) -> Edit:
    return lambda rows: rows[some(rows, event, number)].update(ids)


def drop(event: str, number: int = 0) -> Edit:
    return lambda rows: rows.pop(some(rows, event, number))


def repeat(event: str, number: int = 0) -> Edit:
    return lambda rows: rows.insert(some(rows, event, number) + 1, dict(rows[some(rows, event, number)]))


def move(event: str, number: int, to: str, other: int = 0, *, after: int = 0) -> Edit:
    """Return an edit that moves a row before (or `after`) another."""

    def edit(rows: list[Row]) -> None:
        row = rows.pop(some(rows, event, number))
        rows.insert(some(rows, to, other) + after, row)

    return edit


def add(event: str, before: str = "ended", number: int = 0, **ids: Any) -> Edit:
    return lambda rows: rows.insert(some(rows, before, number), {"event": event, "time": 1.7e9, **ids})


def both(*edits: Edit) -> Edit:
    return lambda rows: [edit(rows) for edit in edits]


def later_span(number: int, **ids: Any) -> Edit:
    """Return an edit of a token span that is not the first of its sample."""
    return lambda rows: [row for row in rows if row["event"] == "tokens" and row["first"]][number].update(ids)


def forget_after_abort(rows: list[Row]) -> None:
    """Remove all later rows of a group of the aborted step."""
    at = some(rows, "abort")
    group = rows[at + 1]["group"]
    rows[:] = [row for place, row in enumerate(rows) if place <= at or row.get("group") != group]


def no_updates(rows: list[Row]) -> None:
    for row in rows:
        row.pop("updates", None)


def every(event: str, **ids: Any) -> Edit:
    return lambda rows: [row.update(ids) for row in rows if row["event"] == event]


def without(event: str) -> Edit:
    return lambda rows: rows.__setitem__(slice(None), [row for row in rows if row["event"] != event])


def of_the_kit(rows: list[Row]) -> None:
    """Mark the rows that a port of the kit reports: its loop promises more than those of other systems."""
    every("joined", core="a")(rows)


def ends_early(event: str, place: int = 3, **settings: Any) -> Edit:
    """Return an edit that ends a group, which is not trained any more, well before the end of the loop."""

    def edit(rows: list[Row]) -> None:
        rows[some(rows, "capacity")].update(settings)
        at = some(rows, "ready", place)
        group = rows[at]["group"]
        rows[:] = [row for number, row in enumerate(rows) if number <= at or row.get("group") != group]
        rows.insert(at + 1, {"event": event, "group": group, "why": "too slow", "time": rows[at]["time"]})

    return edit


def answers(evicted: list[int]) -> Edit:
    """Return an edit that adds a sampler's answer before the first group that ends."""

    def edit(rows: list[Row]) -> None:
        at = some(rows, "evicted")
        rows.insert(at, {"event": "chosen", "groups": "", "evicted": evicted, "aborted": "", "time": rows[at]["time"]})

    return edit


def goes_on(rows: list[Row]) -> dict[str, Any]:
    """The rest of an answer is a request of its own, which goes on where the first ended. Return the row of its first tokens."""
    at = some(rows, "tokens", 8)
    sample = {name: rows[at][name] for name in ("group", "sample", "replica", "time")}
    rows.insert(at + 1, {"event": "sent", "attempt": 7, **sample})
    mine = {("group", sample["group"]), ("sample", sample["sample"]), ("event", "tokens")}
    return next(row for row in rows[at + 1 :] if mine <= {*row.items()})


def restarts(rows: list[Row]) -> None:
    """A sample is sent again in the middle of its answer, for no reason."""
    goes_on(rows)["first"] = 0


def crowds(rows: list[Row]) -> None:
    """Every request goes to replica 0."""
    for row in rows:
        if "replica" in row and "sample" in row:
            row["replica"] = 0


def answers_after_its_death(rows: list[Row]) -> None:
    """The dead replica's requests are not sent again, and its answers are taken although it is dead."""
    died = some(rows, "died")
    dead = rows[died]["replica"]
    samples = {
        (row["group"], row["sample"]) for row in rows[:died] if row["event"] == "sent" and row["replica"] == dead
    }
    moved = set()
    for row in rows[died:]:
        if row["event"] == "sent" and (row["group"], row["sample"]) in samples:
            row["event"] = "note"
            moved.add((row["group"], row["sample"]))
        elif row["event"] in ("started", "tokens", "completed") and (row["group"], row["sample"]) in moved:
            row["replica"] = dead


BREAKS, DIES = {"breaks": 1}, {"dies": (6, 1), "replicas": 3}
EDITS: list[tuple[str, Edit, str, dict[str, Any]]] = [
    (
        "eviction_justified",
        ends_early("evicted"),
        r"started at version \d, for version \d; at version \d .* not too old",
        {},
    ),
    ("eviction_justified", ends_early("evicted"), r"started at version 0; .* not too old", {"sampler": "windowed"}),
    ("eviction_justified", ends_early("evicted"), r"the sampler capacity gives up no group", {"sampler": "capacity"}),
    ("eviction_justified", ends_early("aborted"), r"in-order gives up no unfinished group", {}),
    ("eviction_justified", ends_early("dropped", on_failed="shrink"), r"neither filtered nor without a token", {}),
    ("eviction_justified", change("capacity", filter=False), r"filtered although filter=false", {"flat": (1, 4)}),
    ("eviction_justified", ends_early("failed"), r"none of its requests failed", {}),
    ("eviction_justified", drop("failed"), r"`replaced` of group 1 .* none of its requests failed", {"fails": (1,)}),
    (
        "eviction_justified",
        change("capacity", on_failed="stop"),
        r"`replaced` of group 1 .* continues although on_failed=stop",
        {"fails": (1,)},
    ),
    (
        "one_step_per_batch",
        change("capacity", on_failed="replace"),
        r"step 1 trained 1 group .* a step has 2, 0 failed",
        {"fails": (2,), "on_failed": "shrink"},
    ),
    (
        "one_step_per_batch",
        change("capacity", on_failed="shrink", floor=2),
        r"step 1 trained 1 group .* fewer than floor=2",
        {"fails": (2,), "on_failed": "shrink"},
    ),
    (
        "eviction_justified",
        both(ends_early("evicted"), change("capacity", sampler="mine:Own"), answers([])),
        r"`evicted` of group \d .* the sampler did not give up this group",
        {},
    ),
    (
        "abort_on_failure",
        change("capacity", step_retries=0),
        r"the loop trains on after 1 failed step; step_retries=0",
        {"breaks": 1},
    ),
    (
        "no_needless_waste",
        change("capacity", at_sync="keep"),
        r"tokens? of the attempt in row \d+ lost; its request did not fail, .* no sync ended it \(at_sync=keep\)",
        {"at_sync": "abort", "slow": (1, 3)},
    ),
    (
        "no_needless_waste",
        restarts,
        r"\d+ tokens of the attempt in row \d+ lost",
        {},
    ),
    ("attempts_distinct", every("sent", attempt=0), r"attempt 0 of this sample was already sent in row", DIES),
    ("requests_spread", crowds, r"went to the replica with the most requests in flight", {"slow": (1,), "steps": 40}),
    ("no_sample_too_old", change("tokens", 60, version=-3), r"has a token of version -3", {}),
    (
        "no_sample_too_old",
        both(every("tokens", version=9), every("completed", version=9)),
        r"has a token of version 9",
        {},
    ),
    ("no_sample_too_old", add("trained", group=77, version=3), r"group 77 .* no token of the group has a version", {}),
    ("version_monotone", change("bumped", 1, version=4), r"jumps from 1 to 4", {}),
    ("version_monotone", change("bumped", 2, updates=4), r"states 4 updates; 3 were finished", {}),
    ("version_monotone", drop("bumped", 3), r"step 3 was finished .* did not rise", {}),
    ("version_monotone", change("trained", 3, version=3), r"states version 3; the current version is 1", {}),
    ("version_monotone", change("reserved", 5, version=0), r"states version 0; the current version is 1", {}),
    ("version_monotone", both(of_the_kit, change("published", 3, version=3)), r"jumps from version 0 to 3", {}),
    ("version_monotone", change("published", 5, version=0), r"jumps from version 1 to 0", {}),
    ("version_monotone", both(no_updates, move("bumped", 1, "finish", 1)), r"the step is not finished until row", {}),
    (
        "publish_before_use",
        both(of_the_kit, move("sent", 8, "hold", 1)),
        r"dispatched while dispatch was held \(row",
        {},
    ),
    (
        "publish_before_use",
        add("left", "sent", 12, replica=1),
        r"the replica has version none; the current version is \d",
        {},
    ),
    ("publish_before_use", drop("published", 2), r"version 0; the current version is 1|before it was published", {}),
    ("publish_before_use", move("sent", 0, "resume"), r"dispatched while dispatch was held", {}),
    ("publish_before_use", move("resume", 1, "synced", 1), r"before the end of the sync that began in row", {}),
    ("publish_before_use", move("hold", 1, "sent", 12), r"dispatched while dispatch was held", {}),
    ("stamps_per_token", later_span(4, first=0), r"is stamped twice", {}),
    ("stamps_per_token", later_span(4, count=1), r"is not stamped|tokens stamped", {}),
    ("stamps_per_token", later_span(40, version=0), r"falls from \d to 0", {}),
    ("stamps_per_token", change("completed", 3, newest=9), r"states newest 9", {}),
    ("stamps_per_token", change("completed", 3, version=9), r"states version 9", {}),
    ("stamps_per_token", change("completed", 3, length=99), r"states length 99", {}),
    ("stamps_per_token", change("ready", 1, version=5), r"of group \d .* states version 5", {}),
    ("every_group_once", repeat("cleared", 2), r"ends 2 times: `cleared`", {}),
    ("every_group_once", drop("cleared", 2), r"group \d has no end", {}),
    ("every_group_once", add("evicted", group=99, why="?", version=1), r"of group 99 .* never began", {}),
    ("every_group_once", drop("trained", 1), r"not trained before", {}),
    ("every_group_once", change("replaced", by=99), r"its replacement, group 99, never began", {"fails": (1,)}),
    ("every_group_once", add("filtered", "selected", 1, group=0), r"group 0 was filtered out", {}),
    (
        "every_group_once",
        add("selected", group=0, step=9, version=4),
        r"of group 0, step 9 .* had already ended: `cleared`",
        {},
    ),
    (
        "trained_once",
        add("trained", group=0, step=3, update=0, version=3),
        r"of group 0, step 3, .* already trained: .* step 0",
        {},
    ),
    ("trained_once", repeat("trained", 2), r"already trained", {}),
    ("groups_whole", drop("completed", 2), r"1 of 2 samples were complete", {}),
    ("groups_whole", repeat("completed", 2), r"sample \d was completed 2 times", {}),
    ("groups_whole", add("completed", "ready", 1, group=2, sample=7, version=0), r"3 of 2 samples", {}),
    ("tokens_conserved", change("completed", 2, length=3), r"has length 3", {}),
    ("tokens_conserved", change("ended", generated=1), r"states 1 generated tokens", {}),
    ("tokens_conserved", change("ended", trained=1), r"states 1 trained tokens", {}),
    ("one_step_per_batch", drop("begin", 1), r"of step 1, update 0 .* has no begin", {}),
    ("one_step_per_batch", drop("finish", 1), r"update 0 of the step has no finish", {}),
    ("one_step_per_batch", repeat("finish", 1), r"of step 1, .* is already finished", {}),
    ("one_step_per_batch", repeat("begin", 1), r"of step 1, .* were already finished", {}),
    ("one_step_per_batch", change("begin", 1, update=1), r"0 updates of the step were already finished", {}),
    ("one_step_per_batch", move("finish", 1, "microbatch", 2), r"of step 1, .* (has no begin|already finished)", {}),
    ("one_step_per_batch", move("begin", 1, "finish", 0), r"step 0 has neither finish nor abort yet", {}),
    ("one_step_per_batch", drop("trained", 3), r"step 1 trained 1 group .* a step has 2, 0 failed", {}),
    ("one_clear_per_finish", drop("cleared", 2), r"of group \d, step 1, .* trained but never cleared", {}),
    ("one_clear_per_finish", move("cleared", 2, "finish", 1), r"cleared before its update was finished", {}),
    ("one_clear_per_finish", repeat("cleared", 2), r"already cleared in row", {}),
    ("one_clear_per_finish", add("clear", step=1), r"step \d was cleared \d times after 1 finishes", {}),
    ("one_clear_per_finish", add("clear", step=1, groups="3"), r"no `clear` of step \d names the group", {}),
    ("abort_on_failure", drop("abort"), r"step 1 was not aborted", BREAKS),
    (
        "abort_on_failure",
        forget_after_abort,
        r"of group \d, step 1 .* neither ended nor became trainable again",
        BREAKS,
    ),
    ("abort_on_failure", add("finish", "abort", step=1, update=0), r"the step had already failed: `error`", BREAKS),
    ("capacity_kept", change("capacity", places=3), r"4 groups are in the buffer, places: 3", {}),
    ("capacity_kept", change("capacity", slots=3), r"4 groups are in flight, slots: 3", {}),
    ("capacity_kept", change("reserved", 4, target=5), r"started for version 5 at version 1", {}),
    ("permits_return", drop("place_back", 1), r"`place` of group \d .* never returned", {}),
    ("permits_return", repeat("place", 1), r"group 1 already has one, since", {}),
    ("permits_return", drop("release"), r"never returned", {}),
    ("permits_return", drop("acquire"), r"kind generation was not requested", {}),
    ("ends_cleanly", repeat("ended"), r"the loop had already ended", {}),
    (
        "ends_cleanly",
        drop("cancelled", -1),
        r"`sent` of group \d.* the loop ended before the request was answered",
        {"sampler": "windowed", "slow": (9, 10, 11)},
    ),
    ("ends_cleanly", change("ended", why="tired"), r"states why='tired'", {}),
    (
        "ends_cleanly",
        lambda rows: rows.append({"event": "reserved", "time": 2e9, "group": 50}),
        r"of group 50 .* already ended in row",
        {},
    ),
    ("ends_cleanly", drop("bumped", 3), r"step 3 is unfinished", {}),
    (
        "ends_cleanly",
        lambda rows: (of_the_kit(rows), change("ended", why="exhausted")(rows))[0],
        r"left over, so the loop should have ended with an error",
        {"pace": 6},
    ),
    ("dead_rollout_named", lambda rows: rows[some(rows, "died")].pop("replica"), r"does not name the replica", DIES),
    ("dead_rollout_named", change("sent", -1, replica=1), r"the replica died in row", DIES),
    (
        "dead_rollout_named",
        answers_after_its_death,
        r"died in row \d+, and the group was trained with this answer",
        DIES,
    ),
    ("metrics_true", change("metrics", 1, groups=9), r"states groups 9; counted from the rows: 2", {}),
    ("metrics_true", change("metrics", 1, tokens=9), r"states tokens 9", {}),
    ("metrics_true", change("metrics", 1, lag_max=9), r"states lag_max 9", {}),
    ("metrics_true", change("metrics", 1, lag_mean="0.1"), r"states lag_mean 0.1", {}),
    ("metrics_true", change("metrics", 1, total_generated=9), r"states total_generated 9", {}),
    ("metrics_true", change("metrics", 1, total_reserved=9), r"states total_reserved 9", {}),
    ("metrics_true", change("metrics", 1, queue=9), r"states queue 9", {}),
    ("metrics_true", add("progress", "sent", completed=2, target=2), r"reports 2 complete groups; there are 0", {}),
    (
        "metrics_true",
        add("progress", "sent", completed=0, target=100),
        r"reports that a step needs 100 groups; it needs 2",
        {},
    ),
    (
        "metrics_true",
        add("progress", "sent", completed=0, target=1),
        r"reports that a step needs 1 groups; it needs 2",
        {},
    ),
    ("samples_differ", every("completed", digest="x"), r"all 2 samples of group", {}),
]


@pytest.mark.parametrize(
    ("check", "edit", "why", "settings"), EDITS, ids=lambda one: one if isinstance(one, str) else ""
)
def test_a_wrong_row_fails_its_check(check: str, edit: Edit, why: str, settings: dict[str, Any]) -> None:
    rows = right(settings)
    edit(rows)
    found = outcome(check, rows)
    assert isinstance(found, Measured), found
    assert found.value, check
    assert re.search(why, found.why), found.why


def test_a_request_that_goes_on_from_the_tokens_before_loses_none() -> None:
    rows = right({})
    goes_on(rows)
    assert "no_needless_waste" not in violations(rows)
    goes_on_late = right({})
    later = goes_on(goes_on_late)
    later["first"] -= 1
    assert "1 token of the attempt in row" in violations(goes_on_late)["no_needless_waste"]
    late = right({})
    goes_on(late)
    sent = next(row for row in late if row["event"] == "sent" and row["attempt"] == 7)
    sent["replica"] = 9  # the tokens that follow are still of the first
    assert "tokens of the attempt in row" in violations(late)["no_needless_waste"]


def test_an_answer_of_a_dead_replica_may_come_when_another_was_asked() -> None:
    rows = right(DIES)
    died = some(rows, "died")
    again = next(
        row
        for row in rows[died:]
        if row["event"] == "completed"
        and row["replica"] != rows[died]["replica"]
        and row["group"] in {one["group"] for one in rows if one["event"] == "trained"}
    )
    rows.insert(died + 1, {**again, "replica": rows[died]["replica"]})
    assert "dead_rollout_named" not in violations(rows)


def with_clears(rows: list[Row]) -> list[Row]:
    """The same ledger with the commands that the rows `cleared` answer, one for each finish."""
    whole: list[Row] = []
    for before, row in zip([{}, *rows], rows, strict=False):
        if row["event"] == "cleared" and before.get("event") != "cleared":
            whole.append({"event": "clear", "time": row["time"], "step": row["step"]})
        whole.append(row)
    return whole


def orders(rows: list[Row], *groups: list[int]) -> list[Row]:
    """The ledger with these commands `clear` of step 0, sent once its version has risen."""
    at = some(rows, "bumped")
    sent = [{"event": "clear", "time": rows[at]["time"], "step": 0, "groups": tuple(named)} for named in groups]
    return [row for row in [*rows[:at], *sent, *rows[at:]] if row.get("step", 0) == 0 or row["event"] != "cleared"]


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ([[0, 1, 2, 3]], ""),
        ([[0], [1], [2], [3]], ""),
        ([[0, 1, 2]], "no `clear` of step 0 names the group"),
        ([[0, 1], [1, 2, 3]], "1 was cleared 2 times in step 0"),
    ],
)
@pytest.mark.parametrize("names", [int, "group-{}".format])
def test_a_clear_may_name_any_of_the_groups_that_were_trained(
    groups: list[list[int]], why: str, names: Callable[[int], int | str]
) -> None:
    """All groups of a step with two updates at once, or each in a command of its own."""
    rows = right({"groups": 4, "updates": 2, "steps": 1})
    clears = orders(rows, *groups)
    for row in clears:
        if "group" in row and row["event"] != "capacity":
            row["group"] = names(row["group"])
        if row["event"] == "clear":
            row["groups"] = row["groups"] if names is int else ",".join(map(str, map(names, row["groups"])))
    assert why in (found := violations(clears).get("one_clear_per_finish", ""))
    assert bool(found) is bool(why)


def test_a_clear_of_a_group_comes_after_the_finish_of_its_update() -> None:
    rows = orders(right({"groups": 4, "updates": 2, "steps": 1}), [0, 1, 2, 3])
    move("clear", 0, "finish", 1)(rows)
    assert "sent before the update of group" in violations(rows)["one_clear_per_finish"]


@pytest.mark.parametrize(("error", "wrong"), [({"groups": (1,)}, False), ({}, False), ({"groups": (2,)}, True)])
def test_a_clear_that_failed_is_sent_again_for_its_groups(error: dict[str, Any], wrong: bool) -> None:
    rows = orders(right({"groups": 4, "updates": 2, "steps": 1}), [0, 1], [1, 2, 3])
    at = some(rows, "clear", 0)
    rows.insert(at + 1, {"event": "error", "of": "clear", "step": 0, "time": rows[at]["time"], **error})
    assert ("one_clear_per_finish" in violations(rows)) is wrong


def test_an_aborted_step_may_be_trained_again_under_its_number() -> None:
    rows = with_clears(right(BREAKS))
    aborted = rows[some(rows, "abort")]["step"]
    for row in rows[some(rows, "abort") + 1 :]:
        if row.get("step", 0) > aborted:
            row["step"] -= 1
    assert not violations(rows)
    clear = next(place for place, row in enumerate(rows) if row["event"] == "clear" and row["step"] == aborted)
    rows.insert(clear, dict(rows[clear]))
    assert f"step {aborted} was cleared 2 times after 1 finishes" in violations(rows)["one_clear_per_finish"]


def in_a_burst(between: float, *, turn: bool) -> LoopLedger:
    """Four groups become complete one after the other, then their step begins, as of min_groups=1."""
    rows: list[Row] = [{"event": "capacity", "time": 0.0, "min_groups": 1, "groups_per_step": 4}]
    for group in range(4):
        rows.append({"event": "completed", "time": group * between, "group": group, "sample": 0, "version": 0})
        rows += [{"event": "sent", "time": group * between, "group": 4, "sample": 0}] if turn and group == 2 else []
    for event in ("begin", *(f"trained {group}" for group in range(4)), "finish"):
        name, *group = event.split()
        rows.append(
            {"event": name, "time": 1.0, "step": 0, "version": 0, **({"group": int(group[0])} if group else {})}
        )
    return LoopLedger(rows)


@pytest.mark.parametrize(
    ("between", "turn", "judged"), [(0.006, False, False), (0.006, True, True), (0.03, False, True)]
)
def test_a_controller_that_polls_sees_a_burst_of_groups_in_one_turn(between: float, turn: bool, judged: bool) -> None:
    found = outcome("trains_before_straggler", in_a_burst(between, turn=turn))
    if judged:
        assert isinstance(found, Measured)
        assert "step 0 began" in found.why
    else:
        assert not isinstance(found, Measured), found


def test_a_request_of_a_group_that_was_never_reserved_is_judged() -> None:
    rows = right({})
    rows.append({**rows[some(rows, "sent")], "group": 9999, "time": rows[-1]["time"]})
    assert "group 9999" in violations(rows)["capacity_kept"]
    assert "the loop had already ended" in violations(rows)["ends_cleanly"]


@pytest.mark.parametrize("same_number", [True, False])
def test_what_an_aborted_step_trained_may_train_again(same_number: bool) -> None:
    """A ledger may state `trained` as each group is fed, before the finish."""
    rows = with_clears(right(BREAKS))
    rows = [row for row in rows if row["event"] not in ("microbatch", "done")]
    abort = some(rows, "abort")
    step = rows[abort]["step"]
    fed = [row for row in rows if (row["event"], row.get("step")) == ("trained", step + 1)][:2]
    rows[abort:abort] = [{**row, "step": step, "time": rows[abort]["time"]} for row in fed]
    for row in rows[abort + 3 :] if same_number else ():
        if row.get("step", 0) > step:
            row["step"] -= 1
    assert not violations(rows)


@pytest.mark.parametrize("prepared", [list, with_clears])
def test_a_loop_that_ends_by_an_error_need_not_clear_its_last_step(prepared: Callable[[list[Row]], list[Row]]) -> None:
    rows = prepared(right({}))
    last = rows[some(rows, "cleared", -1)]["step"]
    for step in (last, last - 1):
        broken = [row for row in rows if row["event"] not in ("clear", "cleared") or row["step"] < step]
        broken[some(broken, "ended")].update(why="error", error="the sync failed")
        wrong = violations(broken)
        if step == last:
            assert wrong == {}
        else:
            assert "trained but never cleared" in wrong["one_clear_per_finish"]


@pytest.mark.parametrize("updates", [1, 2])
def test_a_clear_that_failed_may_be_sent_again(updates: int) -> None:
    """With two updates, that of the first: its step goes on, and the version rises after the second."""
    rows = with_clears(right({"groups": 2, "updates": updates}))
    clear = some(rows, "clear", 0)
    rows.insert(clear, dict(rows[clear]))
    assert f"cleared {updates + 1} times after {updates} finishes" in violations(rows)["one_clear_per_finish"]
    rows.insert(clear + 1, {**rows[clear], "event": "error", "of": "clear", "why": "the port was busy"})
    assert not violations(rows)


def test_a_clear_of_a_step_that_is_tried_again_may_fail_between_its_updates() -> None:
    """Its groups were selected before the first try only."""
    rows = with_clears(right({"groups": 2, "updates": 2}))
    clear, first = some(rows, "clear", 0), some(rows, "selected")
    rows.insert(clear, {**rows[clear], "event": "error", "of": "clear", "why": "the port was busy"})
    rows.insert(clear, {**rows[clear], "event": "clear"})
    selected = [row for row in rows if (row["event"], row.get("step")) == ("selected", 0)]
    given_up = {"time": rows[first]["time"], "step": 0, "update": 0}
    failed = {**given_up, "event": "error", "of": "begin", "why": "NaN"}
    tried = [{**given_up, "event": "begin"}, failed, {**given_up, "event": "abort"}]
    again = [row for row in rows[first:] if row not in selected]
    assert "one_clear_per_finish" not in violations([*rows[:first], *selected, *tried, *again])


@pytest.mark.parametrize("rises", [True, False])
@pytest.mark.parametrize("selected", [True, False])
@pytest.mark.parametrize("lost", [True, False])
def test_once_all_groups_are_trained_the_version_rises_also_if_a_clear_fails(
    selected: bool, lost: bool, rises: bool
) -> None:
    """It may rise after the clear is repeated. Also if a group that was selected was lost, and if the ledger does not say which were."""
    rows = with_clears(right({"groups": 2}))
    step, at = {"step": 0, "time": rows[0]["time"]}, some(rows, "bumped")
    rows[at : at + (not rises)] = [
        {**step, "event": "clear"},
        {**step, "event": "error", "of": "clear", "why": "busy"},
    ]
    if lost:
        first = some(rows, "begin")
        rows[first:first] = [{**step, "event": name, "group": 9, "version": 0} for name in ("selected", "failed")]
    rows = [row for row in rows if selected or row["event"] != "selected"]
    answer = violations(rows).get("one_clear_per_finish", "")
    assert ("the version never rose" in answer) is not rises


@pytest.mark.parametrize(("size", "wrong"), [(2, True), (4, False)])
def test_a_step_whose_other_groups_are_not_selected_yet_is_not_over(size: int, wrong: bool) -> None:
    """The clear of its first update fails, which ends the loop."""
    rows = with_clears(right({"groups": 2}))
    rows[some(rows, "capacity")].update(groups_per_step=size)
    step, at = {"step": 0, "time": rows[0]["time"]}, some(rows, "bumped")
    failed = [{**step, "event": "clear"}, {**step, "event": "error", "of": "clear", "why": "busy"}]
    rows[at : at + 1] = failed
    assert ("the version never rose" in violations(rows).get("one_clear_per_finish", "")) == wrong


@pytest.mark.parametrize(("between", "wrong"), [([], 0), (["joined"], 1), (["joined", "published"], 0)])
def test_what_a_replica_reported_before_it_left_may_come_later_but_not_once_it_joined(
    between: list[str], wrong: int
) -> None:
    """Version 0 was published there before the replica left. One that joins again has no weights until the next publication."""
    used = {"group": 0, "sample": 0, "version": 0, "count": 1}
    names = ["published", "started", "left", *between, "tokens"]
    rows: list[Row] = [
        {"event": name, "time": float(at), "replica": 1, **(used if name != "left" else {})}
        for at, name in enumerate(names)
    ]
    found = outcome("publish_before_use", rows)
    assert isinstance(found, Measured)
    assert found.value == wrong


def test_a_place_that_comes_back_early_frees_nothing() -> None:
    """Otherwise a buffer that exceeds its limit would look full of free places."""
    rows: list[Row] = [
        {"event": "capacity", "places": 1},
        *({"event": name, "group": 0} for name in ("place", "reserved", "ready", "place_back")),
        *({"event": name, "group": 1} for name in ("place", "reserved")),
        {"event": "selected", "group": 0, "step": 0, "version": 0},
    ]
    assert (
        "of group 1 (row 5, 5.000 s): 2 groups are in the buffer, places: 1" in violations(timed(rows))["capacity_kept"]
    )
    assert not violations(timed([*rows[:4], rows[-1], *rows[4:-1]]))


@pytest.mark.parametrize("events", list(itertools.permutations(("place", "slot", "reserved"))), ids="-".join)
def test_a_group_that_is_dropped_before_its_first_request_needed_no_permit_yet(events: tuple[str, ...]) -> None:
    rows: list[Row] = [
        {"event": "capacity", "places": 1, "slots": 1},
        *({"event": name, "group": 0} for name in (*events, "dropped")),
    ]
    assert "capacity_kept" not in violations(timed(rows))


@pytest.mark.parametrize(
    ("least", "why"), [(4, "lets no step begin before"), (None, "no `capacity` event with `min_groups`")]
)
def test_a_controller_that_promises_no_early_step_may_wait_for_whole_batches(least: int | None, why: str) -> None:
    """Synchronous, one step off, or batch by batch: the same ledger that is wrong with min_groups=1."""
    rows = System(fault="waits-for-all", groups=4, slow=(7,)).run()
    assert isinstance(outcome("trains_before_straggler", rows), Measured)
    rows[some(rows, "capacity")].update(min_groups=least, groups_per_step=4)
    if least is None:
        del rows[some(rows, "capacity")]["min_groups"]
    unjudged = outcome("trains_before_straggler", rows)
    assert isinstance(unjudged, NotMeasured)
    assert why in str(unjudged)


@pytest.mark.parametrize(("pace", "wrong"), [(1, True), (400, False)])
def test_a_wait_counts_relative_to_the_time_of_a_step(pace: int, wrong: bool) -> None:
    """On a busy machine a right controller reacts later, too: a wait of far less than a step is none."""
    rows = System(fault="waits-for-all", groups=4, slow=(3,), steps=1, pace=pace).run()
    assert isinstance(outcome("trains_before_straggler", rows), Measured) == wrong


@pytest.mark.parametrize(
    ("sampler", "slow", "wrong"),
    [
        ("ready-first", 0, True),
        ("windowed", 0, True),
        *((other, slow, slow == 3) for other in ("mine:FirstInFirstOut", "fifo", None) for slow in (0, 3)),
    ],
)
def test_another_sampler_may_train_groups_in_the_order_of_their_start(
    sampler: str | None, slow: int, wrong: bool
) -> None:
    """Then a step waits for its first group, but not for its last."""
    rows = System(fault="waits-for-all", groups=4, slow=(slow,), steps=1).run()
    rows[some(rows, "capacity")].update({} if sampler is None else {"sampler": sampler})
    if sampler is None:
        del rows[some(rows, "capacity")]["sampler"]
    assert ("trains_before_straggler" in violations(rows)) == wrong


def test_a_step_that_is_tried_again_begins_with_the_groups_it_has() -> None:
    """They stay selected from the first try; the straggler is selected in the second, long after it began."""
    rows = System(groups=2, slow=(1,), steps=1).run()
    begins = some(rows, "begin")
    failed = {**rows[begins], "event": "error", "of": "begin", "why": "NaN"}
    rows[begins:begins] = [dict(rows[begins]), failed, {**rows[begins], "event": "abort"}]
    assert finding("trains_before_straggler", LoopLedger(rows)).value == 0


def test_an_empty_begin_starts_no_step() -> None:
    rows = System(fault="waits-for-all", groups=2, slow=(1,), steps=1).run()
    begin = rows.pop(some(rows, "begin"))
    early = some(rows, "ready")
    rows.insert(early + 1, {**begin, "time": rows[early]["time"]})
    assert "after its last group" in violations(rows)["trains_before_straggler"]


def test_a_step_that_is_tried_again_began_with_its_first_try() -> None:
    def row(when: float, event: str, **ids: Any) -> Row:
        return {"event": event, "time": when, **ids}

    def complete(group: int, when: float) -> list[Row]:
        ids = {"group": group, "sample": 0, "replica": 0}
        return [
            row(when, "tokens", **ids, count=1, version=0),
            row(when, "completed", **ids, version=0, length=1),
            row(when, "ready", group=group, version=0),
        ]

    rows = [
        row(0, "capacity", min_groups=1, groups_per_step=2, group=1, window=0, sampler="in-order"),
        *[row(0, "reserved", group=group, version=0) for group in (0, 1)],
        *[row(0, "sent", group=group, sample=0, replica=0) for group in (0, 1)],
        *complete(0, 1),
        row(1, "selected", group=0, step=0, version=0),
        row(1, "begin", step=0),
        row(1, "error", of="begin", step=0),
        row(2, "abort", step=0),
        *complete(1, 50),
        row(50, "selected", group=1, step=0, version=0),
        row(50, "begin", step=0),
        row(51, "microbatch", step=0),
        *[row(52, "trained", group=group, step=0, version=0) for group in (0, 1)],
        row(52, "finish", step=0),
        row(52, "bumped", version=1, step=0),
    ]
    assert "trains_before_straggler" not in violations(rows)
    once = [
        row for row in rows if row["event"] not in ("error", "abort") and (row["event"], row["time"]) != ("begin", 1)
    ]
    late = [row for row in once if (row["event"], row["time"]) != ("selected", 1)]
    assert "after its last group" in violations(late)["trains_before_straggler"]


def test_a_failed_group_is_replaced_or_missed_by_its_step() -> None:
    rows = System(fails=(2,), on_failed="shrink").run()
    change("capacity", on_failed="replace")(rows)
    assert {*violations(rows)} == {"one_step_per_batch"}


@pytest.mark.parametrize("request_failed", [True, False])
def test_a_group_whose_request_failed_leaves_the_window_before_its_others_are_cancelled(request_failed: bool) -> None:
    rows = [
        {"event": "capacity", "groups_per_step": 1, "group": 2, "window": 0, "places": 9, "sampler": "capacity"},
        {"event": "reserved", "group": 0, "version": 0},
        *([{"event": "failed", "group": 0, "sample": 0}] if request_failed else []),
        {"event": "reserved", "group": 1, "version": 0},
        {"event": "failed", "group": 0},
        {"event": "bumped", "version": 1, "step": 0},
    ]
    rows = [{**row, "time": 0.0} for row in rows]
    assert ("the window allows 1" in violations(rows).get("capacity_kept", "")) is not request_failed


@pytest.mark.parametrize("ends", ["synced", "error"])
@pytest.mark.parametrize(("last_completed", "wrong"), [(-1, False), (8, True)])
@pytest.mark.parametrize("begins", [["joined"], ["sync_begin"], ["joined", "sync_begin"]])
def test_no_step_has_to_begin_while_weights_are_sent_to_a_replica_that_joins(
    begins: list[str], last_completed: int, ends: str, wrong: bool
) -> None:
    """From the first complete sample to the last, or only to one long before. Requests may have to be cancelled first."""
    rows = System(fault="waits-for-all", groups=4, slow=(3,), steps=1).run()
    spans = [
        (some(rows, "completed", last_completed), ends),
        *((some(rows, "completed"), name) for name in begins[::-1]),
    ]
    for row, event in spans:
        rows.insert(row + 1, {"event": event, "time": rows[row]["time"], "of": "sync", "version": 0, "replica": 9})
    assert isinstance(outcome("trains_before_straggler", rows), Measured) == wrong


def spanned(begins: Row, first: int, ends: Row, last: int) -> LoopLedger:
    """A step that waits for all its groups, with rows of a wait from one complete group to another."""
    rows = System(fault="waits-for-all", groups=4, slow=(3,), steps=1).run()
    for number, ids in ((last, ends), (first, begins)):
        at = some(rows, "ready", number)
        rows.insert(at + 1, {"time": rows[at]["time"], **ids})
    return LoopLedger(rows)


DISPATCH = {"event": "hold", "version": 0}, {"event": "resume", "version": 0}
DEVICES = {"event": "acquire", "kind": "training"}, {"event": "granted", "kind": "training"}


@pytest.mark.parametrize(
    ("wait", "first", "last", "wrong"),
    [
        (DISPATCH, 0, -1, False),
        (DISPATCH, 0, 2, True),  # the step could have begun after the hold
        (DISPATCH, 4, -1, True),  # and before this one
        (DEVICES, 0, -1, False),
        (DEVICES, 2, -1, False),
        (DEVICES, 0, 2, True),
        (DEVICES, -1, -1, True),  # requested once the last group is complete
    ],
)
def test_no_step_has_to_begin_while_dispatch_is_held_or_before_its_devices_are_granted(
    wait: tuple[Row, Row], first: int, last: int, wrong: bool
) -> None:
    ledger = spanned(wait[0], first, wait[1], last)
    assert isinstance(outcome("trains_before_straggler", ledger), Measured) is wrong


def test_a_grant_of_other_devices_excuses_no_late_step() -> None:
    asked, granted = ({**row, "kind": "logprobs"} for row in DEVICES)
    assert isinstance(outcome("trains_before_straggler", spanned(asked, 0, granted, -1)), Measured)


def test_syncs_of_replicas_that_join_one_after_the_other_are_all_waited_for() -> None:
    rows = System(fault="waits-for-all", groups=4, slow=(3,), steps=1).run()
    for at, names in ((-1, ["synced"]), (3, ["synced", "sync_begin"]), (0, ["sync_begin"])):
        row = some(rows, "completed", at)
        rows[row + 1 : row + 1] = [{"event": name, "time": rows[row]["time"], "version": 0} for name in names]
    assert isinstance(outcome("trains_before_straggler", rows), NotMeasured)


def test_a_replica_that_joins_does_not_excuse_a_step_without_a_sync() -> None:
    rows = System(fault="waits-for-all", groups=4, slow=(3,), steps=1).run()
    joins = some(rows, "completed")
    rows.insert(joins, {"event": "joined", "time": rows[joins]["time"], "replica": 9})
    assert isinstance(outcome("trains_before_straggler", rows), Measured)


@pytest.mark.parametrize(("sampler", "on_failed"), list(product(SAMPLERS, ["replace", "shrink"])))
def test_groups_that_failed_or_grew_too_old_may_be_given_up(sampler: str, on_failed: str) -> None:
    """The right twin of a controller that drops slow groups: the same ends, each with its reason, under the settings that allow it."""
    rows = System(sampler=sampler, fails=(2, 5), on_failed=on_failed, groups=3, window=1, slow=(1, 4), pace=2).run()
    rows[some(rows, "capacity")].update(on_failed=on_failed, floor=1)
    judged = {name: outcome(name, rows) for name in ("eviction_justified", "one_step_per_batch")}
    assert {name: found.why for name, found in judged.items() if isinstance(found, Measured) and found.value} == {}


def test_every_check_has_a_wrong_ledger() -> None:
    assert {check for _, _, check, _ in FAULTS} | {check for check, *_ in EDITS} == set(RULES_BY_NAME) - OF_RUNNERS


# -- what a ledger does not have -----------------------------------------------------------------------------------------------

MINIMAL = [
    {"event": "completed", "group": 0, "sample": 0, "version": 0},
    {"event": "completed", "group": 0, "sample": 1, "version": 0},
    {"event": "trained", "group": 0, "version": 1},
]


def timed(rows: list[Row]) -> list[Row]:
    return [{"time": 10.0 + place, **row} for place, row in enumerate(rows)]


def test_a_minimal_ledger_is_judged_as_far_as_it_goes() -> None:
    rows = timed([{"event": "capacity", "window": 1, "group": 2}, *MINIMAL])
    judged = {name: found.value for name in RULES_BY_NAME if isinstance(found := outcome(name, rows), Measured)}
    assert judged == {"no_sample_too_old": 0.0, "trained_once": 0.0, "groups_whole": 0.0}
    rows[0]["window"] = 0
    assert "group 0 trained at version 1" in violations(rows)["no_sample_too_old"]


LACKING = {
    "no_sample_too_old": ("trained", "`trained`"),
    "version_monotone": ("bumped", "`bumped`"),
    "publish_before_use": ("published", "`published`"),
    "stamps_per_token": ("tokens", "`tokens`"),
    "every_group_once": ("ended", "`ended`"),
    "trained_once": ("trained", "`trained`"),
    "groups_whole": ("capacity", "`capacity` event with `group`"),
    "samples_differ": ("completed", "`completed`"),
    "order_fair": ("selected", "`selected`"),
    "tokens_conserved": ("ended", "`ended`"),
    "one_step_per_batch": ("begin", "`begin`"),
    "one_clear_per_finish": ("finish", "`finish`"),
    "trains_before_straggler": ("trained", "`trained`"),
    "abort_on_failure": ("begin", "`begin`"),
    "capacity_kept": ("reserved", "`reserved`"),
    "permits_return": ("ended", "`ended`"),
    "ends_cleanly": ("ended", "`ended`"),
    "metrics_true": ("metrics", "`metrics`"),
    "eviction_justified": ("reserved", "`reserved`"),
    "no_needless_waste": ("sent", "`sent`"),
    "attempts_distinct": ("sent", "`sent`"),
    "requests_spread": ("sent", "`sent`"),
}


STRAGGLING: dict[str, Any] = {"breaks": 1, "groups": 3, "slow": (2, 5)}


@pytest.mark.parametrize(("check", "event", "words"), [(check, *one) for check, one in LACKING.items()])
def test_a_check_without_its_event_is_null_and_names_it(check: str, event: str, words: str) -> None:
    rows = right(STRAGGLING)
    assert isinstance(outcome(check, rows), Measured) or check == "requests_spread"  # too few requests
    del rows[-40:]  # cut off: groups are in flight
    without(event)(rows)
    found = outcome(check, rows)
    assert isinstance(found, Missing), found
    assert words in str(found)


def test_every_check_says_what_it_lacks() -> None:
    assert (
        set(LACKING) | {"dead_rollout_named"} == set(RULES_BY_NAME) - OF_RUNNERS
    )  # a ledger in which no replica died is complete
    for name in RULES_BY_NAME:
        assert isinstance(outcome(name, timed([{"event": "hello"}])), NotMeasured), name


@pytest.mark.parametrize(
    ("check", "event", "name"),
    [
        ("no_sample_too_old", "trained", "group"),
        ("stamps_per_token", "tokens", "first"),
        ("publish_before_use", "published", "replica"),
        ("samples_differ", "completed", "digest"),
        ("version_monotone", "bumped", "version"),
        ("one_step_per_batch", "begin", "step"),
    ],
)
def test_an_id_that_only_some_rows_have_is_a_failure(check: str, event: str, name: str) -> None:
    rows = System().run()
    del rows[some(rows, event, 2)][name]
    with pytest.raises(Unjudged, match=rf"`{event}`.*has no id `{name}`"):
        finding(check, LoopLedger(rows))
    without_any = [{key: value for key, value in row.items() if row["event"] != event or key != name} for row in rows]
    found = outcome(check, without_any)
    assert isinstance(found, Missing), found
    assert f"`{name}`" in str(found)


def test_a_version_must_be_a_number_and_may_be_a_text_of_one() -> None:
    rows = System().run()
    every("published", version="three")(rows)
    with pytest.raises(Unjudged, match="version='three'; it must be a whole number"):
        finding("publish_before_use", LoopLedger(rows))
    rows = [
        {name: str(value) if isinstance(value, int) else value for name, value in row.items()} for row in System().run()
    ]
    assert violations(rows) == {}


def test_groups_and_replicas_may_have_names() -> None:
    rows = [
        {
            name: f"{name}-{value}" if name in ("group", "sample", "replica") and row["event"] != "capacity" else value
            for name, value in row.items()
        }
        for row in System(fails=(1,)).run()
    ]
    for row in rows:
        if "by" in row:
            row["by"] = f"group-{row['by']}"
    assert violations(rows) == {}


def test_a_missing_end_never_hides_a_violation() -> None:
    rows = System(slow=(2, 3)).run()[:-40]
    assert isinstance(outcome("every_group_once", rows), Missing)
    repeat("cleared")(rows)
    assert "ends 2 times" in violations(rows)["every_group_once"]


def test_answers_of_a_trainer_count_where_the_ledger_has_them() -> None:
    """A `finish` answered with `error` moved no weights; where the ledger has `done` rows, those count as the finishes."""
    rows = System().run()
    answered = [
        more
        for row in rows
        for more in ([row, {**row, "event": "done", "of": "finish"}] if row["event"] == "finish" else [row])
    ]
    assert violations(answered) == {}
    no_updates(answered)
    answered[some(answered, "done", 1)].update(event="error", why="NaN")
    assert "no update of the step was finished" in violations(answered)["version_monotone"]
    no_updates(rows)
    rows.insert(
        some(rows, "finish", 1) + 1, {**rows[some(rows, "finish", 1)], "event": "error", "of": "finish", "why": "NaN"}
    )
    assert "no update of the step was finished" in violations(rows)["version_monotone"]


@pytest.mark.parametrize("sampler", ["in-order", "capacity"])
def test_a_group_that_is_filtered_may_have_no_other_end(sampler: str) -> None:
    """It leaves the buffer, the window and the queue."""
    rows = [
        row
        for row in right({"flat": (1, 2, 4), "sampler": sampler, "steps": 6})
        if row["event"] not in ("dropped", "place", "place_back")
    ]
    of_ends = {"capacity_kept", "order_fair", "metrics_true", "every_group_once", "permits_return"}
    for row in rows:
        row.pop("total_dropped", None)
    assert not violations(rows).keys() & of_ends
    without("filtered")(rows)
    assert violations(rows).keys() >= {"capacity_kept", "metrics_true"}


def test_a_younger_group_may_pass_one_that_was_filtered() -> None:
    def rows(end: str) -> list[Row]:
        trained = [
            (event, {"group": step + 1, "step": step, "version": step})
            for step in range(3)
            for event in ("reserved", "ready", "selected", "trained", "bumped")
        ]
        waits = [(event, {"group": 0, "version": 0}) for event in ("reserved", "ready", end)]
        return ledger_of(("capacity", {"window": 0, "groups_per_step": 1}), *waits, *trained)

    assert "order_fair" not in violations(rows("filtered"))
    assert "3 younger groups were selected" in violations(rows("slot"))["order_fair"]


def test_seconds_are_judged_if_the_ledger_has_what_they_are_counted_from() -> None:
    def wrong(*left_out: str) -> str:
        events: list[tuple[str, dict[str, Any]]] = [
            ("joined", {"replica": 0}),
            ("sent", {"group": 0, "sample": 0, "replica": 0}),
            ("begin", {"step": 0}),
            ("done", {"of": "begin", "step": 0}),
            ("metrics", {"step": 0, "version": 0, "total_reserved": 0}),
            ("logged", {"step": 0, "s_training": "3.0", "s_replicas_idle": "2.0"}),
        ]
        rows = ledger_of(*(event for event in events if event[0] not in left_out))
        return "; ".join(RULES_BY_NAME["metrics_true"](LoopLedger(rows)))

    assert "states s_training 3.0" in wrong()
    assert "states s_replicas_idle 2.0" in wrong()
    assert wrong("done") == ""
    for left_out in ("joined", "sent"):
        assert "states s_training 3.0" in wrong(left_out)
        assert "s_replicas_idle" not in wrong(left_out)


def test_logged_seconds_are_those_of_the_rows() -> None:
    """Two updates: 1 s of waiting, 2 s of training; then a sync of 0.5 s and 0.25 s of log-probabilities."""
    rows: list[Row] = [
        {"event": "capacity", "time": 0.0},
        {"event": "begin", "time": 1.0, "step": 0},
        {"event": "microbatch", "time": 1.0, "step": 0},
        {"event": "done", "time": 1.5, "of": "begin", "step": 0},
        {"event": "done", "time": 2.5, "of": "microbatch", "step": 0},
        {"event": "finish", "time": 2.5, "step": 0},
        {"event": "done", "time": 3.0, "of": "finish", "step": 0},
        {"event": "metrics", "time": 3.0, "step": 0, "version": 1},
        {"event": "sync_begin", "time": 3.0, "version": 1},
        {
            "event": "logged",
            "time": 3.0,
            "step": 0,
            "s_training": "2.0",
            "s_exposed_generation": "1.0",
            "s_sync": "0.0",
            "s_total": "3.0",
        },
        {"event": "synced", "time": 3.5, "version": 1},
        {"event": "logprobs", "time": 3.5, "step": 1},
        {"event": "done", "time": 3.75, "of": "logprobs", "step": 1},
        {"event": "metrics", "time": 3.75, "step": 1, "version": 1},
        {"event": "logged", "time": 3.75, "step": 1, "s_sync": "0.5", "s_logprobs": "0.25", "s_total": "0.7505"},
    ]
    found = outcome("metrics_true", rows)
    assert isinstance(found, Measured)
    assert not found.value, found.why
    for name, value in (
        ("s_exposed_generation", "0.9"),
        ("s_training", "1.5"),
        ("s_sync", "0.002"),
        ("s_total", "2.9"),
    ):
        wrong = [{**row, name: value} if row["event"] == "logged" and row["step"] == 0 else row for row in rows]
        assert f"states {name} {value}" in violations(wrong)["metrics_true"]


# -- rows and pipelines ---------------------------------------------------------------------------------------------------------


OF_A, OF_B = {"kind": "logprobs", "cluster": "a"}, {"kind": "logprobs", "cluster": "b"}
PERMITS: list[tuple[list[tuple[str, dict[str, Any]]], str]] = [
    ([("acquire", OF_A), ("acquire", OF_B), ("granted", OF_B), ("release", OF_B), ("release", OF_A)], ""),
    ([("acquire", OF_A), ("release", OF_B)], "`release` of kind logprobs .* has none to return"),
    ([("acquire", OF_A), ("acquire", OF_A)], "kind logprobs already has one, since row 0"),
    ([("acquire", OF_A), ("acquire", OF_B), ("release", OF_A)], "row 1, .* never returned"),
    ([("acquire", OF_A), ("acquire", {"kind": "training", "release": "logprobs"}), ("release", {"kind": "training"})], ""),
    # As the lab `share` splits it.
    ([("acquire", OF_A), ("release", {"kind": "logprobs", "release": "logprobs"})], ""),
    ([("acquire", OF_A), ("acquire", {"kind": "training", "release": "values"})], "kind logprobs .* never returned"),
    ([("acquire", OF_A), ("release", {"kind": "logprobs"}), ("release", {"kind": "logprobs"})], "has none to return"),
    *(
        ([("acquire", OF_A), (ends, {**OF_A, **ids}), ("acquire", OF_A), ("granted", OF_A), ("release", OF_A)], why)
        for ends, ids, why in (
            ("planned_release", {}, ""),
            ("expired", {}, ""),
            ("withdrawn", {}, ""),
            ("error", {"of": "acquire"}, ""),
            ("error", {"of": "expand"}, "already has one, since row 0"),
        )
    ),
    ([("acquire", OF_A), ("error", {**OF_A, "of": "acquire"}), ("release", OF_A)], ""),
    ([("acquire", OF_A), ("error", {**OF_A, "of": "acquire"}), ("release", OF_A), ("release", OF_A)], "none to return"),
    ([("acquire", {"kind": "generation"}), ("withdrawn", {"cluster": "generation"})], ""),
    ([("acquire", {"kind": "training"}), ("withdrawn", {"cluster": "generation"})], "never returned"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "why"), PERMITS)
def test_a_request_for_devices_ends_in_one_of_several_ways(rows: list[tuple[str, dict[str, Any]]], why: str) -> None:
    found = violations(ledger_of(*rows, ("ended", {"why": "done"}))).get("permits_return", "")
    assert re.search(why, found), found
    assert bool(found) is bool(why)


@pytest.mark.parametrize("event", ["died", "left"])
@pytest.mark.parametrize(("replica", "answered", "wrong"), [(0, False, False), (1, False, True), (0, True, True)])
def test_a_group_with_a_request_on_a_replica_that_is_gone_may_be_replaced(
    event: str, replica: int, answered: bool, wrong: bool
) -> None:
    of = {"group": 0, "sample": 0, "replica": 0, "version": 0}
    rows = ledger_of(
        ("capacity", {"on_failed": "replace", "sampler": "windowed", "window": 1}),
        ("reserved", {"group": 0, "version": 0}),
        ("sent", of),
        *([("completed", of)] if answered else []),
        (event, {"replica": replica}),
        ("replaced", {"group": 0, "by": 1}),
        ("reserved", {"group": 1, "version": 0}),
    )
    assert ("none of its requests failed" in violations(rows).get("eviction_justified", "")) is wrong


@pytest.mark.parametrize(
    ("setting", "first", "second", "wrong"),
    [
        ("keep", "keep", "abort", {1: set(), 2: {"stamps_per_token"}}),
        (None, "keep", "abort", {1: set(), 2: {"stamps_per_token"}}),
        ("abort", "keep", None, {1: set(), 2: {"stamps_per_token"}}),
        ("abort", None, "keep", {1: {"stamps_per_token"}, 2: set()}),
    ],
)
def test_each_sync_is_judged_by_its_own_at_sync(
    setting: str | None, first: str | None, second: str | None, wrong: dict[int, set[str]]
) -> None:
    """A sample that spans only the first sync, and one that spans only the second."""

    def rows(spanned: int) -> list[Row]:
        of = {"group": 0, "sample": 0, "replica": 0}
        own = [{} if at_sync is None else {"at_sync": at_sync} for at_sync in (first, second)]
        moves: list[tuple[str, dict[str, Any]]] = [
            more
            for version, at_sync in enumerate(own, 1)
            for more in (("bumped", {"version": version}), ("sync", {"version": version, **at_sync}))
        ]
        for version in (spanned, spanned - 1):
            at = 2 * version
            moves.insert(at, ("tokens", {**of, "version": version, "first": 4 * (version == spanned), "count": 4}))
        done = ("completed", {**of, "version": spanned - 1, "newest": spanned, "length": 8})
        capacity = {} if setting is None else {"at_sync": setting}
        return ledger_of(("capacity", capacity), ("sent", of), *moves, done)

    for spanned, expected in wrong.items():
        assert violations(rows(spanned)).keys() & {"stamps_per_token"} == expected


@pytest.mark.parametrize(
    ("setting", "own", "wrong"), [("keep", "abort", False), ("keep", None, True), ("abort", "keep", True)]
)
def test_tokens_are_lost_at_a_sync_that_aborts(setting: str, own: str | None, wrong: bool) -> None:
    of = {"group": 0, "sample": 0, "replica": 0}
    tokens = {**of, "first": 0, "count": 4}
    rows = ledger_of(
        ("capacity", {"at_sync": setting}),
        ("sent", of),
        ("tokens", {**tokens, "version": 0}),
        ("bumped", {"version": 1}),
        ("sync", {"version": 1, **({} if own is None else {"at_sync": own})}),
        ("sent", of),
        ("tokens", {**tokens, "version": 1}),
    )
    assert ("no_needless_waste" in violations(rows)) is wrong


def test_each_pipeline_is_judged_by_itself() -> None:
    one, two = ([{**row, "pipeline": name} for row in System(seed=seed).run()] for name, seed in (("a", 1), ("b", 2)))
    both = sorted([*one, *two], key=lambda row: row["time"])
    with pytest.raises(BadInput, match="pipelines a, b; judge each separately"):
        LoopLedger(both)
    found = pipelines(both)
    assert list(found) == ["a", "b"]
    assert all(len(ledger.rows) == len(rows) for ledger, rows in zip(found.values(), (one, two), strict=True))
    assert all(
        not finding(name, ledger).value
        for ledger in found.values()
        for name in ("every_group_once", "version_monotone")
    )
    assert list(pipelines(one)) == ["a"]
    assert list(pipelines(System().run())) == [""]


@pytest.mark.parametrize("row", [{"event": "sent"}, {"time": 1.0}, {"event": "sent", "time": "noon"}])
def test_a_row_needs_an_event_and_a_time(row: Row) -> None:
    with pytest.raises(BadInput, match="row 1 of the ledger is"):
        LoopLedger([{"event": "capacity", "time": 0.0}, row])


# -- resume -----------------------------------------------------------------------------------------------------------------------


def stopped(system: System, version: int) -> tuple[list[Row], tuple[int, int, int, list[int], int], list[int]]:
    """Return the rows of a whole run, what a run resumed at a version starts from, and the groups trained before."""
    rows = system.run()
    cut = some(rows, "bumped", version - 1)
    before = rows[:cut]
    trained = [row["group"] for row in before if row["event"] == "trained"]
    given = [row["group"] for row in before if row["event"] == "reserved"]
    step, updates = rows[cut]["step"] + 1, rows[cut]["updates"]
    return rows, (version, step, updates, sorted(set(given) - set(trained)), max(given) + 1), trained


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("version", [1, 3])
def test_a_right_resume_equals(sampler: str, version: int) -> None:
    rows, state, _ = stopped(System(sampler=sampler, steps=5), version)
    resumed = System(sampler=sampler, steps=5 - version, resume=state).run()
    assert violations(resumed) == {}
    found = settle(resume_equals(LoopLedger(rows), LoopLedger(resumed)))
    assert not found.value, found.why
    assert f"resumed at version {version} after {2 * version} groups" in found.why
    same = f"{5 - version} steps the same as without a stop" if sampler == "strict" else "no step could be compared"
    assert found.why.endswith(f"groups; {same}")


def resumed_wrongly(kind: str, sampler: str = "in-order", **more: Any) -> Measured:
    rows, (version, step, updates, left, after), trained = stopped(System(sampler=sampler, steps=5, slow=(6, 7)), 3)
    if kind == "replays":
        left = [trained[0], *left]
    elif kind == "loses":
        left = left[:1] + left[2:]
        at = next(place for place, row in enumerate(rows) if row["event"] == "bumped" and row["version"] == 3)
        rows = rows[: at + 1]
    elif kind == "skips":
        after += 2
    elif kind == "other version":
        version = 9
    elif kind == "other tokens":
        more = {"seed": 4}
    resumed = System(sampler=sampler, steps=2, slow=(6, 7), resume=(version, step, updates, left, after), **more).run()
    return settle(resume_equals(LoopLedger(rows), LoopLedger(resumed)))


@pytest.mark.parametrize(
    ("kind", "settings", "why"),
    [
        ("replays", {}, r"of group 0, .* trained before the stop, in row \d+"),
        (
            "loses",
            {},
            r"group 7 was in flight when the run stopped and is lost; its last row before the stop is `\w+` of group 7",
        ),
        ("skips", {}, r"group \d+ is in neither run, unlike groups \d+ and \d+"),
        ("other version", {}, r"resumed at version 9; the run before went from 0 to 5"),
        ("other tokens", {"sampler": "strict"}, r"version 3 trains group 6 with .* after the resume and .* without"),
        (
            "",
            {"sampler": "capacity", "fault": "accepted-from-zero", "more_places": 20},
            r"groups started up to version 3; the window allows 10",
        ),
        ("", {"fault": "accepted-from-zero"}, r"started for version 0 at version 3"),
        ("", {"fault": "off-by-one-window", "more_places": 2}, r"groups started up to version 3; the window allows 10"),
    ],
)
def test_a_wrong_resume_does_not(kind: str, settings: dict[str, Any], why: str) -> None:
    found = resumed_wrongly(kind, **settings)
    assert found.value
    assert re.search(why, found.why), found.why


def test_a_lost_group_that_had_waited_in_the_buffer_is_named_as_such() -> None:
    """What happened to it after the stop, in the run that continues, is not quoted."""
    rows, (version, step, updates, left, after), _ = stopped(System(sampler="windowed", steps=5, more_places=3), 3)
    cut = next(row for row in rows if row["event"] == "bumped" and row["version"] == 3)
    rows = rows[: rows.index(cut) + 1]
    over = {row["group"] for row in rows if row["event"] in ("evicted", "aborted", "selected")}
    waiting = [row["group"] for row in rows if row["event"] == "ready" and row["group"] not in over]
    assert waiting
    left = [group for group in left if group != waiting[0]]
    resumed = System(sampler="windowed", steps=2, resume=(version, step, updates, left, after)).run()
    lost = "\n".join(resume_equals(LoopLedger(rows), LoopLedger(resumed)))
    assert (
        f"group {waiting[0]} waited in the buffer when the run stopped and is lost; its last row before the stop is"
        in lost
    )


def test_totals_may_go_on_after_a_resume() -> None:
    _, state, _ = stopped(System(steps=5), 2)
    rows = System(steps=3, resume=state).run()
    for row in rows:
        if row["event"] == "metrics":
            row["total_reserved"] += 7
    assert violations(rows) == {}
    change("metrics", 1, total_reserved=3)(rows)
    assert "states total_reserved 3" in violations(rows)["metrics_true"]


def test_a_resume_without_its_row_is_null() -> None:
    rows = System().run()
    with pytest.raises(Missing, match="`resumed`"):
        settle(resume_equals(LoopLedger(rows), LoopLedger(rows)))


# -- the example, and who is imported -----------------------------------------------------------------------------------------------


def test_the_ledger_of_the_example_passes(tmp_path: Path) -> None:
    example = ROOT / "docs" / "examples" / "ledger.py"
    assert sum(bool(line) for line in example.read_text().splitlines()) <= 40
    subprocess.run([sys.executable, str(example), str(tmp_path / "run")], check=True, cwd=ROOT, timeout=60)
    records = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
    rows = [
        {"event": one["metric"], "time": one["time"], **one.get("ids", {})} for one in records if one["value"] is None
    ]
    assert violations(rows) == {}
    judged = {name for name in RULES_BY_NAME if isinstance(outcome(name, rows), Measured)}
    wanted = {
        "no_sample_too_old",
        "every_group_once",
        "trained_once",
        "groups_whole",
        "tokens_conserved",
        "one_step_per_batch",
    }
    assert judged >= wanted | {
        "version_monotone",
        "publish_before_use",
        "stamps_per_token",
        "ends_cleanly",
        "one_clear_per_finish",
    }


def test_the_page_lists_every_check_and_event() -> None:
    page = (ROOT / "docs" / "ledger.md").read_text()
    source = "".join(path.read_text() for path in (ROOT / "kit" / "stream" / "judge").glob("*.py"))
    assert {name for name in [*RULES_BY_NAME, "resume_equals"] if f"`{name}`" not in page} == set()
    table = page.partition("| event | ids | when |")[2].partition("## What is judged")[0].strip().splitlines()[1:]
    events = [name for line in table for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert len(events) > 40
    assert [event for event in events if f'"{event}"' not in source] == []
    for rows in (System(breaks=1, dies=(6, 1), fails=(1,), flat=(2,)).run(), System(prompts=6).run()):
        assert {row["event"] for row in rows} <= set(events)


def test_the_judge_needs_the_standard_library_only() -> None:
    script = "import sys, kit.stream.judge; print(' '.join(sys.modules))"
    seen = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True
    ).stdout.split()
    assert not {name.split(".")[0] for name in seen} & {"pandas", "numpy", "torch", "pydantic", "matplotlib"}
    rooms = {name.split(".")[1] for name in seen if name.startswith("kit.")}
    assert rooms <= {"errors", "machine", "results", "stream", "target"}
    judges = {name.split(".")[2] for name in seen if name.startswith("kit.stream.")}
    assert judges == {"judge"}


@pytest.mark.parametrize(("woke", "crowded"), [("joined", False), ("published", True)])
def test_a_replica_that_waits_for_its_weights_is_no_choice(woke: str, crowded: bool) -> None:
    rows: list[dict[str, Any]] = [{"event": "capacity", "start": 0, "groups_per_step": 1}]
    rows += [{"event": event, "replica": replica, "version": 0} for event, replica in (("published", 0), (woke, 1))]
    rows += [{"event": "sent", "group": group, "sample": 0, "replica": 0, "attempt": 0} for group in range(60)]
    ledger = LoopLedger([{"time": float(at), **row} for at, row in enumerate(rows)])
    if crowded:
        assert settle(requests_spread(ledger)).value == 1
    else:
        with pytest.raises(NotMeasured, match="0 requests had a choice"):
            settle(requests_spread(ledger))


def selected_for(target: int, sampler: str, begins: int) -> list[Row]:
    """Group 1 is selected for step 1 before the version rises, and its step begins at version `begins`."""
    moves: list[tuple[str, dict[str, Any]]] = [
        ("begin", {"step": 0}),
        ("selected", {"group": 1, "step": 1, "version": 0}),
        ("finish", {"step": 0}),
        ("bumped", {"step": 0, "version": 1}),
    ]
    moves.insert(4 if begins else 2, ("begin", {"step": 1}))
    return ledger_of(
        ("capacity", {"window": 1, "groups_per_step": 1, "sampler": sampler}),
        ("reserved", {"group": 1, "version": 0, "target": target}),
        ("ready", {"group": 1}),
        *moves,
    )


@pytest.mark.parametrize(
    ("target", "sampler", "begins", "wrong"),
    [
        (1, "in-order", 1, False),
        (1, "in-order", 0, True),
        (0, "in-order", 1, True),
        (0, "strict", 1, True),
        (0, "windowed", 1, False),
        (1, "windowed", 0, True),
    ],
)
def test_a_group_trains_in_the_step_of_its_target(target: int, sampler: str, begins: int, wrong: bool) -> None:
    """It may be selected while the step before trains. Other samplers may train it later."""
    found = violations(selected_for(target, sampler, begins)).get("order_fair", "")
    assert (f"selected for version {begins}, but started for version {target}" in found) is wrong


@pytest.mark.parametrize("aborted", [True, False])
def test_a_step_that_never_began_has_no_wrong_target(aborted: bool) -> None:
    rows = [row for row in selected_for(1, "in-order", 1) if (row["event"], row.get("step")) != ("begin", 1)]
    if aborted:
        rows += [{"event": event, "time": 99.0, "step": 1, "version": 2} for event in ("abort", "bumped")]
    assert "order_fair" not in violations(rows)


def test_groups_of_a_step_that_is_tried_again_pass_another_once() -> None:
    def rows(tries: int, younger: int) -> list[Row]:
        groups = range(1, younger + 1)
        waits = [("reserved", {"group": group, "version": 0}) for group in (0, *groups)]
        step: list[tuple[str, dict[str, Any]]] = [
            *(("selected", {"group": group, "step": 0, "version": 0}) for group in groups),
            ("abort", {"step": 0}),
        ]
        begin = [("capacity", {"window": 0, "groups_per_step": 2}), *waits, ("ready", {"group": 0})]
        return ledger_of(*begin, *(step * tries))

    assert "order_fair" not in violations(rows(3, 2))
    assert "3 younger groups were selected" in violations(rows(1, 3))["order_fair"]


@pytest.mark.parametrize(
    ("sampler", "waits", "wrong"),
    [
        ("weight-fifo", [("ready", 0)], True),
        ("ready-first", [("ready", 0)], False),
        ("weight-fifo", [], False),  # nobody can tell that it is complete
        ("weight-fifo", [("ready", 0), ("evicted", 0)], False),
        ("weight-fifo", [("ready", 0), ("filtered", 0)], False),
        ("weight-fifo", [("ready", 0), ("selected", 0), ("place", 0)], True),  # it is back after an abort
        ("weight-fifo", [("ready", 0), ("selected", 0)], False),
    ],
)
@pytest.mark.parametrize(("window", "old"), [(1, False), (0, True)])
def test_weight_fifo_trains_the_oldest_start_first(
    sampler: str, waits: list[tuple[str, int]], wrong: bool, window: int, old: bool
) -> None:
    """A group that started before the window is not trained any more."""
    rows = ledger_of(
        ("capacity", {"window": window, "groups_per_step": 1, "sampler": sampler}),
        ("reserved", {"group": 0, "version": 0}),
        ("bumped", {"version": 1}),
        ("reserved", {"group": 1, "version": 1}),
        *((event, {"group": group, "step": 0, "version": 1}) for event, group in waits),
        ("ready", {"group": 1}),
        ("selected", {"group": 1, "step": 1, "version": 1}),
    )
    found = violations(rows).get("order_fair", "")
    assert ("group 0, complete, started at version 0" in found) is (wrong and not old)


@pytest.mark.parametrize(("least", "complete", "wrong"), [(4, 4, False), (4, 1, True), (6, 6, False), (6, 5, True)])
@pytest.mark.parametrize("lost", [0, 2])
def test_a_step_begins_with_the_fewest_groups_that_it_may(least: int, complete: int, wrong: bool, lost: int) -> None:
    """A step that lost groups begins with as many of the others."""

    def ready(group: int) -> tuple[str, dict[str, Any]]:
        return "completed", {"group": group, "sample": 0, "version": 0}

    trained = range(6 - lost)
    rows = ledger_of(
        ("capacity", {"groups_per_step": 6, "min_groups": least}),
        *(ready(group) for group in trained[:complete]),
        ("begin", {"step": 0}),
        ("microbatch", {"step": 0}),
        *(ready(group) for group in trained[complete:]),
        ("finish", {"step": 0}),
        *(("trained", {"group": group, "step": 0, "version": 0}) for group in trained),
    )
    found = violations(rows).get("trains_before_straggler", "")
    assert (f"min_groups={least}" in found) is (wrong and complete < min(least, len(trained)))


@pytest.mark.parametrize(("fed", "wrong"), [((0,), False), ((0, 1), True), ("g0", False), ("g0,g1", True)])
def test_a_microbatch_has_groups_with_all_their_samples(fed: Any, wrong: bool) -> None:
    first, second = ("g0", "g1") if isinstance(fed, str) else (0, 1)

    def complete(group: Any, *samples: int) -> list[tuple[str, dict[str, Any]]]:
        return [("completed", {"group": group, "sample": sample, "version": 0}) for sample in samples]

    rows = ledger_of(
        ("capacity", {"group": 2}),
        *complete(first, 0, 1),
        *complete(second, 0),
        ("microbatch", {"step": 0, "groups": fed}),
        *complete(second, 1),
        *(("trained", {"group": group, "version": 0}) for group in (first, second)),
    )
    found = violations(rows).get("groups_whole", "")
    assert (f"1 of 2 samples of group {second} were complete" in found) is wrong


@pytest.mark.parametrize(
    ("moves", "wrong"),
    [
        (["published 0", "published 1", "synced"], False),
        (["published 0", "synced", "published 1"], True),
        (["published 0", "left 1", "synced"], False),
        (["published 0", "died 1", "synced"], False),
        (["published 0", "error", "synced"], False),  # another sync, without a list
    ],
)
@pytest.mark.parametrize("replicas", ["0,1", (0, 1)])
def test_a_version_has_arrived_once_all_replicas_published_it(
    moves: list[str], wrong: bool, replicas: str | tuple[int, ...]
) -> None:
    of = {"version": 1, "of": "sync"}
    arrivals = [(event, {**of, **({"replica": int(name)} if name else {})}) for event, _, name in map(split, moves)]
    used = ("started", {"group": 0, "sample": 0, "replica": 0, "version": 1})
    rows = ledger_of(("bumped", {"version": 1}), ("sync", {"version": 1, "replicas": replicas}), *arrivals, used)
    found = violations(rows).get("publish_before_use", "")
    assert ("version 1 is not published on replica 1 yet" in found) is wrong


def split(move: str) -> tuple[str, str, str]:
    return move.partition(" ")


def ledger_of(*rows: tuple[str, dict[str, Any]]) -> list[Row]:
    return [{"event": event, "time": float(at), **ids} for at, (event, ids) in enumerate(rows)]


def test_a_step_has_the_version_at_its_begin_though_its_groups_were_selected_before() -> None:
    def rows(generated: int) -> list[Row]:
        return ledger_of(
            ("capacity", {"window": 1}),
            ("completed", {"group": 1, "sample": 0, "version": generated}),
            ("begin", {"step": 0}),
            ("finish", {"step": 0}),
            ("bumped", {"step": 0, "version": 1}),
            ("begin", {"step": 1}),
            ("selected", {"group": 1, "step": 2, "version": 1}),
            ("finish", {"step": 1}),
            ("bumped", {"step": 1, "version": 2}),
            ("begin", {"step": 2}),
            ("trained", {"group": 1, "step": 2, "version": 2}),
        )

    assert violations(rows(1)) == {}
    assert "trained at version 2" in violations(rows(0))["no_sample_too_old"]


def test_a_version_that_a_trainer_states_is_compared_with_the_bumps() -> None:
    rows = ledger_of(
        ("capacity", {"window": 1}),
        ("completed", {"group": 0, "sample": 0, "version": 0}),
        *(("bumped", {"version": version}) for version in range(1, 6)),
        ("trained", {"group": 0, "version": 0}),
    )
    assert violations(rows).keys() == {"no_sample_too_old", "version_monotone"}


def test_updates_may_vary_where_no_size_is_stated() -> None:
    updates = [(0, 0, 2), (0, 1, 2), (1, 0, 3), (1, 1, 2)]  # step, update, groups
    rows: list[tuple[str, dict[str, Any]]] = []
    for step, update, groups in updates:
        of = {"step": step, "update": update}
        rows += [
            ("begin", of),
            *(("trained", {**of, "group": f"{of} {one}", "version": step}) for one in range(groups)),
        ]
        rows += [("finish", of), *([("bumped", {"step": step, "version": step + 1})] if update else [])]
    assert violations(ledger_of(*rows)) == {}


def test_a_queue_is_not_judged_without_the_groups_that_left_it() -> None:
    rows = System().run()
    every("metrics", queue=7)(rows)
    assert "states queue 7" in violations(rows)["metrics_true"]
    without("selected")(rows)
    assert "metrics_true" not in violations(rows)


@pytest.mark.parametrize("of_a_core", [True, False])
def test_a_replica_may_miss_a_version_that_is_not_used(of_a_core: bool) -> None:
    rows = ledger_of(
        *(("bumped", {"version": version}) for version in range(1, 4)),
        *(("published", {"replica": 1, "version": version}) for version in (1, 3)),
        ("joined", {"replica": 2}),
    )
    if of_a_core:
        of_the_kit(rows)
    assert "version_monotone" not in violations(rows)
    move("published", 1, "published", 0)(rows)
    assert "jumps from version 3 to 1" in violations(rows)["version_monotone"]


@pytest.mark.parametrize("of_a_core", [True, False])
def test_a_prompt_may_be_reserved_while_dispatch_is_held(of_a_core: bool) -> None:
    rows = right({})
    if of_a_core:
        of_the_kit(rows)
    move("reserved", 4, "hold", 1, after=1)(rows)
    assert "publish_before_use" not in violations(rows)
    move("sent", 8, "hold", 1, after=1)(rows)
    assert "dispatched while dispatch was held" in violations(rows)["publish_before_use"]


def test_a_hold_for_a_checkpoint_stops_requests_until_it_ends_and_a_prompt_may_be_reserved_meanwhile() -> None:
    def rows(sent: int) -> list[Row]:
        of = {"group": 0, "sample": 0, "replica": 0}
        hold: list[tuple[str, dict[str, Any]]] = [
            ("hold", {"version": 0}),
            ("reserved", {"group": 0, "version": 0}),
            ("resume", {"version": 0}),
        ]
        hold.insert(sent, ("sent", of))
        return ledger_of(
            ("published", {"replica": 0, "version": 0}),
            *hold,
            ("started", {**of, "version": 0}),
            ("bumped", {"version": 1}),
            ("published", {"replica": 0, "version": 1}),
            ("sent", {**of, "group": 1}),
        )

    assert violations(rows(3)) == {}
    assert "dispatched while dispatch was held" in violations(rows(2))["publish_before_use"]


def test_a_hold_without_resume_is_judged_up_to_the_publication() -> None:
    def rows(sent: int) -> list[Row]:
        moves: list[tuple[str, dict[str, Any]]] = [
            ("bumped", {"version": 1}),
            ("hold", {"version": 1}),
            ("published", {"replica": 0, "version": 1}),
            ("synced", {"version": 1}),
        ]
        moves.insert(sent, ("sent", {"group": 0, "sample": 0, "replica": 0}))
        started = ("started", {"group": 0, "sample": 0, "replica": 0, "version": 1})
        return ledger_of(*moves, started, ("ended", {"why": "done"}))

    assert "publish_before_use" not in violations(rows(4))
    assert "dispatched while dispatch was held" in violations(rows(2))["publish_before_use"]


def test_another_system_may_end_without_serving_its_last_version() -> None:
    rows = System(fault="last-version-unpublished").run()
    assert "publish_before_use" not in violations(rows)


def test_a_policy_may_repeat_the_samples_of_some_groups() -> None:
    digests = {0: ("a", "a"), 1: ("b", "c")}
    rows = [
        ("completed", {"group": group, "sample": sample, "version": 0, "digest": digest, "length": 8})
        for group, of_samples in digests.items()
        for sample, digest in enumerate(of_samples)
    ]
    assert "samples_differ" not in violations(ledger_of(*rows))
    assert "samples_differ" in violations(ledger_of(*rows[:2]))


def test_a_second_update_without_its_number_is_named() -> None:
    rows = ledger_of(*((event, {"step": 0}) for event in ("begin", "finish", "begin", "finish")))
    assert "needs the id `update`" in violations(rows)["one_step_per_batch"]


def test_a_row_without_its_step_may_be_written_after_the_version_rises() -> None:
    for after in (False, True):
        rows = [("bumped", {"version": 1}), ("trained", {"group": 0, "version": 0})]
        begin = [("capacity", {"window": 0}), ("completed", {"group": 0, "sample": 0, "version": 0})]
        assert violations(ledger_of(*begin, *(rows if after else reversed(rows)))) == {}


@pytest.mark.parametrize(("stated", "goes_on", "wrong"), [(1, False, False), (1, True, True), (2, False, True)])
def test_metrics_may_state_the_version_of_a_finished_step_before_it_is_announced(
    stated: int, goes_on: bool, wrong: bool
) -> None:
    rows = right({})
    announced = [rows.pop(some(rows, event)) for event in ("bumped", "hold")]
    metrics = some(rows, "metrics")
    rows[metrics]["version"] = stated
    begins = {"event": "begin", "time": rows[metrics]["time"], "step": 1, "update": 0, "to": "trainer"}
    rows[metrics + 1 : metrics + 1] = [*([begins] if goes_on else []), *announced]
    found = violations(rows)
    assert (f"`metrics` of step 0, update 0 (row {metrics}" in found.get("metrics_true", "")) is wrong
    if not wrong:
        assert "`metrics`" not in found.get("version_monotone", "")


@pytest.mark.parametrize(
    ("version", "sent_later", "falls_back"), [(1, True, False), (0, True, True), (0, False, False)]
)
def test_a_request_begins_with_the_version_that_its_replica_published_last(
    version: int, sent_later: bool, falls_back: bool
) -> None:
    rows: list[tuple[str, dict[str, Any]]] = [("published", {"replica": 0, "version": 0}), ("bumped", {"version": 1})]
    rows.append(("published", {"replica": 0, "version": 1}))
    rows.insert(3 if sent_later else 1, ("sent", {"group": 0, "sample": 0, "replica": 0}))
    rows.append(("started", {"group": 0, "sample": 0, "replica": 0, "version": version}))
    why = violations(ledger_of(*rows)).get("publish_before_use", "")
    assert ("published version 1 there" in why) is falls_back


@pytest.mark.parametrize(("order", "wrong"), [("as completed", True), ("by start", False)])
def test_a_batch_may_be_trained_in_the_order_of_start(order: str, wrong: bool) -> None:
    """The oldest group of a batch is its straggler. A core that trains by start has to wait for it, another one has not."""
    rows = System(fault="waits-for-all", groups=4, slow=(0,), steps=1).run()
    if order == "as completed":
        first, last = some(rows, "selected"), some(rows, "selected", 3)
        rows[first], rows[last] = (
            {**rows[at], "group": rows[other]["group"]} for at, other in ((first, last), (last, first))
        )
    assert isinstance(outcome("trains_before_straggler", rows), Measured) == wrong


@pytest.mark.parametrize(("said", "wrong"), [({"error": "a replica died"}, False), ({}, True)])
def test_a_loop_that_ends_with_an_error_says_which(said: dict[str, str], wrong: bool) -> None:
    rows = System(steps=1).run()
    rows[-1] = {**rows[-1], "why": "error", **said}
    assert ("does not say what failed" in violations(rows).get("ends_cleanly", "")) == wrong
