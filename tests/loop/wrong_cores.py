"""Planners, desks, controllers and samplers with one bug each, and right ones in other styles. `kit explore` must tell them apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kit.labs.share.desk import desk_settings
from kit.loop.messages import Command, Event
from kit.share.core import Scheduler
from kit.share.planner import PLANNERS, View, gap_ratio
from kit.share.state import DeskState
from kit.stream import core
from kit.stream.core import Controller
from kit.stream.generation import StreamTurn
from kit.stream.settings import Resume
from tests.stream.test_foreign import Windowed

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


def plans_for_three(view: View) -> None:
    """Does not see the pipelines after the third."""
    later = {name: view.shares.pop(name) for name in [*view.shares][3:]}
    gap_ratio(view)
    view.shares |= later


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


class JoinsTwice(Scheduler):
    """Says of each replica twice that it serves."""

    def step(self, state: DeskState, event: Event) -> tuple[DeskState, tuple[Command, ...]]:
        state, commands = super().step(state, event)
        return state, (*commands, *(command for command in commands if command.name == "joined"))


class NeverAdmitsLate(Scheduler):
    """Admits nobody who has waited as long as one may."""

    def step(self, state: DeskState, event: Event) -> tuple[DeskState, tuple[Command, ...]]:
        state, commands = super().step(state, event)
        late = event.name == "alarm"
        return state, tuple(command for command in commands if not (late and command.name == "admitted"))


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


def joins_twice(config: Any) -> Scheduler:
    return JoinsTwice(desk_settings(config), desk="desk")


def never_admits_late(config: Any) -> Scheduler:
    return NeverAdmitsLate(desk_settings(config), desk="desk")


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


class IgnoresFloor(Controller):
    """A step shrinks to one group, whatever `floor` says."""

    def __init__(self, plan: Any, start: Any = None) -> None:
        super().__init__(replace(plan, floor=1), pipeline="a", resume=start)


class NeverShrinks(Controller):
    """Ends although a step may lack a group."""

    def __init__(self, plan: Any, start: Any = None) -> None:
        super().__init__(replace(plan, floor=plan.groups), pipeline="a", resume=start)


class ReplacesAlways(Controller):
    """A group that failed is replaced, and no step shrinks."""

    def __init__(self, plan: Any, start: Any = None) -> None:
        shrinks = plan.on_failed == "shrink"
        super().__init__(replace(plan, on_failed="replace") if shrinks else plan, pipeline="a", resume=start)


class RecomputesNothing(Controller):
    """Trains on the log-probabilities that the replicas recorded."""

    def __init__(self, plan: Any, start: Any = None) -> None:
        super().__init__(replace(plan, previous="recorded"), pipeline="a", resume=start)


class LogsNothing(Controller):
    def step(self, state: Any, event: Event) -> tuple[Any, tuple[Command, ...]]:
        state, commands = super().step(state, event)
        return state, tuple(command for command in commands if command.name != "metrics")


def logs_nothing(plan: Any, start: Any = None) -> Controller:
    return LogsNothing(plan, pipeline="a", resume=start)


class ForgetsThePrompt(Controller):
    """A run that was stopped with a prompt at hand resumes without it."""

    def __init__(self, plan: Any, start: Any = None) -> None:
        super().__init__(plan, pipeline="a", resume=start)

    def begin(self) -> tuple[Any, tuple[Command, ...]]:
        state, commands = super().begin()
        return WithoutPrompt(state), commands

    def step(self, state: Any, event: Event) -> tuple[Any, tuple[Command, ...]]:
        after, commands = super().step(state.inner, event)
        return WithoutPrompt(after), commands


class WithoutPrompt:
    """Its state. `inner` is the kit's."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.version, self.step = inner, inner.version, inner.step

    def resume(self) -> Resume:
        start = resume_from(self.inner)
        return replace(start, open=tuple(group for group in start.open if group != self.inner.prompt))


is_stuck, resume_from = core.is_stuck, core.resume_from


def is_stuck_while_it_scores(t: StreamTurn) -> bool:
    step = t.step
    if step is None or not step.scoring:
        return is_stuck(t)
    t.step = replace(step, scoring=())
    stuck = is_stuck(t)
    t.step = step
    return stuck


# -- samplers -----------------------------------------------------------------------------------------------------------------


class LeavesTheLast(Windowed):
    """The last group that it selects stays in its buffer."""

    async def select(self, *, current_train_weight: int, min_prompt_groups: int, max_prompt_groups: int) -> Any:
        ready = [at for at, is_ready in enumerate(self.buffer.ready_list) if is_ready][:max_prompt_groups]
        if len(ready) < min_prompt_groups:
            return None, 0
        metas = [self.buffer.meta_list[at] for at in ready]
        await self.buffer.remove(ready[:-1], remove_in_dp=False)
        return metas[0].concat(*metas[1:]), len(metas)
