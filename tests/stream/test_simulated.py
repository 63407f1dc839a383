"""The simulated system: its ledger replays, times add up, speed-ups match arithmetic, and two pipelines share one desk."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kit.errors import BadInput
from kit.loop.messages import Command, Event, Memory
from kit.loop.runner import Runner, Stalled, VirtualClock
from kit.results import NotMeasured, Run, create_run
from kit.results.rules import settle
from kit.stream import core, generation, judge, what_if
from kit.stream.core import Controller, resume_from
from kit.stream.judge.history import LoopLedger
from kit.stream.judge.waiting import waiting_for
from kit.stream.ports import Meter, StepLog
from kit.stream.settings import SAMPLERS, StreamSettings
from kit.stream.simulated import ADDRESSES, Durations, System, drawn_length, forecast, measured, simulate
from tests.loop.replaying import replay_rows

PLAIN = StreamSettings(steps=5, previous="off")
EVEN = Durations(token_s=0.01, span=10, length=lambda group, sample: 10, train_s=0.4, finish_s=0.0, sync_s=0.0)


def trained(rows: Memory) -> list[tuple[int, int]]:
    return [(int(row.ids["group"]), int(row.ids["version"])) for row in rows if row.event == "trained"]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_run_ends_and_its_ledger_replays(sampler: str) -> None:
    settings = replace(PLAIN, sampler=sampler, window=0 if sampler == "strict" else 1, previous="recomputed")
    done = simulate(settings)
    assert done.ended.why == "done"
    assert replay_rows({"": Controller(settings)}, done.rows) is None
    assert len(trained(done.rows)) == 5 * 8
    assert [row.time for row in done.rows] == sorted(row.time for row in done.rows)


def test_the_same_run_comes_out_twice() -> None:
    assert simulate(PLAIN).rows == simulate(PLAIN).rows


def test_generation_overlaps_training_as_far_as_arithmetic_allows() -> None:
    """Generation and training of a step take 3.2 s each: K steps take 2K times 3.2 s serially, K + 1 times with the slots of one step."""
    generation, steps = 8 * 4 * 10 * 0.01, 9
    assert generation == pytest.approx(8 * EVEN.train_s)
    settings = replace(PLAIN, steps=steps, replicas=1, min_groups=8, slots=8)
    serial = simulate(replace(settings, sampler="strict", window=0), EVEN).seconds
    overlapped = simulate(settings, EVEN).seconds
    assert serial == pytest.approx(2 * steps * generation, rel=0.01)
    assert overlapped == pytest.approx((steps + 1) * generation, rel=0.05)


def test_the_parts_of_each_steps_time_add_up_to_the_whole() -> None:
    done = simulate(replace(PLAIN, previous="recomputed"), Durations(logprobs_s=0.05))
    parts = ("training", "logprobs", "sync", "exposed_generation")
    whole = sum(one[f"timing/{name}"] for one in done.logged for name in parts)
    last = next(row.time for row in reversed(done.rows) if row.event == "metrics")
    assert whole == pytest.approx(last)
    assert all(one["timing/logprobs"] == pytest.approx(8 * 0.05) for one in done.logged)
    rows = [row for row in done.rows if row.event == "logged"]
    assert [float(row.ids["s_training"]) for row in rows] == [one["timing/training"] for one in done.logged]
    assert [one["version"] for one in done.logged] == [1, 2, 3, 4, 5]


def test_a_logger_that_raises_is_reported_and_ends_nothing() -> None:
    def broken(values: dict[str, float], version: int) -> None:
        raise OSError("disk full")

    meter = Meter()
    events = list(StepLog(meter, broken).send(Command("metrics", "log", step=0, update=0, version=1)))
    assert [(one.name, one.why) for one in events] == [("logger_failed", "OSError: disk full")]


@pytest.mark.slow
def test_a_thousand_groups_may_be_in_flight() -> None:
    settings = StreamSettings(
        groups=250, places=1000, slots=1000, train_global_batch_size=1000, window=3, steps=4, replicas=4, previous="off"
    )
    done = simulate(settings, Durations(token_s=0.0001))
    running, most = 0, 0
    for row in done.rows:
        running += {"slot": 1, "slot_back": -1}.get(row.event, 0)
        most = max(most, running)
    assert (done.ended.why, most) == ("done", 1000)
    assert len(done.runner.own) == sum("core" in row.ids for row in done.rows)


def test_a_dead_replica_stops_the_run_or_it_goes_on_without_it() -> None:
    died = simulate(PLAIN, prepare=lambda system: system.schedule("died", 1, 2.0))
    assert (died.ended.why, died.ended.error) == ("error", "replica 1 died")

    def come_and_go(system: System) -> None:
        system.schedule("died", 1, 2.0)
        system.schedule("joined", 7, 5.0)
        system.schedule("left", 0, 9.0)

    settings = replace(PLAIN, on_dead_replica="go-on")
    went_on = simulate(settings, prepare=come_and_go)
    assert went_on.ended.why == "done"
    assert went_on.ended.again > 0
    first = next(row for row in went_on.rows if row.event == "sent" and row.ids["replica"] == 7)
    published = next(row for row in went_on.rows if row.event == "published" and row.ids["replica"] == 7)
    assert published.time <= first.time


def resized(system: System) -> None:
    """Two replicas are added, and one of the first is removed."""
    system.schedule("joined", 7, 2.0)
    system.schedule("joined", 8, 2.5)
    system.schedule("left", 0, 4.0)


def wrong(rows: Memory) -> dict[str, str]:
    ledger = LoopLedger(rows)
    answers = {}
    for rule in judge.RULES:
        with contextlib.suppress(NotMeasured):
            answers[rule.__name__] = settle(rule(ledger))
    return {name: answer.why for name, answer in answers.items() if answer.value}


@pytest.mark.parametrize("at_sync", ["keep", "abort", "drain"])
def test_a_resize_adds_and_removes_replicas(at_sync: Any) -> None:
    done = simulate(replace(PLAIN, steps=12, at_sync=at_sync), prepare=resized)
    assert (done.ended.why, wrong(done.rows)) == ("done", {})
    requests = Counter(row.ids["replica"] for row in done.rows if row.event == "sent" and row.time > 5.0)
    assert requests.keys() == {1, 7, 8}
    assert min(requests.values()) > 0


@pytest.mark.parametrize("command", ["begin", "microbatch", "finish", "logprobs"])
def test_a_call_that_fails_at_any_step_is_aborted_and_retried(command: str) -> None:
    settings = replace(PLAIN, previous="recomputed", step_retries=1)
    for step in range(settings.steps):
        done = simulate(settings, fails={command: step})
        assert (done.ended.why, wrong(done.rows)) == ("done", {}), step
        assert [row.ids["step"] for row in done.rows if row.event == "abort"] == [step]


def test_a_trainer_whose_step_failed_accepts_only_an_abort() -> None:
    system = System(VirtualClock(), EVEN, replicas=1, fails={"microbatch": 0})

    def answers(*names: str) -> list[str]:
        return [
            event.name
            for name in names
            for _, event in system.trainer(Command(name, "trainer", "a", step=0, groups=(1,)))
        ]

    assert answers("begin", "microbatch", "microbatch", "finish", "clear") == [
        "done",
        "error",
        "error",
        "error",
        "done",
    ]
    assert answers("abort", "begin", "microbatch", "finish") == ["done"] * 4


def test_a_replica_that_is_added_and_never_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(core.HANDLERS, "joined", core.ignore)
    done = simulate(replace(PLAIN, steps=12), prepare=resized)
    assert done.ended.why == "done"
    assert "`joined` of replica 7" in (why := wrong(done.rows)["publish_before_use"]), why
    assert "no version was published on this replica, while the others got" in why


def test_requests_of_a_replica_that_was_removed_are_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "give_up_attempt", lambda *_: None)
    rows = Memory()
    with pytest.raises(Stalled):
        simulate(replace(PLAIN, steps=12), prepare=resized, rows=rows)
    assert "on replica 0 unanswered" in waiting_for(LoopLedger(rows))


def test_nothing_starts_once_the_last_version_is_published() -> None:
    """With more steps than Python keeps small numbers for."""
    settings = replace(PLAIN, sampler="windowed", steps=260, groups=1, min_groups=1, group=2, train_global_batch_size=2)
    rows = simulate(replace(settings, places=2, slots=2), Durations(length=lambda *_: 1, span=1)).rows
    last = next(place for place, row in enumerate(rows) if row.event == "bumped" and row.ids["version"] == 260)
    assert not [row for row in rows[last:] if row.event in ("reserved", "next_prompt")]


@pytest.mark.slow
def test_a_replica_may_join_at_any_moment_of_an_update() -> None:
    """A replica that joins while the trainer finishes an update is not sent a version that the trainer has left."""
    slow = Durations(token_s=0.001, train_s=0.01, finish_s=0.5)
    whole = simulate(PLAIN, slow).seconds
    for part in range(1, 40):
        done = simulate(
            PLAIN, slow, prepare=lambda system, at=0.8 * whole * part / 40: system.schedule("joined", 7, at)
        )
        assert done.ended.why == "done", (part, done.ended)
        assert any(row.event == "published" and row.ids["replica"] == 7 for row in done.rows)


def test_a_stalled_system_is_noticed() -> None:
    clock = VirtualClock()
    system = System(clock, Durations(), replicas=1)
    system.answers["acquire"] = lambda _: ()
    runner = Runner({"": Controller(replace(PLAIN, replicas=1))}, dict.fromkeys(ADDRESSES, system), clock=clock)
    with pytest.raises(Stalled, match="no further event can arrive"):
        runner.run()


@pytest.mark.drawn(5, of="failures")
@pytest.mark.parametrize("number", range(0, 120, 7))
def test_a_failure_of_any_port_ends_in_order(number: int) -> None:
    done = simulate(PLAIN, fail_at={number: "injected"})
    ends = Counter(row.event for row in done.rows if row.event in ("place", "place_back", "slot", "slot_back"))
    assert ends["place"] == ends["place_back"]
    assert ends["slot"] == ends["slot_back"]


def test_resuming_after_a_step_trains_what_the_uninterrupted_run_trains() -> None:
    settings = replace(PLAIN, sampler="strict", window=0, steps=4, min_groups=8)
    whole = simulate(settings)
    half = simulate(replace(settings, steps=2))
    state = half.runner.states[""]
    rest = simulate(settings, resume=resume_from(state))
    assert trained(half.rows) + trained(rest.rows) == trained(whole.rows)


class Desk:
    """A desk that lets one of several pipelines train at a time. It ends when every pipeline has given everything back."""

    def __init__(self, pipelines: int) -> None:
        self.pipelines = pipelines

    def begin(self) -> tuple[Any, tuple[Command, ...]]:
        return ((), (), 0), ()

    def step(self, state: Any, event: Event) -> tuple[Any, tuple[Command, ...]]:
        owner, queue, gone = state
        if event.name == "acquire" and event.kind != "generation":
            queue = (*queue, (event.pipeline, event.kind))
        elif event.name == "acquire":
            return state, (self.grant(event.pipeline, event.kind),)
        elif event.name == "release" and (event.pipeline, event.kind) == owner:
            owner = ()
        elif event.name == "release" and event.kind == "generation":
            gone += 1
        commands: list[Command] = []
        if not owner and queue:
            owner, *rest = queue
            queue = tuple(rest)
            commands.append(self.grant(*owner))
        if gone == self.pipelines:
            commands.append(Command("ended", "runner"))
        return (owner, queue, gone), tuple(commands)

    def grant(self, pipeline: str, kind: str) -> Command:
        return Command("granted", pipeline, pipeline, kind=kind)


def test_two_pipelines_share_a_desk_in_one_runner() -> None:
    settings = replace(PLAIN, steps=3, previous="recomputed")
    clock, rows = VirtualClock(), Memory()
    systems = {name: System(clock, Durations(), replicas=2, pipeline=name) for name in ("a", "b")}

    class Both:
        """The ports of two pipelines under one address: each command goes to its own pipeline's system."""

        def send(self, command: Command) -> Any:
            return () if command.name == "metrics" else systems[command.pipeline].send(command)

        def take(self) -> Any:
            return [event for system in systems.values() for event in system.take()]

    cores = {"a": Controller(settings, pipeline="a"), "b": Controller(settings, pipeline="b"), "desk": Desk(2)}
    ports = {name: Both() for name in (*ADDRESSES, "log") if name != "desk"}
    ended = Runner(cores, ports, clock=clock, ledger=rows).run()
    assert {ended[name].why for name in ("a", "b")} == {"done"}
    assert replay_rows(cores, rows) is None
    owners: list[Any] = []
    for row in rows:
        if row.ids.get("kind") in ("training", "logprobs") and row.ids.get("to") != "desk":
            owners += [row.ids["pipeline"]] if row.event == "granted" else []
            owners = [one for one in owners if row.event != "release" or one != row.ids["pipeline"]]
            assert len(set(owners)) <= 1 or row.event == "granted"
    for name in ("a", "b"):
        assert len([row for row in rows if row.event == "trained" and row.ids["pipeline"] == name]) == 24


