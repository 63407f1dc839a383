"""The oracle finds the version of each token, and the errors in a sample."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kit.actors.samples import SampleRow
from kit.labs.stream.ranks.oracle import Oracle
from kit.megatron.config import GEOMETRIES
from kit.train.arithmetic import END
from kit.train.plain import PlainModel, from_weights, initial_weights

TINY = dataclasses.replace(GEOMETRIES["tiny"], layers=2)
WEIGHTS = {
    version: {name: value * (1 + 0.05 * version) for name, value in initial_weights(TINY, 3).items()}
    for version in range(3)
}
MODELS = {version: from_weights(TINY, weights) for version, weights in WEIGHTS.items()}
LIMIT = 1e-5
LONG = (0, 0, 0, 1, 1, 2, 2, 2)


@torch.no_grad()
def sampled(
    versions: tuple[int, ...],
    *,
    temperature: float = 1.0,
    minimum: int = 2,
    keeps: bool = True,
    models: dict[int, PlainModel] = MODELS,
) -> SampleRow:
    """A sample as a replica records it: one token per forward, the KV cache kept or recomputed when the weights change."""
    prompt, answer = (4, 9, 10, 13), tuple(range(len(versions)))
    tokens, model, recorded = prompt + answer, models[versions[0]], []
    cache, held = model.empty_cache(1, len(tokens)), 0
    for place, version in enumerate(versions):
        if models[version] is not model:
            model, held = models[version], held if keeps else 0
        for at in range(held, len(prompt) + place):
            after = model(torch.tensor([[tokens[at]]]), cache=cache, start=at)[0, -1]
        held = len(prompt) + place
        if place < minimum:
            after[END] = -torch.inf
        recorded.append(float((after / temperature).log_softmax(-1)[answer[place]]))
    return SampleRow(
        group=0,
        sample=0,
        attempt=0,
        replica="replica 0",
        prompt=prompt,
        answer=answer,
        logprobs=tuple(recorded),
        versions=versions,
        minimum=minimum,
        reward=0.0,
    )


@pytest.mark.parametrize("keeps", [True, False])
def test_right_stamps_are_confirmed_and_shuffled_ones_are_found(keeps: bool) -> None:
    right = sampled(LONG, keeps=keeps)
    oracle = Oracle(TINY, WEIGHTS, keeps=keeps)
    noise = oracle.noise(WEIGHTS, [right])
    judged = oracle.judge(right)
    assert max(judged.error) < LIMIT
    assert all(judged.decidable(noise))
    assert judged.wrong_stamps(noise) == []
    assert max(judged.other_policy[3:]) > 10 * LIMIT  # the effect of the sync on the cache can be seen
    wrong = dataclasses.replace(right, versions=(0, 0, 0, 0, 1, 2, 2, 1))
    assert {3, 7} <= {*oracle.judge(wrong).wrong_stamps(noise)} <= {3, 4, 5, 6, 7}


@pytest.mark.parametrize("keeps", [True, False])
def test_the_distributions_are_those_that_the_tokens_were_drawn_from(keeps: bool) -> None:
    row = sampled(LONG, keeps=keeps, temperature=1.3)
    probabilities = Oracle(TINY, WEIGHTS, keeps=keeps, temperature=1.3).distributions(row)
    assert probabilities.shape == (len(LONG), TINY.vocab)
    assert torch.allclose(probabilities.sum(1), torch.ones(len(LONG), dtype=torch.float64))
    chosen = probabilities.gather(1, torch.tensor(row.answer)[:, None])[:, 0].log()
    assert float((chosen - torch.tensor(row.logprobs)).abs().max()) < LIMIT
    assert [float(value) == 0 for value in probabilities[:, END]] == [True, True, *[False] * (len(LONG) - 2)]


def test_a_cache_that_was_kept_where_it_must_not_be_shows() -> None:
    judged = Oracle(TINY, WEIGHTS, keeps=False).judge(sampled(LONG, keeps=True))
    assert max(judged.error[:3]) < LIMIT
    assert max(judged.error[3:5]) > 10 * LIMIT
    assert max(judged.other_policy[3:5]) < LIMIT


def test_versions_that_are_alike_decide_nothing() -> None:
    row = sampled((0, 0, 0))
    same = {0: WEIGHTS[0], 1: WEIGHTS[0]}
    oracle = Oracle(TINY, same)
    assert not any(oracle.judge(row).decidable(oracle.noise(same, [row])))


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_a_log_probability_of_another_temperature_is_of_no_version(temperature: float) -> None:
    row = sampled((0, 1, 2), temperature=temperature)
    assert max(Oracle(TINY, WEIGHTS, temperature=temperature).judge(row).nearest) < LIMIT
    assert max(Oracle(TINY, WEIGHTS).judge(row).nearest) > 100 * LIMIT


@pytest.mark.parametrize("minimum", [0, 3])
def test_the_end_counts_only_after_the_minimum(minimum: int) -> None:
    row = sampled((0, 0, 1, 1), minimum=minimum)
    assert max(Oracle(TINY, WEIGHTS).judge(row).error) < LIMIT
    other = dataclasses.replace(row, minimum=2)
    errors = Oracle(TINY, WEIGHTS).judge(other).error
    assert [error > 100 * LIMIT for error in errors] == [(place < 2) != (place < minimum) for place in range(4)]


def test_a_version_that_never_was_is_no_version() -> None:
    row = dataclasses.replace(sampled((0, 0)), versions=(0, 7))
    judged = Oracle(TINY, WEIGHTS).judge(row)
    assert judged.error[0] < LIMIT
    assert judged.error[1] == torch.inf
    assert judged.closest == [0, 0]


def test_bfloat16_is_judged_by_its_own_noise() -> None:
    """Right samples are within four noises of their versions, and wrong stamps are found; by the noise of float32 nothing is right."""
    weights = {
        version: {name: value.bfloat16() * (1 + version) for name, value in initial_weights(TINY, 3).items()}
        for version in range(3)
    }
    models = {version: from_weights(TINY, table, dtype=torch.bfloat16) for version, table in weights.items()}
    right = sampled(LONG, models=models)
    fine, coarse = (Oracle(TINY, weights, sampled_in=dtype) for dtype in (torch.float32, torch.bfloat16))
    noise = coarse.noise(weights, [right])
    judged = coarse.judge(right)
    assert LIMIT < max(judged.nearest) < coarse.apart * noise
    assert sum(judged.decidable(noise)) > len(LONG) / 2
    assert judged.wrong_stamps(noise) == []
    assert fine.judge(right).apart * fine.noise(weights, [right]) < max(judged.nearest)
    assert coarse.judge(dataclasses.replace(right, versions=(1, 1, 1, 2, 2, 0, 0, 0))).wrong_stamps(noise)
