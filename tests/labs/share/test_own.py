"""User code for planners, desks, and a pipeline's side of the desk: right code passes, and the errors of wrong code are reported."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kit
from docs.examples.own_planner import keeps_half, takes_turns
from kit.errors import BadInput
from kit.labs.discover import find, validate
from kit.labs.share.desk import desk_settings
from kit.labs.share.drive import simulate_pipelines
from kit.labs.share.lab import ShareConfig
from kit.labs.share.ledgers import settled
from kit.labs.share.scenarios import SCENARIOS, for_config
from kit.labs.share.worlds import ShareWorlds
from kit.loop import limit
from kit.loop.explore import play, world_of
from kit.loop.messages import Command, Event
from kit.share.core import HANDLERS, Scheduler, settle_desk
from kit.share.judge.books import ON_PURPOSE, DeskLedger
from kit.share.judge.ends import no_deadlock
from kit.share.judge.requests import no_starvation
from kit.share.judge.specified import SPECIFIED
from kit.share.member import Desk, Pipeline
from kit.share.planner import PLANNERS, View, gap_ratio
from kit.share.state import DeskState, DeskTurn
from kit.target import replaced
from tests.labs.parts import failed, passed, why
from tests.labs.share.conftest import share, simulated
from tests.share.chaos import rows_of, violations

SMALL = {"steps": 2, "groups": 2, "group": 2}


class Right:
    """Written from the documentation; it uses nothing of the kit but the handle it is given."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.calls: list[str] = []
        Right.last = self

    last: Right

    def collector_created(self) -> None:
        self.calls.append("created")
        self.desk.request("generation")

    def begin_progress(self, completed: int, target: int) -> None:
        self.calls.append("begin_progress")
        self.desk.progress(completed, target)

    def before_training(self, step: int) -> None:
        self.calls.append(f"before_training {step}")
        self.desk.request("training")

    def before_weight_sync(self, step: int) -> None:
        self.calls.append(f"before_weight_sync {step}")

    def after_training(self, step: int) -> int:
        self.calls.append(f"after_training {step}")
        self.desk.release("training")
        return step + 1

    def end_progress(self) -> None:
        self.calls.append("end_progress")
        self.desk.progress_end()


class NeverAsks(Pipeline):
    def before_training(self, step: int) -> None:
        pass


class NeverGenerates(Pipeline):
    def collector_created(self) -> None:
        pass


class NeverReports(Pipeline):
    def begin_progress(self, completed: int, target: int) -> None:
        pass


class NeverReleases(Pipeline):
    def after_training(self, step: int) -> int:
        return step + 1


class Raises(Pipeline):
    def before_weight_sync(self, step: int) -> None:
        raise ValueError("no cache")


class OldVersion(Pipeline):
    def after_training(self, step: int) -> int:
        super().after_training(step)
        return step


class AsksTwice(Pipeline):
    def before_training(self, step: int) -> None:
        self.desk.request("training")
        self.desk.request("reference")


class FailsAtTheEnd(Pipeline):
    def end_progress(self) -> None:
        raise ValueError("no desk")


class FailsTwice(OldVersion):
    def end_progress(self) -> None:
        raise ValueError("no desk")


class KeepsProgress(Pipeline):
    def end_progress(self) -> None:
        pass


class OverReports(Pipeline):
    def begin_progress(self, completed: int, target: int) -> None:
        super().begin_progress(completed, 50 * target)


class ReportsDebts(Pipeline):
    """The desk takes what is left of the step for its demand."""

    def begin_progress(self, completed: int, target: int) -> None:
        super().begin_progress(completed - 50 * target, target)


class CompleteAtOnce(Pipeline):
    def begin_progress(self, completed: int, target: int) -> None:
        super().begin_progress(target, target)


def looks_at_first_devices(view: View) -> None:
    for member in view.shares.values():
        for replica in [*member.free] if member.since >= 0 else ():
            if min(member.bundles[replica]) in view.idle:
                view.expand(member.name, replica)


def own_desk(config: ShareConfig) -> Scheduler:
    return Scheduler(desk_settings(config), planner=takes_turns)


