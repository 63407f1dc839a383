"""The faults of the controller and its ports: single rules of `kit.stream`, each with one bug, for the phase `stream`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

from kit.loop.messages import Command, Event, listed, numbers
from kit.stream import core, generation
from kit.stream.generation import DONE, RUNNING, Group, Owed, State, Step, Turn
from kit.stream.settings import SAMPLERS, Resume


@contextlib.contextmanager
def switched_on(fault: str | None) -> Iterator[None]:
    with contextlib.ExitStack() as scope:
        for place, wrong in SWAPS.get(fault, {}).items():
            scope.enter_context(patch(f"kit.{place}", wrong))
        yield


def handles(event: str, wrong: Callable[[Turn, Event], None]) -> dict[str, Any]:
    return {"stream.core.HANDLERS": {**core.HANDLERS, event: wrong}}


# -- who may start --------------------------------------------------------------------------------------------------------


def gate(wrong: Callable[[Turn], dict[str, Any]]) -> dict[str, Any]:
    def is_open(t: Turn) -> bool:
        assert t.sampler is not None
        return t.sampler.admits(dataclasses.replace(t.view(), **wrong(t)))

    return {"stream.generation.gate_is_open": is_open}


def running_with_tokens(t: Turn) -> dict[str, Any]:
    return {"running": sum(slot.order < 0 and slot.tokens > 0 for slot in t.buffer.values())}


def oldest_makes_room(t: Turn) -> bool:
    complete = [group for group in t.buffer.values() if group.order >= 0]
    if len(t.buffer) >= t.settings.places and complete:
        generation.leave(t, complete[0])
    return len(t.buffer) < t.settings.places


# -- groups ---------------------------------------------------------------------------------------------------------------

LOST_EVERY = 5


def loses_some(t: Turn, group: Group) -> None:
    """The task of every fifth group crashes when it is complete. Another group takes its place; it never ends."""
    if group.id % LOST_EVERY:
        complete(t, group)
    else:
        generation.leave(t, group)
        t.owed += (Owed(group.target),)


def gives_up_the_last(t: Turn, event: Event) -> None:
    generation.on_completed(t, event)
    group = t.buffer.get(event.group)
    left = [] if group is None else [number for number, one in enumerate(group.samples) if one.status == RUNNING]
    if group is not None and group.order < 0 and len(left) == 1:
        generation.load(t, group.samples[left[0]].replica, -1)
        t.do("cancel", "replica", group=group.id, sample=left[0], replica=group.samples[left[0]].replica)
        generation.complete(t, group.put(left[0], status=DONE))


give_up_attempt, complete = generation.give_up_attempt, generation.complete


def forgets_the_attempt(t: Turn, group: Group, number: int) -> None:
    give_up_attempt(t, group.put(number, tokens=0), number)


def keeps_the_slot(t: Turn, group: Group) -> None:
    t.buffer = t.buffer.without(group.id)
    t.note("place_back", group=group.id)


def requeues(t: Turn) -> None:
    hold(t)
    for group in list(t.buffer.values()):
        if group.order < 0 and group.ends is None and t.version < t.last:
            generation.doom(t, group, "aborted", f"unfinished at version {t.version}")
            t.owed += (Owed(group.target),)


FRESHEST_FIRST = dataclasses.replace(
    SAMPLERS["ready-first"],
    selects=lambda view: tuple(slot.id for slot in sorted(view.ready(), key=lambda slot: -slot.order)),
)

# -- steps and versions ---------------------------------------------------------------------------------------------------

bump, finish, hold = core.bump, core.finish, generation.hold
log, on_aborted, on_cleared, on_finished = core.log, core.on_aborted, core.on_cleared, core.on_finished


def waits_for_all(t: Turn) -> tuple[int, int]:
    most = t.need - (0 if t.step is None else len(t.step.groups))
    return most, most


def update_per_chunk(t: Turn, step: Step) -> int:
    return step.chunk_end(step.finished) if step.finished < len(step.groups) else t.need


def bumps_twice(t: Turn, step: Step) -> None:
    bump(t, step)
    t.version += 1


def bumps_on_abort(t: Turn, step: Step) -> None:
    on_aborted(t, step)
    t.version += 1
    t.note("bumped", version=t.version, updates=t.updates, step=step.id)


def no_abort(t: Turn, step: Step) -> None:
    """The step is closed here but stays open on the trainer."""
    on_aborted(t, dataclasses.replace(step, aborting=True, finishing=False))


def clears_with_the_finish(t: Turn) -> None:
    before = t.step
    finish(t)
    if before is not None and t.step is not None and t.step.finishing and not before.finishing:
        ordered = t.commands.pop()
        clear(t, before)
        t.commands.append(ordered)


def clear(t: Turn, step: Step) -> None:
    mine = step.groups[step.finished : step.fed]
    t.clearing = t.clearing.put((step.id, step.update), mine)
    t.do("clear", "trainer", step=step.id, update=step.update, groups=core.ids(mine))


def cleared_already(t: Turn, step: Step) -> None:
    on_finished(t, step)
    t.clearing = t.clearing.without((step.id, step.update))
    t.commands = [command for command in t.commands if command.name != "clear"]


def bumps_when_cleared(t: Turn, event: Event, failed: bool) -> None:
    on_cleared(t, event, failed)
    if not failed and t.step is not None and t.step.finished == t.need:
        bump(t, t.step)


do = Turn.do


def skips_some(t: Turn, name: str, to: str, **ids: Any) -> None:
    if name == "microbatch":
        ids["groups"] = listed(group for group in numbers(ids["groups"]) if group % LOST_EVERY)
    do(t, name, to, **ids)


def pretends_the_finish(t: Turn) -> None:
    finish(t)
    if t.step is not None and t.step.finishing:
        t.commands.pop()
        on_finished(t, t.step)


def resumes_with_the_first(t: Turn, event: Event) -> None:
    generation.on_published(t, event)
    if t.held:
        generation.resume(t)


def logs_the_version_before(t: Turn, step: Step, chosen: tuple[Group, ...], during: int) -> None:
    log(t, step, chosen, max(0, during - 1))


# -- resume ---------------------------------------------------------------------------------------------------------------

begin, resume_from = core.Controller.begin, core.resume_from


def all_prompts_again(state: State) -> Resume:
    return dataclasses.replace(resume_from(state), next=0, open=())


def counts_from_zero(controller: core.Controller) -> tuple[State, tuple[Command, ...]]:
    state, commands = begin(controller)
    object.__setattr__(state, "accepted", 0)
    return state, commands


# -- ports ----------------------------------------------------------------------------------------------------------------


def waits_for_the_trainer(ranks: Any, seconds: float) -> None:
    """Blocks on the trainer instead of waiting for the first event."""
    ranks.start()
    trainer = ranks.busy.get("trainer")
    flying = [pending for pending, _, _ in ranks.flying.values()]
    if not ranks.arrived:
        ranks.drive.wait(
            [trainer] if trainer else flying, timeout_s=ranks.drive.config.deadline_s if trainer else seconds
        )


# -- ends -----------------------------------------------------------------------------------------------------------------


def ends_with_the_logger(t: Turn, event: Event) -> None:
    generation.fail(t, f"the logger raised: {event.why}")


# By fault: replacements of functions or values, by their name under `kit`.
SWAPS: Mapping[str | None, Mapping[str, Any]] = {
    "off-by-one-window": gate(lambda t: {"window": t.settings.window + 1}),
    "gate-never-opens": gate(lambda _: {"version": 0}),  # it never learns of a new version
    "gate-checked-early": gate(running_with_tokens),
    "unbounded-buffer": {"stream.generation.place_is_free": lambda _: True},
    "drops-oldest": {"stream.generation.place_is_free": oldest_makes_room},
    "lost-group": {"stream.generation.complete": loses_some},
    "partial-group": handles("completed", gives_up_the_last),
    "uncounted-partial": {"stream.generation.give_up_attempt": forgets_the_attempt},
    "slot-leak": {"stream.generation.leave": keeps_the_slot},
    "discard-and-requeue": {"stream.core.hold": requeues},
    "freshest-first-starves": {"stream.core.SAMPLERS": {**SAMPLERS, "ready-first": FRESHEST_FIRST}},
    "waits-for-all": {"stream.core.limits": waits_for_all},
    "finish-per-chunk": {"stream.core.boundary": update_per_chunk},
    "double-bump": {"stream.core.bump": bumps_twice},
    "bump-on-abort": {"stream.core.on_aborted": bumps_on_abort},
    "no-abort": {"stream.core.abort": no_abort},
    "cleared-before-finish": {
        "stream.core.finish": clears_with_the_finish,
        "stream.core.on_finished": cleared_already,
    },
    "clear-fails-after-finish": {
        "stream.core.bump": lambda *_: None,  # the version waits for the rows to be cleared
        "stream.core.on_cleared": bumps_when_cleared,
    },
    "resumes-too-early": handles("published", resumes_with_the_first),
    "caught-up-too-late": {"stream.core.log": logs_the_version_before},
    "blocks-the-loop": {"labs.stream.drive.Ranks.wait": waits_for_the_trainer},
    "logger-raises": handles("logger_failed", ends_with_the_logger),
    "resume-replays": {"stream.core.resume_from": all_prompts_again},
    "accepted-from-zero": {"stream.core.Controller.begin": counts_from_zero},
    "marks-untrained": {"stream.generation.Turn.do": skips_some},
    "bumps-unfinished": {"stream.core.finish": pretends_the_finish},
    "waits-at-the-end": {"stream.core.is_stuck": lambda _: False},  # never checks whether the data has ended
}
# Further arguments of `kit.labs.stream.drive.run_simulated` that a fault needs to show.
CONDITIONS: Mapping[str | None, Mapping[str, Any]] = {
    "clear-fails-after-finish": {"fails": {"clear": 2}},
    "waits-at-the-end": {"prompts": 8},
}
