"""Generation on real replicas: answers do not depend on batching or restarts; stamps and log-probabilities hold when recomputed."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch

from kit.errors import BadInput
from kit.megatron.serve import AnswerSpan, Flight, Prefix, PrefixCache, PromptRequest, distribution, pick
from kit.world import World
from tests.worlds import world_of

LIMIT = 1e-5

each_width = pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])


world = world_of(2)


def ask(world: World, function: str, **arguments: Any) -> Any:
    """Return the answer that both ranks share: they belong to one replica, or to two replicas with the same weights."""
    first, second = world.call(f"tests.megatron.ranks.generate:{function}", **arguments)
    assert first == second
    return first


@pytest.mark.drawn(1, of="bits")
@pytest.mark.parametrize(
    "settings",
    [
        {"tp": 1},
        {"tp": 2},
        pytest.param({"tp": 1, "dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param({"tp": 1, "experts": 2}, marks=pytest.mark.slow),
    ],
)
def test_bits_do_not_depend_on_other_requests_nor_on_cancelling_and_resuming(
    world: World, settings: dict[str, Any]
) -> None:
    found = ask(world, "company", **settings)
    assert found["among"] == found["alone"]
    assert found["resumed"] == found["alone"]
    assert len(found["alone"][0]["tokens"]) >= 9
    assert all(answer["spans"] == [[0, 0, len(answer["tokens"]), False]] for answer in found["alone"])
    assert len({tuple(tokens) for tokens in found["samples"]}) == 3
    assert found["cancelled"] == "cancelled"


@each_width
def test_recorded_log_probabilities_are_those_of_the_distribution_that_was_sampled(world: World, tp: int) -> None:
    found = ask(world, "recorded", tp=tp)
    assert len(found["errors"]) == 6
    assert found["tokens"] > 30
    assert max(found["errors"]) <= LIMIT
    assert min(found["wrong"]) > 10 * LIMIT
    assert found["short"] == []


@pytest.mark.drawn(1, of="versions")
@pytest.mark.parametrize(
    ("tp", "at_sync"),
    [
        (1, "keep"),
        (2, "keep"),
        (1, "recompute"),
        pytest.param(2, "recompute", marks=pytest.mark.slow),
        pytest.param(1, "abort", marks=pytest.mark.slow),
    ],
)
def test_every_token_has_the_version_that_its_forward_ran_with(world: World, tp: int, at_sync: str) -> None:
    found = ask(world, "synced", tp=tp, at_sync=at_sync)
    kept = at_sync == "keep"
    assert len(found["answers"]) == 3
    for answer in found["answers"]:
        last = len(answer["tokens"]) - 6
        assert answer["spans"] == [[0, 0, 3, False], [1, 3, 3, kept], [2, 6, last, kept]]
    assert max(found["stamped"]) <= LIMIT
    assert statistics.median(found["apart"]) > 10 * LIMIT
    assert found["unknown"] == "inf"
    assert found["unknown_true"] <= LIMIT
    assert found["restored"]
    assert min(found["moved"]) > 10 * LIMIT
    for index, span in enumerate(found["other_cache"]):
        if index % 3 == 0:
            assert set(span) == {None}
        else:
            assert statistics.median(span) > 10 * LIMIT


def test_a_recomputed_cache_has_the_bits_of_a_request_that_was_resumed(world: World) -> None:
    found = ask(world, "restarted")
    assert found["same"]
    assert found["spans"] == [[0, 0, 4, False], [1, 4, found["spans"][1][2], False]]


def test_the_samples_of_a_group_share_the_kv_of_their_prompt_within_a_version(world: World) -> None:
    found = ask(world, "prefixes")
    groups, tight, broken = found["counts"][:3], found["counts"][3:6], found["counts"][6:]
    assert groups == [[3, 1, 1], [6, 2, 2], [9, 3, 1]]
    assert found["emptied"] == 0
    assert tight == [[1, 1, 1], [2, 2, 1], [3, 3, 1]]
    assert 0 < found["tight"] <= found["size"] // 2
    assert broken == [[1, 1, 1], [3, 1, 1]]
    assert min(found["stale"]) > 10 * LIMIT


def test_a_prefix_is_of_its_version_and_the_least_recently_used_goes_first() -> None:
    prefix = Prefix({1: (torch.zeros(4), torch.zeros(4))}, torch.zeros(2))
    cache = PrefixCache(limit=2 * prefix.size)
    cache.put(0, (1,), prefix)
    cache.put(0, (2,), prefix)
    assert cache.get(1, (1,)) is None
    assert cache.get(0, (1,)) is prefix
    cache.put(0, (3,), prefix)
    assert [cache.get(0, (token,)) is prefix for token in (1, 2, 3)] == [True, False, True]
    assert cache.size == 2 * prefix.size
    assert prefix.size == 40
    tight = PrefixCache(limit=39)
    tight.put(0, (1,), prefix)
    assert (len(tight), tight.size) == (0, 0)


def test_a_span_is_as_long_as_its_version_lasts() -> None:
    flight = Flight(request=PromptRequest(id="r", prompt=(1,), sample=0, seed=0, end=9, max_tokens=9))
    for token, version in enumerate((0, 0, 1, 1, 1, 2)):
        flight.write(token, -1.0, version)
    flight.kept = True
    flight.write(6, -1.0, 2)
    stamps = [(0, 0, 2, False), (1, 2, 3, False), (2, 5, 1, False), (2, 6, 1, True)]
    assert flight.spans == [AnswerSpan(*stamp) for stamp in stamps]


def test_bad_calls_are_named_and_change_nothing(world: World) -> None:
    found = ask(world, "refused")
    wanted = {
        "twice": "KitError: request 1.0 is already in flight",
        "long": "BadInput: request 0.1 may reach 44 tokens; the model's limit is 32",
        "token": "BadInput: request 0.2 holds a token outside of the vocabulary, which has 16",
        "below": "BadInput: request 0.2 holds a token outside of the vocabulary, which has 16",
        "finished": "BadInput: request 0.0 can only go on from an unfinished answer to the same request",
        "other": "BadInput: request 2.0 can only go on from an unfinished answer to the same request",
        "cancel": "KitError: request nobody is not in flight",
        "back": "KitError: version 3 does not follow version 3: versions only increase",
        "drain": "KitError: 1 requests are in flight; with at_sync=drain decode them to their ends before a sync",
        "untouched": "True",
        "asleep": "KitError: this replica is asleep: wake it and fill its weights before it decodes",
        "nan": "KitError: logits are not finite: the replica's weights are incomplete or broken",
        "nan_later": "KitError: logits are not finite: the replica's weights are incomplete or broken",
        "recovered": "True",
    }
    assert found == wanted


def asked(**settings: Any) -> PromptRequest:
    wanted: dict[str, Any] = {"id": "a", "prompt": (1,), "sample": 0, "seed": 0, "end": 2, "max_tokens": 4} | settings
    return PromptRequest(**wanted)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prompt": ()}, "has no prompt"),
        ({"temperature": 0.0}, "temperature=0.0 is not allowed: it must be above 0"),
        ({"min_tokens": 5}, "min_tokens=5, max_tokens=4 is not allowed"),
        ({"max_tokens": 0}, "use 0 <= min <= max and max >= 1"),
    ],
)
def test_a_request_is_checked(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        asked(**settings)


def test_the_distribution_is_divided_by_the_temperature_and_masks_the_end() -> None:
    logits = torch.tensor([0.5, -1.0, 2.0])
    free = distribution(logits, asked(min_tokens=2, temperature=2.0), 2).exp()
    assert free.tolist() == pytest.approx((logits.double() / 2).softmax(0).tolist())
    masked = distribution(logits, asked(min_tokens=2, temperature=2.0), 1).exp()
    assert masked[2] == 0
    assert float(masked.sum()) == pytest.approx(1.0)
    assert float(masked[0] / masked[1]) == pytest.approx(float(free[0] / free[1]))
    assert logits.tolist() == [0.5, -1.0, 2.0]


def test_a_token_is_picked_as_often_as_it_is_likely() -> None:
    chances = [0.5, 0.0, 0.2, 0.3, 0.0]
    logprobs = torch.tensor(chances, dtype=torch.float64).log()
    steps = 1000
    picked = [pick(logprobs, (step + 0.5) / steps) for step in range(steps)]
    assert [picked.count(token) / steps for token in range(5)] == pytest.approx(chances, abs=1 / steps)
    assert pick(logprobs, 0.0) == 0
    assert pick(logprobs, 1 - 2.0**-53) == 3
    assert pick(torch.tensor([-torch.inf, 0.0], dtype=torch.float64), 0.0) == 1