class PlansLater(Scheduler):
    """Plans some time after a request, together for all that arrived by then."""

    after_ms = 8

    def step(self, state: DeskState, event: Event) -> tuple[DeskState, tuple[Command, ...]]:
        t = DeskTurn(state, self.settings, self.desk)
        if t.closed:
            return state, ()
        is_tick = event.name == "alarm" and t.alarms.get(event.number, ("",))[0] == "tick"
        if is_tick:
            t.alarms = t.alarms.without(event.number)
        else:
            HANDLERS[event.name](t, event)
        due, t.due = t.due, t.due and is_tick
        settle_desk(t, self.planner)
        t.due |= due and not is_tick
        if t.due and not any(kind == "tick" for kind, *_ in t.alarms.values()):
            t.alarm(self.after_ms, "tick")
        return DeskState(t), tuple(t.commands)


def plans_later(config: ShareConfig) -> Scheduler:
    return PlansLater(desk_settings(config), planner=takes_turns)


class PlansTooLate(PlansLater):
    after_ms = 6_000  # a desk has `watchdog_ms`, 5 s


def plans_too_late(config: ShareConfig) -> Scheduler:
    return PlansTooLate(desk_settings(config), planner=takes_turns)


class DropsAlarms(Scheduler):
    def step(self, state: DeskState, event: Event) -> tuple[DeskState, tuple[Command, ...]]:
        if event.name == "alarm" and event.number % 3 == 0:
            return state, ()
        return super().step(state, event)


def drops_alarms(config: ShareConfig) -> Scheduler:
    return DropsAlarms(desk_settings(config), planner=takes_turns)


class SaysItIsPatient(Scheduler):
    """Notes that requests may wait for days, and that it shares nothing, so that nothing of both would be judged."""

    def begin(self) -> tuple[DeskState, tuple[Command, ...]]:
        state, (limits, *others) = super().begin()
        said = {**dict(limits.ids), "request_ms": 10**9, "planner": "static"}
        return state, (Command(limits.name, limits.to, limits.pipeline, **said), *others)


def says_it_is_patient(config: ShareConfig) -> Scheduler:
    return SaysItIsPatient(desk_settings(config), planner=keeps_half)


def raises(view: View) -> None:
    raise ValueError("no share")


def raises_without_some(view: View) -> None:
    if len(view.shares) < len(view.names):
        raise ValueError("one is missing")
    takes_turns(view)


def serves_only_a(view: View) -> None:
    view.shares = {name: share for name, share in view.shares.items() if name == "a"}
    takes_turns(view)


class Mute(Scheduler):
    """Never sends one of its commands."""

    lacks = ""

    def __init__(self, config: ShareConfig) -> None:
        super().__init__(desk_settings(config), planner=takes_turns)

    def step(self, state: DeskState, event: Event) -> tuple[DeskState, tuple[Command, ...]]:
        state, commands = super().step(state, event)
        return state, tuple(command for command in commands if command.name != self.lacks)


class NeverAdmits(Mute):
    lacks = "admitted"


class NeverSaysWhoWoke(Mute):
    lacks = "joined"


class NeverLetsLeave(Mute):
    lacks = "unregistered"


class NeverEnds(Mute):
    lacks = "ended"


class DeafToB(Mute):
    def step(self, state: DeskState, event: Event) -> tuple[DeskState, tuple[Command, ...]]:
        return (state, ()) if event.pipeline == "b" else super().step(state, event)


class ForgetsB(Mute):
    """It loses b's first request to train."""

    def step(self, state: DeskState, event: Event) -> tuple[DeskState, tuple[Command, ...]]:
        lost = (event.name, event.pipeline, event.get("kind")) == ("acquire", "b", "training")
        return (state, ()) if lost else super().step(state, event)


def of(kind: object) -> str:
    return f"{getattr(kind, '__module__', '')}:{getattr(kind, '__name__', '')}"


