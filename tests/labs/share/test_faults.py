"""Each fault fails its check on simulated ranks, and the check passes without it. Other checks that the bug fails are listed."""

from __future__ import annotations

import pytest

from kit.labs.definition import Fault
from kit.labs.share.drive import simulate_pipelines
from kit.labs.share.faults import OF_A_PIPELINE, OF_THE_DESK
from kit.labs.share.lab import LAB
from kit.labs.share.scenarios import SCENARIOS
from kit.labs.share.simulated import REPLACED_AFTER_DEATH, SCENES
from kit.share.judge.specified import SPECIFIED
from kit.share.planner import PLANNERS
from kit.target import replaced
from tests.labs.parts import failed, passed, why
from tests.labs.share.conftest import share, simulated

# Other checks that a bug fails, besides the one it is listed under.
ALSO = {
    "double-allocation": {"devices_conserved", "plan_as_specified", "plan_valid", "priority_kept"},
    "expand-first": {
        "devices_conserved",
        "empty_set_suspends",
        "no_deadlock",
        "one_owner",
        "plan_as_specified",
        "priority_kept",
    },
    "lost-device": {
        "devices_used",
        "dead_pipeline_leaves",
        "fair_share",
        "no_deadlock",
        "no_starvation",
        "plan_as_specified",
    },
    "half-replica": {"one_owner"},
    "no-floor": {"fair_share", "plan_as_specified"},
    "no-validation": {"devices_conserved", "one_owner", "plan_as_specified"},
    "one-shot-generation": {
        "dead_replaced",
        "devices_used",
        "fair_share",
        "no_deadlock",
        "no_request_lost",
        "plan_as_specified",
    },
    "planner-fails-after-loss": {"empty_set_suspends"},
    "progress-unclamped": {"fair_share"},
    "adapters-in-one-stream": {"plan_as_specified"},
    "planner-ignores-bundles": {"fair_share", "plan_as_specified"},
    "half-idle": {"fair_share", "no_deadlock", "no_starvation", "plan_as_specified"},
    "shrinks-for-nothing": {"no_thrash"},
    "swaps-at-every-event": {"devices_used", "no_starvation", "plan_as_specified"},
    "released-while-falling-asleep": {"devices_conserved"},
    "complete-at-once": {"no_deadlock", "no_starvation", "loops_right"},
    "over-reports": {"loops_right"},
    "drops-alarms": {"no_deadlock", "planned_release_once"},
    "waits-for-all": {"no_deadlock"},
    "waits-for-the-dead": {"no_deadlock"},
    "removed-for-good": {"devices_used", "fair_share", "plan_as_specified"},
    "dead-for-good": {"devices_used", "fair_share", "no_deadlock", "no_starvation", "plan_as_specified"},
    "takes-one-by-one": {"no_starvation"},
    "dead-coordinator": {
        "dead_replaced",
        "devices_conserved",
        "devices_used",
        "fair_share",
        "no_deadlock",
        "no_request_lost",
        "no_starvation",
        "plan_as_specified",
        "plan_valid",
        "planned_release_once",
        "progress_ended",
        "priority_kept",
    },
    "stale-routing": {"empty_set_suspends", "loops_right"},
    "raises-when-empty": {"no_deadlock"},
    "abort-never-signals": {"no_deadlock"},
    "count-outside-lock": {"no_deadlock"},
    "releases-while-training": {"loops_right"},
    "joins-the-dead": {"no_request_lost"},  # it had not woken
    "late-shrink": {"plan_valid"},  # no plan orders it then
    "trains-on-at-once": {"plan_as_specified"},
    "unnoted-gang": {"plan_as_specified"},
    "request-before-shell": {"devices_used", "loops_right", "no_deadlock"},
}


SIMULATED = (*OF_THE_DESK, *OF_A_PIPELINE)


