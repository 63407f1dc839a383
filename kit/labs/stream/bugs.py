"""The known bugs of the lab `stream` on the notebook side: what a fault puts in place of a rule of the controller or its ports."""

from __future__ import annotations

import dataclasses
from typing import Any

from kit.loop.messages import Command, Event
from kit.stream import core, generation
from kit.stream.generation import DONE, RUNNING, Group, OpenStep, Owed, StreamState, StreamTurn
from kit.stream.ports import Meter
from kit.stream.settings import SAMPLERS, Resume

# The right code, before a fault replaces it.
give_up_attempt, complete, hold, do = generation.give_up_attempt, generation.complete, generation.hold, StreamTurn.do
active, take = generation.active, Meter.take
bump, choose, finish, log, fail_step = core.bump, core.choose, core.finish, core.log, core.fail_step
report_progress = core.report_progress
on_aborted, on_cleared, on_finished = core.on_aborted, core.on_cleared, core.on_finished
begin, resume_from = core.Controller.begin, core.resume_from


def left_out(*_: Any) -> None:
    """Nothing happens where the right code does something."""


# -- who may start --------------------------------------------------------------------------------------------------------


def gate_with(t: StreamTurn, **wrong: Any) -> bool:
    """The gate's answer to a view in which some numbers are wrong."""
    assert t.sampler is not None
    return t.sampler.admits(dataclasses.replace(t.view(), **wrong))


def gate_one_batch_late(t: StreamTurn) -> bool:
    return gate_with(t, window=t.settings.window + 1)


def gate_of_version_0(t: StreamTurn) -> bool:
    return gate_with(t, version=0)


def gate_beyond_the_run(t: StreamTurn) -> bool:
    return gate_with(t, last=t.last + t.settings.window)


def gate_counts_first_tokens(t: StreamTurn) -> bool:
    return gate_with(t, running=sum(slot.order < 0 and slot.tokens > 0 for slot in t.buffer.values()))


def always_a_place(t: StreamTurn) -> bool:  # noqa: ARG001 - as the right one is called
    return True


def oldest_makes_room(t: StreamTurn) -> bool:
    complete_groups = [group for group in t.buffer.values() if group.order >= 0]
    if len(t.buffer) >= t.settings.places and complete_groups:
        generation.leave(t, complete_groups[0])
    return len(t.buffer) < t.settings.places


# -- groups ---------------------------------------------------------------------------------------------------------------

LOST_EVERY = 5


def loses_every_fifth(t: StreamTurn, group: Group) -> None:
    """The task of every fifth group crashes when it is complete. Another group takes its place; it never ends."""
    if group.id % LOST_EVERY:
        complete(t, group)
    else:
        generation.leave(t, group)
        t.owed += (Owed(group.target),)


def gives_up_the_last(t: StreamTurn, event: Event) -> None:
    generation.on_completed(t, event)
    group = t.buffer.get(event.group)
    if group is None or group.order >= 0:
        return
    running = [number for number, sample in enumerate(group.samples) if sample.status == RUNNING]
    if len(running) == 1:
        last, replica = running[0], group.samples[running[0]].replica
        generation.change_load(t, replica, -1)
        t.do("cancel", "replica", group=group.id, sample=last, replica=replica)
        generation.complete(t, group.put(last, status=DONE))


def counts_the_failed(t: StreamTurn, event: Event) -> None:
    """A sample that failed counts as complete, without tokens."""
    group = generation.answered(t, event)
    if group is not None:
        generation.change_load(t, group.samples[event.sample].replica, -1)
        group = group.put(event.sample, status=DONE, reward="0")
        t.put(group)
        if all(sample.status == DONE for sample in group.samples):
            generation.complete(t, group)


def forgets_the_attempt(t: StreamTurn, group: Group, number: int) -> None:
    give_up_attempt(t, group.put(number, tokens=0), number)


def restarts_in_flight(t: StreamTurn) -> None:
    """A sync starts every request in flight again, whatever `at_sync` says."""
    hold(t)
    generation.cancel_all(t)