def test_the_kits_own_asks_for_what_a_member_asks_for() -> None:
    rows = [
        [(row.event, row.time, row.ids) for row in simulate_pipelines(share(simulated=True, pipeline=name)).rows]
        for name in (of(Pipeline), share().pipeline)
    ]
    assert len(rows[0]) > 500
    assert rows[0] == rows[1]


def test_somebody_elses_hears_each_moment_once_and_in_order() -> None:
    verdict, error = simulated(pipeline=of(Right), gate="5", **SMALL)
    assert (failed(verdict), error) == (set(), "")
    assert passed(verdict, "gate_shown") is True
    simulate_pipelines(share(simulated=True, pipeline=of(Right), **SMALL))
    first = ["before_training 0", "before_weight_sync 0", "begin_progress", "after_training 0"]
    second = ["before_training 1", "before_weight_sync 1", "after_training 1"]
    assert Right.last.calls == ["begin_progress", "created", *first, *second, "end_progress"]


@pytest.mark.parametrize(
    ("kind", "check", "words"),
    [
        (NeverAsks, "no_deadlock", "the run is stuck: "),
        (NeverReleases, "loops_right", ""),
        (Raises, "no_deadlock", "before_weight_sync(0) of the pipeline's own code raised ValueError: no cache"),
        (OldVersion, "no_deadlock", "after_training(0) of the pipeline's own code returned version 0; it must return the loop's version 1"),
        (AsksTwice, "no_deadlock", "acquire failed: b cannot request reference on reference"),
        (FailsAtTheEnd, "no_deadlock", "end_progress() of the pipeline's own code raised ValueError: no desk"),
        (FailsTwice, "no_deadlock", "after_training(0) of the pipeline's own code returned version 0"),  # the first error
        (KeepsProgress, "progress_ended", ""),
        (OverReports, "progress_true", ""),
        (ReportsDebts, "progress_true", ""),
        (CompleteAtOnce, "progress_true", ""),
    ],
)  # fmt: skip
def test_a_wrong_one_is_found_out(kind: type, check: str, words: str) -> None:
    verdict, error = simulated(pipeline=of(kind), **SMALL)
    assert check in failed(verdict)
    assert words in error


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (Pipeline, ""),
        (Right, ""),
        (NeverAsks, "no_deadlock"),
        (AsksTwice, "no_deadlock"),
        (OverReports, "progress_true"),
    ],
)
def test_random_worlds_tell_right_ones_from_wrong_ones(kind: type, rule: str) -> None:
    worlds = ShareWorlds(pipeline=of(kind))
    for seed in range(3):
        findings = play(worlds, world_of(worlds, seed)).findings
        assert rule in findings if rule else not findings


FOUR = {"devices": 4, "infer": (0, 1, 2, 3)}


OWN: list[dict[str, object]] = [
    {"planner": of(takes_turns), "scenario": "F"},
    {"planner": of(takes_turns), "pipelines": 3, "b.infer_tp": 2, **SMALL},
    {"scheduler": of(own_desk), **FOUR, **SMALL},
    {"scheduler": of(plans_later), **FOUR, **SMALL},
]


def weighs_replicas_alike(view: View) -> None:
    with replaced({"kit.share.planner:Gaps.__init__": "kit.labs.share.bugs:gaps_without_tp"}):
        gap_ratio(view)


def test_an_own_planner_may_weigh_a_replica_of_two_devices_as_one() -> None:
    """A gap-ratio planner that does is wrong; an own one is judged by what it breaks."""
    verdict, error = simulated(planner=of(weighs_replicas_alike), **{**FOUR, **SMALL, "a.infer_tp": 2})
    assert (failed(verdict), error) == (set(), "")


@pytest.mark.drawn(2, of="right")
@pytest.mark.parametrize("own", OWN, ids="-".join)
def test_an_own_planner_or_desk_that_is_right_passes(own: dict[str, object]) -> None:
    verdict, error = simulated(**own)
    assert (failed(verdict), error) == (set(), "")
    assert [passed(verdict, check) for check in ("plan_as_specified", "fair_share")] == [None, None]
    assert passed(verdict, "devices_used") is True


