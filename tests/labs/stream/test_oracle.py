"""The oracle finds the version of each token, and what is wrong with a sample."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kit.labs.stream.ranks.oracle import Oracle, answer_logprobs
from kit.labs.stream.ranks.rows import Row
from kit.megatron.config import GEOMETRIES
from kit.train.plain import from_weights, initial_weights
from kit.train.rollout import END

TINY = dataclasses.replace(GEOMETRIES["tiny"], layers=1)
WEIGHTS = {
    version: {name: value * (1 + 0.05 * version) for name, value in initial_weights(TINY, 3).items()}
    for version in range(3)
}
LIMIT = 1e-5


def sampled(versions: tuple[int, ...], *, temperature: float = 1.0, minimum: int = 2) -> Row:
    """A sample whose log-probabilities are recorded in float32 under these versions."""
    row = Row(
        group=0,
        sample=0,
        attempt=0,
        replica="replica 0",
        prompt=(49, 43, 50, 61),
        answer=tuple(range(50, 50 + len(versions))),
        logprobs=(),
        versions=versions,
        minimum=minimum,
        reward=0.0,
    )
    by_version = {
        version: answer_logprobs(from_weights(TINY, WEIGHTS[version]), row, temperature) for version in set(versions)
    }
    return dataclasses.replace(
        row, logprobs=tuple(float(by_version[version][at].float()) for at, version in enumerate(versions))
    )


def test_right_stamps_are_confirmed_and_shuffled_ones_are_found() -> None:
    right = sampled((0, 0, 0, 1, 1, 2, 2, 2))
    oracle = Oracle(TINY, WEIGHTS, 1.0)
    noise = oracle.noise([right])
    (judged,) = oracle.judge([right])
    assert max(judged.error) < LIMIT
    assert all(judged.decidable(noise))
    assert judged.wrong_stamps(noise) == 0
    wrong = dataclasses.replace(right, versions=(1, 0, 0, 1, 1, 2, 2, 1))
    (judged,) = oracle.judge([wrong])
    assert judged.wrong_stamps(noise) == 2
    assert max(judged.nearest) < LIMIT  # the numbers themselves are those of a version


def test_versions_that_are_alike_decide_nothing() -> None:
    row = sampled((0, 0, 0))
    oracle = Oracle(TINY, {0: WEIGHTS[0], 1: WEIGHTS[0]}, 1.0)
    (judged,) = oracle.judge([row])
    assert not any(judged.decidable(oracle.noise([row])))


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_a_log_probability_of_another_temperature_is_of_no_version(temperature: float) -> None:
    row = sampled((0, 1, 2), temperature=temperature)
    assert max(Oracle(TINY, WEIGHTS, temperature).judge([row])[0].nearest) < LIMIT
    assert min(Oracle(TINY, WEIGHTS, 1.0).judge([row])[0].nearest) > 100 * LIMIT


def test_the_end_is_impossible_before_the_minimum() -> None:
    row = dataclasses.replace(sampled((0, 0, 0)), answer=(50, END, END), minimum=3)
    first, second, third = answer_logprobs(from_weights(TINY, WEIGHTS[0]), row, 1.0).tolist()
    assert second == -torch.inf
    assert first > -torch.inf
    assert third > -torch.inf


def test_a_version_that_never_was_is_no_version() -> None:
    row = dataclasses.replace(sampled((0, 0)), versions=(0, 7))
    (judged,) = Oracle(TINY, WEIGHTS, 1.0).judge([row])
    assert judged.error == [torch.inf, torch.inf]
    assert judged.closest == [0, 0]
