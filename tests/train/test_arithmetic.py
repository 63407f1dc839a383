"""The arithmetic task: exact problems, graded rewards that differ within a group, uneven lengths, random numbers by key alone."""

from __future__ import annotations

import random
import statistics

import pytest

from kit.train.arithmetic import CHARACTERS, END, PAD, VOCAB, encode, min_tokens, problem, reward
from kit.train.draws import uniform, whole_number
from kit.train.rollout import Problem

SUM = Problem(prompt="7+5=", answer="12")


def test_a_number_depends_on_its_whole_key_and_on_nothing_else() -> None:
    key = (7, (3, 10, 4), 2, 11)
    assert uniform(*key) == uniform(*key) == 0.016337891481984057  # on every machine
    others = [
        (8, (3, 10, 4), 2, 11),
        (7, (3, 10, 5), 2, 11),
        (7, (3, 10, 4), 3, 11),
        (7, (3, 10, 4), 2, 12),
        (7, (3, 10), 4, 2, 11),
    ]
    assert len({uniform(*key), *(uniform(*other) for other in others)}) == 6


def test_numbers_are_spread_evenly() -> None:
    many = [uniform(1, index) for index in range(4000)]
    assert min(many) >= 0.0
    assert max(many) < 1.0
    assert statistics.mean(many) == pytest.approx(0.5, abs=0.02)
    assert statistics.stdev(many) == pytest.approx(12**-0.5, abs=0.02)
    assert {whole_number(2, 4, 1, index) for index in range(100)} == {2, 3, 4}


def test_problems_are_right_and_of_their_seed_and_index() -> None:
    some = [problem(3, index) for index in range(200)]
    assert some == [problem(3, index) for index in range(200)]
    assert some != [problem(4, index) for index in range(200)]
    for each in some:
        assert str(eval(each.prompt[:-1])) == each.answer
        assert not each.answer.startswith("-")
    assert {sign for each in some for sign in "+-" if sign in each.prompt} == {"+", "-"}
    assert len(str(eval(problem(3, 1, limit=1000).prompt[:-1]))) <= 4


def test_every_token_fits_the_vocabulary() -> None:
    assert sorted([*encode(CHARACTERS), END, PAD]) == [*range(VOCAB)]


@pytest.mark.parametrize(
    ("answer", "worth"),
    [
        ([*encode("12"), END], 1.0),
        ([*encode("13"), END], 0.5 + 0.25),
        (encode("12"), 0.5 + 0.25),
        ([*encode("12+"), END], 0.5 + 0.25 * 2 / 3),
        ([*encode("99999"), END], 0.25),
        ([END], 0.0),
        ([], 0.0),
        ([*encode("==="), END], 0.0),
    ],
)
def test_rewards_are_graded(answer: list[int], worth: float) -> None:
    assert reward(SUM, answer) == pytest.approx(worth)


def test_only_the_exact_answer_gets_one() -> None:
    draw = random.Random(1)
    best = [[draw.randrange(VOCAB) for _ in range(draw.randrange(1, 6))] for _ in range(3000)]
    assert all(reward(SUM, answer) < 1.0 for answer in best if answer[:3] != [*encode("12"), END])


def test_rewards_of_random_answers_differ_within_nearly_every_group() -> None:
    draw = random.Random(1)
    varied = 0
    for index in range(200):
        lengths = [min_tokens(5, index, sample, low=2, high=16) for sample in range(4)]
        rewards = {reward(problem(5, index), [draw.randrange(VOCAB - 2) for _ in range(length)]) for length in lengths}
        varied += len(rewards) > 1
    assert varied >= 190


def test_a_few_samples_straggle() -> None:
    lengths = [min_tokens(2, index, sample, low=3, high=20) for index in range(100) for sample in range(8)]
    assert set(lengths) == {*range(3, 11), 20}
    assert lengths.count(20) / len(lengths) == pytest.approx(1 / 8, abs=0.05)
    assert min_tokens(2, 5, 1, low=6, high=8) in {6, 8}
