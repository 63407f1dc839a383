"""Controllers that write notes of what never happened, or omit notes of what did: each lie fails a named check. Right runs pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest

from kit.errors import BadInput
from kit.loop.messages import Command, Event, Memory, command_row
from kit.stream.core import Controller
from kit.stream.judge.history import LoopLedger
from kit.stream.settings import SAMPLERS, AtSync, Resume, StreamSettings
from kit.stream.simulated import Durations, System, drawn_length, simulate
from tests.stream.ledgers import finding

PLAIN = StreamSettings(groups=4, places=8, slots=8, train_global_batch_size=16, steps=4, at_sync="abort", min_groups=2)
RAGGED = Durations(length=drawn_length(4, 40))

Commands = Iterator[Command]
Lie = Callable[[Command], Commands]


def ledger(rows: Memory) -> LoopLedger:
    return LoopLedger([{"event": row.event, "time": row.time, **row.ids} for row in rows])


def backed(rows: Memory) -> str:
    """Return what is wrong, or an empty text."""
    found = finding("notes_backed", ledger(rows))
    return found.why if found.value else ""


def reported(lie: Lie, settings: StreamSettings = PLAIN) -> Memory:
    class Lying(Controller):
        def step(self, state: Any, event: Event) -> Any:
            state, commands = super().step(state, event)
            return state, tuple(more for one in commands for more in lie(one))

    return simulate(settings, RAGGED, core=Lying(settings)).rows


@pytest.mark.drawn(4, of="controllers")
@pytest.mark.parametrize(("sampler", "at_sync"), list(product(SAMPLERS, get_args(AtSync))))
def test_what_a_right_controller_notes_did_happen(sampler: str, at_sync: Any) -> None:
    settings = replace(PLAIN, sampler=sampler, window=0 if sampler == "strict" else 1, at_sync=at_sync, filter=True)
    flat = replace(RAGGED, reward=lambda group, sample: str(sample % 2 if group % 3 else 0))
    assert backed(simulate(settings, flat).rows) == ""


def test_so_it_does_where_replicas_go_and_commands_fail() -> None:
    def come_and_go(system: System) -> None:
        system.schedule("died", 1, 1.0)
        system.schedule("joined", 7, 2.0)

    settings = replace(PLAIN, on_dead_replica="go-on", on_failed="replace", step_retries=3, sampler="windowed")
    for number in range(20, 200, 9):
        rows = simulate(settings, RAGGED, prepare=come_and_go, fail_at={number: "injected"}).rows
        assert (number, backed(rows)) == (number, "")


def test_so_it_does_after_a_resume() -> None:
    start = Resume(version=2, updates=2, steps=2, next=12, open=(8, 11))
    rows = simulate(PLAIN, RAGGED, resume=start).rows
    assert backed(rows) == ""
    assert ledger(rows).start == 2


def test_a_controller_may_send_what_it_recomputes_and_the_microbatch_without_waiting() -> None:
    rows = [*ledger(simulate(replace(PLAIN, previous="recomputed"), RAGGED).rows).rows]
    facts = [{"event": row.event, "time": row.time, **row.ids} for row in rows]

    def place(event: str, **ids: Any) -> int:
        return next(at for at, row in enumerate(facts) if row["event"] == event and {*ids.items()} <= {*row.items()})

    ahead = facts.pop(place("microbatch"))
    facts.insert(place("done", of="logprobs"), ahead)
    assert not finding("notes_backed", LoopLedger(facts)).value
    facts.insert(place("done", of="logprobs"), facts.pop(place("done", of="microbatch")))
    assert "log-probabilities of group" in finding("notes_backed", LoopLedger(facts)).why


def test_a_sync_may_be_ordered_replica_by_replica() -> None:
    facts = [{"event": row.event, "time": row.time, **row.ids} for row in ledger(simulate(PLAIN, RAGGED).rows).rows]
    at = next(at for at, row in enumerate(facts) if row["event"] == "sync" and row["version"] == 1)
    each = [{**facts[at], "replicas": replica} for replica in (0, 1)]
    assert not finding("notes_backed", LoopLedger([*facts[:at], *each, *facts[at + 1 :]])).value
    unordered = LoopLedger([*facts[:at], *facts[at + 1 :]])
    assert "1 `sync_begin` notes and 0 syncs" in finding("notes_backed", unordered).why
    noted_twice = [more for row in facts for more in ([row, row] if row["event"] == "sync_begin" else [row])]
    assert "2 `sync_begin` notes and 1 sync of" in finding("notes_backed", LoopLedger(noted_twice)).why


# -- lies -----------------------------------------------------------------------------------------------------------------


def untrained(one: Command) -> Commands:
    """Leave group 5 out of its microbatch, but mark it trained."""
    if one.name == "microbatch":
        kept = tuple(group for group in one.groups if group != 5)
        one = Command(one.name, one.to, one.pipeline, **{**dict(one.ids), "groups": kept})
    yield one


def unnoted(one: Command) -> Commands:
    """Train group 5 without a note of it."""
    if not (one.name == "trained" and one.group == 5):
        yield one


def without(name: str) -> Lie:
    def lie(one: Command) -> Commands:
        if one.name != name:
            yield one

    return lie


def with_note(after: str, name: str, **ids: Any) -> Lie:
    """Return a lie that adds a note of another name behind each `after`, with its ids."""

    def lie(one: Command) -> Commands:
        yield one
        if one.name == after:
            yield Command(name, "ledger", one.pipeline, **{**dict(one.ids), **ids})

    return lie


def to(name: str, address: str) -> Lie:
    def lie(one: Command) -> Commands:
        yield Command(name, address, one.pipeline, **dict(one.ids)) if one.name == name else one

    return lie


LIES: dict[str, tuple[Lie, str]] = {
    "trained without the trainer": (untrained, r"`trained` of group 5.*executed no update with the group"),
    "trained without a note": (unnoted, "group 5 is in the weights but has no note `trained`"),
    "a finish that nobody reported": (with_note("finish", "done", of="finish"), "`done`.*no port reported it"),
    "tokens that nobody generated": (
        with_note("sent", "tokens", version=0, first=0, count=1),
        "`tokens`.*no port reported it",
    ),
    "published by its own word": (with_note("sync_begin", "published", replica=0), "`published`.*no port reported it"),
    "requests without a note": (without("sent"), "the request has no note `sent`"),
    "a request that went nowhere": (with_note("sent", "sent", attempt=7), "no such request went to a replica"),
    "a prompt of its own": (with_note("reserved", "reserved", group=900), "group 900.*the data gave no prompt for this group"),
    "a prompt that is lost": (
        lambda one: iter(() if one.name == "reserved" and one.group == 3 else (one,)),
        "`prompt` of group 3.*never became a group",
    ),
    "cleared and still there": (with_note("selected", "cleared"), "the trainer cleared no rows of this group"),
    "cleared without a note": (without("cleared"), "were cleared but it has no note `cleared`"),
    "a sync without a note": (without("sync_begin"), "0 `sync_begin` notes and 1 sync of version"),
    "selected without a note": (without("selected"), "was not selected for the step"),
    "two steps at once": (with_note("selected", "selected", step=9), "is still open"),
    "rows that stay": (without("discard"), "left on the trainer"),
    "an order to the ledger": (to("discard", "ledger"), "`discard`.*sent to no port, not to the port trainer"),
}  # fmt: skip
DROPS = replace(PLAIN, sampler="windowed", places=12, slots=12)  # some groups end without being trained


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_found(name: str) -> None:
    lie, why = LIES[name]
    settings = DROPS if name in ("rows that stay", "an order to the ledger") else PLAIN
    assert backed(simulate(settings, RAGGED).rows) == ""
    with_it = backed(reported(lie, settings))
    assert with_it
    assert re.search(why, with_it), with_it


def test_a_version_that_rises_without_a_finish_is_found() -> None:
    class Bumping(Controller):
        def step(self, state: Any, event: Event) -> Any:
            state, commands = super().step(state, event)
            for one in commands:
                if one.name == "finish":
                    kept = tuple(other for other in commands if other is not one)
                    state, more = super().step(state, Event("done", one.pipeline, **dict(one.ids), of="finish"))
                    return state, (*kept, *more)
            return state, commands

    rows = simulate(PLAIN, RAGGED, core=Bumping(PLAIN)).rows
    assert "executed no" in backed(rows)


def test_what_a_port_reported_cannot_be_made_up() -> None:
    for name in ("core", "to"):
        with pytest.raises(BadInput, match="reserved for the runner"):
            command_row(Command("done", "ledger", "", of="finish", **{name: "a"}), 0.0)


def test_a_loop_that_ends_before_its_last_step_is_found() -> None:
    class Short(Controller):
        def __init__(self, settings: StreamSettings) -> None:
            super().__init__(replace(settings, steps=2))

    found = finding("ends_cleanly", ledger(simulate(PLAIN, RAGGED, core=Short(PLAIN)).rows))
    assert "done at version 2, but the loop has 4 steps" in found.why


def test_samples_without_tokens_have_no_lag() -> None:
    """The same holds for a group of empty samples; what the core logs matches the rows."""
    empty = replace(RAGGED, length=lambda group, sample: 0 if group % 4 == 1 or sample == 0 else 8 + sample)
    rows = simulate(replace(PLAIN, at_sync="keep"), empty).rows
    judged = ledger(rows)
    assert any(judged.is_empty(row["group"]) for row in judged.trained())
    for name in ("metrics_true", "no_sample_too_old"):
        found = finding(name, judged)
        assert (name, found.value, found.why) == (name, 0.0, found.why)


class CancelsOneOfEachGroup(Controller):
    def step(self, state: Any, event: Event) -> Any:
        state, commands = super().step(state, event)
        firsts = {one.group: one for one in reversed(commands) if one.name == "cancel"}
        return state, tuple(one for one in commands if one.name != "cancel" or firsts[one.group] is one)


@pytest.mark.parametrize(("kind", "is_right"), [(Controller, True), (CancelsOneOfEachGroup, False)])
def test_one_cancelled_request_does_not_excuse_the_others(kind: type[Controller], is_right: bool) -> None:
    settings = replace(PLAIN, sampler="windowed", at_sync="keep", places=24)
    found = finding("no_needless_waste", ledger(simulate(settings, RAGGED, core=kind(settings)).rows))
    assert not found.value if is_right else "although the other requests of its group were cancelled" in found.why
