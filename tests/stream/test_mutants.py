"""The core with one rule broken at a time: the tests of its rules or the schedules notice each mutant.

A mutant changes the source of one function; `tests/mutants/mutant.py` compiles it and puts it into the live function.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import pytest

from tests.mutants.mutant import MARK, Mutant, compiled
from tests.stream import test_core, test_foreign, test_samplers, test_schedules
from tests.stream.chaos import run
from tests.stream.test_schedules import VARIANTS, chaos_of, check_drawn, settings


def mutant(place: str, old: str, new: str, bug: str) -> Mutant:
    module, _, function = place.partition(":")
    return Mutant("stream", f"kit.stream.{module}", function, old=old, new=new, check="", bug=bug)


MUTANTS = (
    mutant(
        "settings:batch_may_start", "index < view.version", "index <= view.version", "the gate opens one batch early"
    ),
    mutant("settings:batch_may_start", "view.position > 0 or ", "", "the gate blocks inside a batch"),
    mutant("settings:batch_may_start", " and view.index + 1 < view.last", "", "batches start that no step trains"),
    mutant("settings:within_capacity", "running <", "running <=", "capacity admits one too many"),
    mutant("settings:within_capacity", "view.accepted + ", "", "what was accepted is not counted"),
    mutant(
        "settings:of_this_step",
        "target == view.version",
        "target <= view.version",
        "batches of earlier steps are trained",
    ),
    mutant("settings:target_passed", "target < view", "target <= view", "the batch of this step is dropped"),
    mutant(
        "settings:start_too_old", "version < view.oldest", "version <= view.oldest", "eviction is one version early"
    ),
    mutant("settings:inside_the_window", "view.oldest <= ", "", "windowed has no limit"),
    mutant("settings:unfinished_too_old", "order < 0 and ", "", "complete groups are aborted too"),
    mutant(
        "settings:oldest_start_first",
        "start <= awaited and not unfinished",
        "not unfinished",
        "weight-fifo does not wait",
    ),
    mutant(
        "settings:as_completed", "key=lambda slot: slot.order", "key=lambda slot: -slot.order", "the freshest first"
    ),
    mutant(
        "settings:SamplerView.oldest",
        "max(0, self.version - self.window)",
        "max(0, self.version - self.window - 1)",
        "a window too wide",
    ),
    mutant("generation:may_dispatch", "not t.held and ", "True and ", "dispatch is not held"),
    mutant("generation:may_dispatch", "place_is_free(t) and ", "", "the buffer has no limit"),
    mutant("generation:may_dispatch", "slot_is_free(t) and ", "", "slots have no limit"),
    mutant(
        "generation:may_dispatch", "t.owed or gate_is_open(t)", "gate_is_open(t)", "a replacement waits for the gate"
    ),
    mutant("generation:may_dispatch", " and active(t)", "", "groups are reserved without a replica"),
    mutant("generation:dispatch", "if not t.prompt_asked:", "if True:", "prompts are asked for twice"),
    mutant("generation:place_is_free", "len(t.buffer) < ", "len(t.buffer) <= ", "one place too many"),
    mutant("generation:slot_is_free", "t.unfinished < ", "t.unfinished <= ", "one slot too many"),
    mutant("generation:reserve", "t.unfinished += 1", "pass", "a slot is not taken"),
    mutant("generation:reserve", "t.owed = t.owed[1:]", "pass", "a group is replaced again and again"),
    mutant(
        "generation:reserve", "version=t.version, target=target", "version=0, target=target", "starts are not stamped"
    ),
    mutant("generation:reserve", "owed.target", "t.index", "a replacement joins the newest batch"),
    mutant("generation:batch_target", "t.index += 1", "t.index += 2", "the index rises twice"),
    mutant("generation:batch_target", "if t.position == 0:", "if True:", "the index rises with every group"),
    mutant("generation:batch_target", "% t.settings.groups", "% (t.settings.groups + 1)", "batches of another size"),
    mutant(
        "generation:active",
        " if replica.version == t.version",
        "",
        "replicas are used before the version is published there",
    ),
    mutant("generation:send_waiting", "near[0] if near else ", "", "samples of a group are spread"),
    mutant("generation:send_waiting", "change_load(t, chosen, 1)", "pass", "requests are not counted"),
    mutant(
        "generation:send_waiting",
        "if t.held or not there:",
        "if not there:",
        "requests are sent while dispatch is held",
    ),
    mutant(
        "generation:send_waiting",
        "t.replicas[replica].load, replica",
        "replica, replica",
        "one replica gets everything",
    ),
    mutant("generation:answered", "sample.in_flight and ", "", "an answer is taken twice"),
    mutant(
        "generation:answered",
        'event.get("replica", sample.replica) == sample.replica',
        "True",
        "a lost replica's answer is taken",
    ),
    mutant(
        "generation:on_tokens", 't.count("wasted", event.count)', "pass", "tokens that nobody waits for are not counted"
    ),
    mutant(
        "generation:on_completed",
        "min(group.oldest, event.version)",
        "max(group.oldest, event.version)",
        "the newest is the oldest",
    ),
    mutant("generation:on_completed", "all(sample", "any(sample", "a group is ready with its first sample"),
    mutant(
        "generation:on_completed",
        "change_load(t, group.samples[event.sample].replica, -1)",
        "pass",
        "an answer frees nothing",
    ),
    mutant(
        "generation:on_cancelled",
        "change_load(t, group.samples[event.sample].replica, -1)",
        "pass",
        "a cancelled request stays counted",
    ),
    mutant(
        "generation:give_up_attempt",
        "attempt=sample.attempt + 1, tokens=0",
        "attempt=sample.attempt + 1",
        "tokens of two attempts add up",
    ),
    mutant("generation:give_up_attempt", 't.count("wasted", sample.tokens)', "pass", "lost tokens are not counted"),
    mutant("generation:give_up_attempt", "t.waiting += ((group.id, number),)", "pass", "a request is never sent again"),
    mutant(
        "generation:on_failed",
        "change_load(t, group.samples[event.sample].replica, -1)",
        "pass",
        "a failed request stays counted",
    ),
    mutant("generation:on_failed", "end_with_error(t, why)", "pass", "a failure is silent"),
    mutant("generation:on_failed", "shrink_step(t, group)", "pass", "a step waits for a group that failed"),
    mutant("generation:shrink_step", "< t.settings.floor", "< t.settings.floor - 1", "a step shrinks below the floor"),
    mutant("generation:shrink_step", "t.news = True", "pass", "nobody sees that a step needs fewer"),
    mutant("generation:shrink_step", "t.version + full", "t.version", "a full step shrinks"),
    mutant("generation:on_died", 'end_with_error(t, f"replica', 'str(f"replica', "a death is silent"),
    mutant(
        "generation:on_left", "t.replicas = t.replicas.without(event.replica)", "pass", "a dead replica gets requests"
    ),
    mutant("generation:sync_if_due", "t.sync is not None or ", "", "two syncs at once"),
    mutant("generation:sync_if_due", "t.step.finishing", "False", "a version that the trainer leaves is sent"),
    mutant("generation:sync_if_due", 'in ("abort", "drain")', 'in ("abort",)', "drain does not wait"),
    mutant("generation:sync_if_due", "cancel_all(t)", "pass", "abort takes nothing back"),
    mutant("generation:on_synced", "if t.held and not t.sync_due:", "if not t.held:", "dispatch is never resumed"),
    mutant("generation:on_synced", " and not t.sync_due", "", "dispatch goes on after a sync of an older version"),
    mutant("generation:on_sync_error", "if not lost:", "if lost:", "a failed sync is ignored"),
    mutant("generation:resume_dispatch", "t.news = True", "pass", "nothing is selected after a sync"),
    mutant("generation:resume_dispatch", "t.held = False", "pass", "held for ever"),
    mutant("generation:end_with_error", "if not t.error:", "if True:", "a later error hides the first"),
    mutant("generation:leave", "t.unfinished -= 1", "pass", "a slot is lost"),
    mutant("generation:leave", "if group.order < 0:", "if True:", "a slot is given back twice"),
    mutant("generation:leave", "t.buffer = t.buffer.without(group.id)", "pass", "a place is lost"),
    mutant("generation:close_group", "leave(t, group)", "pass", "an end gives nothing back"),
    mutant("generation:close_group", 't.count("wasted", group.tokens)', "pass", "tokens of an end are not counted"),
    mutant("generation:close_group", "discard(t, group)", "pass", "rows of an end are kept"),
    mutant("generation:end_if_idle", "discard(t, group)", "pass", "rows of a replaced group are kept"),
    mutant(
        "generation:discard",
        "if any(sample.length for sample in group.samples):",
        "if True:",
        "rows that never were are dropped",
    ),
    mutant("generation:complete", "t.failed_in_a_row = 0", "pass", "failures far apart end the run"),
    mutant("generation:on_failed", "t.failed_in_a_row += 1", "pass", "groups are replaced for ever"),
    mutant("generation:doom", "if group.ends is not None:", "if False:", "a group is ended twice"),
    mutant("generation:doom", "group = group.put(number, status=CANCELLING)", "pass", "a sample is cancelled twice"),
    mutant(
        "generation:doom",
        "t.waiting = tuple(request for request in t.waiting if request[0] != group.id)",
        "pass",
        "a doomed group is sent",
    ),
    mutant(
        "generation:end_if_idle",
        "group.ends is None or group.in_flight",
        "group.ends is None",
        "a group ends while in flight",
    ),
    mutant("generation:end_if_idle", "t.owed += (Owed(group.target, group),)", "pass", "a replaced group never ends"),
    mutant("core:close", "owed.replaces is not None and ", "False and ", "a group that was never replaced has no end"),
    mutant("generation:complete", "t.unfinished -= 1", "pass", "a complete group keeps its slot"),
    mutant("generation:complete", "t.news = True", "pass", "nobody sees that a group is complete"),
    mutant("generation:complete", "if t.settings.filter:", "if True:", "groups without variance are always dropped"),
    mutant("generation:complete", "t.accepted -= 1", "pass", "what is filtered out counts as accepted"),
    mutant("generation:complete", "t.owed += (Owed(group.target),)", "pass", "what is filtered out is not made up for"),
    mutant("generation:put_back", "[t.step.finished :]", "[t.step.fed :]", "groups that the trainer had are lost"),
    mutant("generation:put_back", "< t.settings.places", "<= t.settings.places", "a place too many is taken back"),
    mutant("generation:put_back", "t.owed += (Owed(group.target),)", "pass", "a batch stays short"),
    mutant("core:may_choose", " and not t.held", "", "groups are selected before the weights are published"),
    mutant("core:may_choose", " and t.version < t.last", "", "a step too many"),
    mutant("core:may_choose", "len(step.groups) < t.need", "True", "a step takes more than it needs"),
    mutant(
        "core:limits",
        "min(t.settings.min_groups, most)",
        "t.settings.min_groups",
        "the last chunk may not be small",
    ),
    mutant("core:limits", "min(t.settings.min_groups, most)", "1", "the minimum does not count"),
    mutant(
        "core:drop_groups", "t.owed += (Owed(NO_TARGET),)", "pass", "a gated group that was dropped is not made up for"
    ),
    mutant("core:select_groups", "candidates[:most]", "candidates", "a selection takes all"),
    mutant("core:select_groups", "leave(t, group)", "pass", "places are kept by what is trained"),
    mutant("core:select_groups", "t.steps += 1", "pass", "two steps have one id"),
    mutant("core:score", "step.fed < step.scored or ", "", "what is scored waits for the next chunk"),
    mutant("core:boundary", "(step.update + 1) * t.settings.minibatch", "t.need", "one update for several minibatches"),
    mutant("core:feed", "if not step.begun:", "if True:", "a begin for every chunk"),
    mutant("core:feed", "any(group.length for group in piece)", "True", "chunks without a token are run"),
    mutant("core:finish", " or step.unanswered", "", "finish does not wait for its microbatches"),
    mutant("core:finish", "step.fed < boundary(t, step)", "False", "a finish for every chunk"),
    mutant(
        "core:finish",
        'step.scored == t.need or t.settings.previous != "recomputed"',
        "True",
        "previous from moved weights",
    ),
    mutant("core:finish", "if not step.begun:", "if False:", "an empty step is finished"),
    mutant("core:on_finished", "t.updates += 1", "pass", "updates are not counted"),
    mutant("core:on_finished", "if step.fed == t.need:", "if True:", "the version counts updates"),
    mutant("core:on_finished", 't.do("clear"', 'str and t.note("cleared_nothing"', "rows are never cleared"),
    mutant("core:on_finished", "finished=step.fed, ", "", "groups are trained again after an abort"),
    mutant("core:bump", "t.version += 1", "t.version += 2", "the version moves twice"),
    mutant("core:bump", "hold(t)", "pass", "dispatch is not held when the version moves"),
    mutant("core:on_trainer", "step.id != event.step or ", "", "answers of another step count"),
    mutant(
        "core:on_trainer",
        ' or step.aborting != (event.of == "abort")',
        "",
        "answers count while a step is given up",
    ),
    mutant(
        "core:on_cleared",
        't.note("cleared", group=group.id, step=event.step)',
        "pass",
        "trained groups have no end",
    ),
    mutant("core:on_cleared", "end_with_error(t, f", "str(f", "a failed clear is silent"),
    mutant("core:fail_step", " and not t.step.finished", "", "a step that is half in the weights is tried again"),
    mutant("core:fail_step", "t.retried += 1", "pass", "retries have no limit"),
    mutant("core:fail_step", "abort(t, t.step)", "pass", "no abort"),
    mutant("core:on_aborted", "put_back(t)", "pass", "groups of an aborted step are lost"),
    mutant("core:settle_loop", "end_shrunk_step(t)", "pass", "a step that shrank to what is finished never ends"),
    mutant("core:settle_loop", "generation.send_waiting(t)", "pass", "requests wait for ever"),
    mutant("core:is_done", " and not t.held", "", "the last version is not published"),
    mutant("core:is_stuck", "t.exhausted and ", "", "an idle loop ends as exhausted"),
    mutant("core:is_stuck", "step.unanswered or ", "", "a step is given up while the trainer works"),
    mutant("core:is_stuck", "step.finishing or ", "", "a step is given up while the weights move"),
    mutant("core:is_stuck", ' or t.asked - {"admit"}', "", "a step is given up before its devices are granted"),
    mutant("core:is_stuck", "t.in_flight or ", "", "the end of the data does not wait for what is in flight"),
    mutant("core:end_of_data", "t.step is None and not t.buffer", "t.step is None", "groups left over are ignored"),
    mutant("core:end_of_data", "t.step is None and not t.buffer", "True", "a partial step is a clean end"),
    mutant("core:wind_down", "if step is not None and step.finishing:", "if False:", "an abort overtakes a finish"),
    mutant("core:wind_down", "abort(t, step)", "pass", "waits for an abort that was never sent"),
    mutant("core:wind_down", "put_back(t)", "t.step = None", "groups of the open step are lost"),
    mutant("core:wind_down", "if t.clearing:", "if False:", "the end does not wait for clears"),
    mutant("core:wind_down", "if not t.in_flight or t.error:", "if True:", "a clean end leaves requests in flight"),
    mutant("core:close", "t.granted | ", "", "devices are never released"),
    mutant("core:on_granted", "t.granted |= {event.kind}", "pass", "a grant is not noted"),
    mutant("core:report_progress", "min(need, ", "max(0, ", "progress beyond the step"),
    mutant("core:on_error", "on_logger_failed(t, event)", "end_with_error(t, why)", "a logger ends the run"),
    mutant("core:on_error", "generation.on_failed(t, event)", "pass", "a request that could not be sent is lost"),
    mutant("core:resume_from", "sorted(held)", "()", "what was under way is not given again"),
    mutant("core:Controller.begin", "start.version - 1", "start.version", "a resumed gate is one batch ahead"),
    mutant("core:Controller.begin", "start.version * settings.groups", "0", "accepted counts from zero after a resume"),
)


@contextmanager
def broken(one: Mutant) -> Iterator[None]:
    """Run the live function with the mutant's code, then restore it."""
    module = importlib.import_module(one.module)
    found = reduce(getattr_static, one.function.split("."), module)
    living = found.fget if isinstance(found, property) else found
    plain, living.__code__ = living.__code__, compiled(one)
    setattr(module, MARK, lambda: None)
    try:
        yield
    finally:
        living.__code__ = plain
        delattr(module, MARK)