def repeats_the_attempt(t: StreamTurn, group: Group, number: int) -> None:
    """A sample is sent again under the number of the attempt that was given up."""
    give_up_attempt(t, group.put(number, attempt=group.samples[number].attempt - 1), number)


def only_the_busiest(t: StreamTurn) -> list[int]:
    """Requests go to the replica with the most requests in flight."""
    serving = active(t)
    return [max(serving, key=lambda replica: t.replicas[replica].load)] if serving else []


def keeps_the_slot(t: StreamTurn, group: Group) -> None:
    t.buffer = t.buffer.without(group.id)
    t.note("place_back", group=group.id)


def requeues(t: StreamTurn) -> None:
    hold(t)
    for group in list(t.buffer.values()):
        if group.order < 0 and group.ends is None and t.version < t.last:
            generation.doom(t, group, "aborted", f"unfinished at version {t.version}")
            t.owed += (Owed(group.target),)


def ends_as_done(t: StreamTurn, _: str) -> None:
    if not t.ending:
        t.ending = "done"


def drops_stragglers(t: StreamTurn) -> None:
    """The last group of a step is dropped once all the others were taken; the step is trained without it."""
    choose(t)
    if t.step is None or t.step.aborting or len(t.step.groups) != t.need - 1:
        return
    for group in list(t.buffer.values()):
        if group.order < 0 and group.ends is None and group.target == t.version:
            generation.doom(t, group, "dropped", "too slow")
            t.shrunk = t.shrunk.plus(t.version)
            t.news = True


LONG = 24  # tokens of a sample after which its group is replaced


def replaces_long_groups(t: StreamTurn, event: Event) -> None:
    generation.on_tokens(t, event)
    group = t.buffer.get(event.group)
    if group is not None and group.samples[event.sample].tokens > LONG:
        generation.doom(t, group, "replaced", "too long")


TOO_EARLY = dataclasses.replace(
    SAMPLERS["windowed"],
    evicts=lambda view: tuple(slot.id for slot in view.ready() if slot.version < view.version - view.window + 1),
)
EVICTS_TOO_EARLY = {**SAMPLERS, "windowed": TOO_EARLY}

FRESHEST = dataclasses.replace(
    SAMPLERS["ready-first"],
    selects=lambda view: tuple(slot.id for slot in sorted(view.ready(), key=lambda slot: -slot.order)),
)
FRESHEST_FIRST = {**SAMPLERS, "ready-first": FRESHEST}

# -- steps and versions ---------------------------------------------------------------------------------------------------


def trainer_waits_for_all(t: StreamTurn) -> tuple[int, int]:
    most = t.need - (0 if t.step is None else len(t.step.groups))
    return most, most


def update_per_chunk(t: StreamTurn, step: OpenStep) -> int:
    return step.chunk_end(step.finished) if step.finished < len(step.groups) else t.need


def bumps_twice(t: StreamTurn, step: OpenStep) -> None:
    bump(t, step)
    t.version += 1


def bumps_on_abort(t: StreamTurn, step: OpenStep) -> None:
    on_aborted(t, step)
    t.version += 1
    t.note("bumped", version=t.version, updates=t.updates, step=step.id)


def retries_once_more(t: StreamTurn, why: str) -> None:
    """Off by one: the first retry is not counted."""
    first = not t.retried and not t.counts.get("retried", 0)
    fail_step(t, why)
    t.retried -= first


def no_abort(t: StreamTurn, step: OpenStep) -> None:
    """The step is closed here but stays open on the trainer."""
    on_aborted(t, dataclasses.replace(step, aborting=True, finishing=False))


def clears_with_the_finish(t: StreamTurn) -> None:
    before = t.step
    finish(t)
    if before is not None and t.step is not None and t.step.finishing and not before.finishing:
        finish_order = t.commands.pop()
        fed = before.groups[before.finished : before.fed]
        t.clearing = t.clearing.put((before.id, before.update), fed)
        t.do("clear", "trainer", step=before.id, update=before.update, groups=core.ids(fed))
        t.commands.append(finish_order)


