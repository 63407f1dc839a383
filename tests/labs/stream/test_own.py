"""User code: a sampler with NeMo-RL's protocol in the lab's own runs, and a ledger that another system wrote."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kit
from docs.examples.own_sampler import InOrder, InOrderFromZero
from kit import cli
from kit.labs.stream.drive import PIPELINE
from kit.loop.messages import Event
from kit.measure import Recorder
from kit.stream.core import Controller, resume_from
from kit.stream.settings import Resume, StreamSettings
from tests.labs.parts import failed, passed, why
from tests.labs.stream.conftest import simulated
from tests.stream.test_foreign import Windowed

ROOT = Path(__file__).parents[3]
OWN = f"{Windowed.__module__}:{Windowed.__qualname__}"


def test_an_own_sampler_passes_the_ledgers_checks() -> None:
    verdict, error = simulated(sampler=OWN, places=16)
    assert error == ""
    assert failed(verdict) == set()
    assert {row.check for row in verdict if row.passed} >= {"every_group_once", "no_sample_too_old", "permits_return"}


@pytest.mark.parametrize("more", [{"batch": 8}, {"window": 0, "at_sync": "recompute"}])
def test_the_examples_controller_passes_its_loops_and_random_worlds(places: None, more: dict[str, Any]) -> None:
    run = kit.run(
        "stream",
        simulated=True,
        worlds=15,
        min_groups=4,
        implementation="docs.examples.own_controller:WholeBatches",
        **more,
    )
    assert failed(run.verdict()) == set()
    answered = {row.check for row in run.verdict() if row.passed}
    assert {"no_world_fails", "resume_equals", "abort_on_failure", "permits_return"} <= answered


def own_controller(plan: StreamSettings, start: Resume | None = None) -> Controller:
    """Stands in for a user's controller; it returns the kit's."""
    return Controller(plan, pipeline=PIPELINE, resume=start)


def test_an_own_controller_is_judged_by_the_ledgers_checks() -> None:
    verdict, error = simulated(implementation=f"{__name__}:own_controller")
    assert error == ""
    assert failed(verdict) == set()


@pytest.mark.parametrize(("sampler", "is_right"), [(InOrder, True), (InOrderFromZero, False)])
def test_an_own_sampler_that_ignores_its_resume_cursor_fails(sampler: type[InOrder], is_right: bool) -> None:
    own = f"{sampler.__module__}:{sampler.__qualname__}"
    verdict, error = simulated(sampler=own, places=16, steps=6)
    assert error == ""
    assert passed(verdict, "resume_equals") is is_right
    assert failed(verdict) == (set() if is_right else {"resume_equals"})
    assert is_right or "started for version 0; the run began at version 3" in why(verdict, "resume_equals")


class Counts(Windowed):
    """Limits how many groups start, batch by batch, and gives up those that are too old."""

    def required_buffer_capacity(self, groups_per_step: int) -> int | None:
        self.batch = groups_per_step
        return super().required_buffer_capacity(groups_per_step)

    def set_dispatch_index(self, resume_from_step: int) -> None:
        self.started = resume_from_step * self.batch

    async def admit(self, *, trainer_version_fn: Callable[[], int]) -> int | None:
        while self.started >= (trainer_version_fn() + self.window + 1) * self.batch:
            await asyncio.sleep(0.005)
        self.started += self.batch
        return None


class CountsFromZero(Counts):
    """Counts from nothing after a resume, as if no group had started."""

    def set_dispatch_index(self, resume_from_step: int) -> None:
        self.started = 0


class ReadyFirst(Counts):
    """Takes whatever is ready, however old."""

    async def evict(self, *, current_train_weight: int) -> int:
        return 0

    def should_abort_inflight(self, *, start_weight_version: int, current_train_weight: int) -> bool:
        return False


class ReadyFirstSaysSo(ReadyFirst):
    limits = "start"


class ReadyFirstFromZero(ReadyFirstSaysSo):
    set_dispatch_index = CountsFromZero.set_dispatch_index


@pytest.mark.parametrize("more", [{}, {"places": 64, "slots": 24, "steps": 8, "tail": True, "window": 2}])
@pytest.mark.parametrize(("sampler", "is_right"), [(Counts, True), (CountsFromZero, False), (Windowed, True)])
def test_a_sampler_that_counts_from_zero_after_a_resume_fails(
    sampler: type[Windowed], is_right: bool, more: dict[str, Any]
) -> None:
    own = f"{sampler.__module__}:{sampler.__qualname__}"
    verdict, error = simulated(sampler=own, worlds=0, **more)
    assert (error, failed(verdict)) == ("", set() if is_right else {"resume_equals"})
    assert is_right or "in the run before it waited at" in why(verdict, "resume_equals")


class TakesNext(InOrder):
    """Fills a step with complete groups that started for the next one."""

    async def select(self, *, current_train_weight: int, min_prompt_groups: int, max_prompt_groups: int) -> Any:
        there = zip(self.buffer.target_step_list, self.buffer.ready_list, strict=True)
        found = [at for at, (target, ready) in enumerate(there) if ready and target <= current_train_weight + 1]
        return await self.take(found, min_prompt_groups, max_prompt_groups)


def test_a_sampler_that_trains_groups_before_their_step_fails() -> None:
    own = f"{TakesNext.__module__}:{TakesNext.__qualname__}"
    verdict, error = simulated(sampler=own, places=16, phases="stream")
    assert error == ""
    assert failed(verdict) == {"order_fair"}
    assert "selected for version 0, but started for version 1" in why(verdict, "order_fair")


TAIL = {"places": 64, "slots": 24, "steps": 8, "tail": True, "worlds": 0, "window": 2}


@pytest.mark.parametrize(
    ("sampler", "too_old", "resumes"),
    [(ReadyFirst, False, True), (ReadyFirstSaysSo, None, True), (ReadyFirstFromZero, None, False)],
)
def test_a_sampler_that_limits_only_which_groups_start_says_so(
    sampler: type[ReadyFirst], too_old: bool | None, resumes: bool
) -> None:
    own = f"{sampler.__module__}:{sampler.__qualname__}"
    verdict, error = simulated(sampler=own, **TAIL)
    assert error == ""
    assert (passed(verdict, "no_sample_too_old"), passed(verdict, "resume_equals")) == (too_old, resumes)
    if sampler is ReadyFirstFromZero:
        assert "started up to version 4; the window allows 28" in why(verdict, "resume_equals")
    if too_old is None:
        assert failed(verdict) == (set() if resumes else {"resume_equals"})


class ByPriority(Windowed):
    """Gives up every fifth group, however young it is: such groups have the lowest priority here."""

    async def evict(self, *, current_train_weight: int) -> int:
        there = zip(self.buffer.meta_list, self.buffer.ready_list, strict=True)
        low = [place for place, (meta, ready) in enumerate(there) if ready and meta.groups[0] % 5 == 4]
        gone = await self.buffer.remove(low, remove_in_dp=True) if low else 0
        return gone + await super().evict(current_train_weight=current_train_weight)


class SaysSo(ByPriority):
    evicts_by = "priority"


@pytest.mark.parametrize(("sampler", "answer"), [(ByPriority, False), (SaysSo, None)])
def test_a_sampler_that_evicts_by_something_else_than_age_says_so(sampler: type[Windowed], answer: bool | None) -> None:
    own = f"{sampler.__module__}:{sampler.__qualname__}"
    verdict, error = simulated(sampler=own, places=16)
    assert error == ""
    assert passed(verdict, "eviction_justified") is answer
    assert failed(verdict) == ({"eviction_justified"} if answer is False else set())
    assert answer is False or "states evicts_by='priority'" in why(verdict, "eviction_justified")


def evicts_too(plan: StreamSettings, start: Resume | None = None) -> Controller:
    """A controller that gives up a group of its own choice, beside those of its sampler."""
    return EvictsToo(plan, pipeline=PIPELINE, resume=start)


class EvictsToo(Controller):
    def step(self, state: Any, event: Event) -> Any:
        if event.name == "chosen" and not event.evicted:
            ready = [group for group, slot in state.buffer.items() if slot.order >= 0 and group % 5 == 4]
            kept = [group for group in ready if str(group) not in str(event.groups)]
            event = Event(event.name, event.pipeline, **{**dict(event.ids), "evicted": tuple(kept[:1])})
        return super().step(state, event)


class NeverCancels(Controller):
    """Lets the requests of groups that were given up run to their end."""

    def step(self, state: Any, event: Event) -> Any:
        state, commands = super().step(state, event)
        return state, tuple(command for command in commands if command.name != "cancel")


def never_cancels(plan: StreamSettings, start: Resume | None = None) -> Controller:
    return NeverCancels(plan, pipeline=PIPELINE, resume=start)


@pytest.mark.parametrize(("controller", "wrong"), [(own_controller, set()), (never_cancels, {"no_needless_waste"})])
def test_requests_of_a_group_that_is_given_up_are_cancelled(controller: Callable[..., Any], wrong: set[str]) -> None:
    windowed = {"sampler": "windowed", "window": 0, "tail": True, "places": 24, "slots": 24, "steps": 3}
    verdict, error = simulated(implementation=f"{__name__}:{controller.__name__}", phases="stream", **windowed)
    assert error == ""
    assert failed(verdict) == wrong


def test_a_group_that_the_sampler_did_not_give_up_is_named() -> None:
    own = f"{SaysSo.__module__}:{SaysSo.__qualname__}"
    verdict, _ = simulated(sampler=own, places=16, implementation=f"{__name__}:evicts_too", steps=8)
    assert passed(verdict, "eviction_justified") is False
    assert "the sampler did not give up this group" in why(verdict, "eviction_justified")


@pytest.mark.slow
@pytest.mark.parametrize(("sampler", "is_right"), [(InOrder, True), (InOrderFromZero, False)])
def test_on_ranks_the_loop_of_an_own_sampler_is_resumed_too(
    on_ranks: Callable[..., kit.Run], sampler: type[InOrder], is_right: bool
) -> None:
    own = f"{sampler.__module__}:{sampler.__qualname__}"
    verdict = on_ranks(sampler=own, places=8, steps=4, phases="stream,resume").verdict()
    assert passed(verdict, "resume_equals") is is_right
    assert failed(verdict) == (set() if is_right else {"resume_equals"})
    assert is_right or "started for version 0; the run began at version 2" in why(verdict, "resume_equals")


class WholeBatches(Controller):
    """Synchronous: a step begins when all its groups are complete."""

    def __init__(self, plan: StreamSettings, start: Resume | None = None) -> None:
        super().__init__(dataclasses.replace(plan, min_groups=plan.groups), pipeline=PIPELINE, resume=start)


@pytest.mark.parametrize(("sampler", "window"), [("strict", 0), ("in-order", 1), ("windowed", 1)])
def test_a_synchronous_controller_passes_where_the_config_has_whole_batches(sampler: str, window: int) -> None:
    own = {"implementation": f"{__name__}:WholeBatches", "sampler": sampler, "window": window}
    verdict, error = simulated(**own, min_groups=4)
    assert (error, failed(verdict)) == ("", set())
    assert passed(verdict, "trains_before_straggler") is None
    verdict, _ = simulated(**own)
    assert failed(verdict) <= {"trains_before_straggler"}
    assert "min_groups=4 if it is to wait for whole batches" in why(verdict, "trains_before_straggler")


class OwnState:
    """A state of another shape than the kit's; `inner` is the kit's."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.version, self.step = inner.version, inner.step


