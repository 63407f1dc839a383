"""Bad input gets one sentence before any rank starts; roles and phases follow from the config."""

from __future__ import annotations

from typing import Any

import pytest

import kit
from kit.errors import BadInput
from kit.labs.share.drive import clusters, desk_settings, own_half
from kit.labs.share.lab import PIPELINES, ShareConfig, pipeline_config, plan, roles
from kit.labs.stream.lab import settings


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"ranks": 5}, "ranks=5, but trainers and replicas need 6; leave ranks out"),
        ({"train_a": []}, r"train_a=\[\] names no device; name at least tp=1"),
        ({"infer_b": [0, 2]}, r"infer_b=\[0, 2\] names device 2; devices=2 are 0 to 1"),
        ({"infer_a": [0, 0]}, r"infer_a=\[0, 0\] names a device twice; name each once"),
        ({"infer_tp": 2, "infer_a": [0]}, r"infer_tp=2 does not divide the number of devices of infer_a=\[0\]"),
        (
            {"train_a": [0, 1], "infer_a": [1]},
            r"train_a=\[0, 1\] and infer_a=\[1\] share only some of the trainer's devices; its replicas must use all or none",
        ),
        ({"pace_ms": [5]}, r"pace_ms=\[5\] must be two numbers of at least 0, one for A and one for B"),
        ({"answer_b": [9, 5]}, r"answer_b=\[9, 5\] must be two numbers: the fewest and the most tokens of an answer"),
        ({"group": 3}, "pipeline a: group=3 samples do not fill whole microbatches of micro_batch=2"),
        ({"planner": "fair"}, "planner must be one of gap-ratio, fifo, static, or module:attr, not 'fair'"),
        ({"scheduler": "desk"}, "scheduler must be 'module:attr', not 'desk'"),
        ({"gate": "6"}, "gate must be one of"),
        ({"scenario": "C"}, "scenario must be one of A, B, E, F"),
        ({"steps_a": 0}, "steps_a must be a whole number from 1 to 10000, not 0"),
        ({"sleep_level": 3}, "sleep_level must be one of 2, 1, not 3"),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else None,
)
def test_one_sentence(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence) as caught:
        kit.lab("share", **config)
    assert "\n" not in str(caught.value)


def test_every_trainer_and_every_replica_has_a_world() -> None:
    config = ShareConfig()
    assert config.ranks == 6
    assert [(role.name, role.ranks, role.world) for role in roles(config)] == [
        (f"{name} {role}", (number,), number)
        for number, (name, role) in enumerate(
            (name, role) for name in PIPELINES for role in ("trainer", "replica 0", "replica 1")
        )
    ]
    assert roles(ShareConfig(train_b=(0, 1), infer_a=(0,)))[2].ranks == (2, 3)


def test_the_phases_follow_from_the_config() -> None:
    def phases(**config: Any) -> list[str]:
        return [step.phase for step in plan(ShareConfig(**config))]

    assert phases() == ["prepare", "alone_a", "alone_b", "shared", "rehearse", "end"]
    assert phases(controls="all")[3:6] == ["shared", "serial", "static"]
    assert phases(scenario="A", controls="all") == ["prepare", "alone_a", "shared", "rehearse", "end"]
    assert phases(gate="3") == phases(scenario="A")
    assert phases(simulated=True) == ["shared", "scripted", "rehearse"]


def test_a_simulated_run_needs_no_trainer() -> None:
    config = ShareConfig(simulated=True, devices=32, infer_a=tuple(range(32)))
    assert [(role.ranks, role.world) for role in roles(config)] == [((0,), 0)]


def test_a_pipeline_is_a_loop_without_staleness_that_waits_for_its_whole_step() -> None:
    one, other = (pipeline_config(ShareConfig(steps_b=5, answer_b=(2, 9), pace_ms=(3, 7)), name) for name in PIPELINES)
    assert (other.steps, other.answer, other.pace_ms, other.ranks) == (5, (2, 9), 7, 3)
    assert one.seed != other.seed
    found = settings(one)
    assert (found.sampler, found.min_groups, found.groups, found.previous) == ("strict", 4, 4, "recorded")
    assert settings(pipeline_config(ShareConfig(window=1), "a")).sampler == "in-order"


def test_what_pipelines_register_and_what_the_desk_waits_for() -> None:
    config = ShareConfig(scenario="F", admission_ms=5)
    assert {name: (one.devices, one.tp) for name, one in clusters(config, "b").items()} == {
        "trainer": ((2, 3), 1),
        "generation": ((0, 1, 2, 3), 2),
    }
    assert (desk_settings(config).pipelines, desk_settings(config).admission_ms) == (("a", "b"), 5)
    assert desk_settings(ShareConfig(scenario="A")).admission_ms == 0  # there is no other pipeline to wait for


def test_the_larger_scenarios_leave_what_is_given() -> None:
    assert (ShareConfig(scenario="E").layers, ShareConfig(scenario="E", layers=3).layers) == (2, 3)
    assert ShareConfig(scenario="E").ranks == 6


def test_ranks_are_placed_on_the_gpus_of_their_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def placed(free: list[int], **given: Any) -> list[tuple[int, ...]]:
        monkeypatch.setattr("kit.labs.share.lab.free_gpu_bytes", lambda: free)
        return [role.devices for role in roles(ShareConfig(**given))]

    assert placed([1, 1]) == [(0,), (0,), (1,), (1,), (0,), (1,)]
    assert placed([1]) == [(0,)] * 6
    assert placed([1, 1, 1, 1], scenario="E") == [(0, 1), (0, 1), (2, 3)]
    assert placed([]) == placed([1, 1], device="cpu") == [()] * 6


def test_a_half_has_the_replicas_on_it_or_nothing() -> None:
    config = ShareConfig()
    assert (own_half(config, "a"), own_half(config, "b")) == ((0, (0,)), (1, (1,)))
    assert own_half(ShareConfig(train_b=(0,)), "b") == (0, (0,))  # A trains on device 0 too: neither has its own half
