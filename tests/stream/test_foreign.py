"""Samplers with NeMo-RL's protocol, written as their users write them, behind the adapter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from docs.examples.own_sampler import InOrder
from kit.errors import BadInput, KitError
from kit.loop.messages import Command, Event, Memory
from kit.loop.runner import CoreRaised
from kit.results.records import Row
from kit.stream.core import Controller, resume_from
from kit.stream.ports import Buffer, BufferSlot, Foreign, Meta
from kit.stream.settings import StreamSettings
from kit.stream.simulated import Durations, simulate
from tests.loop.replaying import replay_rows
from tests.stream.driver import Driver, small, train_step


class Windowed(InOrder):
    """No gate; groups that started too long ago are dropped or aborted."""

    def __init__(self, buffer: Buffer, *, max_staleness_versions: int) -> None:
        super().__init__(buffer, max_lookahead_versions=max_staleness_versions)

    def required_buffer_capacity(self, groups_per_step: int) -> int | None:
        return None

    async def admit(self, *, trainer_version_fn: Callable[[], int]) -> int | None:
        return None

    async def select(self, *, current_train_weight: int, min_prompt_groups: int, max_prompt_groups: int) -> Any:
        found = [at for at, ready in enumerate(self.buffer.ready_list) if ready]
        return await self.take(found, min_prompt_groups, max_prompt_groups)

    async def evict(self, *, current_train_weight: int) -> int:
        there = zip(self.buffer.start_weight_list, self.buffer.ready_list, strict=True)
        old = [at for at, (start, ready) in enumerate(there) if ready and start < current_train_weight - self.window]
        return await self.buffer.remove(old, remove_in_dp=True) if old else 0

    def should_abort_inflight(self, *, start_weight_version: int, current_train_weight: int) -> bool:
        return start_weight_version < max(0, current_train_weight - self.window)


SETTINGS = StreamSettings(steps=5, sampler="mine:InOrder", previous="off")


def trained(rows: Memory) -> list[Any]:
    return [(row.ids["group"], row.ids["step"], row.ids["version"]) for row in rows if row.event == "trained"]


def test_their_in_order_decides_what_ours_decides() -> None:
    theirs = simulate(SETTINGS, sampler=InOrder)
    ours = simulate(replace(SETTINGS, sampler="in-order"))
    assert theirs.ended.why == "done"
    assert trained(theirs.rows) == trained(ours.rows)
    targets = [row.ids["target"] for row in theirs.rows if row.event == "reserved"]
    assert targets[:16] == [0] * 8 + [1] * 8


def test_groups_that_are_not_in_the_buffer_cannot_be_taken_out() -> None:
    buffer = Buffer()
    buffer.slots = [BufferSlot(group=number, start=0, target=0) for number in range(3)]
    assert asyncio.run(buffer.remove([-1, 0], remove_in_dp=True)) == 2
    assert ([slot.group for slot in buffer.slots], sorted(buffer.evicted)) == ([1], [0, 2])
    with pytest.raises(IndexError):
        asyncio.run(buffer.remove([1], remove_in_dp=False))


def test_a_replay_needs_no_sampler() -> None:
    theirs = simulate(SETTINGS, sampler=InOrder)
    assert replay_rows({"": Controller(SETTINGS)}, theirs.rows) is None


def test_their_windowed_drops_and_aborts() -> None:
    settings = replace(SETTINGS, sampler="mine:Windowed", places=24, slots=24, window=0)
    done = simulate(settings, Durations(token_s=0.002), sampler=Windowed)
    assert done.ended.why == "done"
    assert replay_rows({"": Controller(settings)}, done.rows) is None
    ends = {row.event for row in done.rows if "group" in row.ids and "core" not in row.ids}
    assert {"evicted", "aborted"} <= ends
    ready = {row.ids["group"]: row.ids["version"] for row in done.rows if row.event == "ready"}
    assert all(ready[group] == version for group, _, version in trained(done.rows))


def test_the_data_may_end_while_their_gate_is_closed() -> None:
    assert simulate(SETTINGS, sampler=InOrder, prompts=16).ended.why == "exhausted"
    assert "the data ended with" in simulate(SETTINGS, sampler=InOrder, prompts=17).ended.error


class RemovesRows(Windowed):
    """Returns a group whose rows it gives up at once."""

    async def select(self, *, current_train_weight: int, min_prompt_groups: int, max_prompt_groups: int) -> Any:
        meta = Meta((self.buffer.slots[0].group,))
        await self.buffer.remove([0], remove_in_dp=True)
        return meta, {}


def test_a_group_whose_rows_are_gone_cannot_be_trained() -> None:
    port = Foreign(RemovesRows, SETTINGS)
    port.see(Row(metric="reserved", time=0.0, ids={"group": 0, "version": 0}))
    with pytest.raises(KitError, match="returned group 0 and removed its rows"):
        port.send(Command("select", "sampler", version=0, least=1, most=1))
    port.close()


class OneByOne(Windowed):
    """Admits a group while the buffer has none, and evicts what it has."""

    async def admit(self, *, trainer_version_fn: Callable[[], int]) -> int | None:
        while len(self.buffer):
            await asyncio.sleep(0.005)
        return None

    async def evict(self, *, current_train_weight: int) -> int:
        return await self.buffer.remove(range(len(self.buffer)), remove_in_dp=True)


@pytest.mark.parametrize("room", ["evicted", "failed"])
def test_an_admission_may_wait_for_room_in_the_buffer(room: str) -> None:
    port = Foreign(OneByOne, SETTINGS)
    port.see(Row(metric="reserved", time=0.0, ids={"group": 0, "version": 0}))
    port.send(Command("admit", "sampler"))
    assert not port.take()
    if room == "failed":
        port.see(Row(metric="failed", time=0.0, ids={"group": 0}))
    else:
        port.send(Command("select", "sampler", version=0, least=1, most=1))
    assert [event.name for event in port.take()] == ["admitted"]
    port.close()


def test_a_step_that_was_given_up_comes_back_into_their_buffer() -> None:
    settings = replace(SETTINGS, step_retries=1, min_groups=8, steps=2)
    plain = simulate(settings, sampler=InOrder)
    begins = [row for row in plain.rows if row.ids.get("to") not in (None, "runner", "log", "sampler")]
    number = next(at for at, row in enumerate(begins) if row.event == "microbatch")
    done = simulate(settings, sampler=InOrder, fail_at={number: "injected"})
    assert (done.ended.why, done.ended.retried) == ("done", 1)
    assert [group for group, _, _ in trained(done.rows)] == [group for group, _, _ in trained(plain.rows)]


def test_groups_that_were_chosen_for_a_step_that_was_given_up_meanwhile_stay_in_the_buffer() -> None:
    driver = Driver(small(sampler="mine:Sampler", min_groups=1, step_retries=1))
    driver.event("admitted", target=-1)
    driver.event("admitted", target=-1)
    driver.finish_group(0)
    driver.asked.remove(driver.one("select"))
    driver.event("chosen", groups="0", evicted="", aborted="")
    driver.finish_group(1)
    driver.answer(driver.one("begin"))
    driver.asked.remove(driver.one("select"))
    driver.fail(driver.one("microbatch"))
    driver.event("chosen", groups="1", evicted="", aborted="")
    assert (driver.groups("selected"), driver.groups("unselected")) == ([0], [1])
    driver.answer(driver.one("abort"))
    driver.asked.remove(driver.one("select"))
    driver.event("chosen", groups="0,1", evicted="", aborted="")
    assert driver.groups("selected") == [0, 0, 1]


def test_their_gate_goes_on_where_a_run_was_resumed() -> None:
    half = simulate(replace(SETTINGS, steps=2), sampler=InOrder)
    rest = simulate(SETTINGS, sampler=InOrder, resume=resume_from(half.runner.states[""]))
    assert rest.ended.why == "done"
    assert [row.ids["target"] for row in rest.rows if row.event == "reserved"][:8] == [2] * 8


def test_the_sampler_is_not_asked_while_the_step_is_full_and_is_refused_when_it_errs() -> None:
    driver = Driver(small(sampler="mine:Sampler", min_groups=2))
    driver.event("admitted", target=-1)
    driver.event("admitted", target=-1)
    driver.finish_group(0)
    ask = driver.one("select")
    assert (ask.version, ask.least, ask.most) == (0, 2, 2)
    driver.asked.remove(ask)
    driver.event("chosen", groups="", evicted="", aborted="")
    driver.finish_group(1)
    driver.asked.remove(driver.one("select"))
    driver.event("chosen", groups="0,1", evicted="", aborted="")
    assert driver.groups("selected") == [0, 1]
    driver.finish_group(2)
    assert not driver.wants("select"), "the step is full"
    train_step(driver)
    assert driver.one("select").version == 1
    for wrong in ("2,2", "3", "2,3", "0"):
        state, _ = driver.core.step(driver.state, Event("chosen", groups=wrong, evicted="", aborted=""))
        assert state.error.startswith(f"the sampler chose the groups {wrong}; it may choose 2 to 2 complete ones")


def test_what_lacks_a_method_or_needs_more_places_is_refused() -> None:
    class Partial:
        async def admit(self) -> None: ...

    with pytest.raises(
        BadInput, match="the sampler mine:InOrder lacks select, evict, should_abort_inflight, is_on_policy"
    ):
        Foreign(Partial, SETTINGS)
    with pytest.raises(BadInput, match="places=15 is too few: the sampler mine:InOrder needs 16"):
        Foreign(InOrder, replace(SETTINGS, places=15))


def test_a_sampler_that_cannot_be_made_is_named() -> None:
    class Broken(InOrder):
        def required_buffer_capacity(self, groups_per_step: int) -> int | None:
            raise ValueError("no capacity")

    with pytest.raises(
        CoreRaised, match=r"^mine:InOrder raised ValueError: no capacity \(test_foreign\.py, line \d+\)$"
    ):
        Foreign(Broken, SETTINGS)


@pytest.mark.parametrize("wait", [lambda: asyncio.Event().wait(), lambda: asyncio.sleep(0.001)])
def test_a_selection_that_waits_is_an_error(wait: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    class Waits(InOrder):
        async def select(self, **_: Any) -> Any:
            await wait()

    done = simulate(SETTINGS, sampler=Waits)
    assert "select failed: KitError: the sampler's select or evict waits" in done.ended.error


def test_progress_counts_no_group_that_their_sampler_admitted_for_a_later_step() -> None:
    driver = Driver(small(sampler="mine:Sampler", window=0, places=4, slots=4, min_groups=2))
    driver.event("admitted", target=0)
    driver.event("admitted", target=1)
    driver.finish_group(2, 3)
    driver.finish_group(0)
    assert [(one.completed, one.target) for one in driver.did("progress")] == [(0, 2), (1, 2)]
