"""How groups leave: to the trainer, back from it, or by an end. Every group ends exactly once, and its permits go with it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kit.loop.messages import Map
from kit.stream.state import CANCELLING, DONE, RUNNING, WAITING, Owed

if TYPE_CHECKING:
    from kit.stream.state import Group, Turn


def fail(t: Turn, why: str) -> None:
    """End the run with an error. The first error stays; what fails on the way out never hides it."""
    if not t.error:
        t.error = why
        t.ending = "error"


def leave(t: Turn, group: Group) -> None:
    """Give back the place, and the slot of an unfinished group."""
    t.buffer = t.buffer.without(group.id)
    t.note("place_back", group=group.id)
    if group.order < 0:
        t.unfinished -= 1
        t.note("slot_back", group=group.id)


def discard(t: Turn, group: Group) -> None:
    """The rows of a group that will not be trained: those of its complete samples are dropped. Nobody waits for it."""
    if any(sample.length for sample in group.samples):
        t.do("discard", "trainer", group=group.id)


def end(t: Turn, group: Group, how: str, why: str) -> None:
    """End a group otherwise than trained."""
    if group.id in t.buffer:
        leave(t, group)
    discard(t, group)
    t.note(how, group=group.id, why=why, version=t.version)
    t.count(how)
    t.count("wasted", group.tokens)


def doom(t: Turn, group: Group, how: str, why: str) -> None:
    """An unfinished group will end: cancel what is in flight of it, and end it when nothing is."""
    if group.ends is not None:
        return
    for number, sample in enumerate(group.samples):
        if sample.status == RUNNING:
            group = group.put(number, status=CANCELLING)
            t.do("cancel", "replica", group=group.id, sample=number, replica=sample.replica)
        elif sample.status == WAITING:
            group = group.put(number, status=DONE)
    t.waiting = tuple(one for one in t.waiting if one[0] != group.id)
    group = replace(group, ends=(how, why))
    t.put(group)
    end_if_idle(t, group)


def end_if_idle(t: Turn, group: Group) -> None:
    """End a doomed group, once nothing of it is in flight. One to be replaced ends when another takes over its part of the batch."""
    if group.ends is None or group.in_flight:
        return
    how, why = group.ends
    if how == "replaced" and not t.ending:
        leave(t, group)
        discard(t, group)
        t.owed += (Owed(group.target, group),)
    else:
        end(t, group, "failed" if how == "replaced" else how, why)


def complete(t: Turn, group: Group) -> None:
    """All samples of a group are there: it gives its slot back and can be selected, or is filtered out and made up for."""
    group = replace(group, order=t.completed)
    if group.oldest < 0:  # no token at all
        group = replace(group, oldest=group.version, newest=group.version)
    t.put(group)
    t.completed += 1
    t.failed_in_a_row = 0
    t.accepted += 1
    t.unfinished -= 1
    t.note("slot_back", group=group.id)
    t.note("ready", group=group.id, version=group.oldest, newest=group.newest)
    t.news = True
    if not group.varies:
        t.count("flat")
        if t.settings.filter:
            t.accepted -= 1
            t.note("filtered", group=group.id)
            end(t, group, "dropped", "no variance")
            t.owed += (Owed(group.target),)


def put_back(t: Turn) -> None:
    """The groups of a step that was given up retake their places, before any new dispatch; where none is free a group ends."""
    assert t.step is not None
    for group in t.step.groups[t.step.finished :]:
        if len(t.buffer) < t.settings.places:
            t.put(group)
            t.note("place", group=group.id)
        else:
            end(t, group, "aborted", f"step {t.step.id} was given up and no place is free")
            if not t.ending:
                t.owed += (Owed(group.target),)
    t.buffer = Map(sorted(t.buffer.items()))
    t.step = None
    t.news = True
