"""Bad input gets one sentence before any rank starts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import kit
from kit.errors import BadInput
from kit.labs.stream.lab import StreamConfig, plan, roles, settings
from kit.labs.stream.rules import RULES
from kit.results import judge, to_frame
from kit.stream.settings import SAMPLERS


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"ranks": 2}, "ranks=2 with 2 replicas of infer_tp=1 leaves 0 ranks for the trainer; give it at least one"),
        ({"ranks": 3, "infer_tp": 2}, "2 replicas of infer_tp=2 leaves 0 ranks for the trainer"),
        ({"ranks": 4, "replicas": 3, "tp": 2}, "tp"),
        ({"replicas": 0}, "replicas must be a whole number from 1 to 512, not 0"),
        ({"places": 3}, "places=3 is too few: the sampler in-order needs 8 for groups=4 and window=1"),
        (
            {"group": 3},
            "group=3 samples do not fill whole microbatches of micro_batch=2 on 1 data ranks; use a multiple of 2",
        ),
        ({"batch": 6}, "train_global_batch_size=6 is not a multiple of group=4; a group is never split"),
        ({"batch": 12}, "train_global_batch_size=12 does not divide the 4 x 4 = 16 samples of a step"),
        ({"min_groups": 5}, "min_groups=5 exceeds the 4 groups of a step"),
        ({"floor": 5}, "floor=5 exceeds the 4 groups of a step"),
        (
            {"correction": False},
            "window=1 trains on stale samples with neither correction nor recorded log-probabilities",
        ),
        ({"sampler": "strict"}, "the sampler strict allows no window; use window=0 instead of window=1"),
        ({"sampler": "newest"}, "sampler must be one of strict, in-order, .*, or module:attr, not 'newest'"),
        ({"answer": [5]}, r"answer=\[5\] must be two numbers: the fewest and the most tokens of an answer"),
        (
            {"answer": [9, 5]},
            r"answer=\[9, 5\] must be the fewest and the most tokens of an answer, but 9 exceeds 5",
        ),
        (
            {"answer": [0, 5]},
            r"answer=\[0, 5\] must be the fewest and the most tokens of an answer, each at least 1",
        ),
        ({"tool_ms": [9, 5]}, r"tool_ms=\[9, 5\] must be the shortest and the longest wait, but 9 exceeds 5"),
        ({"at_sync": "forget"}, "at_sync must be one of keep, recompute, abort, drain"),
        ({"temperature": 0}, "temperature must be a number from 0.05 to 10, not 0"),
        (
            {"phases": "plain,strem"},
            "phases='plain,strem' names 'strem'; use all, or a list of explored, plain, lockstep",
        ),
        ({"phases": "plain,verify"}, "phases='plain,verify': verify needs the measurements of stream; add stream"),
        (
            {"phases": "stream,resume_lockstep"},
            "phases='stream,resume_lockstep': resume_lockstep needs the measurements of lockstep; add lockstep",
        ),
        (
            {"simulated": True, "steps": 10_000, "groups": 4096, "group": 512},
            "steps=10000 x groups=4096 x group=512 are 20,971,520,000 samples; use at most 1,000,000, because the ledger",
        ),
        ({"steps": 0}, "steps must be a whole number from 1 to 10000, not 0"),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else None,
)
def test_one_sentence(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence) as caught:
        kit.lab("stream", **config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_has_places_by_itself(sampler: str) -> None:
    config = StreamConfig(sampler=sampler, window=0 if sampler == "strict" else 2)
    assert settings(config).places == 4 * (config.window + 1)


def test_a_simulated_run_needs_no_trainer() -> None:
    config = StreamConfig(simulated=True, ranks=1, replicas=8, group=3)
    assert [step.phase for step in plan(config)] == ["stream", "resume", "rehearse"]
    assert [(role.ranks, role.world) for role in roles(config)] == [((0,), 0)]


def test_phases_may_be_left_out() -> None:
    assert [step.phase for step in plan(StreamConfig(phases="stream, verify"))] == [
        "prepare",
        "stream",
        "verify",
        "end",
    ]
    assert len(plan(StreamConfig())) == 10


@pytest.mark.parametrize(
    ("config", "loops"),
    [
        ({"phases": "plain", "implementation": "mine:C"}, "lockstep, stream, rehearse"),
        ({"phases": "explored", "implementation": "mine:C", "simulated": True}, "stream, rehearse"),
        ({"phases": "plain, lockstep", "sampler": "mine:S"}, "stream, rehearse"),
    ],
)
def test_without_a_phase_that_has_a_ledger_its_checks_are_not_measured(config: dict[str, Any], loops: str) -> None:
    settings_of_run = {**dataclasses.asdict(StreamConfig()), **config}
    verdict = judge(to_frame([]), settings_of_run, RULES, suspect="own code")
    whys = {row.check: row.why for row in verdict}
    left_out = "not measured: the setting phases leaves out"
    assert whys["every_group_once"] == whys["replicas_answer"] == f"{left_out} {loops}"
    assert whys["trains_before_straggler"] == f"{left_out} stream"
    assert whys["no_deadlock"].startswith(left_out)
    assert "ledger" not in " ".join(whys.values())


def test_with_a_phase_that_has_a_ledger_own_code_may_have_kept_it_away() -> None:
    settings_of_run = {**dataclasses.asdict(StreamConfig()), "phases": "stream", "implementation": "mine:C"}
    rows = {row.check: row for row in judge(to_frame([]), settings_of_run, RULES, suspect="own code")}
    assert rows["every_group_once"].passed is rows["no_deadlock"].passed is False
    assert "no phase recorded a ledger; own code may have kept them away" in rows["every_group_once"].why