@pytest.mark.drawn(3, of="wrong")
@pytest.mark.parametrize(
    ("own", "check", "words"),
    [
        ({"planner": of(keeps_half), **FOUR}, "devices_used", "longest: devices [2, 3] for 0."),
        ({"scheduler": of(says_it_is_patient), **FOUR}, "devices_used", "longest: devices [2, 3] for 0."),
        ({"planner": of(looks_at_first_devices)}, "no_deadlock", "a.generation:0,1 takes the devices [1], which are not idle"),
        ({"scheduler": of(plans_too_late), **FOUR}, "priority_kept", "s and no plan was made"),
        ({"scheduler": of(drops_alarms), "planner": of(takes_turns)}, "no_starvation", "the request waited for 60 s"),
    ],
)  # fmt: skip
def test_an_own_planner_or_desk_that_is_wrong_is_found_out(own: dict[str, object], check: str, words: str) -> None:
    verdict, _ = simulated(**own)
    assert check in failed(verdict)
    assert words in why(verdict, check)


def ledger_of(own: Mapping[str, object]) -> DeskLedger:
    return DeskLedger(simulate_pipelines(share(simulated=True, **own)).rows)


FAILED = "`ended` of desk (row 33, 0.000 s): ended with an error: the planner tests.labs.share.test_own:raises raised ValueError: no share"


@pytest.mark.parametrize(
    ("own", "begins", "words"),
    [
        ({"planner": of(raises)}, FAILED, "the last event that it read is `progress` of a (row 30, 0.000 s)"),
        ({"planner": of(serves_only_a)}, "`ended` of b", "it had asked for devices 0 and 1 since 1.690 s (generation, row 2"),
        ({"scheduler": of(NeverAdmits)}, "a never ended; `admit` of a (row 14, 0.000 s) has no answer", "; `admit` of b (row 19, "),
        ({"scheduler": of(NeverSaysWhoWoke)}, "a never ended; the desk has sent no `joined` of replica 1 of a", "replica 0 of b"),
        ({"scheduler": of(NeverLetsLeave)}, "a never ended; `unregister` of a", "b never ended; `unregister` of b"),
        ({"scheduler": of(NeverEnds)}, "desk never ended; every pipeline has left", "the last in row 14"),
        ({"scheduler": of(DeafToB)}, "b never ended; `register` of b (row 17, 0.000 s) and `admit` of b (row 18, 0.000 s) have no answer",
            "desk never ended; it has not answered `register` of b and `admit` of b"),
        ({"scheduler": of(ForgetsB)}, "b never ended; it waits for device 1 since 4.770 s (training, row 7",
            "desk never ended; it waits for b to leave"),
        ({"pipeline": of(NeverAsks)}, "b never ended; 4 of 4 groups of its step are complete", "it has not requested devices to train"),
        ({"pipeline": of(NeverGenerates)}, "b never ended; it has no replica awake", "it has not requested generation"),
        ({"pipeline": of(NeverReports)}, "`ended` of b", "nobody else holds them; b had reported no work"),
    ],
)  # fmt: skip
def test_a_deadlock_begins_with_its_cause_and_names_every_request(
    own: dict[str, object], begins: str, words: str
) -> None:
    shown = settled(no_deadlock, ledger_of(own)).why
    assert shown.startswith(begins)
    assert words in shown


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"planner": of(serves_only_a)}, "the request waited for 60 s for devices 0 and 1: nobody else holds them"),
        ({"scheduler": of(ForgetsB)}, "training of b waits for trainer since 60.230 s (limit 60 s); device 1: nobody"),
    ],
)
def test_a_request_that_waits_too_long_names_its_devices_and_who_holds_them(own: dict[str, object], words: str) -> None:
    assert words in settled(no_starvation, ledger_of(own)).why


@pytest.mark.parametrize("planner", [raises, raises_without_some])
def test_a_planner_that_raises_in_a_world_is_named_before_those_that_came_too_late(planner: object) -> None:
    worlds = ShareWorlds(planner=of(planner))
    shown = [play(worlds, world_of(worlds, seed)).findings["no_deadlock"] for seed in range(3)]
    for words in shown:
        assert words.startswith("`ended` of desk (row ")
        assert "raised ValueError: " in words.partition(";")[0]
    assert any("b never ended; `register` of b (row " in words for words in shown)
    assert any("have no answer, because the desk had ended (row " in words for words in shown)


