"""Settings that cannot work are refused in one sentence each, before anything starts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kit.errors import BadInput
from kit.stream.core import Controller
from kit.stream.settings import SAMPLERS, StreamSettings, refusals


def test_the_defaults_work() -> None:
    assert refusals(StreamSettings()) == ()
    assert (StreamSettings().minibatch, StreamSettings().logprobs) == (8, ("previous",))
    assert StreamSettings().slots == StreamSettings().places  # every group in the buffer may be in flight


def test_only_a_sampler_whose_gate_counts_exactly_replaces_what_is_too_old() -> None:
    """A group of a step that shrank comes too late; another one in its place would belong to no step."""
    assert {name for name, sampler in SAMPLERS.items() if sampler.refills} == {"weight-fifo"}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"places": 15}, "places=15 is too few: the sampler in-order needs 16 for groups=8 and window=1"),
        (
            {"sampler": "windowed", "places": 3, "min_groups": 4},
            "places=3 is less than min_groups=4, so no step can start",
        ),
        (
            {"train_global_batch_size": 30},
            "train_global_batch_size=30 is not a multiple of group=4; a group is never split",
        ),
        (
            {"train_global_batch_size": 20},
            "train_global_batch_size=20 does not divide the 8 x 4 = 32 samples of a step",
        ),
        ({"min_groups": 9}, "min_groups=9 exceeds the 8 groups of a step"),
        ({"floor": 9}, "floor=9 exceeds the 8 groups of a step"),
        (
            {"group": 1, "train_global_batch_size": 8},
            "group=1 gives every sample the advantage 0; use at least 2 samples per group",
        ),
        (
            {"correction": False},
            (
                "window=1 trains on stale samples with neither correction nor recorded log-probabilities; "
                "use correction=true or previous=recorded"
            ),
        ),
        ({"sampler": "strict"}, "the sampler strict allows no window; use window=0 instead of window=1"),
        ({"replicas": 0}, "replicas=0 must be at least 1"),
        ({"window": -1}, "window=-1 must be at least 0"),
        (
            {"sampler": "newest"},
            "sampler='newest' is neither one of strict, in-order, weight-fifo, windowed, ready-first, capacity nor a module:Class",
        ),
    ],
)
def test_each_refusal_is_one_sentence(change: dict[str, Any], sentence: str) -> None:
    assert refusals(StreamSettings(**change)) == (sentence,)
    with pytest.raises(BadInput) as raised:
        Controller(StreamSettings(**change))
    assert str(raised.value) == sentence


def test_recorded_log_probabilities_are_enough_without_correction() -> None:
    assert refusals(StreamSettings(correction=False, previous="recorded")) == ()
    assert refusals(StreamSettings(correction=False, window=0)) == ()


def test_a_word_that_was_read_from_a_file_means_what_the_same_word_of_the_source_means() -> None:
    read = json.loads('["recomputed", "off"]')
    settings = StreamSettings(previous=read[0], reference=read[1])
    assert settings.logprobs == ("previous",)
