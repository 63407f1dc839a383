"""Bad input gets one sentence before any rank starts; roles and phases follow from the config."""

from __future__ import annotations

import json
from typing import Any

import pytest

import kit
from kit.errors import BadInput
from kit.labs.definition import as_settings, made
from kit.labs.discover import from_text, validate
from kit.labs.share.drive import clusters, desk_settings, own_part
from kit.labs.share.lab import LAB, ShareConfig, plan, roles
from kit.labs.stream.lab import settings
from kit.results.old import Renamed, current_settings
from tests.labs.share.conftest import share


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"ranks": 5}, "ranks=5, but trainers and replicas need 6; leave ranks out"),
        ({"a.train": []}, r"a.train=\[\] names no device; name at least a.tp=1"),
        ({"b.infer": [0, 2]}, r"b.infer=\[0, 2\] names device 2; devices=2 are 0 to 1"),
        ({"a": {"infer": [0, 0]}}, r"a.infer=\[0, 0\] names a device twice; name each once"),
        ({"infer_tp": 2, "a.infer": [0]}, r"a.infer_tp=2 does not divide the number of devices of a.infer=\[0\]"),
        (
            {"a.train": [0, 1], "a.infer": [1]},
            r"a.train=\[0, 1\] and a.infer=\[1\] share only some of the trainer's devices; its replicas must use all or none",
        ),
        ({"b.pace_ms": -1}, "b.pace_ms must be a number of at least 0, not -1"),
        (
            {"b.answer": [9, 5]},
            r"pipeline b: answer=\[9, 5\] must be the fewest and the most tokens of an answer, but 9 exceeds 5",
        ),
        ({"c.steps": 2}, "c.steps is a setting of 'c', but this config has only a, b"),
        ({"a.step": 2}, "lab 'share' has no setting 'a.step'; did you mean 'a.steps'"),
        ({"pipelines": 0}, "pipelines must be a whole number from 1 to 26 or null, not 0"),
        ({"steps": "x"}, "steps must be a whole number from 1 to 10000, not 'x'"),
        ({"group": 3}, "pipeline a: group=3 samples do not fill whole microbatches of micro_batch=2"),
        ({"planner": "fair"}, "planner must be one of gap-ratio, home, fifo, static, or module:attr, not 'fair'"),
        ({"scheduler": "desk"}, "scheduler must be 'module:attr', not 'desk'"),
        ({"gate": "6"}, "gate must be one of"),
        ({"scenario": "G"}, "scenario must be one of A, B, C, D, E, F"),
        ({"a.steps": 0}, "a.steps must be a whole number from 1 to 10000, not 0"),
        ({"sleep_level": 3}, "sleep_level must be one of 2, 1, not 3"),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else None,
)
def test_one_sentence(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence) as caught:
        kit.lab("share", **config)
    assert "\n" not in str(caught.value)


def test_settings_of_pipelines_are_given_by_name_as_a_mapping_or_for_all() -> None:
    def steps(**given: Any) -> dict[str, int]:
        return {name: loop.steps for name, loop in validate(LAB, given).loops.items()}

    assert steps(pipelines=3, **{"a.steps": 5}) == steps(pipelines=3, a={"steps": 5}) == {"a": 5, "b": 3, "c": 3}
    assert steps(steps=2, b={"steps": 7}) == {"a": 2, "b": 7}
    assert {name: loop.steps for name, loop in validate(LAB, {"a.steps": 5}, {"steps": 2}).loops.items()} == {
        "a": 2,
        "b": 2,
    }
    given = from_text(LAB, {"a.steps": "3", "b.answer": "4,8", "c.train": "null", "planner": "fifo"})
    assert given == {"a.steps": 3, "b.answer": [4, 8], "c.train": None, "planner": "fifo"}


def test_old_names_are_accepted_with_a_sentence() -> None:
    given = {"steps_a": 2, "train_b": [0], "answer_a": [4, 4], "pace_ms": [5, 0]}
    with pytest.warns(Renamed, match="is now") as said:
        config = validate(LAB, given)
    assert [str(warning.message) for warning in said] == [
        "setting steps_a of lab 'share' is now a.steps=2",
        "setting train_b of lab 'share' is now b.train=[0]",
        "setting answer_a of lab 'share' is now a.answer=[4, 4]",
        "setting pace_ms of lab 'share' is now a.pace_ms=5 b.pace_ms=0",
    ]
    assert config == share(
        **{"a.steps": 2, "b.train": (0,), "a.answer": (4, 4), "a.pace_ms": 5, "b.pace_ms": 0, "dtype": config.dtype}
    )
    assert current_settings("share", {"scenario": "A", "steps_a": 2, "steps_b": 2}) == {"scenario": "A", "a.steps": 2}