class Resumable(OwnState):
    def resume(self) -> Resume:
        return resume_from(self.inner)


class OwnCore(Controller):
    state: type[OwnState] = OwnState

    def __init__(self, plan: StreamSettings, start: Resume | None = None) -> None:
        super().__init__(plan, pipeline=PIPELINE, resume=start)

    def begin(self) -> Any:
        state, commands = super().begin()
        return self.state(state), commands

    def step(self, state: Any, event: Event) -> Any:
        inner, commands = super().step(state.inner, event)
        return self.state(inner), commands


class ResumableCore(OwnCore):
    state = Resumable


def test_a_state_of_another_shape_resumes_by_its_own_method() -> None:
    verdict, error = simulated(implementation=f"{__name__}:ResumableCore")
    assert (error, failed(verdict)) == ("", set())
    assert passed(verdict, "resume_equals") is True


def test_a_state_that_cannot_be_resumed_is_refused_with_what_it_lacks() -> None:
    verdict, error = simulated(implementation=f"{__name__}:OwnCore")
    assert "state (OwnState) has no updates, steps, buffer, owed, prompt, counts" in error
    assert "a method resume()" in error
    assert failed(verdict) == set()


@pytest.mark.slow
def test_an_own_trainer_and_an_own_transport_take_part_in_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    own = {"trainer": "docs.examples.step_trainer:Adapter", "transport": "docs.examples.shared_transport:Shared"}
    run = kit.run("stream", device="cpu", steps=2, phases="plain,lockstep,stream,verify", **own)
    verdict = run.verdict()
    assert failed(verdict) == set()
    assert passed(verdict, "equals_plain")
    assert passed(verdict, "stamps_true")