def cleared_already(t: StreamTurn, step: OpenStep) -> None:
    on_finished(t, step)
    t.clearing = t.clearing.without((step.id, step.update))
    t.commands = [command for command in t.commands if command.name != "clear"]


def bumps_when_cleared(t: StreamTurn, event: Event, failed: bool) -> None:
    on_cleared(t, event, failed)
    if not failed and t.step is not None and t.step.finished == t.need:
        bump(t, t.step)


def skips_every_fifth(t: StreamTurn, name: str, to: str, **ids: Any) -> None:
    if name == "microbatch":
        ids["groups"] = tuple(group for group in ids["groups"] if group % LOST_EVERY)
    do(t, name, to, **ids)


def pretends_the_finish(t: StreamTurn) -> None:
    finish(t)
    if t.step is not None and t.step.finishing:
        t.commands.pop()
        on_finished(t, t.step)


def resumes_with_the_first(t: StreamTurn, event: Event) -> None:
    generation.on_published(t, event)
    if t.held:
        generation.resume_dispatch(t)


def logs_the_version_before(t: StreamTurn, step: OpenStep, chosen: tuple[Group, ...], during: int) -> None:
    log(t, step, chosen, max(0, during - 1))


def reports_complete_steps(t: StreamTurn) -> None:
    before = len(t.commands)
    report_progress(t)
    t.commands[before:] = [
        Command(report.name, report.to, report.pipeline, completed=report.target, target=report.target)
        for report in t.commands[before:]
    ]


# -- resume ---------------------------------------------------------------------------------------------------------------


def prompts_ahead(state: StreamState) -> Resume:
    start = resume_from(state)
    return dataclasses.replace(start, next=start.next + 1, open=())


def all_prompts_again(state: StreamState) -> Resume:
    return dataclasses.replace(resume_from(state), next=0, open=())


def counts_from_zero(controller: core.Controller) -> tuple[StreamState, tuple[Command, ...]]:
    state, commands = begin(controller)
    object.__setattr__(state, "accepted", 0)
    return state, commands


# -- seconds --------------------------------------------------------------------------------------------------------------


def counts_syncs_as_waiting(meter: Meter) -> dict[str, float]:
    seconds = take(meter)
    return {**seconds, "sync": 0.0, "exposed_generation": seconds["exposed_generation"] + seconds["sync"]}


def counts_no_idle_replica(meter: Meter) -> dict[str, float]:
    return {**take(meter), "replicas_idle": 0.0}


# -- ports and ends -------------------------------------------------------------------------------------------------------


def waits_for_the_trainer(ranks: Any, seconds: float) -> None:
    """Blocks on the trainer instead of waiting for the first event."""
    ranks.start()
    trainer = ranks.busy.get("trainer")
    flying = [pending for pending, _, _ in ranks.flying.values()]
    if not ranks.arrived:
        ranks.drive.wait(
            [trainer] if trainer else flying, timeout_s=ranks.drive.config.deadline_s if trainer else seconds
        )


def never_stuck(t: StreamTurn) -> bool:  # noqa: ARG001 - as above
    """It never checks whether the data has ended."""
    return False


def ends_with_the_logger(t: StreamTurn, event: Event) -> None:
    generation.end_with_error(t, f"the logger raised: {event.why}")


# The controller's table of rules by event, with one of them wrong.
HANDLERS_REPLACE_LONG_GROUPS = {**core.HANDLERS, "tokens": replaces_long_groups}
HANDLERS_GIVE_UP_THE_LAST = {**core.HANDLERS, "completed": gives_up_the_last}
HANDLERS_RESUME_WITH_THE_FIRST = {**core.HANDLERS, "published": resumes_with_the_first}
HANDLERS_COUNT_THE_FAILED = {**core.HANDLERS, "failed": counts_the_failed}
HANDLERS_END_WITH_THE_LOGGER = {**core.HANDLERS, "logger_failed": ends_with_the_logger}
