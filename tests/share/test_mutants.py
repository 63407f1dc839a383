"""The desk with one rule broken at a time: the tests of its rules, the plans or the schedules notice each mutant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kit.labs.share.scenarios import SCENARIOS
from kit.labs.share.worlds import ShareWorlds
from kit.loop.explore import outcome_of
from tests.mutants.mutant import Mutant, compiled
from tests.share import test_core, test_planner, test_schedules, test_shared
from tests.share.chaos import rows_of, violations
from tests.stream.test_mutants import broken, calls, killer


def mutant(place: str, old: str, new: str, bug: str) -> Mutant:
    module, _, function = place.partition(":")
    return Mutant("share", f"kit.share.{module}", function, old=old, new=new, check="", bug=bug)


MUTANTS = (
    mutant("state:Request.precedence", "PRIORITY[self.kind], self.number", "self.number, 0", "no priorities"),
    mutant("state:Request.precedence", ", self.number", ", -self.number", "last in, first out"),
    mutant("state:PipelineState.progress", "min(completed, target)", "completed", "progress is not clamped"),
    mutant(
        "state:PipelineState.leaving",
        "self.releasing or self.closing",
        "self.closing",
        "a planned release shrinks nobody",
    ),
    mutant("planner:make_plan", "if not request.held", "", "requests that are held are planned"),
    mutant(
        "state:DeskFields.under_way",
        "(*self.sleeping, *self.waking)",
        "self.waking",
        "a release ends while replicas fall asleep",
    ),
    mutant("planner:Share.remaining", "2 * max(self.asks, 0)", "max(self.asks, 0)", "an estimate counts once"),
    mutant("planner:Share.remaining", "if self.target else", "+", "an estimate counts beside the report of progress"),
    mutant("planner:Gaps.lacks", "share.remaining > 0 and ", "", "devices go to pipelines without demand"),
    mutant("planner:Share.is_known", " or self.asks > 0", "", "an estimate does not count"),
    mutant("planner:Share.is_eligible", "self.since >= 0 or ", "", "who has no replica never gets one"),
    mutant("planner:View.shrink", "share.touched.add(replica)", "pass", "a replica is shrunk and woken in one cycle"),
    mutant("planner:Gaps.__init__", "share.remaining * share.tp for", "share.remaining for", "the weight ignores tp"),
    mutant(
        "planner:Gaps.__init__", "len(share.active) * share.tp for", "len(share.active) for", "the budget ignores tp"
    ),
    mutant("planner:Gaps.__init__", "len(view.idle) + ", "", "idle devices are not in the budget"),
    mutant("planner:Gaps.target", " + self.weight", "", "shares are rounded down"),
    mutant("planner:Gaps.target", "max(1, ", "max(0, ", "no floor"),
    mutant("planner:Gaps.lacks", "< self.bundles", "<= self.bundles", "one bundle too many"),
    mutant("planner:Gaps.order", "relative, -self.gap(share)", "0, -self.gap(share)", "no relative gap"),
    mutant("planner:Gaps.order", "-self.gap(share), share.name", "0, share.name", "equal relative gaps by name"),
    mutant("planner:from_donors", " - gaps.bundles[gap.name]", "", "donors give their last"),
    mutant(
        "planner:share_by_gaps", "heapq.heappush(waiting, (gaps.order(share), name))", "pass", "one replica a pipeline"
    ),
    mutant("planner:share_by_gaps", "starts.clear()", "pass", "what is left of a donor is not seen"),
    mutant("planner:idle_replica", " and replica not in share.touched", "", "a replica is touched twice"),
    mutant("planner:from_donors", "names.count(name) <= spare[name]", "True", "donors give more than they can spare"),
    mutant("planner:Gaps.donors_order", "-percent for percent", "percent for percent", "who has least left gives"),
    mutant("planner:HomeGaps.target", " if share.remaining else 0", "", "at home, the last replica is kept"),
    mutant(
        "planner:HomeGaps.distance", " - len(own), not own", " - len(own), True", "its own trainer is like any place"
    ),
    mutant(
        "planner:HomeGaps.distance",
        "self.trainers[device] for device in bundle",
        "0 for _ in bundle",
        "others' trainers too",
    ),
    mutant("planner:HomeGaps.donors_order", "any(percents), ", "", "at home, who has work gives first"),
    mutant(
        "planner:Supply.__init__",
        "pipeline.leaving or replica in pipeline.out",
        "pipeline.leaving",
        "a resize shrinks nobody",
    ),
    mutant("planner:Supply.shrink", "del self.owners[device]", "pass", "a device is freed for two requests"),
    mutant("planner:Supply.meets", "self.idle -= devices", "pass", "devices are given twice"),
    mutant("planner:Supply.meets", "self.kept |= devices", "pass", "later requests overtake"),
    mutant("planner:Supply.meets", " and not holds", "", "who holds devices waits for who waits for it"),
    mutant("planner:Supply.meets", "lease.kind != GENERATION", "True", "a lease of generation passes the queue"),
    mutant("planner:share_of", "pipeline.out | pipeline.dead", "pipeline.out", "a dead replica wakes"),
    mutant("planner:share_of", "pipeline.out | pipeline.dead", "pipeline.dead", "a removed replica wakes"),
    mutant("planner:share_of", "-1 if pipeline.leaving else ", "", "a pipeline that releases is given devices"),
    mutant(
        "planner:is_off_balance",
        "not lease.active and not f.under_way(name)",
        "False",
        "a suspended pipeline is forgotten",
    ),
    mutant(
        "planner:is_off_balance",
        "request.kind == GENERATION for request in waits",
        "False for request in waits",
        "who waits to generate is forgotten",
    ),
    mutant("planner:is_off_balance", "10 * off >", "100 * off >", "one point is off balance"),
    mutant("planner:is_off_balance", "10 * off >", "2 * off >", "fifty points are in balance"),
    mutant(
        "planner:is_off_balance",
        "len(rows) < 2 or waits",
        "len(rows) < 2",
        "balance while someone waits",
    ),
    mutant("core:start", "if wrong := violations(t, plan, t.settings.devices):", "if wrong := []:", "no validation"),
    mutant("core:start", 't.alarm(t.settings.operation_ms, "cycle", t.cycles)', "pass", "a cycle has no limit"),
    mutant("core:shrink_replica", "t.sleeping |= {(name, replica)}", "pass", "nobody waits for a shrink"),
    mutant("core:shrink_replica", "active - {replica}", "active", "a replica that sleeps is active"),
    mutant("core:advance", " and not t.sleeping", "", "expands come before the shrinks end"),
    mutant("core:advance", "t.plan = Plan()", "pass", "grants and expands are ordered twice"),
    mutant("core:advance", "if not t.waking:", "if True:", "a cycle is over while replicas wake"),
    mutant(
        "core:advance",
        "t.due |= any(not request.held for request in t.requests)",
        "pass",
        "who still waits is forgotten",
    ),
    mutant("core:expand", "not wanted or ", "", "who withdrew its request gets devices"),
    mutant("core:grant", "t.idle -= op.devices", "pass", "granted devices stay idle"),
    mutant("core:expand", "t.idle -= bundle", "pass", "devices of a waking replica stay idle"),
    mutant("core:expand", "pipeline is None or ", "", "a pipeline that is gone is expanded"),
    mutant("core:expand", "pipeline.leaving or ", "", "a pipeline that releases is expanded"),
    mutant(
        "core:expand", "not wanted or replica in pipeline.out | pipeline.dead", "not wanted", "a lost replica is woken"
    ),
    mutant("core:finish_releases", " and not t.under_way(name)", "", "a release ends before its replicas sleep"),
    mutant("core:on_shrunk", "if replica in t.sleeping:", "if True:", "a late answer frees devices"),
    mutant("core:on_shrunk", "t.idle |= ", "t.idle & ", "devices of a sleeper are lost"),
    mutant("core:on_expanded", "if replica_key not in t.waking:", "if False:", "a late answer makes a replica active"),
    mutant("core:on_expanded", 't.say("joined", name, replica=replica)', "pass", "nobody hears that a replica woke"),
    mutant("core:on_error", "lose(t, name, event.replica)", "pass", "a replica that cannot wake is waited for"),
    mutant("core:on_error", 't.error = f"replica', '_ = f"replica', "a failed shrink is ignored"),
    mutant("core:lose", "t.change(name, dead=pipeline.dead | {replica})", "pass", "a dead replica comes back"),
    mutant("core:lose", "t.idle |= pipeline.generation.bundles[replica]", "pass", "a dead replica keeps its devices"),
    mutant("core:lose", "t.sleeping -= {held}", "pass", "a dead replica's sleep is waited for"),
    mutant("core:lose", "t.waking -= {held}", "pass", "a dead replica's waking is waited for"),
    mutant("core:on_alarm", "alarm[1] == t.cycles", "True", "an alarm of an earlier cycle ends this one"),
    mutant("core:on_alarm", "t.alarms = t.alarms.without(event.number)", "pass", "an alarm counts twice"),
    mutant("core:watch", "pipeline.moved == pipeline.watched and ", "", "the watchdog does not look at progress"),
    mutant("core:watch", "t.change(name, watched=pipeline.moved)", "pass", "the watchdog never learns"),
    mutant("core:watch", 't.alarm(t.settings.watchdog_ms, "watchdog")', "pass", "the watchdog looks once"),
    mutant("core:watch", "(name, GENERATION) in t.leases and ", "", "the watchdog asks for who never asked"),
    mutant("core:pipeline_of_request", " or pipeline.closing", "", "who leaves may ask"),
    mutant("core:on_register", "name in t.left or ", "", "who left comes again"),
    mutant("core:on_register", "tp < 1 or ", "", "tp is not checked"),
    mutant("core:may_start", "before.handed_over or ", "", "the second waits for its limit"),
    mutant("core:may_start", ' or "starts" in one.overdue', "", "the admission has no limit"),
    mutant("core:is_held", 'request.kind != "training"\n        or ', "", "everything is held"),
    mutant("core:is_held", "not pipeline.handed_over\n        or ", "", "the first training is held"),
    mutant("core:is_held", '"trains" in pipeline.overdue\n        or ', "", "the hold has no limit"),
    mutant("core:is_held", "not t.pipelines[name].set_up and ", "", "the hold never ends"),
    mutant("core:on_acquire", "if not pipeline.admitted:", "if False:", "who is not admitted may ask"),
    mutant("core:on_acquire", "waits is not None and not waits.again", "False", "two requests wait for one cluster"),
    mutant("core:on_acquire", "lease is not None and lease.kind != kind", "False", "another priority is granted"),
    mutant(
        "core:on_acquire",
        "elif pipeline.releasing and cluster == GENERATION:",
        "elif False:",
        "asks while it releases",
    ),
    mutant("core:on_acquire", "elif released == GENERATION:", "elif False:", "generation is given back at once"),
    mutant("core:on_acquire", "give_back(t, name, where, released)", "pass", "a release and a request only request"),
    mutant(
        "core:on_acquire",
        "t.change(name, set_up=True, estimate=target)",
        "t.change(name, estimate=target)",
        "never set up",
    ),
    mutant(
        "core:on_acquire",
        "t.change(name, set_up=True, estimate=target)",
        "t.change(name, set_up=True)",
        "no estimate",
    ),
    mutant("core:enter", "t.due = True", "pass", "a request makes no plan"),
    mutant(
        "core:enter",
        't.alarm(t.settings.request_ms, "request", request.number)',
        "pass",
        "a request has no limit",
    ),
    mutant("core:answer", "if waiting.key != request.key", "", "an answer drops all requests"),
    mutant(
        "core:give_back",
        "lease.kind == kind != GENERATION",
        "lease.kind != GENERATION",
        "any kind gives a lease back",
    ),
    mutant("core:give_back", "t.idle |= lease.devices", "pass", "released devices are lost"),
    mutant("core:give_back", "t.due = True", "pass", "a release makes no plan"),
    mutant("core:give_back", "t.change(name, handed_over=True)", "pass", "a hand-over is not seen"),
    mutant(
        "core:withdraw",
        "(waiting.key, waiting.kind) == (key, kind)",
        "waiting.key == key",
        "any kind withdraws a request",
    ),
    mutant(
        "core:on_planned_release",
        "waiters=pipeline.waiters + 1",
        "waiters=1",
        "a second planned release has no answer",
    ),
    mutant(
        "core:release_generation",
        "t.leases = t.leases.without((name, GENERATION))",
        "pass",
        "a release keeps the lease",
    ),
    mutant(
        "core:release_generation",
        "t.change(name, releasing=False, waiters=0)",
        "t.change(name, releasing=False)",
        "answered twice",
    ),
    mutant("core:on_resize", "if bool(add) == bool(remove):", "if False:", "a resize names both or none"),
    mutant("core:on_resize", "t.due = True", "pass", "a resize makes no plan"),
    mutant("core:on_progress", "min(event.completed, event.target)", "event.completed", "reports are not clamped"),
    mutant("core:on_progress", "pipeline.streams.get(stream) != report", "True", "a heartbeat is progress"),
    mutant("core:on_progress", "t.due |= ", "_ = ", "new work makes no plan"),
    mutant("core:on_progress", "are_mixed(known, stream)", "False", "adapters and others mixed"),
    mutant("core:on_progress_end", "pipeline.streams.without(stream)", "pipeline.streams", "a stream never ends"),
    mutant("core:lacks_replicas", "not t.active(name) and ", "", "the watchdog asks for who generates"),
    mutant(
        "core:lacks_replicas",
        " and (not pipeline.streams or pipeline.remaining > 0)",
        "",
        "the watchdog asks for who needs nothing",
    ),
    mutant("core:on_unregister", 'wake_waiters(t, name, "unregistered")', "pass", "waiters are not woken"),
    mutant(
        "core:drop_pipeline",
        "lease.devices for key, lease in t.leases.items() if key[0] == name",
        "()",
        "who dies keeps its trainer's devices",
    ),
    mutant(
        "core:drop_pipeline",
        "for key, lease in t.leases.items() if key[0] != name}",
        "for key, lease in t.leases.items()}",
        "a dead pipeline keeps its lease",
    ),
    mutant("core:drop_pipeline", "[*t.active(name), *moving]", "t.active(name)", "devices of a dead sleeper are lost"),
    mutant(
        "core:drop_pipeline",
        "t.waking = frozenset(pair for pair in t.waking if pair[0] != name)",
        "pass",
        "a dead pipeline wakes",
    ),
    mutant("core:drop_pipeline", "t.left |= {name}", "pass", "the desk never ends"),
    mutant("core:on_alarm", "request_due.number == alarm[1]", "True", "one limit ends all requests"),
    mutant(
        "core:on_alarm",
        'alarm[2] == "trains" or not pipeline.admitted',
        "True",
        "a limit is reported that was not reached",
    ),
    mutant(
        "member:Member.adapted",
        "command for command in commands if command != released[0]",
        "command for command in commands",
        "released twice",
    ),
    mutant(
        "member:Member.step",
        "state.alone or alone",
        "alone",
        "waits for a desk that is gone",
    ),
)

WORLDS = 60


def cases() -> Iterator[Callable[[], Any]]:
    """Yield the tests of rules and plans with their parameters, the faults' runs, then schedules."""
    for module in (test_core, test_planner):
        for name, test in vars(module).items():
            if name.startswith("test_") and "many_times" not in name and "hypothesis" not in name:
                yield from calls(test)
    for scenario in SCENARIOS.values():
        yield lambda scenario=scenario: check(scenario.run().rows)
    yield from calls(test_shared.test_both_end_and_every_check_passes)
    yield test_shared.test_a_shrink_without_an_answer_stops_both_with_the_desks_name
    yield from calls(test_schedules.test_every_order_of_two_pipelines_on_two_devices_ends)
    for seed in range(200):
        yield lambda seed=seed: test_schedules.check(seed)
    for seed in range(WORLDS):
        yield lambda seed=seed: check_world(seed)


def check(rows: Any) -> None:
    assert violations(rows_of(rows)) == {}


def check_world(seed: int) -> None:
    assert outcome_of(ShareWorlds(), seed).findings == {}


@pytest.mark.parametrize("one", MUTANTS, ids=lambda one: one.bug.replace(" ", "-"))
def test_every_mutant_applies_to_the_source(one: Mutant) -> None:
    compiled(one)


@pytest.mark.slow
def test_the_desk_as_it_is_passes_every_case() -> None:
    for case in cases():
        case()


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("one", MUTANTS, ids=lambda one: one.bug.replace(" ", "-"))
def test_a_broken_rule_is_noticed(one: Mutant) -> None:
    with broken(one):
        assert killer(cases()) is not None, one.bug
