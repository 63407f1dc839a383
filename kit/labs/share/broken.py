"""The faults that show on simulated ranks: those of the desk, each with scripted pipelines that expose it (`kit.share.broken`), and
single rules of the pipelines under it, each with one bug."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest.mock import patch

from kit.loop.messages import Command, Event
from kit.share import broken as desks
from kit.share import core
from kit.share.broken import Scenario, Swap, handles
from kit.share.member import Joined, Member
from kit.stream import core as stream
from kit.stream import generation
from kit.stream.generation import fail

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kit.share.core import Scheduler
    from kit.share.state import State, Turn
    from kit.stream.generation import Turn as Loop


@contextlib.contextmanager
def switched_on(fault: str | None) -> Iterator[None]:
    """The fault's rules in place of the right ones."""
    with contextlib.ExitStack() as scope:
        for swap in (*SWAPS.get(fault, ()), *(desks.FAULTS[fault].swaps if fault in DESKS else ())):
            scope.enter_context(patch.object(*swap))
        yield


def scenarios(fault: str | None) -> list[Scenario]:
    """What exposes a fault of the desk; without one, all of them. A fault of a pipeline shows in the lab's own loops."""
    if fault is None:
        return list({id(one.scenario): one.scenario for one in desks.FAULTS.values()}.values())
    return [desks.FAULTS[fault].scenario] if fault in DESKS else []


# -- routing ----------------------------------------------------------------------------------------------------------------

NOBODY = -1
on_left, send = generation.on_left, generation.send
begin, member_step, desk_step = Member.begin, Member.step, core.Scheduler.step


def routes_by_an_old_set(t: Loop, event: Event) -> None:
    """Requests are sent again by the set of replicas before the shrink, in which the sleeper looks idle. They are taken back later."""
    there = t.replicas
    on_left(t, event)
    if event.replica in there:
        t.replicas = there.put(event.replica, replace(there[event.replica], load=-1))
        send(t)
        on_left(t, event)


def shrinks_first(member: Member, state: Joined, event: Event) -> tuple[Joined, tuple[Command, ...]]:
    """The replica may sleep before its pipeline routes elsewhere."""
    state, commands = member_step(member, state, event)
    shrinks = tuple(one for one in commands if one.name == "shrink")
    return state, (*shrinks, *(one for one in commands if one.name != "shrink"))


def refuses_when_empty(t: Loop) -> None:
    """A request that finds no replica is an error."""
    if t.waiting and not t.held and not generation.active(t) and t.version == t.last - 1:
        fail(t, "there is no replica to send a request to")
    send(t)


def forgets_what_was_in_flight(t: Loop, event: Event) -> None:
    """A shrink aborts requests, and nobody hears of it."""
    if event.replica in t.replicas:
        t.replicas = t.replicas.without(event.replica)


def counts_too_early(t: Loop, event: Event) -> None:
    """What is to be taken back was counted before the last request came: that one stays with a replica that sleeps."""
    there = [
        (group.id, number)
        for group in t.buffer.values()
        for number, sample in enumerate(group.samples)
        if sample.in_flight and sample.replica == event.replica
    ]
    for group, number in there[-1:]:
        t.put(t.buffer[group].put(number, replica=NOBODY))
    on_left(t, event)
    for group, number in there[-1:]:
        t.put(t.buffer[group].put(number, replica=event.replica))


# -- the desk and a pipeline's set-up ------------------------------------------------------------------------------------------


def hears_nothing_meanwhile(desk: Scheduler, state: State, event: Event) -> tuple[State, tuple[Command, ...]]:
    """A lock is held until the replicas have answered, and their answers wait for the lock."""
    return (state, ()) if state.plan is not None else desk_step(desk, state, event)


def asks_before_it_is_there(member: Member, state: Joined, event: Event) -> tuple[Joined, tuple[Command, ...]]:
    """The first request goes out before there is anything to route with: the replica that wakes for it finds nobody."""
    if state.core is None and event.name == "admitted":
        return state, (member.ask("acquire", kind="generation", target=1),)
    if state.core is None and event.name == "granted":
        return member.start()
    return member_step(member, state, event)


def ignores(_: Turn, __: Event) -> None:
    """A death that the desk does not handle."""


SWAPS: Mapping[str | None, tuple[Swap, ...]] = {
    "stale-routing": (
        Swap(stream, "HANDLERS", {**stream.HANDLERS, "left": routes_by_an_old_set}),
        Swap(Member, "step", shrinks_first),
    ),
    "raises-when-empty": (Swap(generation, "send", refuses_when_empty),),
    "abort-never-signals": (Swap(stream, "HANDLERS", {**stream.HANDLERS, "left": forgets_what_was_in_flight}),),
    "count-outside-lock": (Swap(stream, "HANDLERS", {**stream.HANDLERS, "left": counts_too_early}),),
    "lock-held-across-call": (Swap(core.Scheduler, "step", hears_nothing_meanwhile),),
    "request-before-shell": (Swap(Member, "step", asks_before_it_is_there),),
    "dead-coordinator": (handles("died", ignores),),
}
DESKS = frozenset(desks.FAULTS)
