"""Planners, desks, controllers and samplers with one bug each, and right ones in other styles. `kit explore` must tell them apart."""

from __future__ import annotations

from typing import Any

from kit.labs.share.drive import desk_settings
from kit.loop.messages import Command, Event
from kit.share.core import Scheduler
from kit.share.planner import PLANNERS, View, gap_ratio
from kit.share.state import DeskState
from kit.stream.core import Controller

# -- planners ---------------------------------------------------------------------------------------------------------------


def never_returns(view: View) -> None:
    while len(view.shares) > 1:
        pass
    gap_ratio(view)


def ignores_tp(view: View) -> None:
    """Takes a replica's device as all of its devices."""
    for share in view.shares.values():
        for replica in [*share.free]:
            if share.is_eligible and share.bundles[replica] & view.idle:
                view.expand(share.name, replica)


def wakes_the_dead(view: View) -> None:
    for share in view.shares.values():
        share.touched.clear()
    gap_ratio(view)


def swaps_at_every_event(view: View) -> None:
    for share in view.shares.values():
        for replica in [*share.active][:1]:
            if len(share.bundles) > 1:
                view.shrink(share.name, replica)
    gap_ratio(view)


def first_come(view: View) -> None:
    """A right one, of other code: whoever came first gets all that is idle; nobody is shrunk unless another has nothing."""
    PLANNERS["fifo"](view)


# -- desks ------------------------------------------------------------------------------------------------------------------


class GrantsTwice(Scheduler):
    def step(self, state: DeskState, event: Event) -> tuple[DeskState, tuple[Command, ...]]:
        state, commands = super().step(state, event)
        return state, (*commands, *(command for command in commands if command.name == "granted"))


class ForgetsRequests(Scheduler):
    """Every third request for devices is not heard."""

    heard = 0

    def step(self, state: DeskState, event: Event) -> tuple[DeskState, tuple[Command, ...]]:
        if event.name == "acquire":
            self.heard += 1
            if self.heard % 3 == 0:
                return state, ()
        return super().step(state, event)


class NeverRests(Scheduler):
    """Sets an alarm for now, at every alarm."""

    def step(self, state: DeskState, event: Event) -> tuple[DeskState, tuple[Command, ...]]:
        state, commands = super().step(state, event)
        again = (Command("after", "clock", self.desk, number=10**6, ms=0),) if event.name == "alarm" else ()
        return state, (*commands, *again)


class Exits(Scheduler):
    """Takes its process with it."""

    def step(self, state: DeskState, event: Event) -> tuple[DeskState, tuple[Command, ...]]:
        import os

        os._exit(7)


def grants_twice(config: Any) -> Scheduler:
    return GrantsTwice(desk_settings(config), desk="desk")


def forgets_requests(config: Any) -> Scheduler:
    return ForgetsRequests(desk_settings(config), desk="desk")


def never_rests(config: Any) -> Scheduler:
    return NeverRests(desk_settings(config), desk="desk")


def exits(config: Any) -> Scheduler:
    return Exits(desk_settings(config), desk="desk")


# -- controllers --------------------------------------------------------------------------------------------------------------


class DropsTheLast(Controller):
    """Asks the trainer to clear, and says that it trained, one group less."""

    def step(self, state: Any, event: Event) -> tuple[Any, tuple[Command, ...]]:
        state, commands = super().step(state, event)
        trained = [command for command in commands if command.name == "trained"]
        return state, tuple(command for command in commands if command not in trained[-1:] or len(trained) == 1)


def drops_the_last(plan: Any, start: Any = None) -> Controller:
    return DropsTheLast(plan, pipeline="a", resume=start)
