"""Lengths and waits with long tails: within their ranges, the same for the same key, with the tail that they claim."""

from __future__ import annotations

import statistics

from kit.train.draws import answer_length, long_tailed, reward_wait_s, tool_stalls
from tests.labs.share.conftest import share


def test_a_few_draws_have_much_of_the_sum() -> None:
    draws = sorted(long_tailed(100, 1600, "key", number) for number in range(4000))
    assert (draws[0], draws[-1]) == (100, 1600)
    assert 1.7 < statistics.median(draws) / 100 < 1.9
    assert 0.2 < sum(draws[-200:]) / sum(draws) < 0.3  # 5 % of them
    assert long_tailed(0, 0, "key") == 0


def test_tools_are_called_within_an_answer_at_places_of_their_own() -> None:
    loop = share(**{"a.tail": True, "a.answer": (1, 9), "a.tools": 3, "a.tool_ms": (5, 50)}).loops["a"]
    for group in range(40):
        length, stalls = answer_length(loop, group, 0), tool_stalls(loop, group, 0)
        assert len(stalls) == min(3, length - 1)
        assert all(0 < place < length for place in stalls)
        assert all(0.005 <= seconds <= 0.05 for seconds in stalls.values())
    plain = share().loops["a"]
    assert tool_stalls(plain, 0, 0) == {}


def test_rewards_of_a_step_depend_on_seed_and_step() -> None:
    waits = [reward_wait_s(seed, (100, 900), step) for seed in (1, 2) for step in range(5)]
    assert len({*waits}) > 5
    assert waits[0] == reward_wait_s(1, (100, 900), 0)