def test_a_planner_that_raises_when_all_are_dead_fails_too() -> None:
    """Nobody is left who could end with an error."""
    world = world_of(ShareWorlds(), 2)
    world |= {"pipelines": world["pipelines"][:1], "happens": [[1, "pipeline dies", 0, -1]], "frail": [], "broken": []}
    assert play(ShareWorlds(), world).findings == {}
    findings = play(ShareWorlds(planner=of(raises_without_some)), world).findings
    words = r"raised ValueError: one is missing \(test_own\.py, line \d+\); the last event that it read is `died` of a"
    assert re.search(words, findings["no_deadlock"])


def never_returns(view: View) -> None:
    while view.shares:
        pass


@pytest.mark.parametrize("threads", [0, 1], ids=["main thread", "the panel's thread"])
def test_a_planner_that_never_returns_ends_the_run_and_is_named(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit, "TURN_S", 2.0)
    run = functools.partial(simulated, planner=of(never_returns))
    if threads:
        with ThreadPoolExecutor(threads) as pool:
            verdict, error = pool.submit(run).result()
    else:
        verdict, error = run()
    assert error == "desk in the event progress never returned: it took more than 2 s"
    assert "no_deadlock" in failed(verdict)


def test_gate_5_needs_one() -> None:
    with pytest.raises(BadInput, match=r"give it as pipeline=module:attr"):
        share(gate="5")


@pytest.mark.slow
def test_on_ranks_both_pipelines_compute_what_they_compute_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    verdict = kit.run("share", gate="5", pipeline=of(Right), rehearse=False, worlds=0, **SMALL).verdict()
    assert failed(verdict) == set()
    assert passed(verdict, "same_numbers") is True


def test_a_pipeline_that_prefetched_gets_a_replica_for_the_group_that_its_step_lacks() -> None:
    """b has one group of its step and one of the next when its only replica falls asleep."""
    settings = {"b.window": 1, "b.steps": 9, "groups": 2, "group": 2, "slots": 4, "tail": True, "admission_ms": 0}
    done = simulate_pipelines(share(simulated=True, seed=59, **settings))
    assert {name: end.why for name, end in done.ended.items()} == dict.fromkeys(("a", "b", "desk"), "done")


OWN_PLANNER = validate(find("share"), {"simulated": True, "planner": "docs.examples.own_planner:takes_turns"})


@pytest.mark.parametrize("name", for_config(OWN_PLANNER))
def test_a_right_planner_of_ones_own_passes_every_scene_that_it_gets(name: str) -> None:
    rows = rows_of(SCENARIOS[name].run(OWN_PLANNER).rows)
    assert violations(rows) == {}


@pytest.mark.parametrize("planner", PLANNERS)
def test_scenes_run_the_configured_planner_and_only_those_that_it_can_pass(planner: str) -> None:
    config = share(simulated=True, planner=planner)
    names = for_config(config)
    any_planner = [name for name, scenario in SCENARIOS.items() if scenario.any_planner]
    assert names == ([*SCENARIOS] if planner in SPECIFIED else any_planner)
    for name in names:
        rows = rows_of(SCENARIOS[name].run(config).rows)
        limits = next(row for row in rows if row["event"] == "limits")
        assert limits["planner"] == (planner if SCENARIOS[name].planner is None else ON_PURPOSE)
        assert violations(rows) == {}, name


def test_a_wrong_planner_is_seen_by_a_scene_whatever_its_name() -> None:
    """It looks only at the first device of a replica, which shows where replicas have several."""
    config = share(simulated=True, planner="home")
    with replaced({"kit.share.core:PLANNERS": "kit.labs.share.bugs:LOOKS_AT_FIRST_DEVICES"}):
        rows = rows_of(SCENARIOS["whole bundles"].run(config).rows)
    assert "the planner home made a plan that violates condition" in violations(rows)["no_deadlock"]