# -- what if --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["a", ""], ids=["named", "a core on ranks that leaves its pipeline out"])
def test_durations_are_read_back_from_a_ledger(to: str) -> None:
    true = Durations(
        token_s=0.02, span=5, begin_s=0.01, train_s=0.3, logprobs_s=0.1, finish_s=0.05, clear_s=0.02, sync_s=0.25
    )
    rows = simulate(replace(PLAIN, previous="recomputed", replicas=1), true, pipeline="a").rows
    found = measured([replace(row, ids={**row.ids, "pipeline": to}) if "to" in row.ids else row for row in rows])
    for name in ("token_s", "begin_s", "train_s", "logprobs_s", "finish_s", "clear_s"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.1), name
    assert found.span == 5
    assert [found.length(3, one) for one in range(4)] == [true.length(3, one) for one in range(4)]


def test_a_forecast_tells_what_another_window_would_take() -> None:
    durations = Durations(length=drawn_length(4, 40))
    strict = replace(PLAIN, sampler="strict", window=0)
    run = simulate(strict, durations)
    guess = forecast(run.rows, sampler="in-order", window=1)
    real = simulate(replace(strict, sampler="in-order", window=1), durations)
    assert forecast(run.rows).seconds == pytest.approx(run.seconds, rel=0.1)
    assert guess.seconds == pytest.approx(real.seconds, rel=0.1)
    with pytest.raises(BadInput, match="strict allows no window"):
        forecast(run.rows, window=2)
    with pytest.raises(BadInput, match="no completed sample"):
        forecast([])


def test_a_what_if_takes_a_run_from_its_folder(tmp_path: Path) -> None:
    done, other = simulate(PLAIN), simulate(replace(PLAIN, sampler="strict", window=0, steps=2))
    writer = create_run(tmp_path, "stream", {}, {})
    for phase, rows in {"lockstep": other.rows, "stream": done.rows}.items():
        writer.append([replace(row, phase=phase) for row in rows])
    writer.finish()
    run = Run(writer.dir)
    assert what_if(run).seconds == forecast(done.rows).seconds
    assert what_if(run, "lockstep").seconds == forecast(other.rows).seconds
    assert what_if(run, sampler="strict", window=0).seconds > what_if(run).seconds