def test_a_config_is_the_same_after_it_was_stored() -> None:
    for given in ({}, {"scenario": "D"}, {"scenario": "F"}, {"gate": "2"}, {"pipelines": 3, "b.infer_tp": 2}):
        config = share(**given)
        assert made(ShareConfig, json.loads(json.dumps(as_settings(config)))) == config


def test_every_trainer_and_every_replica_has_a_world() -> None:
    config = share()
    assert config.ranks == 6
    assert [(role.name, role.ranks, role.world) for role in roles(config)] == [
        (f"{name} {role}", (number,), number)
        for number, (name, role) in enumerate(
            (name, role) for name in "ab" for role in ("trainer", "replica 0", "replica 1")
        )
    ]
    assert roles(share(**{"b.train": (0, 1), "a.infer": (0,)}))[2].ranks == (2, 3)


def test_the_phases_follow_from_the_config() -> None:
    def phases(**config: Any) -> list[str]:
        return [step.phase for step in plan(share(**config))]

    assert phases() == ["prepare", "alone_a", "alone_b", "shared", "rehearse", "end"]
    assert phases(controls="all", rehearse=False)[3:6] == ["shared", "static", "end"]
    assert phases(scenario="A", controls="all") == ["prepare", "alone_a", "shared", "rehearse", "end"]
    assert phases(gate="3") == phases(scenario="A")
    assert phases(simulated=True) == ["shared", "scripted", "rehearse"]
    assert phases(simulated=True, rehearse=False) == ["shared", "scripted"]


def test_a_simulated_run_needs_no_trainer() -> None:
    config = share(simulated=True, devices=32, **{"a.infer": tuple(range(32))})
    assert [(role.ranks, role.world) for role in roles(config)] == [((0,), 0)]


def test_a_pipeline_is_a_loop_without_staleness_that_waits_for_its_whole_step() -> None:
    loops = share(**{"b.steps": 5, "b.answer": (2, 9), "a.pace_ms": 3, "b.pace_ms": 7}).loops
    assert (loops["b"].steps, loops["b"].answer, loops["b"].pace_ms, loops["b"].ranks) == (5, (2, 9), 7, 3)
    assert loops["a"].seed != loops["b"].seed
    found = settings(loops["a"])
    assert (found.sampler, found.min_groups, found.groups, found.previous) == ("strict", 4, 4, "recorded")
    assert settings(share(window=1).loops["a"]).sampler == "in-order"


def test_what_pipelines_register_and_what_the_desk_waits_for() -> None:
    config = share(scenario="F", admission_ms=5)
    assert {name: (one.devices, one.tp) for name, one in clusters(config, "b").items()} == {
        "trainer": ((2, 3), 1),
        "generation": ((0, 1, 2, 3), 2),
    }
    assert (desk_settings(config).pipelines, desk_settings(config).admission_ms) == (("a", "b"), 5)
    assert desk_settings(share(scenario="A")).admission_ms == 0  # there is no other pipeline to wait for


def test_the_larger_scenarios_leave_what_is_given() -> None:
    assert (share(scenario="E").layers, share(scenario="E", layers=3).layers) == (2, 3)
    assert share(scenario="E").ranks == 6


def test_ranks_are_placed_on_the_gpus_of_their_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def placed(free: list[int], **given: Any) -> list[tuple[int, ...]]:
        monkeypatch.setattr("kit.labs.share.lab.free_gpu_bytes", lambda: free)
        return [role.devices for role in roles(share(**given))]

    assert placed([1, 1]) == [(0,), (0,), (1,), (1,), (0,), (1,)]
    assert placed([1]) == [(0,)] * 6
    assert placed([1, 1, 1, 1], scenario="E") == [(0, 1), (0, 1), (2, 3)]
    assert placed([]) == placed([1, 1], device="cpu") == [()] * 6


def test_a_half_has_the_replicas_on_it_or_nothing() -> None:
    config = share()
    assert (own_part(config, "a"), own_part(config, "b")) == ((0, (0,)), (1, (1,)))
    assert own_part(share(**{"b.train": (0,)}), "b") == (0, (0,))  # A trains on device 0 too: neither has its own half
