"""Independent draws leave no evidence against them; numbers that are reused, or not uniform, do."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch

from kit.labs.stream.ranks.draws import Drawn, evidence, mean_evidence
from kit.labs.stream.rules import log_ways

VOCABULARY, GROUPS, SAMPLES = 17, 3, 4
Draw = Callable[[random.Random, int, int, int], float]  # of group, sample and position


def samples(draw: Draw, seed: int, *, most: int = 16, power: float = 1.0) -> dict[int, list[Drawn]]:
    """Answers of changing length, sampled with these numbers from random distributions."""
    chance = random.Random(seed)
    return {
        group: [
            answer(lambda place, key=(group, sample): draw(chance, *key, place), chance, most, power)  # type: ignore[misc]
            for sample in range(SAMPLES)
        ]
        for group in range(GROUPS)
    }


def answer(number: Callable[[int], float], chance: random.Random, most: int, power: float) -> Drawn:
    rows: list[torch.Tensor] = []
    tokens: list[int] = []
    while len(tokens) < most and (len(tokens) < most // 2 or tokens[-1]):
        weights = torch.tensor([chance.random() ** 3 for _ in range(VOCABULARY)], dtype=torch.float64)
        rows.append(weights / weights.sum())
        used = rows[-1] ** power
        ends = (used / used.sum()).cumsum(0)
        tokens.append(min(int((ends <= number(len(tokens))).sum()), VOCABULARY - 1))
    return Drawn(torch.stack(rows), tokens)


def independent(chance: random.Random, *_: int) -> float:
    return chance.random()


def fixed(*key: int) -> float:
    return random.Random(repr(key)).random()


WRONG: dict[str, Draw] = {
    "one number for all positions of a sample": lambda _, group, sample, __: fixed(group, sample),
    "one number for two neighbouring positions": lambda _, group, sample, place: fixed(group, sample, place // 2),
    "one number for all samples of a group at a position": lambda _, group, __, place: fixed(group, place),
    "numbers below one half": lambda chance, *_: chance.random() ** 3,
    "numbers above one half": lambda chance, *_: 1 - chance.random() ** 3,
    "numbers near one half": lambda chance, *_: 0.3 + 0.4 * chance.random(),
    "numbers far from one half": lambda chance, *_: (0.8 + 0.4 * chance.random()) % 1,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_law_that_is_not_independent_and_uniform_leaves_evidence(name: str) -> None:
    logs = evidence(samples(WRONG[name], 1))
    assert logs[name] > 6
    assert mean_evidence(logs.values()) > 6


@pytest.mark.parametrize(("name", "power"), [("a lower temperature", 4.0), ("a higher temperature", 0.1)])
def test_another_temperature_leaves_evidence(name: str, power: float) -> None:
    logs = evidence(samples(independent, 1, power=power))
    assert logs[name] > 6


def test_one_wrong_sample_of_many_is_enough_where_the_law_is_simple() -> None:
    right = samples(independent, 2)
    wrong = samples(WRONG["one number for all positions of a sample"], 2, most=40)
    logs = evidence({**right, 7: wrong[0][:1]})
    assert logs["one number for all positions of a sample"] > 6


@pytest.mark.slow
def test_the_mean_evidence_of_right_sampling_is_one() -> None:
    """The false-alarm rate follows from this by Markov's inequality; short answers keep the variance of the estimate small."""
    runs = 2000
    logs = [
        mean_evidence(evidence({0: [draw]}).values())
        for seed in range(runs)
        for draw in samples(independent, seed, most=2)[0][:1]
    ]
    assert 0.8 < sum(10**value for value in logs) / runs < 1.2
    assert max(mean_evidence(evidence(samples(independent, seed)).values()) for seed in range(40)) < 3


def test_the_choice_of_trained_groups_lowers_the_evidence() -> None:
    assert log_ways(20, 20) == log_ways(0, 0) == 0.0
    assert log_ways(24, 20) == pytest.approx(math.log10(10626))
    assert log_ways(3, 5) == 0.0  # a ledger that lacks requests
    assert log_ways(4000, 2000) > 1000