def getattr_static(owner: Any, name: str) -> Any:
    return inspect.getattr_static(owner, name)


def cases() -> Iterator[Callable[[], Any]]:
    """Yield the tests of rules with their parameters, then schedules."""
    for module in (test_core, test_samplers, test_foreign):
        for name, test in vars(module).items():
            if name.startswith("test_"):
                yield from calls(test)
    for seed in range(6):
        for variant in VARIANTS:
            yield lambda variant=variant, seed=seed: run(settings(**variant), chaos_of(settings(**variant), seed, None))
    for seed in range(40):
        yield lambda seed=seed: check_drawn(seed)
    for variant in VARIANTS:
        yield lambda variant=variant: test_schedules.fail_everywhere(variant, 0)


def calls(test: Callable[..., Any]) -> list[Callable[[], Any]]:
    """Return a call of a test function for each combination of its parameters."""
    found: list[dict[str, Any]] = [{}]
    for one in getattr(test, "pytestmark", []):
        if one.name == "parametrize":
            names = (
                [name.strip() for name in one.args[0].split(",")] if isinstance(one.args[0], str) else list(one.args[0])
            )
            rows = [values if len(names) > 1 else (values,) for values in one.args[1]]
            found = [{**known, **dict(zip(names, row, strict=True))} for known in found for row in rows]
    return [lambda known=known: test(**known) for known in found]


def killer(cases: Iterable[Callable[[], object]]) -> int | None:
    """Return the number of the first case that fails."""
    for number, case in enumerate(cases):
        try:
            case()
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - whatever it is, it was noticed
            return number
    return None


@pytest.mark.parametrize("one", MUTANTS, ids=lambda one: one.bug.replace(" ", "-"))
def test_every_mutant_applies_to_the_source(one: Mutant) -> None:
    compiled(one)


@pytest.mark.slow
def test_the_core_as_it_is_passes_every_case() -> None:
    for case in list(cases())[:150]:
        case()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("one", MUTANTS, ids=lambda one: one.bug.replace(" ", "-"))
def test_a_broken_rule_is_noticed(one: Mutant) -> None:
    with broken(one):
        assert killer(cases()) is not None, one.bug