@pytest.mark.slow
@pytest.mark.parametrize("fault", SIMULATED, ids=lambda fault: fault.name)
def test_a_rule_with_a_bug_fails_its_check_and_hardly_another(fault: Fault) -> None:
    verdict, error = simulated(fault.name, **fault.set)
    assert {fault.caught_by} <= failed(verdict) <= {fault.caught_by} | ALSO.get(fault.name, set())
    assert bool(error) == (fault.exit == 3)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("takes-one-by-one", "deadlock: a waits for device 1, which b holds (trainer); b waits for device 0, which a holds (trainer)"),
        ("lock-held-across-call", "a never ended; it waits for devices 0 and 1 since 0.000 s (generation, row 31): nobody else holds them"),
        ("abort-never-signals", "b never ended; 8 requests never sent again after the replica left (row 561)"),
        ("waits-for-the-dead", "desk never ended; it has not answered `unregister` of a"),
        ("one-shot-generation", "it has no replica awake and 2 of 4 groups left"),
    ],
)  # fmt: skip
def test_a_deadlock_names_what_is_unanswered_and_who_holds_it(name: str, words: str) -> None:
    assert words in why(simulated(name)[0], "no_deadlock")


def test_a_fault_that_a_scene_exposes_needs_a_planner_that_passes_the_scene() -> None:
    for fault in OF_THE_DESK:
        needs_sharing = "scenario" in fault.scene and not SCENARIOS[fault.scene["scenario"]].any_planner
        assert not needs_sharing or {*fault.needs.get("planner", PLANNERS)} <= {*SPECIFIED}, fault.name


@pytest.mark.slow
def test_without_a_bug_every_check_of_a_ledger_passes() -> None:
    """One run covers the lab's pipelines, every script that exposes a fault, and every rehearsed scene."""
    verdict, error = simulated()
    assert (failed(verdict), error) == (set(), "")
    assert all(passed(verdict, fault.caught_by) for fault in SIMULATED if "scenario" not in fault.set)
    for check in ("same_numbers", "weights_after_wake", "peak_fits"):
        assert passed(verdict, check) is None
        assert "needs the records of ranks" in why(verdict, check)


def test_every_fault_has_a_name_of_its_own_and_a_patch_that_can_be_applied() -> None:
    assert len({fault.name for fault in LAB.faults}) == len(LAB.faults)
    for fault in LAB.faults:
        assert fault.patch
        with replaced(fault.patch):
            pass


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {"scenario": "A"},
        {"scenario": "C", "slots": 2},
        {"scenario": "F"},
        {"planner": "home"},
        {
            "planner": "home",
            "pipelines": 6,
            "devices": 4,
            "steps": 2,
            "infer": (0, 1, 2, 3),
            "f.tp": 2,
            "f.train": (2, 3),
        },
        {"planner": "fifo"},
        {"planner": "static"},
        {"window": 1, "admission_ms": 0},
        {"a.steps": 1, "b.answer": (20, 60), "a.pace_ms": 5, "b.pace_ms": 20, "b.train_pace_ms": 50},
        {"pipelines": 3, "b.infer_tp": 2},
        {"pipelines": 6, "devices": 4, "steps": 2, "infer": (0, 1, 2, 3), "f.tp": 2, "f.train": (2, 3)},
    ],
    ids="-".join,
)
def test_other_settings_pass_too(config: dict[str, object]) -> None:
    verdict, error = simulated(**config)
    assert (failed(verdict), error) == (set(), "")


def test_scenes_happen() -> None:
    """Each scene ends as it should: a pipeline that dies ends with an error, the others do not."""
    config = share(simulated=True)
    ends = {}
    for scene in SCENES:
        done = simulate_pipelines(config, scene)
        ends[scene.name] = {name for name, one in done.ended.items() if one.why == "error"}
        assert {*done.ended} == {"a", "b", "desk"}, scene.name
    dead = [ends[scene.name] for scene in SCENES if " dies " in scene.name]
    assert dead == [{"a"}, {"a"}, {"a"}, {"b"}]
    assert ends["the desk fails"] == {"a", "b", "desk"}
    assert [name for name, some in ends.items() if not some] == [
        REPLACED_AFTER_DEATH,
        "a replica cannot wake",
        "a resize to a replica that is gone",
        "the second is set up while the first trains",
    ]
    notes = {row.event for row in simulate_pipelines(config, SCENES[-2]).rows}
    assert "admission_limit" in notes
