"""The core under Hypothesis, which draws settings, the order of answers, failures and replicas that come and go, and shrinks failing
cases.

The state is checked after each event. At the end of each example the run continues until it ends, and the whole is judged and replayed.
"""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import settings as effort
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from kit.stream.core import Controller
from kit.stream.settings import SAMPLERS, StreamSettings
from tests.loop.replaying import replay
from tests.stream.chaos import Chaos, Play

EXAMPLES = 1500
PART = 150  # of these in `make test`


@st.composite
def accepted(draw: st.DrawFn) -> StreamSettings:
    """Draw settings that are not refused."""
    group, groups = draw(st.sampled_from([2, 3])), draw(st.sampled_from([1, 2, 4]))
    sampler = draw(st.sampled_from(sorted(SAMPLERS)))
    window = 0 if sampler == "strict" else draw(st.integers(0, 2))
    return StreamSettings(
        groups=groups,
        group=group,
        min_groups=draw(st.integers(1, groups)),
        train_global_batch_size=group * draw(st.sampled_from([one for one in (1, 2, 4) if groups % one == 0])),
        window=window,
        sampler=sampler,
        places=groups * (window + 1) + draw(st.sampled_from([0, 3])),
        slots=draw(st.integers(1, 9)),
        steps=draw(st.integers(1, 4)),
        replicas=draw(st.integers(1, 3)),
        at_sync=draw(st.sampled_from(["keep", "recompute", "abort", "drain"])),
        on_failed=draw(st.sampled_from(["stop", "replace", "shrink"])),
        on_dead_replica=draw(st.sampled_from(["stop", "go-on"])),
        step_retries=draw(st.sampled_from([0, 2])),
        filter=draw(st.booleans()),
        previous=draw(st.sampled_from(["recomputed", "recorded", "off"])),
        reference=draw(st.sampled_from(["recomputed", "off"])),
    )


class Loop(RuleBasedStateMachine):
    """One run. Pending answers are chosen by position, in the order in which they began."""

    play: Play

    @initialize(plan=accepted(), seed=st.integers(0, 999), prompts=st.sampled_from([40, 6, 4]), odd=st.booleans())
    def begin(self, plan: StreamSettings, seed: int, prompts: int, odd: bool) -> None:
        crash = 0.15 if plan.on_failed != "stop" and odd else 0.0
        self.plan = plan
        self.play = Play(plan, Chaos(seed, prompts, flat=0.3 if plan.filter else 0.1, empty=0.1, crash=crash))

    @property
    def goes_on(self) -> bool:
        return not self.play.state.closed

    @rule(places=st.lists(st.integers(0, 30), min_size=1, max_size=8))
    def answer(self, places: list[int]) -> None:
        """Deliver some pending answers; none once the run has ended."""
        for place in places:
            if self.goes_on:
                live = self.play.chaos.live()
                self.play.step(self.play.chaos.take(live[place % len(live)]))

    @precondition(lambda self: self.goes_on and self.play.chaos.fail_at is None)
    @rule(later=st.integers(0, 20))
    def fail(self, later: int) -> None:
        """Let one command of the run fail."""
        self.play.chaos.fail_at = self.play.chaos.sent + later

    @precondition(lambda self: self.goes_on and self.plan.on_dead_replica == "go-on")
    @rule(seed=st.integers(0, 99))
    def come_or_go(self, seed: int) -> None:
        self.play.chaos.random = random.Random(seed)
        self.play.step(self.play.chaos.come_or_go())

    def teardown(self) -> None:
        if hasattr(self, "play"):
            done = self.play.finish()
            assert replay(Controller(self.plan), done.events)[1] == done.commands


def explore(examples: int, **more: Any) -> None:
    """Explore the same examples in every run: a failure that comes and goes helps nobody."""
    run_state_machine_as_test(
        Loop,
        settings=effort(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=[*HealthCheck],
            **more,
        ),
    )


@pytest.mark.slow
def test_no_order_of_answers_loses_a_permit() -> None:
    explore(PART)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_orders_of_answers_lose_no_permit() -> None:
    explore(EXAMPLES)


def test_a_bug_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: groups that end do not give their place back."""
    from kit.stream import generation
    from kit.stream.generation import Group, StreamTurn

    def forgets(t: StreamTurn, group: Group) -> None:
        t.buffer = t.buffer.without(group.id)
        if group.order < 0:
            t.unfinished -= 1
            t.note("slot_back", group=group.id)

    monkeypatch.setattr(generation, "leave", forgets)
    with pytest.raises(AssertionError):
        explore(PART, phases=(Phase.generate,))  # find it without shrinking