def test_a_trainer_that_is_not_there_is_refused_before_ranks_start() -> None:
    with pytest.raises(kit.BadInput, match="no_such_module"):
        kit.lab("stream", trainer="no_such_module:Trainer")


def test_what_is_no_sampler_is_refused_before_ranks_start() -> None:
    with pytest.raises(kit.BadInput, match="the sampler json:loads lacks admit, select"):
        kit.lab("stream", sampler="json:loads")


def test_a_ledger_of_another_system_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = ROOT / "docs" / "examples" / "ledger.py"
    subprocess.run([sys.executable, example, tmp_path / "ledger"], check=True, timeout=60)
    assert cli.main(["check", str(tmp_path / "ledger"), "--lab", "stream"]) == 0
    assert "pass  every_group_once" in capsys.readouterr().out


def test_what_a_ledger_leaves_out_is_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The three events that docs/ledger.md calls enough: no end, no requests, no tokens."""
    with Recorder(tmp_path / "run") as recorder:
        recorder.event("capacity", window=1, group=1)
        for group in range(4):
            recorder.event("completed", group=group, sample=0, version=group)
            recorder.event("trained", group=group, version=group)
    assert cli.main(["check", str(tmp_path / "run"), "--lab", "stream", "--json"]) == 0
    rows = {row["check"]: row for row in json.loads(capsys.readouterr().out)["verdict"]}
    assert rows["no_sample_too_old"]["passed"] is True
    for check, event in {"no_deadlock": "ended", "replicas_answer": "sent", "no_length_bias": "tokens"}.items():
        assert (rows[check]["passed"], rows[check]["why"]) == (None, f"not measured: the ledger has no `{event}` event")
